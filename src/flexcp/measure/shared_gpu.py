"""NCCL settings that let several ranks use one GPU, to try things out with fewer GPUs than ranks.

NCCL refuses two ranks of a host on one GPU, so each rank gets its own host id. Messages then go through sockets on the
loopback interface, at a fraction of a GB/s. Results, streams and hangs are as on several GPUs; times are not.
"""

from __future__ import annotations

import os


def share_gpu(rank: int) -> None:
    """Set NCCL's environment variables for this rank; to be called before the group is made."""
    settings = {
        "SOCKET_IFNAME": "lo",
        "IB_DISABLE": "1",
        "P2P_DISABLE": "1",
        "SHM_DISABLE": "1",
        "HOSTID": f"rank{rank}",
    }
    os.environ.update({f"NCCL_{name}": value for name, value in settings.items()})
