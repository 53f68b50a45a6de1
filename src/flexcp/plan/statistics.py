"""Statistics: the bytes that ranks send each other in a plan, and with which ranks a rank exchanges."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.totals import sums
from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]


def bytes_between(plan: Plan, backward: bool, mask: int) -> Ints:
    """Return the bytes that each rank sends each other rank in one layer, ``[source, target]``.

    ``mask`` is the number of the layer's mask.
    """
    transfers, ranks = plan.programs[mask][backward].transfers, plan.ranks
    flat = sums(transfers.source * ranks + transfers.target, transfers.bytes(plan.shape), ranks * ranks)
    return flat.reshape(ranks, ranks)


def bytes_between_nodes(plan: Plan, backward: bool, mask: int) -> int:
    """Return the bytes that cross between nodes in one layer of mask number ``mask``, in one direction."""
    node = np.arange(plan.ranks) // plan.cluster.ranks_per_node
    return int(bytes_between(plan, backward, mask)[node[:, None] != node[None, :]].sum())


def bytes_a_layer(plan: Plan) -> int:
    """Return the bytes that all ranks send in one layer, forward and backward together, as a mean over the layers."""
    masks = plan.batch.masks
    moved = sum(
        mask.layers * int(plan.programs[m][way].transfers.bytes(plan.shape).sum())
        for m, mask in enumerate(masks)
        for way in (False, True)
    )
    return moved // sum(mask.layers for mask in masks)


def peers_of(plan: Plan, rank: int) -> list[int]:
    """Return the ranks that ``rank`` sends to or receives from, under any mask and in either direction."""
    met: set[int] = set()
    for program in (p for pair in plan.programs for p in pair):
        transfers = program.transfers
        met |= set(transfers.target[transfers.source == rank].tolist())
        met |= set(transfers.source[transfers.target == rank].tolist())
    return sorted(met - {rank})
