"""Local rows: move per-token tensors between the stream and the ranks, and compute the loss of a rank's rows.

All functions rest on one map, the stream token of each local row, which every rank can compute for every other rank
(:mod:`flexcp.executor.run.rank_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.batch import Batch
from flexcp.executor.arguments import named_kind, single
from flexcp.executor.exchange.collectives import Collectives, row_form
from flexcp.executor.first_derivatives import only_first
from flexcp.executor.kernels import uploaded
from flexcp.executor.run.rank_rows import local_stream
from flexcp.plan.placement import Placement
from flexcp.plan.positions import refuse_branches

Ints = NDArray[np.int64]
DEFAULT_IGNORE = -100
"""The label of rows without a label: the default ``ignore_index`` of torch's cross entropy."""
MARKS = (DEFAULT_IGNORE, -1)
"""Usual labels of rows without a label, the more usual one first."""
FLOATS_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
COPIED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **dict.fromkeys(FLOATS_OF_8_BITS, torch.uint8),
}
"""Dtypes that torch cannot add, and dtypes of the same size in which their rows are moved."""


def shard(full: Tensor, indices: Tensor, pad: float | int | None) -> Tensor:
    """Return rows ``indices`` of a stream tensor, on its device; for an index of -1 (a pad), a row filled with ``pad``.

    If ``pad`` is None, it is that of :func:`_usual_pad`. ``indices`` are on the CPU.
    """
    local = full[uploaded(indices.clamp(min=0).numpy(), full.device)]
    missing = indices < 0
    if not bool(missing.any()):
        return local
    return _filled(local, missing.numpy(), _usual_pad(full) if pad is None else pad)


def _usual_pad(full: Tensor) -> Tensor | int:
    """Return what pads of a stream get by default: a mark of tokens without a label if the stream holds it, else 0.

    The marks are -100 and -1, in this order, and only tensors of signed integers are searched. The host does not wait
    for a device.
    """
    if full.is_floating_point() or full.is_complex() or not full.dtype.is_signed:
        return 0
    found = torch.zeros((), dtype=full.dtype, device=full.device)
    for mark in reversed(MARKS):
        found = torch.where((full == mark).any(), torch.full_like(found, mark), found)
    return found


def gather(local: Tensor, placement: Placement, collectives: Collectives) -> Tensor:
    """Return the rows of all ranks in stream order, without pads, on every rank. Differentiable."""
    everyone = all_gathered(local, placement.tokens.tolist(), collectives, "step.gather")
    source = np.concatenate([local_stream(placement, r) for r in range(placement.ranks)])
    order = np.argsort(source, kind="stable")[: placement.batch.tokens]
    return everyone[uploaded(order, local.device)]


def all_gathered(local: Tensor, counts: list[int], collectives: Collectives, place: str) -> Tensor:
    """Return the rows of all ranks, one rank after the other, on every rank.

    ``counts`` is the number of rows of each rank; ``place`` names the call in errors. The backward sums the gradients
    of all ranks.
    """
    found: Tensor = _AllGather.apply(local, counts, collectives, place)
    return found


def roll(local: Tensor, placement: Placement, collectives: Collectives, shift: int, fill: float | int) -> Tensor:
    """Shift rows by ``shift`` tokens inside each document, across ranks. Differentiable.

    The row of stream token t gets the row of token ``t - shift``, or ``fill`` if that token is not in the same
    document. Pads get ``fill`` too.
    """
    batch = placement.batch
    shift = max(-batch.tokens, min(batch.tokens, shift))  # further away nothing is inside a document, either
    wanted = []
    for r in range(placement.ranks):
        index = local_stream(placement, r)
        source = index - shift
        inside = (index < batch.tokens) & (source >= 0) & (source < batch.tokens)
        safe, at = np.clip(source, 0, batch.tokens - 1), np.minimum(index, batch.tokens - 1)
        inside &= batch.document_of(safe) == batch.document_of(at)
        wanted.append(np.where(inside, source, -1))
    here = [local_stream(placement, r) for r in range(placement.ranks)]
    rows_by_peer, mine = _rows_by_peer(here, placement.stream, wanted, collectives.rank), wanted[collectives.rank]
    return _filled(_Fetch.apply(local, rows_by_peer, len(mine), collectives, "step.roll"), mine < 0, fill)


def relayout(
    local: Tensor,
    placement: Placement,
    collectives: Collectives,
    maps: Sequence[Ints],
    back: bool,
    place: str = "step.relayout",
) -> Tensor:
    """Move rows from the plan's layout to the layout ``maps``, or with ``back`` from that layout to the plan's.

    ``maps`` has for each rank its stream tokens in order. Pads of the plan are dropped, and with ``back`` their rows
    are zero. ``place`` names the call in errors. Differentiable.
    """
    here = [local_stream(placement, r) for r in range(placement.ranks)]
    there = [np.asarray(index, np.int64) for index in maps]
    source, wanted = (there, here) if back else (here, there)
    wanted = [np.where(index < placement.batch.tokens, index, -1) for index in wanted]
    rows_by_peer = _rows_by_peer(source, placement.stream, wanted, collectives.rank)
    found: Tensor = _Fetch.apply(local, rows_by_peer, len(wanted[collectives.rank]), collectives, place)
    return found


