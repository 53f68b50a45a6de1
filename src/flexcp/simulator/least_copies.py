"""Least copies: what packing and merging take at least, from the bytes of a prediction and without a plan.

The same prices as :mod:`flexcp.simulator.copies`, where no stage is known yet: an input is read and written at both of
its ends, a result at its sender's and, added up, once more at its receiver's, as if all results travelled in the
accumulator's dtype; a rank's own results are cleared, read and rounded. Starting the kernels is left out. Ranks do
nothing else meanwhile, so a predicted time and this are closer to what events find than the prediction alone.
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
    """Nanoseconds of each rank's copies in a step, at least."""
    copied = np.zeros(placement.ranks, np.int64)
    layers = np.repeat([mask.layers for mask in placement.batch.masks], 2).tolist()
    for number, (times, moves) in enumerate(zip(layers, found.moves, strict=True)):
        inputs = join_flows([moves.inputs, moves.relays, moves.kv_hops])
        results = join_flows([moves.dkv_hops, moves.relayed, moves.gradients, moves.outputs])
        (out, into), (back, home) = (_bytes(flows, found) for flows in (inputs, results))
        size = 2 * (out + into + back) + 3 * home
        if size.any():  # else a pass is one kernel
            final, precise = own_bytes(shape, backward=number % 2 == 1)
            size += placement.tokens * (2 * precise + final)
        copied += times * size
    return copied * 1000 // copy_mbps(found.cluster)


def _bytes(flows: Flows, found: Prediction) -> tuple[Ints, Ints]:
    """Bytes that each rank sends and receives."""
    ports = through_ports(flows, found.cluster)
    return ports.sent.sum(axis=0), ports.received.sum(axis=0)
