"""Loader group: find the ranks that share the batches of a loader, and check that the planner is for as many ranks.

A loader without a group gives its batches to one rank, which is right in a script of one process. In a run of several
ranks, ``group=`` was almost always forgotten: every rank then trains on all samples by itself, and the loss does not
show it. With data parallelism, a loader without a group is right, because every rank has its own samples, but the
loader cannot see the difference. So the user must say it, with ``group="alone"``, a group of one rank, or a torch
``DistributedSampler``; otherwise there is a warning.
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
    """Return the process group of the ranks that share batches, or None if the loader is for one rank.

    ``group`` is the Loader's argument; raise ValueError for a text other than ``"alone"``.
    """
    if isinstance(group, str) and group != ALONE:
        raise ValueError(f"group= is {HOW}, or {ALONE!r} for one rank's own batches; got {group!r}")
    return None if group is None or isinstance(group, str) else process_group(group, "the Loader")


def check_group(given: Any, size: int, planner: Any, dataset: Any) -> None:
    """Raise ValueError if the planner is not for ``size`` ranks; warn if no group was given in a run of several ranks.

    ``given`` is the argument ``group=`` and ``size`` the number of ranks of that group (1 without a group). There is no
    warning if ``dataset`` has a ``DistributedSampler``.
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
