"""Samples: split a sample of a dataset into per-token columns and per-document values, and choose its mask.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp import masks as mask_algebra
from flexcp.data.lengths import PADDING_MASK
from flexcp.executor.arguments import check_whole_numbers, refuse_unsigned, single
from flexcp.executor.local_rows import refuse_shifted
from flexcp.masks import Mask, Tree, from_slices, modality

TOKENS, LABELS = "tokens", "labels"
NAMES_OF_TOKENS = ("tokens", "input_ids")
TREE_FIELD = "flexcp tree"
"""The field of a grouped sample (see ``grouped_samples.py``) that holds the mask of its tree."""
REPEATED_FIELD = "flexcp repeated tokens"
"""The field of a grouped sample with the number of its tokens that an earlier part of its group also has."""
MaskChoice = Mask | Mapping[str, tuple[Mask, int]]
"""A document's mask, or its masks by name with how many layers use each."""

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
        return torch.as_tensor(value).detach().cpu()
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
    numbers = torch.full((rows,), -1)
    for number, (start, end) in enumerate(_spans(spans)):
        if not 0 <= start <= end <= rows:
            raise ValueError(f"{where}: span ({start}, {end}) lies outside its {rows} tokens")
        numbers[start:end] = number
    return numbers


def _spans(spans: Any) -> list[tuple[int, int]]:
    """Return spans as a list of (start, end) of plain integers."""
    return [(int(start), int(end)) for start, end in spans]


# --- masks of documents -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Masks:
    """How documents get their masks; only one of the fields is set.

    ``one`` is for all documents. ``by_number`` has a mask for each sample number, and ``named`` is the loader's
    ``masks=``, ``{"name": (mask or list of masks, layers)}``. Spans become :func:`flexcp.masks.modality` masks:
    ``spans_by_number`` has those of each sample number, ``spans_field`` names the field of a sample that holds them.
    ``function`` is called with the sample.
    """

    one: MaskChoice | None = None
    by_number: Sequence[Mask] | None = None
    named: Mapping[str, tuple[Mask | Sequence[Mask], int]] | None = None
    spans_by_number: Sequence[Any] | None = None
    spans_field: str | None = None
    function: Callable[[Any], MaskChoice] | None = None

    @property
    def known(self) -> bool:
        """Whether masks are known without reading samples."""
        return self.function is None and self.spans_field is None

    def choose(self, number: int, sample: Any, limit: int, whole: int) -> MaskChoice:
        """Return the mask of document ``number``, cut from ``whole`` tokens to its first ``limit`` tokens.

        ``sample`` is needed only if masks are not known without reading samples. Raise ValueError if the document is a
        tree and would have to be cut.
        """
        found = self._whole(number, sample)
        if limit < whole and tree_in(found, whole) is not None:
            raise ValueError(
                f"document {number} is a tree of {whole} tokens, and a tree is not cut to {limit}: its sequences would "
                "lose their ends; raise the budget or max_length, choose batches=Batches(too_long='drop'), or let the "
                "loader make trees with samples=Samples(tree_by=...), which it cuts between sequences that fit"
            )
        if isinstance(found, Mask):
            return cut_mask(found, limit)
        return {name: (cut_mask(mask, limit), layers) for name, (mask, layers) in found.items()}

    def _whole(self, number: int, sample: Any) -> MaskChoice:
        """Return the mask of a document before it is cut; raise ValueError if a given one is no mask."""
        if self.function is not None:
            return _checked_choice(self.function(sample))
        if self.spans_field is not None:
            return modality(_spans(_spans_of(sample, self.spans_field, number)))
        if self.spans_by_number is not None:
            return modality(_spans(self.spans_by_number[number]))
        if self.by_number is not None:
            return _checked_mask(self.by_number[number], "mask=", number)
        if self.named is not None:
            found = {name: (m if isinstance(m, Mask) else m[number], k) for name, (m, k) in self.named.items()}
            return {name: (_checked_mask(m, f"masks= for {name!r}", number), k) for name, (m, k) in found.items()}
        assert self.one is not None
        return self.one


def masks_in(choice: MaskChoice) -> list[Mask]:
    """Return all masks of a document."""
    return [choice] if isinstance(choice, Mask) else [mask for mask, _ in choice.values()]


