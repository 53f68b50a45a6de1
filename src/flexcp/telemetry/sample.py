"""Sample: compute a few rows of a result again in float64, while training runs, and compare.

Keys do not move. The queries and results of the sampled rows are sent to every rank (by a sum over ranks). Each rank
computes their logits with the keys it keeps, directly from the slices of the mask. The parts of the ranks are combined
as LSEs (by gathers) and as weighted values (by a sum). So the check uses nothing of the plan but which rank keeps which
token, and moves only a few rows. All ranks get the same numbers, so either all of them raise or none. All ranks of a
step must check the same calls.

Legend: N sampled rows, H query heads, G KV heads, M keys of this rank that a row sees, D and V the head sizes.

The error of a row's output is relative to ``sum p |v|``, the size of the summands: it does not vanish where values
cancel, and does not hide errors where values are small. The limit for float64 is 1e-10. For lower precisions it is
twice the largest error, over the sampled rows, of the same sum computed as the reference kernel does (in float32, with
P and the result rounded to the dtype), plus one rounding to the dtype, plus sqrt(n) float32 roundings if the longest of
the sampled documents has n tiles of keys, because kernels add up tiles one after the other. LSEs have the same limits,
relative to ``max(1, |LSE|)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.executor.kernels import Settings, uploaded
from flexcp.masks import HI, K0, K1, LO, Q0, Q1

if TYPE_CHECKING:
    from flexcp.batch import Batch
    from flexcp.executor.step import Step

Ints = NDArray[np.int64]
KEYS_AT_ONCE = 16_384
"""The most keys of which float64 copies are in memory at one time."""
TILE_KEYS = 64
"""Keys of a tile, for the limit of the error."""


class MismatchError(RuntimeError):
    """Raised if a sampled row of attention differs from a dense computation of the same row."""


@dataclass(frozen=True)
class Row:
    """A sampled row and head: where it is, whether its output or its LSE is off, the error and its limit.

    ``token`` is its stream token, ``row`` its place in the document, and ``rank`` the rank that keeps it. ``what`` is
    ``"out"`` or ``"LSE"``. ``error`` and ``allowed`` are relative to the size of the value.
    """

    token: int
    document: int
    row: int
    head: int
    rank: int
    what: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed  # a NaN is wrong

    def __str__(self) -> str:
        return (
            f"row {self.row} of document {self.document} (stream token {self.token}, kept by rank {self.rank}), head "
            f"{self.head}: {self.what} is off by {self.error:.3g} of its size, allowed {self.allowed:.3g}"
        )


def chosen_rows(tokens: int, count: int, seed: int, call: int) -> Ints:
    """Choose ``count`` stream tokens to check in a call, in ascending order and the same on every rank.

    All tokens are chosen if there are no more than ``count``.
    """
    found = np.random.default_rng([seed, call]).choice(tokens, size=min(count, tokens), replace=False)
    return np.sort(found, kind="stable")


@torch.no_grad()
def worst_row(
    step: Step,
    mask: int,
    settings: Settings,
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tokens: Ints,
) -> Row:
    """Compute the rows ``tokens`` of the stream again, and return the one with the largest ratio of error to limit.

    ``qkv``, ``out`` and ``lse`` are this rank's rows of an attention call, ``sinks`` its sinks, and ``mask`` is the
    mask's index. ``tokens`` must be ascending. All ranks of the step's group must call this.
    """
    q, k, v = qkv
    here = step.tables.tokens.numpy()
    q_NHD, out_NHV, lse_NH = _everywhere(step, here, tokens, q, out, lse)
    seen = [_visible(step.plan.batch, mask, int(token), here) for token in tokens]
    exact, rounded = torch.float64, torch.float64 if q.dtype == torch.float64 else torch.float32
    logits = {dtype: _logits(q_NHD, k, seen, settings, dtype) for dtype in (exact, rounded)}
    sink = None if sinks is None else sinks.detach().double()
    total = {dtype: _total_lse(step, parts, sink) for dtype, parts in logits.items()}
    sums_3NHV = torch.stack(
        [
            _weighted(logits[exact], total[exact], v, seen, exact),
            _weighted(logits[exact], total[exact], v.abs(), seen, exact),
            _weighted(logits[rounded], total[rounded], v, seen, q.dtype),
        ]
    )
    right_NHV, size_NHV, own_NHV = step.collectives.summed("the check of sampled rows, values", sums_3NHV)
    size_NH = size_NHV.amax(-1).nan_to_num(nan=1.0).clamp_min(torch.finfo(torch.float64).tiny)
    lse_size_NH = total[exact].abs().nan_to_num(nan=1.0, posinf=1.0).clamp_min(1.0)

    def errors(values: Tensor, lses: Tensor) -> Tensor:
        off = _apart(values.double(), right_NHV).amax(-1) / size_NH
        return torch.stack([off, _apart(lses.double(), total[exact]) / lse_size_NH])

    found_2NH = errors(out_NHV, lse_NH)
    own_2NH = errors(own_NHV.to(q.dtype), total[rounded].to(rounded))
    return _worst(step, tokens, found_2NH, own_2NH, q.dtype)


def _everywhere(step: Step, here: Ints, tokens: Ints, *tensors: Tensor) -> list[Tensor]:
    """Return the rows ``tokens`` (ascending) of per-token tensors, in float64, on every rank.

    Each row comes from the rank that keeps it; ``here`` are the stream tokens of this rank.
    """
    mine, device = np.flatnonzero(np.isin(here, tokens)), tensors[0].device
    at, to = uploaded(mine, device), uploaded(np.searchsorted(tokens, here[mine]), device)
    flat = [x.detach().flatten(1).double() for x in (t[at] for t in tensors)]
    rows = torch.zeros(len(tokens), sum(x.shape[1] for x in flat), dtype=torch.float64, device=device)
    rows[to] = torch.cat(flat, 1)
    parts = step.collectives.summed("the check of sampled rows", rows).split([x.shape[1] for x in flat], 1)
    return [part.reshape(len(tokens), *t.shape[1:]) for part, t in zip(parts, tensors, strict=True)]


def _visible(batch: Batch, mask: int, token: int, here: Ints) -> Ints:
    """Return the local rows whose keys a stream token sees; ``here`` are the stream tokens of this rank."""
    document = int(batch.document_of(np.array([token]))[0])
    start, layer = int(batch.starts[document]), batch.masks[mask]
    slices, row = layer.slices[layer.first[document] : layer.first[document + 1]], token - start
    found = np.zeros(len(here), bool)
    for s in slices[(slices[:, Q0] <= row) & (row < slices[:, Q1])]:
        first, last = max(s[K0], row + s[LO]), min(s[K1] - 1, row + s[HI])
        found |= (here >= start + first) & (here <= start + last)
    return np.flatnonzero(found)


def _logits(q_NHD: Tensor, k: Tensor, seen: list[Ints], settings: Settings, dtype: torch.dtype) -> list[Tensor]:
    """Return the logits ``[H, M]`` of each sampled row with the keys of this rank that it sees."""
    found = []
    for q_HD, rows in zip(q_NHD.to(dtype), seen, strict=True):
        q_GSD = q_HD.unflatten(0, (k.shape[1], -1))
        parts = [torch.einsum("gsd,mgd->gsm", q_GSD, part.to(dtype)).flatten(0, 1) for part in _chunks(k, rows)]
        s_HM = torch.cat(parts, 1) * settings.scale
        found.append(s_HM if settings.softcap is None else settings.softcap * torch.tanh(s_HM / settings.softcap))
    return found


def _total_lse(step: Step, logits: list[Tensor], sink: Tensor | None) -> Tensor:
    """Return the LSE ``[N, H]`` of the sampled rows over the keys of all ranks, with the sink if given, in float64."""
    mine_NH = torch.stack([torch.logsumexp(s_HM, 1) for s_HM in logits]).double()
    everyone = step.collectives.gathered("the check of sampled rows, LSEs", mine_NH)
    if sink is not None:
        everyone.append(sink.expand_as(mine_NH))
    return torch.logsumexp(torch.stack(everyone), 0)


def _weighted(logits: list[Tensor], lse_NH: Tensor, v: Tensor, seen: list[Ints], rounding: torch.dtype) -> Tensor:
    """Return this rank's share of the output ``[N, H, V]`` in float64, with probabilities rounded to ``rounding``."""
    found = []
    for s_HM, lse_H, rows in zip(logits, lse_NH, seen, strict=True):
        shift = torch.where(lse_H == -torch.inf, 0.0, lse_H).to(s_HM.dtype)
        p_GSM = torch.exp(s_HM - shift[:, None]).to(rounding).to(s_HM.dtype).unflatten(0, (v.shape[1], -1))
        total_GSV = p_GSM.new_zeros(*p_GSM.shape[:2], v.shape[2])
        at = 0
        for part in _chunks(v, rows):
            total_GSV += torch.einsum("gsm,mgv->gsv", p_GSM[..., at : at + len(part)], part.to(s_HM.dtype))
            at += len(part)
        found.append(total_GSV.flatten(0, 1).double())
    return torch.stack(found)


