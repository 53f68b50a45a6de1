"""Copies: how long each rank copies memory before and after its kernels, stage by stage.

Before a rank posts a stage, it *packs* what it sends into messages. When the stage has arrived, it *takes in* what it
received: it copies inputs to their shelves (the buffers that kernels read), lays results that arrive complete
(:mod:`flexcp.executor.run.laid_rows`), adds other results to the rows they belong to, and clears the memory for its own
results on the new shelves. During this time the rank computes nothing, and what it packs leaves only afterwards. So
every piece is read and written at both ends. Before the first slot the rank clears the memory for the results of its
own tokens, and after the last slot it rounds those that were not laid. The time is bytes divided by the speed of
memory:

    what                        bytes
    ==========================  =================================================================
    pack an input               read from the shelf and written as it travels: twice the piece
    pack a result               read in the accumulator's dtype, written as it travels
    take in an input            twice the piece
    lay a result                twice the piece
    add or merge a result       read as it came; what it is reduced into is read and written in the accumulator's
                                dtype, once for all results of a stage
    a rank's own piece          taken in from its own shelf, if the plan copies it to another one
    results of a new shelf      written once, in the accumulator's dtype
    a rank's own results        written once like this in the first slot, unless all of them are laid; those not
                                laid are read like this in the last slot and written in the model's dtype; nothing of
                                this in a forward whose kernel writes them once (below)
    ==========================  =================================================================

Each launch also costs the start of a kernel: one launch packs a stage, one takes in its inputs and lays its results,
and one adds or merges all other results (:mod:`flexcp.executor.run.row_chains`). A program of one stage is only an
attention kernel. What attention itself reads and writes is part of attention's time.

The fast kernel on Hopper writes each own row of a forward's output once, when it is complete
(:mod:`flexcp.executor.run.finished_rows`). On such a cluster (``Cluster.writes_results_once``) own outputs of a rank
are neither cleared nor rounded, unless results of others are added to them or the rank has pads, which no kernel
writes. In one case this is more than the executor copies: if part of dq is laid, the fast kernel clears only the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import cut_apart
from flexcp.clusters import Cluster
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.plan.slots import pass_inputs
from flexcp.shape import IS_OUTPUT, Kind, Shape

Ints = NDArray[np.int64]
COPY_PERMILLE = 800
"""The speed of copies, per mille of a memory's nominal speed.

