"""Proves how a step handles labels and counts of labels: pads never count, tokens passed as labels cause a warning, and
labels that would be shifted twice are refused, as is a count that is not this rank's own.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.executor.losses.averaging import CountOfAllRanks
from flexcp.executor.step import Step
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

LENGTHS, VOCABULARY = [21, 6, 1, 12], 11
TOKENS = sum(LENGTHS)
IDS = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))
ACROSS = IDS.roll(-1)
"""Labels shifted across document borders, as by a script that does not know about documents."""
SHIFTED = torch.cat([torch.cat([t[1:], torch.tensor([-100])]) for t in IDS.split(LENGTHS)])
LOGITS = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def planned(strategy: str = "blocks", **options: Any) -> Plan:
    where = flexcp.cluster("cpu", ranks_per_node=2)
    return flexcp.Planner(2, 2, 8, dtype="float64", cluster=where, strategy=strategy)(LENGTHS, **options)


def on_pads(group: dist.ProcessGroup, plan: Plan) -> tuple[int, float]:
    """Return (this rank's pads, its loss when labels at pads are valid tokens)."""
    step = flexcp.bind(plan, group)
    labels = step.shard(SHIFTED.clamp(min=0), pad=3)
    return int((step.indices < 0).sum()), step.loss(step.shard(LOGITS), labels, without_attention=True).item()


def test_labels_of_pads_do_not_count(pool: RankPool) -> None:
    found = pool.run(on_pads, planned(tokens="equal", pad_to=16), ranks=2)
    assert sum(pads for pads, _ in found) == 64 - TOKENS
    expected = torch.nn.functional.cross_entropy(LOGITS, SHIFTED.clamp(min=0)).item()
    assert sum(loss for _, loss in found) == pytest.approx(expected, rel=1e-12)


def on_own_loss(group: dist.ProcessGroup, plan: Plan, labels: Tensor, mark: int) -> tuple[int, float | str]:
    """Return (this rank's pads, its share of a loss that the user computed, or the error)."""
    step = flexcp.bind(plan, group)
    mine = step.shard(labels)
    total = torch.nn.functional.cross_entropy(step.shard(LOGITS), mine, ignore_index=mark, reduction="sum")
    pads = int((step.indices < 0).sum())
    try:
        return pads, step.share(total, (mine != mark).sum(), without_attention=True).item()
    except ValueError as error:
        return pads, str(error)


@pytest.mark.parametrize("mark", [-100, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.int8])
def test_pads_of_labels_are_no_label_of_a_loss_of_ones_own(pool: RankPool, mark: int, dtype: torch.dtype) -> None:
    """A count alone cannot reveal counted pads where at least as many labels are ignored."""
    labels = SHIFTED.index_fill(0, torch.arange(0, TOKENS, 2), -100)
    labels = torch.where(labels == -100, mark, labels)
    plan = planned(tokens="equal", pad_to=16)
    found = pool.run(on_own_loss, plan, labels, mark, ranks=2)
    assert sum(pads for pads, _ in found) == 64 - TOKENS
    expected = torch.nn.functional.cross_entropy(LOGITS, labels, ignore_index=mark).item()
    assert sum(float(loss) for _, loss in found) == pytest.approx(expected, rel=1e-12)
    for step in range(2):
        assert set(pool.run(pads_of, plan, labels.to(dtype), ranks=2)[step]) <= {mark}


def pads_of(group: dist.ProcessGroup, plan: Plan, stream: Tensor) -> list[float]:
    """Return a sharded stream's values at this rank's pads."""
    step = flexcp.bind(plan, group)
    found: list[float] = step.shard(stream)[step.indices < 0].flatten().tolist()
    return found


def test_pads_of_other_streams_are_zero(pool: RankPool) -> None:
    plan = planned(tokens="equal", pad_to=16)
    for stream in (IDS, IDS.to(torch.uint8), IDS.to(torch.uint16), -100 * torch.ones(TOKENS), IDS > 3, LOGITS):
        assert {x for pads in pool.run(pads_of, plan, stream, ranks=2) for x in pads} == {0}


def test_a_count_of_pads_names_them(pool: RankPool) -> None:
    """When no label is ignored, the labels do not show which value marks ignored ones."""
    found = pool.run(on_own_loss, planned(tokens="equal", pad_to=16), ACROSS, -100, ranks=2)
    assert sum(pads for pads, _ in found) == 64 - TOKENS
    for pads, said in found:
        if pads:
            assert str(said).startswith(f"count=32 is more than the {32 - pads} rows that count on this rank")
            assert f"the {pads} pads" in str(said)
            assert "step.shard(labels, pad=-100)" in str(said)


def alone() -> Step:
    planner = flexcp.Planner(2, 2, 8, dtype="float64", cluster=flexcp.cluster("cpu", ranks_per_node=1))
    return flexcp.bind(planner(LENGTHS))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32])
