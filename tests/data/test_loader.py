"""Tests of what the loader delivers: the rows of all ranks together are the batch, each sample comes once an epoch, and
labels are right at the borders of documents.

Expected batches are computed from the sample numbers of synthetic datasets whose tokens encode sample and row (see
``made.py``). Reads of samples are counted.
"""

from __future__ import annotations

import json
import re
import tracemalloc
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from made import LENGTHS, ROWS, Numbered, StatefulStream, Stream, arguments, batches_by_hand
from misbehaving import Misbehaving, planner
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flexcp
from flexcp.data import Batches, Loader, Planning, PlanningError, Samples
from flexcp.data.loader import may_differ
from flexcp.data.order import count_batches, epoch_order
from flexcp.data.planning.plan_orders import RecipeWish
from flexcp.data.planning.planning_pool import Pool
from flexcp.measure.ranks import RankError, RankPool

BUDGET = 150
MODES = ["known", "read", "stream", "stateful"]
STRATEGIES = ["blocks", "zigzag", "ring", "dp"]


def dataset(mode: str, lengths: list[int] = LENGTHS) -> Any:
    if mode in ("known", "read"):
        return Numbered(lengths, known=mode == "known")
    return Stream(lengths) if mode == "stream" else StatefulStream(lengths)


def delivered(group: Any, mode: str, strategy: str = "zigzag", epochs: int = 1, **options: Any) -> dict[str, Any]:
    """Return the batches this rank gets in some epochs, the samples it read, and the loader's statistics."""
    ranks = group.size() if group is not None else 1
    data = dataset(mode)
    options = {"budget": BUDGET, "workers": 0, "document_fields": ["images"], "group": group, **options}
    got = []
    with Loader(data, planner(ranks, strategy), **arguments(**options)) as loader:
        for _ in range(epochs):
            for batch in loader:
                got.append(described(batch))
        return {"batches": got, "reads": data.reads, "stats": loader.stats.as_json()}


def described(batch: Any) -> dict[str, Any]:
    return {
        "indices": batch.step.indices,
        "tokens": batch.tokens,
        "labels": batch.labels,
        "positions": batch.positions,
        "documents": batch.documents,
        "fields": batch.fields,
        "values": batch.values,
        "samples": batch.samples.tolist(),
        "valid": batch.valid,
        "place": (batch.epoch, batch.number),
        "hash": batch.step.plan.hash,
    }


