"""groups: ranks in disjoint groups of any size, every document in one group, the slowest group as fast as possible.

Flexible groups (FCP's second system, DHP in its first version) with four changes: degrees are exact instead of a dynamic programme's,
a document that needs no cut stays whole on one rank of its group, the cut ones fill up what the whole ones left uneven, and keys travel
only where they are read.

*What a group costs.* With d ranks, in *pairs* (:mod:`flexcp.cost`), all integers:

    compute        (sum of area and row tiles + linear price * tokens) / d        whole documents and shares of cut ones, levelled
    communication  keys its busiest rank reads of others (and their gradients on the way back), at the bandwidth inside the group, plus
                   a start-up; only cut documents move
    T              compute + communication - min(attention, communication)

As in the paper all attention hides all communication, which is what a plan's stages do (:mod:`flexcp.schedule.stages`): keys arrive and
gradients leave under the work on a rank's own tokens and under each other's work.

*How.* Six steps, each a function:

1. Atomic groups. A document heavier than the mean load of a rank (or longer than the token cap) is a group of its own; the others are
   filling, which stays whole.
2. Degrees. :func:`best_degrees` searches the smallest tau for which ``sum of min{d : T_i(d) <= tau} <= N`` and the filling fits into what
   is left. That is the optimum over all integer degrees, as brute force finds it.
3. Ranks. Largest group first into the node it fills best; a group spans nodes only where none has room for it.
4. Dealing. The filling, heaviest first, to the group that would be ready first, large groups included: there it stays whole on one rank and
   the cut document's shares make up for it, so nobody inherits the degree of a bin.
5. Merging. While the slowest group is more than 1/64 over the lower bound it is joined with groups that have time to spare if that makes it
   faster: one that has just enough, or the fewest that have enough together, in its own nodes first. Documents are cut then that were
   whole before. The last resort is one group of all ranks.
6. Tidying. Ranks that got no share of a cut document leave their group, and step 3 is repeated, unless that makes anybody slower.

*Gap.* No assignment is faster than :func:`groups_lower_bound`: all load evenly over all ranks, or the document that is slowest even with
its best degree alone. Step 5 ends only when the slowest group takes at most 65/64 of it, or at
most what one group of all ranks takes. So what separates us from the optimum is at most 1.6 % (and one token, as tokens are not cut), or
else the communication that *one* group could not hide. :func:`gap` returns both numbers. On the named length distributions (causal, 8 nodes
of 8 H100) the slowest group takes 1.00 to 1.03 of the bound with 32K tokens a rank and 1.00 to 1.14 with 8K, where single documents are so
large that keys must cross nodes, which the bound lets hide.

The token cap is never broken: a share is limited by its rank's room, and documents that fit no rank whole are cut. With equal tokens three
caps compete (exactly even, an eighth more, none), judged by the time of the longest rank, pads included.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import NOMINAL_SPEED, Cluster
from flexcp.plan.placement import Placement
from flexcp.planners.groups.group_rows import Group, stream_ranges
from flexcp.planners.groups.priced_documents import (
    CLOSE_TO_BEST,
    NEVER,
    UNLIMITED,
    PricedDocuments,
    group_times,
    least_degree,
    price_documents,
)
from flexcp.planners.request import Refused, Request, refuse_tolerances
from flexcp.planners.token_runs import equalised, row_regions, runs_of_ranges

Ints = NDArray[np.int64]


def groups(request: Request) -> Placement:
    """Place a batch in flexible groups."""
    _refuse(request)
    work = price_documents(request)
    found = _arranged(request, work)
    rank, start, stop = stream_ranges(request, work, found)
    regions = row_regions(request.batch, request.shape.heads, rank, start, stop)
    runs, pads = runs_of_ranges(rank, start, stop), 0
    if request.equal_tokens:
        runs, pads = equalised(runs, request.ranks, request.batch.tokens, request.pad_to)
    masks = len(request.batch.masks)
    return Placement(request.batch, request.ranks, pads, runs, (regions,) * masks, note=_note(found, work.bound))


def gap(request: Request) -> tuple[int, int]:
    """(time of the slowest group, lower bound of any assignment) in pairs."""
    _refuse(request)
    work = price_documents(request)
    return max(group.time for group in _arranged(request, work)), work.bound


def _refuse(request: Request) -> None:
    if request.argument:
        raise ValueError(f"groups finds its degrees itself; got 'groups:{request.argument}', drop the argument")
    if request.layout is not None:
        raise Refused("groups places tokens itself, so it cannot keep a fixed layout; use blocks, or layout='free'")
    refuse_tolerances(request)


# --- degrees ----------------------------------------------------------------------------------------------------------


def best_degrees(times: Ints, least: Ints, ranks: int, filling: int = 0) -> Ints:
    """The degrees d that minimise the slowest group, ``max_i times[i, d_i - 1]``, with ``d_i >= least_i`` and ``sum d_i <= ranks``.

    ``times`` need not fall with the degree. ``filling`` is load that may go anywhere: then tau is also at least what remains to be
    done when groups and filling share all ranks evenly (exact where more ranks never save rank time, ``d * times[d - 1]``, as in T).
    """
    if int(least.sum()) > ranks:
        raise ValueError(f"the groups need {int(least.sum())} ranks and there are {ranks}; merge some")
    degrees = np.arange(1, ranks + 1)
    allowed = np.where(degrees >= least[:, None], times, NEVER)
    falling = np.minimum.accumulate(allowed, axis=1)
    rows = np.arange(len(times))

    def smallest(tau: int) -> Ints:
        """The first degree of every group that is ready by ``tau``."""
        return np.asarray((falling > tau).sum(axis=1) + 1)

    def fits(tau: int) -> bool:
        chosen = smallest(tau)
        if int(chosen.sum()) > ranks:
            return False
        return int((chosen * times[rows, chosen - 1]).sum()) + filling <= ranks * tau

    least_times = times[rows, least - 1]
    low = max(int(falling[:, -1].max()), -(-filling // ranks))
    high = max(low, int(least_times.max()), -(-(int((least * least_times).sum()) + filling) // ranks))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return smallest(high)


def _atomic_groups(work: PricedDocuments) -> tuple[list[list[int]], list[int]]:
    """(documents that need a group of their own, documents that are filling); merged where their caps leave too much room unused."""
    own = [d for d, load in enumerate(work.load) if load > work.mean or work.tokens[d] > work.cap]
    atomic = [[d] for d in own]

    def unused(documents: list[int]) -> int:
        return least_degree(work, documents) * work.cap - sum(work.tokens[d] for d in documents)

    while sum(least_degree(work, documents) for documents in atomic) > work.ranks:
        atomic.sort(key=unused)
        atomic.append(sorted(atomic.pop() + atomic.pop()))
    chosen = set(own)
    return atomic, [d for d in range(len(work.load)) if d not in chosen]


# --- ranks ------------------------------------------------------------------------------------------------------------


def ranks_of_groups(degrees: Sequence[int], cluster: Cluster) -> list[tuple[int, ...]]:
    """The ranks of each group: largest first, in the node that it fills best; over nodes only where none has room."""
    free = [list(range(n * cluster.ranks_per_node, (n + 1) * cluster.ranks_per_node)) for n in range(cluster.nodes)]
    found: list[tuple[int, ...]] = [()] * len(degrees)
    for group in sorted(range(len(degrees)), key=lambda g: -degrees[g]):
        ranks: list[int] = []
        while len(ranks) < degrees[group]:
            missing = degrees[group] - len(ranks)
            # The tightest node that holds the rest; when none does, all of the emptiest.
            roomy = [n for n in range(cluster.nodes) if len(free[n]) >= missing]
            count = [len(ranks_left) for ranks_left in free]
            node = min(roomy, key=count.__getitem__) if roomy else count.index(max(count))
            ranks += free[node][:missing]
            free[node] = free[node][missing:]
        found[group] = tuple(sorted(ranks))
    return found


# --- documents to groups ----------------------------------------------------------------------------------------------


def _arranged(request: Request, work: PricedDocuments) -> list[Group]:
    """The groups; for equal tokens those of the cap whose longest rank is shortest."""
    if not request.equal_tokens:
        return _grouped(work)
    even = -(-work.batch.tokens // work.ranks)
    caps = sorted({min(cap, work.cap) for cap in (even, even + even // 8, UNLIMITED)})
    candidates = [_grouped(replace(work, cap=cap)) for cap in caps]
    return min(candidates, key=lambda found: _equal_tokens_time(work, found, request.pad_to))


def _equal_tokens_time(work: PricedDocuments, found: list[Group], pad_to: int) -> int:
    """Time of the slowest rank when all keep as many tokens as the one with the most."""
    most, slowest = 0, 0
    for group in found:
        cut_tokens = max(1, sum(work.tokens[d] for d in group.cut))
        cut_attention = sum(work.attention[d] for d in group.cut)
        for rank, whole, share in zip(group.ranks, group.whole, group.share, strict=True):
            most = max(most, share + sum(work.tokens[d] for d in whole))
            attention = sum(work.attention[d] for d in whole) + cut_attention * share // cut_tokens
            slowest = max(slowest, work.even(attention, [rank]) + group.exposed)
    return slowest + work.prices.linear * (-(-most // pad_to) * pad_to)


def _grouped(work: PricedDocuments) -> list[Group]:
    """Steps 1 to 6."""
    aim = work.bound + work.bound // CLOSE_TO_BEST
    atomic, filling = _atomic_groups(work)
    degrees: list[int] = []
    if atomic:
        least = np.array([least_degree(work, documents) for documents in atomic], np.int64)
        load = sum(work.load[d] for d in filling)
        degrees = best_degrees(group_times(work, atomic), least, work.ranks, load).tolist()
    ranks = ranks_of_groups(degrees, work.cluster)
    taken = {r for group in ranks for r in group}
    ranks += [(r,) for r in range(work.ranks) if r not in taken]
    atomic += [[] for _ in range(work.ranks - len(taken))]
    return _tidied(work, _merged(work, _dealt(work, ranks, atomic, filling, aim), aim), aim)


def _dealt(
    work: PricedDocuments, ranks: list[tuple[int, ...]], atomic: list[list[int]], filling: list[int], aim: int
) -> list[Group]:
    """The filling, heaviest first, to the group that would be ready first with it and has room."""
    dealt = [list(documents) for documents in atomic]
    room = [
        len(members) * work.cap - sum(work.tokens[d] for d in mine) for members, mine in zip(ranks, atomic, strict=True)
    ]
    # One heap for all groups of the same size: whatever is added, the one that is ready first comes first.
    ready: dict[int, list[tuple[int, int]]] = {}
    speed = [sum(work.speeds[r] for r in members) for members in ranks]
    for number, (members, documents) in enumerate(zip(ranks, atomic, strict=True)):
        ready.setdefault(len(members), []).append((_ready(work, members, documents, aim), number))
    for heap in ready.values():
        heapq.heapify(heap)
    homeless = []
    for document in filling:
        tokens, load = work.tokens[document], work.load[document] * NOMINAL_SPEED
        full = []
        for heap in ready.values() if work.cap < UNLIMITED else ():
            while heap and room[heap[0][1]] < tokens:
                full.append((heap, heapq.heappop(heap)))
        offers = [(heap[0][0] + load // speed[heap[0][1]], heap[0][1]) for heap in ready.values() if heap]
        if offers:
            time, number = min(offers)
            heapq.heapreplace(ready[len(ranks[number])], (time, number))
            room[number] -= tokens
            dealt[number].append(document)
        else:
            homeless.append(document)
        for heap, entry in full:
            heapq.heappush(heap, entry)
    found = [_packed(work, members, sorted(mine), aim) for members, mine in zip(ranks, dealt, strict=True)]
    for document in homeless:
        found = _housed(work, found, document, aim)
    return found


def _ready(work: PricedDocuments, ranks: tuple[int, ...], documents: list[int], aim: int) -> int:
    """When an atomic group's ranks are ready, if filling will make them ready together."""
    return work.even(sum(work.load[d] for d in documents), ranks) + _packed(work, ranks, documents, aim).exposed


