"""Step parts: what a training step consists of beside attention, and what of it takes how long.

A :class:`Training` travels in a planner's request. So whoever chooses by the time of a step and whoever reports one
speak of the same step: both ask :mod:`flexcp.simulator.training` about it, and prices in closed form have
:func:`beyond_layers_ns` added to them.

A collective over all ranks takes its bytes through the slower of the node's network ports together and the rank's own
inside port.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import Cluster
from flexcp.cost import CostModel, dense_model
from flexcp.models.preset import Preset
from flexcp.shape import Shape

Ints = NDArray[np.int64]
Sync = Literal["fsdp", "allreduce", "none"]
SYNCS: tuple[Sync, ...] = ("fsdp", "allreduce", "none")
WEIGHT_BYTES = 2


@dataclass(frozen=True)
class Training:
    """What a step consists of beside attention: the other layers and the vocabulary of ``model``, gradient sync,
    and ``tp``'s collectives.

    ``model`` is as one rank has it, where tensor parallelism over ``tp`` divided it. ``sync`` is ``"fsdp"``,
    ``"allreduce"`` or ``"none"``; it hides behind ``overlap_permille`` of a layer's time.
    """

    model: Preset
    sync: Sync = "fsdp"
    overlap_permille: int = 1000
    tp: int = 1

    def __post_init__(self) -> None:
        if self.sync not in SYNCS:
            raise ValueError(f"sync is how gradients are summed, {', '.join(map(repr, SYNCS))}; got {self.sync!r}")


def layers_alone(cost: CostModel, shape: Shape) -> Training:
    """The step of whoever describes none: the layers, without vocabulary, gradient sync and collectives."""
    return Training(Preset(cost.model or dense_model(shape), shape, vocabulary=1), sync="none")


def beyond_layers_ns(
    tokens: Ints, layers: int, shape: Shape, cluster: Cluster, cost: CostModel, training: Training
) -> Ints:
    """What a step of ranks with so many tokens takes at least beyond attention and the rest of its layers.

    The vocabulary's projection, the collectives of tensor parallelism, and the sync that has nothing to hide behind.
    """
    head = cost.head_ns(tokens, training.model.head_flops_per_token, shape, cluster)
    inside = tensor_parallel_ns(tokens, shape, cluster, cost, training)
    return head + layers * inside + sync_at_the_ends_ns(cluster, cost, training)


def sync_at_the_ends_ns(cluster: Cluster, cost: CostModel, training: Training) -> int:
    """Sync before the first layer and behind the last, which has nothing to hide behind.

    ``"fsdp"`` gathers the first layer's weights, and those of embedding and head, which belong to no layer, once; their
    gradients are scattered at the end, as ``fully_shard`` of a model does. ``"allreduce"`` sums the embedding's
    gradients, the last to be there, at the end; those of the head, the first, hide as far as anything does, where it
    has a matrix of its own.
    """
    if training.sync == "none":
        return 0
    model = training.model
    if training.sync == "fsdp":
        first = collective_ns(cluster, cost, model.layer_parameters)
        return first + 2 * collective_ns(cluster, cost, model.vocabulary_parameters)
    of_one = 2 * collective_ns(cluster, cost, model.vocabulary * model.model.hidden)
    return of_one if model.tied else of_one + of_one * (1000 - training.overlap_permille) // 1000


def tensor_parallel_ns(tokens: Ints, shape: Shape, cluster: Cluster, cost: CostModel, training: Training) -> Ints:
    """One layer's collectives of tensor parallelism on each rank, forward and backward, with nothing to hide behind."""
    if training.tp == 1:
        return np.zeros_like(tokens)
    row = training.model.model.hidden * shape.element_bytes
    # Four all-reduces of a token's row, two in each direction; or as many scatters and gathers (Megatron-LM, sequence
    # parallelism).
    size = 4 * 2 * tokens * row * (training.tp - 1) // training.tp
    return cost.link_ns(size, cluster.intra_mbps) + 8 * cluster.latency_ns


def collective_ns(cluster: Cluster, cost: CostModel, weights: int) -> int:
    """An all-gather or reduce-scatter of so many weights over all ranks."""
    size = np.array([WEIGHT_BYTES * weights], np.int64)
    inside = int(cost.link_ns(size * (cluster.ranks - 1) // cluster.ranks, cluster.intra_mbps)[0])
    if cluster.nodes == 1:
        return inside + cluster.latency_ns
    crossing = size * (cluster.nodes - 1) // (cluster.nodes * cluster.ranks_per_node)
    return max(inside, int(cost.link_ns(crossing, cluster.inter_mbps)[0])) + cluster.latency_ns
