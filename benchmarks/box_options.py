"""What the benchmarks in a box share: the options that say which box, the end where none can be made,
and the cluster it is.
"""

from __future__ import annotations

import argparse

from flexcp.clusters import Cluster
from lib.box import why_not


def box_parser(text: str | None, nodes: int, mbit: int, repeats: int) -> argparse.ArgumentParser:
    """A parser that knows the size of the box, its links' speed and how often to measure."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=nodes)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a node")
    parser.add_argument("--mbit", type=int, default=mbit, help="megabits a second of a rank's network port, each way")
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """What is asked for; None, after saying why, where no box can be made."""
    asked = parser.parse_args()
    missing = why_not()
    if missing:
        print(f"skipped: {missing}")
        return None
    return asked


def box_cluster(asked: argparse.Namespace, gflops: int) -> Cluster:
    """The box as planners see it, with ranks of this bf16 peak."""
    inter = max(1, asked.mbit // 8)
    return Cluster("box", asked.nodes, asked.ranks, gflops, intra_mbps=1000, inter_mbps=inter, latency_ns=500_000)