def _housed(work: PricedDocuments, found: list[Group], document: int, aim: int) -> list[Group]:
    """A document that fits no rank whole goes to the groups with the most room, joined until it fits."""

    def room(group: Group) -> int:
        return len(group.ranks) * work.cap - sum(work.tokens[d] for d in group.documents)

    order = sorted(found, key=lambda group: (-room(group), group.ranks))
    count, left = 0, 0
    while left < work.tokens[document]:
        left += room(order[count])
        count += 1
    return [*order[count:], _joined(work, order[:count], aim, [document])]


def _merged(work: PricedDocuments, found: list[Group], aim: int) -> list[Group]:
    """The slowest group joined with faster ones, as long as that makes it faster and it is over the aim."""
    while True:
        slowest = max(found, key=lambda group: (group.time, group.ranks))
        if slowest.time <= aim or len(found) == 1:
            return found
        others = [group for group in found if group is not slowest]
        best, used = slowest, others[:0]
        for partners in _partners(work, slowest, others, aim):
            joined = _joined(work, [slowest, *partners], aim)
            if joined.time < best.time:
                best, used = joined, partners
            if best.time <= aim:
                break
        if best is slowest:
            best, used = _joined(work, [slowest, *others], aim), others
            if best.time >= slowest.time:
                return found
        gone = {id(slowest), *(id(group) for group in used)}
        found = [group for group in found if id(group) not in gone] + [best]


