"""Document masks: how each document of a dataset gets its masks, and what becomes of them when it is cut.

A mask is given for all documents, for each by its number, by a function of the sample, or by the spans of its images.
A document may have several masks by name, for different kinds of layers. A document whose mask is a tree is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flexcp import masks as mask_algebra
from flexcp.masks import Mask, Tree, from_slices, modality

MaskChoice = Mask | Mapping[str, tuple[Mask, int]]
"""A document's mask, or its masks by name with how many layers use each."""


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
            return modality(pairs_of_spans(_spans_of(sample, self.spans_field, number)))
        if self.spans_by_number is not None:
            return modality(pairs_of_spans(self.spans_by_number[number]))
        if self.by_number is not None:
            return _checked_mask(self.by_number[number], "mask=", number)
        if self.named is not None:
            found = {name: (m if isinstance(m, Mask) else m[number], k) for name, (m, k) in self.named.items()}
            return {name: (_checked_mask(m, f"masks= for {name!r}", number), k) for name, (m, k) in found.items()}
        assert self.one is not None
        return self.one


def pairs_of_spans(spans: Any) -> list[tuple[int, int]]:
    """Return spans as a list of (start, end) of plain integers."""
    return [(int(start), int(end)) for start, end in spans]


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
