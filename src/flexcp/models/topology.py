"""Topology: the ranks, heads and layers that context parallelism has under tensor and pipeline parallelism.

GPUs are numbered node by node and divided as in Megatron-Core and torchtitan: a tensor-parallel group is neighbouring
GPUs of a node, pipeline stages are the outermost division, and in between is one pool of context-parallel (and
data-parallel) ranks.

    h100:4x8 under tp=8        node 0  [0 1 2 3 4 5 6 7]   a tensor-parallel group is one rank of the pool:
                               node 1  [8 ...       15]    4 ranks, one a node, each with 1/8 of the heads
                               ...

- *Ranks.* GPU t of every tensor-parallel group is in pool t, and all pools run the same plan on their own heads at the
  same time. So a rank of the plan stands for one GPU with its own port: bandwidth and latency stay those of one GPU,
  even if the ports of a preset are shares of a node's network cards. A tensor-parallel group and all stages wait for
  their slowest GPU, so a rank is as fast as the slowest GPU it stands for.
- *Heads.* Query heads are divided evenly, and so are KV heads. If there are fewer KV heads than tensor-parallel ranks,
  each rank has a copy of one.
- *The rest of each layer.* Projections and feed-forwards are divided by ``tp``, layers by ``pp``. All stages run the
  same plan.
- *Experts.* Expert parallelism places feed-forwards on ranks that all do attention, so it changes neither ranks nor
  heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexcp.clusters import Cluster
from flexcp.cost import Model, dense_model
from flexcp.models.preset import Preset
from flexcp.shape import Shape


@dataclass(frozen=True)
class Topology:
    """The cluster of context-parallel ranks, the attention shape of a rank, and its part of the model.

    ``model`` is None if the planner's default model is meant.
    """

    cluster: Cluster
    shape: Shape
    model: Model | None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for a :class:`flexcp.Planner`: ``Planner(**topology(...).arguments)``."""
        shape = self.shape
        return {
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "v_head_dim": shape.v_head_dim,
            "dtype": shape.dtype,
            "latent": shape.latent,
            "cluster": self.cluster,
            "model": self.model,
        }