def _partners(work: PricedDocuments, slowest: Group, others: list[Group], aim: int) -> list[list[Group]]:
    """Groups that could take what the slowest has over the aim, few before many, of its own nodes before others.

    First the one with just enough time to spare (more serves someone slower), or else the most; then as few as are enough together.
    """

    def spare(group: Group) -> int:
        return (aim - group.time) * len(group.ranks)

    nodes = {work.cluster.node_of(r) for r in slowest.ranks}
    needed = -spare(slowest)
    order = sorted((g for g in others if g.time < aim), key=lambda group: (spare(group), group.ranks))
    near = [group for group in order if all(work.cluster.node_of(r) in nodes for r in group.ranks)]
    found = []
    for candidates in (near, order):
        enough = [group for group in candidates if spare(group) >= needed]
        together, total = [], 0
        for group in reversed(candidates):
            if total >= needed:
                break
            together.append(group)
            total += spare(group)
        found += [enough[:1] or candidates[-1:], together]
    return [partners for partners in found if partners]


def _joined(work: PricedDocuments, parts: list[Group], aim: int, more: Sequence[int] = ()) -> Group:
    ranks = tuple(sorted(rank for group in parts for rank in group.ranks))
    return _packed(work, ranks, sorted([*(d for group in parts for d in group.documents), *more]), aim)


