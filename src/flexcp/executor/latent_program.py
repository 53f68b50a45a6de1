"""Latent program: what :mod:`flexcp.executor.latent` moves and computes on one rank, derived from the plan as integers.

All latents that a rank reads lie in one tensor, the *arena*, in stream order: own and received tokens interleaved. So
the work consists of few large slices and needs one kernel launch. Queries stay on the rank that keeps them, with all
their heads: plans that move queries or split heads raise NotImplementedError.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flexcp import masks
from flexcp.arrays.intervals import overlaps
from flexcp.executor.run.rank_rows import local_stream
from flexcp.plan.plan import Plan
from flexcp.shape import Kind

Ints = NDArray[np.int64]
PLANS = 32
"""How many programs :func:`make_latent_program` keeps in its cache."""

RowBlock = tuple[int, Ints, bool]
"""(peer, rows of the arena, whether they are partial sums, which travel in the accumulator dtype)."""
PeerRows = dict[tuple[int, bool], list[Ints]]
"""Rows of the arena, in pieces, by (peer, whether they are partial sums)."""


@dataclass(frozen=True)
class Stage:
    """The rows that a rank sends and receives in one stage, a :data:`RowBlock` for each part of a message.

    Blocks are sorted by peer; of one peer, partial sums come first.
    """

    sends: tuple[RowBlock, ...] = ()
    receives: tuple[RowBlock, ...] = ()


@dataclass(frozen=True, eq=False)
class LatentProgram:
    """What one rank does under one mask (``mask`` is its index in the plan's batch).

    The arena, the tensor of all latents that the rank reads, has ``rows`` rows, and ``own`` are those of the rank's own
    tokens. ``forward`` and ``backward`` are the stages that bring latents in these two directions, ``home`` the stages
    of the backward that send gradients of latents back. ``keys_kept`` says that the arena of the forward is kept for
    the backward. ``slices`` is the work ``[slices, 6]``, over own query rows and arena rows. Stages are numbered as in
    the plan, so that ranks agree on them; a stage in which this rank neither sends nor receives is empty.
    """

    mask: int
    rows: int
    own: Ints
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    home: tuple[Stage, ...]
    keys_kept: bool
    slices: Ints


@lru_cache(maxsize=PLANS)
def make_latent_program(plan: Plan, rank: int, mask: int) -> LatentProgram:
    """Return the program of one rank under the mask of index ``mask``; results are cached.

    Raise NotImplementedError if the plan moves queries or splits heads.
    """
    kept = [np.sort(local_stream(plan.placement, r)) for r in range(plan.ranks)]
    programs = plan.programs[mask]
    forward, backward = (program.transfers for program in programs)
    moved = np.union1d(forward.kind, backward.kind)
    if not np.isin(moved, (Kind.KV, Kind.DKV)).all():
        raise NotImplementedError(
            f"strategy {plan.strategy!r} moves queries in this batch, and latent attention keeps them at home; use "
            "'blocks' or 'groups'"
        )
    arriving = forward.take((forward.target == rank) & (forward.source != rank))
    rows = [kept[o][a:b] for o, a, b in zip(arriving.owner, arriving.start, arriving.stop, strict=True)]
    arena = np.unique(np.concatenate([kept[rank], *rows]))

    def stages(direction: int, kind: Kind) -> tuple[Stage, ...]:
        transfers = programs[direction].transfers
        mine = transfers.take((transfers.kind == kind) & (transfers.source != transfers.target))
        found: dict[int, tuple[PeerRows, PeerRows]] = {}
        for at, source, target, _, owner, start, stop, _, _, partial in mine.matrix().T.tolist():
            for side, (here, peer) in enumerate(((source, target), (target, source))):
                if here == rank:
                    pieces = found.setdefault(at, ({}, {}))[side].setdefault((peer, bool(partial)), [])
                    pieces.append(np.searchsorted(arena, kept[owner][start:stop]))
        return tuple(Stage(*(_blocks(side) for side in found.get(at, ()))) for at in range(programs[direction].stages))

    return LatentProgram(
        mask,
        len(arena),
        np.searchsorted(arena, kept[rank]),
        stages(0, Kind.KV),
        stages(1, Kind.KV),
        stages(1, Kind.DKV),
        programs[1].keys_kept,
        _slices(plan, rank, mask, kept[rank], arena),
    )


def _blocks(pieces: PeerRows) -> tuple[RowBlock, ...]:
    """Turn rows by (peer, partial) into blocks, sorted by peer, with the partial sums of each peer first."""
    order = sorted(pieces, key=lambda key: (key[0], not key[1]))
    return tuple((peer, np.concatenate(pieces[peer, partial]), partial) for peer, partial in order)


def _slices(plan: Plan, rank: int, mask: int, own: Ints, arena: Ints) -> Ints:
    """Return the work of this rank as slices ``[slices, 6]``: queries are numbered by own rows, keys by arena rows.

    ``own`` and ``arena`` are the stream tokens of these rows, ascending. Raise NotImplementedError if the plan splits
    heads.
    """
    batch, regions = plan.batch, plan.placement.regions[mask]
    regions = regions.take(regions.rank == rank)
    if len(regions) and (regions.h0.any() or (regions.h1 != plan.shape.heads).any()):
        raise NotImplementedError(
            f"strategy {plan.strategy!r} splits heads, and latent attention needs all of them; use 'blocks' or 'groups'"
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
    """Split ascending tokens into runs of consecutive ones: (first token, one past the last, index of the first).

    ``[3, 4, 7]`` gives ``([3, 7], [5, 8], [0, 2])``.
    """
    breaks = np.flatnonzero(np.diff(tokens) != 1) + 1
    first = np.concatenate([np.zeros(min(1, len(tokens)), np.int64), breaks])
    last = np.concatenate([breaks, np.full(min(1, len(tokens)), len(tokens), np.int64)])
    return tokens[first], tokens[last - 1] + 1, first
