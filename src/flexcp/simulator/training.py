"""Simulation of a plan: attention alone, or a whole training step.

*Attention alone* is one forward and one backward pass for each mask. All ranks start each pass together; its time is
the time of the slowest rank, summed over the layers of every mask.

A *step* runs through the layers: attention and the rest of each layer forward, then both backward, beginning with the
last layer. Between layers, ranks wait for each other only for messages and for the gradient sync:

- ``fsdp``: the weights of a layer are gathered before it runs, forward and backward, and its gradients are
  reduce-scattered. The gather of the next layer is posted when a rank begins this one and needs all ranks, so no rank
  can be a whole layer ahead.
- ``allreduce``: the gradients of a layer are reduced while earlier layers run backward; no rank waits for them before
  the end of the step.

A collective is hidden by the compute of its layer, up to ``overlap_permille`` of that time. What is not hidden is
exposed, as are the collectives before the first and after the last layer, such as those of embedding and head. It is
not modelled that collectives and attention's messages compete for ports. With tensor parallelism, the rest of a layer
includes its collectives inside the node. The projection to the vocabulary comes last. A
:class:`~flexcp.simulator.step_parts.Training` says which of these parts a step has.

All layers under one mask are alike, so two of them are simulated. For each of the others, ranks that are connected by
messages take the same time: the time from the last begin to the last end among them in the second layer, but at least
the busy time of the busiest. Every nanosecond of a rank is counted in one of four parts (attention, waits, the
rest of each layer, sync), so the parts of a step add up to its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexcp.cost import PEAK_PERMILLE, CostModel
from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.simulator.bounds import Bounds, pass_bounds
from flexcp.simulator.passes import Event, Pass, PassModel, Rules, pass_model, run_pass
from flexcp.simulator.slot_work import MaskWork
from flexcp.simulator.step_parts import Training, collective_ns, sync_at_the_ends_ns, tensor_parallel_ns

Ints = NDArray[np.int64]
Models = Sequence[tuple[PassModel, PassModel]]
"""The models of the forward and the backward pass of every mask."""
ATTENTION, WAIT, LINEAR, SYNC = range(4)
"""The parts of a step's time, as :class:`StepTime` names them: rows of ``StepTime.ranks``."""
SIMULATED_LAYERS = 2
"""Of the layers under each mask, this many are simulated in each direction; the others are extrapolated."""


@dataclass(frozen=True, eq=False)
class StepTime:
    """The time of a whole step in nanoseconds, and what the slowest rank spends it on.

    ``attention_ns``, ``wait_ns`` (waiting for others), ``linear_ns`` (the rest of each layer: projections,
    feed-forward) and ``sync_ns`` (exposed sync) of the slowest rank add up to ``total_ns``. ``ranks[part, rank]`` are
    the same four parts of every rank; they add up to the time at which that rank is done.
    """

    total_ns: int
    attention_ns: int
    wait_ns: int
    linear_ns: int
    sync_ns: int
    ranks: Ints