def _tidied(work: PricedDocuments, found: list[Group], aim: int) -> list[Group]:
    """Ranks without a share of a cut document on their own, and the groups over nodes anew; only if that makes nobody slower."""
    parts: list[tuple[int, list[int]]] = []
    for group in found:
        sharing = [i for i, tokens in enumerate(group.share) if tokens]
        if sharing:
            parts.append((len(sharing), sorted([*group.cut, *(d for i in sharing for d in group.whole[i])])))
        parts += [(1, group.whole[i]) for i, tokens in enumerate(group.share) if not tokens]
    ranks = ranks_of_groups([degree for degree, _ in parts], work.cluster)
    known = {group.ranks: group for group in found}
    tidy = []
    for members, (_, documents) in zip(ranks, parts, strict=True):
        same = known.get(members)
        if same is None or same.documents != documents:
            same = _packed(work, members, documents, aim)
        tidy.append(same)
    return tidy if max(g.time for g in tidy) <= max(g.time for g in found) else found


# --- documents inside a group -----------------------------------------------------------------------------------------


def _packed(work: PricedDocuments, ranks: tuple[int, ...], documents: list[int], aim: int) -> Group:
    """Documents (heaviest first) whole on the rank that is ready first, if it then is ready in time; the others cut over all ranks."""
    load = sum(work.load[d] for d in documents)
    if len(ranks) == 1:
        return Group(ranks, documents, [documents], [], [0], 0, work.even(load, ranks))
    packing = _Packing(work, ranks, max(aim, work.even(load, ranks)))
    cut = [document for document in documents if not packing.place(document)]
    share = packing.fill(cut)
    keys = sum(moved[len(ranks) - 1] for moved in work.moved(cut))
    fewest_local = min(Counter(work.cluster.node_of(r) for r in ranks).values())
    moving = work.exchange(keys, len(ranks), work.key_price(len(ranks), fewest_local))
    attention = sum(work.attention[d] for d in documents)
    compute = packing.slowest(cut, share)
    time = max(compute, work.even(load - attention, ranks) + moving)
    return Group(ranks, documents, packing.whole, cut, share, time - compute, time)


