"""Read source: a dataset or stream that has to be read before lengths or masks are known.

Each sample is read once. In a map-style dataset rank ``place % ranks`` reads the sample at a place; a stream is read by
rank 0. Samples are read in rounds that all ranks enter together; a sample that cannot be read or does not fit is an
error on all ranks, and a round that failed is read again if the loader is iterated again. Samples that are held are
copies, because a dataset may make its next sample in the same memory.

The state of a stream with ``state_dict`` is the stream's own state and the *pending* samples, which are read but not
handed out yet. A stream without ``state_dict`` is read again up to its place.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flexcp.data.documents import Document
from flexcp.data.loader_state import check_stream_state
from flexcp.data.order import epoch_order
from flexcp.data.reading.document_masks import counted, tree_in
from flexcp.data.reading.row_sharing import Peers
from flexcp.data.reading.samples import (
    LABELS,
    REPEATED_FIELD,
    HeldSample,
    Schema,
    checked_schema,
    held_copy,
    opened,
    pickled,
    token_ids,
)
from flexcp.data.reading.sources import Reading
from flexcp.data.reading.streams import FlatStream

ROUND = 16
"""Samples that all ranks together read in a round; if ranks share the reading, each reads at least one."""


@dataclass(frozen=True)
class Ahead:
    """What was read of a stream and not handed out, as all ranks know it: documents by place, and their columns.

    ``next`` is the place of the sample that comes next from the stream, unless it has ``ended``.
    """

    documents: dict[int, Document]
    schema: Schema | None
    next: int
    ended: bool


class ReadSource:
    """The documents of a dataset or stream that has to be read before its lengths or masks are known.

    ``samples`` is the number of samples, None for a stream. Methods that may read are called by all ranks together.
    """

    def __init__(self, dataset: Any, samples: int | None, reading: Reading, peers: Peers) -> None:
        self.dataset, self.samples, self.reading, self.peers = dataset, samples, reading, peers
        self.schema: Schema | None = None
        self.held: dict[int, HeldSample] = {}
        """The samples that this rank has read, by place."""
        self._packed: dict[int, bytes] = {}
        """The samples of a stream that are held, pickled as they came, by place."""
        self._documents: dict[int, Document] = {}
        self._next = 0
        self._ended = False
        self._epoch: int | None = None
        self._stream: FlatStream | None = None
        self._lost = False
        """Whether the last state could not be loaded, so that the stream may be at another place than the loader."""
        self._restored: Any = None
        """The stream's own state as it was loaded, until the next sample is read from the stream."""

    @property
    def is_stream(self) -> bool:
        return self.samples is None

    def begin(self, epoch: int, place: int) -> None:
        """Go to a place of an epoch; samples that were read for it already are kept.

        A stream is read again from its beginning up to the place, if it is not there. Raise ValueError on all ranks if
        it ends before, or if a loaded state does not hold the place.
        """
        if self._lost:
            raise ValueError(
                "the last state could not be loaded, so the stream may be at another place than the Loader; load a "
                "state that can be, or make the stream and the Loader again"
            )
        if epoch == self._epoch and self._is_near(place):
            return
        if self.samples is not None:
            self.order = epoch_order(self.samples, self.reading.shuffle, self.reading.seed, epoch)
        else:
            self.peers.attempt_together(lambda: self._begin_stream(epoch, place), "begin its stream")
        self._drop()
        self._epoch, self._next, self._ended = epoch, place, False

    def _is_near(self, place: int) -> bool:
        """Return whether a place of this epoch is the next one to be read, or is among those that were read ahead."""
        return place in self._documents or place == self._next

    def _begin_stream(self, epoch: int, place: int) -> None:
        """Begin an epoch of the stream, and read it up to a place; only rank 0 does. Raise ValueError if it cannot."""
        if self.peers.rank != 0:
            return
        if epoch == self._epoch and self._restored is not None:
            raise ValueError(
                f"the loaded state is damaged: it does not hold sample {place} of the stream, which comes next"
            )
        if self._stream is not None and not hasattr(self.dataset, "load_state_dict"):
            self._stream.check_begins_again()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._stream = FlatStream(self.dataset)
        for number in range(place):
            if not self._stream.skip():
                raise ValueError(
                    f"the stream ended after {number} samples; it had more than {place} when its place was saved"
                )

    def document(self, place: int) -> Document | None:
        """Return the document at a place, None after the last; read further rounds until it is known."""
        while place >= self._next and not self._ended:
            self._read_round()
        return self._documents.get(place)

    def release(self, place: int) -> None:
        """Release all documents and samples before a place."""
        for kept in (self._documents, self.held, self._packed):
            for old in [p for p in kept if p < place]:
                del kept[old]

    def _read_round(self) -> None:
        """Read this rank's share of the next places, and exchange the documents with all ranks.

        If a rank cannot read its share, all ranks raise, and the round has not been read.
        """
        held: dict[int, HeldSample] = {}
        packed: dict[int, bytes] = {}
        stats = self.reading.stats
        begin, read_before_s = time.perf_counter(), stats.reading_s
        told = self.peers.attempt_together(lambda: self._read_share(held, packed), "read its samples")
        stats.sharing_s += time.perf_counter() - begin - (stats.reading_s - read_before_s)
        schema = self.schema
        for rank, (_, seen) in enumerate(told):
            if seen is not None:
                schema = checked_schema(schema, seen, f"the samples of rank {rank}")
        self.schema = schema
        for documents, _ in told:
            self._documents.update(documents)
        self.held.update(held)
        if self._stream is not None:
            self._packed.update(packed)
            self._stream.settle()
        after = max((p for documents, _ in told for p in documents), default=self._next - 1) + 1
        self._ended = after - self._next < self._round_size()
        self._next = after

    def _read_share(
        self, held: dict[int, HeldSample], packed: dict[int, bytes]
    ) -> tuple[dict[int, Document], Schema | None]:
        """Read this rank's share of the next places; return the documents by place, and the columns of their samples.

        The samples are put into ``held``, and into ``packed`` as they came.
        """
        begin = time.perf_counter()
        found: dict[int, Document] = {}
        schema = self.schema
        try:
            for place, number, raw, as_it_came in self._share():
                found[place], sample = self._opened(number, raw)
                if sample is not None:
                    schema = checked_schema(schema, sample.schema, f"sample {number}")
                    held[place], packed[place] = sample, as_it_came
        finally:
            self.reading.stats.reading_s += time.perf_counter() - begin
        return found, schema

    def _round_size(self) -> int:
        """Return the number of places of a round, over all ranks."""
        ranks = self.peers.size
        return ROUND if self.is_stream else -(-ROUND // ranks) * ranks

    def _share(self) -> Iterator[tuple[int, int, Any, bytes]]:
        """Yield (place, sample number, sample, pickled sample) of the samples that this rank reads in the next round.

        Only samples of a stream are pickled; others can be read again.
        """
        stop = self._next + self._round_size()
        if self.samples is not None:
            for place in range(self._next, min(stop, self.samples)):
                if place % self.peers.size == self.peers.rank:
                    yield place, int(self.order[place]), self.dataset[int(self.order[place])], b""
        elif self._stream is not None:
            self._restored = None
            self._stream.untake()
            for place in range(self._next, stop):
                taken = self._stream.take(f"sample {place}")
                if taken is None:
                    return
                yield place, place, *taken

    def _opened(self, number: int, raw: Any) -> tuple[Document, HeldSample | None]:
        """Return the document of a sample, and a copy of its columns and values (None if the document is dropped).

        Raise ValueError if it is too long and the limits refuse it.
        """
        where = f"sample {number}"
        reading = self.reading
        whole = len(token_ids(raw, reading.fields, where)[1])
        length = min(whole, reading.limits.longest)
        reading.stats.documents_read += 1
        if length < whole and reading.limits.too_long != "cut":
            if reading.limits.too_long == "refuse":
                raise ValueError(reading.limits.refusal(whole, where))
            return Document(number, 0, whole, None, dropped=True), None
        mask = reading.masks.choose(number, raw, length, whole)
        tree, ignore = tree_in(mask, length), reading.fields.ignore
        sample = held_copy(opened(raw, reading.fields, length, where, tree), where)
        labels = sample.columns[LABELS]
        valid = int((labels != ignore).sum()) if tree is None else counted(tree, labels, ignore)
        repeated = int(raw.get(REPEATED_FIELD, 0)) if isinstance(raw, Mapping) else 0
        size = len(sample.values)
        return Document(number, length, whole, mask, self.peers.rank, valid, size, repeated=repeated), sample

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self, epoch: int) -> dict[str, Any] | None:
        """Return the state of a stream: its own state and the pending samples.

        Return None for a map-style dataset, for a stream without ``state_dict``, and on ranks that do not read.
        """
        if not self.is_stream or self.peers.rank != 0 or not hasattr(self.dataset, "state_dict"):
            return None
        stream = self.dataset.state_dict() if self._restored is None else self._restored
        if epoch != self._epoch:
            return {"stream": stream, "begun": False}
        packed = [(place, self._packed.get(place)) for place in sorted(self._documents)]
        return {
            "stream": stream,
            "begun": True,
            "pending": [(place, None if data is None else pickle.loads(data)) for place, data in packed],
            "rest": [] if self._stream is None else self._stream.rest,
            "next": self._next,
            "ended": self._ended,
        }

    def load(self, state: Any, epoch: int, place: int) -> None:
        """Restore a stream and its pending samples (read but not handed out) from a state of :meth:`state`.

        All ranks call this together. A stream without ``load_state_dict`` goes on with what was read ahead if the state
        is at a place of that; otherwise it is read again up to its place, by :meth:`begin`. Raise ValueError on all
        ranks if the state is damaged, or not of this kind of stream.
        """
        before, self._epoch = self._epoch, None
        if not self.is_stream:
            return
        self._lost = True
        restore = self._restore
        ahead, *_ = self.peers.attempt_together(lambda: restore(state, epoch, place, before), "restore its stream")
        self._lost = False
        if ahead is None:
            self._drop()
        else:
            self.schema = ahead.schema
            self._documents, self._next, self._ended = ahead.documents, ahead.next, ahead.ended
            self._epoch = epoch

    def _drop(self) -> None:
        """Drop what was read and not handed out."""
        self._documents, self.held, self._packed = {}, {}, {}

    def _restore(self, state: Any, epoch: int, place: int, before: int | None) -> Ahead | None:
        """Restore the stream, which only rank 0 does; return what was read ahead, or None if the epoch had not begun.

        ``before`` is the epoch that the stream is in. Raise ValueError if the state is damaged, or not of this kind of
        stream.
        """
        if self.peers.rank != 0:
            return None
        stateful = hasattr(self.dataset, "load_state_dict")
        if stateful != (state is not None):
            raise ValueError(
                "this state does not fit the stream: on rank 0, load what rank 0 saved of the same kind of stream"
            )
        if not stateful:
            goes_on = self._stream is not None and self._stream.failure is None
            if goes_on and epoch == before and self._is_near(place):  # an iterator could not be read again
                return Ahead(self._documents, self.schema, self._next, self._ended)
            return None
        check_stream_state(state)
        self._drop()
        if hasattr(self.dataset, "set_epoch"):  # Hugging Face drops the state of another epoch than the dataset's
            self.dataset.set_epoch(epoch)
        self._restored = state["stream"]
        self.dataset.load_state_dict(state["stream"])
        if not state["begun"]:
            return None
        self._stream = FlatStream(self.dataset, state["rest"])
        known = {place: self._reopened(place, raw) for place, raw in state["pending"]}
        return Ahead(known, self.schema, state["next"], state["ended"])

    def _reopened(self, place: int, raw: Any) -> Document:
        """Hold a pending sample of a state again; return its document. The sample of a dropped document is None."""
        if raw is None:
            return Document(place, 0, 0, None, dropped=True)
        where = f"sample {place}"
        packed = pickled(raw, where)
        document, sample = self._opened(place, raw)
        if sample is not None:
            self.held[place], self._packed[place] = sample, packed
            self.schema = checked_schema(self.schema, sample.schema, where)
        return document
