"""Samples: split a sample of a dataset into per-token columns and per-document values.

A sample is a mapping of fields, or just its token ids. Fields are of three kinds, told apart by their type or name and
never by their length:

    per token      arrays, tensors and lists of numbers; as many rows as there are tokens
    per document   numbers, texts, mappings and the like, and every field named in ``document_fields``
    spans          the field named ``spans``: ``[(start, end), ...]``, the images of a document. It becomes a
                   per-token column with the number of the span a token is in, -1 for text

Labels are made here, before tokens are distributed over ranks: the label of a token is the next token of the document
(or the next entry of the field ``labels``), and ``ignore`` at the end of the document. A document that is too long is
cut first, so its new end has the label ``ignore`` too. In a tree a token may have several next tokens, so labels stay
in the rows of their own tokens, and the Loader makes edges of them. A tree that is too long is not cut here.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp.data.lengths import PADDING_MASK
from flexcp.data.reading.document_masks import pairs_of_spans
from flexcp.executor.arguments import check_whole_numbers, refuse_unsigned, single
from flexcp.executor.local_rows import refuse_shifted
from flexcp.masks import Tree

TOKENS, LABELS = "tokens", "labels"
NAMES_OF_TOKENS = ("tokens", "input_ids")
TREE_FIELD = "flexcp tree"
"""The field of a grouped sample (see ``grouped_samples.py``) that holds the mask of its tree."""
REPEATED_FIELD = "flexcp repeated tokens"
"""The field of a grouped sample with the number of its tokens that an earlier part of its group also has."""
Schema = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Per-token columns: name, dtype, and the shape of a row."""


@dataclass(frozen=True)
class Fields:
    """The names of special fields of a sample (see :class:`~flexcp.data.loader_settings.Samples`).

    ``ignore`` is the label of tokens that do not count in a loss.
    """

    tokens: str | None = None
    labels: str | None = None
    spans: str | None = None
    document_fields: frozenset[str] = frozenset()
    ignore: int = -100


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample split into ``columns`` with a row per token (tokens, labels and others) and per-document ``values``."""

    columns: dict[str, Tensor]
    values: dict[str, Any]
    whole: int
    """The number of tokens before the sample was cut."""

    def __len__(self) -> int:
        return len(self.columns[TOKENS])

    @property
    def schema(self) -> Schema:
        return _schema(self.columns)


@dataclass(frozen=True, eq=False)
class HeldSample:
    """A copy of a sample that waits for its batch: its columns, and its values pickled (empty if it has none)."""

    columns: dict[str, Tensor]
    values: bytes

    @property
    def schema(self) -> Schema:
        return _schema(self.columns)


def _schema(columns: Mapping[str, Tensor]) -> Schema:
    return tuple((name, column.dtype, tuple(column.shape[1:])) for name, column in columns.items())


def checked_schema(known: Schema | None, found: Schema, where: str) -> Schema:
    """Return ``found``, the per-token columns of a sample; raise ValueError if they differ from ``known``.

    ``known`` are the columns of earlier samples, None before the first. ``where`` names the sample.
    """
    if known is None or known == found:
        return found
    shown = [{name: f"{dtype} {list(shape)}" for name, dtype, shape in schema} for schema in (known, found)]
    raise ValueError(
        f"{where} has per-token fields {shown[1]}, but samples before it had {shown[0]}; "
        "all samples need the same fields"
    )


def held_copy(sample: Sample, where: str) -> HeldSample:
    """Return a copy of a sample; ``where`` names it in the ValueError that is raised if its values cannot be pickled.

    It is a copy, because a dataset may make its next sample in the same memory.
    """
    columns = {name: column.clone() for name, column in sample.columns.items()}
    return HeldSample(columns, pickled(sample.values, where) if sample.values else b"")


def pickled(value: Any, where: str) -> bytes:
    """Return a sample, or some of its fields, pickled; raise ValueError if it cannot be. ``where`` names the sample."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # pickle raises what the objects in a sample raise
        raise ValueError(
            f"{where} cannot be pickled, and samples that are read ahead are, to be sent to other ranks or saved with "
            f"the loader's state: {error}"
        ) from error


