"""Row sharing: send the rows of a sample from the rank that read it to the ranks that keep its tokens.

A sample has per-token columns, such as tokens and labels, and per-document values. All ranks know the plan, which rank
read which document, and the columns of a sample, so both sides of a message know its size and layout beforehand. A
message from the reader to a keeper holds, for every column, the keeper's rows of the reader's documents in the keeper's
local order, and then the pickled values of these documents. Messages travel through the loader's group, or through its
CPU group if it has one: with gloo from host memory, with NCCL through the device.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flexcp.data.documents import Document
from flexcp.data.reading.samples import HeldSample, Sample, Schema
from flexcp.executor.exchange.collectives import Collectives
from flexcp.plan.placement import Placement

Ints = NDArray[np.int64]
T = TypeVar("T")


class Peers:
    """The ranks that share samples; without a group, this rank alone.

    ``timeout`` is the time limit of each exchange between CPU ranks; NCCL groups have their own.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self.collectives = Collectives(group, timeout)
        self.group, self.rank, self.size = group, self.collectives.rank, self.collectives.size

    @property
    def device(self) -> torch.device:
        """The device on which tensors must be to be sent."""
        if self.group is None or "gloo" in str(dist.get_backend_config(self.group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def all_gather(self, value: Any, place: str) -> list[Any]:
        """Return the values of all ranks, in the order of ranks; values are pickled. All ranks call this together.

        ``place`` says in errors what the ranks exchange.
        """
        return self.collectives.told(place, value, self.device)

    def attempt_together(self, attempt: Callable[[], T], doing: str) -> list[T]:
        """Call ``attempt`` on all ranks, and return what it returns on each; all ranks call this together.

        If it fails on a rank, all ranks raise: those where it failed their own error, the others ValueError or
        RuntimeError, which says what the first of them could not do (``doing``) and why.
        """
        done: T | None = None
        failure: Exception | None = None
        try:
            done = attempt()
        except Exception as error:  # a user's dataset may raise anything, and no rank may be left waiting
            failure = error
        mine = None if failure is None else (type(failure).__name__, str(failure), isinstance(failure, ValueError))
        told = self.all_gather((done, mine), f"the loader's attempt to {doing}")
        if failure is not None:
            raise failure
        for rank, (_, problem) in enumerate(told):
            if problem is not None:
                name, text, is_value = problem
                raise (ValueError if is_value else RuntimeError)(f"rank {rank} could not {doing}: {name}: {text}")
        return [found for found, _ in told]

    def total(self, count: int) -> int:
        """Return the sum of ``count`` over all ranks; all ranks call this together."""
        return int(self.collectives.summed("the loader's count of labels", torch.tensor(count, device=self.device)))

    def exchange(self, sent: Mapping[int, Tensor], sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Send the bytes ``sent[peer]`` to each peer, and return the bytes received, by peer, on the CPU.

        ``sizes[peer]`` is how many bytes come from a peer. Empty messages are not sent, and not in the result.
        """
        device = self.device
        arriving = {r: torch.empty(n, dtype=torch.uint8, device=device) for r, n in sizes.items() if n}
        self.collectives.exchange(
            "the loader's exchange of rows", {r: data.to(device) for r, data in sent.items()}, arriving
        )
        return {peer: buffer.cpu() for peer, buffer in arriving.items()}


@dataclass(frozen=True)
class Segments:
    """The tokens that a rank keeps, as ranges of documents in the order of the rank's local rows.

    Segment i is ``rows[i]`` tokens of ``document[i]`` from token ``first[i]`` on; they begin at local row ``at[i]``.
    """

    at: Ints
    document: Ints
    first: Ints
    rows: Ints

    def of_documents(self, documents: NDArray[np.bool_]) -> Segments:
        """Return the segments of those documents for which ``documents[document]`` is True."""
        keep = documents[self.document]
        return Segments(self.at[keep], self.document[keep], self.first[keep], self.rows[keep])


def segments(placement: Placement, rank: int) -> Segments:
    """Return the tokens that a rank keeps as ranges of documents, without pads."""
    runs = placement.runs.take(placement.runs.rank == rank)
    sizes = runs.stop - runs.start
    begin = np.cumsum(sizes) - sizes
    run, document, first, last = placement.batch.split_by_document(runs.start, runs.stop)
    at = begin[run] + placement.batch.starts[document] + first - runs.start[run]
    return Segments(at, document, first, last - first)


def local_columns(
    kept: Segments, rows: int, samples: Mapping[int, Sample | HeldSample], schema: Schema, pads: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return columns of ``rows`` local rows: the rows of the segments from the samples, the others filled with pads.

    ``samples`` are by document, and ``pads`` by name of the column (0 by default). ``schema`` lists the columns.
    """
    out = {}
    for name, dtype, shape in schema:
        out[name] = torch.full((rows, *shape), pads.get(name, 0), dtype=dtype, device="cpu")
    for at, document, first, count in zip(
        *(x.tolist() for x in (kept.at, kept.document, kept.first, kept.rows)), strict=True
    ):
        columns = samples[document].columns
        for name, column in out.items():
            column[at : at + count] = columns[name][first : first + count]
    return out


def shared(
    placement: Placement,
    documents: Sequence[Document],
    held: Mapping[int, HeldSample],
    schema: Schema,
    pads: Mapping[str, int],
    peers: Peers,
) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Exchange rows with all ranks; return this rank's columns and the values of the documents it keeps tokens of.

    ``documents`` are those of the batch, and ``held`` are the samples that this rank read, by document. ``schema`` and
    ``pads`` are as in :func:`local_columns`.
    """
    readers = np.array([d.reader for d in documents], np.int64)
    mine = segments(placement, peers.rank)
    columns = local_columns(
        mine.of_documents(readers == peers.rank), int(placement.tokens[peers.rank]), held, schema, pads
    )
    values = {d: _values(held[d].values) for d in _documents_of(mine) if readers[d] == peers.rank}
    others = [r for r in range(peers.size) if r != peers.rank]
    sent = {r: _message(segments(placement, r).of_documents(readers == peers.rank), held, schema) for r in others}
    parts = {r: mine.of_documents(readers == r) for r in others}
    sizes = {r: _message_bytes(part, documents, schema) for r, part in parts.items()}
    for reader, data in peers.exchange(sent, sizes).items():
        values.update(_unpacked(data, parts[reader], documents, schema, columns))
    return columns, values


def _documents_of(part: Segments) -> list[int]:
    """Return the documents of the segments, in ascending order and each once."""
    found: list[int] = np.unique(part.document).tolist()
    return found


def _message(part: Segments, held: Mapping[int, HeldSample], schema: Schema) -> Tensor:
    """Return the bytes that go to a keeper: the rows ``part`` of documents that this rank read, and their values."""
    rows = list(zip(part.document.tolist(), part.first.tolist(), part.rows.tolist(), strict=True))
    pieces = []
    for name, _, _ in schema:
        pieces += [_bytes(held[d].columns[name][first : first + count]) for d, first, count in rows]
    for d in _documents_of(part):
        if held[d].values:
            pieces.append(torch.frombuffer(bytearray(held[d].values), dtype=torch.uint8))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device="cpu")


def _bytes(rows: Tensor) -> Tensor:
    """Return rows of a column as bytes."""
    return rows.contiguous().view(-1).view(torch.uint8)


def _row_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of one row of a column."""
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


def _message_bytes(part: Segments, documents: Sequence[Document], schema: Schema) -> int:
    """Return the size in bytes of a message with these segments and the values of their documents."""
    each = sum(_row_bytes(dtype, shape) for _, dtype, shape in schema)
    return int(part.rows.sum()) * each + sum(documents[d].value_bytes for d in _documents_of(part))


def _unpacked(
    data: Tensor, part: Segments, documents: Sequence[Document], schema: Schema, columns: dict[str, Tensor]
) -> dict[int, dict[str, Any]]:
    """Write the rows of the message ``data`` into ``columns``; return the values of its documents, by document.

    ``part`` are the segments of this rank that the message holds.
    """
    at = 0
    for name, dtype, shape in schema:
        each = _row_bytes(dtype, shape)
        for local, count in zip(part.at.tolist(), part.rows.tolist(), strict=True):
            rows = data[at : at + count * each].clone().view(dtype).view(count, *shape)
            columns[name][local : local + count] = rows
            at += count * each
    values: dict[int, dict[str, Any]] = {}
    for d in _documents_of(part):
        size = documents[d].value_bytes
        values[d] = _values(data[at : at + size].numpy().tobytes())
        at += size
    return values


def _values(packed: bytes) -> dict[str, Any]:
    """Return the per-document values that were pickled; none if ``packed`` is empty."""
    found: dict[str, Any] = pickle.loads(packed) if packed else {}
    return found
