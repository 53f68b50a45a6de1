"""Stages: how a rank's inputs are cut into parts that travel one after the other, and which work hides them.

With s stages, a rank does the following. Inputs of the next stage and results of the last one travel during the work
beside them:

    slot 0        its own work, first share        | inputs 1
    slot 1        work that inputs 1 made possible | inputs 2
    slot 2 .. s   likewise                         | inputs 3 .. s, gradients of the keys of stage 1 .. s - 1
    slot s + 1    its own work, second share       | gradients of the last keys, results for moved queries

The own work is divided between the two ends in proportion to what travels there. More stages hide more but start more
kernels and messages: each rank takes the number that would be fastest for it alone. The parts are of equal size, since
the own work at the ends evens out differences.

But a rank sends a stage only when it has begun the slot before, so a rank that waits makes others wait, once per stage.
Time is therefore also computed over all ranks together, slot by slot, and the number of stages of all ranks is limited
if fewer stages are clearly faster that way. (A backward whose keys were kept is still computed rank by rank.)

If the keys of the forward are kept for the backward, only moved queries travel in the backward. It works on the same
parts, each one slot earlier, and the gradients follow. All own work is then at the end, unless queries arrive.

A planner may wish for stages of its own (:class:`flexcp.plan.placement.Divisions`); then only the share of own work is
chosen here. What is relayed inside a node (:mod:`flexcp.schedule.routes`) arrives one stage later, and its gradients
take one stage more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.distinct import distinct
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.placement import Placement
from flexcp.schedule.flows import Moves, exchange_ns, join_flows
from flexcp.schedule.routes import Needs
from flexcp.schedule.work import Work

Ints = NDArray[np.int64]
MOST_STAGES = 4
"""The largest number of stages."""
PARTS = 1200
"""Borders of stages are counted in this many parts of all inputs; it is divisible by every number of stages."""
WORTH_PERMILLE = 990
"""One more stage is used if the rank's time becomes less than this, per mille of its time with fewer stages."""
TOGETHER_PERMILLE = 1060
"""How close to the fastest a limit on the number of stages must come: at most this, per mille of the fastest time.

Of the limits that come so close, the largest is used, because the time over all ranks together is not exact either.
"""
MANY_PEERS = 8192
"""With more pairs of ranks that exchange messages than this, fewer ways to cut are tried, because each takes time."""
UNSURE_PERMILLE = 1020
"""A way to cut that was not chosen is worth simulating if its time is at most this, per mille of the chosen one's."""


class Stages(NamedTuple):
    """The stages of each rank: how many (``number``), their borders, and predicted times in nanoseconds.

    A stage is a part of a rank's inputs that travels while the rank works on the part before. Stage s (from 1) is what
    lies between ``borders[rank, s - 1]`` and ``borders[rank, s]``, in parts of ``PARTS``. ``held`` is how much of its
    own work a rank holds back until after the stages, per mille. ``thin_ends`` says that the stages are cut as in
    :mod:`flexcp.schedule.thin_ends`, and ``inputs_first`` that all inputs are posted before any work
    (:mod:`flexcp.schedule.inputs_first`). ``across_borders`` are the borders of what crosses nodes, in parts of
    ``PARTS``, if the first stage brings everything from the same node (:mod:`flexcp.schedule.inside_first`); otherwise
    there are none. ``ns`` is the time of each rank, and ``contended_ns`` how long a layer takes under contention
    (transfers slow down the work beside them), 0 if it was not computed. ``others`` are the ways to cut that were
    considered and not chosen, each in its best form.
    """

    number: Ints
    held: Ints
    ns: Ints
    borders: Ints
    thin_ends: bool = False
    inputs_first: bool = False
    across_borders: tuple[int, ...] = ()
    contended_ns: int = 0
    others: tuple[Stages, ...] = ()

    @property
    def inside_first(self) -> bool:
        """Whether the first stage brings everything from the same node, and the others bring what crosses nodes."""
        return bool(self.across_borders)


