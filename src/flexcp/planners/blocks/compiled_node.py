"""Loops of a node: place its items on ranks, alone or in teams, and count the bytes that this moves (compiled).

An *item* is a range of a document's rows, and a *team* is some ranks of the node that may split the heads of an item. A
*work* table has the columns (first rank, team size, document, first row, last row): a team of one rank computes whole
items, a larger team splits them by heads. A *kept* table has the columns (rank, document, first row, last row). Last
rows are exclusive. In this module, a *parted* item is one that its team splits.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.compiled_sort import stable_order
from flexcp.arrays.jit import compiled
from flexcp.planners.blocks.compiled_pack import pack
from flexcp.planners.blocks.compiled_shared import (
    BIN,
    DOC,
    HI,
    HUGE,
    LO,
    LOAD,
    MILLION,
    fetched,
    load_of,
    most_spans,
    write_item,
)

PACKED_AGAIN = 1 << 18
"""After packing this many items in all, a team splits no more of them.

With many documents every packing takes long, and there may be as many packings as items.
"""


@compiled
def node(items, ruler, cap_load, cap_rows, aim, reads, weight, moves, fills, aims, enough, sweeps, team, kv, row):
    """Place items on teams of ``team`` ranks, then inside each team.

    Return (work, kept, bytes received, worst excess over a limit in millionths of the mean, pairs tried). ``kv`` and
    ``row`` are the bytes of a key and of a row's q and o; the other arguments are those of
    :func:`flexcp.planners.blocks.compiled_pack.pack`, with limits of ranks. Inside a team, items are split by heads or
    packed over its ranks. If a rank then exceeds its limit, one more item is split and the others are packed again.
    ``pack`` is called in one place only, because it is large and compiled into its caller.
    """
    size, teams = len(cap_load), len(cap_load) // team
    mine, parted, costly = items, np.zeros(len(items), np.bool_), np.zeros(len(items), np.bool_)
    most_load, most_rows, aimed = team_sums(cap_load, team), team_sums(cap_rows, team), team_sums(aim, team)
    table, work, steps = items, np.zeros((0, 5), np.int64), 0
    for t in range(-1, teams):  # -1 packs over teams, the others inside team t
        if t >= 0:
            a, b = t * team, (t + 1) * team
            mine = in_bin(table, t)
            most_load, most_rows, aimed = cap_load[a:b], cap_rows[a:b], aim[a:b]
            parted, costly = too_large(mine, aimed), dear_to_fetch(mine, team, reads, kv, row)
        again, packed = True, 0
        while again:
            share = share_of_parted(mine, parted, costly) // team
            whole, room = unparted(mine, parted), less(most_load, share, -HUGE)
            target = less(aimed, share, 1 if t >= 0 else -HUGE)
            rest = whole
            if len(whole) > 0:
                rest, _, _, more = pack(
                    whole, ruler, room, most_rows, target, reads, weight, moves, fills, aims, enough, sweeps
                )
                steps, packed = steps + more + len(whole), packed + len(whole)
            again = t >= 0 and len(whole) > 0 and packed < PACKED_AGAIN and part_another(mine, parted, rest, room)
        if t < 0:
            table = rest
        if t >= 0 or team == 1:
            work = with_work(work, max(t, 0) * team, team, mine, parted, rest)
        if team == 1:
            break
    kept = kept_rows(work, size, np.zeros(0, np.int64))
    over = violations(work, kept, ruler, cap_load, cap_rows)
    return work, kept, received(work, kept, size, kv, row, reads), over, steps


@compiled
def team_sums(limits, team):
    """Return the limits of teams of ``team`` ranks, from those of ranks."""
    found = np.zeros(len(limits) // team, np.int64)
    for r in range(len(found) * team):
        found[r // team] += limits[r]
    return found


@compiled
def less(limits, share, least):
    """Return what is left of each limit after taking off ``share``, at least ``least``."""
    left = np.empty(len(limits), np.int64)
    for r in range(len(limits)):
        left[r] = max(limits[r] - share, least)
    return left


@compiled
def in_bin(table, b):
    """Return the items of bin ``b`` as a table of their own."""
    found, n = np.empty((len(table), 5), np.int64), 0
    for i in range(len(table)):
        if table[i, BIN] == b:
            write_item(found, n, table[i, DOC], table[i, LO], table[i, HI], table[i, LOAD], b)
            n += 1
    return found[:n]


@compiled
def unparted(items, parted):
    """Return the items that are not split, in no bin and without their loads."""
    found, n = np.empty((len(items), 5), np.int64), 0
    for i in range(len(items)):
        if not parted[i]:
            write_item(found, n, items[i, DOC], items[i, LO], items[i, HI], 0, -1)
            n += 1
    return found[:n]


@compiled
def with_work(work, start, team, items, parted, rest):
    """Return ``work`` with the rows added that the team from rank ``start`` on computes.

    These are its split items, and the others (``rest``) on the ranks where they are packed.
    """
    found, n = np.empty((len(work) + len(items) + len(rest), 5), np.int64), len(work)
    for i in range(n):
        write_item(found, i, work[i, 0], work[i, 1], work[i, 2], work[i, 3], work[i, 4])
    for i in range(len(items)):
        if parted[i]:
            write_item(found, n, start, team, items[i, DOC], items[i, LO], items[i, HI])
            n += 1
    for i in range(len(rest)):
        write_item(found, n, start + rest[i, BIN], 1, rest[i, DOC], rest[i, LO], rest[i, HI])
        n += 1
    return found[:n]


@compiled
def too_large(items, aim):
    """Return which items have more load than the least ``aim`` of the team's ranks."""
    least, found = aim[0], np.zeros(len(items), np.bool_)
    for r in range(len(aim)):
        least = min(least, aim[r])
    for i in range(len(items)):
        found[i] = items[i, LOAD] > least
    return found


