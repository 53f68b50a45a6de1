"""Tests of the Hugging Face adapter: masks by layer, packing, refusals that name the cause, and that a step which the
model never uses is an error. Training on ranks is tested in test_huggingface_training.py.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_runs import (
    counted_labels,
    ids_cut_by_hand,
    own_ids_of_few_tokens,
    rows_after_a_failure,
    streams_of_their_own,
    uses_of_the_count,
    whole_stream,
    without_a_step,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.masking_utils import and_masks, bidirectional_mask_function, causal_mask_function, or_masks

import flexcp
from flexcp.executor.step import Step
from flexcp.frameworks import huggingface, used
from flexcp.frameworks.huggingface_attention import flexcp_attention, flexcp_mask
from flexcp.measure.ranks import RankPool
from flexcp.models.config import read_config
from lib.model_runs import FAMILIES, SIZES, WINDOW, Run, make_config, make_model, train_alone

LENGTHS = [20, 1, 9, 3]
TOKENS = torch.randint(64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])


def bound(family: str = "llama", **options: Any) -> Step:
    config = make_config(family)
    planner = huggingface.planner(config, flexcp.cluster("cpu", 1, 1), "float64", strategy="dp")
    return flexcp.bind(planner(LENGTHS, **({"masks": huggingface.masks(config)} | options)))


def permuting_planner(family: str) -> flexcp.Planner:
    return huggingface.planner(make_config(family), flexcp.cluster("cpu", 1, 1), "float64", strategy="blocks")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """One model of each family, turned on, and its logits document by document under dense attention."""
    found = {}
    for family in FAMILIES:
        run = Run(family, steps=1)
        train_alone(run)  # registers the dense attention
        dense = make_model(run, "flexcp_measure_dense")
        with torch.no_grad():
            right = torch.cat([dense(t[None], use_cache=False).logits[0] for t in TOKENS.split(LENGTHS)])
        huggingface.turn_on(dense)
        found[family] = (dense, right)
    return found


# --- numbers of one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_of_one_process_are_attended_alone(models: dict[str, Any], family: str) -> None:
    model, right = models[family]
    borders = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 20, "max_length_k": 20}
    for more in ({}, packed, {"attention_mask": torch.ones_like(TOKENS)[None]}):
        logits = model(TOKENS[None], position_ids=POSITIONS[None], use_cache=False, **more).logits[0]
        torch.testing.assert_close(logits, right, atol=1e-11, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_one_rank_gives_the_same(models: dict[str, Any], family: str) -> None:
    model, right = models[family]
    step = bound(family)
    found = model(**huggingface.inputs(TOKENS, step))
    torch.testing.assert_close(found.logits[0], right, atol=1e-11, rtol=0)
    assert step.calls == 2
    labels = step.labels(TOKENS)
    assert float(found.loss) == pytest.approx(float(step.loss(found.logits[0], labels)), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_nobody_gave_are_the_steps(models: dict[str, Any], family: str) -> None:
    model, right = models[family]
    assert huggingface.masks(model) == huggingface.masks(model.config)
    order = torch.randperm(len(TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    plan = permuting_planner(family)(LENGTHS, masks=huggingface.masks(make_config(family)), layout=[order])
    for _ in range(2):  # the step of each turn is used by several forwards
        step = flexcp.bind(plan)
        for arguments, more in (((), {"position_ids": None}), ((), {}), ((None, None), {})):
            logits = model(step.shard(TOKENS)[None], *arguments, use_cache=False, step=step, **more).logits[0]
            torch.testing.assert_close(logits, right[order], atol=1e-11, rtol=0)
    with pytest.raises(ValueError, match=r"position_ids=step\.positions\[None\]"):
        model(step.shard(TOKENS)[None], position_ids=torch.arange(33)[None], use_cache=False, step=step)


def test_a_compiled_model_without_positions_is_refused(models: dict[str, Any]) -> None:
    compiled = torch.compile(models["llama"][0], backend="eager", fullgraph=True)
    step = bound()
    given = huggingface.inputs(TOKENS, step)
    compiled(**given)
    del given["position_ids"]
    with pytest.raises(Exception, match=r"under torch\.compile give the model position_ids"):
        compiled(**given)


def test_rows_of_a_batch_are_documents(models: dict[str, Any]) -> None:
    model, _ = models["gemma2"]
    both = TOKENS[:20].view(2, 10)
    logits = model(both, use_cache=False).logits
    for row, found in zip(both, logits, strict=True):
        torch.testing.assert_close(found, model(row[None], use_cache=False).logits[0], atol=1e-12, rtol=0)


def test_labels_of_ones_own_are_shifted_and_counted() -> None:
    step = bound()
    labels = TOKENS.clone()
    labels[2:7] = -100
    given = huggingface.inputs(TOKENS, step, labels)
    assert given["shift_labels"][0, :7].tolist() == [int(TOKENS[1]), -100, -100, -100, -100, -100, int(TOKENS[7])]
    assert given["num_items_in_batch"] == int((given["shift_labels"] != -100).sum()) == len(TOKENS) - len(LENGTHS) - 5
    count, valid = given["num_items_in_batch"], len(TOKENS) - len(LENGTHS) - 5
    assert (float(count), count.item(), sum([count, count])) == (valid, valid, 2 * valid)
    assert (count / 4, count / count, float(torch.tensor(2.0) * count)) == (valid / 4, 1, 2 * valid)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_number_of_labels_is_that_of_all_ranks_wherever_it_is_read(pool: RankPool, as_tensor: bool) -> None:
    """Under ``gradients="averaged"`` only tensors are divided by another number, which holds the ranks."""
    for said in pool.run(uses_of_the_count, TOKENS, LENGTHS, as_tensor, ranks=2):
        valid = len(TOKENS) - len(LENGTHS)
        assert said == [
            [str(valid)] * 3 + [f"{valid:.1f}", f"{valid:>6d}", f"{valid:,}"],
            [True, True, True, False, True, True],
            [valid - 1, 1 - valid, 2 / valid, valid + 0.5, True],
            [valid, int, True, True],
            [2 * 3.0 / valid],
        ]


def test_a_batch_without_a_label_counts_none_and_loses_nothing(models: dict[str, Any]) -> None:
    """Several batches are weighted by their counts of labels, so the count of a batch without labels must be 0."""
    given = huggingface.inputs(TOKENS, bound(), labels=torch.full_like(TOKENS, -100))
    assert int(given["num_items_in_batch"]) == 0
    assert models["llama"][0](**given).loss.item() == 0.0


def test_labels_without_a_sign_are_refused() -> None:
    with pytest.raises(ValueError, match=r"huggingface\.inputs: labels are torch\.uint8, which holds no negative mark"):
        huggingface.inputs(TOKENS, bound(), labels=TOKENS.to(torch.uint8))


def test_labels_that_are_already_shifted_are_refused() -> None:
    step = bound()
    shifted = step.labels(TOKENS)[step.indices.argsort()]
    for labels in (shifted, TOKENS.roll(-1), torch.where(torch.arange(len(TOKENS)) < 5, -100, shifted)):
        with pytest.raises(ValueError, match=r"labels are already shifted.*again"):
            huggingface.inputs(TOKENS, step, labels)
    huggingface.inputs(torch.ones_like(TOKENS), step, torch.ones_like(TOKENS))
    huggingface.inputs(TOKENS, step, torch.full_like(TOKENS, -100))


def test_a_mark_that_transformers_does_not_ignore_is_named() -> None:
    step = bound()
    labels = torch.where(torch.arange(len(TOKENS)) == 2, -1, TOKENS)
    with pytest.raises(ValueError, match=r"label of token 2 is -1, .*labels\.masked_fill\(labels == -1, -100\)"):
        huggingface.inputs(TOKENS, step, labels)
    huggingface.inputs(TOKENS, step, labels.masked_fill(labels == -1, -100))


@pytest.mark.filterwarnings("ignore:mkldnn")
def test_autocast_reaches_queries_keys_and_values() -> None:
    """RoPE in float32 leaves queries and keys in float32, while values are in autocast's dtype."""
    model, where = make_model(Run("llama", dtype="float32"), "sdpa"), flexcp.cluster("cpu", 1, 1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        right = torch.cat([model(t[None], use_cache=False).logits[0] for t in TOKENS.split(LENGTHS)])
        huggingface.turn_on(model)
        step = flexcp.bind(huggingface.planner(model, where, dtype="bfloat16", strategy="dp")(LENGTHS))
        found = model(step.shard(TOKENS)[None], step=step, use_cache=False).logits[0]
        torch.testing.assert_close(step.gather(found), right, atol=2e-2, rtol=0)
        step = flexcp.bind(huggingface.planner(model, where)(LENGTHS))
        with pytest.raises(ValueError, match=r'q is torch.bfloat16, .*plan with Planner\(dtype="bfloat16"\)'):
            model(step.shard(TOKENS)[None], step=step, use_cache=False)


# --- which mask a layer uses ------------------------------------------------------------------------------------------


def test_masks_are_counted_by_layer() -> None:
    assert huggingface.masks(make_config("llama")) == {"full": (flexcp.causal(), 2)}
    assert huggingface.masks(make_config("mistral")) == {"window": (flexcp.window(WINDOW - 1), 2)}
    both = {"full": (flexcp.causal(), 1), "window": (flexcp.window(WINDOW - 1), 1)}
    assert huggingface.masks(make_config("gemma2")) == both
    config = make_config("qwen3", layer_types=["full_attention", "linear_attention"])
    with pytest.raises(NotImplementedError, match=r"qwen3.*linear_attention.*masks="):
        huggingface.masks(config)


def test_a_layer_whose_window_the_plan_lacks_is_refused(models: dict[str, Any]) -> None:
    """The message says what to plan with, both for a plan of one's own and for ``prepared``."""
    called = r"huggingface\.masks\(model\.config\)\)"
    way_out = rf"planner\(lengths, masks={called}, or prepared\(batch, planner, masks={called}"
    with pytest.raises(ValueError, match=rf"^a layer with a window of {WINDOW} keys.*'mask' \(causal\); .*{way_out}"):
        models["mistral"][0](**huggingface.inputs(TOKENS, bound("mistral", masks=None)))
    with pytest.raises(ValueError, match=r"layer without a window.*'mask' \(window of 7 keys\)"):
        models["llama"][0](**huggingface.inputs(TOKENS, bound(masks=None, mask=flexcp.window(WINDOW - 1))))
    two = {"a": (flexcp.causal(), 1), "b": (flexcp.masks.prefix(2), 1)}
    with pytest.raises(ValueError, match=r"'a' or 'b'.*mask="):
        models["llama"][0](**huggingface.inputs(TOKENS, bound(masks=two)))


def test_documents_inside_the_window_need_no_window(models: dict[str, Any]) -> None:
    config = make_config("mistral")
    planner = huggingface.planner(config, flexcp.cluster("cpu", 1, 1), "float64", strategy="dp")
    tokens = TOKENS[: WINDOW + 2]
    plain, windowed = (
        models["mistral"][0](**huggingface.inputs(tokens, flexcp.bind(planner([WINDOW, 2], m)))).logits
        for m in (flexcp.causal(), flexcp.window(WINDOW - 1))
    )
    assert torch.equal(plain, windowed)


@pytest.mark.parametrize("keys", [sys.maxsize, 2**63, 10**20])
def test_a_window_without_a_limit_is_causal(models: dict[str, Any], keys: int) -> None:
    """Some configurations write a huge number where a layer has no window."""
    config = make_config("mistral")
    config.sliding_window = keys
    planner = huggingface.planner(config, flexcp.cluster("cpu", 1, 1), "float64", strategy="dp")
    step = flexcp.bind(planner(LENGTHS, masks=huggingface.masks(config)))
    pairs = sum(n * (n + 1) // 2 for n in LENGTHS)
    assert int(step.plan.work().sum()) == config.num_attention_heads * pairs
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, len(TOKENS), 8, dtype=torch.float64, generator=generator)
    given = {"query": x, "key": x[:, :2], "value": x[:, :2]}
    wanted = call(**given)[0]
    assert torch.equal(call(**given, step=step, sliding_window=keys)[0], wanted)
    assert torch.equal(call(**given, step="alone", sliding_window=keys)[0], wanted)


def test_a_plan_in_the_place_of_a_step_is_named(models: dict[str, Any]) -> None:
    plan = bound().plan
    with pytest.raises(ValueError, match=r"flexcp\.bind\(plan, group\)"):
        huggingface.inputs(TOKENS, plan)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"flexcp\.bind\(plan, group\)"):
        models["llama"][0](TOKENS[None], position_ids=POSITIONS[None], step=plan)


