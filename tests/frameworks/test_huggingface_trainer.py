"""Tests of the adapter for Transformers' Trainer: a stock run in data parallelism, and a run with flexcp in which ranks
share every batch, have the same numbers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parallel_runs import copies_of_a_shared_model, labels_of_some_ranks
from trainer_runs import Case, evaluated, evaluated_shares, one_process, trained, with_accelerate

import flexcp
from flexcp.frameworks import huggingface
from flexcp.frameworks.collated import read_batch, with_trained_labels
from flexcp.frameworks.huggingface_trainer import FlexcpTrainer, prepared
from flexcp.frameworks.shared_batch import lengths_of, next_in_document
from flexcp.frameworks.shared_forward import share_forward
from flexcp.measure.ranks import RankError, RankPool
from lib.model_runs import Run, make_model


@pytest.fixture(scope="module")
def theirs(two: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two.run(trained, str(tmp_path_factory.mktemp("theirs")), Case(ours=False, predicting=True))[0]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that losses, evaluation and weights of two runs are the same."""
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-5)
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("collator", ["flat", "padded"])
def test_the_trainer_trains_as_without_flexcp(
    two: RankPool, theirs: dict[str, Any], tmp_path: Path, collator: str
) -> None:
    for ours in two.run(trained, str(tmp_path), Case(collator, predicting=collator == "padded")):
        assert_same(ours, theirs)
        if collator == "padded":
            torch.testing.assert_close(ours["predictions"][0], theirs["predictions"][0], atol=1e-5, rtol=1e-5)
            assert ours["predictions"][1] == pytest.approx(theirs["predictions"][1], rel=1e-5)
        for entry in ours["logs"]:
            assert entry["tokens_per_second"] > 0
            assert 1 <= entry["token_balance"] < 1.5
            assert 1 <= entry["attention_balance"] < 1.5
    assert theirs["losses"][0] != theirs["losses"][1]


@pytest.mark.parametrize("collator", ["left", "labelled pads", "packed"])
def test_labels_that_no_token_predicts_are_in_no_divisor(
    two: RankPool, theirs: dict[str, Any], tmp_path: Path, collator: str
) -> None:
    """These collators label first tokens of documents or padding, which no loss has in its sum."""
    for ours in two.run(trained, str(tmp_path), Case(collator)):
        assert_same(ours, theirs)
        for mine, right in zip(ours["logs"], theirs["logs"], strict=True):
            assert mine["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "more"), [("own loss", {}), ("plain", {"label_smoothing_factor": 0.1})], ids=["own loss", "smoothing"]
)
def test_a_loss_that_is_no_mean_over_tokens_is_the_same(
    two: RankPool, theirs: dict[str, Any], tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    right = two.run(trained, str(tmp_path), Case(ours=False, kind=kind, more=more))[0]
    assert right["losses"] != pytest.approx(theirs["losses"], rel=1e-4), "another loss than the Trainer's"
    for collator in ["padded"] if kind == "own loss" else ["padded", "packed", "left"]:
        for ours in two.run(trained, str(tmp_path), Case(collator, kind=kind, more=more)):
            assert_same(ours, right)


def test_under_fsdp2_the_trainer_trains_as_under_ddp(two: RankPool, theirs: dict[str, Any], tmp_path: Path) -> None:
    more = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Gemma2DecoderLayer"]}}
    for ours in two.run(trained, str(tmp_path), Case(more=more)):
        assert ours["wrapped"].startswith("FSDP")
        assert_same(ours, theirs)


def test_a_run_goes_on_in_the_middle_of_an_epoch(two: RankPool, tmp_path: Path) -> None:
    more = {
        "max_steps": 12,
        "save_steps": 2,
        "save_strategy": "steps",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "optim": "adamw_torch",
        "save_total_limit": None,
    }
    whole = two.run(trained, str(tmp_path), Case("flat", more=more))[0]
    for number in range(4, 13, 2):
        shutil.rmtree(tmp_path / f"checkpoint-{number}")
    resumed = two.run(trained, str(tmp_path), Case("flat", more=more, resume=True))[0]
    assert len(whole["losses"]) == 12
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-6), (
        "the log of a resumed run begins with that of the first"
    )
    assert resumed["logs"][5]["tokens_per_second"] != whole["logs"][5]["tokens_per_second"], "steps were run again"


def test_every_rank_evaluates_the_whole_batch(two: RankPool) -> None:
    """The Trainer weights the losses that ranks return by their numbers of documents, which may differ in the last
    batch; so every rank must return the loss of the whole batch.
    """
    assert two.run(evaluated_shares) == [2.5, 2.5]


