"""Local store: the store of ranks that are all on this machine, which nobody else can reach.

torch's own listens on every interface whatever address it is given, and believes whoever connects. So it is handed a
socket that is bound to loopback. Gloo's and NCCL's sockets listen on one interface; :func:`stay_local` makes it
loopback too.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

ADDRESS = "127.0.0.1"
TIMEOUT = timedelta(seconds=300)


def kept_store(timeout: timedelta = TIMEOUT) -> TCPStore:
    """A store kept by this process; ``.port`` is what the others need."""
    from torch._C._distributed_c10d import TCPStore

    with socket.socket() as listening:
        listening.bind((ADDRESS, 0))
        listening.listen(socket.SOMAXCONN)
        port, descriptor = listening.getsockname()[1], listening.detach()  # the store closes it
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor)


def joined_store(port: int, timeout: timedelta = TIMEOUT) -> TCPStore:
    """A client of the store that another process of this machine keeps."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(ADDRESS, port, is_master=False, timeout=timeout)


def stay_local() -> None:
    """Before a group is made: its transport listens on loopback only, unless the user chose an interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
