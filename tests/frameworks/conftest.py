"""Ranks for the frameworks' tests. Their packages take seconds to import, so the process that ranks are forked from imports them once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from flexcp.measure import ranks
from flexcp.measure.ranks import RankPool

HEAVY = {
    "megatron": ["megatron.core.models.gpt", "megatron.core.distributed", "megatron.core.pipeline_parallel"],
    "transformers": ["transformers.models.qwen2_vl.modeling_qwen2_vl"],
}
for package, modules in HEAVY.items():
    if find_spec(package):
        ranks.PRELOAD += [name for name in modules if name not in ranks.PRELOAD]


@pytest.fixture(scope="session")
def four() -> Iterator[RankPool]:
    """Four ranks that are a world of their own, which Megatron's groups span."""
    with RankPool(4) as pool:
        yield pool