def test_a_model_that_was_not_turned_on_is_named_by_its_loss() -> None:
    model, step = make_model(Run("llama"), "sdpa"), bound()
    with pytest.raises(RuntimeError, match=r"was given to a model whose attention never used it"):
        model(**huggingface.inputs(TOKENS, step))
    huggingface.turn_on(model)
    assert model(**huggingface.inputs(TOKENS, step)).loss.isfinite()


def test_labels_that_the_model_would_shift_itself_are_refused(models: dict[str, Any]) -> None:
    step = bound()
    ids = step.shard(TOKENS)[None]
    with pytest.raises(ValueError, match=r"labels beside a step.*huggingface\.inputs\(tokens, step, labels\)"):
        models["llama"][0](ids, labels=ids, step=step, use_cache=False)


def test_labels_that_the_loss_would_pass_over_are_refused(models: dict[str, Any]) -> None:
    """The loss reads ``shift_labels``, and is divided by the number of labels that was counted in them."""
    model, given = models["llama"][0], huggingface.inputs(TOKENS, bound())
    masked = given["shift_labels"].clone()
    masked[0, :7] = -100
    with pytest.raises(
        ValueError, match=r"labels are not those in shift_labels.*huggingface\.inputs\(tokens, step, labels\)"
    ):
        model(**(given | {"labels": masked}))
    with pytest.raises(
        ValueError, match=r"shift_labels has 22 labels that count on this rank, but .* made for 29 here"
    ):
        model(**(given | {"labels": masked, "shift_labels": masked}))
    copied = given | {"labels": given["labels"].clone()}
    assert model(**copied).loss.item() == model(**given).loss.item()
    given["labels"][0, :7] = -100
    with pytest.raises(ValueError, match=r"labels that count on this rank"):
        model(**given)


