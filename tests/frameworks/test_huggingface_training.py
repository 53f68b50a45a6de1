"""Tests that Hugging Face models of several families train under flexcp as on one process: the same loss, and the same
gradient of every parameter.

The single process runs one document at a time through plain dense attention, without flexcp. CI runs combinations of
family, strategy, layout, ranks and dtype in which every pair occurs; ``make models`` runs all combinations for 50
steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch

from flexcp.measure.ranks import RankPool
from lib.model_runs import (
    FAMILIES,
    LAYOUTS,
    LIMITS,
    RANKS,
    STRATEGIES,
    Run,
    Trained,
    difference,
    make_config,
    make_plan,
    train_alone,
    train_on_ranks,
)

DTYPES = tuple(LIMITS)


def pairwise() -> list[Run]:
    """Return every family under every strategy, with layouts, ranks and dtypes chosen so that all pairs occur. The
    strategy ``groups`` places tokens itself, so it has no other layout than ``free``.
    """
    runs = []
    for number, (family, strategy) in enumerate(product(FAMILIES, STRATEGIES)):
        at, turn = divmod(number, len(STRATEGIES))
        layout = LAYOUTS[(at + turn) % 2] if strategy != "groups" else "free"
        dtype = DTYPES[(at // 2 + turn // 2 + number) % 2]
        runs.append(Run(family, strategy, layout, RANKS[(number + at) % 3], dtype, steps=2, packed=number % 5 != 0))
    return runs


@cache
def alone(family: str, dtype: str, packed: bool, steps: int) -> Trained:
    return train_alone(Run(family, dtype=dtype, packed=packed, steps=steps))


def test_the_choice_holds_every_pair() -> None:
    runs = pairwise()
    seen = {
        (a, b) for r in runs for a, b in combinations([r.family, r.strategy, r.layout, r.ranks, r.dtype, r.packed], 2)
    }
    factors = [list(FAMILIES), STRATEGIES, LAYOUTS, RANKS, DTYPES]
    for one, other in combinations(factors, 2):
        missing = set(product(one, other)) - seen - {("groups", "contiguous")}
        assert not missing


@pytest.mark.parametrize("run", pairwise(), ids=lambda r: f"{r.family}-{r.strategy}-{r.layout}-{r.ranks}-{r.dtype}")
def test_losses_and_gradients_are_those_of_one_process(pool: RankPool, run: Run) -> None:
    right = alone(run.family, run.dtype, run.packed, run.steps)
    answers = pool.run(train_on_ranks, run, ranks=run.ranks)
    off, (loss, gradient) = difference(answers[0], right), LIMITS[run.dtype]
    assert off.loss <= loss
    assert off.gradient <= gradient
    assert len({a.digest for a in answers}) == 1, "ranks hold other weights"
    assert right.losses[0] != right.losses[1]


def test_float32_stays_within_its_limits_over_ten_steps(pool: RankPool) -> None:
    run = Run("gemma2", ranks=3, dtype="float32", steps=10)
    off = difference(pool.run(train_on_ranks, run, ranks=3)[0], train_alone(run))
    assert off.loss <= 1e-5
    assert off.gradient <= 1e-4


def test_ranks_without_a_token_take_part(pool: RankPool) -> None:
    """With documents of two and one tokens on four ranks, models never get empty inputs, and gradients are complete."""
    run = Few("llama", "dp", ranks=4, steps=2)
    plan = make_plan(run, make_config("llama"), 0)
    assert 0 in plan.placement.tokens
    off = difference(pool.run(train_on_ranks, run, ranks=4)[0], train_alone(run))
    assert off.loss <= 1e-9
    assert off.gradient <= 1e-9


def test_padded_equal_counts_change_nothing(pool: RankPool) -> None:
    run = Run("mistral", ranks=3, options={"tokens": "equal", "pad_to": 8})
    tokens = make_plan(run, make_config("mistral"), 0).placement.tokens
    assert len(set(tokens.tolist())) == 1
    assert tokens[0] % 8 == 0
    off = difference(pool.run(train_on_ranks, run, ranks=3)[0], alone("mistral", "float64", True, 2))
    assert off.loss <= 1e-9
    assert off.gradient <= 1e-9


def test_the_comparison_can_fail(pool: RankPool) -> None:
    right = alone("llama", "float64", True, 2)
    wrong = replace(right, losses=[x * (1 + 1e-8) for x in right.losses])
    assert difference(wrong, right).loss > 1e-9
    bent = [{n: x + 1e-7 * x.norm() * torch.randn_like(x) for n, x in g.items()} for g in right.gradients]
    assert difference(replace(right, gradients=bent), right).gradient > 1e-9


class Few(Run):
    def lengths(self, step: int) -> list[int]:
        return [2, 1]