Measured on an H200 (4,800 GB/s): 3,440 to 4,070 GB/s, read and written together, for pieces of 16,384 tokens packed,
laid and added (benchmarks/packing_gpu.py, docs/results/communication.md).
"""


class Copies(NamedTuple):
    """Nanoseconds ``[rank, stage]``: packing before a stage is posted, and taking in when it has arrived."""

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
    """Return how many nanoseconds the copies of a pass take.

    Memory reads or writes ``mbps`` megabytes a second, and each launch takes ``launch_ns`` more. With
    ``messages_only``, only the bytes of the messages are copied, as they travel, in one launch at each end. ``inputs``
    are the inputs of the pass (:func:`flexcp.plan.slots.pass_inputs`) if the caller has them.
    """
    from flexcp.simulator.compiled_copies import sum_copies  # compiled: only simulations need Numba

    program, shape, ranks = plan.programs[mask][backward], plan.shape, plan.ranks
    t, stages = program.transfers, program.stages
    if messages_only:
        both = 2 * t.bytes(shape)
        pack, take_in = (_summed(rank * stages + t.stage, both, (ranks, stages)) for rank in (t.source, t.target))
        return Copies(_ns(pack, mbps, launch_ns * (pack > 0)), _ns(take_in, mbps, launch_ns * (take_in > 0)))
    kinds = np.column_stack([shape.bytes_per_token_head(), _precise_bytes(shape), IS_OUTPUT])
    columns = (getattr(t, name) for name in t.names())
    pack, take_in, launches, laid, adds = sum_copies(*columns, kinds, np.array([ranks, stages]))
    take_in -= _reduced_again(t, ranks, stages, shape)
    inputs = pass_inputs(plan, mask, backward) if inputs is None else inputs
    take_in += _cleared(inputs, ranks, stages, backward, shape)
    if stages > 1:
        final, precise = own_bytes(shape, backward)
        tokens = plan.placement.tokens
        rounded = np.maximum(tokens * (precise + final) - laid, 0)
        if plan.cluster.writes_results_once and not backward:
            rounded[(adds == 0) & ~_has_pads(plan.placement)] = 0
        take_in[:, 0] += np.where(rounded > 0, tokens * precise, 0)
        take_in[:, -1] += rounded
    return Copies(_ns(pack, mbps, launch_ns * (pack > 0)), _ns(take_in, mbps, launch_ns * launches))


def _reduced_again(t: Transfers, ranks: int, stages: int, shape: Shape) -> Ints:
    """Return the bytes ``[rank, stage]`` that are not copied because one launch reduces all results of a stage.

    These are what several messages bring results of: it is read and written once.
    """
    from flexcp.simulator.compiled_copies import read_again

    reduced = np.flatnonzero(IS_OUTPUT[t.kind] & ((t.partial == 1) | (t.owner != t.target)) & (t.source != t.target))
    # Pieces with different heads are cut so that two of them have the same heads or none in common.
    part, h0, h1 = cut_apart(np.zeros_like(reduced), t.h0[reduced], t.h1[reduced])
    at = reduced[part]
    place = t.target[at] * stages + t.stage[at]
    target = ((place * len(Kind) + t.kind[at]) * ranks + t.owner[at]) * shape.heads + h0
    order = np.lexsort((t.start[at], target))
    at, place, target = at[order], place[order], target[order]
    size = 2 * _precise_bytes(shape)[t.kind[at]] * (h1 - h0)[order]
    again: Ints = read_again(place, target, t.start[at], t.stop[at], size, ranks * stages)
    return again.reshape(ranks, stages)


def _has_pads(placement: Placement) -> NDArray[np.bool_]:
    """Return whether each rank keeps pads (tokens of no document, which make the tokens of ranks equal)."""
    runs = placement.runs
    found = np.zeros(placement.ranks, bool)
    found[runs.rank[runs.stop > placement.batch.tokens]] = True
    return found


def copy_mbps(cluster: Cluster) -> int:
    """Return the megabytes per second that copies read and write together on a rank of the cluster."""
    return max(1, cluster.memory_mbps * COPY_PERMILLE // 1000)


def _cleared(inputs: Transfers, ranks: int, stages: int, backward: bool, shape: Shape) -> Ints:
    """Return the bytes ``[rank, stage]`` of results to clear on the shelves (buffers) whose inputs arrive in a stage.

    Shelves of keys have results, gradients, only in the backward.
    """
    each = np.zeros(len(Kind), np.int64)
    precise = _precise_bytes(shape)
    each[Kind.Q] = precise[Kind.DQ] if backward else precise[Kind.O]
    each[Kind.KV] = precise[Kind.DKV] * backward
    size = (inputs.stop - inputs.start) * (inputs.h1 - inputs.h0) * each[inputs.kind]
    return _summed(inputs.target * stages + inputs.stage, size, (ranks, stages))


def own_bytes(shape: Shape, backward: bool) -> tuple[int, int]:
    """Return the bytes of one token's results over all heads: (as they are returned, in the accumulator's dtype)."""
    kinds = ((Kind.DQ, shape.heads), (Kind.DKV, shape.kv_heads)) if backward else ((Kind.O, shape.heads),)
    each = sum(heads * shape.bytes_per_token_head()[kind] for kind, heads in kinds)
    return int(each[0]), int(each[1])


def _precise_bytes(shape: Shape) -> Ints:
    """Return the bytes of one token and head of each kind in the accumulator's dtype."""
    return shape.bytes_per_token_head()[:, 1]


def _summed(place: Ints, size: Ints, shape: tuple[int, int]) -> Ints:
    """Return the sum of ``size`` by place, as a table of the given shape whose cells are numbered row by row.

    Floating point holds these sums exactly, and ``np.bincount`` is the fastest way to add them.
    """
    return np.bincount(place, size, shape[0] * shape[1]).astype(np.int64).reshape(shape)


def _ns(size: Ints, mbps: int, more: Ints) -> Ints:
    """Return the nanoseconds to read or write ``size`` bytes at ``mbps`` megabytes a second, plus ``more``."""
    return np.asarray(-(-size * 1000 // mbps)) + more
