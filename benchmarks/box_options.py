"""Common parts of the benchmarks in a box: the options for its size, the check whether it can be made,
and its cluster.
"""

from __future__ import annotations

import argparse

from flexcp.clusters import Cluster
from lib.box import why_not


def box_parser(text: str | None, nodes: int, mbit: int, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with options for the size of the box, the speed of its links and the number of repeats."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=nodes)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a node")
    parser.add_argument("--mbit", type=int, default=mbit, help="megabits a second of a rank's network port, each way")
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """Return the parsed options; None, after printing the reason, if no box can be made."""
    asked = parser.parse_args()
    missing = why_not()
    if missing:
        print(f"skipped: {missing}")
        return None
    return asked


def box_cluster(asked: argparse.Namespace, gflops: int) -> Cluster:
    """Return the box as planners see it, with ranks of this bf16 peak."""
    inter = max(1, asked.mbit // 8)
    return Cluster("box", asked.nodes, asked.ranks, gflops, intra_mbps=1000, inter_mbps=inter, latency_ns=500_000)
