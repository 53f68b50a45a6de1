"""A cluster in a box: nodes that are network namespaces, joined by links as slow as asked for.

    node 0   eth0 ──── n0 ┐
    node 1   eth0 ──── n1 ┤ bridge          (the switch has a namespace of its own)
    ...

Every node has one veth link to the switch. Token buckets (``tc tbf``) at both of its ends limit what the node sends and what it receives;
ranks of a node share the link, and talk to each other over the node's loopback, unlimited. Ranks see the name of their node as their
machine's (``hostname``), in a UTS namespace of their own. Real processes, real TCP, real queues: what is
measured here is a step, not a model of it.

Needs Linux, root and iproute2; :func:`why_not` says what is missing. Nothing of it is in the machine's own network: all devices live in
namespaces named after this process, which go when the box closes, by an error or Ctrl-C too. Those of a process that was killed go when
the next box is made.
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
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from flexcp.measure.fork_server import server
from flexcp.measure.ranks import PRELOAD, RankPool, answer_calls

PREFIX = "flexcp-box-"
NAMESPACES = Path("/run/netns")
STORE_PORT = 29_400
QUEUE_BYTES = 32 << 20
"""A link's queue: more than TCP keeps in flight, so that nothing is dropped."""
BURST_BYTES = 128 << 10
"""What a bucket lets through at once: more than the largest packet that a virtual link carries unsegmented."""
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def why_not() -> str | None:
    """Why no box can be made here, with the way out; None when it can."""
    if not sys.platform.startswith("linux"):
        return f"a box needs Linux network namespaces; this is {sys.platform}"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"a box needs {' and '.join(missing)} of iproute2 (apt install iproute2)"
    if os.geteuid() != 0:
        return "a box needs root, to make network namespaces"
    try:
        with Network(1) as network:
            network.limit(100)
    except RuntimeError as error:
        return f"a box cannot be made here: {error}"
    return None


class Network:
    """``nodes`` namespaces around a switch. Use as a context manager."""

    def __init__(self, nodes: int) -> None:
        if not 1 <= nodes <= 200:
            raise ValueError(f"a box has 1 to 200 nodes; got {nodes}")
        _remove_leftovers()
        self.switch = f"{PREFIX}{os.getpid()}-switch"
        self.nodes = [f"{PREFIX}{os.getpid()}-node{i}" for i in range(nodes)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _run(f"ip netns add {self.switch}")
        _run(f"ip -n {self.switch} link add bridge type bridge")
        _run(f"ip -n {self.switch} link set bridge up")
        for number, node in enumerate(self.nodes):
            _run(f"ip netns add {node}")
            _run(f"ip link add eth0 netns {node} type veth peer name n{number} netns {self.switch}")
            _run(f"ip -n {self.switch} link set n{number} master bridge up")
            _run(f"ip -n {node} address add {self.address(number)}/24 dev eth0")
            for device in ("lo", "eth0"):
                _run(f"ip -n {node} link set {device} up")

    def host(self, node: int) -> str:
        """The name of a node as its ranks see it."""
        return f"node{node}"

    def address(self, node: int) -> str:
        """The address of a node."""
        return f"10.77.0.{node + 1}"

    def limit(self, mbit: int | None, node: int | None = None) -> None:
        """Let every node, or one, send and receive so many megabits a second; None takes limits away."""
        if mbit is not None and mbit < 1:
            raise ValueError(f"a link carries at least 1 Mbit/s, or None for no limit; got {mbit}")
        numbers = range(len(self.nodes)) if node is None else [node]
        ends = [(self.nodes[number], "eth0") for number in numbers]
        ends += [(self.switch, f"n{number}") for number in numbers]
        for namespace, device in ends:
            if mbit is not None:
                bucket = f"tbf rate {mbit}mbit burst {BURST_BYTES} limit {QUEUE_BYTES}"
                _run(f"tc -n {namespace} qdisc replace dev {device} root {bucket}")
            elif "tbf" in _run(f"tc -n {namespace} qdisc show dev {device}"):
                _run(f"tc -n {namespace} qdisc delete dev {device} root")

    def sent_bytes(self) -> list[int]:
        """Bytes that each node has put on its link so far, headers included."""
        found = []
        for node in self.nodes:
            text = _run(f"ip -n {node} -s -o link show dev eth0")
            after = re.search(r"TX:[^\\]*\\\s*(\d+)", text)
            if after is None:
                raise RuntimeError(f"no count of sent bytes in {text!r}")
            found.append(int(after[1]))
        return found

    def close(self) -> None:
        """Remove everything; may be called again."""
        for namespace in (*self.nodes, self.switch):
            _remove(namespace)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Box(RankPool):
    """Nodes of ranks on gloo: ``box.run(function, ...)`` calls ``function(group, ...)`` on all of them. Use as a context manager."""

    def __init__(self, nodes: int, ranks_per_node: int, timeout: float = 300.0) -> None:
        if ranks_per_node < 1:
            raise ValueError(f"a node needs at least 1 rank; got {ranks_per_node}")
        self.size, self.timeout = nodes * ranks_per_node, timeout
        self.pipes, self.processes = [], []
        self.network = Network(nodes)
        try:
            self._start(ranks_per_node)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks_per_node: int) -> None:
        context = server(PRELOAD)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            node = rank // ranks_per_node
            place = (self.network.nodes[node], self.network.host(node), self.network.address(0))
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
    """A rank's life: move into its node, join the others, run what comes through the pipe until it closes."""
    _enter(namespace, host)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends the ranks
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
    """Move this thread, and those it will start, into a network namespace, on a machine of this name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"cannot be on a machine of another name, {host}")
    socket.sethostname(host)
    with (NAMESPACES / namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _run(command: str) -> str:
    """Run ``ip`` or ``tc``; its output."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
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
