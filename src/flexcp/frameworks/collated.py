"""Collated batches: the documents in a batch that a Hugging Face collator has made.

A collator may pad (``attention_mask``), flatten or pack (``position_ids`` that restart at each document, documents
numbered in the mask or in ``seq_idx``, ``cu_seq_lens_q``), or several of these at once. All become a stream without
padding. :class:`Collated` keeps the place of each token in the batch, so that results can be put back there. Batches
whose parts contradict each other are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.executor.arguments import named_kind, refuse_unsigned
from flexcp.executor.local_rows import refuse_shifted
from flexcp.frameworks.shared_batch import IGNORE, lengths_of, next_in_document

BORDERS = {
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
}
"""The parts of a batch that can say where documents begin and end, or are passed along with such parts."""
KNOWN = {"input_ids", "labels"} | BORDERS
"""The parts of a batch that :func:`read_batch` accepts."""


@dataclass(frozen=True)
class Collated:
    """A batch without padding: all tokens end to end and their labels, both ``[T]``, and the lengths of the documents.

    ``labels`` are shifted: each token has the label of its successor, or -100 at the end of a document.
    """

    tokens: Tensor
    labels: Tensor
    lengths: list[int]
    keep: Tensor
    """``[rows, columns]``: True at the places of the collator's batch that hold the tokens, in row order."""
    labelled: bool
    """Whether the batch has labels; without them the tokens themselves are the labels."""

    def put_back(self, values: Tensor) -> Tensor:
        """Return values of the tokens, ``[T, ...]``, at the tokens' places in the batch, ``[rows, columns, ...]``.

        Places of padding have zeros. Differentiable.
        """
        found = values.new_zeros((*self.keep.shape, *values.shape[1:]))
        return found.index_put((self.keep,), values)


def refuse_unknown(batch: Mapping[str, Any]) -> None:
    """Raise if a batch has no ``input_ids`` (ValueError), or parts that are not in :data:`KNOWN` (NotImplementedError).

    Parts that are None do not count.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is what a collator returns, a dict with input_ids; got {named_kind(batch)}")
    held = sorted(name for name in batch if batch[name] is not None)
    if "input_ids" not in held:
        raise ValueError(
            "the batch has no input_ids, by which ranks tell each other their documents; it holds "
            f"{', '.join(held) or 'nothing'}: give the token ids as batch['input_ids'], [rows, columns]"
        )
    unknown = [name for name in held if name not in KNOWN]
    if unknown:
        raise NotImplementedError(
            f"the batch holds {', '.join(unknown)}, which flexcp does not know how to shard; if the model trains "
            f"without it, drop it before or in the collator: {', '.join(f'batch.pop({name!r})' for name in unknown)}"
        )


def read_batch(batch: Mapping[str, Any]) -> Collated:
    """Read the documents of a collator's batch: remove padding, find where documents begin, and shift labels.

    Without labels the tokens themselves are the labels. Raise NotImplementedError for a mask that is not a padding
    mask, and ValueError if parts of the batch have wrong types or shapes or contradict each other, if nothing says
    where documents end, or if the labels are already shifted.
    """
    _check_parts(batch)
    ids = batch["input_ids"]
    labels = ids if batch.get("labels") is None else batch["labels"]
    mask = batch.get("attention_mask")
    if mask is not None and (mask.shape != ids.shape or bool((mask < 0).any())):
        raise NotImplementedError(
            f"attention_mask of shape {tuple(mask.shape)} is not a padding mask of {tuple(ids.shape)} tokens: 0 for "
            "padding, 1 for tokens, or the number of each token's document"
        )
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    said = _documents(batch, keep)
    name, lengths = next(iter(said.items()), ("rows", []))
    for other, found in said.items():
        if found != lengths:
            raise ValueError(
                f"{other} says that documents have {found} tokens, {name} says {lengths}; "
                "give one of them, or both alike"
            )
    if said and sum(lengths) != int(keep.sum()):
        raise ValueError(f"{name} says that documents have {lengths} tokens, but the batch has {int(keep.sum())}")
    if not said:
        _refuse_holes(keep)
        lengths = [n for n in keep.sum(1).tolist() if n]
    if mask is not None and batch.get("labels") is not None:
        _warn_of_labels_of_padding(labels[~keep])
    tokens, kept = ids[keep], labels[keep]
    refuse_shifted(tokens, kept, next_in_document(tokens, lengths), IGNORE, "flexcp")
    return Collated(tokens, next_in_document(kept, lengths), lengths, keep, batch.get("labels") is not None)


def with_trained_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with labels of -100 where :func:`read_batch` drops a label.

    These are the first token of each document, which nothing in its document predicts, and padding. A batch without
    labels or ``input_ids`` is returned as it is. Errors are those of :func:`read_batch`.
    """
    if not isinstance(batch, Mapping) or batch.get("labels") is None or batch.get("input_ids") is None:
        return batch
    found = read_batch({name: value for name, value in batch.items() if name in KNOWN})
    labels = torch.full_like(batch["labels"], IGNORE)
    # Shifted labels go back to their own tokens; the first token gets that of the last document's end, -100.
    labels[found.keep] = found.labels.roll(1, 0)
    return {**batch, "labels": labels}