def opened(sample: Any, fields: Fields, limit: int, where: str, tree: Tree | None = None) -> Sample:
    """Split a sample into columns and values, and cut it to its first ``limit`` tokens; ``where`` names it in errors.

    ``tree`` is the tree of the sample, if it is one; the labels of a tree are not shifted. Raise ValueError if fields
    are missing, do not fit the tokens, or show that the sample is padded or its labels are shifted already.
    """
    name, tokens = token_ids(sample, fields, where)
    whole = len(tokens)
    given: Mapping[str, Any] = sample if isinstance(sample, Mapping) else {}
    if LABELS in given and fields.labels is None:
        raise ValueError(
            f"{where} has a field 'labels'; make the Loader with samples=Samples(labels='labels') to have it shifted, "
            "or leave the field out"
        )
    aligned = tokens if fields.labels is None else _labels(given, fields, whole, where)
    if tree is not None and tree.tokens != whole:
        raise ValueError(
            f"{where} has {whole} tokens, but its tree has {tree.tokens}; a tree's tokens are its segments end to end"
        )
    if fields.labels is not None and tree is None:
        who = f"the Loader, for {where}, field {fields.labels!r},"
        refuse_shifted(tokens, aligned, _shifted(tokens, fields.ignore), fields.ignore, who)
    labels = aligned[:limit].long() if tree is not None else _shifted(aligned[:limit].long(), fields.ignore)
    columns = {TOKENS: tokens[:limit], LABELS: labels}
    values: dict[str, Any] = {}
    for key in sorted(k for k in given if k not in (name, fields.labels, TREE_FIELD, REPEATED_FIELD)):
        if key in columns:
            raise ValueError(f"{where} has a field {key!r} besides {name!r}; rename it")
        if key == fields.spans:
            columns[key] = _span_numbers(given[key], whole, where)[:limit]
        elif key not in fields.document_fields and _is_column(given[key]):
            columns[key] = _column(given, key, whole, where)[:limit]
            if key == PADDING_MASK and not columns[key].all():
                raise ValueError(
                    f"{where} is padded: its {key} is 0 at token {int((columns[key] == 0).nonzero()[0, 0])}, and the "
                    f"loader would train on pads; tokenize without padding, and leave {key} out"
                )
        else:
            values[key] = given[key]
    return Sample(columns, values, whole)


def token_ids(sample: Any, fields: Fields, where: str) -> tuple[str, Tensor]:
    """Return (name of the field, token ids) of a sample; ``where`` names the sample in errors.

    Raise ValueError if it is not clear which field holds them, or if they are not integers in one dimension.
    """
    name, value = TOKENS, sample
    if isinstance(sample, Mapping):
        names = [fields.tokens] if fields.tokens is not None else [n for n in NAMES_OF_TOKENS if n in sample]
        if len(names) != 1 or names[0] not in sample:
            raise ValueError(
                f"{where} has fields {sorted(map(str, sample))}; say which one holds the token ids: make the Loader "
                "with samples=Samples(tokens='...')"
            )
        name, value = names[0], sample[names[0]]
    if isinstance(value, str):
        raise ValueError(f"{where}: expected token ids, but {value[:40]!r} is a text; tokenize the dataset first")
    if value is sample and isinstance(value, tuple | list) and len(value) and _holds_several(value[0]):
        kinds = ", ".join(type(x).__name__ for x in value[:4])
        raise ValueError(
            f"{where} is a {type(value).__name__} of {len(value)} ({kinds}), and a sample is its token ids alone or a "
            "mapping of fields: give {'input_ids': ids, 'labels': labels} with samples=Samples(labels='labels'), or "
            "ids (a DataLoader should have batch_size=None, or collate_fn=list of mappings)"
        )
    tokens = _tensor(value, name, where)
    if tokens.numel() == 0:
        raise ValueError(f"{where} has no tokens; drop it: documents have at least 1 token")
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(
            f"{where}: token ids must be integers in one dimension; got {tokens.dtype} of shape {list(tokens.shape)} "
            "(a DataLoader should have batch_size=None, or collate_fn=list)"
        )
    return name, tokens.long()