@compiled
def dear_to_fetch(items, team, reads, kv, row):
    """Return for which items it costs more bytes to fetch their keys than to split them over the team.

    Splitting exchanges q, o and kv of the rows that other ranks of the team keep.
    """
    costly = np.zeros(len(items), np.bool_)
    alone, spans = np.zeros((1, 2), np.int64), np.zeros((most_spans(reads), 2), np.int64)
    for i in range(len(items)):
        d = items[i, DOC]
        alone[0, 0], alone[0, 1] = items[i, LO], items[i, HI]
        keys = fetched(alone, 1, alone, 1, reads, d, spans)
        costly[i] = keys * kv > (items[i, HI] - items[i, LO]) * (row + kv) * (team - 1) // team
    return costly


@compiled
def share_of_parted(items, parted, costly):
    """Split further items where that is cheaper (changes ``parted``); return the load of all split items.

    If a team splits rows of a document, it fetches the document's keys anyway. Then, for ``costly`` items of the same
    document, exchanging heads costs less than fetching their keys.
    """
    documents = 0
    for i in range(len(items)):
        documents = max(documents, items[i, DOC] + 1)
    fetches = np.zeros(documents, np.bool_)
    for i in range(len(items)):
        if parted[i]:
            fetches[items[i, DOC]] = True
    load = 0
    for i in range(len(items)):
        parted[i] |= costly[i] and fetches[items[i, DOC]]
        if parted[i]:
            load += items[i, LOAD]
    return load


@compiled
def part_another(items, parted, rest, cap_load):
    """If a rank exceeds its limit, mark the largest item that it got as split; return whether there was one.

    The mark is in ``parted``, on all ``items`` that overlap with it.
    """
    over = np.zeros(len(cap_load), np.int64)
    for i in range(len(rest)):
        over[rest[i, BIN]] += rest[i, LOAD]
    worst, heaviest = 0, -1
    for r in range(len(cap_load)):
        over[r] -= cap_load[r]
        if over[r] > over[worst]:
            worst = r
    if over[worst] <= 0:
        return False
    for i in range(len(rest)):
        if rest[i, BIN] == worst and (heaviest < 0 or rest[i, LOAD] > rest[heaviest, LOAD]):
            heaviest = i
    if heaviest < 0:
        return False
    for i in range(len(items)):
        if items[i, DOC] == rest[heaviest, DOC] and items[i, LO] < rest[heaviest, HI]:
            parted[i] |= rest[heaviest, LO] < items[i, HI]
    return True


@compiled
def kept_rows(work, ranks, targets):
    """Return the kept table of ``work``: which rank keeps which rows.

    Whole items are kept where they are computed. The split rows of a team are distributed so that each of its ranks
    keeps its target, if there are ``targets`` and they can be met exactly, and otherwise so that numbers of rows are as
    equal as possible.
    """
    kept = np.zeros((2 * len(work) + 2 * ranks, 4), np.int64)
    counts, n = np.zeros(ranks, np.int64), 0
    for i in range(len(work)):
        if work[i, 1] == 1:
            kept[n, 0], kept[n, 1], kept[n, 2], kept[n, 3] = work[i, 0], work[i, 2], work[i, 3], work[i, 4]
            counts[work[i, 0]] += work[i, 4] - work[i, 3]
            n += 1
    done = np.zeros(ranks, np.bool_)
    for i in range(len(work)):
        start, team = work[i, 0], work[i, 1]
        if team == 1 or done[start]:
            continue
        done[start] = True
        rows = 0
        for j in range(i, len(work)):
            if work[j, 0] == start and work[j, 1] == team:
                rows += work[j, 4] - work[j, 3]
        given = water(counts[start : start + team], rows)
        if len(targets):
            missing, least = rows, 0
            for r in range(start, start + team):
                missing -= targets[r] - counts[r]
                least = min(least, targets[r] - counts[r])
            if missing == 0 and least == 0:
                for r in range(start, start + team):
                    given[r - start] = targets[r] - counts[r]
        rank = start
        for j in range(i, len(work)):
            if work[j, 0] != start or work[j, 1] != team:
                continue
            lo = work[j, 3]
            while lo < work[j, 4]:
                while given[rank - start] == 0:
                    rank += 1
                hi = min(work[j, 4], lo + given[rank - start])
                kept[n, 0], kept[n, 1], kept[n, 2], kept[n, 3] = rank, work[j, 2], lo, hi
                given[rank - start] -= hi - lo
                n += 1
                lo = hi
    return kept[:n]