def test_a_stream_of_small_integers_has_the_loss_of_its_tokens(dtype: torch.dtype) -> None:
    """Token files are often uint16, which torch cannot compare with other dtypes."""
    step, ids = alone(), IDS.to(dtype)
    step.shard(ids).long()
    expected = torch.nn.functional.cross_entropy(LOGITS, SHIFTED).item()
    assert step.loss(LOGITS, step.labels(ids), without_attention=True).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_that_cannot_hold_a_mark_are_refused(dtype: torch.dtype) -> None:
    """-100 in uint8 is 156, which is a valid token."""
    with pytest.raises(ValueError, match=r"labels are torch\..*pass labels.long\(\)"):
        alone().loss(LOGITS, SHIFTED.to(dtype), without_attention=True)


def taken(step: Step, how: str) -> Tensor:
    """Return labels obtained in the way that ``how`` describes, after sharding whatever else a user would shard."""
    if how == "tokens, twice":
        step.shard(IDS)
        return step.shard(IDS)
    if how == "tokens, once":
        return step.shard(IDS)
    if how == "tokens beside embeddings and positions":
        step.shard(LOGITS), step.shard(torch.arange(TOKENS)), step.shard(IDS)
        return step.shard(IDS).clone()
    if how == "tokens without a prompt":
        step.shard(IDS)
        return torch.where(step.indices % 3 == 0, -100, step.shard(IDS))
    if how == "tokens, and the tokens without a prompt":
        step.shard(IDS)
        return step.shard(IDS.index_fill(0, torch.arange(5), -100), pad=-100)
    if how == "tokens that a model got":
        step.seen.given(step.shard(IDS))
        return step.shard(IDS)
    if how == "next tokens":
        step.shard(IDS)
        return step.labels(IDS)
    if how == "next tokens of one's own, twice":
        step.shard(ACROSS), step.shard(IDS)
        return step.shard(ACROSS).clone()
    if how == "next tokens of one's own, alone":
        return step.shard(ACROSS)
    if how == "labels with borders, twice":
        step.shard(SHIFTED, pad=-100)
        return step.shard(SHIFTED, pad=-100)
    if how == "next tokens of one's own, and those without a prompt":
        step.shard(IDS), step.shard(ACROSS)
        return step.shard(ACROSS.index_fill(0, torch.arange(5), -100), pad=-100)
    if how == "labels, beside rows taken by number":
        _ = IDS[step.indices]
        return step.shard(ACROSS)
    if how == "labels, beside embeddings":
        step.shard(LOGITS)
        return step.shard(ACROSS)
    if how == "corrupted tokens":
        step.shard(IDS.index_fill(0, torch.arange(0, TOKENS, 2), 0))
        return torch.where(step.indices % 2 == 0, step.shard(IDS), -100)
    assert how == "one word"
    step.shard(torch.ones_like(IDS))
    return step.shard(torch.ones_like(IDS))


