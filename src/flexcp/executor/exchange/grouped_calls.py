"""Grouped calls: start several sends and receives of a process group as one call.

``torch.distributed.batch_isend_irecv`` does the same, but makes and checks an object for each message. In a pass of
many messages that takes the host longer than everything else together, so here only the group's own methods are called.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

Message = tuple[Tensor, int]
"""A contiguous tensor to send or to fill, and the peer's rank in the group."""


def start_together(group: dist.ProcessGroup | None, receives: list[Message], sends: list[Message]) -> list[dist.Work]:
    """Start all receives and sends, the receives first, and return the handles to wait for.

    There must be at least one message. ``group`` defaults to the group of all ranks. With NCCL, messages are one call
    with one handle, so their order does not matter; with other backends each has a handle of its own.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    device = (receives or sends)[0][0].device
    if not group._get_backend(device).supports_coalescing:
        return _started(group, receives, sends)
    with _coalescing_manager(group, device, async_ops=True) as call:
        _started(group, receives, sends)
    found: list[dist.Work] = call.works
    return found


def _started(group: dist.ProcessGroup, receives: list[Message], sends: list[Message]) -> list[dist.Work]:
    """Start messages one after the other."""
    return [group.recv([x], peer, 0) for x, peer in receives] + [group.send([x], peer, 0) for x, peer in sends]
