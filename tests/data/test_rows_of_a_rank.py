"""Tests of what one rank gets of a batch, without other processes: its rows, pads, their device, the
counts of labels and of repeated tokens, and the smallest budget.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made import Numbered, arguments, token
from misbehaving import planner

from flexcp.data import Loader
from flexcp.data.documents import BatchLimits
from flexcp.data.local_batch import LocalBatch
from flexcp.data.reading.row_sharing import segments


def local(data: Any, **options: Any) -> list[LocalBatch]:
    options = {"budget": 100, "workers": 0, **options}
    with Loader(data, planner(1), **arguments(**options)) as loader:
        return list(loader)


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_all_tensors_of_a_batch_are_on_the_device_that_is_asked_for(device: str | None) -> None:
    """``batch.fields`` holds the other columns; tokens and labels are attributes of the batch."""
    [batch] = local(Numbered([9, 12], known=True), document_fields=["images"], device=device)
    assert set(batch.fields) == {"weight"}
    tensors = (batch.tokens, batch.labels, batch.positions, batch.documents, batch.fields["weight"])
    assert {x.device.type for x in tensors} == {device or "cpu"}
    assert [len(x) for x in tensors] == [21] * 5
    if device != "meta":
        rows = [*range(9), *range(12)]
        assert batch.tokens.tolist() == [token(n, row) for n, row in zip([0] * 9 + [1] * 12, rows, strict=True)]
        assert torch.equal(batch.fields["weight"][:, 1], -torch.tensor(rows, dtype=torch.float32))


def test_labels_of_a_field_are_counted_where_only_lengths_are_known() -> None:
    samples = [{"tokens": [1, 2, 3, 4], "labels": [-100, 2, -100, 4]}, {"tokens": [5, 6], "labels": [-100, -100]}]
    [batch] = local(samples, lengths=[4, 2], labels="labels")
    assert batch.labels.tolist() == [2, -100, 4, -100, -100, -100] and batch.valid == 2


@pytest.mark.parametrize("known", [True, False])
def test_pads_are_of_no_document_and_their_fields_are_zero(known: bool) -> None:
    """Only tokens and labels have values of their own for pads."""
    options = {"plan_options": {"tokens": "equal", "pad_to": 8}, "pad_token": 7, "ignore": -5}
    [batch] = local(Numbered([9, 12], known=known), document_fields=["images"], **options)
    assert batch.documents.tolist() == [0] * 9 + [1] * 12 + [-1] * 3
    assert batch.tokens[21:].tolist() == [7] * 3 and batch.labels[21:].tolist() == [-5] * 3
    assert batch.positions[21:].tolist() == [0] * 3 and batch.fields["weight"][21:].tolist() == [[0.0, 0.0]] * 3


def test_tokens_that_several_parts_of_a_cut_tree_hold_are_counted() -> None:
    """The tree of the three answers has 8 tokens. Cut to at most 6, its two parts both hold the first two tokens."""
    answers = [{"input_ids": ids, "prompt": "a"} for ids in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7, 8])]
    options = {"tree_by": "prompt", "too_long": "cut", "max_length": 6, "workers": 0}
    with Loader(answers, planner(1), budget=100, **arguments(**options)) as loader:
        tokens = [sorted(batch.tokens.tolist()) for batch in loader]
    assert tokens == [[1, 1, 2, 2, 3, 4, 5, 6, 7, 8]]
    assert loader.stats.tokens_repeated == 2 and loader.stats.tokens_saved == 13 - 10


def test_a_budget_of_one_token_is_one_token_a_batch() -> None:
    assert [batch.tokens.tolist() for batch in local([[5], [6]], budget=1)] == [[5], [6]]
    for budget, longest in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"at least 1; got {budget} and {longest}"):
            BatchLimits(budget, longest, "refuse")


def test_segments_are_the_ranges_of_documents_in_the_order_of_local_rows() -> None:
    """Compared token by token for two ranks of a zigzag plan, each of which keeps two runs of a cut document."""
    placement = planner(2, "zigzag")([10, 6]).placement
    for rank in range(2):
        kept = segments(placement, rank)
        runs = placement.runs.take(placement.runs.rank == rank)
        stream = [t for a, b in zip(runs.start.tolist(), runs.stop.tolist(), strict=True) for t in range(a, b)]
        found = {}
        for at, document, first, rows in zip(kept.at, kept.document, kept.first, kept.rows, strict=True):
            found |= {int(at + i): (0, 10)[document] + int(first + i) for i in range(rows)}
        assert [found[row] for row in range(len(stream))] == stream and len(found) == len(stream)