def _holds_several(value: Any) -> bool:
    """Return whether a value is a list, tuple, mapping, or an array of at least one dimension."""
    return isinstance(value, list | tuple | Mapping) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)


def _labels(given: Mapping[str, Any], fields: Fields, rows: int, where: str) -> Tensor:
    """Return the labels of a sample as they are given, one token id or ``ignore`` per token; else raise ValueError."""
    assert fields.labels is not None
    labels = _field(given, fields.labels, where)
    refuse_unsigned(labels, f"{where}, field {fields.labels!r}")
    if labels.shape != (rows,):
        instead = single(fields.labels, labels.shape, rows)
        way = (
            f"pass {instead}"
            if instead
            else f"give every token its own, unshifted, and {fields.ignore} where none counts; without "
            "Samples(labels=...) the Loader takes next tokens"
        )
        raise ValueError(
            f"{where}: field {fields.labels!r} has shape {list(labels.shape)}, but labels are one for each of the "
            f"{rows} tokens, [{rows}]; {way}"
        )
    check_whole_numbers(labels, f"labels of field {fields.labels!r}", where)
    odd = labels[(labels < 0) & (labels != fields.ignore)]
    if len(odd):
        raise ValueError(
            f"{where}: field {fields.labels!r} holds {odd[0].item()}, which is neither a token id nor "
            f"ignore={fields.ignore}; where it marks tokens without a label make the Loader with "
            f"samples=Samples(ignore={odd[0].item()})"
        )
    return labels


def _column(given: Mapping[str, Any], key: str, rows: int, where: str) -> Tensor:
    """Return the per-token field ``key`` of a sample, or raise ValueError if it does not have ``rows`` rows.

    ``where`` names the sample in the error.
    """
    column = _field(given, key, where)
    if column.dim() == 0 or len(column) != rows:
        way = f"pass {key}[0] if that is a row per token; " if column.shape[:2] == (1, rows) else ""
        raise ValueError(
            f"{where}: field {key!r} has shape {list(column.shape)} for {rows} tokens; {way}if it belongs to the "
            f"document as a whole, make the Loader with samples=Samples(document_fields=[{key!r}])"
        )
    return column


def _field(given: Mapping[str, Any], key: str, where: str) -> Tensor:
    """Return a field of a sample as a tensor; raise ValueError if it is missing or no array of numbers."""
    if key not in given:
        raise ValueError(f"{where} has no field {key!r}; it has {sorted(map(str, given))}")
    return _tensor(given[key], key, where)


def _is_column(value: Any) -> bool:
    """Return whether a field is a per-token one: an array, tensor or list of numbers."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and not (isinstance(value, np.ndarray) and value.dtype.kind not in "biuf")
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], int | float | np.number)


def _tensor(value: Any, name: str, where: str) -> Tensor:
    """Return the value of the field ``name`` as a CPU tensor; raise ValueError if it is no array of numbers."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch warns about read-only arrays, such as memory maps
    try:
        return torch.as_tensor(value, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: field {name!r} is no array of numbers ({error})") from None


def _shifted(aligned: Tensor, ignore: int) -> Tensor:
    """Return labels shifted by one: row i has the label of row i + 1, and the last row has ``ignore``."""
    labels = torch.full_like(aligned, ignore)
    labels[:-1] = aligned[1:]
    return labels


def _span_numbers(spans: Any, rows: int, where: str) -> Tensor:
    """Return, for each of ``rows`` tokens, the number of the span it is in, -1 for text.

    Raise ValueError if a span lies outside the tokens; ``where`` names the sample.
    """
    numbers = torch.full((rows,), -1, device="cpu")
    for number, (start, end) in enumerate(pairs_of_spans(spans)):
        if not 0 <= start <= end <= rows:
            raise ValueError(f"{where}: span ({start}, {end}) lies outside its {rows} tokens")
        numbers[start:end] = number
    return numbers