@dataclass(frozen=True, eq=False)
class Simulation:
    """A plan on simulated time.

    ``passes[mask]`` are (forward, backward) of one layer, with all ranks starting together. ``step`` is the time of a
    whole training step, if one was simulated.
    """

    plan: Plan
    cost: CostModel
    rules: Rules
    passes: tuple[tuple[Pass, Pass], ...]
    step: StepTime | None = field(default=None)

    def pass_ns(self, backward: bool) -> int:
        """Return the nanoseconds of attention in one direction over all layers, by the slowest rank of each pass."""
        masks = self.plan.batch.masks
        return sum(m.layers * int(p[backward].done.max()) for m, p in zip(masks, self.passes, strict=True))

    @property
    def attention_ns(self) -> int:
        """The nanoseconds of attention, forward and backward, over all layers."""
        return self.pass_ns(False) + self.pass_ns(True)

    def bounds(self, backward: bool) -> Bounds:
        """Return the lower bounds on the nanoseconds of attention in one direction over all layers."""
        found = [self._bounds[m][backward] for m in range(len(self.passes))]
        layers = [m.layers for m in self.plan.batch.masks]
        return Bounds(
            *(sum(n * getattr(b, f) for n, b in zip(layers, found, strict=True)) for f in Bounds.__annotations__)
        )

    @cached_property
    def _bounds(self) -> list[tuple[Bounds, Bounds]]:
        """The bounds of one layer of each mask, (forward, backward)."""
        plan = self.plan
        way = [(plan.batch, m, plan.shape, plan.cluster, self.cost) for m in range(len(self.passes))]
        return [(pass_bounds(*w, False), pass_bounds(*w, True)) for w in way]

    @property
    def optimality(self) -> float:
        """The time of attention divided by its lower bound; 1.0 is perfect."""
        return self.attention_ns / (self.bounds(False).floor + self.bounds(True).floor)

    def pass_optimality(self, backward: bool) -> float:
        """Return the time of attention in one direction divided by its lower bound; 1.0 is perfect."""
        return self.pass_ns(backward) / self.bounds(backward).floor

    def mfu(self, backward: bool | None = None) -> float:
        """Return the share of the ranks' nominal peak that the useful FLOPs of attention reach in its time.

        ``backward`` chooses one direction; None means both.
        """
        shape, cluster = self.plan.shape, self.plan.cluster
        ways = (False, True) if backward is None else (backward,)
        flops = 0
        for mask, work in zip(self.plan.batch.masks, self._useful, strict=True):
            flops += mask.layers * work * (shape.head_dim + shape.v_head_dim) * sum(5 if way else 2 for way in ways)
        ns = sum(self.pass_ns(way) for way in ways)
        return flops / (cluster.ranks * cluster.gflops * PEAK_PERMILLE[shape.dtype] / 1000 * max(ns, 1))

    def tflops(self, backward: bool) -> float:
        """Return the useful TFLOP/s per rank in one direction."""
        return self.mfu(backward) * self.plan.cluster.gflops * PEAK_PERMILLE[self.plan.shape.dtype] / 1e6

    @cached_property
    def _useful(self) -> list[int]:
        """The (query, key) pairs x query heads of each mask in one layer."""
        return [int(self.plan.work(m).sum()) for m in range(len(self.passes))]

    @property
    def exposed_ns(self) -> int:
        """How many nanoseconds of :attr:`attention_ns` the slowest rank of each pass spent waiting."""
        return sum(
            mask.layers * int(p.wait_ns[p.done.argmax()])
            for mask, pair in zip(self.plan.batch.masks, self.passes, strict=True)
            for p in pair
        )

    def events(self) -> list[Event]:
        """Return the timeline of one layer of each mask: the forward of every mask, then the backward of every mask.

        Each pass begins when the slowest rank has finished the pass before.
        """
        found: list[Event] = []
        at = 0
        for backward in (False, True):
            for pair in self.passes:
                one = pair[backward]
                found += [e._replace(begin=e.begin + at, end=e.end + at) for e in one.events()]
                at += int(one.done.max())
        return found


def simulate(
    plan: Plan,
    cost: CostModel | None = None,
    rules: Rules = Rules(),
    training: Training | None = None,
    measured: Callable[[int, bool], Ints] | None = None,
    models: Models | None = None,
) -> Simulation:
    """Run a plan on simulated time.

    ``cost`` replaces the plan's cost model. ``measured(mask, backward)`` returns measured nanoseconds ``[rank, slot]``,
    which replace the modelled compute. With ``training``, a whole training step is simulated as well. ``models`` are
    those of the plan under the same cost and rules (:func:`pass_models`), if they are known.
    """
    cost = plan.cost if cost is None else cost
    zero = np.zeros(plan.ranks, np.int64)
    if models is None:
        models = [_measured_models(plan, m, cost, rules, measured) for m in range(len(plan.programs))]
    passes = tuple((run_pass(forward, zero), run_pass(backward, zero)) for forward, backward in models)
    step = None if training is None else _whole_step(plan, cost, models, training)
    return Simulation(plan, cost, rules, passes, step)


def simulated_step(
    plan: Plan,
    training: Training,
    models: Models | None = None,
) -> StepTime:
    """Return the time of a whole training step, without the separate passes that :func:`simulate` runs as well.

    ``models`` are those of the plan (:func:`pass_models`), if they are known.
    """
    return _whole_step(plan, plan.cost, pass_models(plan) if models is None else models, training)


def pass_models(
    plan: Plan,
    like: Plan | None = None,
    known: Models = (),
) -> Models:
    """Return the models of the forward and the backward pass of every mask.

    ``known`` are the models of ``like``, another plan of the same placement and cost. Passes that are the same in
    both plans are not modelled again.
    """
    found = []
    for mask, pair in enumerate(plan.programs):
        shared = MaskWork(plan, mask)
        same = [False, False] if like is None else [a is b for a, b in zip(pair, like.programs[mask], strict=True)]
        # If keys are kept, the backward reads them from what its forward received.
        same[True] = same[True] and (same[False] or not pair[True].keys_kept)
        forward, backward = (
            known[mask][way] if same[way] else pass_model(plan, mask, way, plan.cost, Rules(), None, shared)
            for way in (False, True)
        )
        found.append((forward, backward))
    return found


def _measured_models(
    plan: Plan, mask: int, cost: CostModel, rules: Rules, measured: Callable[[int, bool], Ints] | None
) -> tuple[PassModel, PassModel]:
    """Return the models of the forward and the backward pass of a mask, with measured compute if there is any."""
    shared = MaskWork(plan, mask)
    ways = ((way, None if measured is None else measured(mask, way)) for way in (False, True))
    forward, backward = (pass_model(plan, mask, way, cost, rules, ns, shared) for way, ns in ways)
    return forward, backward


# --- a whole step -----------------------------------------------------------------------------------------------------