@pytest.mark.parametrize(
    ("kind", "collator", "count"),
    [
        ("plain", "padded", 11),
        ("plain", "flat", 11),
        ("plain", "flat", 8),
        ("metrics", "padded", 11),
        ("smoothing", "padded", 11),
        ("sft", "padded", 11),
        ("sft", "padded", 8),
        ("sft", "flat", 11),
        ("plain", "packed", 11),
        ("metrics", "left", 11),
        ("metrics", "packed", 8),
        ("smoothing", "left", 11),
        ("sft", "labelled pads", 11),
    ],
)
def test_an_evaluation_that_ranks_do_not_divide_is_that_of_one_process(
    two: RankPool, tmp_path: Path, kind: str, collator: str, count: int
) -> None:
    """Accelerate fills the last batch with repeated samples: with 11 samples in batches of 6 it repeats one; with 8,
    all samples of the second rank are repeated ones.
    """
    right = evaluated(None, str(tmp_path), kind, "padded", count, 6)
    for ours in two.run(evaluated, str(tmp_path), kind, collator, count, 6):
        assert ours == pytest.approx(right, rel=1e-5)


def test_a_list_of_documents_keeps_its_columns(two: RankPool, theirs: dict[str, Any], tmp_path: Path) -> None:
    """By default the Trainer removes columns that ``model.forward`` does not take; a wrapped forward takes the same."""
    for ours in two.run(trained, str(tmp_path), Case(more={"remove_unused_columns": True})):
        assert_same(ours, theirs)


def test_a_shared_forward_has_the_models_signature() -> None:
    model = make_model(Run("llama"), "eager")
    names = [inspect.signature(method) for method in (model.forward, model.generate)]
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, 1))
    for _ in range(2):
        share_forward(model, planner)
        assert [inspect.signature(method) for method in (model.forward, model.generate)] == names


def test_a_copy_of_a_shared_model_runs_its_own_weights(pool: RankPool) -> None:
    """Averages of weights and reference policies are deep copies, which hold the methods of the model they are of."""
    for found in pool.run(copies_of_a_shared_model, ranks=2):
        assert found == {"model": [True, True], "copy": [True, True]}


def test_a_copy_of_a_shared_model_whose_forward_is_bound_to_nothing_is_refused() -> None:
    model = make_model(Run("llama", dtype="float32"), "eager")
    model.forward = functools.partial(type(model).forward, model)
    share_forward(model, huggingface.planner(model, flexcp.cluster("cpu", 1, 1)))
    with pytest.raises(RuntimeError, match=r"make the copy first, and share each of them with share_forward"):
        copy.deepcopy(model)(input_ids=torch.arange(4)[None])


