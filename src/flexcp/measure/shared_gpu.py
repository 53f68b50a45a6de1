"""Shared GPU: NCCL settings with which several ranks may use one GPU,
to try things out where there are fewer GPUs than ranks.

NCCL refuses two ranks of a host on one GPU, so each gets a host id of its own; messages then go through sockets of the
loopback device, at a fraction of a GB/s. Results, streams and hangs are real, times are not.
"""

from __future__ import annotations

import os


def share_gpu(rank: int) -> None:
    """Before the group is made: this rank's settings."""
    settings = {
        "SOCKET_IFNAME": "lo",
        "IB_DISABLE": "1",
        "P2P_DISABLE": "1",
        "SHM_DISABLE": "1",
        "HOSTID": f"rank{rank}",
    }
    os.environ.update({f"NCCL_{name}": value for name, value in settings.items()})
