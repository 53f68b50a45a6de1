"""Tests that plans work with expert parallelism: Megatron's experts and all-to-all under a plan give the losses and
gradients of stock Megatron on one rank.
"""

from __future__ import annotations

import pytest
from megatron_runs import Arrays, Case, alone, check, planned

from flexcp.measure.ranks import RankPool

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": 48,
    "add_bias_linear": False,
}
CASES = {
    "4 ranks": Case(ep=4, config=EXPERTS),
    "4 ranks in pairs, unequal tokens": Case(ep=2, cp=2, config=EXPERTS, tokens="priced", strategy="blocks"),
    "2 ranks a stage": Case(ep=2, pp=2, config=EXPERTS, micro_batches=2),
}


@pytest.fixture(scope="module")
def stock(four: RankPool) -> tuple[list[float], Arrays, Arrays]:
    found: tuple[list[float], Arrays, Arrays] = four.run(alone, Case(config=EXPERTS), 3)[0]
    return found


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_of_all_experts_equal_one_rank(
    four: RankPool, stock: tuple[list[float], Arrays, Arrays], name: str
) -> None:
    results = four.run(planned, CASES[name], 3, stock[2])
    check(results, stock)
    counts = [tuple(share.counts) for _, _, share in results]
    assert (len(set(counts)) > 1) == (CASES[name].tokens == "priced")
