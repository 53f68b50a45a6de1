"""Known source: a map-style dataset whose lengths and masks are known before its samples are read.

Batches are formed from the lengths alone. When a batch is due, each rank reads the documents that it keeps tokens of.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.data.documents import Document
from flexcp.data.order import epoch_order
from flexcp.data.reading.document_masks import counted, tree_in
from flexcp.data.reading.samples import Sample, Schema, checked_schema, opened
from flexcp.data.reading.sources import Reading

Ints = NDArray[np.int64]


class KnownSource:
    """The documents of a map-style dataset whose lengths and masks are known without reading it.

    Raise ValueError if a document is too long and the limits refuse it, or if all are dropped.
    """

    def __init__(self, dataset: Any, lengths: Ints, reading: Reading) -> None:
        self.dataset, self.lengths, self.reading = dataset, lengths, reading
        self.schema: Schema | None = None
        limits = reading.limits
        over = lengths > limits.longest
        if over.any() and limits.too_long == "refuse":
            first = int(np.argmax(over))
            raise ValueError(limits.refusal(int(lengths[first]), f"document {first}"))
        if over.all() and limits.too_long == "drop":
            raise ValueError(
                f"no document has at most {limits.longest} tokens; raise the budget, or choose "
                "batches=Batches(too_long='cut')"
            )

    def begin(self, epoch: int, place: int) -> None:
        """Begin an epoch; afterwards the document at any place of it can be asked for. ``place`` is not used."""
        self.order = epoch_order(len(self.lengths), self.reading.shuffle, self.reading.seed, epoch)

    def fitted_lengths(self) -> Ints:
        """Return the lengths of the documents that are handed out, cut if too long, in the order of the epoch."""
        found = self.lengths[self.order]
        if self.reading.limits.too_long == "drop":
            return found[found <= self.reading.limits.longest]
        return np.minimum(found, self.reading.limits.longest)

    def document(self, place: int) -> Document | None:
        """Return the document at a place of the epoch, None after the last; one that is dropped is marked as such."""
        if place >= len(self.order):
            return None
        number = int(self.order[place])
        whole, longest = int(self.lengths[number]), self.reading.limits.longest
        length = min(whole, longest)
        if length < whole and self.reading.limits.too_long == "drop":
            return Document(number, 0, whole, None, dropped=True)
        mask, valid = self.reading.masks.choose(number, None, length, whole), None
        fields = self.reading.fields
        if fields.labels is None and fields.ignore < 0:  # otherwise a token may have the id that is ignored
            tree = tree_in(mask, length)
            valid = length - 1 if tree is None else counted(tree, None, fields.ignore)
        return Document(number, length, whole, mask, valid=valid)

    def read(self, document: Document) -> Sample:
        """Read the sample of a document and cut it to the document's length.

        Raise ValueError if the sample has another length than was given, or other fields than samples before it.
        """
        begin = time.perf_counter()
        where = f"document {document.number}"
        raw = self.dataset[document.number]
        fields, stats = self.reading.fields, self.reading.stats
        assert document.mask is not None
        sample = opened(raw, fields, document.length, where, tree_in(document.mask, document.length))
        if sample.whole != document.whole:
            raise ValueError(f"{where} has {sample.whole} tokens, but its length was given as {document.whole}")
        self.schema = checked_schema(self.schema, sample.schema, where)
        stats.documents_read += 1
        stats.reading_s += time.perf_counter() - begin
        return sample

    def release(self, place: int) -> None:
        """Do nothing: this source holds no samples."""

    def state(self, epoch: int) -> dict[str, Any] | None:
        """Return None: this source has no state besides the loader's place."""
        return None

    def load(self, state: Mapping[str, Any] | None, epoch: int, place: int) -> None:
        """Do nothing: this source has no state to restore."""
