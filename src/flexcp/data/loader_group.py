"""Loader group: find the ranks that share the batches of a loader, and check that the planner is for as many ranks.

A loader without a group gives its batches to one rank, which is right in a script of one process. In a run of several
ranks, a missing ``group=`` is nearly always a mistake: every rank then trains on all samples by itself, and the loss
does not show it. With data parallelism, a loader without a group is right, because every rank has its own samples, but
the loader cannot see the difference. So the user must say it, with ``group="alone"``, a group of one rank, or a torch
``DistributedSampler``; otherwise there is a warning.

Loaders of other groups choose their numbers of micro-batches by themselves, so there is a warning for these, too.
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


def check_group(given: Any, size: int, planner: Any, dataset: Any, micro_batches: bool) -> None:
    """Raise ValueError if the planner is not for ``size`` ranks; warn of what only other ranks of the run could tell.

    ``given`` is the argument ``group=`` and ``size`` the number of ranks of that group (1 without a group). There is a
    warning if no group was given in a run of several ranks, unless ``dataset`` has a ``DistributedSampler``, and one if
    a group smaller than the run has ``micro_batches``.
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
    elif micro_batches and run > size:
        warnings.warn(
            f"this Loader chooses the number of micro-batches for a group of {size}, and the run has {run} ranks. "
            "Ranks with documents of their own (replicas) then make other numbers of them, and DDP or FSDP2 hangs or "
            "adds up gradients of different steps: pass the group of all ranks that reduce gradients together, and a "
            "planner for it. Ranks with the same documents (tensor or pipeline parallelism) make the same number",
            stacklevel=3,
        )