def on_labels(group: dist.ProcessGroup, plan: Plan, how: str) -> list[str]:
    """Return the warnings of two losses of these labels."""
    step = flexcp.bind(plan, group)
    labels = taken(step, how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step.loss(torch.zeros(step.local_tokens, VOCABULARY), labels, without_attention=True)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    "how",
    [
        "tokens, twice",
        "tokens, once",
        "tokens beside embeddings and positions",
        "tokens without a prompt",
        "tokens, and the tokens without a prompt",
        "tokens that a model got",
    ],
)
def test_tokens_in_the_place_of_labels_are_warned_of_once(pool: RankPool, how: str) -> None:
    for said in pool.run(on_labels, planned("zigzag", tokens="equal", pad_to=8), how, ranks=2):
        assert len(said) == 1
        assert "step.loss shifts nothing" in said[0]
        assert "step.labels(tokens)" in said[0]


@pytest.mark.parametrize(
    "how",
    [
        "next tokens",
        "next tokens of one's own, twice",
        "next tokens of one's own, and those without a prompt",
        "labels with borders, twice",
        "labels, beside rows taken by number",
        "labels, beside embeddings",
        "corrupted tokens",
        "one word",
    ],
)
def test_labels_that_may_be_right_are_not_warned_of(pool: RankPool, how: str) -> None:
    assert pool.run(on_labels, planned("zigzag"), how, ranks=2) == [[], []]


@pytest.mark.parametrize(
    "plan", [planned(layout="contiguous"), planned(layout="zigzag"), planned("allgather")], ids=lambda plan: plan.label
)
def test_labels_beside_rows_cut_by_hand_are_not_warned_of(pool: RankPool, plan: Plan) -> None:
    """If only one stream was sharded, it may be labels where the rank's rows are the part that users cut by hand."""
    assert pool.run(on_labels, plan, "tokens, once", ranks=2) == [[], []]


def test_a_prompt_without_labels_hides_no_tokens_in_their_place(pool: RankPool) -> None:
    """Input and unshifted labels were both sharded, so the input was not cut by hand."""
    for said in pool.run(on_labels, planned(layout="contiguous"), "tokens, and the tokens without a prompt", ranks=2):
        assert len(said) == 1
        assert "step.loss shifts nothing" in said[0]


def test_labels_that_alone_were_sharded_may_stand_beside_an_input_from_elsewhere(pool: RankPool) -> None:
    """Correct labels beside an input that was cut by hand look like tokens passed as labels; the warning names both
    cases.
    """
    for said in pool.run(on_labels, planned("zigzag"), "next tokens of one's own, alone", ranks=2):
        assert len(said) == 1
        assert "step.labels(tokens)" in said[0]
        assert "layout='contiguous'" in said[0]


def on_embedded(group: dist.ProcessGroup, plan: Plan, how: str, frozen: bool = False) -> list[str]:
    """Return the warnings of a loss whose logits are made by an embedding of the model's input."""
    step = flexcp.bind(plan, group)
    mine = IDS.tensor_split(2)[step.rank]  # the input cut by hand
    if how == "tokens that the model got":
        labels = mine = step.shard(IDS)
    elif how == "tokens that the model got, without a prompt":
        mine = step.shard(IDS)
        labels = torch.where(torch.arange(len(mine)) < 5, -100, mine)
    elif how == "tokens cut by hand":
        labels = mine.clone()
    elif how == "next tokens":
        labels = step.labels(IDS)
    else:
        assert how == "next tokens of one's own, alone"
        labels = step.shard(ACROSS)
    table = torch.nn.Embedding(VOCABULARY, 8).requires_grad_(not frozen)
    positions = torch.nn.Embedding(max(LENGTHS), 8)
    logits = (table(mine[None]) + positions(step.positions))[0] @ torch.ones(8, VOCABULARY, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.loss(logits, labels, without_attention=True)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    "how", ["tokens that the model got", "tokens that the model got, without a prompt", "tokens cut by hand"]
)
def test_labels_that_the_models_embedding_looked_up_are_warned_of(pool: RankPool, how: str) -> None:
    """With a given layout, what was sharded does not show whether the labels are the input; the embedding does."""
    for said in pool.run(on_embedded, planned(layout="contiguous"), how, ranks=2):
        assert len(said) == 1
        assert "the labels of this loss are the tokens themselves" in said[0]
        assert "Nothing else was sharded" not in said[0]


