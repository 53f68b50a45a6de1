"""Pools of ranks for packages that always use the whole world (Accelerate, torchtitan and Megatron-Core take no process
group).

These packages take seconds to import, so the process that ranks are forked from imports the heaviest ones once. They
also create dozens of process groups and never destroy them, and the threads of those groups keep waking up; therefore
every test file gets ranks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from flexcp.measure import ranks
from flexcp.measure.ranks import RankPool

HEAVY = {
    "megatron": ["megatron.core.models.gpt", "megatron.core.distributed", "megatron.core.pipeline_parallel"],
    "transformers": [
        "transformers.models.qwen2_vl.modeling_qwen2_vl",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        "transformers.models.qwen3_vl.modeling_qwen3_vl",
    ],
}
for package, modules in HEAVY.items():
    if find_spec(package):
        ranks.PRELOAD += [name for name in modules if name not in ranks.PRELOAD]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--trainer-steps", type=int, default=4, help="Steps that the trainers' examples run (make trainers: 20)."
    )


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """A pool whose world has two ranks."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """A pool whose world has four ranks."""
    with RankPool(4) as pool:
        yield pool