@compiled
def water(counts, rows):
    """Return how many of ``rows`` each rank gets so that the numbers of rows become as equal as possible.

    ``counts`` are the rows that ranks have already.
    """
    order = stable_order(counts)
    held, wet = 0, 0
    while wet < len(counts) and counts[order[wet]] * wet <= rows + held:
        held += counts[order[wet]]
        wet += 1
    surface, extra = (rows + held) // wet, (rows + held) % wet
    given = np.zeros(len(counts), np.int64)
    for i in range(wet):
        given[order[i]] = surface - counts[order[i]] + (1 if i < extra else 0)
    return given


@compiled
def violations(work, kept, ruler, cap_load, cap_rows):
    """Return how far the worst rank exceeds a limit, in millionths of the mean of load or rows."""
    ranks = len(cap_load)
    load, rows = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for i in range(len(work)):
        team = work[i, 1]
        share = load_of(ruler, work[i, 2], work[i, 3], work[i, 4]) // team
        for r in range(work[i, 0], work[i, 0] + team):
            load[r] += share
    for i in range(len(kept)):
        rows[kept[i, 0]] += kept[i, 3] - kept[i, 2]
    all_load, all_rows, over = 0, 0, 0
    for r in range(ranks):
        all_load += load[r]
        all_rows += rows[r]
    mean_load, mean_rows = max(1, all_load // ranks), max(1, all_rows // ranks)
    for r in range(ranks):
        over = max(over, (load[r] - cap_load[r]) * MILLION // mean_load)
        over = max(over, (rows[r] - cap_rows[r]) * MILLION // mean_rows)
    return over


@compiled
def received(work, kept, ranks, kv, row, reads):
    """Return the bytes that all ranks receive.

    ``kv`` is the bytes of a key with all heads, ``row`` those of a row's q and o with all heads.
    """
    most = most_spans(reads)
    rows, owned = np.zeros((len(work), 2), np.int64), np.zeros((len(kept), 2), np.int64)
    spans = np.zeros((len(work) * most, 2), np.int64)
    # Sorted by document, so that the rows of a document are adjacent and every rank needs only one pass over them.
    by_document, kept_by_document = stable_order(work[:, 2]), stable_order(kept[:, 1])
    mine, held = np.zeros(len(work), np.int64), np.zeros(len(kept), np.int64)
    total = 0
    for r in range(ranks):
        works, holds = 0, 0
        for i in by_document:
            if work[i, 0] <= r < work[i, 0] + work[i, 1]:
                mine[works] = i
                works += 1
        for i in kept_by_document:
            if kept[i, 0] == r:
                held[holds] = i
                holds += 1
        end, seen = 0, 0
        while end < works:
            at, d = end, work[mine[end], 2]
            while end < works and work[mine[end], 2] == d:
                end += 1
            while seen < holds and kept[held[seen], 1] < d:
                seen += 1
            have = 0
            while seen < holds and kept[held[seen], 1] == d:
                owned[have, 0], owned[have, 1] = kept[held[seen], 2], kept[held[seen], 3]
                have += 1
                seen += 1
            # Whole items come first, because what they read is received with all heads.
            count, team = 0, 1
            for j in mine[at:end]:
                if work[j, 1] == 1:
                    rows[count, 0], rows[count, 1] = work[j, 3], work[j, 4]
                    count += 1
            full = fetched(rows, count, owned, have, reads, d, spans)
            total += (full + reads.thin[d]) * kv
            whole = count
            for j in mine[at:end]:
                if work[j, 1] > 1:
                    rows[count, 0], rows[count, 1] = work[j, 3], work[j, 4]
                    count, team = count + 1, work[j, 1]
            if count > whole:
                total += (fetched(rows, count, owned, have, reads, d, spans) - full) * kv // team
            for j in range(count):
                foreign = rows[j, 1] - rows[j, 0]
                for k in range(have):
                    foreign -= max(0, min(rows[j, 1], owned[k, 1]) - max(rows[j, 0], owned[k, 0]))
                total += foreign * row // (1 if j < whole else team)
    return total
