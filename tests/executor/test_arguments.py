"""Proves that a wrong argument of attention, a step or bind raises an error of one line that names it, before anything
runs.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import flexcp
from flexcp.executor.arguments import MOST_SECONDS, time_limit

HEADS, KV_HEADS, SIZE, TOKENS, VOCABULARY = 4, 2, 8, 8, 11


def planned(**options: Any) -> flexcp.Plan:
    planner = flexcp.Planner(HEADS, KV_HEADS, SIZE, dtype="float32", cluster=flexcp.cluster("cpu", 1, 1))
    return planner([5, 3], **options)


def qkv() -> dict[str, Any]:
    return {name: torch.randn(TOKENS, heads, SIZE) for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}


@pytest.fixture
def step() -> flexcp.Step:
    found = flexcp.bind(planned())
    flexcp.attention(**qkv(), step=found)
    return found


def logits() -> torch.Tensor:
    return torch.randn(TOKENS, VOCABULARY)


def labels(**rows: int) -> torch.Tensor:
    found = torch.arange(TOKENS)
    for name, label in rows.items():
        found[int(name.removeprefix("row"))] = label
    return found


@pytest.mark.parametrize(
    ("keyword", "way"),
    [
        ("is_causal", r": the mask is the plan's, planner\(lengths, flexcp\.causal\(\)\)"),
        ("dropout_p", ": it is dropout="),
        ("softmax_scale", ": it is scale="),
        ("colour", "$"),
    ],
)
def test_keywords_of_other_libraries_are_told_what_stands_for_them(step: flexcp.Step, keyword: str, way: str) -> None:
    more: dict[str, Any] = {keyword: True}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'{way}"):
        flexcp.attention(**qkv(), step=step, **more)


@pytest.mark.parametrize("attend", [flexcp.attention, flexcp.slice_attention])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("wrong", [None, 5, "x", [1.0], torch.zeros(()), torch.zeros(8), torch.zeros(8, 4, 0)])
def test_attention_names_the_argument_that_is_no_tensor_of_rows(
    step: flexcp.Step, attend: Callable[..., Any], name: str, wrong: Any
) -> None:
    last: dict[str, Any] = {"step": step} if attend is flexcp.attention else {"mask": flexcp.causal()}
    with pytest.raises(ValueError, match=f"^{name} is a tensor of this rank's rows"):
        attend(**(qkv() | {name: wrong}), **last)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[None], r"; pass q\[0\]$"),
        (lambda x: x.transpose(0, 1), "; tokens come before heads: transpose the two$"),
        (lambda x: x.transpose(0, 1)[None], "; tokens come before heads: transpose the two$"),
        (lambda x: x[:, :KV_HEADS], r"; the plan was made by Planner\(heads=4, kv_heads=2\)$"),
        (lambda x: x[..., :3], r"= \(8, 4, 8\)$"),
    ],
)
def test_a_wrong_shape_with_a_likely_cause_names_the_way_out(step: flexcp.Step, change: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flexcp.attention(**(qkv() | {"q": change(qkv()["q"])}), step=step)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sinks", 1.0),
        ("kernel", 5),
        ("deterministic", "yes"),
        ("return_lse", torch.zeros(3)),
        ("sm_margin", 1.5),
        ("sm_margin", -1),
        ("scale", torch.zeros(3)),
        ("softcap", [1]),
        ("dropout", "none"),
        ("window", -1),
        ("window", "4"),
        ("mask", 3),
    ],
)
def test_attention_names_a_setting_of_the_wrong_kind(step: flexcp.Step, name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b.* got "):
        flexcp.attention(**qkv(), step=step, **{name: wrong})


def test_a_mask_named_to_a_plan_of_one_is_told_to_be_left_out(step: flexcp.Step) -> None:
    with pytest.raises(ValueError, match=r"'causal' in this plan, which has one, 'mask' \(causal\); leave mask= out"):
        flexcp.attention(**qkv(), step=step, mask="causal")
    masks = {"full": (flexcp.causal(), 1), "near": (flexcp.window(2), 1)}
    with pytest.raises(
        ValueError, match=r"no mask named 'causal' in this plan, which has 'full' .*'near' .*; name one"
    ):
        flexcp.attention(**qkv(), step=flexcp.bind(planned(masks=masks)), mask="causal")


@pytest.mark.parametrize("label", [-1, -7, VOCABULARY, 1000])
def test_a_label_outside_of_the_vocabulary_is_named(step: flexcp.Step, label: int) -> None:
    with pytest.raises(ValueError, match=rf"the label of row 3 is {label}, outside of the vocabulary 0\.\.10") as found:
        step.loss(logits(), labels(row3=label))
    assert (f"pass ignore={label}" in str(found.value)) == (label < 0)


def test_two_marks_of_rows_without_a_label_lead_to_one(step: flexcp.Step) -> None:
    """The user's labels mark ignored rows by -1, and step.labels marks ends of documents by -100: one ignore= cannot
    cover both.
    """
    given = torch.arange(TOKENS)
    given[2:4] = -1
    for ignore in (-100, -1):
        with pytest.raises(ValueError, match=r"make the labels with step\.labels\(tokens, ignore=-1\)"):
            step.loss(logits(), step.labels(given), ignore=ignore)
    step.loss(logits(), step.labels(given, ignore=-1), ignore=-1)


def test_a_label_that_is_ignored_is_not_looked_up(step: flexcp.Step) -> None:
    rows = logits()
    found = step.loss(rows, labels(row3=-1), ignore=-1)
    keep = torch.arange(TOKENS) != 3
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(rows[keep], torch.arange(TOKENS)[keep]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((logits()[None], labels()), r"logits has shape \(1, 8, 11\).*expects \(8, vocabulary\).*pass logits\[0\]"),
        ((logits(), labels()[None]), r"labels has shape \(1, 8\).*expects \(8,\).*pass labels\[0\]"),
        ((logits(), labels()[:, None]), r"labels has shape \(8, 1\).*expects \(8,\).*pass labels\[:, 0\]$"),
        ((logits(), labels().repeat(2, 1).T), r"labels has shape \(8, 2\).*expects \(8,\), this rank's rows$"),
        ((logits(), labels().tolist()), r"labels is a tensor .*\(8,\); got a list$"),
        ((logits().reshape(2, 4, 11), labels()), r"logits has shape \(2, 4, 11\).*this rank's rows$"),
        ((logits()[:5], labels()[:5]), r"keeps 8 tokens under this plan, but got a tensor of 5 rows"),
        ((logits()[:-1], labels()[1:]), r"7 rows of logits and labels, but this rank has 8: do not cut off or shift"),
        ((logits(), labels()[:5]), r"5 labels for 8 rows of logits"),
        ((logits(), labels().int()), r"labels are torch.int32.*labels.long\(\)"),
        ((logits().long(), labels()), r"logits are torch.int64"),
        ((None, labels()), r"logits is a tensor .*\(8, vocabulary\); got None"),
        ((logits(), None), r"labels is a tensor .*\(8,\); got None"),
        ((logits(), labels(), "x"), r"ignore= is a whole number; got 'x'"),
    ],
)
def test_a_loss_says_which_shape_it_expects(step: flexcp.Step, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        step.loss(*given)


def test_a_share_is_the_sum_over_what_all_count(step: flexcp.Step) -> None:
    assert step.share(torch.tensor(6.0), 4, without_attention=True).item() == 1.5
    assert step.share(torch.tensor(6.0), torch.tensor(0), without_attention=True).item() == 6.0
    assert step.share(torch.tensor(0.2), 0.25, without_attention=True).item() == pytest.approx(0.8), "weights"
    for count in (-1, float("nan"), float("inf"), torch.tensor(-0.5)):
        with pytest.raises(ValueError, match=r"the count (-1|nan|inf|-0\.5).*labels != -100"):
            step.share(torch.tensor(6.0), count, without_attention=True)  # type: ignore[arg-type]
    for wrong in ((6.0, 4), (torch.zeros(2), 4), (torch.tensor(6.0), None), (torch.tensor(6.0), torch.ones(2))):
        with pytest.raises(ValueError, match=r"is (a tensor of )?one number"):
            step.share(*wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "way"), [("scale", r"multiply q by it"), ("softcap", r"float\(softcap\)")])
def test_a_number_that_is_to_be_trained_is_refused(step: flexcp.Step, name: str, way: str) -> None:
    number: Any = {name: torch.tensor(0.3, requires_grad=True)}
    words = rf"{name} is a tensor that requires a gradient.*{way}"
    given = qkv()
    planner = flexcp.Planner(
        HEADS, 1, SIZE, latent=6, dtype="float32", cluster=flexcp.cluster("cpu", 1, 1), strategy="dp"
    )
    latents, up = flexcp.bind(planner([TOKENS])), torch.ones(6, HEADS, SIZE)

    def expand(latent: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.einsum("tl,lhw->thw", latent, up)
        return k, k

    calls: list[Callable[[], Any]] = [
        lambda: flexcp.attention(**given, step=step, **number),
        lambda: flexcp.slice_attention(**given, mask=flexcp.causal(), **number),
        lambda: flexcp.latent_attention(given["q"], torch.ones(TOKENS, 6), expand, [up], latents, **number),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=words):
            call()
        with torch.no_grad():
            call()


def test_a_mean_is_no_sum_to_be_shared(step: flexcp.Step) -> None:
    rows = logits().requires_grad_()
    for mean in (torch.nn.functional.cross_entropy(rows, labels()), rows.mean()):
        with pytest.raises(ValueError, match=r'total is a mean.* by the 8 labels.*reduction="sum"'):
            step.share(mean, 8, without_attention=True)
        assert step.share(mean, 1, without_attention=True).item() == mean.item(), "the mean over ranks of their means"
    total = torch.nn.functional.cross_entropy(rows, labels(), reduction="sum")
    assert step.share(total, 8, without_attention=True).item() == pytest.approx(total.item() / 8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_labels_of_narrow_token_ids_have_room_for_what_is_ignored(step: flexcp.Step, dtype: torch.dtype) -> None:
    tokens = torch.arange(step.plan.batch.tokens)
    assert torch.equal(step.labels(tokens.to(dtype)), step.labels(tokens))
    assert (step.labels(tokens) == -100).any()


@pytest.mark.parametrize(
    "call",
    [
        lambda step: step.shard(None),
        lambda step: step.gather([1]),
        lambda step: step.roll(torch.zeros(())),
        lambda step: step.roll(torch.zeros(8), 1.5),
        lambda step: step.roll(torch.zeros(8), 1, fill="x"),
        lambda step: step.shard(torch.zeros(8), pad="x"),
        lambda step: step.labels([1, 2]),
        lambda step: step.labels(torch.zeros(8), ignore=[1]),
        lambda step: step.relayout(None),
        lambda step: step.restore(3),
        lambda step: step.prepare(1.5),
        lambda step: step.relayout(torch.zeros(8), [torch.zeros(8, dtype=torch.bfloat16)]),
    ],
)
def test_a_step_names_what_it_cannot_take(step: flexcp.Step, call: Callable[[flexcp.Step], Any]) -> None:
    with pytest.raises(ValueError, match=r"; got |one cannot be read"):
        call(step)


@pytest.mark.parametrize("name", ["shard", "labels"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.tolist(), r"^step\.{0} takes {1} as a tensor .*; got a list; pass torch\.tensor\({1}\)$"),
        (lambda x: x[None], r"^step\.{0}: {1} has shape \(1, 8\), but the plan's batch has 8 tokens; pass {1}\[0\]$"),
        (lambda x: x[1:], r"^step\.{0}: {1} has shape \(7,\), but .* 8 tokens; pass those of the whole batch"),
    ],
)
def test_what_is_no_stream_is_told_the_way_out(step: flexcp.Step, name: str, change: Any, words: str) -> None:
    argument = {"shard": "full", "labels": "tokens"}[name]
    with pytest.raises(ValueError, match=words.format(name, argument)):
        getattr(step, name)(change(labels()))


def test_every_id_of_a_token_has_its_own_successor(step: flexcp.Step) -> None:
    ids = torch.stack([labels(), labels() + 10], 1)
    assert torch.equal(step.labels(ids), torch.stack([step.labels(column) for column in ids.T], 1))
    assert torch.equal(step.shard(ids), ids)


def test_ids_that_are_no_whole_numbers_are_refused(step: flexcp.Step) -> None:
    with pytest.raises(
        ValueError, match=r"tokens are torch\.float32, and token ids are whole numbers; pass tokens\.long"
    ):
        step.labels(labels().float())


@pytest.mark.parametrize("name", ["gather", "roll", "relayout"])
def test_local_rows_inside_a_batch_of_one_are_told_so(step: flexcp.Step, name: str) -> None:
    with pytest.raises(ValueError, match=r"keeps 8 tokens .* got a tensor of 1 rows; pass local\[0\]$"):
        getattr(step, name)(labels()[None])
    with pytest.raises(ValueError, match=r"got a list; make it one with torch\.tensor$"):
        getattr(step, name)(labels().tolist())


@pytest.mark.parametrize(
    ("name", "wrong"), [("plan", None), ("group", 5), ("timeout", None), ("telemetry", 5), ("arena", "x")]
)
def test_bind_names_what_it_cannot_take(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"({name}=|bind takes a).*got {wrong!r}"):
        flexcp.bind(**({"plan": planned()} | {name: wrong}))


def test_a_time_limit_is_seconds_or_a_timedelta() -> None:
    for right in (1.5, np.float32(1.5), timedelta(seconds=1.5)):
        assert time_limit(right) == timedelta(seconds=1.5)  # type: ignore[arg-type]
    assert time_limit(np.int64(2)) == time_limit(2) == timedelta(seconds=2)  # type: ignore[arg-type]
    numbers = (0, -1, float("nan"), float("inf"), MOST_SECONDS + 1, 10**400, np.float32("nan"), np.int64(0))
    for wrong in (*numbers, "5", True, np.True_, timedelta(0), timedelta(days=4000)):
        with pytest.raises(ValueError, match="timeout= is a timedelta or seconds"):
            time_limit(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1.5, [1], object(), torch.zeros(2)])
@pytest.mark.parametrize("name", ["cost", "model", "strategy"])
def test_a_planner_names_what_it_cannot_take(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"(^{name}=|a {name} is given).*; got "):
        flexcp.Planner(4, **{name: wrong})


@pytest.mark.parametrize(
    ("documents", "way"),
    [
        ([1, 2, 3], r"pass torch\.tensor\(tokens\)$"),
        ([torch.arange(3), torch.arange(5)], r"pass the documents end to end, torch\.cat\(tokens\)$"),
        ([[1, 2, 3], [4]], r"end to end, torch\.tensor\(\[token for document in tokens for token in document\]\)$"),
    ],
)
def test_a_list_is_told_how_it_becomes_a_stream(step: flexcp.Step, documents: Any, way: str) -> None:
    with pytest.raises(ValueError, match=way):
        step.labels(documents)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bool]
)
def test_rows_of_any_dtype_move(step: flexcp.Step, dtype: torch.dtype) -> None:
    values = torch.arange(TOKENS * 2).view(TOKENS, 2) % 2
    rolled = step.roll(values.to(dtype), 1)
    assert rolled.dtype == dtype and torch.equal(rolled.long(), step.roll(values, 1))
    back = step.restore(step.relayout(values.to(dtype), "zigzag"), "zigzag")
    assert back.dtype == dtype and torch.equal(back.long(), values)


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (torch.int64, float("nan")),
        (torch.int64, 0.5),
        (torch.int64, 2**70),
        (torch.uint8, -1),
        (torch.bool, 2),
        (torch.float16, 1e6),
    ],
)
def test_a_number_that_rows_cannot_hold_is_named(step: flexcp.Step, dtype: torch.dtype, wrong: float) -> None:
    rows = torch.zeros(TOKENS, dtype=dtype)
    with pytest.raises(ValueError, match=r"step\.roll: fill=.* does not fit rows of torch.*another dtype"):
        step.roll(rows, 1, wrong)
    with pytest.raises(ValueError, match=r"step\.shard: pad=.* does not fit rows of torch.*another dtype"):
        step.shard(rows, wrong)


def test_numbers_that_rows_hold_are_taken(step: flexcp.Step) -> None:
    for dtype, fill in ((torch.int64, 3.0), (torch.float16, float("nan")), (torch.float32, 1), (torch.complex64, 2)):
        assert step.roll(torch.zeros(TOKENS, dtype=dtype), 1, fill)[0].isnan() == (fill != fill)


@pytest.mark.parametrize("shift", [2**70, -(2**70)])
def test_rows_from_far_away_are_outside_of_every_document(step: flexcp.Step, shift: int) -> None:
    assert step.roll(torch.ones(TOKENS), shift, fill=7).tolist() == [7.0] * TOKENS


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_stays_in_its_process_and_its_plan_travels(step: flexcp.Step, way: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"a Step cannot be pickled or copied.*step\.plan.*bind it in each process"):
        way(step)
    way(step.plan)
