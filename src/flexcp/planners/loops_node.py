"""Loops of a node: its items to ranks, alone or in teams, and what that moves, compiled.

A *work* table has the columns (first rank, team size, document, first row, last row): a team of one computes whole items, a larger one
splits them by heads. A *kept* table has the columns (rank, document, first row, last row).
"""

from __future__ import annotations

import numpy as np

from flexcp.planners.jit import compiled
from flexcp.planners.loops import BIN, DOC, HI, LO, LOAD, MILLION, fetched, load_of
from flexcp.planners.loops_pack import pack


@compiled
def node(items, ruler, cap_load, cap_rows, aim, reads, weight, moves, fills, aims, enough, sweeps, team, kv, row):
    """Items over teams of ``team`` ranks, then inside each team; (work, kept, bytes received, worst violation in millionths)."""
    size = len(cap_load)
    if team == 1:
        table, _, _ = pack(items, ruler, cap_load, cap_rows, aim, reads, weight, moves, fills, aims, enough, sweeps)
        work = as_work(table, 0)
    else:
        teams = size // team
        loads, rows, aimed = np.zeros(teams, np.int64), np.zeros(teams, np.int64), np.zeros(teams, np.int64)
        for r in range(teams * team):
            loads[r // team] += cap_load[r]
            rows[r // team] += cap_rows[r]
            aimed[r // team] += aim[r]
        table, _, _ = pack(items, ruler, loads, rows, aimed, reads, weight, moves, fills, aims, enough, sweeps)
        work = np.zeros((0, 5), np.int64)
        for t in range(teams):
            a, b = t * team, (t + 1) * team
            mine = inside_team(
                table[table[:, BIN] == t],
                ruler,
                cap_load[a:b],
                cap_rows[a:b],
                aim[a:b],
                reads,
                weight,
                moves,
                fills,
                aims,
                enough,
                sweeps,
                kv,
                row,
            )
            mine[:, 0] += a
            work = np.concatenate((work, mine))
    kept = kept_rows(work, size, np.zeros(0, np.int64))
    over = violations(work, kept, ruler, cap_load, cap_rows)
    return work, kept, received(work, kept, size, kv, row, reads), over


@compiled
def as_work(table, start):
    """Packed items as work of single ranks from ``start`` on."""
    work = np.ones((len(table), 5), np.int64)
    for i in range(len(table)):
        work[i, 0] = start + table[i, BIN]
        work[i, 2:] = table[i, :3]
    return work


@compiled
def inside_team(items, ruler, cap_load, cap_rows, aim, reads, weight, moves, fills, aims, enough, sweeps, kv, row):
    """A team's items: those split by heads, and the others over its ranks."""
    team, count = len(cap_load), len(items)
    parted, costly = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    most = 1
    for d in range(len(reads.thin)):
        most = max(most, reads.first[d + 1] - reads.first[d])
    alone, spans = np.zeros((1, 2), np.int64), np.zeros((most, 2), np.int64)
    largest = 0
    for i in range(count):
        d = items[i, DOC]
        alone[0, 0], alone[0, 1] = items[i, LO], items[i, HI]
        keys = fetched(alone, 1, alone, 1, reads.slices, reads.first[d], reads.first[d + 1], spans)
        # Splitting exchanges q, o and kv of the rows that other ranks of the team keep.
        costly[i] = keys * kv > (items[i, HI] - items[i, LO]) * (row + kv) * (team - 1) // team
        parted[i] = items[i, LOAD] > aim.min()
        largest = max(largest, d + 1)
    fetches = np.zeros(largest, np.bool_)
    rest = np.zeros((0, 5), np.int64)
    while True:
        # The team fetches the keys of a split document anyway: exchanging other rows' heads may be cheaper than their keys.
        for i in range(count):
            if parted[i]:
                fetches[items[i, DOC]] = True
        share = 0
        for i in range(count):
            parted[i] |= costly[i] and fetches[items[i, DOC]]
            if parted[i]:
                share += items[i, LOAD]
        share //= team
        if parted.all():
            rest = np.zeros((0, 5), np.int64)
            break
        rest, _, _ = pack(
            items[~parted],
            ruler,
            cap_load - share,
            cap_rows,
            np.maximum(aim - share, 1),
            reads,
            weight,
            moves,
            fills,
            aims,
            enough,
            sweeps,
        )
        load = np.zeros(team, np.int64)
        for i in range(len(rest)):
            load[rest[i, BIN]] += rest[i, LOAD]
        over = load + share - cap_load
        if over.max() <= 0:
            break
        # A rank is over: the largest item it got joins the split ones.
        worst, heaviest = over.argmax(), -1
        for i in range(len(rest)):
            if rest[i, BIN] == worst and (heaviest < 0 or rest[i, LOAD] > rest[heaviest, LOAD]):
                heaviest = i
        if heaviest < 0:
            break
        for i in range(count):
            if items[i, DOC] == rest[heaviest, DOC] and items[i, LO] < rest[heaviest, HI]:
                parted[i] |= rest[heaviest, LO] < items[i, HI]
    split = items[parted]
    work = np.zeros((len(split) + len(rest), 5), np.int64)
    work[: len(split), 1] = team
    work[: len(split), 2:] = split[:, :3]
    work[len(split) :] = as_work(rest, 0)
    return work


@compiled
def kept_rows(work, ranks, targets):
    """Who keeps the rows of ``work``: whole items stay with their work, a team's split rows are dealt so that each rank of it keeps
    its target, where there are targets and they can be met, and else so that counts end up level."""
    kept = np.zeros((2 * len(work) + 2 * ranks, 4), np.int64)
    counts, n = np.zeros(ranks, np.int64), 0
    for i in range(len(work)):
        if work[i, 1] == 1:
            kept[n, 0], kept[n, 1:] = work[i, 0], work[i, 2:]
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
            missing = targets[start : start + team] - counts[start : start + team]
            if missing.min() >= 0 and missing.sum() == rows:
                given = missing
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
    """How many of ``rows`` each gets so that counts end up as level as possible."""
    order = np.argsort(counts, kind="mergesort")
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
    """How far the worst rank is over a limit, in millionths of the mean."""
    ranks = len(cap_load)
    load, rows = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for i in range(len(work)):
        team = work[i, 1]
        share = load_of(ruler, work[i, 2], work[i, 3], work[i, 4]) // team
        for r in range(work[i, 0], work[i, 0] + team):
            load[r] += share
    for i in range(len(kept)):
        rows[kept[i, 0]] += kept[i, 3] - kept[i, 2]
    mean_load, mean_rows = max(1, load.sum() // ranks), max(1, rows.sum() // ranks)
    over = 0
    for r in range(ranks):
        over = max(over, (load[r] - cap_load[r]) * MILLION // mean_load, (rows[r] - cap_rows[r]) * MILLION // mean_rows)
    return over


@compiled
def received(work, kept, ranks, kv, row, reads):
    """Bytes that all ranks receive: ``kv`` for a key with all heads, ``row`` for a row's q and o with all heads."""
    most = 1
    for d in range(len(reads.thin)):
        most = max(most, reads.first[d + 1] - reads.first[d])
    rows, owned = np.zeros((len(work), 2), np.int64), np.zeros((len(kept), 2), np.int64)
    spans = np.zeros((len(work) * most, 2), np.int64)
    total = 0
    for r in range(ranks):
        for i in range(len(work)):
            if not work[i, 0] <= r < work[i, 0] + work[i, 1]:
                continue
            d, again = work[i, 2], False
            for j in range(i):
                again |= work[j, 2] == d and work[j, 0] <= r < work[j, 0] + work[j, 1]
            if again:
                continue
            have = 0
            for j in range(len(kept)):
                if kept[j, 0] == r and kept[j, 1] == d:
                    owned[have, 0], owned[have, 1] = kept[j, 2], kept[j, 3]
                    have += 1
            # Whole items first: what they read comes with all heads.
            count, team = 0, 1
            for j in range(i, len(work)):
                if work[j, 2] == d and work[j, 0] == r and work[j, 1] == 1:
                    rows[count, 0], rows[count, 1] = work[j, 3], work[j, 4]
                    count += 1
            full = fetched(rows, count, owned, have, reads.slices, reads.first[d], reads.first[d + 1], spans)
            total += (full + reads.thin[d]) * kv
            whole = count
            for j in range(i, len(work)):
                if work[j, 2] == d and work[j, 1] > 1 and work[j, 0] <= r < work[j, 0] + work[j, 1]:
                    rows[count, 0], rows[count, 1] = work[j, 3], work[j, 4]
                    count, team = count + 1, work[j, 1]
            if count > whole:
                total += (
                    (fetched(rows, count, owned, have, reads.slices, reads.first[d], reads.first[d + 1], spans) - full)
                    * kv
                    // team
                )
            for j in range(count):
                foreign = rows[j, 1] - rows[j, 0]
                for k in range(have):
                    foreign -= max(0, min(rows[j, 1], owned[k, 1]) - max(rows[j, 0], owned[k, 0]))
                total += foreign * row // (1 if j < whole else team)
    return total
