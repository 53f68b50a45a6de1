"""Key regions: the ranks of a team compute the same rows, each with different keys.

If several nodes share a document, the rows of every node read nearly all of its keys. With fewer KV heads than ranks,
splitting by heads does not help any further: several ranks of a node would need the same keys, and would send gradients
of all of them. If these ranks divide the *keys* instead, a key crosses to the team once, and so does its gradient. In
return every rank needs the queries of the others, and returns partial outputs to them; both stay inside the node, where
links are fast:

                    keys of other nodes    keys of the team
                    first half   second    of rank 0   of rank 1
    rows of 0, 1    rank 0       rank 1    rank 0      rank 1

Each rank computes all rows of the team with the keys that it keeps itself, as far as these are not more than its
share. The other keys of the document are divided into consecutive *parts*, one for each rank, whose borders give all
ranks the same number of (query, key) pairs, in proportion to their speeds. With several KV heads, a team divides heads
as far as it can and then keys: 4 ranks with 2 KV heads have two parts, and two ranks share each part, one for each half
of the heads.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets, overlaps, spread, united
from flexcp.arrays.totals import sums
from flexcp.batch import Batch, LayerMask
from flexcp.masks import area
from flexcp.plan.placement import Regions, Runs
from flexcp.shape import Shape

Ints = NDArray[np.int64]


class SharedRows(NamedTuple):
    """Rows that teams compute, as ranges of the stream: range i is ``start[i] <= t < stop[i]`` of team rows ``of[i]``.

    *Team rows* are the rows of one document that one team computes. Team rows p are of ``document[p]``, for the ranks
    from ``first[p]`` on. ``of`` is sorted.
    """

    of: Ints
    start: Ints
    stop: Ints
    document: Ints
    first: Ints


class _Rows(NamedTuple):
    """Ranges of rows ``q0 <= q < q1`` in the coordinates of their documents.

    Those of team rows p are at ``begin[p]`` to ``begin[p + 1]``; they are of ``document[p]``.
    """

    q0: Ints
    q1: Ints
    begin: Ints
    document: Ints


class _Keys(NamedTuple):
    """Ranges of keys ``k0 <= k < k1`` of documents, sorted by ``of``: the team rows, or the part, that reads them."""

    of: Ints
    k0: Ints
    k1: Ints


def key_regions(batch: Batch, mask: LayerMask, shared: SharedRows, runs: Runs, speeds: Ints, shape: Shape) -> Regions:
    """Return regions for rows that teams share, in which the ranks of a team compute them with different keys.

    ``runs`` say which rank keeps which tokens, and ``speeds[p, member]`` are those of the ranks of team rows p. Member
    m has the head group m // parts and the part m % parts. Regions without (query, key) pairs are left out.
    """
    head_groups = gcd(speeds.shape[1], shape.kv_heads)
    size = speeds.shape[1] // head_groups
    speeds = speeds.reshape(-1, head_groups, size).sum(axis=1)
    begin = batch.starts[shared.document[shared.of]]
    bounds = np.searchsorted(shared.of, np.arange(len(shared.document) + 1))
    rows = _Rows(shared.start - begin, shared.stop - begin, bounds, shared.document)
    lengths = batch.lengths[shared.document]
    target = _targets(mask, rows, lengths, speeds)
    kept = _at_most(mask, rows, _kept(batch, shared, runs, size, head_groups), target)
    found = _joined(kept, _divided(mask, rows, _others(kept, lengths, size), kept, target))
    index, within = spread(np.diff(bounds)[found.of // size] * head_groups)
    at, group = bounds[found.of[index] // size] + within // head_groups, within % head_groups
    regions = Regions.make(
        len(index),
        rank=(shared.first[found.of // size] + found.of % size)[index] + group * size,
        document=shared.document[found.of // size][index],
        q0=rows.q0[at],
        q1=rows.q1[at],
        k0=found.k0[index],
        k1=found.k1[index],
        h0=group * shape.heads // head_groups,
        h1=(group + 1) * shape.heads // head_groups,
    )
    region, _ = mask.cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    return regions.take(np.unique(region))


def _kept(batch: Batch, shared: SharedRows, runs: Runs, size: int, head_groups: int) -> _Keys:
    """Return the tokens of team rows that ranks of the team keep, for their part: ``of`` is p x ``size`` + part.

    There are ``size`` parts of each of the ``head_groups``.
    """
    stream = runs.sorted_by("start")
    row, run = overlaps(shared.start, shared.stop, stream.start, stream.stop)
    member = stream.rank[run] - shared.first[shared.of[row]]
    inside = (member >= 0) & (member < size * head_groups)
    row, run, part = row[inside], run[inside], member[inside] % size
    begin = batch.starts[shared.document[shared.of[row]]]
    low, high = np.maximum(shared.start[row], stream.start[run]), np.minimum(shared.stop[row], stream.stop[run])
    return _Keys(*united(shared.of[row] * size + part, low - begin, high - begin))


def _targets(mask: LayerMask, rows: _Rows, lengths: Ints, speeds: Ints) -> Ints:
    """Return how many (query, key) pairs each part of team rows should have, ``[team rows, part]``."""
    number = np.arange(len(lengths))
    total = _pairs(mask, rows, _Keys(number, np.zeros_like(lengths), lengths), 1)[:, None]
    share = np.cumsum(speeds, axis=1) * 1000 // speeds.sum(axis=1, keepdims=True)  # per mille
    return np.asarray(np.diff(total // 1000 * share + total % 1000 * share // 1000, axis=1, prepend=0))


def _at_most(mask: LayerMask, rows: _Rows, kept: _Keys, target: Ints) -> _Keys:
    """Return the keys that ranks of a part keep, without the last ones of parts that have more pairs than they should.

    Without this, ranks would be uneven under narrow windows, and where a document begins.
    """
    size = target.shape[1]
    pairs = _pairs(mask, rows, kept, size)
    over = np.flatnonzero(sums(kept.of, pairs, target.size) > target.reshape(-1))
    limit = np.full(target.size, np.iinfo(np.int64).max)
    limit[over] = _reached(mask, rows, kept, pairs, over, target.reshape(-1)[over], size)
    k1 = np.minimum(kept.k1, limit[kept.of])
    real = kept.k0 < k1
    return _Keys(kept.of[real], kept.k0[real], k1[real])


def _others(kept: _Keys, lengths: Ints, size: int) -> _Keys:
    """Return the keys of each document that are not in ``kept``, for each of the team rows.

    The last range of each may be empty, so that all team rows have one.
    """
    number = np.arange(len(lengths))
    of = np.concatenate([kept.of // size, number, number])
    start = np.concatenate([kept.k0, np.zeros_like(lengths), lengths])
    stop = np.concatenate([kept.k1, np.zeros_like(lengths), lengths])
    order = np.lexsort((stop, start, of))
    of, start, stop = of[order], start[order], stop[order]
    inner = of[1:] == of[:-1]
    of, k0, k1 = of[1:][inner], stop[:-1][inner], start[1:][inner]
    real = (k0 < k1) | np.append(of[1:] != of[:-1], True)
    return _Keys(of[real], k0[real], k1[real])


def _divided(mask: LayerMask, rows: _Rows, others: _Keys, kept: _Keys, target: Ints) -> _Keys:
    """Return the keys ``others`` divided into consecutive parts, so that with ``kept`` each has the pairs it should."""
    number, size = np.arange(len(target)), target.shape[1]
    pairs = _pairs(mask, rows, others, 1)
    own = sums(kept.of, _pairs(mask, rows, kept, size), target.size).reshape(-1, size)
    lacking = np.cumsum(np.maximum(target - own, 0), axis=1)
    amount = np.minimum(lacking, sums(others.of, pairs, len(target))[:, None])[:, :-1]
    borders = np.zeros((len(target), size + 1), np.int64)
    wanted = np.repeat(number, size - 1), amount.reshape(-1)
    borders[:, 1:-1] = _reached(mask, rows, others, pairs, *wanted, 1).reshape(amount.shape)
    borders[:, -1] = np.iinfo(np.int64).max
    low = np.maximum(others.k0[:, None], borders[others.of, :-1])
    high = np.minimum(others.k1[:, None], borders[others.of, 1:])
    of = others.of[:, None] * size + np.arange(size)
    return _Keys(of.reshape(-1), low.reshape(-1), high.reshape(-1))


def _reached(mask: LayerMask, rows: _Rows, keys: _Keys, pairs: Ints, of: Ints, amount: Ints, size: int) -> Ints:
    """Return the first key of the ranges of each ``of`` before which rows have at least ``amount`` pairs with them.

    ``pairs`` are those of each range, and ``size`` is the number of parts if ``keys`` are of parts, else 1.
    """
    before = offsets(pairs)
    first = np.searchsorted(keys.of, of)
    place = before[first] + amount  # all ranges lie on one axis of pairs
    at = np.minimum(np.maximum(np.searchsorted(before[1:], place), first), len(pairs) - 1)
    low, high = keys.k0[at], keys.k1[at]
    while np.any(low < high):
        middle = (low + high) // 2
        enough = before[at] + _pairs(mask, rows, _Keys(keys.of[at], keys.k0[at], middle), size) >= place
        low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
    return low


def _pairs(mask: LayerMask, rows: _Rows, keys: _Keys, size: int) -> Ints:
    """Return how many (query, key) pairs all rows of the team rows ``keys.of // size`` have with each range of keys."""
    number = keys.of // size
    index, within = spread(np.diff(rows.begin)[number])
    at = rows.begin[number[index]] + within
    document = rows.document[number[index]]
    found, slices = mask.cuts(document, rows.q0[at], rows.q1[at], keys.k0[index], keys.k1[index])
    return sums(index[found], area(slices), len(number))


def _joined(*keys: _Keys) -> _Keys:
    """Return the union of ranges of keys."""
    return _Keys(*united(*(np.concatenate(column) for column in zip(*keys, strict=True))))
