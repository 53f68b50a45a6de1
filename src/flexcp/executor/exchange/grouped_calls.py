"""Grouped calls: start several sends and receives of a process group as one call.

This is what ``torch.distributed.batch_isend_irecv`` does, in the same way. But that function makes and checks an object
for each message, which takes the host most of the time of a call (8 of 12 microseconds a message on an x86 core); here
only the group's own methods are called.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int]
"""A contiguous tensor to send or to fill, and the peer's rank in the group."""


def start_together(group: dist.ProcessGroup | None, receives: list[Message], sends: list[Message]) -> list[dist.Work]:
    """Start all receives and then all sends, and return the handles to wait for.

    ``group`` defaults to the group of all ranks. Messages from one rank to another arrive in the order of the lists.
    With NCCL all are one call with one handle, and no receive waits for a send; with other backends each has a handle
    of its own. If one cannot be started, the error is raised as it is, and the group must not be used any more.
    """
    if not (receives or sends):
        return []
    group = dist.distributed_c10d._get_default_group() if group is None else group
    device = (receives or sends)[0][0].device
    # A subclass in Python has methods of its own, and no backends.
    if type(group) is not dist.ProcessGroup or not group._get_backend(device).supports_coalescing:
        return _started(group, receives, sends)
    # Private in torch, so imported only where NCCL needs it; torch's own batch function calls it like this.
    from torch.distributed.distributed_c10d import _coalescing_manager

    with _coalescing_manager(group, device, async_ops=True) as call:
        _started(group, receives, sends)
    found: list[dist.Work] = call.works
    return found


def _started(group: dist.ProcessGroup, receives: list[Message], sends: list[Message]) -> list[dist.Work]:
    """Start messages one after the other."""
    return [group.recv([x], peer, 0) for x, peer in receives] + [group.send([x], peer, 0) for x, peer in sends]