class _Packing:
    """The ranks of a group while they are filled: what each has, and who is ready first."""

    def __init__(self, work: PricedDocuments, ranks: tuple[int, ...], limit: int) -> None:
        self.work, self.limit = work, limit
        self.speeds = [work.speeds[r] for r in ranks]
        self.whole: list[list[int]] = [[] for _ in ranks]
        self.loads = [0] * len(ranks)
        self.rooms = [work.cap] * len(ranks)
        self.ready = [(0, at) for at in range(len(ranks))]

    def place(self, document: int) -> bool:
        """Put the document whole on the rank that is ready first, if one has room and is ready by the limit then."""
        tokens, load = self.work.tokens[document], self.work.load[document]
        passed, found = [], False
        while self.ready and not found:
            _, at = self.ready[0]
            time = (self.loads[at] + load) * NOMINAL_SPEED // self.speeds[at]
            if tokens <= self.rooms[at] and time <= self.limit:
                self.whole[at].append(document)
                self.loads[at] += load
                self.rooms[at] -= tokens
                heapq.heapreplace(self.ready, (time, at))
                found = True
            elif tokens <= self.rooms[at] and self.speeds[at] == self.work.fastest:
                break  # the others are ready later still
            else:
                passed.append(heapq.heappop(self.ready))
        for entry in passed:
            heapq.heappush(self.ready, entry)
        return found

    def fill(self, cut: list[int]) -> list[int]:
        """Tokens of the cut documents for each rank, so that all are ready together as far as caps and whole documents allow."""
        tokens, load = sum(self.work.tokens[d] for d in cut), sum(self.work.load[d] for d in cut)
        if not cut:
            return [0] * len(self.loads)
        limits = [room * load // tokens for room in self.rooms]
        poured = _levelled(load, self.loads, limits, self.speeds)
        share = [min(amount * tokens // load, room) for amount, room in zip(poured, self.rooms, strict=True)]
        missing = tokens - sum(share)
        while missing:  # what rounding down left over
            for i, room in enumerate(self.rooms):
                given = min(missing, room - share[i], 1 + missing // len(share))
                share[i] += given
                missing -= given
        return share

    def slowest(self, cut: list[int], share: list[int]) -> int:
        """When the last rank has computed what it keeps."""
        load, tokens = sum(self.work.load[d] for d in cut), max(1, sum(self.work.tokens[d] for d in cut))
        ranks = zip(self.loads, share, self.speeds, strict=True)
        return max(-(-(whole - (-load * mine // tokens)) * NOMINAL_SPEED // speed) for whole, mine, speed in ranks)


def _levelled(amount: int, loads: list[int], limits: list[int], speeds: list[int]) -> list[int]:
    """``amount`` poured on the loads like water: ends level (by speed) wherever it is above the ground and below its limit."""
    poured = [0] * len(loads)
    active = sorted(range(len(loads)), key=lambda i: loads[i] * NOMINAL_SPEED // speeds[i])
    while amount > 0 and active:
        speed, load, count = 0, amount, 0
        for i in active:
            # Stop where the ground is higher than the water over everything before it.
            if count and loads[i] * speed >= load * speeds[i]:
                break
            speed, load, count = speed + speeds[i], load + loads[i], count + 1
        wanted = {i: load * speeds[i] // speed - loads[i] for i in active[:count]}
        full = {i for i in wanted if wanted[i] >= limits[i]}
        for i in full or wanted:
            poured[i] = min(wanted[i], limits[i])
        if not full:
            break
        amount -= sum(limits[i] for i in full)
        active = [i for i in active if i not in full]
    return poured


def _note(found: list[Group], bound: int) -> str:
    degrees = Counter(len(group.ranks) for group in found if group.documents)
    listed = ", ".join(
        f"{count} x {degree}" if count > 1 else str(degree) for degree, count in sorted(degrees.items(), reverse=True)
    )
    slowest = max(group.time for group in found)
    over = max(0, slowest * 1000 // max(1, bound) - 1000)
    return f"groups of {listed} ranks; the slowest takes {over // 10}.{over % 10} % longer than perfectly divided work would"
