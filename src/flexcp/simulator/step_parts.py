"""Step parts: the parts of a training step besides attention, and how long they take.

A planner's request contains a :class:`Training`, so planners that choose by the time of a step and reports about a step
mean the same step. Both simulate it with :mod:`flexcp.simulator.training`; predictions in closed form add
:func:`beyond_layers_ns`.

A collective over all ranks takes the time of its bytes through the network ports of a node together, or through a
rank's port inside its node, whichever is slower.
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
    """The parts of a step besides attention: the rest of each layer and the vocabulary of ``model``, and collectives.

    ``model`` is one rank's share of the model if tensor parallelism over ``tp`` ranks divides it. ``sync`` is how
    gradients are summed: ``"fsdp"``, ``"allreduce"`` or ``"none"``. ``overlap_permille`` of a layer's time can hide the
    sync. Collectives of tensor parallelism are never hidden.
    """

    model: Preset
    sync: Sync = "fsdp"
    overlap_permille: int = 1000
    tp: int = 1

    def __post_init__(self) -> None:
        if self.sync not in SYNCS:
            raise ValueError(f"sync is how gradients are summed, {', '.join(map(repr, SYNCS))}; got {self.sync!r}")


def layers_alone(cost: CostModel, shape: Shape) -> Training:
    """Return the step that is assumed if the user describes none: layers without vocabulary and collectives."""
    return Training(Preset(cost.model or dense_model(shape), shape, vocabulary=1), sync="none")


def beyond_layers_ns(
    tokens: Ints, layers: int, shape: Shape, cluster: Cluster, cost: CostModel, training: Training
) -> Ints:
    """Return the least nanoseconds of a step besides attention and the rest of each layer, for each rank.

    ``tokens[rank]`` is how many tokens a rank has. The time consists of the vocabulary's projection, the collectives of
    tensor parallelism, and the part of the gradient sync that nothing can hide.
    """
    head = cost.vocabulary_ns(tokens, training.model.head_flops_per_token, shape, cluster)
    inside = tensor_parallel_ns(tokens, shape, cluster, cost, training)
    return head + layers * inside + sync_at_the_ends_ns(cluster, cost, training)


def sync_at_the_ends_ns(cluster: Cluster, cost: CostModel, training: Training) -> int:
    """Return the nanoseconds of the sync before the first and after the last layer, which no compute hides.

    ``"fsdp"`` gathers the weights of the first layer, and once the weights of embedding and head, which belong to no
    layer; their gradients are scattered at the end, as with ``fully_shard`` of a model. ``"allreduce"`` sums the
    gradients of the embedding at the end, because they are computed last. If the head has a matrix of its own, its
    gradients are computed first; their sum is hidden as far as ``overlap_permille`` allows.
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
    """Return the nanoseconds of one layer's tensor-parallel collectives on each rank, forward and backward together.

    No compute hides them.
    """
    if training.tp == 1:
        return np.zeros_like(tokens)
    row = training.model.model.hidden * shape.element_bytes
    # Four all-reduces of a token's row, two in each direction. With sequence parallelism (Megatron-LM), four pairs of
    # a reduce-scatter and an all-gather instead, which move as many bytes.
    size = 4 * 2 * tokens * row * (training.tp - 1) // training.tp
    return cost.link_ns(size, cluster.intra_mbps) + 8 * cluster.latency_ns


def collective_ns(cluster: Cluster, cost: CostModel, weights: int) -> int:
    """Return the nanoseconds of one all-gather or reduce-scatter of this many 2-byte weights over all ranks."""
    size = np.array([WEIGHT_BYTES * weights], np.int64)
    inside = int(cost.link_ns(size * (cluster.ranks - 1) // cluster.ranks, cluster.intra_mbps)[0])
    if cluster.nodes == 1:
        return inside + cluster.latency_ns
    crossing = size * (cluster.nodes - 1) // (cluster.nodes * cluster.ranks_per_node)
    return max(inside, int(cost.link_ns(crossing, cluster.inter_mbps)[0])) + cluster.latency_ns