def faster_way(stages: Stages, another: Stages, up_to_permille: int = 1000) -> Stages:
    """Return whichever of two ways to cut is faster under contention, with the ways that were not chosen in ``others``.

    ``another`` is chosen if its time is at most ``up_to_permille`` of that of ``stages``, and gets its ``ns``.
    """
    ways = [way._replace(ns=stages.ns, others=()) for way in (another, *another.others)]
    if another.contended_ns * 1000 <= stages.contended_ns * up_to_permille:
        return ways[0]._replace(others=(*ways[1:], stages._replace(others=()), *stages.others))
    return stages._replace(others=(*ways, *stages.others))


def worth_simulating(stages: Stages) -> Stages | None:
    """Return the fastest of ``stages.others`` if the event simulator might find it faster than ``stages``, or None.

    Ways to cut with exactly the predicted time of ``stages`` are left out, because they are most often the same.
    """
    others = (way for way in stages.others if way.contended_ns != stages.contended_ns)
    other = min(others, key=lambda way: way.contended_ns, default=None)
    return other if other and other.contended_ns * 1000 <= stages.contended_ns * UNSURE_PERMILLE else None


class Peers(NamedTuple):
    """Pairs of ranks that exchange messages: ``source`` sends to ``target``.

    ``crosses`` is 1 if they are in different nodes, else 0. Pairs are sorted by target, then by ``crosses``; those of
    rank r as target begin at ``senders[2 * r]``, and those of them that cross nodes at ``senders[2 * r + 1]``.
    """

    source: Ints
    target: Ints
    crosses: Ints
    senders: Ints


class ExchangeTimes(NamedTuple):
    """Nanoseconds of each rank for the exchanges of a pass.

    ``there`` is the time of all inputs and ``relays`` of the relayed part of them; ``back`` of all gradients of keys
    and ``relayed`` of the relayed part of them; ``home`` of the results for moved queries.
    """

    there: Ints
    relays: Ints
    back: Ints
    relayed: Ints
    home: Ints


def exchange_times(moves: Moves, cluster: Cluster, cost: CostModel) -> ExchangeTimes:
    """Return how many nanoseconds each exchange of a pass takes each rank."""
    exchanges = (
        join_flows([moves.inputs, moves.relays]),
        moves.relays,
        join_flows([moves.gradients, moves.relayed]),
        moves.relayed,
        moves.outputs,
    )
    return ExchangeTimes(*(exchange_ns(flows, cluster, cost) for flows in exchanges))


def choose_stages(
    placement: Placement,
    needs: Needs,
    work: Work,
    times: ExchangeTimes,
    peers: Peers,
    cluster: Cluster,
    kept: Stages | None = None,
) -> Stages:
    """Return how many stages each rank's inputs are cut into in one pass, with predicted times.

    Each rank gets the number that is fastest for it alone, or fewer where these are clearly faster for all ranks
    together. There are three exceptions. If the planner prescribes stages (``placement.wishes.divisions``), their
    number is used. With ``placement.assemble_own`` there is one stage. In a backward whose keys are kept, ``kept`` are
    the stages of the forward, and their number is used again. Times assume stages of equal size. ``work`` is in
    nanoseconds, ``times`` are those of the pass, and ``peers`` are the ranks that exchange messages.
    """
    if kept is not None:
        return _timed_kept(kept.number, work, times, cluster)
    number = np.ones(placement.ranks, np.int64)
    if placement.assemble_own:
        # All work waits for the one stage in which tokens are put in order.
        ns = work.own + work.rest + times.there + times.back + times.home
        return Stages(number, np.zeros_like(number), ns, equal_borders(number))
    if not len(needs.keys.direct.rank) and not np.any(times):
        return Stages(number, np.zeros_like(number), work.own + work.rest, equal_borders(number))
    from flexcp.schedule import compiled_stages as loops  # compiled: Numba is not needed if nothing moves

    known = (*_tables(work, times), cluster.latency_ns)
    if placement.wishes.divisions is not None:
        number[needs.keys.direct.rank] = placement.wishes.divisions.stage.max(axis=1)[needs.keys.direct.rank]
        parts = loops.divided(number, *known)
        ns = loops.together_ns(parts, peers.source, peers.senders)
        return Stages(number, parts[loops.HELD], ns, equal_borders(number))
    # More stages help only ranks that read keys and wait for something.
    reads = np.zeros(placement.ranks, bool)
    reads[needs.keys.direct.rank] = True
    number = loops.best_alone(reads, *known, MOST_STAGES, WORTH_PERMILLE)
    parts, ns = loops.capped(number, *known, peers.source, peers.senders, TOGETHER_PERMILLE)
    return Stages(parts[loops.NUMBER], parts[loops.HELD], ns, equal_borders(parts[loops.NUMBER]))