def _whole_step(plan: Plan, cost: CostModel, models: Models, training: Training) -> StepTime:
    """Return the time of a step, layer after layer; the first two layers under each mask are simulated.

    ``models[mask]`` are the models of the forward and the backward pass.
    """
    tokens, shape, cluster = plan.placement.tokens, plan.shape, plan.cluster
    linear = cost.linear_ns(tokens, shape, cluster)
    inside = tensor_parallel_ns(tokens, shape, cluster, cost, training)
    forward = linear // 3 + inside // 2
    ways = ((False, forward), (True, linear + inside - forward))
    # Attention, waits, the rest of each layer and sync of each rank so far; their sum is when the rank can begin the
    # next layer.
    spent = np.zeros((4, plan.ranks), np.int64)
    spent[SYNC] += sync_at_the_ends_ns(cluster, cost, training)
    for backward, rest in ways:
        for model, mask, programs in zip(models, plan.batch.masks, plan.programs, strict=True):
            simulated = min(mask.layers, SIMULATED_LAYERS)
            for _ in range(simulated):
                begin = spent.sum(axis=0)
                first = begin.min()  # passes do not depend on when they begin, and the clock of events has few bits
                ran = run_pass(model[backward], begin - first)
                exposed = _exposed_ns(plan, cost, training, backward, first + ran.done + rest - begin)
                layer = np.stack(np.broadcast_arrays(ran.compute_ns, ran.wait_ns, rest, exposed))
                spent += layer
                spent += _late_weights_ns(plan, cost, training, int(begin.max()), spent.sum(axis=0))
            if more := mask.layers - simulated:
                busy = layer.sum(axis=0) - layer[WAIT]
                groups = _reached_by_messages(programs[backward].transfers, plan.ranks)
                took = _layer_ns(groups, begin, begin + layer.sum(axis=0), busy)
                layer[WAIT] = took - busy
                spent += more * layer
                last_begin = int(begin.max()) + more * int(took.max())
                spent += _late_weights_ns(plan, cost, training, last_begin, spent.sum(axis=0))
    spent[LINEAR] += cost.vocabulary_ns(tokens, training.model.head_flops_per_token, shape, cluster)
    done = spent.sum(axis=0)
    attention, wait, other, sync = (int(part) for part in spent[:, done.argmax()])
    return StepTime(int(done.max()), attention, wait, other, sync, spent)


def _reached_by_messages(transfers: Transfers, ranks: int) -> Ints:
    """Return for each rank the lowest rank that messages connect it with, directly or through others."""
    lowest = np.arange(ranks, dtype=np.int64)
    ends = np.concatenate([transfers.source, transfers.target])
    while True:
        found = lowest.copy()
        np.minimum.at(found, ends, np.tile(np.minimum(lowest[transfers.source], lowest[transfers.target]), 2))
        found = found[found]
        if (found == lowest).all():
            return lowest
        lowest = found


def _layer_ns(groups: Ints, begin: Ints, end: Ints, busy: Ints) -> Ints:
    """Return the nanoseconds that each rank takes per layer once ranks that exchange messages keep the same pace.

    Ranks with the same number in ``groups`` are connected by messages; ``begin``, ``end`` and ``busy`` are the times of
    each rank in a simulated layer.
    """

    def largest(values: Ints) -> Ints:
        found = np.zeros_like(values)
        np.maximum.at(found, groups, values)
        return found[groups]

    return np.asarray(np.maximum(largest(end) - largest(begin), largest(busy)))


def _late_weights_ns(plan: Plan, cost: CostModel, training: Training, last_begin: int, ready: Ints) -> Ints:
    """Return how long each rank waits for the weights of the next layer, ``[part, rank]``, in nanoseconds.

    The parts are those of :class:`StepTime`; without ``fsdp`` all are 0. The weights arrive when the last rank has
    begun this layer (``last_begin``) and the collective has run; ``ready[rank]`` is when a rank needs them. The wait
    counts as sync up to the time of the collective, beyond that as waiting for the last rank.
    """
    found = np.zeros((4, plan.ranks), np.int64)
    if training.sync == "fsdp":
        collective = collective_ns(plan.cluster, cost, training.model.layer_parameters)
        late = np.maximum(last_begin + collective - ready, 0)
        found[SYNC] = np.minimum(late, collective)
        found[WAIT] = late - found[SYNC]
    return found


def _exposed_ns(plan: Plan, cost: CostModel, training: Training, backward: bool, layer_ns: Ints) -> Ints:
    """Return the nanoseconds of a layer's collectives that its own time ``layer_ns`` does not hide, for each rank."""
    if training.sync == "none":
        return np.zeros(plan.ranks, np.int64)
    # An all-reduce is a reduce-scatter and an all-gather, and is needed for gradients only.
    times = 2 * backward if training.sync == "allreduce" else 1 + backward
    hidden = layer_ns * training.overlap_permille // 1000
    return np.maximum(times * collective_ns(plan.cluster, cost, training.model.layer_parameters) - hidden, 0)
