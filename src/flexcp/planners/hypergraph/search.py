"""Search over partitions: bundles of work and tokens move between ranks, judged by the exact bytes that they add.

A bundle is what moves together: a strip of tiles, a block of tokens, blocks with their work, and so on.

- *repair*: while a rank exceeds its limit on compute or tokens, the best bundle moves to another rank: the one that
  reduces the excess most for the bytes it adds. If bundles are too large, ``cuts`` says where blocks should be cut.
- *climb*: bundles that save bytes and fit both limits move, or two of them are exchanged, until none is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets, spread
from flexcp.arrays.totals import sums
from flexcp.planners.hypergraph.model import NO_CUTS
from flexcp.planners.hypergraph.partition import Partition

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

REPAIRS = 4
"""The most moves of a repair, per rank."""
SWEEPS = 8
"""The most times that a climb looks at all bundles."""
EXCHANGES = 8
"""The most exchanges that are tried for each rank in one sweep."""
MILLION = 1_000_000
FORBIDDEN = 1 << 62
"""The score of a move that is not allowed."""
CHUNK = 1 << 20
"""The most numbers in one temporary array."""


@dataclass(frozen=True, eq=False)
class RankLimits:
    """The most load and tokens of each rank, the node of each rank, and whether tokens may move."""

    loads: Ints
    tokens: Ints
    nodes: Ints
    free: bool


@dataclass(frozen=True, eq=False)
class Bundles:
    """What may move together: tiles of one rank, blocks it keeps, or both.

    Bundle i leaves rank ``source[i]`` with its ``load[i]`` and ``tokens[i]``. Its blocks and tiles are those whose
    ``block_label`` or ``tile_label`` is ``name[i]``; what is in no bundle has label -1. Its nets are
    ``net[first[i]:first[i + 1]]``, with ``count`` of its tiles in each (0 if only the move of a block matters).
    """

    block_label: Ints
    tile_label: Ints
    name: Ints
    source: Ints
    load: Ints
    tokens: Ints
    first: Ints
    net: Ints
    count: Ints

    def take(self, index: Ints) -> Bundles:
        """Return the bundles at ``index``."""
        size = np.diff(self.first)[index]
        each, within = spread(size)
        at = self.first[index][each] + within
        columns = {name: getattr(self, name)[index] for name in ("name", "source", "load", "tokens")}
        return replace(self, **columns, first=offsets(size), net=self.net[at], count=self.count[at])


class Search:
    """Repair and climb: moves bundles between ranks within limits.

    ``column`` is the same number for all tiles of a mask, key block and head group, ``share`` for all tiles of a mask,
    document and head group; they name bundles, as strips do.
    """

    def __init__(self, partition: Partition, limits: RankLimits) -> None:
        self.partition, self.limits = partition, limits
        t = partition.tiling
        self.mean_load = max(1, int(t.tiles.load.sum()) // t.ranks)
        self.mean_tokens = max(1, t.batch.tokens // t.ranks)
        self.block_nets = np.argsort(t.nets.block, kind="stable")
        self.block_first = np.searchsorted(t.nets.block[self.block_nets], np.arange(len(t.blocks) + 1))
        heads = int(t.tiles.h1.max(initial=1))
        self.column = (t.tiles.mask * len(t.blocks) + t.tiles.keys) * heads + t.tiles.h0
        self.share = (t.tiles.mask * t.batch.documents + t.blocks.document[t.tiles.rows]) * heads + t.tiles.h0

    # -- repair

    def repair(self, weight: int) -> bool:
        """Move bundles off the rank that exceeds its limits most; return whether no rank exceeds one in the end.

        Each time, the bundle moves that is best for the bytes it adds. ``weight`` is the cost in bytes of exceeding a
        limit by the mean.
        """
        p = self.partition
        for _ in range(REPAIRS * p.tiling.ranks):
            now = self._violation(p.loads, p.tokens, self.limits.loads, self.limits.tokens)
            worst = int(np.argmax(now))
            if now[worst] == 0:
                return True
            options = [self._relief(bundles, worst, now, weight) for bundles in self._kinds(worst)]
            score, bundles, target = min(options, key=lambda option: option[0])
            if score >= 0:
                return False
            self._move(bundles, target)
        return False

    def _relief(self, bundles: Bundles, rank: int, now: Ints, weight: int) -> tuple[int, Bundles, int]:
        """Return (score, bundle, target rank) of the best move of a bundle off ``rank``.

        The score is the bytes that the move adds plus the change of the violation, multiplied by its weight; ``now`` is
        the violation of each rank. The score is ``FORBIDDEN`` if no move lowers the violation.
        """
        p, most_load, most_tokens = self.partition, self.limits.loads, self.limits.tokens
        left = self._violation(
            p.loads[rank] - bundles.load, p.tokens[rank] - bundles.tokens, most_load[rank], most_tokens[rank]
        )
        load, tokens = p.loads + bundles.load[:, None], p.tokens + bundles.tokens[:, None]
        change = self._violation(load, tokens, most_load, most_tokens) - now + (left - now[rank])[:, None]
        change[:, rank] = 0
        useful = np.flatnonzero((change < 0).any(axis=1))
        if not len(useful):
            return FORBIDDEN, bundles, rank
        chosen, change = bundles.take(useful), change[useful]
        score = self._changes(chosen) + change * max(1, weight // MILLION)
        score[change >= 0] = FORBIDDEN
        at, target = divmod(int(np.argmin(score)), p.tiling.ranks)
        return int(score[at, target]), chosen.take(np.array([at])), target

    def _violation(self, load: Ints, tokens: Ints, most_load: Ints, most_tokens: Ints) -> Ints:
        """Return how far loads and tokens exceed their limits, as a penalty.

        The excess x is in millionths of the mean (up to eight means); the penalty is x + x * x / 100,000.
        """
        x = _millionths(load - most_load, self.mean_load)
        y = _millionths(tokens - most_tokens, self.mean_tokens)
        return np.asarray(x + x * x // 100_000 + y + y * y // 100_000)

    def cuts(self) -> Ints:
        """Return the stream positions where to cut blocks of ranks that still exceed limits.

        So there will be bundles of the size of the excess.
        """
        p, t, found = self.partition, self.partition.tiling, [NO_CUTS]
        size = t.blocks.stop - t.blocks.start
        for rank in range(t.ranks):
            excess = int(p.loads[rank] - self.limits.loads[rank])
            if excess > 0:
                mine = t.tiles.take(p.worker == rank)
                _, at, of = np.unique(mine.strip, return_index=True, return_inverse=True)
                block, load = mine.rows[at], sums(of.reshape(-1), mine.load, len(at))
                rows = np.ceil(size[block] * (excess / np.maximum(load, 1))).astype(np.int64)
                found.append((t.blocks.stop[block] - rows)[rows < size[block]])
            excess = int(p.tokens[rank] - self.limits.tokens[rank])
            if excess > 0:
                large = (p.owner == rank) & (size > excess)
                found += [t.blocks.start[large] + excess, t.blocks.stop[large] - excess]
        return np.unique(np.concatenate(found))

    # -- climb

    def climb(self) -> None:
        """Move or exchange bundles that save bytes and fit where they go, until none is left (or ``SWEEPS`` times)."""
        for _ in range(SWEEPS):
            moved = [self._climb(bundles) for bundles in self._kinds(None)]
            if not any(moved) and not self._exchange():
                return

    def _climb(self, bundles: Bundles) -> bool:
        """Move the bundles that save bytes, those that save most first; return whether any moved."""
        change = self._allowed(bundles).min(axis=1, initial=0)
        moved = False
        for i in np.argsort(change, kind="stable")[: np.count_nonzero(change)]:
            one = bundles.take(np.array([i]))
            if not self._whole(one):
                continue
            now = self._allowed(one)[0]
            target = int(np.argmin(now))
            if now[target] < 0:
                self._move(one, target)
                moved = True
        return moved

    def _exchange(self) -> bool:
        """Exchange bundles of two ranks if that saves bytes and both still fit; return whether any were exchanged.

        Pairs are found by what each move alone would change, and judged by what both together do. Columns and single
        tiles are left out.
        """
        kinds = list(self._kinds(None))[:-2]
        change = np.concatenate([self._changes(bundles) for bundles in kinds])
        kind = np.repeat(np.arange(len(kinds)), [len(bundles.name) for bundles in kinds])
        place = np.concatenate([np.arange(len(bundles.name)) for bundles in kinds])
        source, load, tokens = (np.concatenate([getattr(b, c) for b in kinds]) for c in ("source", "load", "tokens"))
        p, moved = self.partition, False
        for rank in range(p.tiling.ranks):
            mine, other = np.flatnonzero(source == rank), np.flatnonzero(source > rank)
            if not len(mine) or not len(other):
                continue
            total = change[mine][:, source[other]] + change[other, rank]
            for amount, now, most in ((load, p.loads, self.limits.loads), (tokens, p.tokens, self.limits.tokens)):
                got = amount[other] - amount[mine][:, None]
                total[(got > 0) & (now[rank] + got > most[rank])] = 0
                total[(got < 0) & (now[source[other]] - got > most[source[other]])] = 0
            partner = np.argmin(total, axis=0)
            saved = total[partner, np.arange(len(other))]
            for at in np.argsort(saved, kind="stable")[: min(EXCHANGES, np.count_nonzero(saved < 0))]:
                pair = mine[partner[at]], other[at]
                one, two = (kinds[kind[i]].take(place[[i]]) for i in pair)
                moved |= self._swap(one, two)
        return moved

    def _swap(self, one: Bundles, two: Bundles) -> bool:
        """Exchange two bundles if that saves bytes within limits; return whether it did."""
        p, a, b = self.partition, int(one.source[0]), int(two.source[0])
        if not self._whole(one) or not self._whole(two):
            return False
        for now, most, out, back in (
            (p.loads, self.limits.loads, int(one.load[0]), int(two.load[0])),
            (p.tokens, self.limits.tokens, int(one.tokens[0]), int(two.tokens[0])),
        ):
            if (back > out and now[a] + back - out > most[a]) or (out > back and now[b] + out - back > most[b]):
                return False
        change = self._changes(one)[0, b]
        self._move(one, b)
        change += self._changes(two)[0, a]
        if change >= 0:
            self._move(replace(one, source=two.source), a)
            return False
        self._move(two, a)
        return True

    # -- bundles

    def _kinds(self, rank: int | None) -> Iterator[Bundles]:
        """Yield the bundles of each kind (the code lists them), of all ranks or of one, then without single tiles."""
        p, t = self.partition, self.partition.tiling
        tiles = np.ones(len(p.worker), bool) if rank is None else p.worker == rank
        kept = np.ones(len(p.owner), bool) if rank is None else p.owner == rank
        no_block, no_tile = np.full(len(p.owner), -1, np.int64), np.full(len(p.worker), -1, np.int64)
        if self.limits.free:
            # Kinds with blocks: a block; a block with the tiles computed on its rank; a run of blocks with such tiles;
            # everything that a rank has of a document.
            block, rows, document = np.arange(len(p.owner)), t.tiles.rows, t.blocks.document
            border = (document[1:] != document[:-1]) | (p.owner[1:] != p.owner[:-1])
            run = np.append(0, np.cumsum(border))
            home = tiles & (p.owner[rows] == p.worker)
            yield self.bundles(np.where(kept, block, -1), no_tile)
            yield self.bundles(np.where(kept, block, -1), np.where(home, rows, -1))
            yield self.bundles(np.where(kept, run, -1), np.where(home, run[rows], -1))
            label = document * t.ranks
            yield self.bundles(np.where(kept, label + p.owner, -1), np.where(tiles, label[rows] + p.worker, -1))
        for group in (self.share, t.tiles.strip, self.column):
            yield self.bundles(no_block, np.where(tiles, group * t.ranks + p.worker, -1))
        if rank is None:
            yield self.bundles(no_block, np.arange(len(p.worker)))

    def bundles(self, block_label: Ints, tile_label: Ints) -> Bundles:
        """Return the bundles that labels describe: blocks and tiles with the same label are one bundle, -1 is in none.

        All of a bundle must be on one rank.
        """
        p, t = self.partition, self.partition.tiling
        in_blocks, in_tiles = np.flatnonzero(block_label >= 0), np.flatnonzero(tile_label >= 0)
        name = np.unique(np.concatenate([block_label[in_blocks], tile_label[in_tiles]]))
        of_block, of_tile = (np.searchsorted(name, label) for label in (block_label, tile_label))
        source = np.zeros(len(name), np.int64)
        source[of_block[in_blocks]] = p.owner[in_blocks]
        source[of_tile[in_tiles]] = p.worker[in_tiles]
        pins = t.pins.take(tile_label[t.pins.tile] >= 0)
        index, within = spread(np.diff(self.block_first)[in_blocks])
        at_home = self.block_nets[self.block_first[in_blocks[index]] + within]
        nets = max(1, len(t.nets))
        touched = of_tile[pins.tile] * nets + pins.net
        followed = of_block[in_blocks[index]] * nets + at_home
        found, place = np.unique(np.concatenate([touched, followed]), return_inverse=True)
        return Bundles(
            block_label,
            tile_label,
            name,
            source,
            load=sums(of_tile[in_tiles], t.tiles.load[in_tiles], len(name)),
            tokens=sums(of_block[in_blocks], (t.blocks.stop - t.blocks.start)[in_blocks], len(name)),
            first=np.searchsorted(found // nets, np.arange(len(name) + 1)),
            net=found % nets,
            count=np.bincount(place.reshape(-1)[: len(touched)], minlength=len(found)),
        )

    def _whole(self, one: Bundles) -> bool:
        """Return whether everything in a bundle is still on its source rank."""
        p = self.partition
        tiles, kept = p.worker[one.tile_label == one.name], p.owner[one.block_label == one.name]
        return bool((tiles == one.source).all() and (kept == one.source).all())

    def _allowed(self, bundles: Bundles) -> Ints:
        """Return the bytes that moving each bundle to each rank would add, ``[bundle, rank]``.

        It is ``FORBIDDEN`` where the bundle does not fit.
        """
        p, load, tokens = self.partition, bundles.load[:, None], bundles.tokens[:, None]
        over = (load > 0) & (p.loads + load > self.limits.loads)
        over |= (tokens > 0) & (p.tokens + tokens > self.limits.tokens)
        return np.where(over, FORBIDDEN, self._changes(bundles))

    def _changes(self, bundles: Bundles) -> Ints:
        """Return the bytes that moving each bundle to each rank would add to the forward, ``[bundle, rank]``."""
        ranks, bundle_count = self.partition.tiling.ranks, len(bundles.name)
        total = np.zeros((bundle_count, ranks), np.int64)
        low = 0
        while low < bundle_count:
            most = bundles.first[low] + CHUNK // ranks
            high = max(low + 1, int(np.searchsorted(bundles.first, most, side="right")) - 1)
            total[low:high] = self._changes_between(bundles, low, high)
            low = high
        return total

    def _changes_between(self, bundles: Bundles, low: int, high: int) -> Ints:
        """Return the bytes that moving each bundle ``low <= i < high`` to each rank would add, ``[bundle, rank]``."""
        p, t, first = self.partition, self.partition.tiling, bundles.first[low : high + 1]
        net, count = bundles.net[first[0] : first[-1]], bundles.count[first[0] : first[-1]]
        of = np.repeat(np.arange(low, high), np.diff(first))
        source, home = bundles.source[of], p.owner[t.nets.block[net]]
        price, extra = t.nets.price[net], t.nets.extra[net]
        readers, reads = p.readers[net], p.reads[net]
        at_home = reads[np.arange(len(net)), home]
        moves, follows = count > 0, bundles.block_label[t.nets.block[net]] == bundles.name[of]
        leaves = moves & (p.counts[net, source] == count)
        left = readers - leaves

        def cost(readers: Ints, home_reads: Ints | Bools) -> Ints:
            return np.asarray((readers - home_reads) * (price + np.where(readers > 1, extra, 0)))

        # A target rank either reads these tokens already or begins to. If their block moves along, it keeps them too.
        stays = at_home & ~(leaves & (home == source))
        old = cost(left, np.where(follows, 1, stays))
        new = cost(left + moves, np.where(follows, moves, stays))
        after = np.where(reads, old[:, None], new[:, None])
        arrives = np.flatnonzero(moves & ~follows & ~at_home)
        after[arrives, home[arrives]] = cost(left + 1, moves)[arrives]
        after -= cost(readers, at_home)[:, None]
        change = np.zeros((high - low, t.ranks), np.int64)
        filled = np.flatnonzero(np.diff(first))
        if len(filled):
            change[filled] = np.add.reduceat(after, first[filled] - first[0], axis=0)
        change[np.arange(high - low), bundles.source[low:high]] = 0
        return change

    def _move(self, one: Bundles, target: int) -> None:
        """Move a single bundle to rank ``target`` and update all sums."""
        p, source = self.partition, int(one.source[0])
        p.counts[one.net, source] -= one.count
        p.counts[one.net, target] += one.count
        p.reads[one.net] = p.counts[one.net] > 0
        p.readers[one.net] = p.reads[one.net].sum(axis=1)
        p.worker[one.tile_label == one.name] = target
        p.owner[one.block_label == one.name] = target
        for totals, amount in ((p.loads, one.load[0]), (p.tokens, one.tokens[0])):
            totals[source] -= amount
            totals[target] += amount


def _millionths(over: Ints, mean: int) -> Ints:
    """Return the excess ``over`` in millionths of the mean, rounded up; at least 0 and at most eight means."""
    shift = max(0, mean.bit_length() - 40)
    scaled = (np.clip(over, 0, 8 * mean) + (1 << shift) - 1) >> shift
    return np.asarray(-(-scaled * MILLION // (mean >> shift)))