@pytest.mark.parametrize("how", ["next tokens", "next tokens of one's own, alone"])
def test_labels_that_no_embedding_looked_up_are_not_warned_of(pool: RankPool, how: str) -> None:
    assert pool.run(on_embedded, planned(layout="contiguous"), how, ranks=2) == [[], []]


def test_a_frozen_embedding_does_not_show_its_ids(pool: RankPool) -> None:
    """This is what docs/frameworks.md says is not seen."""
    found = pool.run(on_embedded, planned(layout="contiguous"), "tokens that the model got", True, ranks=2)
    assert found == [[], []]


def on_shifted(group: dist.ProcessGroup, plan: Plan, how: str) -> str | None:
    """Return the error if labels are refused, else None."""
    step = flexcp.bind(plan, group, timeout=20)
    q = torch.zeros(step.local_tokens, 2, 8, dtype=torch.float64)
    prompt = torch.where(torch.arange(TOKENS) < 9, -100, SHIFTED)
    try:
        if how == "tokens first":
            step.shard(IDS), step.labels(SHIFTED)
        elif how == "tokens first, across documents":
            step.shard(IDS), step.labels(ACROSS)
        elif how == "a prompt left out, bytes":
            step.shard(IDS.to(torch.uint8)), step.labels(prompt)
        elif how == "tokens given":
            step.seen.given(step.shard(IDS)), step.labels(SHIFTED)
        elif how == "labels first":
            step.labels(SHIFTED), step.shard(IDS), flexcp.attention(q, q, q, step)
        elif how == "labels first, tokens given":
            step.labels(SHIFTED), step.seen.given(IDS[step.indices]), flexcp.attention(q, q, q, step)
        elif how == "tokens":
            step.shard(IDS), step.labels(IDS), step.labels(torch.where(torch.arange(TOKENS) < 9, -100, IDS))
        elif how == "a second head":
            step.shard(IDS), step.labels(IDS), step.labels(SHIFTED), flexcp.attention(q, q, q, step)
        elif how == "a second head, the first one's sharded":
            step.shard(IDS), step.shard(SHIFTED, pad=-100), step.labels(SHIFTED), flexcp.attention(q, q, q, step)
        elif how == "the token before as well":
            step.shard(IDS), step.shard(IDS.roll(1)), step.labels(IDS), flexcp.attention(q, q, q, step)
        elif how == "other labels":
            step.shard(IDS), step.labels(IDS.flip(0)), flexcp.attention(q, q, q, step)
        elif how == "one word":
            step.shard(torch.ones_like(IDS)), step.labels(torch.ones_like(IDS))
        else:
            assert how == "nothing but marks"
            step.shard(IDS), step.labels(torch.full_like(IDS, -100)), flexcp.attention(q, q, q, step)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "how",
    [
        "tokens first",
        "tokens first, across documents",
        "a prompt left out, bytes",
        "tokens given",
        "labels first",
        "labels first, tokens given",
    ],
)
def test_labels_that_are_already_shifted_are_not_shifted_again(pool: RankPool, how: str) -> None:
    for plan in (planned("zigzag"), planned(tokens="equal", pad_to=32)):
        for said in pool.run(on_shifted, plan, how, ranks=2):
            assert said is not None
            assert said.startswith("labels are already shifted: each is the token after its own, and step.labels would")
            assert "step.shard(labels, pad=-100)" in said


@pytest.mark.parametrize(
    "how",
    [
        "tokens",
        "a second head",
        "a second head, the first one's sharded",
        "the token before as well",
        "other labels",
        "one word",
        "nothing but marks",
    ],
)
def test_labels_that_may_have_to_be_shifted_are(pool: RankPool, how: str) -> None:
    assert pool.run(on_shifted, planned(tokens="equal", pad_to=32), how, ranks=2) == [None, None]