def test_a_forward_that_failed_leaves_nothing_to_the_next(pool: RankPool) -> None:
    """A rank without tokens runs one dummy row, which must be removed from the outputs of that forward alone."""
    assert all(pool.run(rows_after_a_failure, ranks=3))


def test_a_full_mask_under_a_causal_model_is_refused(models: dict[str, Any]) -> None:
    step = bound(masks=None, mask=flexcp.full())
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is causal, but this plan's mask is full"):
        models["llama"][0](**huggingface.inputs(TOKENS, step))


@pytest.mark.parametrize("name", ["tokens", "labels"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[None], r": {0} has shape \(1, 33\), but the plan's batch has 33 tokens; pass {0}\[0\]$"),
        (
            lambda x: x[:, None],
            r": {0} has shape \(33, 1\), but holds one number .* 33 tokens, \(33,\); pass {0}\[:, 0\]$",
        ),
        (
            lambda x: torch.stack([x, x], 1),
            r": {0} has shape \(33, 2\), but holds one number .*; pass one of its columns$",
        ),
        (
            lambda x: x[1:],
            r": {0} has shape \(32,\), but the plan's batch has 33 tokens; pass those of the whole batch",
        ),
        (
            lambda x: x.tolist(),
            r" takes {0} as a tensor with a row for each token .*; got a list; pass torch\.tensor\({0}\)$",
        ),
        (lambda x: x.double(), r": {0} are torch\.float64, and token ids are whole numbers; pass {0}\.long\(\)$"),
    ],
)
def test_token_ids_and_labels_of_another_kind_are_named(name: str, change: Any, words: str) -> None:
    given = {"tokens": TOKENS, "labels": TOKENS.clone()}
    with pytest.raises(ValueError, match="^huggingface\\.inputs" + words.format(name)):
        huggingface.inputs(step=bound(), **(given | {name: change(given[name])}))