def _filled(x: Tensor, rows: NDArray[np.bool_], value: Tensor | float | int) -> Tensor:
    """Return ``x`` with the rows where ``rows`` is True set to ``value``."""
    marked = uploaded(rows, x.device).view((-1,) + (1,) * (x.dim() - 1))
    fill = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    return torch.where(marked, fill, x)


def next_tokens(tokens: Tensor, batch: Batch, ignore: int) -> Tensor:
    """Return the labels of the whole stream, int64: for each token the next one of its document.

    The last token of a document gets ``ignore``. Raise NotImplementedError if a document branches.
    """
    refuse_branches(batch, "next-token labels know")
    # int64, because tokens of small vocabularies may be bytes, which cannot hold ``ignore``.
    labels = torch.roll(tokens.to(torch.int64), -1, 0)
    labels.index_fill_(0, uploaded(batch.starts[1:] - 1, tokens.device), ignore)
    return labels


def refuse_shifted(tokens: Tensor, labels: Tensor, successors: Tensor, ignore: int, who: str) -> None:
    """Raise ValueError for labels that are already next tokens (``successors``) and that ``who`` would shift again.

    Tokens whose label or successor is ``ignore`` are left out. Labels that equal the tokens too, as in a stream of one
    repeated token, are accepted.
    """
    given = (labels != ignore) & (successors != ignore)
    if bool((labels == successors)[given].all()) and not bool((labels == tokens)[given].all()):
        raise ValueError(
            f"labels are already shifted: each is the token after its own, and {who} would shift them again; pass "
            "labels that are not shifted, as Transformers takes them, or none to train on every next token"
        )


def without_pads(labels: Tensor, indices: Tensor, ignore: int) -> Tensor:
    """Return this rank's labels with ``ignore`` at its pads, which are the rows whose index is negative.

    If there are pads, the result is int64.
    """
    pads = (indices < 0).numpy()
    # int64, because bytes cannot hold ``ignore``.
    return _filled(labels.to(torch.int64), pads, ignore) if pads.any() else labels


def token_mean_loss(logits: Tensor, labels: Tensor, collectives: Collectives, ignore: int) -> Tensor:
    """Return the sum of this rank's cross entropies, divided by the number of valid labels on all ranks.

    Labels are valid if they are not ``ignore``. The sum depends on ``logits`` even if no label of this rank is valid,
    so that its backward always runs. On a CPU, a label outside of the vocabulary raises ValueError.
    """
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    try:
        total = torch.nn.functional.cross_entropy(wide, labels, ignore_index=ignore, reduction="sum")
    except IndexError as error:
        with collectives.checking("step.loss"):
            raise ValueError(_wrong_label(labels, logits.shape[1], ignore)) from error
    return mean_over_ranks(total, (labels != ignore).sum(), collectives, "step.loss")


def check_logits(logits: Tensor, labels: Tensor, tokens: int) -> None:
    """Raise ValueError unless logits are floats ``[rows, vocabulary]`` and labels int64 ``[rows]``.

    ``tokens`` is how many rows this rank has. Of wrong numbers of rows, only two usual mistakes raise here: both
    tensors one row short, and the right number of logits with another number of labels. The caller checks the rest.
    """
    wanted = {"logits": (logits, 2, f"({tokens}, vocabulary)"), "labels": (labels, 1, f"({tokens},)")}
    for name, (x, dims, shape) in wanted.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a tensor of this rank's {tokens} rows, of shape {shape}; got {named_kind(x)}")
        if x.dim() != dims:
            instead = single(name, x.shape, tokens) if x.dim() == dims + 1 else None
            way = f"; pass {instead}" if instead else ""
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but step.loss expects {shape}, this rank's rows{way}")
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}; a cross entropy needs floating-point numbers")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}; token ids are torch.int64: pass labels.long()")
    if len(logits) == len(labels) == tokens - 1:
        raise ValueError(
            f"step.loss got {len(logits)} rows of logits and labels, but this rank has {tokens}: do not cut off or "
            "shift anything, because step.labels(tokens) are next tokens already; call step.loss(logits, "
            "step.labels(tokens))"
        )
    if len(logits) == tokens != len(labels):
        raise ValueError(f"{len(labels)} labels for {len(logits)} rows of logits; make them by step.labels(tokens)")


