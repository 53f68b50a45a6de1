"""A store for ranks on this machine, which no other machine can reach.

torch's own TCPStore listens on every interface, whatever address it is given, and trusts every connection. It is
therefore handed a socket that is bound to loopback. The sockets of gloo and NCCL listen on one interface;
:func:`stay_local` makes gloo's loopback too.
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
    """Return a store served by this process; other processes of this machine join it by its ``.port``."""
    from torch._C._distributed_c10d import TCPStore

    with socket.socket() as listening:
        listening.bind((ADDRESS, 0))
        listening.listen(socket.SOMAXCONN)
        port, descriptor = listening.getsockname()[1], listening.detach()  # the store closes it
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor)


def joined_store(port: int, timeout: timedelta = TIMEOUT) -> TCPStore:
    """Return a client of the store that another process of this machine serves on ``port``."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(ADDRESS, port, is_master=False, timeout=timeout)


def stay_local() -> None:
    """Let gloo listen on loopback only, unless the user chose an interface; to be called before a group is made."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
