"""Thin ends: a small stage, a large one beside whose work nothing travels, and in the backward a small one again.

A kernel that leaves multiprocessors to transfers is slower all the time it runs, not only while they are under way; one that leaves none
nearly stops until they are done (:class:`flexcp.cost.Contention`). So transfers that are short against the work beside them cost much more
than they take, and with equal stages (:mod:`flexcp.schedule.stages`) there are some in every slot. Here they are beside little work:

    slot 0        own work, first share          | inputs 1
    slot 1        work on the small stage 1      | inputs 2 and 3
    slot 2        work on the large stage 2      |
    slot 3        work on the small stage 3      | gradients of the keys of stages 1 and 2
    slot 4        own work, second share         | gradients of the keys of stage 3, results for moved queries

The forward has no gradients, and no stage 3. How thin an end is depends on how long its transfers take against the work; shares around
that are tried, those of each rank or the same for all who wait for each other, and own work is held back in proportion to what travels at
the two ends, as much as hides the last transfers, or all but what hides the first. Of all these and of equal stages the fastest is taken,
with contention and over all ranks together, each beginning when the rest of the layer is done, if it is clearly faster.

Not where keys are relayed, which takes slots of its own, or kept for the backward, or where nothing may be posted two slots ahead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.schedule.routes import Needs
from flexcp.schedule.stages import PARTS, ExchangeTimes, Peers, Stages, slots_of, stage_work
from flexcp.schedule.work import Work

Ints = NDArray[np.int64]
SHARES = (700, 950, 1250, 1600)
"""An end's share of the inputs, per mille of what travels beside it over that and the work on all inputs."""
LEAST, MOST = PARTS // 50, PARTS // 2
"""The thinnest and the thickest end."""
WORTH_PERMILLE = 990
"""Thin ends are taken when they cut the time to this."""
NO_GAIN_PERMILLE = 1005
"""Equal stages that take no longer than this of the busiest rank's work are not worth another try."""
SLOTS = 6
"""Slots of any way to cut: a slot in front, at most four stages, one behind."""


def early_stage(stages: Stages) -> int:
    """The stage that is posted two slots ahead, 0 for none."""
    return 3 if stages.thin_ends and stages.borders.shape[1] == 4 else 0


def under_contention(
    even: Stages,
    needs: Needs,
    work: Work,
    times: ExchangeTimes,
    peers: Peers,
    cluster: Cluster,
    cost: CostModel,
    backward: bool,
    rest_of_layer: Ints,
    may_be_thin: bool = True,
) -> Stages:
    """The stages with thin ends where they may be and are clearly faster, else the equal ones; with their time under contention.

    ``rest_of_layer`` is what each rank computes before it begins: those with more tokens begin later.
    """
    if len(needs.keys.first) == 0 and len(needs.q) == 0:
        return even._replace(contended_ns=int((rest_of_layer + work.own + work.rest).max()))
    from flexcp.schedule.compiled_contention import together_ns  # compiled: who moves nothing does without Numba

    ways = [cost.rows_beside(across) for across in (False, True)]
    rows = np.array([[(*row.compute(backward), row.link) for row in way] for way in ways], np.int64)
    across = np.ones(cluster.ranks, np.int64)
    same_node = peers.source // cluster.ranks_per_node == peers.target // cluster.ranks_per_node
    across[peers.source[same_node]] = 0
    across[peers.target[same_node]] = 0
    known = (rest_of_layer, across, rows, peers.source, peers.target)
    equal_ns = int(together_ns(*_padded(*slots_of(even.number, work, times, cluster)), *known)[0])
    even = even._replace(contended_ns=equal_ns)
    well_hidden = equal_ns * 1000 <= int((rest_of_layer + work.own + work.rest).max()) * NO_GAIN_PERMILLE
    if well_hidden or not may_be_thin or len(needs.keys.relays) or len(needs.keys.first) == 0:
        return even
    tried = _tried(needs, work, times, backward)
    columns = zip(*(slots for _, slots in tried), strict=True)
    found = together_ns(*(np.concatenate(column) for column in columns), *known)
    best = int(found.argmin())
    thin = tried[best][0]._replace(ns=even.ns, contended_ns=int(found[best]))
    if int(found[best]) * 1000 > equal_ns * WORTH_PERMILLE:
        return even._replace(other=thin)
    return thin._replace(other=even)


def _tried(needs: Needs, work: Work, times: ExchangeTimes, backward: bool) -> list[tuple[Stages, tuple[Ints, Ints]]]:
    """Stages, and their (work, what travels beside it) as ``[1, slot, rank]``."""
    reads = np.zeros(len(work.own), bool)
    reads[needs.keys.first.rank] = True
    count = 3 if backward else 2
    number = np.where(reads, count, 1)
    rest, back = np.maximum(work.rest - work.at_keys, 1), times.back if backward else np.zeros_like(times.back)
    found = []
    # What the first end has besides hides as much of what travels.
    left = np.maximum(times.there - work.at_keys, 0)
    for share in SHARES:
        thin = [np.clip(share * PARTS // 1000 * ns // (rest + ns), LEAST, MOST) for ns in (left, back)]
        for ends in (thin, [np.full_like(end, end[reads].max()) for end in thin]):
            borders = np.full((len(reads), count + 1), PARTS, np.int64)
            borders[:, 0] = 0
            borders[reads, 1] = ends[0][reads]
            if backward:
                borders[reads, 2] = PARTS - ends[1][reads]
            of_stage = np.diff(borders, axis=1)
            into = times.there[:, None] * of_stage // PARTS
            out = back[:, None] * of_stage // PARTS
            first, last = into[:, 0], out[:, -1] * backward + times.home
            for held in _held(work.own, first, last):
                after = work.own * held // 1000
                slot_work, beside = np.zeros((2, 1, SLOTS, len(reads)), np.int64)
                slot_work[0, 0] = work.own - after
                slot_work[0, 1 : count + 1] = stage_work(work, number, borders).T
                slot_work[0, count + 1] += np.where(reads, after, 0)
                slot_work[0, 2] += np.where(reads, 0, after)
                beside[0, 0], beside[0, 1] = first, into[:, 1:].sum(axis=1)
                if backward:
                    beside[0, count] = out[:, :-1].sum(axis=1)
                beside[0, count + 1] = last
                found.append((Stages(number, held, number, borders, True), (slot_work, beside)))
    return found


def _held(own: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """Per mille of own work that is held back, in three ways."""
    least = np.maximum(own, 1)
    before, after = (1000 * np.minimum(own, ns + ns // 8) // least for ns in (first, last))
    return 1000 * last // np.maximum(first + last, 1), after, 1000 - before


def _padded(work: Ints, beside: Ints) -> tuple[Ints, Ints]:
    """Slots as one way to cut among others."""
    found = np.zeros((2, 1, SLOTS, work.shape[1]), np.int64)
    found[0, 0, : len(work)], found[1, 0, : len(work)] = work, beside
    return found[0], found[1]
