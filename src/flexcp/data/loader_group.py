"""Loader group: which ranks share the batches of a loader, and whether the planner is for as many.

A loader without a group is one rank's own, right in a script of one process. In a run of several it is almost always a
forgotten ``group=``: every rank then trains on all samples by itself, and no loss shows it. Data parallelism looks the
same from here, but every rank has samples of its own. So it must be said, by ``group="alone"``, a group of one rank, or
a torch ``DistributedSampler``; else there is a warning.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from flexcp.data.loader_agreement import sampler_share
from flexcp.executor.arguments import process_group, ranks_of_run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ALONE = "alone"
HOW = "a ProcessGroup or a DeviceMesh axis such as mesh['cp']"


def group_of(group: dist.ProcessGroup | DeviceMesh | Literal["alone"] | None) -> dist.ProcessGroup | None:
    """The ranks that share batches, None for one rank."""
    if isinstance(group, str) and group != ALONE:
        raise ValueError(f"group= is {HOW}, or {ALONE!r} for one rank's own batches; got {group!r}")
    return None if group is None or isinstance(group, str) else process_group(group, "the Loader")


def check_group(given: Any, size: int, planner: Any, dataset: Any) -> None:
    """Raise for a planner of another number of ranks than the ``size`` of the group that was ``given``; warn where none
    was given and the run has several ranks.
    """
    cluster = getattr(planner, "cluster", None)
    ranks = size if cluster is None else cluster.ranks
    if ranks != size and given is None:
        raise ValueError(
            f"the planner is for {ranks} ranks, but the Loader has no group: pass group=, {HOW}, of the {ranks} ranks "
            "that share each batch. For a rank that has its batches to itself, make the planner for a cluster of 1 "
            f"and pass group={ALONE!r}"
        )
    if ranks != size:
        raise ValueError(
            f"the planner is for {ranks} ranks but the group has {size}; make it for a cluster of {size}, or pass the "
            f"group of the {ranks} ranks that share each batch"
        )
    run = ranks_of_run()
    if given is None and run > 1 and sampler_share(dataset) is None:
        warnings.warn(
            f"this Loader has no group in a run of {run} ranks, so each of them trains on all samples by itself. Where "
            f"ranks share batches, pass group=, {HOW}, and a planner for as many ranks; where every rank has samples "
            f"of its own (data parallelism), say so by group={ALONE!r}",
            stacklevel=3,
        )
