"""hypergraph: improve the placement of ``blocks`` by hypergraph partitioning (DCP's method), within both balances.

The balances are those of compute and of tokens. A hypergraph's vertices are blocks of tokens and tiles of attention
work, and its nets say who reads what; dividing the vertices into parts with few cut nets places them on ranks with few
bytes to move. There are four other files: the hypergraph of a batch (:mod:`~flexcp.planners.hypergraph.model`), its
partitions (:mod:`~flexcp.planners.hypergraph.partition`), our search over partitions
(:mod:`~flexcp.planners.hypergraph.search`) and Mt-KaHyPar's V-cycles
(:mod:`~flexcp.planners.hypergraph.mt_kahypar`). This file is the strategy. It runs in rounds, each from the best
placement so far; the first round begins with step 2:

1. Mt-KaHyPar improves the partition with a V-cycle over nodes, then with one over the ranks of each node.
2. *repair* brings every rank back within its limits on compute and tokens. If bundles are too large for this, blocks
   are cut into smaller ones.
3. *climb* saves bytes within both limits, until nothing more can be saved.

The result of a round is accepted if it moves fewer bytes, is no further above a limit than the placement of ``blocks``,
and needs no more time on the links, forward and backward together. So the result never moves more bytes than ``blocks``
with the same tolerances.

Both tolerances are 0.1 unless given. ``hypergraph:1024`` sets the tokens of a block; without it a batch has about 128
blocks. The effort is the number of rounds.

No clock is read, and Mt-KaHyPar is seeded. But it is compiled C++ with floating point inside and cannot guarantee the
same plan on every machine. So such a plan must be made once and shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from flexcp.plan.placement import Placement
from flexcp.planners.blocks.blocks import pack_rows
from flexcp.planners.hypergraph.model import make_tiling
from flexcp.planners.hypergraph.mt_kahypar import improve, partitioner
from flexcp.planners.hypergraph.partition import Partition, placement_of
from flexcp.planners.hypergraph.search import RankLimits, Search
from flexcp.planners.request import Refused, Request
from flexcp.planners.token_runs import even_borders, is_scattered

DEFAULT_TOLERANCE = 0.1
"""How far above the mean a rank's compute and tokens may be if the request gives no tolerances."""
FEWEST_ROUNDS, MOST_ROUNDS = 2, 6
"""The least and the largest number of rounds if the request gives no effort."""
ROUND_CELLS = 240_000
"""Between ``FEWEST_ROUNDS`` and ``MOST_ROUNDS``, the product of rounds, tiles and ranks is at most this."""
VIOLATION_WEIGHT = 2
"""A rank that exceeds a limit by its mean costs as much as this many times all bytes."""
FINER = 5
"""How often repair is tried, each time with smaller blocks."""


def hypergraph(request: Request) -> Placement:
    """Place a batch by partitioning its hypergraph of token blocks and tiles, starting from ``blocks``.

    Raise Refused if Mt-KaHyPar is not installed, if a layout is too scattered or blocks are too small.
    """
    size = _block_size(request)
    partitioner()
    request = replace(
        request,
        argument="",
        compute_tolerance=DEFAULT_TOLERANCE if request.compute_tolerance is None else request.compute_tolerance,
        token_tolerance=DEFAULT_TOLERANCE if request.token_tolerance is None else request.token_tolerance,
    )
    start = pack_rows(replace(request, effort=None))
    if start.assemble_own or (request.layout is not None and is_scattered(start.runs)):
        raise Refused("this layout scatters tokens in runs too short for token blocks; use blocks")
    first = best = _candidate(request, start, size)
    limits = _limits(request, first)
    for number in range(_rounds(request, first)):
        placement = _round(request, best, size, limits, number)
        if placement is None:
            continue
        found = _candidate(request, placement, size)
        if found.bytes < best.bytes and found.link_ns <= first.link_ns and found.within(limits):
            best = found
    note = f"{best.bytes} bytes forward where blocks moves {first.bytes}; {len(first.partition.owner)} token blocks"
    return replace(best.placement, note=note)


def _block_size(request: Request) -> int | None:
    """Return the tokens of a block that the request's argument gives, or None; raise ValueError if it is no number."""
    if not request.argument:
        return None
    try:
        size = int(request.argument)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError(
            f"hypergraph takes the tokens of a block, as in hypergraph:1024; got 'hypergraph:{request.argument}'"
        )
    return size


def _rounds(request: Request, first: _Candidate) -> int:
    """Return the number of rounds: the effort, or a number that falls with the size of the hypergraph.

    There are none if there is one rank or nothing to move.
    """
    if request.ranks == 1 or first.bytes == 0:
        return 0
    if request.effort is not None:
        return request.effort
    cells = len(first.partition.worker) * request.ranks
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, ROUND_CELLS // cells))


def _round(request: Request, best: _Candidate, size: int | None, limits: RankLimits, number: int) -> Placement | None:
    """Partition (not in round 0), repair and climb from the best placement so far; return None if repair fails."""
    partition, weight = best.partition.copy(), VIOLATION_WEIGHT * best.bytes
    search = Search(partition, limits)
    if number:
        improve(search, number)
    for _ in range(FINER):
        if search.repair(weight):
            search.climb()
            return placement_of(request, best.placement, partition)
        placement = placement_of(request, best.placement, partition)
        partition = Partition(make_tiling(request, placement, size, search.cuts()), placement)
        search = Search(partition, limits)
    return None


# --- limits and candidates --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A placement as a partition of its own hypergraph, with its exact forward bytes and its nanoseconds on links."""

    placement: Placement
    partition: Partition
    bytes: int
    link_ns: int

    def within(self, limits: RankLimits) -> bool:
        """Return whether no rank has more work or tokens than the limits allow."""
        return bool((self.partition.loads <= limits.loads).all() and (self.partition.tokens <= limits.tokens).all())


def _candidate(request: Request, placement: Placement, size: int | None) -> _Candidate:
    """Return a placement as a candidate; ``size`` is the tokens of a block, None for the default."""
    partition = Partition(make_tiling(request, placement, size), placement)
    return _Candidate(placement, partition, partition.bytes(), partition.link_ns(request.cost, request.cluster))


def _limits(request: Request, first: _Candidate) -> RankLimits:
    """Return the limits that the tolerances give, raised as far as the placement of ``blocks`` exceeds them."""
    batch, ranks, speeds = request.batch, request.ranks, request.cluster.rank_speeds
    assert request.compute_tolerance is not None and request.token_tolerance is not None
    have = first.partition.loads.tolist()
    means = [-(-sum(have) * speed // sum(speeds)) for speed in speeds]
    most = [mean + int(request.compute_tolerance * mean) for mean in means]
    over = max([Fraction(1), *(Fraction(load, limit) for load, limit in zip(have, most, strict=True) if limit)])
    if request.equal_tokens:
        tokens = np.diff(even_borders(batch.tokens, ranks))
    else:
        even = max(-(-batch.tokens // ranks), math.floor(batch.tokens * (1 + request.token_tolerance) / ranks))
        cap = request.max_tokens_per_rank
        tokens = np.full(ranks, even if cap is None else min(even, cap), np.int64)
    return RankLimits(
        np.array([int(limit * over) for limit in most], np.int64),
        np.maximum(tokens, first.partition.tokens),
        np.arange(ranks) // request.cluster.ranks_per_node,
        request.layout is None,
    )