def test_ids_without_a_row_around_them_are_named(models: dict[str, Any]) -> None:
    step = bound()
    with pytest.raises(ValueError, match=r"input_ids has shape \(33,\).*input_ids\[None\]"):
        models["llama"][0](TOKENS, step=step)


def test_a_loss_without_the_count_of_labels_is_refused(models: dict[str, Any]) -> None:
    model, step = models["llama"][0], bound()
    given = huggingface.inputs(TOKENS, step)
    with pytest.raises(ValueError, match=r"num_items_in_batch=None is not what flexcp made"):
        model(**(given | {"num_items_in_batch": None}))
    half = model(**(given | {"num_items_in_batch": 2 * (len(TOKENS) - len(LENGTHS))})).loss
    assert half.item() == pytest.approx(model(**given).loss.item() / 2), "nothing is averaged: any number is right"


def test_labels_that_only_the_loader_ignores_are_refused(models: dict[str, Any]) -> None:
    """Transformers' loss ignores -100 and no other mark."""
    model, step = models["llama"][0], bound()
    given = huggingface.inputs(TOKENS, step)
    model(**given)
    step.ignore = int(TOKENS[1])
    with pytest.raises(ValueError, match=rf"loader marks .*Samples\(ignore={step.ignore}\).*== {step.ignore}, -100\)"):
        model(**given)


