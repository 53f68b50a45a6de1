"""Loops of dealing: documents, or parts of them, go to bins, which are nodes or the teams of a node (compiled).

An *item* is a row of a table with the columns below: the part of a document from ``LO`` to ``HI`` of its tokens, as if
all its tokens had the same load (:mod:`flexcp.planners.groups.rows` chooses the actual rows). ``SHARED`` is 1 if other
items have the rest of the document. ``EXTRA`` is the load that a token of a whole item gains when the item is cut.

``pace`` is the speed of a bin relative to the mean bin, in 1/1024. All numbers are integers, so the result is the same
on every machine.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.compiled_sort import stable_order
from flexcp.arrays.jit import compiled, compiled_leaf

DOC, LO, HI, LOAD, ATTENTION, SHARED, BIN, EXTRA = range(8)
COLUMNS = 8
PACE = 1024
"""The pace of a bin of mean speed."""
PARTS = 1 << 30
"""Shares of attention and of tokens are compared in this many parts of the whole."""
HUGE = 1 << 62


@compiled
def deal(items, pace, slack, poured, room, times):
    """Return the items with their bins, cut where needed so that no bin takes more than 1/``slack`` above the mean.

    ``pace`` is the speed of each bin. ``room`` is the most tokens that a bin should keep, 0 for no limit: a whole item
    goes to a group without room only if no group has room.

    An item that is too large for a bin is *long*. Each long item gets a group of bins, as many as it needs, and is cut
    into parts over it in proportion to their paces. If there are not enough bins for this, the limit is raised until
    there are; with ``poured``, long items are laid end to end over all bins instead, so that neighbours share a bin.
    All other items stay whole. They go heaviest first to the group that then finishes first, and inside a group so that
    attention and tokens are both even, because bins that share a document wait for each other in every layer. In the
    end, the slowest bin gives parts of items to the fastest, until all are within the limit.

    A cut item gains its extra load ``times`` times.
    """
    bins = len(pace)
    even, limit, enough = limit_of(items, bins, slack)
    order = heaviest_first(items)
    if not enough and not poured:
        limit = least_limit(items, limit, even * bins + 1, bins)
    found = np.zeros((len(items) + 4 * bins, COLUMNS), np.int64)
    group = np.arange(bins)
    if enough or not poured:
        start = in_groups(items, order, limit, pace, group, found, times)
    else:
        start = laid_end_to_end(items, order, limit, pace, found, times)
    used = start
    group_load, group_pace, left = np.zeros(bins, np.int64), np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    for b in range(bins):
        group_pace[group[b]] += pace[b]
        left[group[b]] += room
    for i in range(used):
        group_load[group[found[i, BIN]]] += found[i, LOAD]
        left[group[found[i, BIN]]] -= found[i, HI] - found[i, LO]
    for i in order:
        if items[i, LOAD] > limit:
            continue
        best, least, tokens = 0, HUGE, items[i, HI] - items[i, LO]
        for g in range(bins):
            if group_pace[g] > 0:
                time = (group_load[g] + items[i, LOAD]) * PACE // group_pace[g]
                if room > 0 and left[g] < tokens:
                    time += HUGE // 2
                if time < least:
                    best, least = g, time
        group_load[best] += items[i, LOAD]
        left[best] -= tokens
        write_part(found, used, items[i], 0, tokens, best, times)
        used += 1
    inside_groups(found, start, used, group, pace)
    used = cut_borders(found, used, pace, slack, limit, times)
    return found[:used]


@compiled
def limit_of(items, bins, slack):
    """Return (the mean load of a bin, the load that a bin may take, whether there are bins enough for long items)."""
    total = 0
    for i in range(len(items)):
        total += items[i, LOAD]
    even = -(-total // bins)
    limit = even + even // slack + 1
    return even, limit, needed_bins(items, limit) <= bins


@compiled
def heaviest_first(items):
    """Return the indices of the items sorted by load, the heaviest first."""
    keys = np.empty(len(items), np.int64)
    for i in range(len(items)):
        keys[i] = -items[i, LOAD]
    return stable_order(keys)


@compiled_leaf
def needed_bins(items, limit):
    """Return how many bins all items above the limit need together, if each takes whole bins of its own."""
    found = 0
    for i in range(len(items)):
        if items[i, LOAD] > limit:
            found += -(-items[i, LOAD] // limit)
    return found


@compiled_leaf
def least_limit(items, low, high, bins):
    """Return the smallest limit from ``low`` to ``high`` with which ``bins`` bins are enough for all long items.

    They must be enough with ``high``.
    """
    while low < high:
        middle = (low + high) // 2
        if needed_bins(items, middle) <= bins:
            high = middle
        else:
            low = middle + 1
    return high


@compiled_leaf
def share_of(amount, tokens, of):
    """Return ``amount * tokens / of``, rounded down, without exceeding 64 bits."""
    return amount // of * tokens + amount % of * tokens // of


@compiled_leaf
def tokens_with(load, tokens, whole):
    """Return how many of ``tokens`` tokens, which have the load ``whole`` together, have ``load``, rounded down.

    Where 64 bits would not be enough, loads are rounded to fewer bits first.
    """
    while load > HUGE // tokens:
        load, whole = load // 2, whole // 2
    return tokens * load // max(1, whole)


@compiled_leaf
def write_part(found, at, item, first, last, b, times):
    """Write tokens ``first`` to ``last`` (exclusive) of an item as item ``at`` of ``found``, in bin ``b``.

    Tokens are counted from the item's own beginning. ``times`` is as in :func:`deal`.
    """
    tokens = item[HI] - item[LO]
    more = times * item[EXTRA] * (last - first) if item[SHARED] == 0 and last - first < tokens else 0
    found[at, DOC] = item[DOC]
    found[at, LO] = item[LO] + first
    found[at, HI] = item[LO] + last
    found[at, LOAD] = share_of(item[LOAD], last, tokens) - share_of(item[LOAD], first, tokens) + more
    found[at, ATTENTION] = share_of(item[ATTENTION], last, tokens) - share_of(item[ATTENTION], first, tokens) + more
    found[at, SHARED] = 1 if item[SHARED] == 1 or last - first < tokens else 0
    found[at, BIN] = b
    found[at, EXTRA] = item[EXTRA]


@compiled
def in_groups(items, order, limit, pace, group, found, times):
    """Write every long item in parts over a group of bins of its own; return the number of parts.

    Parts are in proportion to the paces of bins. ``group[bin]`` becomes the first bin of the group that the bin belongs
    to. ``times`` is as in :func:`deal`.
    """
    sizes = group_sizes(items, limit, len(pace))
    used, begin = 0, 0
    for i in order:
        if items[i, LOAD] <= limit:
            break
        size, tokens, whole, before = sizes[i], items[i, HI] - items[i, LO], 0, 0
        for b in range(begin, begin + size):
            whole += pace[b]
        for b in range(begin, begin + size):
            group[b] = begin
            first = tokens * before // whole
            before += pace[b]
            last = tokens * before // whole
            if first < last:
                write_part(found, used, items[i], first, last, b, times)
                used += 1
        begin += size
    return used


@compiled
def group_sizes(items, limit, bins):
    """Return how many bins the group of each long item has; there must be enough of them.

    Each has as many as it needs. While another bin for the group with the heaviest bins leaves the other bins, which
    are for all other items, less load than those have on average, the group gets it.
    """
    sizes = np.zeros(len(items), np.int64)
    long, count = np.empty(bins, np.int64), 0  # each long item needs at least one bin
    left, others = bins, 0
    for i in range(len(items)):
        if items[i, LOAD] > limit:
            sizes[i] = -(-items[i, LOAD] // limit)
            left -= sizes[i]
            long[count] = i
            count += 1
        else:
            others += items[i, LOAD]
    while count > 0 and left > (others > 0):
        heaviest = long[0]
        for i in long[1:count]:
            if items[i, LOAD] // sizes[i] > items[heaviest, LOAD] // sizes[heaviest]:
                heaviest = i
        if others > items[heaviest, LOAD] // sizes[heaviest] * (left - 1):
            break
        sizes[heaviest] += 1
        left -= 1
    return sizes


@compiled
def laid_end_to_end(items, order, limit, pace, found, times):
    """Write the long items one after the other over the bins; return the number of parts.

    Each bin is filled up to the limit, times its pace. ``times`` is as in :func:`deal`.
    """
    used, b = 0, 0
    room = limit * pace[0] // PACE
    for i in order:
        if items[i, LOAD] <= limit:
            break
        tokens, first = items[i, HI] - items[i, LO], 0
        while first < tokens:
            left = items[i, LOAD] - share_of(items[i, LOAD], first, tokens)
            last = tokens
            if left > room and b < len(pace) - 1:
                last = min(tokens, first + max(1, tokens_with(max(room, 0), tokens, items[i, LOAD])))
            write_part(found, used, items[i], first, last, b, times)
            room -= found[used, LOAD]
            used += 1
            first = last
            if first < tokens:
                b += 1
                room = limit * pace[b] // PACE
    return used


@compiled
def inside_groups(found, start, used, group, pace):
    """Spread items over the bins of their groups; those from ``start`` to ``used`` are all in the first bin of one."""
    for g in range(len(group)):
        size = 0
        for b in range(len(group)):
            size += group[b] == g
        if size < 2:
            continue
        count = 0
        for i in range(start, used):
            count += found[i, BIN] == g
        mine, n = np.empty(count, np.int64), 0
        for i in range(start, used):
            if found[i, BIN] == g:
                mine[n] = i
                n += 1
        where = spread_evenly(found, mine, pace[g : g + size], np.zeros(size, np.int64), 0)
        for n in range(count):
            found[mine[n], BIN] = g + where[n]


@compiled
def spread_evenly(items, mine, pace, held, tokens):
    """Return the bin of each of the items ``mine`` (indices), so that attention and tokens are both even.

    Items go largest first to the bin whose larger share, of attention or of tokens, is then smallest for its pace.
    ``held`` is the attention that bins already have; ``tokens`` is the total number of tokens, if there are more than
    those of ``mine``.
    """
    attention, own = 0, 0
    for i in mine:
        attention += items[i, ATTENTION]
        own += items[i, HI] - items[i, LO]
    for b in range(len(pace)):
        attention += held[b]
    # Factors that turn attention and tokens into parts of the whole; attention may need a divisor as well.
    times_a, over_a = max(1, PARTS // max(1, attention)), attention // PARTS + 1
    times_t = max(1, PARTS // max(1, tokens, own))
    keys = np.empty(len(mine), np.int64)
    for n in range(len(mine)):
        i = mine[n]
        keys[n] = -max(items[i, ATTENTION] * times_a // over_a, (items[i, HI] - items[i, LO]) * times_t)
    has_a, has_t = np.zeros(len(pace), np.int64), np.zeros(len(pace), np.int64)
    for b in range(len(pace)):
        has_a[b] = held[b] * times_a // over_a
    where = np.zeros(len(mine), np.int64)
    for n in stable_order(keys):
        i = mine[n]
        a, t = items[i, ATTENTION] * times_a // over_a, (items[i, HI] - items[i, LO]) * times_t
        best, least, least_sum = 0, HUGE, HUGE
        for b in range(len(pace)):
            more = max(has_a[b] + a, has_t[b] + t) * PACE // pace[b]
            both = (has_a[b] + has_t[b]) * PACE // pace[b]
            if more < least or (more == least and both < least_sum):
                best, least, least_sum = b, more, both
        where[n] = best
        has_a[best] += a
        has_t[best] += t
    return where


@compiled
def cut_borders(found, used, pace, slack, limit, times):
    """Move load from the slowest bin to the fastest until all are within the limit; return the number of items.

    The limit is at least 1/``slack`` above the mean load of bins. The load is cut from the shortest item that has
    enough; if none has, the heaviest item moves as a whole. There are at most two moves for each bin. ``times`` is as
    in :func:`deal`.
    """
    bins = len(pace)
    load = np.zeros(bins, np.int64)
    for i in range(used):
        load[found[i, BIN]] += found[i, LOAD]
    even = -(-load.sum() // bins)
    limit = max(limit, even + even // slack + 1)
    for _ in range(2 * bins):
        late, early = 0, 0
        for b in range(bins):
            if load[b] * PACE // pace[b] > load[late] * PACE // pace[late]:
                late = b
            if load[b] * PACE // pace[b] < load[early] * PACE // pace[early]:
                early = b
        over = min(load[late] - even * pace[late] // PACE, even * pace[early] // PACE - load[early])
        if load[late] * PACE // pace[late] <= limit or over <= 0:
            break
        best, tokens, heaviest = -1, HUGE, -1
        for i in range(used):
            if found[i, BIN] == late:
                length = found[i, HI] - found[i, LO]
                if found[i, LOAD] >= over and 1 < length < tokens:
                    best, tokens = i, length
                if heaviest < 0 or found[i, LOAD] > found[heaviest, LOAD]:
                    heaviest = i
        if best < 0:  # no item has enough load: the heaviest moves as a whole
            best, tokens = heaviest, found[heaviest, HI] - found[heaviest, LO]
            over = found[best, LOAD]
        give = min(tokens, max(1, tokens_with(over, tokens, found[best, LOAD])))
        item = found[best].copy()
        load[late] -= item[LOAD]
        if give == tokens:
            found[best, BIN] = early
            load[early] += item[LOAD]
        else:
            write_part(found, best, item, 0, tokens - give, late, times)
            write_part(found, used, item, tokens - give, tokens, early, times)
            load[late] += found[best, LOAD]
            load[early] += found[used, LOAD]
            used += 1
    return used