def tree_in(choice: MaskChoice, length: int) -> Tree | None:
    """Return the tree that a document of ``length`` tokens is under its masks, or None if no mask makes it a tree."""
    found = (mask_algebra.tree_under(mask, length) for mask in masks_in(choice))
    return next((tree for tree in found if tree is not None), None)


def counted(tree: Tree, labels: Tensor | None, ignore: int) -> int:
    """Return how many positions of a tree's sequences count in a loss; shared tokens count for each sequence.

    A position counts if it has a token before it and its label is not ``ignore``. ``labels`` are in the rows of their
    own tokens; without labels, all positions with a token before them count.
    """
    times = times_predicted(tree)
    return int(times.sum() if labels is None else times[(labels != ignore).numpy()].sum())


def times_predicted(tree: Tree) -> NDArray[np.int64]:
    """Return for each token of a tree how many sequences predict it: those through it, 0 if no token is before it."""
    begin, stop = tree.sequences_through()
    return np.asarray(np.repeat(stop - begin, tree.lengths) * (tree.predecessors() >= 0))


def _spans_of(sample: Any, field: str, number: int) -> Any:
    """Return the field ``field`` of sample ``number``, which holds its spans; raise ValueError if it has none."""
    if isinstance(sample, Mapping) and field in sample:
        return sample[field]
    has = f"has fields {sorted(map(str, sample))}" if isinstance(sample, Mapping) else "is its token ids alone"
    raise ValueError(
        f"spans={field!r} names a field of every sample, and sample {number} {has}: give it {{'input_ids': ids, "
        f"{field!r}: [(start, end)]}}, or pass Samples(spans=...) a list of such spans for each document"
    )


def _checked_mask(found: Any, place: str, number: int) -> Mask:
    """Return the mask of document ``number``, or raise ValueError if it is no mask; ``place`` names the argument."""
    if isinstance(found, Mask):
        return found
    raise ValueError(
        f"{place} holds {found!r} for document {number}, "
        "which is no mask; write flexcp.causal() or another of flexcp's masks"
    )


def _checked_choice(found: Any) -> MaskChoice:
    """Return what ``mask_fn`` returned; raise ValueError if it is neither a mask nor ``{"name": (mask, layers)}``."""
    if isinstance(found, Mask):
        return found
    if isinstance(found, Mapping) and all(isinstance(v, tuple) and isinstance(v[0], Mask) for v in found.values()):
        return found
    raise ValueError(f"mask_fn must return a mask, or {{'name': (mask, layers)}}; got {found!r}")


def cut_mask(mask: Mask, length: int) -> Mask:
    """Return the mask of a document that is cut to its first ``length`` tokens."""
    if mask.name == "modality":
        flat, self_only = mask.params
        assert isinstance(flat, tuple)
        if not flat or flat[-1] <= length:
            return mask
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return modality([(a, min(b, length)) for a, b in pairs if a < length], bool(self_only))
    if mask.length is None or mask.length <= length:
        return mask
    rows = mask_algebra.cut(np.array(mask.table, np.int64).reshape(-1, 6), 0, length, 0, length)
    return from_slices(length, rows[~mask_algebra.is_empty(rows)].tolist())


def planner_masks(choices: Sequence[MaskChoice]) -> dict[str, Any]:
    """Return the masks of documents as an argument of the planner: ``{"mask": ...}`` or ``{"masks": ...}``.

    Equal masks become one mask for all documents. Raise ValueError if documents have different names or kinds of masks.
    """
    if isinstance(choices[0], Mask):
        rules = [_one(c) for c in choices]
        return {"mask": rules[0] if all(r == rules[0] for r in rules) else rules}
    names = {name: layers for name, (_, layers) in choices[0].items()}
    for choice in choices:
        if isinstance(choice, Mask) or {name: layers for name, (_, layers) in choice.items()} != names:
            raise ValueError(f"every document of a model needs the same named masks, here {names}; one has {choice}")
    named = {n: [c[n][0] for c in choices if not isinstance(c, Mask)] for n in names}
    return {"masks": {n: (r[0] if all(x == r[0] for x in r) else r, names[n]) for n, r in named.items()}}


def _one(choice: MaskChoice) -> Mask:
    """Return a document's mask; raise ValueError if it has named masks where other documents have one mask."""
    if not isinstance(choice, Mask):
        raise ValueError(f"every document of a model needs the same kind of mask; one has {choice}")
    return choice
