"""Proves the positions of tokens: offsets in plain documents, depths under a shared question, by hand and on real
ranks.

Also that functions which assume one next token for each row refuse a branching document with one line that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flexcp
from flexcp.batch import make_batch
from flexcp.executor.local_rows import next_tokens
from flexcp.frameworks import huggingface, pipeline, shared_batch
from flexcp.masks import Mask, depths
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

QUESTION = flexcp.masks.shared_question([4, 4, 4], 6)
DEPTHS = [0, 1, 2, 3, 4, 5, *[6, 7, 8, 9] * 3]


def planned(lengths: list[int], mask: Any = None, ranks: int = 1, **options: Any) -> Plan:
    planner = flexcp.Planner(2, 1, 8, dtype="float64", cluster=flexcp.cluster("cpu", 1, ranks), strategy="blocks")
    return planner(lengths, mask, **options)


@pytest.mark.parametrize(
    ("mask", "length", "wanted"),
    [
        (QUESTION, 18, DEPTHS),
        (flexcp.masks.shared_question([2, 0, 3], 1), 6, [0, 1, 2, 1, 2, 3]),
        (flexcp.masks.shared_question([2, 2], 0), 4, [0, 1, 0, 1]),
        (flexcp.masks.shared_question(3, 0.25), 16, [0, 1, 2, 3, *[4, 5, 6, 7] * 3]),
        (
            flexcp.masks.shared_question(3, 0.2),
            12,
            [0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5],
        ),  # the last answer takes the remainder
        (flexcp.masks.shared_question(2, 0.0), 5, [0, 1, 0, 1, 2]),
        (flexcp.from_slices(5, [(3, 5, 3, 5, -9, 0), (0, 5, 0, 1, None, 0), (1, 3, 1, 3, -2, 0)]), 5, [0, 1, 2, 1, 2]),
    ],
)
def test_answers_go_on_from_their_question(mask: Mask, length: int, wanted: list[int]) -> None:
    found = depths(mask, length)
    assert found is not None and found.tolist() == wanted
    # A token sees itself and its path from the root, so it sees one key more than its depth.
    assert (mask.dense(length).sum(1) - 1).tolist() == wanted


@pytest.mark.parametrize(
    ("mask", "length"),
    [
        (flexcp.causal(), 9),
        (flexcp.full(), 9),
        (flexcp.window(3), 9),
        (flexcp.masks.prefix(4), 9),
        (flexcp.masks.causal_blockwise(2, 1), 9),
        (flexcp.masks.shared_question(1, 0.3), 9),
        (flexcp.masks.shared_question(20, 0.3), 9),  # more answers than tokens: all but the last are empty
        (flexcp.masks.shared_question(5, 1.0), 9),
        (flexcp.masks.shared_question([5], 4), 9),
        (flexcp.masks.shared_question([0, 5, 0], 4), 9),
        (flexcp.from_slices(9, []), 9),
        (flexcp.from_slices(9, [(0, 9, 0, 9, None, 0)]), 9),
        (flexcp.from_slices(9, [(0, 4, 0, 4, None, 0), (4, 9, 4, 9, None, 0)]), 9),  # chunks of one sequence
        (flexcp.from_slices(9, [(0, 9, 0, 2, None, None), (2, 5, 2, 5, None, 0), (5, 9, 5, 9, None, 0)]), 9),
        (flexcp.from_slices(9, [(0, 9, 0, 2, None, 0), (2, 5, 2, 5, -1, 0), (5, 9, 5, 9, None, 0)]), 9),
        (flexcp.from_slices(9, [(0, 9, 0, 2, None, 0), (2, 5, 2, 5, None, 0)]), 9),
    ],
)
def test_other_documents_are_one_sequence(mask: Mask, length: int) -> None:
    assert depths(mask, length) is None


@pytest.mark.parametrize(
    "mask", [QUESTION, flexcp.masks.shared_question([9, 9], 0), flexcp.masks.shared_question(4, 0.2)]
)
def test_a_plan_from_a_file_says_the_same(mask: Mask) -> None:
    plan = planned([18], mask)
    again = flexcp.load_plan(flexcp.save_plan(plan))
    assert again.batch.branches.keys() == {0}
    expected = depths(mask, 18).tolist()  # type: ignore[union-attr]
    assert flexcp.bind(again).positions.tolist() == flexcp.bind(plan).positions.tolist() == expected


def positions_on_rank(group: Any, plan: Plan) -> tuple[list[int], list[int]]:
    step = flexcp.bind(plan, group)
    return step.indices.tolist(), step.positions.tolist()


@pytest.mark.parametrize("layout", ["free", "zigzag"])
def test_positions_on_ranks(pool: RankPool, layout: str) -> None:
    plan = planned(
        [5, 18, 16], [flexcp.causal(), QUESTION, flexcp.masks.shared_question(3, 0.25)], ranks=3, layout=layout
    )
    wanted = [*range(5), *DEPTHS, 0, 1, 2, 3, *[4, 5, 6, 7] * 3]
    found = dict(
        pair
        for indices, places in pool.run(positions_on_rank, plan, ranks=3)
        for pair in zip(indices, places, strict=True)
    )
    assert [found[t] for t in range(39)] == wanted


def test_pads_stand_at_0() -> None:
    step = flexcp.bind(planned([18], QUESTION, tokens="equal", pad_to=10))
    assert step.positions.tolist() == [*DEPTHS, 0, 0]


def test_masks_that_disagree_are_refused() -> None:
    masks = {"all": (flexcp.causal(), 1), "answers": (QUESTION, 3)}
    step = flexcp.bind(planned([18], masks=masks))
    with pytest.raises(
        ValueError, match=r"document 0 has the masks 'all' \(causal\), 'answers' \(slices\[4 for 18 tokens\]\)"
    ) as raised:
        _ = step.positions
    assert "\n" not in str(raised.value)


def test_masks_that_agree_are_not() -> None:
    named = flexcp.masks.shared_question(3, 0.25)
    explicit = flexcp.masks.shared_question([4, 4, 4], 4)
    step = flexcp.bind(planned([16], masks={"a": (named, 1), "b": (explicit, 3)}))
    assert step.positions.tolist() == [0, 1, 2, 3, *[4, 5, 6, 7] * 3]


TOKENS = torch.arange(23)
REFUSING: dict[str, Callable[[Any], Any]] = {
    "labels": lambda step: step.labels(TOKENS),
    "roll": lambda step: step.roll(TOKENS),
    "loss": lambda step: step.loss(torch.zeros(23, 23), TOKENS, without_attention=True),
    "next_tokens": lambda step: next_tokens(TOKENS, step.plan.batch, -100),
    "huggingface.inputs with labels": lambda step: huggingface.inputs(TOKENS, step, labels=TOKENS),
    "rows of a shared batch": lambda step: shared_batch.rows_of(step, TOKENS, TOKENS),
    "pipeline labels": lambda step: batches(step).labels([TOKENS[:5], TOKENS[5:]]),
    "pipeline loss": lambda step: batches(step).loss([TOKENS[:5], TOKENS[5:]]),
}


def batches(step: Any) -> pipeline.PlannedMicroBatches:
    return pipeline.PlannedMicroBatches([([0, 1], step.plan)])


@pytest.mark.parametrize("mask", [QUESTION, flexcp.masks.shared_question(3, 0.34)], ids=["lengths", "share"])
@pytest.mark.parametrize("name", REFUSING)
def test_who_knows_one_next_token_refuses(name: str, mask: Mask) -> None:
    step = flexcp.bind(planned([5, 18], [flexcp.causal(), mask]))
    with pytest.raises(NotImplementedError) as raised:
        REFUSING[name](step)
    words = str(raised.value)
    assert f"document 1 branches under its mask {mask}" in words and "step.edges(tokens)" in words and "\n" not in words


@pytest.mark.parametrize("name", REFUSING)
def test_plain_documents_are_not_refused(name: str) -> None:
    mask = flexcp.masks.shared_question(1, 0.34)
    assert REFUSING[name](flexcp.bind(planned([5, 18], [flexcp.causal(), mask]))) is not None


def test_branches_are_looked_for_only_where_there_may_be_some() -> None:
    batch = make_batch(np.full(1000, 7), flexcp.causal())
    assert batch.branches == {}
    assert make_batch([4, 18], [flexcp.causal(), QUESTION]).branches.keys() == {1}
