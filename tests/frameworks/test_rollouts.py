"""Tests of shared rollouts: over several micro-batches, every rank gets the log-probabilities of its own rollouts in
its own order, and gradients are those of data parallelism.
"""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_runs import LENGTHS, learned_alone, learned_together

from flexcp.frameworks.rollouts import RolloutPart, shared_rollouts
from flexcp.measure.ranks import RankPool


def test_every_rank_gets_its_own_rollouts_back(pool: RankPool) -> None:
    right, gradients = learned_alone()
    answers = pool.run(learned_together, ranks=3)
    for rank, (numbers, log_probs, found) in enumerate(answers):
        assert len(numbers) == len(answers[0][0]) > 1, "as many micro-batches on every rank"
        assert sorted(chain.from_iterable(numbers)) == list(range(len(LENGTHS[rank])))
        for mine, theirs in zip(log_probs, right[rank], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)  # Transformers computes norms in float32
        for mine, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert [] in answers[2][0], "a rank without a rollout in a micro-batch takes part"


def test_values_of_another_length_are_refused() -> None:
    rows: Any = SimpleNamespace()
    part = RolloutPart([1], [3], rows)
    assert part.of([torch.zeros(2), torch.ones(3)]).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"rollout 1 has 3 tokens, but 2 values"):
        part.of([torch.zeros(2), torch.ones(2)])


def test_a_rank_without_a_rollout_is_refused() -> None:
    planner: Any = None
    with pytest.raises(ValueError, match="at least one rollout"):
        next(shared_rollouts([], planner))
