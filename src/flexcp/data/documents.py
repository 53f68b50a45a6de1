"""Documents: what planning needs to know about a sample, and how documents are collected into batches.

A *place* is a position in the order of an epoch. A source (see ``reading/sources.py``) gives the document at a place;
this module collects the documents of consecutive places into a batch of at most ``budget`` tokens. Every rank does this
for itself with the same documents, so all ranks form the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.data.reading.document_masks import MaskChoice, planner_masks

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """The facts about a sample that planning needs.

    ``number`` is the index of the sample in a map-style dataset, or its count in a stream. ``length`` is the number of
    tokens, ``whole`` the number before the document was cut. ``reader`` is the rank that has read the sample (None:
    every rank that needs it reads it), ``valid`` the number of labels that count in a loss (None: not known before the
    sample is read), ``value_bytes`` the size of its pickled per-document values. A ``dropped`` document was too long:
    it takes up a place in the epoch but is in no batch, and it has length 0 and no mask. ``repeated`` is for a part of
    a tree that was cut: how many of its tokens an earlier part has too.
    """

    number: int
    length: int
    whole: int
    mask: MaskChoice | None
    reader: int | None = None
    valid: int | None = None
    value_bytes: int = 0
    dropped: bool = False
    repeated: int = 0


@dataclass(frozen=True)
class BatchLimits:
    """The most tokens of a batch (``budget``) and of a document (``longest``), and what to do with longer documents.

    ``too_long`` is ``"refuse"`` (raise ValueError), ``"cut"`` (keep the first ``longest`` tokens) or ``"drop"`` (leave
    the document out). Wrong values raise ValueError.
    """

    budget: int
    longest: int
    too_long: str

    def __post_init__(self) -> None:
        if self.budget < 1 or self.longest < 1:
            raise ValueError(f"budget and max_length must be at least 1; got {self.budget} and {self.longest}")
        if self.too_long not in ("refuse", "cut", "drop"):
            raise ValueError(f"too_long must be 'refuse', 'cut' or 'drop'; got {self.too_long!r}")

    def refusal(self, length: int, where: str) -> str:
        """Return the error message for a document that is too long, of ``length`` tokens; ``where`` names it."""
        what = f"the budget of {self.budget}" if self.longest == self.budget else f"max_length {self.longest}"
        return f"{where} has {length} tokens, over {what}; raise it, or choose Batches(too_long='cut' or 'drop')"


@dataclass(frozen=True)
class BatchSpec:
    """A batch that is to be planned.

    ``step`` is its number in the epoch. ``places`` are the positions of its documents in the order of the epoch, and
    ``end`` is the position where the next batch begins. ``dropped`` counts the documents that were passed over on the
    way to ``end`` because they are too long.
    """

    step: int
    documents: tuple[Document, ...]
    places: tuple[int, ...]
    end: int
    dropped: int

    @property
    def lengths(self) -> Ints:
        return np.array([d.length for d in self.documents], np.int64)

    def take(self, documents: Sequence[int]) -> BatchSpec:
        """Return this batch with only some of its documents; ``documents`` are their numbers in the batch."""
        return replace(
            self,
            documents=tuple(self.documents[d] for d in documents),
            places=tuple(self.places[d] for d in documents),
        )

    def planner_arguments(self) -> dict[str, Any]:
        """Return the masks of the documents as an argument of the planner: ``{"mask": ...}`` or ``{"masks": ...}``."""
        return planner_masks([d.mask for d in self.documents if d.mask is not None])


def next_batch(
    document: Callable[[int], Document | None], place: int, step: int, budget: int, drop_last: bool
) -> BatchSpec | None:
    """Collect the batch that begins at ``place``, a position in the order of the epoch; return None if none is left.

    ``document(place)`` returns the document at a place, None after the last. The batch is numbered ``step`` and has at
    most ``budget`` tokens; dropped documents are passed over. With ``drop_last``, a last batch of fewer than ``budget``
    tokens is left out.
    """
    documents: list[Document] = []
    places: list[int] = []
    tokens = dropped = 0
    while True:
        found = document(place)
        if found is None:
            if not documents or (drop_last and tokens < budget):
                return None
            break
        if found.dropped:
            dropped += 1
        elif tokens + found.length > budget:
            break
        else:
            documents.append(found)
            places.append(place)
            tokens += found.length
        place += 1
    return BatchSpec(step, tuple(documents), tuple(places), place, dropped)