def _chunks(x: Tensor, rows: Ints) -> list[Tensor]:
    """Return the given rows of a tensor in parts of at most ``KEYS_AT_ONCE``; one empty part if there are none."""
    return [
        x.detach()[uploaded(rows[i : i + KEYS_AT_ONCE], x.device)] for i in range(0, max(len(rows), 1), KEYS_AT_ONCE)
    ]


def _apart(found: Tensor, right: Tensor) -> Tensor:
    """Return |found - right|, which is 0 where both are -inf, or both are NaN (from the inputs)."""
    return torch.where((found == right) | (found.isnan() & right.isnan()), 0.0, (found - right).abs())


def _worst(step: Step, tokens: Ints, found_2NH: Tensor, own_2NH: Tensor, dtype: torch.dtype) -> Row:
    """Return the (row, head) with the largest ratio of error to limit.

    ``found_2NH`` are the errors of outputs and LSEs, ``own_2NH`` those of the reference computation in ``dtype``.
    """
    found, own = found_2NH.cpu(), own_2NH.cpu()
    batch, kept = step.plan.batch, step.plan.placement.kept
    tiles = int(batch.lengths[batch.document_of(tokens)].max()) / TILE_KEYS
    rounding = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * tiles**0.5
    allowed = [1e-10 if dtype == torch.float64 else 2 * float(part.max()) + rounding for part in own]
    over = torch.stack([part / limit for part, limit in zip(found, allowed, strict=True)]).nan_to_num(nan=torch.inf)
    what, n, head = (int(i) for i in np.unravel_index(int(over.argmax()), tuple(over.shape)))
    token = int(tokens[n])
    document = int(batch.document_of(tokens[n : n + 1])[0])
    rank = int(kept.rank[np.searchsorted(kept.start, token, side="right") - 1])
    row = token - int(batch.starts[document])
    return Row(token, document, row, head, rank, ("out", "LSE")[what], float(found[what, n, head]), allowed[what])
