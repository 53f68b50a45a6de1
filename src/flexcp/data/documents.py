"""Documents: what planning needs to know about a sample, and how documents are collected into batches.

A *place* is a position in the order of an epoch. A source (see ``sources.py``) gives the document at a place; this
module collects the documents of consecutive places into a batch of at most ``budget`` tokens. Every rank does this for
itself with the same documents, so all ranks form the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.data.samples import MaskChoice, planner_masks

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """The facts about a sample that planning needs.

    ``number`` is the index of the sample in a map-style dataset, or its count in a stream. ``length`` is the number of
    tokens, ``whole`` the number before the document was cut. ``reader`` is the rank that has read the sample (None:
    every rank that needs it reads it), ``valid`` the number of labels that count (None: not known before it is read),
    ``value_bytes`` the size of its pickled per-document values. A ``dropped`` document only takes up its place.
    ``repeated`` is the number of its tokens that an earlier part of its tree also has.
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
    """The token budget of a batch, the most tokens of a document, and what to do with longer documents.

    ``too_long`` is ``"refuse"`` (an error), ``"cut"`` or ``"drop"``.
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
        """Return the error message for a document that is too long; ``where`` names it."""
        what = f"the budget of {self.budget}" if self.longest == self.budget else f"max_length {self.longest}"
        return f"{where} has {length} tokens, over {what}; raise it, or choose Batches(too_long='cut' or 'drop')"


@dataclass(frozen=True)
class BatchSpec:
    """A batch that is to be planned: its documents, their places, and the place (``end``) where the next batch begins.

    ``dropped`` counts the dropped documents among its places.
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
        """Return a batch of some of the documents; ``documents`` are their numbers in this batch."""
        return replace(
            self,
            documents=tuple(self.documents[d] for d in documents),
            places=tuple(self.places[d] for d in documents),
        )

    def planner_arguments(self) -> dict[str, Any]:
        """Return the argument ``mask=`` or ``masks=`` for the call of the planner."""
        return planner_masks([d.mask for d in self.documents if d.mask is not None])


def next_batch(
    document: Callable[[int], Document | None], place: int, step: int, budget: int, drop_last: bool
) -> BatchSpec | None:
    """Collect the batch that begins at ``place``; return None at the end of the epoch.

    ``document`` gives the document at a place, None after the last. With ``drop_last``, a last batch that is not full
    is left out.
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