def on_counts(group: dist.ProcessGroup, plan: Plan, count: str) -> str | float:
    """Return this rank's share of the loss, or the error."""
    step = flexcp.bind(plan, group, timeout=20)
    labels = step.labels(IDS)
    total = torch.nn.functional.cross_entropy(step.shard(LOGITS), labels, reduction="sum")
    own = (labels != -100).sum()
    counts = {"own": own, "int": int(own), "all rows": plan.batch.tokens, "loader's": CountOfAllRanks(2)}
    try:
        return step.share(total, counts[count], without_attention=True).item()
    except ValueError as error:
        return str(error)


def test_a_count_that_is_not_this_ranks_own_is_refused(pool: RankPool) -> None:
    plan = planned(layout="contiguous")
    expected = torch.nn.functional.cross_entropy(LOGITS, SHIFTED).item()
    for count in ("own", "int"):
        assert sum(pool.run(on_counts, plan, count, ranks=2)) == pytest.approx(expected, rel=1e-12)
    for count, given in (("all rows", TOKENS), ("loader's", 2)):
        for said in pool.run(on_counts, plan, count, ranks=2):
            assert said.startswith(f"count={given} is not what this rank's sum is over: it holds {TOKENS // 2} rows")
            assert "(labels != -100).sum()" in said


def on_counted_rows(group: dist.ProcessGroup, plan: Plan, how: str, by: str) -> tuple[int, int, list[str]]:
    """Return (this rank's rows, its labels, the warnings) of a share whose count is ``by``."""
    step = flexcp.bind(plan, group, timeout=20)
    labels, logits = step.shard(SHIFTED, pad=-100), step.shard(LOGITS).requires_grad_()
    cross_entropy = torch.nn.functional.cross_entropy
    if how == "all labelled":
        labels = step.shard(ACROSS)
    if how == "distilled":
        total = torch.nn.functional.kl_div(logits, logits.detach().exp(), reduction="sum")
    elif how == "in parts":
        parts = zip(logits.split(7), labels.split(7), strict=True)
        total = torch.stack([cross_entropy(x, y, reduction="sum") for x, y in parts]).sum()
    elif how == "row by row":
        total = (cross_entropy(logits, labels, reduction="none") * 0.5).sum()
    elif how == "another mark":
        marked = torch.where(labels == -100, VOCABULARY - 1, labels.clamp(max=VOCABULARY - 2))
        total = cross_entropy(logits, marked, reduction="sum", ignore_index=VOCABULARY - 1)
        labels = torch.where(marked == VOCABULARY - 1, -100, marked)
    else:
        total = cross_entropy(logits, labels, reduction="sum")
    rows, own = int((step.tables.tokens >= 0).sum()), int((labels != -100).sum())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.share(total, rows if by == "rows" else own, without_attention=True)
    return rows, own, [str(w.message) for w in caught]


@pytest.mark.parametrize("how", ["labels", "in parts", "row by row", "another mark"])
def test_a_count_of_rows_in_the_place_of_labels_is_warned_of(pool: RankPool, how: str) -> None:
    for plan in (planned(layout="contiguous"), planned(tokens="equal", pad_to=16)):
        found = [x for x in pool.run(on_counted_rows, plan, how, "rows", ranks=2) if x[1] < x[0] or x[2]]
        assert found
        for rows, own, said in found:
            assert len(said) == 1
            assert said[0].startswith(f"count={rows} counts rows, but only {own} rows of the cross entropy")
            assert f"Pass count={own}" in said[0]


@pytest.mark.parametrize(
    ("how", "by"), [("labels", "labels"), ("in parts", "labels"), ("all labelled", "rows"), ("distilled", "rows")]
)
def test_a_count_that_may_be_right_is_not_warned_of(pool: RankPool, how: str, by: str) -> None:
    found = pool.run(on_counted_rows, planned(layout="contiguous"), how, by, ranks=2)
    assert [said for _, _, said in found] == [[], []]


def test_one_rank_alone_counts_for_all() -> None:
    step = flexcp.bind(flexcp.Planner(2, 2, 8, cluster=flexcp.cluster("cpu", 1, 1))([4]))
    assert step.share(torch.tensor(6.0), CountOfAllRanks(3), without_attention=True).item() == 2
    assert np.isclose(step.share(torch.tensor(6.0), 12, without_attention=True).item(), 0.5)
