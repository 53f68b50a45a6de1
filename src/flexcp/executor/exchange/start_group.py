"""Start group: the process group that flexcp's own commands make, and what to say of one that somebody else made.

Transfers are queued before the work they travel beside, but on a GPU both want multiprocessors, and the device begins
what has the higher priority first. So the group is asked for a stream of high priority, and for transfers of no more
blocks than the largest margin that a plan chooses has multiprocessors: attention beside a transfer that takes more than
it was left has to wait for it. Both are chosen when a group is made and cannot be changed later: whoever makes his own
passes ``pg_options=`` himself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

OWN_GROUP = (
    'init_process_group("nccl", pg_options=torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True))'
)
"""What a user writes."""
MOST_BLOCKS = 16
"""Blocks of a transfer, of which each occupies a multiprocessor."""


def start_group(gpu: bool, **options: Any) -> dist.ProcessGroup:
    """The group of all processes: NCCL with a stream of high priority and few blocks, or gloo. ``options`` are
    ``init_process_group``'s."""
    if gpu:
        options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options["pg_options"].config.max_ctas = MOST_BLOCKS
    dist.init_process_group("nccl" if gpu else "gloo", **options)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def has_high_priority(group: dist.ProcessGroup) -> bool | None:
    """Whether a group's transfers run on a stream of high priority; None where it has no NCCL,
    or torch does not say.
    """
    if "nccl" not in str(dist.get_backend_config(group)):
        return None
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    found = getattr(options, "is_high_priority_stream", None)
    return None if found is None else bool(found)