def test_a_class_or_another_object_in_the_place_of_a_model_is_named(models: dict[str, Any]) -> None:
    kind = type(models["llama"][0])
    for call in (huggingface.turn_on, huggingface.masks):
        with pytest.raises(ValueError, match=r"^LlamaForCausalLM is a class, not a model: .*LM\(config\)"):
            call(kind)
    for other, words in ((make_config("llama"), "a LlamaConfig"), ("llama", "'llama'"), (nn.Linear(1, 1), "a Linear")):
        with pytest.raises(ValueError, match=rf"^turn_on takes a model of Transformers; got {words}: "):
            huggingface.turn_on(other)  # type: ignore[arg-type]


def test_token_ids_that_differ_between_ranks_are_refused_on_all_of_them(pool: RankPool) -> None:
    """A rank that was not refused would wait for the other ranks in its first layer."""
    assert pool.run(streams_of_their_own, "the same", ranks=2) == ["accepted", "accepted"]
    for said in pool.run(streams_of_their_own, "others", ranks=2):
        assert re.match(r"the token ids of rank 1 are not those of rank 0.*huggingface_trainer\.prepared", said)


def test_labels_that_differ_between_ranks_are_refused_on_all_of_them(pool: RankPool) -> None:
    """Otherwise each rank would divide its loss by another count."""
    assert pool.run(streams_of_their_own, "labels of one rank", ranks=2) == ["accepted", "accepted"]
    for said in pool.run(streams_of_their_own, "other labels", ranks=2):
        assert said.startswith("the labels of rank 1 are not those of rank 0")


def test_a_rank_that_cannot_give_its_token_ids_is_not_waited_for_longer_than_binding(pool: RankPool) -> None:
    first, second = pool.run(streams_of_their_own, "too few", ranks=2)
    assert "tokens has shape (15,), but the plan's batch has 16 tokens" in second
    assert re.match(r"rank 1 did not say its token ids within 4 s\. Rank 1 says: huggingface\.inputs ended with", first)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ("cut by hand", [r"nothing has asked this step which: take them by step\.shard\(stream\)"]),
        ("labels too", [r"the labels of this loss are the tokens themselves.*step\.labels\(tokens\)"]),
        ("asked for", []),
    ],
)
def test_ids_are_those_of_the_step_and_not_the_labels(pool: RankPool, ids: str, words: list[str]) -> None:
    """A warning tells users who never asked the step for their rows. Positions that the adapter fills in do not count
    as asking, and neither do labels.
    """
    for said in pool.run(ids_cut_by_hand, ids, ranks=2):
        assert len(said) == len(words)
        assert all(re.search(word, text) for word, text in zip(words, said, strict=True))


@pytest.mark.parametrize("positions", [False, True])
def test_the_ids_of_all_ranks_are_refused(pool: RankPool, positions: bool) -> None:
    for said in pool.run(whole_stream, positions, ranks=2):
        assert re.match(r"input_ids has shape \(1, \d+\) \(the whole stream\), but rank \d keeps \d+ tokens", said)
        assert "step.shard(stream)[None]" in said


def test_a_rank_without_a_token_takes_part_with_ids_of_ones_own(pool: RankPool) -> None:
    found = pool.run(own_ids_of_few_tokens, ranks=3)
    assert sorted(tokens for tokens, _, _ in found) == [0, 0, 7]
    assert all(abs(loss) < 1e-9 and gradient < 1e-9 for _, loss, gradient in found), found


@pytest.mark.parametrize("gradients", ["summed", "averaged"])
def test_the_number_of_labels_as_an_integer_is_that_of_the_batch(pool: RankPool, gradients: str) -> None:
    assert pool.run(counted_labels, gradients, ranks=2) == [14, 14]


def test_a_planner_has_the_models_heads() -> None:
    shape = huggingface.planner(make_config("llama"), flexcp.cluster("cpu", 1, 2), torch.float32, tp=2).shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.dtype) == (2, 1, 8, "float32")
    with pytest.raises(ValueError, match=r"4 query and 2 KV heads.*tp=4"):
        huggingface.planner(make_config("llama"), flexcp.cluster("cpu", 1, 1), tp=4)


