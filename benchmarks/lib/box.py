"""A cluster in a box: ranks in network namespaces of one machine, with ports of a chosen speed.

                 ┌ eth0 ── n0 ┐
    rank 0 ──────┤            ├ network        (a bridge that joins all ranks)
                 └ eth1 ── i0 ┐
                              ├ inside0        (a bridge for each node)
                 ┌ eth1 ── i1 ┘
    rank 1 ──────┤
                 └ eth0 ── n1 ─ network

Every rank has a port to the network and one to its node, as a GPU has a network card and NVLink, and as in the
simulator. Token buckets (``tc tbf``) at both ends of a port limit what it sends and receives. A rank reaches the ranks
of its own node through one port and all others through the other. In its own UTS namespace it sees the name of its node
as the machine's ``hostname``. Processes, TCP and queues are real: steps are measured here, not modelled.

Sockets keep little data in flight. With Linux's defaults, megabytes of one message would queue before a slow port, and
messages of other stages would wait behind them, which does not happen in a cluster's network.

A box needs Linux, root and iproute2; :func:`why_not` says what is missing. The machine's own network is not touched:
all devices are in namespaces named after this process. They are removed when the box closes, also after an error or
Ctrl-C. Namespaces of a killed process are removed when the next box is made.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from flexcp.measure.fork_server import server
from flexcp.measure.ranks import PRELOAD, RankPool, answer_calls

PREFIX = "flexcp-box-"
NAMESPACES = Path("/run/netns")
STORE_PORT = 29_400
QUEUE_BYTES = 32 << 20
"""Size of a port's queue: more than sockets keep in flight, so that nothing is dropped."""
BURST_SECONDS = 0.001
LEAST_BURST_BYTES = 12 << 10
"""The least burst of a token bucket; a burst is what a port carries in a millisecond, and more than one packet."""
PACKET_BYTES = 9000
SOCKETS = {
    "tcp_congestion_control": "reno",
    "tcp_wmem": f"4096 {64 << 10} {128 << 10}",
    "tcp_rmem": f"4096 {256 << 10} {1 << 20}",
}
"""Settings of a rank's sockets. Nothing is lost here, so these limits alone decide how much is in flight.
(bbr, the default of some machines, would measure the links itself and hold back.)
"""
QUEUED_SECONDS = 0.002
"""The most that a socket has queued in its port, in seconds of the port's speed."""
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def why_not() -> str | None:
    """Return why no box can be made here and the way out; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"a box needs Linux network namespaces; this is {sys.platform}"
    missing = [name for name in ("ip", "tc", "sysctl") if shutil.which(name) is None]
    if missing:
        return f"a box needs {' and '.join(missing)} (apt install iproute2 procps)"
    if os.geteuid() != 0:
        return "a box needs root, to make network namespaces"
    try:
        with Network(1) as network:
            network.limit(100)
    except RuntimeError as error:
        return f"a box cannot be made here: {error}"
    return None


class Network:
    """``nodes`` x ``ranks_per_node`` network namespaces, connected inside nodes and across them; a context manager."""

    def __init__(self, nodes: int, ranks_per_node: int = 1) -> None:
        if not 1 <= nodes * ranks_per_node <= 200:
            raise ValueError(f"a box has 1 to 200 ranks; got {nodes} nodes of {ranks_per_node}")
        _remove_leftovers()
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.switch = f"{PREFIX}{os.getpid()}-switch"
        self.ranks = [f"{PREFIX}{os.getpid()}-rank{i}" for i in range(nodes * ranks_per_node)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _run(f"ip netns add {self.switch}")
        for bridge in ("network", *(f"inside{node}" for node in range(self.nodes))):
            _run(f"ip -n {self.switch} link add {bridge} mtu {PACKET_BYTES} type bridge")
            _run(f"ip -n {self.switch} link set {bridge} up")
        for number, rank in enumerate(self.ranks):
            node = number // self.ranks_per_node
            _run(f"ip netns add {rank}")
            _run(f"ip -n {rank} link set lo up")
            for device, there, bridge in (("eth0", f"n{number}", "network"), ("eth1", f"i{number}", f"inside{node}")):
                size = f"mtu {PACKET_BYTES}"
                _run(f"ip link add {device} netns {rank} {size} type veth peer name {there} netns {self.switch} {size}")
                _run(f"ip -n {self.switch} link set {there} master {bridge} up")
                _run(f"ip -n {rank} address add {self.address(number)}/32 dev {device}")
                _run(f"ip -n {rank} link set {device} up")
            self._set(rank, SOCKETS)
            _run(f"ip -n {rank} route add 10.77.0.0/24 dev eth0")
            for other in range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node):
                if other != number:
                    _run(f"ip -n {rank} route add {self.address(other)}/32 dev eth1")

    def host(self, rank: int) -> str:
        """Return the name of a rank's node, as its ranks see it."""
        return f"node{rank // self.ranks_per_node}"

    def address(self, rank: int) -> str:
        """Return the IP address of a rank."""
        return f"10.77.0.{rank + 1}"

    def limit(self, across_mbit: int | None, inside_mbit: int | None = None, node: int | None = None) -> None:
        """Limit the ports of all ranks, or of one node's ranks, to this many megabits a second in each direction,
        across nodes and inside a node; None removes the limit.
        """
        each = self.ranks_per_node
        numbers = range(len(self.ranks)) if node is None else range(node * each, (node + 1) * each)
        for device, there, mbit in (("eth0", "n", across_mbit), ("eth1", "i", inside_mbit)):
            if mbit is not None and mbit < 1:
                raise ValueError(f"a port carries at least 1 Mbit/s, or None for no limit; got {mbit}")
            ends = [(self.ranks[number], device) for number in numbers]
            ends += [(self.switch, f"{there}{number}") for number in numbers]
            for namespace, end in ends:
                if mbit is not None:
                    burst = max(LEAST_BURST_BYTES, round(mbit * 125_000 * BURST_SECONDS))
                    bucket = f"tbf rate {mbit}mbit burst {burst} limit {QUEUE_BYTES}"
                    _run(f"tc -n {namespace} qdisc replace dev {end} root {bucket}")
                elif "tbf" in _run(f"tc -n {namespace} qdisc show dev {end}"):
                    _run(f"tc -n {namespace} qdisc delete dev {end} root")
        if across_mbit is not None:
            waiting = max(LEAST_BURST_BYTES, round(across_mbit * 125_000 * QUEUED_SECONDS))
            for number in numbers:
                self._set(self.ranks[number], {"tcp_limit_output_bytes": str(waiting)})

    def _set(self, namespace: str, settings: Mapping[str, str]) -> None:
        for name, value in settings.items():
            _run("ip", "netns", "exec", namespace, "sysctl", "-q", "-w", f"net.ipv4.{name}={value}")

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each rank has sent across nodes so far, headers included."""
        found = []
        for rank in self.ranks:
            text = _run(f"ip -n {rank} -s -o link show dev eth0")
            after = re.search(r"TX:[^\\]*\\\s*(\d+)", text)
            if after is None:
                raise RuntimeError(f"no count of sent bytes in {text!r}")
            found.append(int(after[1]))
        return found

    def close(self) -> None:
        """Remove everything; may be called repeatedly."""
        for namespace in (*self.ranks, self.switch):
            _remove(namespace)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Box(RankPool):
    """Nodes of gloo ranks: ``box.run(function, ...)`` calls ``function(group, ...)`` on all of them;
    a context manager.
    """

    def __init__(self, nodes: int, ranks_per_node: int, timeout: float = 300.0) -> None:
        if ranks_per_node < 1:
            raise ValueError(f"a node needs at least 1 rank; got {ranks_per_node}")
        self.size, self.timeout = nodes * ranks_per_node, timeout
        self.pipes, self.processes = [], []
        self.network = Network(nodes, ranks_per_node)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = server(PRELOAD)
        for rank, namespace in enumerate(self.network.ranks):
            ours, theirs = context.Pipe()
            place = (namespace, self.network.host(rank), self.network.address(0))
            process = context.Process(target=_serve, args=(rank, self.size, *place, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._collect(list(range(self.size)))

    def close(self) -> None:
        """Stop all ranks and remove the network."""
        super().close()
        self.network.close()


def _serve(rank: int, size: int, namespace: str, host: str, address: str, pipe: Connection) -> None:
    """Run one rank: enter its namespace, join the others,
    then run the functions that come through the pipe until it closes.
    """
    _enter(namespace, host)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops the ranks
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    limit = timedelta(seconds=120)
    store = TCPStore(address, STORE_PORT, size, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    pipe.send(("done", None))
    answer_calls(rank, size, pipe)


def _enter(namespace: str, host: str) -> None:
    """Move this thread, and threads it starts later, into a network namespace with this host name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"cannot be on a machine of another name, {host}")
    socket.sethostname(host)
    with (NAMESPACES / namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _run(command: str, *more: str) -> str:
    """Run a command, given as one text or with further words, and return its output."""
    words = [*command.split(), *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _remove(namespace: str) -> None:
    if (NAMESPACES / namespace).exists():
        _run(f"ip netns delete {namespace}")


def _remove_leftovers() -> None:
    """Remove the namespaces of boxes whose process is gone."""
    for path in NAMESPACES.glob(f"{PREFIX}*"):
        process = re.match(rf"{PREFIX}(\d+)-", path.name)
        if process and not Path(f"/proc/{process[1]}").exists():
            _remove(path.name)
