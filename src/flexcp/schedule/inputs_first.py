"""Inputs first: a way to run a pass in which ranks post all inputs before they compute anything.

Usually a rank posts a stage when it begins the slot before. A rank that computes for long in a slot, or waits there,
then makes all ranks wait that it sends to. Here everything that owners send is posted in slot 0, in several stages.
These travel one after the other, whatever ranks compute meanwhile. Results cannot be posted before they are computed,
so gradients have stages of their own after those of the inputs:

    slot 0        own work, first share            | all inputs, stage by stage
    slot 1        work on what came from the node  | inputs that are still missing
    slot 2 .. n   work on one part                 | inputs that are still missing, gradients of earlier parts
    slot n + 1    own work, second share           | gradients of the last part and of the node, results for queries
    slots after   nothing                          | gradients that are still missing

As in :mod:`flexcp.schedule.inside_first`, the first stage brings everything from the same node and the other stages
bring parts of what crosses nodes; if everything crosses nodes, there are only such parts. More parts are worth it than
there, because a further one makes nobody wait.

All messages of the inputs need memory at the same time, so this is only used if stages may be posted two slots ahead.
The number of parts, their sizes and the share of own work that is held back are chosen for the least time under
contention over all ranks together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.program import Program
from flexcp.schedule.execution import Posting
from flexcp.schedule.inside_first import NodeTimes, borders_table, cut_in_parts, fastest
from flexcp.schedule.stages import MANY_PEERS, Peers, Stages
from flexcp.schedule.thin_ends import contention_table
from flexcp.schedule.work import Work

Ints = NDArray[np.int64]
CUTS = ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (3, 1.5), (4, 1.5), (6, 1.5), (2, 2), (3, 2))
"""The ways that are tried to cut keys that cross nodes: how many parts, and how many times as large as the next smaller
part a part is.
"""
BEST = 2
"""How many of these ways are compared exactly, and kept."""
FEW_CUTS, BEST_OF_FEW = ((1, 1), (3, 1), (6, 1), (3, 2)), 1
"""The same if there are many pairs of ranks that exchange messages, because each way takes time."""


def inputs_first(
    times: NodeTimes, work: Work, peers: Peers, cluster: Cluster, cost: CostModel, backward: bool, rest_of_layer: Ints
) -> Stages:
    """Return the fastest stages whose inputs are all posted in slot 0.

    ``work`` is in nanoseconds. ``rest_of_layer`` is how many nanoseconds each rank computes before its attention
    begins. ``contended_ns`` of the result is its time under contention, and its ``others`` are the next best ways to
    cut keys that cross nodes. Its ``ns`` has no meaning; :func:`flexcp.schedule.stages.faster_way` sets it.
    """
    from flexcp.schedule.compiled_inputs_first import inputs_first_ns

    near, again, inside, there, back, home = times
    rest = work.rest - work.at_keys
    cuts, best = (CUTS, BEST) if len(peers.source) <= MANY_PEERS else (FEW_CUTS, BEST_OF_FEW)
    ways = [cut_in_parts(count, ratio, backward) for count, ratio in cuts]
    asked = (borders_table(ways), inside, cluster.latency_ns, best)
    known = (rest_of_layer, contention_table(cost, backward), peers.source, peers.senders)
    found, held = inputs_first_ns(work.own, rest, near, again, work.at_keys, there, back, home, *asked, *known)
    chosen = fastest(times, ways, found, held, best)
    others = tuple(other._replace(inputs_first=True) for other in chosen.others)
    return chosen._replace(inputs_first=True, others=others)


def stage_home(stages: Stages, slot: Ints, backward: bool) -> Ints:
    """Return the stage in which results leave that are complete after ``slot``.

    Gradients of parts that cross nodes leave in the slot after the work on them. Everything else leaves after all work.
    """
    last = int(stages.number.max())
    if not backward:
        return np.full_like(slot, last + 2)
    first, begin = _first_gradients(stages)
    return begin + np.where(slot < first, last, slot) - first


def posting(stages: Stages, program: Program, backward: bool) -> Posting:
    """Return when the stages of a program are posted: inputs in slot 0, results one slot after the work on them."""
    number = np.arange(program.stages)
    inputs = number <= int(stages.number.max())
    first, begin = _first_gradients(stages)
    ahead = np.where(inputs, number, begin - first - 1 if backward else 1)
    return Posting(ahead, np.where(inputs, np.maximum(number - 1, 0), number - ahead))


def _first_gradients(stages: Stages) -> tuple[int, int]:
    """Return (the first slot with keys that cross nodes, the stage in which their gradients leave).

    Their stage comes after the slot of own work that is held back, so that this work does not wait for them.
    """
    return 2 if stages.inside_first else 1, int(stages.number.max()) + 2