def test_without_labels_gradients_are_whole_too(two: RankPool, tmp_path: Path) -> None:
    """Without labels the Trainer does not scale by their number: the loss of a micro-batch is its mean, and
    micro-batches are averaged.
    """
    more = {"gradient_accumulation_steps": 1}
    right = two.run(trained, str(tmp_path), Case(more=more))[0]
    ours = two.run(trained, str(tmp_path), Case("unlabelled", more=more))[0]
    assert ours["losses"] == pytest.approx(right["losses"], rel=1e-6)
    for name, weight in right["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=True"),
        ({"parallelism_config": {"cp_size": 2}}, "cp_size=2 beside flexcp.*set cp_size=1"),
        ({"parallelism_config": {"tp_size": 2}}, "tp_size=2 beside flexcp.*set tp_size=1"),
    ],
)
def test_what_would_make_another_loss_is_refused(
    two: RankPool, tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(RankError, match=words):
        two.run(trained, str(tmp_path), Case(more=arguments))


def test_a_trainer_whose_model_ignores_the_step_stops(two: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"never used it"):
        two.run(trained, str(tmp_path), Case("flat", ignoring=True))


def test_accelerate_with_a_loop_of_ones_own(two: RankPool) -> None:
    right = one_process()
    for losses in two.run(with_accelerate):
        assert losses == pytest.approx(right, rel=1e-6), "Transformers takes its loss in float32"


def test_documents_are_read_from_positions() -> None:
    assert lengths_of(torch.tensor([[0, 1, 2, 0, 0, 1]])) == [3, 1, 2]
    assert lengths_of(torch.tensor([[5, 6, 0], [0, 1, 2]])) == [2, 1, 3]
    assert next_in_document(torch.tensor([1, 2, 3, 4]), [3, 1]).tolist() == [2, 3, -100, -100]


def batch(**fields: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return a collated batch of the given fields and ids 1, 2, ... row after row, with 0 where the mask is 0."""
    found = {name: torch.tensor(values) for name, values in fields.items()}
    shape = next(iter(found.values())).shape
    ids = torch.arange(1, shape.numel() + 1).view(shape)
    return {"input_ids": ids * (found.get("attention_mask", ids) != 0)} | found


PADDED = [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
NUMBERED = [1, 1, 1, 1, 1, 2, 2, 2, 0, 0]
PACKED = [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"position_ids": [PACKED], "attention_mask": [PADDED]},
        {"attention_mask": [NUMBERED]},
        {"position_ids": [PACKED], "attention_mask": [NUMBERED]},
        {"position_ids": [PACKED], "attention_mask": [PADDED], "seq_idx": [[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]]},
    ],
)
def test_packed_documents_stay_apart_beside_padding(fields: dict[str, list[list[int]]]) -> None:
    found = read_batch(batch(**fields))
    assert found.lengths == [5, 3]
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found.labels.tolist() == [2, 3, 4, 5, -100, 7, 8, -100]


def test_rows_may_be_padded_on_either_side_or_hold_nothing() -> None:
    masks = [[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    for fields in ({}, {"position_ids": [[1, 1, 0, 1], [0, 1, 2, 1], [1, 1, 1, 1]]}):
        assert read_batch(batch(attention_mask=masks, **fields)).lengths == [2, 3]
    assert read_batch(batch(attention_mask=[[0, 0], [0, 0]])).lengths == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"position_ids": [list(range(10))], "attention_mask": [NUMBERED]},
            r"attention_mask says.*\[5, 3\].*position_ids says \[8\]",
        ),
        ({"position_ids": [PACKED], "seq_idx": [[0] * 10]}, r"seq_idx says that documents have \[10\]"),
        (
            {"attention_mask": [[1, 1, 1]], "cu_seq_lens_q": [0, 4, 9]},
            r"cu_seq_lens_q says that documents have \[4, 5\] tokens, but the batch has 3",
        ),
        ({"attention_mask": [[1, 1, 0, 1]]}, r"padding between a row's tokens"),
        ({"attention_mask": [[1, 1, 0, 1]], "position_ids": [[0, 1, 2, 3]]}, r"jump inside a row"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_batch(batch(**fields))


def test_labels_of_padding_are_warned_of() -> None:
    """Without flexcp, Transformers would train on these labels; flexcp drops padding."""
    padded = {"input_ids": torch.arange(1, 5)[None], "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    with pytest.warns(UserWarning, match=r"1 padding tokens have labels: .*masked_fill\(attention_mask == 0, -100\)"):
        read_batch(padded | {"labels": padded["input_ids"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_batch(padded | {"labels": torch.tensor([[1, 2, 3, -100]])})
        read_batch(padded)


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"attention_mask": [[0, 0, 1, 1], [1, 1, 1, 0]]}, [[-100, -100, -100, 4], [-100, 6, 7, -100]]),
        ({"position_ids": [[0, 1, 2, 0, 0, 1]]}, [[-100, 2, 3, -100, -100, 6]]),
        ({"position_ids": [[0, 1, 0, 1]], "attention_mask": [[1, 1, 1, 0]]}, [[-100, 2, -100, -100]]),
    ],
)
def test_trained_labels_are_those_of_documents_without_their_first_tokens(
    fields: dict[str, list[list[int]]], right: list[list[int]]
) -> None:
    given = batch(**fields)
    with warnings.catch_warnings(action="ignore"):
        found = with_trained_labels(given | {"labels": given["input_ids"].clone()})
    assert found["labels"].tolist() == right
    assert torch.equal(found["input_ids"], given["input_ids"])
    assert with_trained_labels(given) == given


def test_a_mask_of_another_kind_is_refused() -> None:
    for mask in (torch.zeros(1, 1, 4, 4), torch.tensor([[0.0, -1.0, 0.0, 0.0]])):
        with pytest.raises(NotImplementedError, match=r"padding mask of \(1, 4\) tokens"):
            read_batch({"input_ids": torch.arange(4)[None], "attention_mask": mask})


IDS = torch.arange(1, 10)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": IDS}, r"input_ids has shape \(9,\), but a batch has \[rows, columns\]: pass input_ids\[None\]"),
        ({"input_ids": IDS, "labels": IDS}, r"input_ids has shape \(9,\).*pass input_ids\[None\]"),
        ({"input_ids": IDS[None, None]}, r"input_ids has shape \(1, 1, 9\).*pass a row of token ids for each sample"),
        ({"input_ids": [IDS.tolist()]}, r"input_ids is a list, but a batch holds tensors: .*return_tensors=\"pt\""),
        ({"input_ids": IDS[None].float()}, r"input_ids is a tensor of torch.float32.*pass input_ids.long\(\)"),
        ({"labels": IDS}, r"labels has shape \(9,\), but input_ids has \(1, 9\): pass labels\[None\]"),
        ({"labels": IDS[None, :-1]}, r"labels has shape \(1, 8\), but input_ids has \(1, 9\): give each token its own"),
        ({"labels": [IDS.tolist()]}, r"labels is a list.*return_tensors=\"pt\""),
        ({"labels": IDS[None].float()}, r"labels is a tensor of torch.float32.*pass labels.long\(\)"),
        ({"labels": IDS[None].byte()}, r"the batch: labels are torch.uint8.*-100"),
        ({"cu_seq_lens_q": [0, 4, 9]}, r"cu_seq_lens_q is a list.*: pass torch.tensor\(cu_seq_lens_q\)"),
        ({"cu_seq_lens_q": torch.tensor([[0, 9]])}, r"cu_seq_lens_q has shape \(1, 2\).*pass cu_seq_lens_q\[0\]"),
        ({"position_ids": list(range(9))}, r"position_ids is a list.*return_tensors=\"pt\""),
        ({"position_ids": torch.zeros(3, 1, 9).long()}, r"position_ids has shape \(3, 1, 9\).*\(1, 9\): give a number"),
        ({"position_ids": torch.arange(8)}, r"position_ids has shape \(8,\), but input_ids has \(1, 9\)"),
        (
            {"position_ids": torch.arange(9.0)},
            r"position_ids is a tensor of torch.float32, but holds whole numbers: pass position_ids.long",
        ),
        ({"seq_idx": torch.zeros(2, 9).int()}, r"seq_idx has shape \(2, 9\), but input_ids has \(1, 9\)"),
        ({"attention_mask": [[1] * 9]}, r"attention_mask is a list.*return_tensors=\"pt\""),
        ({"attention_mask": torch.ones(9)}, r"attention_mask has shape \(9,\).*: pass attention_mask\[None\]"),
    ],
)
def test_a_part_of_another_type_or_shape_is_one_clear_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}") as refused:
        prepared({"input_ids": IDS[None], **fields}, None)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_positions_may_be_one_row_for_all_rows() -> None:
    for positions in (torch.arange(4), torch.arange(4)[None]):
        assert read_batch({"input_ids": IDS[:8].view(2, 4), "position_ids": positions}).lengths == [4, 4]


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        (
            {"idx": IDS},
            NotImplementedError,
            r"holds idx, which .*, drop it before or in the collator: batch.pop\('idx'\)$",
        ),
        ({"idx": 1, "a": 2}, NotImplementedError, r"holds a, idx, .*: batch.pop\('a'\), batch.pop\('idx'\)$"),
        ({"input_ids": None, "tokens": IDS}, ValueError, r"has no input_ids.*; it holds tokens: give .*'input_ids'"),
        ({"input_ids": None}, ValueError, r"has no input_ids.*; it holds nothing"),
    ],
)
def test_other_parts_have_a_way_out(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=rf"^the batch {words}"):
        prepared({"input_ids": IDS[None], **fields}, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a dict with input_ids; got a tensor of shape \(9,\)"):
        prepared(IDS, None)  # type: ignore[arg-type]


def test_ranks_with_and_without_labels_are_refused_on_all_of_them(pool: RankPool) -> None:
    """Otherwise the ranks without labels would silently train on prompts too."""
    for said in pool.run(labels_of_some_ranks, "a document", ranks=2):
        assert said.startswith("the batch of rank 0 has labels and that of rank 1 has none, so rank 1 would train on")
    assert pool.run(labels_of_some_ranks, "no documents", ranks=2) == ["3 labels"] * 2
    assert pool.run(labels_of_some_ranks, "none has", ranks=2) == ["14 labels"] * 2


def test_packing_without_positions_is_one_clear_line() -> None:
    trainer: Any = SimpleNamespace(args=SimpleNamespace(packing=True, packing_strategy="bfd"))
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    with pytest.raises(ValueError, match="nothing says where documents begin; let the collator return position_ids"):
        FlexcpTrainer._refuse_lost_borders(trainer, batch)
    FlexcpTrainer._refuse_lost_borders(trainer, batch | {"position_ids": torch.arange(4)[None]})


def test_a_trainer_asks_for_a_cluster_or_a_planner() -> None:
    with pytest.raises(ValueError, match=r"cluster=flexcp.cluster"):
        FlexcpTrainer(None)
