"""Copies: what a rank's memory does around its kernels, in nanoseconds of every stage.

Before a stage is posted the rank *packs* what it sends into messages. When the stage has come it *takes in* what it
received: inputs are laid on their shelves, results that others computed are merged into the rows they belong to, and
rooms for results of its own on the new shelves are cleared. The rank computes nothing meanwhile, and what it packs
leaves only then. So a piece is read and written at both of its ends. A rank's own results are cleared before it begins
and rounded when it has ended. The price is bytes over the speed of memory:

    what                        bytes
    ==========================  ==============================================================
    pack an input               read as it lies and written as it travels: twice the piece
    pack a result               read in the accumulator's dtype, written as it travels
    take in an input            twice the piece
    take in a result            read as it came; read and written in the accumulator's dtype
    a rank's own piece          taken in from its own shelf, where a plan moves it there
    results of a new shelf      written once, in the accumulator's dtype
    a rank's own results        the same in the first slot; in the last one read so, and written in the model's dtype
    ==========================  ==============================================================

Each launch costs the start of a kernel besides: one packs a stage, one lays its inputs, and one takes in the results of
a message, because results must be summed in a fixed order. Programs of one stage are an attention kernel and nothing
else. What attention itself reads and writes is in its price.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import Cluster
from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.plan.slots import pass_inputs
from flexcp.shape import IS_OUTPUT, Kind, Shape

Ints = NDArray[np.int64]
COPY_PERMILLE = 800
"""Of a memory's nominal speed. Measured on an H200 (4,800 GB/s): 3,740 to 3,930 GB/s, read and written together, for
pieces of 16,384 tokens packed, laid and added (benchmarks/packing_gpu.py, docs/results/communication.md).
"""


class Copies(NamedTuple):
    """``[rank, stage]`` nanoseconds: what is packed to be posted, what is done when the stage has come."""

    pack: Ints
    take_in: Ints


def find_copies(
    plan: Plan,
    mask: int,
    backward: bool,
    mbps: int,
    launch_ns: int,
    messages_only: bool = False,
    inputs: Transfers | None = None,
) -> Copies:
    """The copies of a pass through memory that reads or writes so many megabytes a second,
    and what starting each takes.

    ``messages_only``: nothing but messages is copied, as they travel, in one launch at either end. ``inputs`` are the
    pass's, where they are at hand.
    """
    from flexcp.simulator.compiled_copies import sum_copies  # compiled: only who simulates loads Numba

    program, shape, ranks = plan.programs[mask][backward], plan.shape, plan.ranks
    t, stages = program.transfers, program.stages
    if messages_only:
        both = 2 * t.bytes(shape)
        pack, take_in = (_summed(rank * stages + t.stage, both, (ranks, stages)) for rank in (t.source, t.target))
        return Copies(_ns(pack, mbps, launch_ns * (pack > 0)), _ns(take_in, mbps, launch_ns * (take_in > 0)))
    kinds = np.column_stack([shape.bytes_per_token_head(), _precise_bytes(shape), IS_OUTPUT])
    columns = (getattr(t, name) for name in t.names())
    pack, take_in, launches = sum_copies(*columns, kinds, np.array([ranks, stages]))
    inputs = pass_inputs(plan, mask, backward) if inputs is None else inputs
    take_in += _cleared(inputs, ranks, stages, backward, shape)
    if stages > 1:
        final, precise = own_bytes(shape, backward)
        take_in[:, 0] += plan.placement.tokens * precise
        take_in[:, -1] += plan.placement.tokens * (precise + final)
    return Copies(_ns(pack, mbps, launch_ns * (pack > 0)), _ns(take_in, mbps, launch_ns * launches))


def copy_mbps(cluster: Cluster) -> int:
    """Megabytes a second that copies read and write together on a rank of the cluster."""
    return max(1, cluster.memory_mbps * COPY_PERMILLE // 1000)


def _cleared(inputs: Transfers, ranks: int, stages: int, backward: bool, shape: Shape) -> Ints:
    """Bytes of the results on shelves whose inputs come in a stage; those of keys are there in the backward alone."""
    each = np.zeros(len(Kind), np.int64)
    precise = _precise_bytes(shape)
    each[Kind.Q] = precise[Kind.DQ] if backward else precise[Kind.O]
    each[Kind.KV] = precise[Kind.DKV] * backward
    size = (inputs.stop - inputs.start) * (inputs.h1 - inputs.h0) * each[inputs.kind]
    return _summed(inputs.target * stages + inputs.stage, size, (ranks, stages))


def own_bytes(shape: Shape, backward: bool) -> tuple[int, int]:
    """Bytes of a token's results, of all heads, as they are returned and in the accumulator's dtype."""
    kinds = ((Kind.DQ, shape.heads), (Kind.DKV, shape.kv_heads)) if backward else ((Kind.O, shape.heads),)
    each = sum(heads * shape.bytes_per_token_head()[kind] for kind, heads in kinds)
    return int(each[0]), int(each[1])


def _precise_bytes(shape: Shape) -> Ints:
    """Bytes of one token and head of each kind in the accumulator's dtype."""
    return shape.bytes_per_token_head()[:, 1]


def _summed(place: Ints, size: Ints, shape: tuple[int, int]) -> Ints:
    """Bytes by rank and stage; floating point holds them exactly, and numpy adds that up fastest."""
    return np.bincount(place, size, shape[0] * shape[1]).astype(np.int64).reshape(shape)


def _ns(size: Ints, mbps: int, more: Ints) -> Ints:
    return np.asarray(-(-size * 1000 // mbps)) + more
