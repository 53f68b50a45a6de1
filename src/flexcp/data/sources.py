"""Sources: the document at each place of an epoch, and its sample.

    Known    a map-style dataset whose lengths and masks are known: nothing is read to form batches, and a rank reads
             only the documents it keeps tokens of
    Read     any other dataset: each sample is read once, by one rank, which tells the others its length and mask and
             later sends them the rows they keep. In a map-style dataset rank ``place % ranks`` reads the sample at a
             place; a stream is read by rank 0

A *place* is a position in the order of the epoch. A source gives the document at a place any number of times until the
place is released. Samples are read in rounds that all ranks enter together; a sample that cannot be read or does not
fit is an error on all ranks. The state of a stream with ``state_dict`` is the stream's own state and the *pending*
samples, which are read but not handed out yet. A stream without ``state_dict`` is read again up to its place.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flexcp.data.documents import BatchLimits, Document
from flexcp.data.order import epoch_order
from flexcp.data.row_sharing import Peers
from flexcp.data.samples import REPEATED_FIELD, Fields, Masks, Sample, Schema, counted, opened, token_ids, tree_in
from flexcp.data.stats import Stats

Ints = NDArray[np.int64]

ROUND = 16
"""Samples that all ranks together read in a round; if ranks share the reading, each reads at least one."""


@dataclass(frozen=True, eq=False)
class Reading:
    """How samples are read: names of fields, masks of documents, limits of lengths, order, and statistics."""

    fields: Fields
    masks: Masks
    limits: BatchLimits
    shuffle: bool
    seed: int
    stats: Stats


class Known:
    """The documents of a map-style dataset whose lengths and masks are known without reading it.

    Raise ValueError if a document is too long and the limits refuse it, or if all are dropped.
    """

    reads_all = False

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

    def load(self, state: Mapping[str, Any] | None, epoch: int) -> None:
        """Do nothing: this source has no state to restore."""


class Read:
    """The documents of a dataset or stream that has to be read before its lengths or masks are known.

    ``samples`` is the number of samples, None for a stream. Methods that may read are called by all ranks together.
    """

    reads_all = True

    def __init__(self, dataset: Any, samples: int | None, reading: Reading, peers: Peers) -> None:
        self.dataset, self.samples, self.reading, self.peers = dataset, samples, reading, peers
        self.schema: Schema | None = None
        self.held: dict[int, Sample] = {}
        """The samples that this rank has read, by place."""
        self._raw: dict[int, Any] = {}
        self._documents: dict[int, Document] = {}
        self._next = 0
        self._ended = False
        self._epoch: int | None = None
        self._stream: FlatStream | None = None
        self._restored: Any = None
        """The stream's own state as it was loaded, until the next sample is read from the stream."""

    @property
    def is_stream(self) -> bool:
        return self.samples is None

    def begin(self, epoch: int, place: int) -> None:
        """Go to a place of an epoch; samples that were read for it already are kept.

        A stream is read again from its beginning up to the place, if it is not there. Raise ValueError if it ends
        before, or if a loaded state does not hold the place.
        """
        if epoch == self._epoch and (place in self._documents or place == self._next):
            return
        if epoch == self._epoch and self._restored is not None:
            raise ValueError(
                f"the loaded state is damaged: it does not hold sample {place} of the stream, which comes next"
            )
        self._documents.clear()
        self.held.clear()
        self._raw.clear()
        self._epoch, self._next, self._ended = epoch, place, False
        if self.samples is not None:
            self.order = epoch_order(self.samples, self.reading.shuffle, self.reading.seed, epoch)
        elif self.peers.rank == 0:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            self._stream = FlatStream(self.dataset)
            for number in range(place):
                if next(self._stream, None) is None:
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
        for kept in (self._documents, self.held, self._raw):
            for old in [p for p in kept if p < place]:
                del kept[old]

    def _read_round(self) -> None:
        """Read this rank's share of the next places, and exchange the documents with all ranks.

        If a rank cannot read its share, all ranks raise: that rank its own error, the others ValueError or
        RuntimeError.
        """
        begin = time.perf_counter()
        found: dict[int, Document] = {}
        schema, failure = self.schema, None
        try:
            for place, number, raw in self._share():
                document, sample = self._opened(number, raw)
                found[place] = document
                if sample is not None:
                    schema = checked_schema(schema, sample.schema, f"sample {number}")
                    self.held[place] = sample
                    if self.is_stream:
                        self._raw[place] = raw
        except Exception as error:  # a user's dataset may raise anything, and all ranks must raise together
            failure = (type(error).__name__, str(error), isinstance(error, ValueError), error)
        self.reading.stats.reading_s += time.perf_counter() - begin
        begin = time.perf_counter()
        told = self.peers.all_gather((found, schema, failure[:3] if failure else None))
        self.reading.stats.sharing_s += time.perf_counter() - begin
        for rank, (documents, seen, problem) in enumerate(told):
            if problem is not None:
                if failure is not None and rank == self.peers.rank:
                    raise failure[3]
                name, text, is_value = problem
                raise (ValueError if is_value else RuntimeError)(
                    f"rank {rank} could not read its samples: {name}: {text}"
                )
            if seen is not None:
                self.schema = checked_schema(self.schema, seen, f"the samples of rank {rank}")
            self._documents.update(documents)
        after = max((p for documents, _, _ in told for p in documents), default=self._next - 1) + 1
        self._ended = after - self._next < self._round_size()
        self._next = after

    def _round_size(self) -> int:
        """Return the number of places of a round, over all ranks."""
        ranks = self.peers.size
        return ROUND if self.is_stream else -(-ROUND // ranks) * ranks

    def _share(self) -> Iterator[tuple[int, int, Any]]:
        """Yield (place, sample number, sample) of the samples that this rank reads in the next round."""
        stop = self._next + self._round_size()
        if self.samples is not None:
            for place in range(self._next, min(stop, self.samples)):
                if place % self.peers.size == self.peers.rank:
                    yield place, int(self.order[place]), self.dataset[int(self.order[place])]
        elif self._stream is not None:
            self._restored = None
            for place in range(self._next, stop):
                raw = next(self._stream, None)
                if raw is None:
                    return
                yield place, place, raw

    def _opened(self, number: int, raw: Any) -> tuple[Document, Sample | None]:
        """Return the document of a sample, and its columns and values (None if the document is dropped).

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
        sample = opened(raw, reading.fields, length, where, tree)
        labels = sample.columns["labels"]
        valid = int((labels != ignore).sum()) if tree is None else counted(tree, labels, ignore)
        size = len(pickle.dumps(sample.values)) if sample.values else 0
        repeated = int(raw.get(REPEATED_FIELD, 0)) if isinstance(raw, Mapping) else 0
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
        pending = [(place, self._raw.get(place)) for place in sorted(self._documents)]
        rest = [] if self._stream is None else list(self._stream.rest)
        return {
            "stream": stream,
            "begun": True,
            "pending": pending,
            "rest": rest,
            "next": self._next,
            "ended": self._ended,
        }

    def load(self, state: Mapping[str, Any] | None, epoch: int) -> None:
        """Restore a stream and its pending samples (read but not handed out) from a state of :meth:`state`.

        All ranks call this together. A stream without ``load_state_dict`` is read again up to its place, by
        :meth:`begin`. Raise ValueError if the state is not of this kind of stream.
        """
        self._epoch = None
        if not self.is_stream:
            return
        stateful = self.peers.rank == 0 and hasattr(self.dataset, "load_state_dict")
        known: dict[int, Document] = {}
        ahead: tuple[int, bool] | None = None
        problem = None
        self._documents, self.held, self._raw = {}, {}, {}
        if self.peers.rank == 0 and stateful != (state is not None):
            problem = "this state does not fit the stream: on rank 0, load what rank 0 saved of the same kind of stream"
        elif state is not None and stateful:
            self._restored = state["stream"]
            self.dataset.load_state_dict(state["stream"])
            if state["begun"]:
                self._stream = FlatStream(self.dataset, state["rest"])
                known, ahead = self._reopened(state["pending"]), (int(state["next"]), bool(state["ended"]))
        (known, ahead, schema, problem), *_ = self.peers.all_gather((known, ahead, self.schema, problem))
        if problem is not None:
            raise ValueError(problem)
        if ahead is not None:
            self.schema, self._documents = schema, known
            self._epoch, (self._next, self._ended) = epoch, ahead

    def _reopened(self, pending: list[tuple[int, Any]]) -> dict[int, Document]:
        """Hold the pending samples of a state again, given as (place, sample); return their documents by place.

        The sample of a dropped document is None.
        """
        known: dict[int, Document] = {}
        for place, raw in pending:
            if raw is None:
                known[place] = Document(place, 0, 0, None, dropped=True)
                continue
            known[place], sample = self._opened(place, raw)
            if sample is not None:
                self.held[place], self._raw[place] = sample, raw
                self.schema = checked_schema(self.schema, sample.schema, f"sample {place}")
        return known


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


class FlatStream:
    """Iterates over the samples of a stream one by one, even if it yields lists of samples that are mappings.

    ``rest`` are the remaining samples of the last list.
    """

    def __init__(self, stream: Any, rest: Iterable[Any] = ()) -> None:
        self.stream, self.rest = iter(stream), deque(rest)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while not self.rest:
            item = next(self.stream)
            several = isinstance(item, list | tuple) and len(item) > 0 and isinstance(item[0], Mapping)
            self.rest.extend(item if several else [item])
        return self.rest.popleft()


def is_map_style(dataset: Any) -> bool:
    """Return whether samples are read by number: the dataset has a length and indexing, and is no IterableDataset."""
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
