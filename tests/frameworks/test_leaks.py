"""Tests that packed documents stay apart in every kind of layer: changing one document changes its own logits alone."""

from __future__ import annotations

import pytest
import torch
from leak_runs import LENGTHS, MODELS, PERTURBED, logits_alone, logits_on_ranks

from flexcp.measure.ranks import RankPool


@pytest.mark.parametrize("family", MODELS)
def test_a_changed_document_changes_its_own_positions_alone(pool: RankPool, family: str) -> None:
    inside = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    inside[sum(LENGTHS[:PERTURBED]) : sum(LENGTHS[: PERTURBED + 1])] = True
    right = logits_alone(family)
    for ranks in (1, 2, 4):
        before, after = pool.run(logits_on_ranks, family, ranks=ranks)[0]
        torch.testing.assert_close(
            before, right, atol=1e-5, rtol=1e-5
        )  # Transformers computes norms and softmax in float32
        moved = (after - before).abs().amax(1)
        assert bool((moved[inside] > 1e-4).all())
        assert bool((moved[~inside] < 1e-12).all())