def topology(cluster: Cluster, shape: Shape, model: Model | None = None, *, tp: int = 1, pp: int = 1) -> Topology:
    """Return the ranks, heads and layers that context parallelism has under tensor and pipeline parallelism.

    ``cluster`` counts all GPUs, and ``shape`` all heads of the model. ``tp`` and ``pp`` are the degrees of tensor and
    pipeline parallelism. ``tp=8`` leaves one context-parallel rank on a node of 8 GPUs, with an eighth of the heads; if
    there are fewer KV heads than ``tp``, each rank has a copy of one. Uneven divisions are refused with ValueError.

    >>> from flexcp.clusters import cluster
    >>> found = topology(cluster("h100:4x8"), Shape(32, 8, 128, 128), tp=8)
    >>> str(found.cluster), found.shape.heads, found.shape.kv_heads
    ('h100:4x1', 4, 1)
    """
    _check_degree("tp", tp)
    _check_degree("pp", pp)
    if model is not None:
        stages = [n for n in _divisors(cluster.ranks) if _divides_cluster(cluster, n) and model.layers % n == 0]
        divided: Model | None = _divided_model(model, tp, pp, stages)
    else:  # the default model depends on the number of all heads, so it is made before they are divided
        divided = _divided_model(dense_model(shape), tp, 1) if tp > 1 else None
    nodes, gpus = _stage(cluster, pp, 0 if model is None else model.layers)
    fits = [n for n in _divisors(gpus) if shape.divides_over(n)]
    if gpus % tp:
        where = f"{gpus} GPUs that a stage has on a node" if pp > 1 else f"{gpus} GPUs of a node"
        raise ValueError(
            f"tp={tp} does not divide the {where} of {cluster}; tensor parallelism stays inside a node and divides "
            f"heads: use one of {fits}"
        )
    return Topology(_divided_cluster(cluster, tp, pp, nodes, gpus // tp), _divided_shape(shape, tp, fits), divided)


def divided_preset(preset: Preset, *, tp: int = 1, pp: int = 1, ep: int = 1) -> Preset:
    """Return the part of a model that one rank has: heads, its part of each layer and of the vocabulary, and experts.

    ``tp``, ``pp`` and ``ep`` are the degrees of tensor, pipeline and expert parallelism; ValueError is raised if one
    does not divide the model. If pipeline stages differ, it is the slowest stage: the one with the most layers without
    a window, and with the projection to the vocabulary.
    """
    _check_degree("ep", ep)
    if preset.experts % ep:
        if preset.experts == 1:
            raise ValueError(f"ep={ep}: {preset.model.name} has no experts; leave ep out")
        raise ValueError(
            f"ep={ep} does not divide the {preset.experts} experts of {preset.model.name}; use one of "
            f"{_divisors(preset.experts)}"
        )
    return Preset(
        _divided_model(preset.model, tp, pp),
        _divided_shape(preset.shape, tp),
        -(-preset.vocabulary // tp),
        preset.experts // ep,
        tuple((keys, layers // pp) for keys, layers in preset.windows if layers >= pp),
        preset.tied,
    )


def _divides_cluster(cluster: Cluster, pp: int) -> bool:
    """Return whether ``pp`` stages are whole nodes or equal parts of a node."""
    nodes, each = cluster.nodes, cluster.ranks_per_node
    return nodes % pp == 0 or (pp % nodes == 0 and each % (pp // nodes) == 0)


def _stage(cluster: Cluster, pp: int, layers: int) -> tuple[int, int]:
    """Return (nodes of a stage, its GPUs on each node), or raise ValueError if ``pp`` does not divide the cluster.

    The error lists the degrees that divide the cluster and the ``layers`` of the model (0: not known).
    """
    nodes, each = cluster.nodes, cluster.ranks_per_node
    if not _divides_cluster(cluster, pp):
        fits = [n for n in _divisors(cluster.ranks) if _divides_cluster(cluster, n) and layers % n == 0]
        both = " and divide the layers" if layers else ""
        raise ValueError(
            f"pp={pp} does not divide {cluster} into stages of whole nodes or of equal parts of a node; stages that "
            f"do{both}: {fits}"
        )
    return (nodes // pp, each) if nodes % pp == 0 else (1, each // (pp // nodes))


def _divided_cluster(cluster: Cluster, tp: int, pp: int, nodes: int, ranks_per_node: int) -> Cluster:
    """Return the cluster of the context-parallel ranks of a stage, each as fast as the slowest GPU it stands for."""
    speeds = cluster.speeds
    if speeds:
        slowest = np.array(speeds).reshape(pp, -1, tp).min(axis=(0, 2))
        speeds = tuple(int(speed) for speed in slowest)
    return replace(cluster, nodes=nodes, ranks_per_node=ranks_per_node, speeds=speeds)


def _divided_shape(shape: Shape, tp: int, fits: list[int] | None = None) -> Shape:
    """Return the shape of a rank's heads, or raise ValueError if ``tp`` does not divide the heads.

    The error lists the degrees ``fits``, by default all that divide the heads.
    """
    if not shape.divides_over(tp):
        fits = fits or [n for n in _divisors(shape.heads) if shape.divides_over(n)]
        raise ValueError(
            f"tp={tp} does not divide {shape.heads} query and {shape.kv_heads} KV heads evenly (KV heads fewer than tp "
            f"are replicated, where tp is a multiple of them); use one of {fits}"
        )
    return replace(shape, heads=shape.heads // tp, kv_heads=max(1, shape.kv_heads // tp))


def _divided_model(model: Model, tp: int, pp: int, fits: list[int] | None = None) -> Model:
    """Return a rank's part of the model: layers divided by ``pp``, and feed-forward width by ``tp``, rounded up.

    Raise ValueError if ``pp`` does not divide the layers. The message offers the values ``fits`` for ``pp``, by default
    all divisors of the layers.
    """
    if model.layers % pp:
        raise ValueError(
            f"pp={pp} does not divide the {model.layers} layers of {model.name}; equal stages need one of "
            f"{fits or _divisors(model.layers)}"
        )
    return replace(model, layers=model.layers // pp, feed_forward=-(-model.feed_forward // tp))


def _divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_degree(name: str, value: int) -> None:
    """Raise ValueError unless a degree of parallelism is an integer of at least 1; ``name`` names it in the error."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is over how many ranks to divide, a whole number of at least 1; got {value!r}")
