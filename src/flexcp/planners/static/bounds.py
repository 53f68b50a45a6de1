"""The static methods that ``auto`` considers, and lower bounds on their predicted times.

Most static methods cannot win, and placing tokens by all of them would take most of ``auto``'s time on many ranks. So
``auto`` first computes lower bounds, and places tokens only by methods that could still be the fastest. A bound needs
no placement, only sums over documents. It assumes that the ranks of a group share their work evenly (closer bounds of
``ring`` and ``allgather`` also look at a busy rank), and that communication overlaps with compute as far as the method
allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets
from flexcp.arrays.totals import sums
from flexcp.batch import Batch, LayerMask
from flexcp.clusters import Cluster
from flexcp.cost import TILE_ROWS
from flexcp.masks import HI, K0, K1, LO, Q0, Q1
from flexcp.plan.placement import Placement
from flexcp.planners.request import Request
from flexcp.planners.static import static
from flexcp.planners.static.dealing import BY_LOAD, dealt
from flexcp.shape import Kind, Shape
from flexcp.simulator.step_parts import beyond_layers_ns

Ints = NDArray[np.int64]
Place = Callable[[Request], Placement]


# --- the static methods of a request ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticMethod:
    """A static strategy with its degree: groups of ``positions`` x ``split`` ranks (ring positions x head groups).

    ``place`` is the strategy's function, ``argument`` what follows the colon of its name, and ``traffic`` a kind of
    :class:`~flexcp.plan.placement.Traffic`. ``parts`` is how many ranges of rows each document is cut into, 1 if
    documents are packed first or the layout is fixed. ``dealing`` is how documents are dealt to groups: "" by tokens,
    ``BY_LOAD`` by load.
    """

    strategy: str
    argument: str
    place: Place
    traffic: str
    positions: int
    split: int
    parts: int
    dealing: str = ""

    @property
    def name(self) -> str:
        """The name of the strategy as users write it, with its argument and ``@load``."""
        return self.strategy + (":" + self.argument if self.argument else "") + self.dealing

    @property
    def request_argument(self) -> str:
        """The ``argument`` of a :class:`~flexcp.planners.request.Request` for this method."""
        return self.argument + self.dealing

    @property
    def degree(self) -> int:
        """The number of ranks in a group."""
        return self.positions * self.split

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """(1 if it gathers keys, else 0; ring positions; head groups; degree), as in :class:`_Columns`."""
        return int(self.traffic == "gather"), self.positions, self.split, self.degree

    @property
    def cuts(self) -> int:
        """How many parts each document is cut into, for dealing by load, which counts the row tiles that cuts add.

        Unlike ``parts``, this counts the two middle parts of a zig-zag separately (:func:`static.parts_of`).
        """
        return static.parts_of(self.strategy, self.positions)

    def regions(self, documents: int) -> int:
        """Return about how many regions a placement of this many documents has."""
        return documents * self.parts * self.split

    def transfers(self, ranks: int) -> int:
        """Return about how many transfers the backward of a plan for this many ranks has."""
        if self.traffic == "gather":
            return 2 * ranks * (self.degree - 1)
        return ranks * self.split * (2 * self.positions + 3) if self.degree > 1 else 0


def static_methods(request: Request) -> list[StaticMethod]:
    """Return the static methods worth considering: each kind over all ranks, over a node, and over powers of two.

    With a fixed layout, only those over all ranks.
    """
    cluster, shape = request.cluster, request.shape
    everyone = request.ranks
    free = request.layout is None
    degrees = _degrees(cluster) if free else [everyone]

    def argument(degree: int) -> str:
        return str(degree) if degree < everyone else ""

    def zigzag(positions: int) -> int:
        return 2 * positions - 1 if free else 1  # the two parts in the middle are adjacent and on one rank

    found = [StaticMethod("dp", "", static.dp, "needed", 1, 1, 1)] if free else []
    for d in degrees:
        found.append(StaticMethod("zigzag", argument(d), static.zigzag, "ring", d, 1, zigzag(d)))
        if free:  # with a fixed layout, ring and zigzag are the same
            found.append(StaticMethod("ring", argument(d), static.ring, "ring", d, 1, d))
        found.append(StaticMethod("allgather", argument(d), static.allgather, "gather", d, 1, 1))
        if _splits_heads(shape, d):
            found.append(StaticMethod("ulysses", argument(d), static.ulysses, "ring", 1, d, 1))
    for u in _head_splits(cluster, shape):
        for d in degrees:
            if d % u == 0 and d > u:
                found.append(StaticMethod("usp", f"{u},{d // u}", static.usp, "ring", d // u, u, zigzag(d // u)))
    return found


def dealt_by_load(methods: Sequence[StaticMethod], request: Request) -> list[StaticMethod]:
    """Return those of the methods that make several groups, with documents dealt by load; none with a fixed layout."""
    free = request.layout is None
    return [replace(m, dealing=BY_LOAD) for m in methods if free and m.degree < request.ranks]


def _degrees(cluster: Cluster) -> list[int]:
    """Return the degrees to consider: powers of two, the ranks of a node, all ranks; each must divide the ranks."""
    powers = {1 << i for i in range(1, cluster.ranks.bit_length())}
    wanted = powers | {cluster.ranks_per_node, cluster.ranks}
    return sorted(d for d in wanted if d > 1 and cluster.ranks % d == 0)


def _head_splits(cluster: Cluster, shape: Shape) -> list[int]:
    """Return the numbers of head groups with which usp is tried: its default, and the largest that fits a node."""
    per_node = cluster.ranks_per_node
    most = [u for u in range(2, per_node + 1) if per_node % u == 0 and _splits_heads(shape, u)]
    return sorted({math.gcd(shape.kv_heads, per_node), *most[-1:]} - {1})


def _splits_heads(shape: Shape, split: int) -> bool:
    """Return whether query heads and KV heads can be split into ``split`` groups: never with latents."""
    return shape.divides_over(split) and shape.latent is None


# --- bounds -----------------------------------------------------------------------------------------------------------


class StaticBounds:
    """Lower bounds on the predicted times of static methods, in nanoseconds of a step.

    The slowest rank takes at least as long as the average rank of any group. :meth:`loose` looks at two groups: an
    average one, and one that has only the heaviest document. :meth:`close` deals the documents as the method would. The
    groups of all methods are rows of one table, so the arithmetic is done once.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        batch, cluster = request.batch, request.cluster
        self.areas = [self._rows_area(m, np.zeros_like(batch.lengths)) for m in batch.masks]
        self.heaviest = int(np.argmax(sum(m.layers * a for m, a in zip(batch.masks, self.areas, strict=True))))
        self.sees_all_before = [_sees_all_before(batch, m) for m in batch.masks]
        # If ranks have different speeds, the bound assumes that all are as fast as the fastest.
        fastest = max(cluster.rank_speeds)
        self.fastest = replace(cluster, nodes=1, ranks_per_node=1, speeds=(fastest,))
        self.alike = replace(cluster, speeds=(fastest,) * cluster.ranks)
        self._works: dict[tuple[int, int], list[Ints]] = {}
        self._dealt: dict[tuple[int, str, int], Ints] = {}

    def loose(self, methods: Sequence[StaticMethod]) -> list[int]:
        """Return a bound for each method from sums over all documents, which is fast."""
        batch, found = self.request.batch, []
        for method in methods:
            count = self.request.ranks // method.degree
            tokens = np.array([batch.tokens // count, batch.lengths[self.heaviest]])
            found.append((tokens, [np.array([int(w.sum()) // count, w[self.heaviest]]) for w in self._work(method)]))
        return self._bounds(methods, found)

    def close(self, methods: Sequence[StaticMethod]) -> list[int]:
        """Return a closer bound for each method, from the documents that each of its groups would get."""
        batch, found = self.request.batch, []
        for method in methods:
            count = self.request.ranks // method.degree
            group = self._group_of_documents(count, method)
            tokens = sums(group, batch.lengths, count)
            work = [sums(group, w, count) for w in self._work(method)]
            if self.request.layout is None and method.strategy in ("ring", "allgather"):
                # If rows are cut into consecutive parts, some ranks have more than an even share of the work. So there
                # is a second row for each group, as if all its ranks had the work of such a rank.
                most = self._work_of_last_parts if method.strategy == "ring" else self._work_of_busiest_parts
                tokens = np.concatenate([tokens, tokens])
                more = most(group, method.degree)
                work = [np.concatenate([w, b * method.degree]) for w, b in zip(work, more, strict=True)]
            found.append((tokens, work))
        return self._bounds(methods, found)

    # --- what groups have to do ---------------------------------------------------------------------------------------

    def _rows_area(self, mask: LayerMask, first: Ints) -> Ints:
        """Return the (query, key) pairs of each document in its rows from ``first[document]`` on."""
        return mask.rows_area(np.arange(len(first), dtype=np.int64), first, self.request.batch.lengths)

    def _work(self, method: StaticMethod) -> list[Ints]:
        """Return for each mask the (query, key) pairs of each document plus the price of its row tiles, in pairs.

        Every part of a document has at least one row tile in every pass over it.
        """
        parts, positions = method.parts, method.positions
        if (parts, positions) not in self._works:
            lengths = self.request.batch.lengths
            # A document with fewer tokens than parts has a part for each token; the two in the middle may be one.
            least = np.maximum(-(-lengths // TILE_ROWS), np.minimum(lengths - 1, parts))
            # If rows see all keys before them, each part needs one pass for its own keys and one for the keys of each
            # position before it.
            passes = int((1 + np.minimum(np.arange(parts), positions - 1)).sum())
            rows = lengths // (parts + 1)
            tiles_of_part, tiles_of_middle = -(-rows // TILE_ROWS), -(-2 * rows // TILE_ROWS)
            middle = positions * (parts == 2 * positions - 1)
            every_pass = tiles_of_part * (passes - middle) + tiles_of_middle * middle
            tiles = [np.maximum(least, every_pass * sees_all) for sees_all in self.sees_all_before]
            price = self.request.cost.row_tile_pairs
            self._works[parts, positions] = [a + t * price for a, t in zip(self.areas, tiles, strict=True)]
        return self._works[parts, positions]

    def _work_of_last_parts(self, group: Ints, positions: int) -> list[Ints]:
        """Return for each mask the (query, key) pairs of each group's last ring position, including row tiles.

        Documents are cut into ``positions`` consecutive parts, and ``group`` is the group of each. Under a causal mask
        the last position is the busiest.
        """
        lengths = self.request.batch.lengths
        first = lengths * (positions - 1) // positions
        found = []
        for mask, sees_all in zip(self.request.batch.masks, self.sees_all_before, strict=True):
            passes = np.where(sees_all & (lengths >= positions), positions, 1)
            tiles = self.request.cost.row_tiles_work(lengths - first) * passes
            found.append(sums(group, self._rows_area(mask, first) + tiles, self.request.ranks // positions))
        return found

    def _work_of_busiest_parts(self, group: Ints, parts: int) -> list[Ints]:
        """Return for each mask the (query, key) pairs of each group's busiest part, without row tiles.

        The documents of a group are packed and cut evenly into ``parts`` parts; ``group`` is the group of each
        document. The busiest part is the one with the most pairs over all layers.
        """
        lengths, count = self.request.batch.lengths, self.request.ranks // parts
        order = np.argsort(group, kind="stable")
        starts = offsets(lengths[order])
        tokens = sums(group, lengths, count)[:, None]
        each, extra = tokens // parts, tokens % parts
        number = np.arange(parts)
        borders = (offsets(tokens[:, 0])[:-1, None] + number * each + np.minimum(number, extra)).reshape(-1)
        cuts = np.unique(np.concatenate([starts, borders]))
        begin, end = cuts[:-1], cuts[1:]
        at = np.searchsorted(starts, begin, side="right") - 1
        part = np.searchsorted(borders, begin, side="right") - 1
        masks = self.request.batch.masks
        areas = [m.rows_area(order[at], begin - starts[at], end - starts[at]) for m in masks]
        of_parts = [sums(part, a, self.request.ranks).reshape(count, parts) for a in areas]
        busiest = np.argmax(sum(m.layers * a for m, a in zip(masks, of_parts, strict=True)), axis=1)
        return [a[np.arange(count), busiest] for a in of_parts]

    def _group_of_documents(self, count: int, method: StaticMethod) -> Ints:
        """Return the group of each document, if the method deals them to ``count`` groups."""
        key = (count, method.dealing, method.cuts if method.dealing else 1)
        if key not in self._dealt:
            group = np.zeros(self.request.batch.documents, np.int64)
            asked = replace(self.request, argument=method.request_argument)
            for i, documents in enumerate(dealt(asked, count, method.cuts)):
                group[documents] = i
            self._dealt[key] = group
        return self._dealt[key]

    # --- what that takes at least -------------------------------------------------------------------------------------

    def _bounds(self, methods: Sequence[StaticMethod], groups_of: list[tuple[Ints, list[Ints]]]) -> list[int]:
        """Return the nanoseconds of each method's slowest group.

        ``groups_of`` has for each method the tokens of its groups and, for each mask, their pairs.
        """
        if not methods:
            return []
        cost, shape, training = self.request.cost, self.request.shape, self.request.training
        counts = np.array([len(tokens) for tokens, _ in groups_of])
        of = _Columns(*np.repeat(np.array([m.columns for m in methods]), counts, axis=0).T)
        tokens = np.concatenate([tokens for tokens, _ in groups_of])
        linear = cost.linear_ns(tokens // of.degree, shape, self.fastest)
        ns = np.zeros_like(linear)
        for i, mask in enumerate(self.request.batch.masks):
            pairs = np.concatenate([work[i] for _, work in groups_of])
            ns += mask.layers * linear
            for backward in (False, True):
                compute = cost.attention_ns(pairs * shape.heads // of.degree, shape, self.fastest, backward)
                ns += mask.layers * self._attention_ns(of, tokens // of.degree, compute, backward)
        if training is not None:
            layers = self.request.batch.layers
            ns += beyond_layers_ns(tokens // of.degree, layers, shape, self.alike, cost, training)
        return [int(x) for x in np.maximum.reduceat(ns, np.cumsum(counts) - counts)]

    def _attention_ns(self, of: _Columns, tokens: Ints, compute: Ints, backward: bool) -> Ints:
        """Return the least nanoseconds of one layer's attention for each group, with traffic hidden if possible.

        ``tokens`` and ``compute`` (nanoseconds) are those of one rank of the group.
        """
        shape = self.request.shape
        each = shape.bytes_per_token_head()
        keys = tokens * np.maximum(shape.kv_heads // of.split, 1)
        queries = tokens * (shape.heads // of.split)
        there = queries * each[Kind.Q, 0] + keys * each[Kind.KV, 0]
        passed, home = keys * each[Kind.KV, 0], queries * each[Kind.O, 0]
        if backward:
            there = there + queries * each[Kind.DO, 0]
            passed = passed + keys * each[Kind.DKV, 1]
            home = queries * each[Kind.DQ, 0] + keys * each[Kind.DKV, 0]
        # A hop carries the keys of a whole ring position and takes as long as the slowest link of the ring.
        across = of.degree > self.request.cluster.ranks_per_node
        turning = self._link_ns(passed * of.split * (of.positions - 1), across)
        alone = compute
        if backward:  # no work hides the last hop of gradients
            compute = compute + self._link_ns(keys * each[Kind.DKV, 1] * of.split * (of.positions > 1), across)
        ring = self._exchange_ns(there, of.split) + np.maximum(compute, turning) + self._exchange_ns(home, of.split)
        gathered = np.maximum(alone, self._exchange_ns(keys * each[Kind.KV, 0], of.degree))
        if backward:
            gathered = gathered + self._exchange_ns(keys * each[Kind.DKV, 1], of.degree)
        return np.where(of.gathers, gathered, ring)

    def _exchange_ns(self, size: Ints, ranks: Ints) -> Ints:
        """Return the nanoseconds in which each of ``ranks`` ranks sends ``size`` bytes to every other."""
        near = np.minimum(ranks, self.request.cluster.ranks_per_node)
        inside, across = size * (near - 1), size * (ranks - near)
        return np.maximum(self._link_ns(inside, np.zeros_like(size)), self._link_ns(across, np.ones_like(size)))

    def _link_ns(self, size: Ints, across: Ints | NDArray[np.bool_]) -> Ints:
        """Return the nanoseconds of ``size`` bytes through a rank's port, across nodes where ``across`` is true."""
        cost, cluster = self.request.cost, self.request.cluster
        return np.where(across, cost.link_ns(size, cluster.inter_mbps), cost.link_ns(size, cluster.intra_mbps))


class _Columns(NamedTuple):
    """The values of :meth:`StaticMethod.columns`, as arrays over groups."""

    gathers: Ints
    positions: Ints
    split: Ints
    degree: Ints


def _sees_all_before(batch: Batch, mask: LayerMask) -> NDArray[np.bool_]:
    """Return which documents have a first slice that spans them and in which every row sees all keys up to its own."""
    at = mask.first[:-1]
    has = at < mask.first[1:]
    found = np.zeros(batch.documents, bool)
    slices, n = mask.slices[at[has]], batch.lengths[has]
    rows = (slices[:, Q0] == 0) & (slices[:, Q1] == n) & (slices[:, K0] == 0) & (slices[:, K1] == n)
    found[has] = rows & (slices[:, LO] <= 1 - n) & (slices[:, HI] >= 0)
    return found
