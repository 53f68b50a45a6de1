"""Proves the Trainer adapter: the Trainer's own run in data parallelism, and ours where ranks share every batch, have the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import evaluated_shares, one_process, trained, with_accelerate

from flexcp.frameworks.huggingface_trainer import _stream
from flexcp.frameworks.shared_batch import lengths_of, next_in_document
from flexcp.measure.ranks import RankError, RankPool


@pytest.fixture(scope="module")
def theirs(two: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two.run(trained, str(tmp_path_factory.mktemp("theirs")), "padded", False)[0]


@pytest.mark.parametrize("collator", ["flat", "padded"])
def test_the_trainer_trains_as_without_flexcp(
    two: RankPool, theirs: dict[str, Any], tmp_path: Path, collator: str
) -> None:
    for ours in two.run(trained, str(tmp_path), collator, True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-5)
        for name, weight in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][name], weight, atol=1e-6, rtol=1e-4)
        assert "prediction_loss_only=True" in ours["refused"]
    assert theirs["losses"][0] != theirs["losses"][1]


def test_a_trainer_that_evaluates_by_itself_has_the_same_loss(
    two: RankPool, theirs: dict[str, Any], tmp_path: Path
) -> None:
    for ours in two.run(trained, str(tmp_path), "padded", True, False, "like TRL"):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-5)


def test_every_rank_evaluates_the_whole_batch(two: RankPool) -> None:
    """The Trainer weighs what ranks return by their documents, of which the last batch may have fewer on one of them."""
    assert two.run(evaluated_shares) == [2.5, 2.5]


def test_without_labels_gradients_are_whole_too(two: RankPool, tmp_path: Path) -> None:
    """The Trainer then counts no labels and scales nothing: the loss of a micro-batch is its mean, and micro-batches are averaged."""
    more = {"gradient_accumulation_steps": 1}
    right = two.run(trained, str(tmp_path), "padded", True, False, "plain", more)[0]
    ours = two.run(trained, str(tmp_path), "unlabelled", True, False, "plain", more)[0]
    assert ours["losses"] == pytest.approx(right["losses"], rel=1e-6)
    for name, weight in right["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=True"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ],
)
def test_what_would_make_another_loss_is_refused(
    two: RankPool, tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(RankError, match=words):
        two.run(trained, str(tmp_path), "padded", True, False, "plain", arguments)


def test_a_trainer_whose_model_ignores_the_step_stops(two: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"never used it"):
        two.run(trained, str(tmp_path), "flat", True, True)


def test_accelerate_with_a_loop_of_ones_own(two: RankPool) -> None:
    right = one_process()
    for losses in two.run(with_accelerate):
        assert losses == pytest.approx(right, rel=1e-6), "Transformers takes its loss in float32"


def test_documents_are_read_from_positions() -> None:
    assert lengths_of(torch.tensor([[0, 1, 2, 0, 0, 1]])) == [3, 1, 2]
    assert lengths_of(torch.tensor([[5, 6, 0], [0, 1, 2]])) == [2, 1, 3]
    assert next_in_document(torch.tensor([1, 2, 3, 4]), [3, 1]).tolist() == [2, 3, -100, -100]


def batch(**fields: list[list[int]]) -> dict[str, torch.Tensor]:
    """A collator's batch of ids 1, 2, ... row after row, 0 where the mask is, and the given fields."""
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
    tokens, labels, lengths = _stream(batch(**fields))
    assert lengths == [5, 3]
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert labels.tolist() == [2, 3, 4, 5, -100, 7, 8, -100]


def test_rows_may_be_padded_on_either_side_or_hold_nothing() -> None:
    masks = [[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    for fields in ({}, {"position_ids": [[1, 1, 0, 1], [0, 1, 2, 1], [1, 1, 1, 1]]}):
        assert _stream(batch(attention_mask=masks, **fields))[2] == [2, 3]
    assert _stream(batch(attention_mask=[[0, 0], [0, 0]]))[2] == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"position_ids": [list(range(10))], "attention_mask": [NUMBERED]}, r"attention_mask says.*\[5, 3\].*position_ids says \[8\]"),
        ({"position_ids": [PACKED], "seq_idx": [[0] * 10]}, r"seq_idx says that documents have \[10\]"),
        ({"attention_mask": [[1, 1, 0, 1]]}, r"padding between a row's tokens"),
        ({"attention_mask": [[1, 1, 0, 1]], "position_ids": [[0, 1, 2, 3]]}, r"jump inside a row"),
    ],
)  # fmt: skip
def test_batches_that_contradict_themselves_are_refused(fields: dict[str, list[list[int]]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _stream(batch(**fields))


def test_a_mask_of_another_kind_is_refused() -> None:
    for mask in (torch.zeros(1, 1, 4, 4), torch.tensor([[0.0, -1.0, 0.0, 0.0]])):
        with pytest.raises(NotImplementedError, match=r"padding mask of \(1, 4\) tokens"):
            _stream({"input_ids": torch.arange(4)[None], "attention_mask": mask})