@pytest.mark.parametrize(
    ("family", "fields", "heads"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "hidden_size": 64}, (8, 2, 8)),
        ("falcon", {"new_decoder_architecture": True, "hidden_size": 64}, (8, 8, 8)),
        ("falcon", {"multi_query": True, "hidden_size": 64}, (8, 1, 8)),
        ("falcon", {"multi_query": False, "hidden_size": 64}, (8, 8, 8)),
        ("gpt_bigcode", {"multi_query": True, "n_embd": 64}, (8, 1, 8)),
        ("gpt2", {"n_embd": 64}, (8, 8, 8)),
        ("olmoe", {"num_key_value_heads": 4, "hidden_size": 64}, (8, 4, 8)),
    ],
)
def test_a_planner_reads_heads_as_the_models_type_does(
    tmp_path: Path, family: str, fields: dict[str, Any], heads: tuple[int, int, int]
) -> None:
    """``flexcp advise --model`` reads the same numbers of heads from the saved ``config.json``."""
    config = AutoConfig.for_model(family, num_attention_heads=8, num_hidden_layers=2, vocab_size=64, **fields)
    config.save_pretrained(tmp_path)
    for shape in (huggingface.planner(config, flexcp.cluster("cpu", 1, 1)).shape, read_config(tmp_path).shape):
        assert (shape.heads, shape.kv_heads, shape.head_dim) == heads


def test_a_planner_reads_the_usual_names_of_a_type_that_nobody_knows() -> None:
    config = PreTrainedConfig(num_attention_heads=8, num_key_value_heads=4, hidden_size=66, head_dim=16)
    config.model_type = "of_tomorrow"
    shape = huggingface.planner(config, flexcp.cluster("cpu", 1, 1)).shape
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (8, 4, 16)
    config.head_dim = None
    with pytest.raises(ValueError, match=r"PreTrainedConfig: 8 heads do not divide a hidden size of 66"):
        huggingface.planner(config, flexcp.cluster("cpu", 1, 1))


@pytest.mark.parametrize(("said", "planned"), [(None, "float32"), ("float64", "float64"), (torch.bfloat16, "bfloat16")])
def test_a_planner_has_the_models_dtype(said: Any, planned: str) -> None:
    where = flexcp.cluster("cpu", 1, 1)
    config = make_config("llama", dtype=said)
    assert huggingface.planner(config, where).shape.dtype == planned
    assert huggingface.planner(config, where, "float16").shape.dtype == "float16"
    model = AutoModelForCausalLM.from_config(config)
    assert huggingface.planner(model, where).shape.dtype == planned
    assert huggingface.planner(model.double(), where).shape.dtype == "float64", (
        "the weights' own, not the configuration's"
    )


# --- refusals ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    is_causal = True


def call(**change: Any) -> Any:
    x = torch.zeros(1, 4, len(TOKENS), 8, dtype=torch.float64)
    given = {"module": Layer(), "query": x, "key": x[:, :2], "value": x[:, :2], "attention_mask": None, "step": bound()}
    return flexcp_attention(**(given | {"position_ids": POSITIONS[None]} | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dropout": 0.25}, r"dropout.*0\.25.*attention_dropout=0"),
        ({"attention_mask": torch.zeros(1, 1, 33, 33)}, r"Layer got a mask tensor of shape \(1, 1, 33, 33\)"),
        ({"is_causal": False}, r"Layer is bidirectional"),
        ({"key": torch.zeros(1, 2, 40, 8)}, r"33 queries against 40 keys.*KV cache"),
        ({"position_bias": torch.zeros(1)}, r"Layer passes position_bias"),
        ({"output_attentions": True}, r"output_attentions"),
        ({"head_mask": torch.ones(4)}, r"head_mask"),
        ({"something_new": 1}, r"something_new"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        call(**change)
    call(output_attentions=False, use_cache=True, num_items_in_batch=3, head_mask=None)


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("gpt2", {"attn_pdrop": 0.25, "resid_pdrop": 0.25}, r"got 0\.25\); set attn_pdrop=0 in the config"),
        ("llama", {"attention_dropout": 0.25}, r"got 0\.25\); set attention_dropout=0 in the config"),
        ("bert", {"attention_probs_dropout_prob": 0.5, "is_decoder": True}, r"set attention_probs_dropout_prob=0 in"),
        ("doge", {"num_key_value_heads": 2}, r"DogeAttention got a mask .*if you passed none, the model itself makes"),
    ],
)
def test_a_refusal_names_what_this_model_calls_it(family: str, more: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **more))
    huggingface.turn_on(model)
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, 1), strategy="dp")
    with pytest.raises(NotImplementedError, match=words):
        model.train()(**huggingface.inputs(TOKENS, flexcp.bind(planner(LENGTHS))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"cu_seq_lens_q": torch.tensor([0, 33]), "cu_seq_lens_k": torch.tensor([0, 33])},
            r"\[0, 33\].*\[0, 20, 21, 30, 33\]",
        ),
        ({"position_ids": torch.arange(33)[None]}, r"position_ids=step\.positions\[None\]"),
        (
            {n: torch.zeros(2, 4 if n == "query" else 2, 33, 8) for n in ("query", "key", "value")},
            r"got 2 rows of 33.*end to end",
        ),
    ],
)
def test_mistakes_of_a_caller_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(**change)


