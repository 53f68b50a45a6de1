"""Tests of the workloads of the kernel benchmark: the slices that flexcp runs and the mask_mod that FlexAttention runs
have the same query-key pairs.
"""

from __future__ import annotations

import pytest
import torch

from flexcp.executor.kernels.reference import dense_mask
from flexcp.measure.kernels.work import NAMES, TREE_BATCHES, TREES, mask_mod, workload

TOKENS, DOCUMENT_TOKENS = 4500, 900


@pytest.mark.parametrize("name", NAMES + TREES + TREE_BATCHES)
def test_slices_and_mask_mod_agree(name: str) -> None:
    tokens = DOCUMENT_TOKENS if name.startswith("docs") else TOKENS  # windows of 4,096 tokens need longer documents
    work = workload(name, tokens)
    mine = dense_mask(work.slices(), tokens, tokens)
    mod = mask_mod(work, torch.device("cpu"))
    at = torch.arange(tokens)
    theirs = torch.ones_like(mine) if mod is None else mod(0, 0, at[:, None], at[None, :])
    assert work.tokens == tokens
    assert int(mine.sum()) == work.pairs()
    assert torch.equal(mine, theirs)


def test_unknown_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown workload 'causall'"):
        workload("causall", 100)
    with pytest.raises(ValueError, match="docs0"):
        workload("docs0", 100)
