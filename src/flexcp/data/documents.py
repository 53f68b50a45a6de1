"""Documents: what planning needs to know of a sample, and the batches made of it.

A *place* is a position in the order of an epoch. A source (see ``sources.py``) says what lies at a place; here
consecutive places become a batch of at most ``budget`` tokens. Every rank does this for itself from the same facts, so
all ranks form the same batches.
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
    """A sample as far as planning goes.

    ``number`` is its index in a map-style dataset, or its count in a stream. ``reader`` is the rank that holds it
    (None: whoever needs it reads it), ``valid`` how many of its labels count (None: not known before it is read),
    ``value_bytes`` what its per-document values take. A document that is ``dropped`` only takes up its place.
    ``repeated`` tokens are in an earlier part of its tree, too.
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
    """Token budget of a batch, the most tokens of a document, and what happens to longer ones: refuse, cut or drop."""

    budget: int
    longest: int
    too_long: str

    def __post_init__(self) -> None:
        if self.budget < 1 or self.longest < 1:
            raise ValueError(f"budget and max_length must be at least 1; got {self.budget} and {self.longest}")
        if self.too_long not in ("refuse", "cut", "drop"):
            raise ValueError(f"too_long must be 'refuse', 'cut' or 'drop'; got {self.too_long!r}")

    def refusal(self, length: int, where: str) -> str:
        """What to say about a document that is too long."""
        what = f"the budget of {self.budget}" if self.longest == self.budget else f"max_length {self.longest}"
        return f"{where} has {length} tokens, over {what}; raise it, or choose too_long='cut' or 'drop'"


@dataclass(frozen=True)
class BatchSpec:
    """A batch to be: its documents, their places, and where the next one begins."""

    step: int
    documents: tuple[Document, ...]
    places: tuple[int, ...]
    end: int
    dropped: int

    @property
    def lengths(self) -> Ints:
        return np.array([d.length for d in self.documents], np.int64)

    def take(self, documents: Sequence[int]) -> BatchSpec:
        """Some of its documents, by their numbers here, as a batch of their own."""
        return replace(
            self,
            documents=tuple(self.documents[d] for d in documents),
            places=tuple(self.places[d] for d in documents),
        )

    def planner_arguments(self) -> dict[str, Any]:
        """``mask=`` or ``masks=`` of the planner's call."""
        return planner_masks([d.mask for d in self.documents if d.mask is not None])


def next_batch(
    document: Callable[[int], Document | None], place: int, step: int, budget: int, drop_last: bool
) -> BatchSpec | None:
    """The batch that begins at ``place``; None when nothing is left."""
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