def test_masks_of_other_kinds_are_refused(models: dict[str, Any]) -> None:
    assert flexcp_mask(mask_function=causal_mask_function) is None
    for function in (
        bidirectional_mask_function,
        or_masks(causal_mask_function, bidirectional_mask_function),
        and_masks(causal_mask_function, lambda *at: True),
    ):
        with pytest.raises(NotImplementedError, match=r"mask function of its own"):
            flexcp_mask(mask_function=function)
    with pytest.raises(NotImplementedError, match=r"attention_chunk_size=8"):
        flexcp_mask(
            mask_function=causal_mask_function, local_size=8, config=make_config("llama", attention_chunk_size=8)
        )
    padding = torch.ones_like(TOKENS)[None].index_fill(1, torch.tensor([0]), 0)
    with pytest.raises(NotImplementedError, match=r"padding mask.*end to end"):
        models["llama"][0](TOKENS[None], attention_mask=padding, use_cache=False)
    with pytest.raises(NotImplementedError, match=r"KV cache"):
        models["llama"][0].generate(TOKENS[None, :5], max_new_tokens=2, do_sample=False)


def test_a_model_with_an_attention_of_its_own_is_refused() -> None:
    from transformers import BloomConfig

    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(NotImplementedError, match=r"Bloom.*AttentionInterface"):
        huggingface.turn_on(model)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm"])
def test_a_model_whose_positions_begin_behind_padding_is_refused(family: str) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, **sizes, intermediate_size=8, is_decoder=True, pad_token_id=1)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotImplementedError, match=r"ForCausalLM numbers the tokens of a document from 2"):
        huggingface.turn_on(model)
    assert model.config._attn_implementation != "flexcp"


@pytest.mark.parametrize(
    ("family", "more"),
    [("opt", {"ffn_dim": 8, "word_embed_proj_dim": 8, "dropout": 0.0}), ("gpt2", {"attn_pdrop": 0, "resid_pdrop": 0})],
)
def test_learned_positions_are_those_of_the_model_itself(family: str, more: dict[str, Any]) -> None:
    """OPT also has an offset of positions, but adds it inside its embedding, so it is not refused as RoBERTa is."""
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **more), dtype=torch.float64)
    model.eval()
    alone = torch.cat([model(d[None], use_cache=False).logits[0] for d in TOKENS.split(LENGTHS)])
    huggingface.turn_on(model)
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, 1), strategy="dp")
    found = model(**huggingface.inputs(TOKENS, flexcp.bind(planner(LENGTHS)))).logits[0]
    torch.testing.assert_close(found, alone, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 1, "num_experts": 2}), ("phimoe", {})],
)
def test_windows_that_only_the_models_masks_have_are_kept(family: str, more: dict[str, Any]) -> None:
    """Layers of these families do not pass their window on to attention, and flexcp has no mask of the model."""
    sizes = SIZES | {"sliding_window": WINDOW, "intermediate_size": 16, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(family, **(sizes | {"num_experts_per_tok": 1, "initializer_range": 0.2} | more))
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=torch.float64).eval()
    alone = torch.cat([model(d[None], use_cache=False).logits[0] for d in TOKENS.split(LENGTHS)])
    huggingface.turn_on(model)
    masks = huggingface.masks(model)
    assert masks["window"] == (flexcp.masks.window(WINDOW - 1), 2 if family == "phimoe" else 1)
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, 1), strategy="dp")
    found = model(**huggingface.inputs(TOKENS, flexcp.bind(planner(LENGTHS, masks=masks)))).logits[0]
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
    packed = model(TOKENS[None], position_ids=POSITIONS[None], use_cache=False).logits[0]
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["ministral3", "persimmon", "ctrl"])
def test_packed_documents_are_attended_alone_where_layers_get_no_positions(family: str) -> None:
    """These models pass positions to their rotary embeddings alone, and not on to attention."""
    more: dict[str, Any] = {} if family != "ctrl" else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "dff": 48}
    config = AutoConfig.for_model(family, **(SIZES | {"sliding_window": None, "initializer_range": 0.2} | more))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    alone = torch.cat([model(d[None], use_cache=False).logits[0] for d in TOKENS.split(LENGTHS)])
    huggingface.turn_on(model)
    vectors = model.get_input_embeddings()(TOKENS[None].expand(2, -1))
    for tokens in ({"input_ids": TOKENS[None]}, {"input_ids": None, "inputs_embeds": vectors}):
        for rows in model(**tokens, position_ids=POSITIONS[None], use_cache=False).logits:
            torch.testing.assert_close(rows, alone, atol=1e-5, rtol=1e-5)