def _wrong_label(labels: Tensor, vocabulary: int, ignore: int) -> str:
    """Return the message for the first label that is neither ``ignore`` nor an id from 0 to ``vocabulary`` - 1."""
    outside = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore)
    row = int(outside.nonzero()[0])
    label = int(labels[row])
    way = ""
    if label == DEFAULT_IGNORE:
        way = (
            f"; step.labels writes {label} at the ends of documents: make the labels with "
            f"step.labels(tokens, ignore={ignore})"
        )
    elif label < 0:
        way = (
            f"; if {label} marks rows without a label, make the labels with step.labels(tokens, ignore={label}), "
            f"which marks the ends of documents in the same way, and pass ignore={label} here"
        )
    return (
        f"the label of row {row} is {label}, outside of the vocabulary 0..{vocabulary - 1} and not ignore={ignore}{way}"
    )


def mean_over_ranks(total: Tensor, count: Tensor, collectives: Collectives, place: str) -> Tensor:
    """Return this rank's share of a mean over all ranks: ``total`` divided by the sum of all ranks' ``count``.

    The divisor is 1 if the counts add up to 0. ``place`` names the call in errors. Ranks may pass counts of different
    dtypes: the sum of no weights, for example, is an integer in Python.
    """
    everyone = collectives.summed(place, count.to(torch.float64))
    # Weights may add up to less than 1, and are then the divisor all the same.
    return total / torch.where(everyone == 0, 1, everyone).to(total.dtype)


SentAndReceived = list[tuple[Tensor, Tensor]]
"""For each rank of the group: (local rows sent to it, rows of the result received from it)."""


def _rows_by_peer(source: list[Ints], stream: int, wanted: list[Ints], rank: int) -> SentAndReceived:
    """Return for each rank the local rows that ``rank`` sends it, and the rows of the result that come from it.

    ``source`` has for each rank the stream tokens that it holds, ``wanted`` those that it is to get (-1 for none);
    ``stream`` is the number of stream tokens, pads included. Both lists of rows include those that stay on ``rank``.
    """
    owner = np.full(stream, -1)
    place = np.empty(stream, np.int64)
    for r, index in enumerate(source):
        owner[index], place[index] = r, np.arange(len(index))
    rows_by_peer = []
    mine = wanted[rank]
    for peer in range(len(source)):
        theirs = wanted[peer][wanted[peer] >= 0]
        sent = place[theirs[owner[theirs] == rank]]
        got = np.flatnonzero((mine >= 0) & (owner[np.maximum(mine, 0)] == peer))
        rows_by_peer.append((torch.from_numpy(sent), torch.from_numpy(got)))
    return rows_by_peer


class _Fetch(torch.autograd.Function):
    """Fetch rows from the ranks that hold them; the backward sends their gradients back and adds them up."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, rows_by_peer: SentAndReceived, rows: int, collectives: Collectives, place: str
    ) -> Tensor:
        ctx.rows_by_peer, ctx.collectives, ctx.place, ctx.rows = rows_by_peer, collectives, place, len(local)
        return _exchange_rows(local, rows_by_peer, rows, collectives, place)

    @staticmethod
    @only_first("moving rows between ranks (step.roll, relayout, restore)")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = [(got, sent) for sent, got in ctx.rows_by_peer]
        place = f"the backward of {ctx.place}"
        return _exchange_rows(grads[0], back, ctx.rows, ctx.collectives, place), None, None, None, None


def _exchange_rows(
    local: Tensor, rows_by_peer: SentAndReceived, rows: int, collectives: Collectives, place: str
) -> Tensor:
    """Exchange rows as ``rows_by_peer`` says, and return a tensor of ``rows`` rows.

    Each row is the sum of what was received for it, zero if nothing was. ``place`` names the call in errors.
    """
    if local.dtype in COPIED_AS:  # each row of a result comes from one rank, so bits need not be added
        bits = local.view(COPIED_AS[local.dtype])
        return _exchange_rows(bits, rows_by_peer, rows, collectives, place).view(local.dtype)
    out = local.new_zeros((rows, *local.shape[1:]))
    on_device = [[uploaded(rows.numpy(), local.device) for rows in pair] for pair in rows_by_peer]
    sends = {peer: local[on_device[peer][0]].contiguous() for peer in collectives.others}
    arriving = {peer: local.new_empty((len(on_device[peer][1]), *local.shape[1:])) for peer in collectives.others}
    collectives.exchange(place, sends, arriving, row_form(local))
    for peer, (sent, got) in enumerate(on_device):
        out.index_add_(0, got, local[sent] if peer == collectives.rank else arriving[peer])
    return out


class _AllGather(torch.autograd.Function):
    """Gather the rows of all ranks, one rank after the other; the backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, counts: list[int], collectives: Collectives, place: str) -> Tensor:
        ctx.counts, ctx.collectives, ctx.place = counts, collectives, place
        if collectives.size == 1:
            return local.clone()
        padded = local.new_zeros((max(counts), *local.shape[1:]))
        padded[: len(local)] = local.detach()
        parts = collectives.gathered(place, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @only_first("gathering rows (step.gather, gather_sequences)")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = ctx.collectives.summed(f"the backward of {ctx.place}", grads[0].contiguous())
        before = sum(ctx.counts[: ctx.collectives.rank])
        return grad[before : before + ctx.counts[ctx.collectives.rank]], None, None, None