def check_union(results: list[dict[str, Any]], lengths: list[int], numbers: list[int], budget: int = BUDGET) -> None:
    """Check that batches hold the expected samples, and that the rows of all ranks are those of the packed stream."""
    expected = batches_by_hand(numbers, lengths, budget)
    assert [b["samples"] for b in results[0]["batches"]] == expected
    for step, samples in enumerate(expected):
        parts = [r["batches"][step] for r in results]
        sizes = [lengths[n] for n in samples]
        stream = torch.tensor([n * ROWS + row for n, size in zip(samples, sizes, strict=True) for row in range(size)])
        document = torch.tensor([d for d, size in enumerate(sizes) for _ in range(size)])
        rows = torch.tensor([row for size in sizes for row in range(size)])
        ends = rows + 1 == torch.tensor(sizes)[document]
        labels = torch.where(ends, -100, stream + 1)
        kept = torch.cat([p["indices"] for p in parts])
        real = kept[kept >= 0]
        assert sorted(real.tolist()) == list(range(len(stream)))
        for part in parts:
            index, pad = part["indices"].clamp(min=0), part["indices"] < 0
            assert torch.equal(part["tokens"], torch.where(pad, 0, stream[index]))
            assert torch.equal(part["labels"], torch.where(pad, -100, labels[index]))
            assert torch.equal(part["positions"], torch.where(pad, 0, rows[index]))
            assert torch.equal(part["documents"], torch.where(pad, -1, document[index]))
            number = torch.tensor(samples)[document[index]]
            weight = torch.stack([rows[index] + number, -rows[index]], 1).float()
            assert torch.equal(part["fields"]["weight"], torch.where(pad[:, None], 0.0, weight))
            assert part["valid"] == len(stream) - len(samples) == sum(int((p["labels"] != -100).sum()) for p in parts)
            here = set(part["documents"].tolist()) - {-1}
            assert {d: v["id"] for d, v in part["values"].items()} == {d: f"sample {samples[d]}" for d in here}
            assert {d: v["score"] for d, v in part["values"].items()} == {d: samples[d] / 2 for d in here}
        assert len({p["hash"] for p in parts}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_union_of_all_ranks_is_the_batch(ranks: int, pool: RankPool) -> None:
    """Over 1 to 4 ranks, every kind of dataset is tried with every strategy."""
    for i, mode in enumerate(MODES):
        equal = {"plan_options": {"tokens": "equal", "pad_to": 8}} if (ranks + i) % 2 else {}
        found = pool.run(delivered_with, mode, STRATEGIES[(ranks + i) % 4], equal, ranks=ranks)
        check_union(found, LENGTHS, list(range(len(LENGTHS))))


def delivered_with(group: Any, mode: str, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    return delivered(group, mode, strategy, **options)


def on_another_default_device(group: Any, mode: str, options: dict[str, Any]) -> Any:
    """Return the batches of this rank; without ``device=``, all their tensors must be on the CPU."""
    with torch.device("meta"):
        batches = delivered(group, mode, **options)["batches"]
    return [{name: plain(found) for name, found in batch.items()} for batch in batches]


def plain(found: Any) -> Any:
    """Return values with lists in place of tensors, which must be on the CPU."""
    if isinstance(found, dict):
        return {name: plain(x) for name, x in found.items()}
    if isinstance(found, torch.Tensor):
        assert found.device.type == "cpu"
        return found.tolist()
    return found


@pytest.mark.parametrize(
    "options", [{"plan_options": {"tokens": "equal", "pad_to": 8}}, {"spans": "images", "document_fields": []}]
)
@pytest.mark.parametrize("mode", MODES)
def test_the_default_device_of_torch_is_not_the_loaders(mode: str, options: dict[str, Any], pool: RankPool) -> None:
    """It may be the model's; samples are split and exchanged on the CPU."""
    for ranks in (1, 2):
        expected = pool.run(delivered_with, mode, "zigzag", options, ranks=ranks)
        found = pool.run(on_another_default_device, mode, options, ranks=ranks)
        assert found == [[plain(batch) for batch in rank["batches"]] for rank in expected]


@pytest.mark.parametrize("mode", ["known", "read"])
def test_every_epoch_is_another_order_of_all_samples(mode: str, pool: RankPool) -> None:
    found = pool.run(delivered_with, mode, "zigzag", {"shuffle": True, "seed": 5, "epochs": 3}, ranks=2)
    orders = []
    for epoch in range(3):
        here = [{**r, "batches": [b for b in r["batches"] if b["place"][0] == epoch]} for r in found]
        orders.append([n for b in here[0]["batches"] for n in b["samples"]])
        assert sorted(orders[-1]) == list(range(len(LENGTHS)))
        check_union(here, LENGTHS, orders[-1])
    assert len(set(map(tuple, orders))) == 3
    again = pool.run(delivered_with, mode, "blocks", {"shuffle": True, "seed": 5}, ranks=3)
    assert [n for b in again[0]["batches"] for n in b["samples"]] == orders[0]


def test_known_lengths_read_only_what_a_rank_keeps(pool: RankPool) -> None:
    found = pool.run(delivered_with, "known", "dp", {}, ranks=4)
    reads = [r["reads"] for r in found]
    kept = [[b["samples"][d] for b in r["batches"] for d in sorted(b["values"])] for r in found]
    assert [sorted(x) for x in reads] == [sorted(x) for x in kept]
    assert sorted(n for r in reads for n in r) == list(range(len(LENGTHS)))
    parts = pool.run(delivered_with, "known", "zigzag", {}, ranks=4)
    for r in parts:
        assert sorted(r["reads"]) == sorted(b["samples"][d] for b in r["batches"] for d in b["values"])


@pytest.mark.parametrize("mode", ["read", "stream", "stateful"])
def test_otherwise_each_sample_is_read_once_by_one_rank(mode: str, pool: RankPool) -> None:
    found = pool.run(delivered_with, mode, "zigzag", {}, ranks=3)
    assert sorted(n for r in found for n in r["reads"]) == list(range(len(LENGTHS)))
    assert all(len(r["reads"]) == 8 for r in found) if mode == "read" else found[1]["reads"] == []


def test_a_rank_without_tokens_gets_empty_tensors_of_the_right_kind(pool: RankPool) -> None:
    for mode in MODES:
        found = pool.run(short_documents, mode, ranks=4)
        empty = [b for r in found for b in r if len(b["tokens"]) == 0]
        assert empty
        for b in empty:
            assert (b["tokens"].dtype, b["labels"].dtype) == (torch.int64, torch.int64)
            assert b["fields"]["weight"].shape == (0, 2) and b["fields"]["weight"].dtype == torch.float32


def short_documents(group: Any, mode: str) -> list[dict[str, Any]]:
    data = dataset(mode, [1, 1, 2])
    with Loader(
        data,
        planner(4, "dp"),
        budget=3,
        group=group,
        samples=Samples(document_fields=["images"]),
        planning=Planning(workers=0),
    ) as loader:
        return [described(b) for b in loader]


# --- planning ahead and sharing plans ---------------------------------------------------------------------------------


def shared_plans(group: Any, workers: int) -> dict[str, Any]:
    """Run a loader whose plans are dealt over ranks; return what it delivered and the number of store keys left."""
    store = group.get_group_store()
    before = store.num_keys()
    found = delivered(group, "known", "zigzag", epochs=2, share_plans=True, workers=workers, lookahead=3)
    torch.distributed.barrier(group)
    found["keys"] = store.num_keys() - before
    torch.distributed.barrier(group)
    return found


@pytest.mark.parametrize(("ranks", "workers"), [(3, 0), (2, 1)])
def test_shared_plans_are_planned_once_and_leave_no_keys(ranks: int, workers: int, pool: RankPool) -> None:
    found = pool.run(shared_plans, workers, ranks=ranks)
    first = [{**r, "batches": [b for b in r["batches"] if b["place"][0] == 0]} for r in found]
    check_union(first, LENGTHS, list(range(len(LENGTHS))))
    steps = len(found[0]["batches"])
    planned = [r["stats"]["planned_here"] + r["stats"]["planned_ahead"] for r in found]
    assert sum(planned) == steps and max(planned) - min(planned) <= 2
    assert all(r["stats"]["steps"] == steps for r in found)
    # Only a rank's counters of binds and runs stay, its host, and one key that the nodes fit the hosts; fewer are new
    # if these ranks have bound before.
    assert max(r["keys"] for r in found) <= 3 * ranks + 1 < steps


def kind_of_plans(group: Any) -> str:
    options = arguments(workers=0, share_plans=True)
    with Loader(Numbered([9], known=True), planner(group.size()), budget=60, group=group, **options) as loader:
        return type(loader.plans).__name__


def test_one_rank_shares_its_plans_with_nobody(pool: RankPool) -> None:
    assert pool.run(kind_of_plans, ranks=1) == ["Pool"]
    assert pool.run(kind_of_plans, ranks=2) == ["SharedPlans"] * 2


def failing_shared_plans(group: Any, folder: Path) -> str:
    data = Numbered(known=True)
    try:
        with Loader(
            data,
            Misbehaving(folder, 2),
            budget=BUDGET,
            group=group,
            samples=Samples(document_fields=["images"]),
            planning=Planning(workers=0, share_plans=True, timeout=20),
        ) as loader:
            return f"{sum(1 for _ in loader)} steps"
    except PlanningError as error:
        return str(error)


def test_a_plan_that_fails_on_one_rank_stops_all_with_the_cause(tmp_path: Path, pool: RankPool) -> None:
    tokens = sum(LENGTHS[n] for n in batches_by_hand(list(range(len(LENGTHS))), LENGTHS, BUDGET)[1])
    (tmp_path / f"fail {tokens}").touch()
    found = pool.run(failing_shared_plans, tmp_path, ranks=2)
    assert all(f"no plan for {tokens} tokens" in text for text in found), found


def test_plans_are_asked_for_a_look_ahead_before_they_are_needed() -> None:
    """When a batch is delivered, the next ``lookahead`` steps have been given to the planner processes. The test does
    not depend on timing.
    """
    asked: list[int] = []
    with Loader(
        Numbered(known=True),
        planner(1),
        budget=40,
        samples=Samples(document_fields=["images"]),
        batches=Batches(too_long="cut"),
    ) as loader:
        loader.plans.close()
        real = loader.plans.ask

        def note(step: int, *rest: Any) -> None:
            asked.append(step)
            real(step, *rest)

        loader.plans.ask = note  # type: ignore[method-assign]
        loader.plans.shared = None  # type: ignore[union-attr]
        total = len(loader)
        for batch in loader:
            assert asked == list(range(min(total, batch.number + 1 + loader.lookahead)))
    assert total > 8


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_as_many_steps_are_ahead_as_asked_for_and_at_least_one(lookahead: int) -> None:
    """The orders are seen by the lookups of rank speeds, one for each planned step, by its epoch and number."""
    asked: list[tuple[int, int]] = []
    with Loader(
        Numbered([30] * 8, known=True), planner(1), budget=60, planning=Planning(workers=0, lookahead=lookahead)
    ) as loader:
        at = loader.speeds.at

        def note(epoch: int, step: int) -> Any:
            asked.append((epoch, step))
            return at(epoch, step)

        loader.speeds.at = note  # type: ignore[method-assign]
        for epoch in range(2):
            for batch in loader:
                steps = range(min(4, batch.number + 1 + max(1, lookahead)))
                assert asked[4 * epoch :] == [(epoch, step) for step in steps]
    assert len(asked) == 8


def test_processes_plan_only_where_there_is_a_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def pool(planner: Any, workers: int, patience: float, stats: Any, wish: RecipeWish) -> Pool:
        made.append((workers, patience, wish))
        return Pool(planner, 0, patience, stats, wish)

    monkeypatch.setattr("flexcp.data.loader.Pool", pool)
    for lookahead, workers in ((0, 3), (2, 3), (2, 0)):
        data = Numbered([9], known=True)
        options = arguments(budget=60, lookahead=lookahead, workers=workers, patience=7.0)
        Loader(data, planner(1), **options).close()
    assert made == [(workers, 7.0, RecipeWish(0, "fields")) for workers in (0, 3, 0)]


def test_a_loader_that_is_closed_ends_its_planner_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    with Loader(Numbered([9], known=True), planner(1), budget=60, planning=Planning(workers=0)) as loader:
        monkeypatch.setattr(loader.plans, "close", lambda: closed.append("plans"))
    assert closed == ["plans"]
    with pytest.raises(RuntimeError, match="this loader is closed"):
        next(iter(loader))


def test_plans_that_may_differ_are_of_the_strategies_with_a_partitioner() -> None:
    assert [may_differ(name) for name in ("hypergraph", "dcp:256", "blocks", "zigzag:4", "auto", "")] == [True] * 2 + [
        False
    ] * 4


def test_a_document_without_tokens_is_named() -> None:
    with pytest.raises(ValueError, match="document 1 has no tokens; drop it"):
        local(Numbered([9, 9, 9]), lengths=[9, 0, 9])
    with pytest.raises(ValueError, match="2 masks or spans for 3 samples"):
        local(Numbered([9, 9, 9]), masks={"all": ([flexcp.causal()] * 2, 2)})


# --- batches ----------------------------------------------------------------------------------------------------------


def local(data: Any, **options: Any) -> list[Any]:
    options = {"budget": BUDGET, "workers": 0, "document_fields": ["images"], **options}
    with Loader(data, planner(1), **arguments(**options)) as loader:
        return list(loader)


@pytest.mark.parametrize("mode", MODES)
def test_documents_over_the_maximum(mode: str) -> None:
    with pytest.raises(ValueError, match=r"(document|sample) 3 has 77 tokens, over max_length 60; .*'cut' or 'drop'"):
        local(dataset(mode), max_length=60)
    with pytest.raises(ValueError, match=r"77 tokens, over the budget of 60"):
        local(dataset(mode), budget=60)
    dropped = local(dataset(mode), max_length=60, too_long="drop")
    assert [n for b in dropped for n in b.samples] == [n for n, size in enumerate(LENGTHS) if size <= 60]
    cut = local(dataset(mode), max_length=60, too_long="cut")
    assert sum(len(b.tokens) for b in cut) == sum(min(60, n) for n in LENGTHS)
    for b in cut:
        ends = b.labels == -100
        assert int(ends.sum()) == len(b.samples)
        assert torch.equal(b.labels[~ends], b.tokens[~ends] + 1)
        assert b.valid == len(b.tokens) - len(b.samples)


@pytest.mark.parametrize("mode", MODES)
def test_documents_that_were_cut_or_dropped_are_counted(mode: str) -> None:
    """A document of exactly the maximum length is neither cut nor dropped."""
    for too_long, counts in (("cut", (2, 0)), ("drop", (0, 2))):
        options = arguments(max_length=60, too_long=too_long, workers=0, document_fields=["images"])
        with Loader(dataset(mode, [60, 61, 90, 5, 60, 59]), planner(1), budget=BUDGET, **options) as loader:
            assert len(list(loader)) > 1
            assert (loader.stats.cut, loader.stats.dropped) == counts


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_that_no_document_fits_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=r"no (document|sample) has at most 10 tokens"):
        local(dataset(mode, [11, 30]), budget=10, too_long="drop")


@pytest.mark.parametrize("mode", MODES)
def test_the_last_batch_is_kept_or_dropped(mode: str) -> None:
    kept = local(dataset(mode))
    left_out = local(dataset(mode), drop_last=True)
    assert len(left_out) == len(kept) - 1
    full = local(dataset(mode, [50, 50, 50, 100, 50]), drop_last=True)
    assert [len(b.tokens) for b in full] == [150, 150]


def test_the_number_of_batches_is_known_with_the_lengths() -> None:
    for drop_last in (False, True):
        for too_long in ("cut", "drop"):
            options: dict[str, Any] = {"drop_last": drop_last, "too_long": too_long, "max_length": 60, "shuffle": True}
            with Loader(Numbered(known=True), planner(1), budget=70, **arguments(workers=0, **options)) as loader:
                batches = len(loader)  # starts the epoch, which puts the lengths in its order
                lengths = loader.source.fitted_lengths()  # type: ignore[union-attr]
                assert batches == count_batches(lengths, 70, drop_last)
            found = local(Numbered(known=True), budget=70, **options)
            assert len(found) == len(loader)
    with (
        Loader(Stream(), planner(1), budget=70, planning=Planning(workers=0)) as unknown,
        pytest.raises(TypeError, match="not known before"),
    ):
        len(unknown)


def test_a_seed_is_an_order_everywhere() -> None:
    assert epoch_order(12, True, 3, 0).tolist() == [0, 10, 2, 7, 6, 8, 9, 4, 5, 1, 11, 3]
    many = epoch_order(100_000, True, 0, 1)
    assert np.array_equal(np.sort(many), np.arange(100_000))
    assert abs(np.corrcoef(many, np.arange(100_000))[0, 1]) < 0.02
    assert epoch_order(5, False, 9, 9).tolist() == [0, 1, 2, 3, 4]


def test_settings_may_be_numbers_of_numpy_and_a_seed_one_of_torch() -> None:
    for seed, same in ((np.int64(3), 3), ((1 << 64) - 1, -1)):
        options = arguments(budget=BUDGET, shuffle=np.True_, seed=seed, lookahead=np.int64(2), patience=np.float32(60))
        with Loader(Numbered(known=True), planner(1), **options) as data:
            state = json.loads(json.dumps(data.state_dict()))
            found = [n for b in data for n in b.samples]
        assert found == epoch_order(len(LENGTHS), True, same, 0).tolist()
        options |= {"shuffle": True, "seed": int(seed)}
        with Loader(Numbered(known=True), planner(1), **options) as other:
            other.load_state_dict(state)


def test_a_batch_without_labels_has_a_normaliser() -> None:
    (b,) = local(Numbered([1, 1, 1], known=True))
    assert b.labels.tolist() == [-100] * 3 and b.valid == 1


# --- masks and fields -------------------------------------------------------------------------------------------------


def rules_of(batch: Any, name: str | None = None) -> list[flexcp.Mask]:
    mask = batch.step.plan.batch.mask(name)
    return list(mask.rules) * (len(batch.samples) if len(mask.rules) == 1 else 1)


def test_masks_of_every_origin_reach_the_plan() -> None:
    each = [flexcp.window(n) for n in range(len(LENGTHS))]
    for b in local(Numbered(known=True), mask=each):
        assert rules_of(b) == [each[n] for n in b.samples]
    for b in local(Numbered(), mask_fn=lambda s: flexcp.masks.prefix(int(s["score"] * 2))):
        assert rules_of(b) == [flexcp.masks.prefix(int(n)) for n in b.samples]
    for b in local(Numbered(known=True), mask=flexcp.full()):
        assert rules_of(b) == [flexcp.full()] * len(b.samples)
    for b in local(Numbered(known=True), masks={"near": (each, 3), "all": (flexcp.causal(), 1)}):
        assert rules_of(b, "near") == [each[n] for n in b.samples]
        assert b.step.plan.batch.mask("near").layers == 3
    for b in local(Stream(), mask_fn=lambda s: {"a": (flexcp.causal(), 2), "b": (flexcp.window(len(s["tokens"])), 1)}):
        assert rules_of(b, "b") == [flexcp.window(LENGTHS[n]) for n in b.samples]


@pytest.mark.parametrize("known", [False, True])
def test_spans_of_images_are_masks_and_a_field(known: bool) -> None:
    spans = [[(n // 3, n // 2)] if n > 8 else [] for n in LENGTHS]
    options: dict[str, Any] = {"spans": spans} if known else {"spans": "images", "document_fields": []}
    for b in local(Numbered(known=known), max_length=60, too_long="cut", **options):
        for rule, n in zip(rules_of(b), b.samples, strict=True):
            cut = [(a, min(e, 60)) for a, e in spans[n] if a < 60]
            assert rule == flexcp.masks.modality(cut)
        if not known:
            number = torch.tensor(b.samples)[b.documents]
            size = torch.tensor(LENGTHS)[number]
            inside = (size > 8) & (b.positions >= size // 3) & (b.positions < size // 2)
            assert torch.equal(b.fields["images"], torch.where(inside, 0, -1))


def test_pads_are_in_no_image_and_have_the_token_and_label_of_pads() -> None:
    options = {"plan_options": {"tokens": "equal", "pad_to": 64}, "pad_token": 7, "ignore": -5, "document_fields": []}
    [b] = local(Numbered([9, 12], known=False), spans="images", **options)
    pads = b.documents == -1
    assert int(pads.sum()) == 64 - 21
    assert set(b.fields["images"][pads].tolist()) == {-1} and set(b.tokens[pads].tolist()) == {7}
    assert set(b.labels[pads].tolist()) == {-5} and set(b.positions[pads].tolist()) == {0}


@pytest.mark.parametrize("ignore", [-100, -5, 0])
def test_the_loss_of_a_batch_leaves_out_what_the_loader_ignores(ignore: int) -> None:
    """This also holds for rows that the user marks with -100, and for labels from ``step.labels``, ``step.edges``."""
    tokens = [3, 0, 5, 6, 7, 2, 4]
    labels = [ignore, ignore, 5, 6, ignore, 2, 4]
    [b] = local([{"tokens": tokens, "labels": labels}], labels="labels", ignore=ignore)
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shifted = torch.tensor([*labels[1:], ignore])
    assert torch.equal(b.labels, shifted)

    def expected(of: torch.Tensor, mark: int) -> float:
        return torch.nn.functional.cross_entropy(logits, of, ignore_index=mark).item()

    def found(of: Any) -> float:
        return float(b.step.loss(logits, of, without_attention=True))

    assert found(b.labels) == pytest.approx(expected(shifted, ignore), rel=1e-12)
    fewer = shifted.index_fill(0, torch.tensor([1, 5]), ignore)
    assert found(shifted.index_fill(0, torch.tensor([1, 5]), -100)) == pytest.approx(expected(fewer, ignore), rel=1e-12)
    following = torch.tensor([*tokens[1:], ignore])
    assert torch.equal(b.step.labels(torch.tensor(tokens)), following)
    for of in (b.step.labels(torch.tensor(tokens)), b.step.edges(torch.tensor(tokens))):
        assert found(of) == pytest.approx(expected(following, ignore), rel=1e-12)
    said = float(b.step.loss(logits, following.clamp(min=0), ignore=-100, without_attention=True))
    assert said == pytest.approx(expected(following.clamp(min=0), -100), rel=1e-12), "whoever says it is heard"


def test_an_explicit_mask_is_cut_with_its_document() -> None:
    data = Numbered([100], known=True)
    mask = flexcp.from_slices(100, [(0, 100, 0, 50, None, 0), (70, 100, 60, 100, None, None)])
    (b,) = local(data, mask=[mask], max_length=80, too_long="cut")
    assert np.array_equal(rules_of(b)[0].dense(80), mask.dense(100)[:80, :80])


class Answers(Numbered):
    """Samples with a field of labels, of which only the second half counts."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        found = super().__getitem__(number)
        rows = torch.arange(len(found["tokens"]))
        return {"tokens": found["tokens"], "target": torch.where(rows < len(rows) // 2, -100, found["tokens"] + 7)}


def answers(group: Any, known: bool) -> list[dict[str, Any]]:
    with Loader(
        Answers(known=known),
        planner(3),
        budget=BUDGET,
        group=group,
        samples=Samples(labels="target"),
        planning=Planning(workers=0),
    ) as loader:
        return [described(b) for b in loader]


@pytest.mark.parametrize("known", [True, False])
def test_labels_of_a_field_are_shifted_and_counted(known: bool, pool: RankPool) -> None:
    found = pool.run(answers, known, ranks=3)
    for parts in zip(*found, strict=True):
        assert {p["valid"] for p in parts} == {sum(int((p["labels"] != -100).sum()) for p in parts)}
        for p in parts:
            size = torch.tensor(LENGTHS)[torch.tensor(p["samples"])[p["documents"]]]
            following = p["positions"] + 1
            counts = (following < size) & (following >= size // 2)
            assert torch.equal(p["labels"], torch.where(counts, p["tokens"] + 1 + 7, -100))


def test_bare_token_ids_and_torch_loaders_are_samples() -> None:
    documents = [torch.arange(n) for n in (5, 9, 3)]
    loader = torch.utils.data.DataLoader(documents, batch_size=None)  # type: ignore[arg-type]
    for data in (documents, [d.tolist() for d in documents], loader):
        (b,) = local(data, budget=20)
        assert b.tokens.tolist() == [*range(5), *range(9), *range(3)]
    in_lists = torch.utils.data.DataLoader(Numbered(), batch_size=4, collate_fn=list)
    assert [n for b in local(in_lists) for n in b.samples] == list(range(len(LENGTHS)))
    padded = torch.utils.data.DataLoader(documents[:1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size=None"):
        local(padded, budget=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "shuffle=True needs a map-style dataset"),
        ({"lengths": [1]}, "lengths= needs a map-style dataset"),
        ({"masks": {"all": ([flexcp.causal()] * 3, 2)}}, "a mask for each document needs a map-style dataset"),
        ({"mask": flexcp.causal(), "mask_fn": len}, r"give one of mask, masks, Samples\(mask_fn"),
        ({"too_long": "keep"}, "must be 'refuse', 'cut' or 'drop'"),
        ({"lookahead": -1}, "lookahead is a count"),
        ({"budget": 0}, "at least 1"),
        ({"budget": None}, "budget is a whole number of tokens; got None"),
        ({"budget": 1e3}, "budget is a whole number of tokens; got 1000.0"),
        ({"budget": True}, "budget is a whole number of tokens; got True"),
        ({"timeout": float("nan")}, "timeout= is a timedelta or seconds, above 0 and at most 10,000,000; got nan"),
        ({"max_length": 9.5}, "max_length is a whole number of tokens; got 9.5"),
        ({"max_length": 0}, "budget and max_length must be at least 1; got 150 and 0"),
        ({"group": "cp"}, r"group= is a ProcessGroup or .*, or 'alone' for one rank's own batches; got 'cp'"),
        ({"group": 3}, "the Loader takes a ProcessGroup or a 1-D DeviceMesh axis"),
        ({"mask_fn": lambda s: "causal"}, "mask_fn must return a mask"),
        ({"labels": "target"}, "no field 'target'"),
        ({"tokens": "ids"}, "say which one holds the token ids"),
        ({"plan_options": {"token": "equal"}}, r"'token'.*layout, tokens, pad_to; did you mean 'tokens'\?"),
        ({"plan_options": {"strategy": "ring"}}, r"'strategy'.*give strategy= to the Planner itself"),
        ({"plan_options": {"mask": flexcp.causal()}}, r"'mask'.*give mask= to the Loader itself"),
        ({"shuffle": "no"}, "shuffle is True or False; got 'no'"),
        ({"seed": 1.5}, "seed is a whole number; got 1.5"),
        ({"pad_token": 1 << 63}, "pad_token is the token id .*, a whole number of 64 bits; got 9223372036854775808"),
        ({"device": "gpu:0"}, "a device is torch.device.* got 'gpu:0'"),
        ({"telemetry": True}, r"telemetry= is flexcp\.Telemetry\(\.\.\.\), or None; got True"),
        ({"telemetry": SimpleNamespace(planning=nullcontext)}, r"telemetry= is .*Telemetry.*; got a SimpleNamespace"),
        ({"masks": {}}, "masks= is .*; got none"),
        ({"spans": 3}, "spans= is the name of a field, or a list with the spans of each document; got 3"),
        ({"labels": 3}, "labels is the name of a field of the samples, or None; got 3"),
        ({"document_fields": "image"}, r"got 'image': write document_fields=\['image'\]"),
        ({"document_fields": [1]}, r"document_fields is a list of names of fields of the samples; got \[1\]"),
        ({"document_fields": None}, "document_fields is a list of names of fields of the samples; got None"),
        ({"pad_token": None}, "pad_token is .*; got None: pass a number, such as the id of the end-of-text token"),
        ({"pad_token": 0.5}, "pad_token is the token id of padded rows, a whole number; got 0.5"),
        ({"ignore": None}, "ignore is .*; got None: pass a number, such as -100"),
        ({"telemetry": flexcp.Telemetry}, r"telemetry= is flexcp\.Telemetry\(\.\.\.\), or None; got a type"),
        ({"ignore": "none"}, "ignore is the label of tokens that do not count, a whole number; got 'none'"),
        ({"least_shared": 0}, "least_shared is a whole number of tokens, at least 1; got 0"),
        ({"drop_last": "yes"}, "drop_last is True or False; got 'yes'"),
        ({"micro_batches": 2}, "micro_batches is True or False; got 2"),
        ({"lookahead": True}, "lookahead is a count of steps, 0 or more; got True"),
        ({"workers": 1.0}, "workers is a count of processes, 0 or more; got 1.0"),
        ({"share_plans": "rank 0"}, "share_plans is True, False or None; got 'rank 0'"),
        ({"plan_options": ["equal"]}, r"plan_options is a mapping such as \{'tokens': 'equal'\}; got \['equal'\]"),
        ({"patience": float("inf")}, "patience is a number of seconds above 0 and at most 10,000,000; got inf"),
        ({"cpu_group": "gloo"}, r"Planning\(cpu_group=\.\.\.\) takes a ProcessGroup .*; got 'gloo'"),
    ],
)
def test_mistakes_name_the_value_and_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local(Stream([9, 12, 30]), **options)


@pytest.mark.parametrize("data", [[[1, 2], [3, 4]], Stream([9, 12])])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": flexcp.causal}, r"^mask= is .*got the function causal: call it, mask=flexcp\.causal\(\.\.\.\)"),
        ({"mask": 16}, r"^mask= is .*got 16: .*write mask=flexcp\.window\(16\)"),
        ({"mask": "causal"}, r"^mask= is .*got 'causal': write mask=flexcp\.causal\(\)"),
        ({"mask_fn": flexcp.causal()}, r"^mask_fn= is a function of a sample"),
        ({"masks": {"a": flexcp.causal()}}, r"^masks= is .*got Mask.* for 'a': write 'a': \(flexcp\.causal\(\), 2\)"),
        ({"masks": {"a": ("causal", 2)}}, r"^masks= is .*got 'causal': write 'a': \(flexcp\.causal\(\), 2\)"),
        ({"masks": {"a": (flexcp.causal, 2)}}, r"^masks= is .*got the function causal: call it"),
        ({"masks": {"a": (flexcp.causal(), "2")}}, r"^masks= is .*got '2' layers for 'a'"),
        ({"masks": flexcp.causal()}, r"^masks= is \{'name': \(mask, layers\)\}"),
        (
            {"spans": "pictures"},
            r"^spans='pictures' names a field of every sample, and sample 0 .*'pictures': \[\(start, end\)\]",
        ),
    ],
)
def test_a_mask_that_is_none_is_named(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local(data, **options)


def test_masks_for_each_document_are_looked_at_when_they_come() -> None:
    with pytest.raises(ValueError, match=r"^mask= holds 'causal' for document 1, which is no mask"):
        local([[1, 2], [3, 4]], mask=[flexcp.causal(), "causal"])
    with pytest.raises(ValueError, match=r"^masks= for 'a' holds 3 for document 0, which is no mask"):
        local([[1, 2], [3, 4]], masks={"a": ([3, flexcp.causal()], 1)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_ids": [[1, 2], [3]]}, r"dataset is a mapping with the keys \['input_ids'\].*pass a list of samples"),
        (TensorDataset(torch.arange(8).view(2, 4)), r"sample 0 is a tuple of 1 \(Tensor\).*'input_ids': ids"),
        ([([1, 2], [1, 2])], r"sample 0 is a tuple of 2 \(list, list\).*labels='labels'"),
        ([[[1, 2], [1, 2]]], r"sample 0 is a list of 2 \(list, list\)"),
    ],
)
def test_samples_of_another_kind_are_named(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local(data)


def test_an_option_of_a_wrong_value_is_one_line_from_a_planner_process_too() -> None:
    for workers in (0, 1):
        with Loader(
            Numbered(), planner(1), budget=200, planning=Planning(workers=workers, plan_options={"tokens": "even"})
        ) as loader:
            with pytest.raises(PlanningError) as caught:
                list(loader)
            assert str(caught.value).endswith("ValueError: tokens must be 'balanced', 'priced' or 'equal'; got 'even'")
            assert "\n" not in str(caught.value)


def test_a_planner_of_ones_own_may_take_any_option() -> None:
    def own(lengths: Any, mask: Any = None, **anything: Any) -> Any:
        assert anything == {"speed": 3}
        return planner(1)(lengths, mask)

    with Loader(Numbered(), own, budget=200, planning=Planning(workers=0, plan_options={"speed": 3})) as loader:
        assert len(list(loader))


def test_the_labels_of_all_ranks_are_no_count_of_one(pool: RankPool) -> None:
    for said in pool.run(shared_by_valid, ranks=3):
        assert re.match(r"count=\d+ is not what this rank's sum is over.*\(labels != -100\)\.sum\(\)", said)


def test_tokens_for_labels_are_warned_of() -> None:
    (b,) = local(Numbered([9, 12]), budget=30)
    with pytest.warns(UserWarning, match=r"the labels of this loss are the tokens themselves"):
        b.step.loss(torch.zeros(21, 1100), b.tokens, without_attention=True)


def shared_by_valid(group: Any) -> str:
    """Return the error of ``step.share`` when its count is that of the whole batch instead of this rank's."""
    with Loader(Numbered([90, 1, 2]), planner(3), budget=200, group=group, planning=Planning(workers=0)) as loader:
        (batch,) = loader
    try:
        batch.step.share(torch.tensor(1.0), batch.valid, without_attention=True)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_wrong_lengths_and_odd_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 12 tokens, but its length was given as 13"):
        local(Numbered([9, 12]), lengths=[9, 13])
    with pytest.raises(ValueError, match="one whole number for each of the 2 samples"):
        local(Numbered([9, 12]), lengths=[9])
    with pytest.raises(ValueError, match="has no tokens; drop it"):
        local(Numbered([9, 0]))
    with pytest.raises(ValueError, match="sample 1 has no tokens; drop it"):
        local([[1, 2], []])
    with pytest.raises(ValueError, match="'some words' is a text; tokenize"):
        local([{"tokens": "some words"}])
    with pytest.raises(ValueError, match=r"'a\.jsonl' is a text; read and tokenize it"):
        local("a.jsonl")
    with pytest.raises(ValueError, match=r"takes the planner second.*got a list"):
        Loader(Numbered([9, 12]), [[1, 2]], budget=64)
    with pytest.raises(ValueError, match=r"takes the dataset first.*got a Planner"):
        local(flexcp.Planner(2, 2, 8, cluster=flexcp.cluster("cpu", ranks_per_node=1)))
    with pytest.raises(ValueError, match=r"sample 0 is padded: its attention_mask is 0 at token 2.*without padding"):
        local([{"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}])
    with pytest.raises(ValueError, match=r"field 'labels' holds -1, .* ignore=-100; .*samples=Samples\(ignore=-1\)"):
        local([{"tokens": [5, 6, 7], "labels": [-1, -100, 7]}], labels="labels")
    with pytest.raises(
        ValueError, match=r"labels are already shifted.* the Loader, for sample 0, field 'labels', would"
    ):
        local([{"tokens": [5, 6, 7], "labels": [6, 7, -100]}], labels="labels")
    with pytest.raises(ValueError, match="has a field 'labels'"):
        local([{"tokens": [1, 2], "labels": [1, 2]}])
    with pytest.raises(ValueError, match="all samples need the same fields"):
        local([{"tokens": [1, 2]}, {"tokens": [1, 2], "weight": [0.5, 1]}])
    with pytest.raises(ValueError, match=r"'box' has shape \[2\] for 3 tokens; .*document_fields=\['box'\]"):
        local([{"tokens": [1, 2, 3], "box": [0.5, 1.0]}])
    with pytest.raises(
        ValueError, match=r"planner is for 3 ranks, but the Loader has no group: pass group=.*mesh\['cp'\]"
    ):
        Loader(Numbered(), planner(3), budget=9)
    with (
        pytest.raises(ValueError, match="an iterator that has ended cannot begin again"),
        Loader(iter([[1, 2]]), planner(1), budget=9, planning=Planning(workers=0)) as loader,
    ):
        assert len(list(loader)) == 1
        list(loader)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            [5, 6],
            r"has shape \[2\], but labels are one for each of the 3 tokens, \[3\]; give every token its own, "
            r"unshifted, and -100",
        ),
        (
            [[5, 6, 7]],
            r"has shape \[1, 3\], but labels are one for each of the 3 tokens, \[3\]; pass labels\[0\]$",
        ),
        (
            [[5], [6], [7]],
            r"has shape \[3, 1\], but labels are one for each of the 3 tokens, \[3\]; pass labels\[:, 0\]$",
        ),
        ([5.0, 6.0, 7.0], r"sample 0: labels of field 'labels' are torch.float32, and token ids are whole numbers"),
    ],
)
def test_labels_of_another_shape_are_told_what_they_should_be(labels: list[Any], said: str) -> None:
    """The error never suggests ``document_fields``, as it does for other fields: labels cannot belong to a document as
    a whole.
    """
    with pytest.raises(ValueError, match=said) as found:
        local([{"tokens": [5, 6, 7], "labels": torch.tensor(labels)}], labels="labels")
    assert "document_fields" not in str(found.value)


def test_a_field_with_a_row_too_many_around_it_is_told_so() -> None:
    said = r"'box' has shape \[1, 3\] for 3 tokens; pass box\[0\] if .*document_fields=\['box'\]"
    with pytest.raises(ValueError, match=said):
        local([{"tokens": [1, 2, 3], "box": np.ones((1, 3))}])


def test_a_memory_map_is_read_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(20, dtype=np.uint16))
    flat = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    assert [b.tokens.tolist() for b in local([flat[:9], flat[9:]])] == [list(range(20))]
    assert not recwarn.list


def test_all_tokens_of_a_sample_may_be_seen_by_its_attention_mask() -> None:
    found = local([{"input_ids": [5, 6], "attention_mask": [1, 1]}])
    assert found[0].fields["attention_mask"].tolist() == [1, 1]


def disagreeing(group: Any, what: str) -> str:
    """Return the error that a rank gets when ranks make their loaders with different arguments or data."""
    rank = group.rank()
    data: Any = Numbered(LENGTHS[: len(LENGTHS) - rank], known=False) if what == "samples" else Numbered()
    if what == "sampler":
        whole = [torch.arange(n) for n in LENGTHS]
        share = DistributedSampler(whole, num_replicas=2, rank=rank, shuffle=False)
        data = DataLoader(whole, batch_size=None, sampler=share)
    options = {"shuffle": True, "seed": rank} if what == "seed" else {}
    with Loader(data, planner(2), budget=BUDGET, group=group, **arguments(workers=0, **options)) as loader:
        if what == "state":
            next(iter(loader))
            if rank == 1:
                loader.load_state_dict({**loader.state_dict(), "place": 0, "step": 0})
        with pytest.raises(ValueError, match="on rank 0 of this loader's group and") as found:
            list(loader)
    return str(found.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seed", "seed is 0 on rank 0 of this loader's group and 1 on rank 1"),
        ("samples", "samples is 24 on rank 0 of this loader's group and 23 on rank 1"),
        ("sampler", r"DistributedSampler is \(0, 2\) on rank 0 of this loader's group and \(1, 2\) on rank 1"),
        ("state", r"place is \d+ on rank 0 of this loader's group and 0 on rank 1"),
    ],
)
def test_ranks_that_make_their_loaders_differently_are_told_so(what: str, words: str, pool: RankPool) -> None:
    """Without this error, some samples would silently be left out and others be delivered twice."""
    for found in pool.run(disagreeing, what, ranks=2):
        assert re.search(words, found)
        assert "give every rank the whole dataset" in found


def said_of_group(group: Any, given: str) -> list[str]:
    """Return the warnings or the error when one rank of several makes a loader with the given group and samples."""
    samples: Any = Numbered()
    if given == "sampler":
        share = DistributedSampler([0] * 9, num_replicas=8, rank=0)
        samples = DataLoader([torch.arange(9)] * 9, batch_size=None, sampler=share)  # type: ignore[arg-type]
    groups: dict[str, Any] = {"alone": "alone", "one rank": group, "replicas": "alone"}
    options: dict[str, Any] = {"group": groups[given]} if given in groups else {}
    if given == "replicas":
        options["micro_batches"] = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            limits = {"max_tokens_per_rank": BUDGET} if given == "replicas" else {}
            plans = planner(2 if given == "for two" else 1, **limits)
            made = Loader(samples, plans, budget=BUDGET, **arguments(workers=0, **options))
        except ValueError as error:
            return [str(error)]
        with made as loader:
            assert len(list(loader)), "a warning is no refusal"
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "for two",
            r"the planner is for 2 ranks, but the Loader has no group: pass group=, a ProcessGroup or.*group='alone'$",
        ),
        (
            "nothing",
            r"no group in a run of 8 ranks, so each of them trains on all samples.*pass group=.*group='alone'$",
        ),
        ("alone", None),
        ("one rank", None),
        ("sampler", None),
        ("replicas", r"number of micro-batches for a group of 1, and the run has 8 ranks.*replicas.*hangs or adds"),
    ],
)
def test_a_forgotten_group_is_named_and_data_parallelism_may_be_said(
    given: str, words: str | None, pool: RankPool
) -> None:
    """The test runs on one rank of the pool, whose world has 8."""
    (said,) = pool.run(said_of_group, given, ranks=1)
    assert len(said) == (words is not None)
    assert words is None or re.search(words, said[0])


def read_broken(group: Any) -> int:
    with Loader(Numbered(broken=7), planner(2), budget=BUDGET, group=group, planning=Planning(workers=0)) as loader:
        return len(list(loader))


def test_a_sample_that_cannot_be_read_is_an_error_on_every_rank() -> None:
    with RankPool(2) as ranks, pytest.raises(RankError, match=r"\(2 in all\)(.|\n)*bad disk"):
        ranks.run(read_broken)


def test_an_epoch_leaves_no_memory_behind() -> None:
    """``make data`` does the same with 1,000,000 lengths."""
    lengths = np.random.default_rng(0).integers(1, 80, 2_000)
    data = Plain(lengths)
    with Loader(data, planner(1), budget=2_000, shuffle=True, planning=Planning(workers=0)) as loader:
        steps = len(loader)
        tracemalloc.start()
        try:
            for batch in loader:
                if batch.number == steps // 4:
                    early = tracemalloc.get_traced_memory()[0]
            assert batch.number == steps - 1 > 30
            assert tracemalloc.get_traced_memory()[0] - early < 300_000
        finally:
            tracemalloc.stop()
    assert loader.stats.documents_read == len(lengths)


class Plain:
    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Any:
        return np.zeros(self.lengths[number], np.int64)
