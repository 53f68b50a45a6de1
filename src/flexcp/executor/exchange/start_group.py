"""Start group: make the process group of flexcp's own commands, and inspect groups that users made.

On a GPU, transfers and attention compete for multiprocessors, and the device starts work of higher priority first. So
the group gets a high-priority stream for its transfers. It also limits a transfer to as many blocks of GPU threads as
the largest number of multiprocessors that a plan leaves free: a transfer that takes more than its share makes attention
wait. Both settings are fixed when a group is made, so users who make their own group pass ``pg_options=`` themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

OWN_GROUP = (
    'init_process_group("nccl", pg_options=torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True))'
)
"""The call by which a user makes a group with a high-priority stream, for messages."""
MOST_BLOCKS = 16
"""The most blocks of GPU threads of one transfer; each occupies one multiprocessor."""


def start_group(gpu: bool, **options: Any) -> dist.ProcessGroup:
    """Make the group of all processes and return it: NCCL if ``gpu`` is set, else gloo.

    NCCL gets a high-priority stream and at most :data:`MOST_BLOCKS` blocks per transfer. ``options`` are passed to
    ``init_process_group``.
    """
    if gpu:
        options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options["pg_options"].config.max_ctas = MOST_BLOCKS
    dist.init_process_group("nccl" if gpu else "gloo", **options)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def has_high_priority(group: dist.ProcessGroup) -> bool | None:
    """Return whether a group's transfers run on a high-priority stream; None without NCCL or if torch does not tell."""
    if "nccl" not in str(dist.get_backend_config(group)):
        return None
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    found = getattr(options, "is_high_priority_stream", None)
    return None if found is None else bool(found)
