"""Planning of trees, measured: bytes, balance and time; ``make trees`` writes docs/results/trees.md.

- *rollouts*: 64 rollouts of 512 tokens on a prompt of 8,192. *agent*: a random tree of 100,000 tokens, turns of 1 to
  999 tokens, up to 16 deep. Both under ``blocks`` and ``auto`` with tolerances of 0.05, on 8 ranks as one and as two
  nodes, and on four nodes of 8, compared with ``minheap`` (MagiAttention's dealing) on the same mask.
- *many segments*: trees of 10,000 segments, random, all on one root, and a comb of depth 5,000: milliseconds of mask,
  plan and step, and the peak memory of arrays during planning.

Bounds are counted here token by token, from the placement's tokens and rows alone: keys that a rank reads and does not
keep, once; and keys that any rank of a node reads and no rank of it keeps, once a node. Times are CPU milliseconds of
this process, which depend less on other load than wall time; the least of several calls.
"""

from __future__ import annotations

import argparse
import platform
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.executor.run.rank_recipe import rank_recipe
from flexcp.masks import Mask
from flexcp.masks.tree import tree_of_mask
from flexcp.plan.plan import Plan
from flexcp.plan.positions import token_positions
from flexcp.plan.sequences import batch_sequences
from flexcp.shape import Kind

CLUSTERS = ((1, 8), (2, 4), (4, 8))
TOLERANCES = {"compute_tolerance": 0.05, "token_tolerance": 0.05}
REPEATS = 5
SEGMENTS = 10_000
Answer = TypeVar("Answer")


def rollouts() -> Mask:
    """Return 64 rollouts on one prompt."""
    return flexcp.tree([-1] + [0] * 64, [8192] + [512] * 64)


def agent(tokens: int = 100_000, most: int = 1000, segments: int | None = None) -> Mask:
    """Return an agent's run that continues from where it is, or from an earlier turn."""
    rng = np.random.default_rng(0)
    parents: list[int] = []
    lengths: list[int] = []
    path: list[int] = []
    left = tokens
    while left > 0 and len(parents) != segments:
        path = path[: int(rng.integers(0, len(path) + 1)) if rng.random() < 0.4 else 15] or [0]
        parents.append(path[-1] if parents else -1)
        path = [*path, len(parents) - 1] if len(parents) > 1 else [0]
        lengths.append(min(int(rng.integers(1, most)), left))
        left -= lengths[-1]
    return flexcp.tree(parents, lengths)


