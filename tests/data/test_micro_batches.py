"""Tests of micro-batches from the loader: a step that exceeds the planner's caps comes in parts, equally many on every
rank, that together hold all of its documents.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from made import LENGTHS, Numbered, arguments, batches_by_hand

import flexcp
from flexcp.data import Batches, Loader, Planning, PlanningError, Samples
from flexcp.measure.ranks import RankPool

BUDGET = 150
CAP = 40
MICRO = Batches(micro_batches=True)


def capped(ranks: int, **options: Any) -> flexcp.Planner:
    caps = options or {"max_tokens_per_rank": CAP}
    machine = flexcp.cluster("cpu", 1, ranks)
    return flexcp.Planner(4, 2, 32, dtype="float32", cluster=machine, strategy="zigzag", **caps)


def given_out(group: Any, known: bool, workers: int) -> list[dict[str, Any]]:
    found = []
    options = {"budget": BUDGET, "group": group, "micro_batches": True, "workers": workers}
    with Loader(
        Numbered(known=known), capped(group.size()), **arguments(document_fields=["images"], **options)
    ) as loader:
        for batch in loader:
            kept = batch.documents >= 0
            found.append(
                {
                    "part": (batch.number, batch.micro_batch, batch.micro_batches),
                    "samples": batch.samples.tolist(),
                    "tokens": batch.tokens[kept].tolist(),
                    "rows": len(batch.tokens),
                    "weight": batch.weight,
                    "valid": int(batch.valid),
                    "place": loader.place,
                }
            )
    return found


@pytest.mark.parametrize(("known", "workers"), [(True, 1), (False, 0)])
def test_micro_batches_are_as_many_on_every_rank_and_hold_the_step(known: bool, workers: int, pool: RankPool) -> None:
    by_rank = pool.run(given_out, known, workers, ranks=3)
    for name in ("part", "samples", "weight", "valid", "place"):
        assert len({str([batch[name] for batch in got]) for got in by_rank}) == 1, name
    steps = batches_by_hand(list(range(len(LENGTHS))), LENGTHS, BUDGET)
    several = 0
    for number, documents in enumerate(steps):
        at = [i for i, batch in enumerate(by_rank[0]) if batch["part"][0] == number]
        parts = [by_rank[0][i] for i in at]
        assert [p["part"] for p in parts] == [(number, i, len(parts)) for i in range(len(parts))]
        assert sorted(n for p in parts for n in p["samples"]) == sorted(documents)
        assert sum(p["weight"] for p in parts) == pytest.approx(1.0)
        assert [p["weight"] for p in parts] == [p["valid"] / sum(p["valid"] for p in parts) for p in parts]
        tokens = sorted(t for got in by_rank for i in at for t in got[i]["tokens"])
        assert len(tokens) == sum(LENGTHS[n] for n in documents) == len(set(tokens))
        assert all(got[i]["rows"] <= CAP for got in by_rank for i in at)
        places = [p["place"] for p in parts]
        assert len(set(places[:-1])) <= 1 and all(place < places[-1] for place in places[:-1])
        several += len(parts) > 1
    assert several


def test_a_step_left_between_its_parts_is_done_again_as_a_whole() -> None:
    options: dict[str, Any] = {"budget": BUDGET, "micro_batches": True, "workers": 0, "document_fields": ["images"]}
    with Loader(Numbered(known=True), capped(1, max_tokens_per_rank=100), **arguments(**options)) as loader:
        all_parts = [batch.samples.tolist() for batch in loader]
        steps = iter(loader)
        first = next(steps)
        assert first.micro_batches > 1
        state = loader.state_dict()
        assert (state["place"], state["step"]) == (0, 0) and state["epoch"] == 1
    with Loader(Numbered(known=True), capped(1, max_tokens_per_rank=100), **arguments(**options)) as loader:
        loader.load_state_dict(state)
        assert [batch.samples.tolist() for batch in loader] == all_parts


def test_a_loss_of_parts_by_their_weights_is_the_steps() -> None:
    options: dict[str, Any] = {"budget": BUDGET, "workers": 0, "document_fields": ["images"]}

    def mean(loader: Loader, number: int) -> float:
        batches = [b for b in loader if b.number == number]
        logits = [torch.sin(torch.outer(b.tokens.float() + 1, torch.arange(1.0, 8.0))) for b in batches]
        labels = [torch.where(b.labels >= 0, b.labels % 7, b.labels) for b in batches]
        losses = [
            b.step.loss(x, y, without_attention=True) * b.weight
            for b, x, y in zip(batches, logits, labels, strict=True)
        ]
        return float(sum(losses))

    with Loader(Numbered(known=True), capped(1, max_tokens_per_rank=BUDGET), **arguments(**options)) as whole:
        wanted = mean(whole, 1)
    with Loader(
        Numbered(known=True), capped(1, max_tokens_per_rank=100), **arguments(micro_batches=True, **options)
    ) as cut:
        assert mean(cut, 1) == pytest.approx(wanted, rel=1e-6)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batches=True needs a cap"):
        Loader(
            Numbered(),
            capped(1, max_peers=0),
            budget=BUDGET,
            batches=Batches(micro_batches=True),
            planning=Planning(workers=0),
        )
    with pytest.raises(ValueError, match=r"'layout': \.\.\.} does not go with micro_batches=True"):
        Loader(
            Numbered(),
            capped(1),
            budget=BUDGET,
            batches=Batches(micro_batches=True),
            planning=Planning(workers=0, plan_options={"layout": "zigzag"}),
        )
    no_planner = cast(Any, lambda lengths: np.zeros(1))
    with pytest.raises(ValueError, match="needs a planner with a method micro_batches"):
        Loader(Numbered(), no_planner, budget=BUDGET, batches=Batches(micro_batches=True), planning=Planning(workers=0))


def test_a_document_that_cannot_be_planned_is_named_by_its_sample() -> None:
    planner = flexcp.Planner(
        4, 2, 16, dtype="float32", cluster=flexcp.cluster("cpu", ranks_per_node=1), max_tokens_per_rank=300
    )
    data = [list(range(n)) for n in (41, 30, 12, 90, 310)]
    with (
        Loader(data, planner, budget=320, batches=Batches(micro_batches=True), planning=Planning(workers=0)) as loader,
        pytest.raises(
            PlanningError, match=r"document 0 has 310 tokens.*numbered within a step: document 0 is sample 4\)"
        ),
    ):
        list(loader)


@pytest.mark.parametrize(("marked", "weights"), [((True, False), [0.0, 1.0]), ((True, True), [1.0, 1.0])])
def test_a_part_without_a_label_weighs_nothing(marked: tuple[bool, bool], weights: list[float]) -> None:
    """Such a part is, for example, a prompt that was cut off before its answer. If no part of a step has a label, every
    loss is 0, and the weights do not matter.
    """
    ids = torch.arange(30)
    samples = [{"input_ids": ids, "labels": torch.full_like(ids, -100) if empty else ids} for empty in marked]
    with Loader(
        samples,
        capped(1),
        budget=60,
        samples=Samples(labels="labels"),
        batches=Batches(micro_batches=True),
        planning=Planning(workers=0),
    ) as loader:
        found = list(loader)
    assert [batch.weight for batch in found] == weights
    assert [int(batch.valid) for batch in found] == [1 if empty else 29 for empty in marked]


def test_labels_without_a_sign_are_refused() -> None:
    ids = torch.arange(30)
    samples = [{"input_ids": ids, "labels": ids.to(torch.uint8)}]
    with (
        Loader(samples, capped(1), budget=60, samples=Samples(labels="labels"), planning=Planning(workers=0)) as loader,
        pytest.raises(ValueError, match=r"field 'labels': labels are torch\.uint8, which holds no negative mark"),
    ):
        next(iter(loader))


TREES = [flexcp.masks.shared_question([5, 5, 5], 10), flexcp.causal(), flexcp.masks.shared_question([2] * 8, 4)]


def labels_of_trees(group: Any, known: bool) -> list[tuple[int, int, float]]:
    """Return (labels that count, labels of this rank's edges, weight) of each part; every third label is ignored."""
    lengths = [25, 30, 20]
    ids = [torch.arange(1, n + 1) for n in lengths]
    rows = [{"input_ids": x, "labels": torch.where(x % 3 == 0, -100, x)} for x in ids]
    samples = Samples(labels="labels", lengths=lengths if known else None)
    options = {"budget": 100, "group": group, "samples": samples, "mask": TREES, "planning": Planning(workers=0)}
    with Loader(rows, capped(1 if group is None else group.size()), batches=MICRO, **options) as loader:
        return [(int(b.valid), int(b.edges.counts.sum()) if b.edges else 0, b.weight) for b in loader]


@pytest.mark.parametrize("ranks", [1, 2])
def test_labels_of_trees_count_as_often_as_sequences_predict_them(pool: RankPool, ranks: int) -> None:
    read, known = (pool.run(labels_of_trees, lengths, ranks=ranks) for lengths in (False, True))
    assert [[(valid, weight) for valid, _, weight in got] for got in known] == [
        [(valid, weight) for valid, _, weight in got] for got in read
    ]
    with_trees = [parts for parts in zip(*known, strict=True) if any(edges for _, edges, _ in parts)]
    assert with_trees
    for parts in with_trees:
        assert {valid for valid, _, _ in parts} == {sum(edges for _, edges, _ in parts)}


@pytest.mark.parametrize("ignore", [-100, -1, 0, 2, 3])
@pytest.mark.parametrize("mask", [flexcp.causal(), TREES[0]])
def test_tokens_with_the_id_that_is_ignored_are_not_counted_where_lengths_are_known(
    ignore: int, mask: flexcp.masks.Mask
) -> None:
    ids = torch.arange(25) % 5
    found = []
    for lengths in (None, [25] * 3):
        samples = Samples(ignore=ignore, lengths=lengths)
        with Loader(
            [ids] * 3, capped(1), budget=60, mask=mask, samples=samples, batches=MICRO, planning=Planning(workers=0)
        ) as loader:
            batches = list(loader)
        assert all(int(b.valid) == int((b.labels != ignore).sum()) for b in batches if b.edges is None)
        assert all(int(b.valid) == int(b.edges.counts.sum()) for b in batches if b.edges is not None)
        found.append([(int(b.valid), b.weight) for b in batches])
    assert found[0] == found[1]
