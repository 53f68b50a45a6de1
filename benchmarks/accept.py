"""``flexcp accept`` rehearsed in a box: nodes are network namespaces with their own names, each with its own torchrun.

    sudo python benchmarks/accept.py --nodes 2 --ranks 2 --mbit 400 -- --strategies ring,blocks
    sudo python benchmarks/accept.py --nodes 3 --ranks 1 --mbit 400 --throttle 1:20         # node 1's link: 20 Mbit/s
    sudo python benchmarks/accept.py --nodes 2 --ranks 2 --mbit 400 -- --cluster cpu:1x4    # a wrong node map

Options after ``--`` go to ``flexcp accept``. Every node's link carries ``--mbit`` in each direction, and the cluster is
described with that speed. Prints what the first node's torchrun prints, and ends with its exit code. Needs root and
iproute2; without them it says so and ends with 0.

Ranks that share one GPU need no box; on a machine with a GPU:

    torchrun --nproc-per-node 2 -m flexcp accept --cluster h200:2x1 --rehearsal
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from box_options import box_parser, parsed
from flexcp.calibration import Calibration
from flexcp.cost import CostModel
from lib.box import STORE_PORT, Network

INSIDE_MBPS = 10
"""The speed that the cluster states for ranks of a node, which use loopback: low,
because all ranks share this machine's cores.
"""


def main() -> None:
    """Run ``flexcp accept`` in a box."""
    parser = box_parser(__doc__, nodes=2, mbit=400, repeats=1)
    parser.add_argument("--throttle", help="NODE:MBIT, a node whose link is slower than it should be")
    parser.add_argument("--folder", type=Path, help="keep accept.json and accept.html here")
    parser.add_argument("more", nargs="*", help="options of flexcp accept, after --")
    asked = parsed(parser)
    if asked is None:
        return
    with TemporaryDirectory() as made, Network(asked.nodes) as network:
        folder = (asked.folder or Path(made)).resolve()
        network.limit(asked.mbit)
        if asked.throttle:
            node, mbit = map(int, asked.throttle.split(":"))
            network.limit(mbit, node=node)
        cost = Path(made) / "links.json"
        # Ranks of a node share its namespace, and with it one port to the network.
        speeds = {"intra_mbps": INSIDE_MBPS, "inter_mbps": max(1, asked.mbit // 8 // asked.ranks)}
        cost.write_text(json.dumps(Calibration(CostModel(), "box", speeds).to_json()))
        commands = [
            *("--cost", str(cost), "--write", str(folder / "accept.json"), "--html", str(folder / "accept.html")),
            *asked.more,
        ]
        launchers = [_launched(network, node, asked.ranks, commands) for node in range(asked.nodes)]
        codes = [launcher.wait() for launcher in launchers]
    sys.exit(codes[0])


def _launched(network: Network, node: int, ranks: int, commands: list[str]) -> subprocess.Popen[bytes]:
    """Start torchrun on a node. The static rendezvous uses addresses; others look up names that only the nodes know."""
    launcher = (
        f"{sys.executable} -m torch.distributed.run --nnodes {network.nodes} --node-rank {node} --nproc-per-node "
        f"{ranks} --master-addr {network.address(0)} --master-port {STORE_PORT} --local-addr {network.address(node)} "
        "-m flexcp accept"
    )
    named = f"hostname {network.host(node)} && exec {launcher} {shlex.join(commands)}"
    quiet = None if node == 0 else subprocess.DEVNULL
    return subprocess.Popen(
        ["ip", "netns", "exec", network.ranks[node], "unshare", "--uts", "sh", "-c", named],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        stdout=quiet,
        stderr=quiet,
    )


if __name__ == "__main__":
    main()
