"""Least copies: the least time that packing and merging take, from the bytes of a prediction and without a plan.

The costs are those of :mod:`flexcp.simulator.copies`, but no stages are known yet. Inputs and results are read and
written at both ends, as if results arrived complete and were laid. More results than a rank has itself cannot be laid;
the others are only read, because several of them may be added to what is written once. A rank's own results are
cleared, and those that were not laid are read and rounded, except in forwards of a cluster whose kernels write them
once. The starts of kernels are left out. Ranks do nothing else while they copy, so a predicted time plus this time is
closer to the event simulator than the prediction alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement
from flexcp.schedule.flows import Flows, join_flows, through_ports
from flexcp.schedule.predict import Prediction
from flexcp.shape import Shape
from flexcp.simulator.copies import copy_mbps, own_bytes

Ints = NDArray[np.int64]


def least_copies_ns(found: Prediction, placement: Placement, shape: Shape) -> Ints:
    """Return the least nanoseconds that each rank spends on copies in a step, over all layers."""
    copied = np.zeros(placement.ranks, np.int64)
    layers = np.repeat([mask.layers for mask in placement.batch.masks], 2).tolist()
    for number, (times, moves) in enumerate(zip(layers, found.moves, strict=True)):
        inputs = join_flows([moves.inputs, moves.relays, moves.kv_hops])
        results = join_flows([moves.dkv_hops, moves.relayed, moves.gradients, moves.outputs])
        (out, into), (back, home) = (_bytes(flows, found) for flows in (inputs, results))
        backward = number % 2 == 1
        final, precise = own_bytes(shape, backward)
        laid = np.minimum(home, placement.tokens * final)
        size = 2 * (out + into + back) + home + laid
        copies_own = backward or not found.cluster.writes_results_once
        if size.any() and copies_own:  # a pass in which nothing moves is a single kernel without copies
            rounded = placement.tokens * (precise + final) - laid * (precise + final) // final
            size += placement.tokens * precise + rounded
        copied += times * size
    return copied * 1000 // copy_mbps(found.cluster)


def _bytes(flows: Flows, found: Prediction) -> tuple[Ints, Ints]:
    """Return (bytes sent, bytes received) of each rank, inside and across nodes together."""
    ports = through_ports(flows, found.cluster)
    return ports.sent.sum(axis=0), ports.received.sum(axis=0)