def equal_borders(number: Ints) -> Ints:
    """Return the borders of equal stages, ``[rank, border]`` in ``PARTS``: a rank with 2 stages has ``0, 600, 1200``.

    Ranks with fewer stages than the most repeat 1200.
    """
    found: Ints = np.minimum(np.arange(int(number.max()) + 1) * PARTS // number[:, None], PARTS)
    return found


def stage_work(work: Work, number: Ints, borders: Ints) -> Ints:
    """Return ``[rank, stage]``: the work on the keys of each stage, in the unit of ``work``.

    The first stage also has the work on own keys for which only queries arrive.
    """
    rest = work.rest + (number - 1) * work.again - work.at_keys
    found: Ints = -(-rest[:, None] * np.diff(borders, axis=1) // PARTS)
    found[:, 0] += work.at_keys
    return found


def slots_of(number: Ints, work: Work, times: ExchangeTimes, cluster: Cluster) -> tuple[Ints, Ints]:
    """Return (work, transfers beside it) of equal stages, both ``[slot, rank]`` in nanoseconds.

    Slot 0 has own work, slot s the work of stage s, and the slot after a rank's last stage its held-back own work.
    """
    from flexcp.schedule import compiled_stages as loops  # compiled: Numba is not needed if nothing moves

    works, beside = loops.slots(loops.divided(number, *_tables(work, times), cluster.latency_ns))
    of_stages = stage_work(work, number, equal_borders(number)).T
    inside = np.arange(1, len(of_stages) + 1)[:, None] <= number
    works[1:-1] = np.where(inside, of_stages, works[1:-1])
    return works, beside


def _tables(work: Work, times: ExchangeTimes) -> tuple[Ints, Ints]:
    """Return work and times as the tables that the compiled loops read."""
    return np.stack([work.own, work.rest, work.again]), np.stack(times)


def find_peers(moves: Moves, cluster: Cluster) -> Peers:
    """Return which rank sends to which in a pass, each pair once."""
    flows = join_flows([moves.inputs, moves.relays, moves.gradients, moves.relayed, moves.outputs])
    ranks, size = cluster.ranks, cluster.ranks_per_node
    moved = flows.source != flows.target
    source, target = flows.source[moved], flows.target[moved]
    pairs = distinct((2 * target + (source // size != target // size)) * ranks + source, 2 * ranks * ranks)
    to, source = pairs // ranks, pairs % ranks
    return Peers(source, to // 2, to % 2, np.searchsorted(to, np.arange(2 * ranks + 1)).astype(np.int64))


def _timed_kept(number: Ints, work: Work, times: ExchangeTimes, cluster: Cluster) -> Stages:
    """Return the stages of a backward whose keys are kept, with their time.

    Only queries arrive, and gradients leave one slot after the work on their part.
    """
    start = cluster.latency_ns * (number > 1)
    out, returned = (-(-ns // number) + start * (ns > 0) for ns in (times.back, times.relayed))
    each = -(-(work.rest + (number - 1) * work.again) // number)
    last = out + returned + times.home - cluster.latency_ns * ((out > 0) & (times.home > 0))  # both in one exchange
    held = 1000 * last // np.maximum(times.there + last, 1)
    second = work.own * held // 1000
    waits = times.there > 0  # work on moved queries begins a slot later
    ns = np.maximum(work.own - second + np.where(waits, 0, each), times.there)
    slots = np.where(waits, number, number - 1)
    ns += np.where(slots > 0, np.where(waits, each, np.maximum(each, out)), 0)
    ns += np.maximum(slots - 1, 0) * np.maximum(each, out)
    return Stages(number, held, ns + np.maximum(second, last), equal_borders(number))