def _check_parts(batch: Mapping[str, Any]) -> None:
    """Raise ValueError unless all parts are tensors of whole numbers, of the shape of ``input_ids`` or its rows.

    An ``attention_mask`` may have any dtype, and one of a wrong shape, such as 4-D, is left to :func:`read_batch`.
    """
    parts = ("input_ids", "labels", "attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q")
    given = {name: batch[name] for name in parts if batch.get(name) is not None}
    for name, part in given.items():
        if not isinstance(part, Tensor):
            by_tokenizer = 'let the tokenizer or collator return them (return_tensors="pt")'
            way = f"pass torch.tensor({name})" if name == "cu_seq_lens_q" else by_tokenizer
            raise ValueError(f"{name} is {named_kind(part)}, but a batch holds tensors: {way}")
        odd = part.is_floating_point() or part.is_complex() or part.dtype == torch.bool
        if odd and part.numel() and name != "attention_mask":
            raise ValueError(f"{name} is a tensor of {part.dtype}, but holds whole numbers: pass {name}.long()")
    ids = given.pop("input_ids")
    if ids.dim() != 2:
        way = "input_ids[None]" if ids.dim() == 1 else "a row of token ids for each sample"
        raise ValueError(f"input_ids has shape {tuple(ids.shape)}, but a batch has [rows, columns]: pass {way}")
    borders = given.pop("cu_seq_lens_q", None)
    if borders is not None and borders.dim() != 1:
        way = "cu_seq_lens_q[0]" if len(borders.shape) == 2 and len(borders) == 1 else "those of all rows end to end"
        raise ValueError(f"cu_seq_lens_q has shape {tuple(borders.shape)}, but is one list of borders: pass {way}")
    if "labels" in given:
        refuse_unsigned(given["labels"], "the batch")
    for name, part in given.items():
        _check_shape(name, part, ids)


def _check_shape(name: str, part: Tensor, ids: Tensor) -> None:
    """Raise ValueError unless a part has a number for each token; positions and ``seq_idx`` may be one row for all."""
    if part.shape == ids.shape:
        return
    if name in ("position_ids", "seq_idx") and tuple(part.shape) in ((1, ids.shape[1]), (ids.shape[1],)):
        return
    if (1, *part.shape) == tuple(ids.shape):
        way = f"pass {name}[None]"
    elif name == "attention_mask":
        return
    elif name == "labels":
        way = "give each token its own label, not shifted, or -100"
    else:
        way = "give a number for each token"
    raise ValueError(f"{name} has shape {tuple(part.shape)}, but input_ids has {tuple(ids.shape)}: {way}")


def _warn_of_labels_of_padding(labels: Tensor) -> None:
    """Warn if padding has labels that count, on which Transformers alone would train, and flexcp does not."""
    count = int((labels != IGNORE).sum())
    if count:
        warnings.warn(
            f"{count} padding tokens have labels: Transformers alone would train on them, and flexcp leaves padding "
            f"out, so losses differ. Give padding the label {IGNORE}: labels.masked_fill(attention_mask == 0, "
            f"{IGNORE})",
            stacklevel=3,
        )


def _documents(batch: Mapping[str, Any], keep: Tensor) -> dict[str, list[int]]:
    """Return the lengths of the documents without padding, by the name of each part of the batch that tells them.

    ``keep`` is True at tokens and False at padding. Raise ValueError for positions of a padded batch that do not tell
    where documents begin.
    """
    said = {}
    mask, positions, numbers, borders = (
        batch.get(name) for name in ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q")
    )
    if positions is not None:
        rows = _kept(positions, keep)
        if not bool(keep.all()) and any(bool(((row.diff() != 1) & (row[1:] != 0)).any()) for row in rows):
            raise ValueError(
                "position_ids of a padded batch jump inside a row without starting anew at 0, so nothing says where "
                "documents end"
            )
        said["position_ids"] = [n for row in rows for n in lengths_of(row[None])]
    if mask is not None and bool((mask > 1).any()):
        said["attention_mask"] = _numbered(mask, keep)
    if numbers is not None:
        said["seq_idx"] = _numbered(numbers, keep)
    if borders is not None:
        said["cu_seq_lens_q"] = [n for n in borders.diff().tolist() if n]
    return said


def _kept(values: Tensor, keep: Tensor) -> list[Tensor]:
    """Return for each row the values of its tokens, without padding; rows with only padding are left out."""
    pairs = zip(values.expand_as(keep), keep, strict=True)
    return [row[kept] for row, kept in pairs if bool(kept.any())]


def _numbered(numbers: Tensor, keep: Tensor) -> list[int]:
    """Return the lengths of the stretches of consecutive tokens with the same number, row by row, without padding."""
    return [n for row in _kept(numbers, keep) for n in row.unique_consecutive(return_counts=True)[1].tolist()]


def _refuse_holes(keep: Tensor) -> None:
    """Raise ValueError for padding between the tokens of a row, which may or may not separate two documents."""
    begins = keep.int().diff(dim=1, prepend=keep.new_zeros(len(keep), 1).int()) == 1
    if bool((begins.sum(1) > 1).any()):
        raise ValueError(
            "attention_mask has padding between a row's tokens, and nothing says whether documents end there; give "
            "position_ids that start anew with every document"
        )
