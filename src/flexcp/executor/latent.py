"""Latent: attention whose keys and values travel as one narrow row a token and are expanded where they are read.

Multi-latent attention makes the keys and values of all heads from one latent of, say, 576 numbers, where the expanded heads have tens of
thousands. A plan made with ``Planner(..., kv_heads=1, latent=576)`` counts the latent's bytes for every key that moves and the expanded
heads' FLOPs for every pair. This file runs it:

    forward    latents of the keys this rank reads arrive by the plan's table  ->  expand  ->  attention  ->  output at home
    backward   they arrive again  ->  expand  ->  attention's gradients  ->  expand's gradients: of its weights, which stay here as any
               parameter's share, and of the latents, which go home by the plan's table and are summed where paths meet

All keys lie in one *arena* in stream order, own ones among the received, so work is in few large slices and one launch. Bytes are the
plan's, in both directions. There is no overlap: everything arrives, then everything is computed. Queries stay at home: a plan that moves
them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flexcp import masks
from flexcp.executor.ends import delta_of
from flexcp.executor.fields import types_of
from flexcp.executor.kernels import Settings, find_kernel, uploaded
from flexcp.executor.layout import local_stream
from flexcp.executor.local import local_backward, local_forward
from flexcp.executor.prepared import covers
from flexcp.executor.step import Step
from flexcp.intervals import overlaps
from flexcp.pieces import Kind
from flexcp.plan import Plan

Ints = NDArray[np.int64]
Expand = Callable[..., tuple[Tensor, Tensor]]
PLANS = 32


def latent_attention(
    q: Tensor,
    latent: Tensor,
    expand: Expand,
    weights: Sequence[Tensor],
    step: Step,
    *,
    mask: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Attention of the whole batch, seen from this rank: ``[local tokens, heads, v_head_dim]``.

    ``q`` is ``[local tokens, heads, head_dim]`` and ``latent`` ``[local tokens, width]``, with whatever of the keys is shared by all heads
    (rotated parts too) in it. ``expand(latent, *weights)`` makes ``k`` and ``v``, ``[rows, heads, ...]``, of any rows; it must be a
    function of its arguments alone, row by row. Gradients reach ``q``, ``latent`` and ``weights``, the last as this rank's share.
    """
    _check(q, latent, step)
    number = step.plan.batch.masks.index(step.plan.batch.mask(mask))
    settings = Settings(q.shape[-1] ** -0.5 if scale is None else float(scale), softcap)
    name = step.choose_kernel(q.device, kernel)
    out: Tensor = _LatentAttention.apply(q, latent, expand, step, number, settings, name, *weights)
    return out


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latent: Tensor, expand: Expand, step: Step, mask: int, settings: Settings, kernel: str, *weights: Tensor
    ) -> Tensor:  # fmt: skip
        way, types = _way(step.plan, step.rank, mask), types_of(q)
        step.calls += 1
        arena = _fetched(latent, way.forward, way, step, "forward")
        k, v = _expanded(expand, arena, weights, q)
        module = find_kernel(kernel)
        work = module.prepare(way.slices, q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.device)
        rows = step.in_stream_order(q)
        out, lse = local_forward(module, work, covers(way.slices, len(rows)), types, settings, rows, k, v, True)
        out = out.to(q.dtype)
        ctx.save_for_backward(rows, latent, out, lse, arena if way.keys_kept else None, *weights)
        ctx.call = (expand, step, way, settings, module, work)
        return step.in_local_order(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, out, lse, arena, *weights = ctx.saved_tensors
        expand, step, way, settings, module, work = ctx.call
        do, types = step.in_stream_order(grads[0].to(out.dtype)), types_of(q)
        if arena is None:
            arena = _fetched(latent, way.backward, way, step, "backward")
        leaves = [x.detach().requires_grad_() for x in (arena, *weights)]
        with torch.enable_grad():
            k, v = _expanded(expand, leaves[0], leaves[1:], q)
        inputs = (q, k.detach(), v.detach(), do, lse, delta_of(do, out, None, lse.dtype))
        dq, dk, dv = local_backward(module, work, types, settings, *inputs)
        found = torch.autograd.grad((k, v), leaves, (dk.to(k.dtype), dv.to(v.dtype)), allow_unused=True)
        darena = torch.zeros_like(arena) if found[0] is None else found[0]
        dlatent = _returned(darena.to(types.accumulator), way, step, latent.dtype)
        return (
            step.in_local_order(dq).to(q.dtype),
            step.in_local_order(dlatent),
            None,
            None,
            None,
            None,
            None,
            *found[1:],
        )


# --- the way of the latents -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Rows of the arena that leave for and arrive from each peer; ``partial`` says which messages are in the accumulator dtype."""

    sends: tuple[tuple[int, Ints, bool], ...]
    receives: tuple[tuple[int, Ints, bool], ...]


@dataclass(frozen=True, eq=False)
class Way:
    """A rank's arena (rows, and where its own tokens are), the stages of latents and of their gradients, and its work."""

    rows: int
    own: Ints
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    home: tuple[Stage, ...]
    keys_kept: bool
    slices: Ints


@lru_cache(maxsize=PLANS)
def _way(plan: Plan, rank: int, mask: int) -> Way:
    kept = [np.sort(local_stream(plan.placement, r)) for r in range(plan.ranks)]
    forward, backward = (program.transfers for program in plan.programs[mask])
    moved = np.union1d(forward.kind, backward.kind)
    if not np.isin(moved, (Kind.KV, Kind.DKV)).all():
        raise NotImplementedError(
            f"strategy {plan.strategy!r} moves queries in this batch, and latent attention keeps them at home; use 'blocks' or 'groups'"
        )
    arriving = forward.take((forward.target == rank) & (forward.source != rank))
    rows = [kept[o][a:b] for o, a, b in zip(arriving.owner, arriving.start, arriving.stop, strict=True)]
    arena = np.unique(np.concatenate([kept[rank], *rows]))

    def stages(transfers: Any, kind: Kind) -> tuple[Stage, ...]:
        mine = transfers.take((transfers.kind == kind) & (transfers.source != transfers.target))
        found: dict[int, tuple[dict[Any, list[Ints]], dict[Any, list[Ints]]]] = {}
        for at, source, target, _, owner, start, stop, _, _, partial in mine.matrix().T.tolist():
            for side, (here, peer) in enumerate(((source, target), (target, source))):
                if here == rank:
                    pieces = found.setdefault(at, ({}, {}))[side].setdefault((peer, bool(partial)), [])
                    pieces.append(np.searchsorted(arena, kept[owner][start:stop]))
        return tuple(Stage(*(_messages(side) for side in found[at])) for at in sorted(found))

    return Way(
        len(arena),
        np.searchsorted(arena, kept[rank]),
        stages(forward, Kind.KV),
        stages(backward, Kind.KV),
        stages(backward, Kind.DKV),
        plan.programs[mask][1].keys_kept,
        _slices(plan, rank, mask, kept[rank], arena),
    )


def _messages(pieces: dict[Any, list[Ints]]) -> tuple[tuple[int, Ints, bool], ...]:
    return tuple((peer, np.concatenate(pieces[peer, partial]), partial) for peer, partial in sorted(pieces))


def _slices(plan: Plan, rank: int, mask: int, own: Ints, arena: Ints) -> Ints:
    """This rank's regions as slices over its own rows and the arena's."""
    batch, regions = plan.batch, plan.placement.regions[mask]
    regions = regions.take(regions.rank == rank)
    if len(regions) and (regions.h0.any() or (regions.h1 != plan.shape.heads).any()):
        raise NotImplementedError(
            f"strategy {plan.strategy!r} splits heads, and latent attention takes all; use 'blocks' or 'groups'"
        )
    index, slices = batch.masks[mask].cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    begin = batch.starts[regions.document[index]]
    slices = masks.shift(slices, begin, begin)
    for tokens, first, last in ((own, masks.Q0, masks.Q1), (arena, masks.K0, masks.K1)):
        start, stop, row = _stretches(tokens)
        index, at = overlaps(slices[:, first], slices[:, last], start, stop)
        limits = [slices[index, c] for c in (masks.Q0, masks.Q1, masks.K0, masks.K1)]
        limits[first], limits[last] = start[at], stop[at]
        parts = masks.cut(slices[index], *limits)
        move = row[at] - start[at]
        parts = masks.shift(parts, move, 0) if first == masks.Q0 else masks.shift(parts, 0, move)
        slices = parts[~masks.is_empty(parts)]
    return slices


def _stretches(tokens: Ints) -> tuple[Ints, Ints, Ints]:
    """Ascending tokens as runs of neighbours: (first, one past the last, row of the first)."""
    breaks = np.flatnonzero(np.diff(tokens) != 1) + 1
    first = np.concatenate([np.zeros(min(1, len(tokens)), np.int64), breaks])
    last = np.concatenate([breaks, np.full(min(1, len(tokens)), len(tokens), np.int64)])
    return tokens[first], tokens[last - 1] + 1, first


# --- exchanges --------------------------------------------------------------------------------------------------------


def _fetched(latent: Tensor, stages: tuple[Stage, ...], way: Way, step: Step, direction: str) -> Tensor:
    """The arena: own latents and those that arrive, relayed ones passed on."""
    arena = latent.new_zeros((way.rows, latent.shape[1]))
    arena[uploaded(way.own, latent.device)] = step.in_stream_order(latent)
    for stage in stages:
        for rows, message in _exchange(stage, arena, latent.dtype, step, direction):
            arena[rows] = message
    return arena


def _returned(gradient: Tensor, way: Way, step: Step, dtype: torch.dtype) -> Tensor:
    """Gradients of own latents in stream order, from what every rank found for them."""
    for stage in way.home:
        for rows, message in _exchange(stage, gradient, dtype, step, "backward"):
            gradient[rows] += message
    return gradient[uploaded(way.own, gradient.device)].to(dtype)


def _exchange(
    stage: Stage, arena: Tensor, dtype: torch.dtype, step: Step, direction: str
) -> list[tuple[Tensor, Tensor]]:
    """(rows of the arena, what arrived for them), in a fixed order. Partial rows travel in the accumulator dtype, others in ``dtype``."""
    wide = types_of(arena).accumulator
    arriving, operations, leaving = [], [], []
    for peer, rows, partial in stage.receives:
        message = torch.empty((len(rows), arena.shape[1]), dtype=wide if partial else dtype, device=arena.device)
        arriving.append((uploaded(rows, arena.device), message))
        operations.append(dist.P2POp(dist.irecv, message, group=step.group, group_peer=peer))
    for peer, rows, partial in stage.sends:
        message = arena[uploaded(rows, arena.device)].to(wide if partial else dtype)
        leaving.append(message)
        step.sent_bytes[direction][peer] += message.numel() * message.element_size()
        operations.append(dist.P2POp(dist.isend, message, group=step.group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return [(rows, message.to(arena.dtype)) for rows, message in arriving]


# --- rows -------------------------------------------------------------------------------------------------------------


def _expanded(expand: Expand, arena: Tensor, weights: Sequence[Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    k, v = expand(arena, *weights)
    if k.dim() != 3 or v.dim() != 3 or len(k) != len(arena) or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"expand must make k [rows, heads, {q.shape[2]}] and v [rows, heads, value size] of {len(arena)} rows; "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    return k, v


def _check(q: Tensor, latent: Tensor, step: Step) -> None:
    shape = step.plan.shape
    if shape.latent is None:
        raise ValueError(
            "this plan counts keys and values of heads; plan with Planner(kv_heads=1, latent=WIDTH) for latents"
        )
    wanted = {
        "q": (q, (step.local_tokens, shape.heads, shape.head_dim)),
        "latent": (latent, (step.local_tokens, shape.latent)),
    }
    for name, (x, size) in wanted.items():
        if tuple(x.shape) != size:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but rank {step.rank} of this plan expects {size}")
        if str(x.dtype).removeprefix("torch.") != shape.dtype:
            raise ValueError(
                f"{name} is {x.dtype}, but the plan counts bytes of {shape.dtype}; plan with Planner(dtype=...)"
            )