def comb(depth: int) -> Mask:
    """Return a path with a leaf beside each of its segments: segments 0, 2, 4, ... continue, 1, 3, 5, ...
    are leaves.
    """
    parents = [-1] + [2 * ((segment - 1) // 2) for segment in range(1, 2 * depth)]
    return flexcp.tree(parents, [3] * len(parents))


def main() -> None:
    """Make the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = [
        "# Planning of trees",
        "",
        f"**Measured**, by `make trees` on {date.today().isoformat()} ({platform.machine()}, one process). Times are "
        "CPU milliseconds of placement, schedule and hash, first calls excluded. Bytes and balance are properties of "
        "the plans: 32 / 8 heads of 128, bf16, forward of one layer.",
        "",
        *_bytes_table(),
        "",
        *_many_table(),
        "",
    ]
    text = "\n".join(lines)
    Console().print(text, markup=False)
    if options.write:
        options.write.write_text(text)


def _timed(call: Callable[[], Answer], repeats: int = REPEATS) -> tuple[Answer, float]:
    """Return the result, and the least CPU milliseconds of some calls after the first."""
    found, times = call(), []
    for _ in range(repeats):
        begin = time.process_time()
        found = call()
        times.append((time.process_time() - begin) * 1000)
    return found, min(times)


def _planned(planner: flexcp.Planner, mask: Mask) -> Plan:
    assert mask.length is not None  # a tree's
    plan = planner([mask.length], [mask])
    _ = plan.hash
    return plan


def key_bounds(plan: Plan) -> tuple[int, int]:
    """Return the keys that ranks read and do not keep, each once a rank, and the keys that nodes read
    and do not keep, each once a node.
    """
    tree = tree_of_mask(plan.batch.masks[0].rule(0))
    kept = np.zeros((plan.ranks, tree.tokens), bool)
    read = np.zeros((plan.ranks, tree.tokens), bool)
    runs, regions = plan.placement.runs, plan.placement.regions[0]
    for rank, start, stop in zip(runs.rank, runs.start, runs.stop, strict=True):
        kept[rank, start:stop] = True
    of_segment = np.repeat(np.arange(len(tree.parents)), tree.lengths)
    for rank, q0, q1 in zip(regions.rank, regions.q0, regions.q1, strict=True):
        read[rank, q0:q1] = True
        first = q0
        while first < q1:  # one segment after the other, each with its path to the root
            segment = int(of_segment[first])
            read[rank, tree.starts[segment] : first] = True
            at = int(tree.parents[segment])
            while at != -1:
                read[rank, tree.starts[at] : tree.starts[at] + tree.lengths[at]] = True
                at = int(tree.parents[at])
            first = int(tree.starts[segment] + tree.lengths[segment])
    nodes = plan.cluster.nodes
    by_node = [x.reshape(nodes, -1, tree.tokens).any(axis=1) for x in (read, kept)]
    return int((read & ~kept).sum()), int((by_node[0] & ~by_node[1]).sum())


def _bytes_table() -> list[str]:
    lines = [
        "## Bytes and balance",
        "",
        "*Once a rank*: bytes over those of every key that a rank reads and does not keep, counted once for each rank. "
        "*Once a node*: bytes between nodes over those of every key that a node reads and does not keep, counted once "
        "for each node. A rank that computes some of the heads is counted as if it read all of each key, so the first "
        "can be below 1. The columns beside `minheap` divide by its bytes on the same mask; a prompt that every rank "
        "reads costs all row-wise placements the same inside one node.",
        "",
        "| tree | ranks | strategy | MB | once a rank | / minheap's | MB between nodes | once a node | / minheap's "
        "| compute | tokens | ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, mask in (("rollouts", rollouts()), ("agent", agent())):
        for nodes, size in CLUSTERS:
            where = flexcp.cluster("h100", nodes, size)
            rival = _planned(flexcp.Planner(32, 8, 128, cluster=where, strategy="minheap"), mask)
            key = int(rival.shape.bytes_per_token_head()[Kind.KV, 0]) * rival.shape.kv_heads
            for strategy in ("blocks", "auto", "minheap"):
                limits: dict[str, Any] = {} if strategy == "minheap" else TOLERANCES
                planner = flexcp.Planner(32, 8, 128, cluster=where, strategy=strategy, **limits)
                plan, ms = _timed(partial(_planned, planner, mask))
                by_rank, by_node = (n * key for n in key_bounds(plan))
                moved, across = int(plan.bytes().sum()), plan.inter_node_bytes()
                lines.append(
                    f"| {name} | {nodes}x{size} | "
                    f"{strategy if strategy == plan.strategy else f'auto ({plan.strategy})'} | {moved / 1e6:.1f} | "
                    f"{_over(moved, by_rank)} | {_over(moved, int(rival.bytes().sum()))} | {across / 1e6:.1f} | "
                    f"{_over(across, by_node)} | {_over(across, rival.inter_node_bytes())} | "
                    f"{imbalance(plan.work()):.3f} | {imbalance(plan.placement.tokens):.3f} | {ms:.0f} |"
                )
    return lines


def _over(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def _many_table() -> list[str]:
    lines = [
        f"## Trees of {SEGMENTS:,} segments",
        "",
        "*Step*: what rank 0 derives of the plan (programs, calls, memory, rows), its positions, and all sequences and "
        "edges of the batch. *Array memory* is the most that planning held in NumPy's arrays at a time, "
        "by `tracemalloc`.",
        "",
        "| tree | tokens | ranks | mask ms | blocks ms | auto ms | step ms | array memory MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    trees = {
        "random, 16 deep": lambda: agent(1 << 40, 30, SEGMENTS),
        "one root": lambda: flexcp.tree([-1] + [0] * (SEGMENTS - 1), [100] + [15] * (SEGMENTS - 1)),
        "comb": lambda: comb(SEGMENTS // 2),
    }
    for name, make in trees.items():
        mask, _ = _timed(make, 1)
        columns: tuple[Any, ...] = mask.params[:2]
        _, mask_ms = _timed(partial(flexcp.tree, *columns), 2)
        for nodes in (1, 4):
            where = flexcp.cluster("h100", nodes, 8)
            planners = [flexcp.Planner(32, 8, 128, cluster=where, strategy=s) for s in ("blocks", "auto")]
            times = [_timed(partial(_planned, planner, mask), 2)[1] for planner in planners]
            plan = _planned(planners[0], mask)
            _, step_ms = _timed(partial(_step_of_rank_0, plan), 2)
            tracemalloc.start()
            _planned(planners[0], mask)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            lines.append(
                f"| {name} | {plan.batch.tokens:,} | {nodes * 8} | {mask_ms:.0f} | {times[0]:.0f} | {times[1]:.0f} | "
                f"{step_ms:.0f} | {most / 1e6:.1f} |"
            )
    return lines


def _step_of_rank_0(plan: Plan) -> None:
    batch = plan.batch.take([0])  # a new batch, without derived values
    rank_recipe(plan, 0)
    token_positions(batch, np.arange(batch.tokens))
    batch_sequences(batch)


if __name__ == "__main__":
    main()