def test_registering_is_known_to_both_interfaces_and_may_be_repeated() -> None:
    huggingface.register()
    huggingface.register()
    assert AttentionInterface()["flexcp"] is flexcp_attention
    assert AttentionMaskInterface()["flexcp"] is flexcp_mask
    assert make_model(Run("llama"), "flexcp").config._attn_implementation == "flexcp"


def test_turning_on_again_changes_nothing() -> None:
    model, step = make_model(Run("llama"), "sdpa"), bound()
    for _ in range(2):
        huggingface.turn_on(model)
        hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
        assert model(**huggingface.inputs(TOKENS, step)).loss.isfinite()
    assert hooks == (6, 1)


def test_models_of_one_config_are_turned_on_together_and_those_of_a_copy_are_not() -> None:
    """Transformers keeps the attention implementation in the config, as the docstring of ``turn_on`` says."""
    config = make_config("llama")
    shared, of_copy = (type(make_model(Run("llama"), "sdpa"))(c) for c in (config, copy.deepcopy(config)))
    huggingface.turn_on(type(shared)(config))
    assert config._attn_implementation == shared.config._attn_implementation == "flexcp"
    assert of_copy.config._attn_implementation != "flexcp"
    logits = [model(TOKENS[None], position_ids=POSITIONS[None], use_cache=False).logits for model in (shared, of_copy)]
    assert all(found.isfinite().all() for found in logits), "both go on"


# --- a step cannot go unused ------------------------------------------------------------------------------------------


def test_a_step_given_to_a_model_that_ignores_it_is_an_error() -> None:
    step, model = bound(), make_model(Run("llama"), "sdpa")
    logits = model(TOKENS[None], position_ids=POSITIONS[None], use_cache=False, step=step).logits[0]
    assert step.calls == 0
    with pytest.raises(RuntimeError, match=r"never ran.*docs/frameworks\.md"):
        step.loss(logits, step.labels(TOKENS))
    with pytest.raises(RuntimeError, match=r"never ran.*docs/frameworks\.md"):
        step.share(logits.sum(), len(TOKENS))
    with pytest.raises(RuntimeError, match=r"never used it"), used(step):
        model(**huggingface.inputs(TOKENS, step))
    huggingface.turn_on(model)
    model.set_attn_implementation("sdpa")  # a user switches back to another attention
    with pytest.raises(RuntimeError, match=r"never used it"):
        model(**huggingface.inputs(TOKENS, step))
    model.set_attn_implementation("flexcp")
    with used(step):
        model(**huggingface.inputs(TOKENS, step))
    assert step.calls == 2


def test_no_step_on_several_ranks_must_be_meant(pool: RankPool) -> None:
    for message in pool.run(without_a_step, TOKENS, POSITIONS, ranks=2):
        assert "no step was given" in message
        assert "step='alone'" in message


def test_nothing_is_copied_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v of the layers are views of the projections, already in the row layout that flexcp needs."""
    seen: list[Tensor] = []

    def look(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.extend([q, k, v])
        return q

    monkeypatch.setattr("flexcp.frameworks.huggingface_attention.attention", look)
    x = torch.zeros(1, len(TOKENS), 4, 8, dtype=torch.float64)
    out, _ = call(query=x.transpose(1, 2), key=x.transpose(1, 2), value=x.transpose(1, 2))
    assert all(y.data_ptr() == x.data_ptr() and y.is_contiguous() for y in [*seen, out])


def test_nothing_is_copied_on_the_way_back() -> None:
    """Gradients reach the projections without a copy: no backward of a view fills zeros and copies into them."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    called: list[str] = []
    step = bound()
    heads, size = step.plan.shape.heads, step.plan.shape.head_dim
    x = torch.zeros(1, len(TOKENS), heads, size, dtype=torch.float64, requires_grad=True)
    kv = torch.zeros(1, len(TOKENS), step.plan.shape.kv_heads, size, dtype=torch.float64, requires_grad=True)
    out, _ = call(query=x.transpose(1, 2), key=kv.transpose(1, 2), value=kv.transpose(1, 2), step=step)
    with Names():
        out.sum().backward()
    assert any("attention_backward" in name for name in called)
    assert not [name for name in called if "select_backward" in name or "slice_backward" in name or "copy" in name]
