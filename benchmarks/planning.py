"""Planning, measured: bytes, balance and planning time on fixed batches.
``make planning`` writes docs/results/planning.md.

- *yardstick*: the two batches of 131,072 tokens on which DCP's own planner was measured, four masks, 8 query / 2 KV
  heads of 128, one node of 8 and four nodes; compared with DCP's best row with a compute imbalance of at most 1.4.
- *web*: packs of web documents, 8,192 tokens a rank, 64 / 8 heads of 128, causal, compared with ``minheap``
  (MagiAttention's default dealing) on the same packs; with tolerances and with equal tokens.
- *growth*: 32K tokens a rank up to 1,024 ranks, ``blocks`` and ``auto``, and the size of the plan.
- *many*: up to a million documents on 64 ranks, in CPU seconds, which depend less on other load than wall time.
- *auto*: its planning time on the batches above.

Bytes are those that the placement needs, with every piece sent straight from its owner, as DCP counts them; further
columns are the bytes that cross nodes, straight and with relays. Times are medians of warm, uncached planner calls with
schedule and hash, in one process on this machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.data.lengths import draw_lengths
from flexcp.plan.placement import Traffic
from flexcp.plan.plan import Plan
from flexcp.schedule.predict import predict
from flexcp.schedule.transfers import make_plan
from lib.progress import tracked

LONGTAIL = "5787 4139 11299 5632 2449 7864 26774 16834 1968 948 2185 5186 239 3698 972 1897 2422 3257 8392 19058 72"
BATCHES = {"longtail": [int(n) for n in LONGTAIL.split()], "single": [131_072]}
MASKS = {
    "causal": flexcp.causal(),
    "lambda": flexcp.masks.lambda_(),
    "shared question": flexcp.masks.shared_question(),
    "causal blockwise": flexcp.masks.causal_blockwise(),
}
# DCP's best MB with compute imbalance <= 1.4, or None, by mask, batch and nodes of 8.
KNOWN: dict[tuple[str, str, int], float | None] = {
    ("causal", "longtail", 1): None,
    ("causal", "longtail", 4): None,
    ("causal", "single", 1): 524.5,
    ("causal", "single", 4): 1552,
    ("lambda", "longtail", 1): 22.8,
    ("lambda", "longtail", 4): None,
    ("lambda", "single", 1): 37.7,
    ("lambda", "single", 4): 165.7,
    ("shared question", "longtail", 1): None,
    ("shared question", "longtail", 4): None,
    ("shared question", "single", 1): 254.8,
    ("shared question", "single", 4): 957.7,
    ("causal blockwise", "longtail", 1): 29.7,
    ("causal blockwise", "longtail", 4): 116.6,
    ("causal blockwise", "single", 1): 69.4,
    ("causal blockwise", "single", 4): 231.9,
}
REPEATS = 9
MANY = (100_000, 300_000, 1_000_000)
TOLERANCES = {"compute_tolerance": 0.05, "token_tolerance": 0.05}


def main() -> None:
    """Make the requested tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", choices=["yardstick", "web", "growth", "many", "auto"])
    parser.add_argument("--seeds", type=int, default=20)
    asked = parser.parse_args()
    tables: dict[str, Callable[[int], list[str]]] = {
        "yardstick": _yardstick,
        "web": _web,
        "growth": _growth,
        "many": _many,
        "auto": _auto,
    }
    lines = [
        "# Planning: bytes, balance, time",
        "",
        f"**Measured**, by `make planning` on {date.today().isoformat()} ({platform.machine()}, one process). Times "
        "include placement, schedule and hash; "
        "first calls are excluded. Bytes and balance are properties of the plans.",
        "",
    ]
    for name, table in tables.items():
        if asked.only in (None, name):
            lines += [*table(asked.seeds), ""]
    text = "\n".join(lines)
    Console().print(text, markup=False)
    if asked.write:
        asked.write.write_text(text)


def _timed(call: Callable[[], Plan], repeats: int = REPEATS) -> tuple[Plan, float]:
    plan = call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = call()
        _ = plan.hash
        times.append((time.perf_counter() - begin) * 1000)
    return plan, statistics.median(times)


def _straight(plan: Plan) -> Plan:
    """Return the same placement without relays."""
    placement = replace(plan.placement, traffic=Traffic(relay=False))
    return make_plan(placement, plan.shape, plan.cluster, plan.cost, plan.requested)


def _yardstick(seeds: int) -> list[str]:
    lines = [
        "## The two batches of DCP's planner",
        "",
        "Forward MB of one layer of `blocks` with both tolerances at 0.05, beside the best result of DCP's planner "
        "(arXiv 2510.10620) on the same batch whose compute imbalance is at most 1.4 (`-`: it has none). *Across "
        "nodes* and *with relays* are the bytes that cross between nodes without and with relays.",
        "",
        "| mask | batch | ranks | blocks | DCP | across nodes | with relays | compute | tokens | planning ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (mask, batch, nodes), dcp in tracked(KNOWN.items(), "yardstick"):
        planner = flexcp.Planner(8, 2, 128, cluster=flexcp.cluster("a100", nodes, 8), strategy="blocks", **TOLERANCES)
        plan, ms = _timed(partial(planner, BATCHES[batch], MASKS[mask]))
        plan.check()
        straight = _straight(plan)
        lines.append(
            f"| {mask} | {batch} | {nodes}x8 | {straight.bytes().sum() / 1e6:.1f} | "
            f"{'-' if dcp is None else f'{dcp:g}'} | {straight.inter_node_bytes() / 1e6:.1f} | "
            f"{plan.inter_node_bytes() / 1e6:.1f} | {imbalance(plan.work()):.3f} | "
            f"{imbalance(plan.placement.tokens):.3f} | {ms:.1f} |"
        )
    return lines


def _web(seeds: int) -> list[str]:
    lines = [
        f"## Web packs (8,192 tokens a rank, 64 / 8 heads, causal, {seeds} seeds, beside `minheap` on the same packs)",
        "",
        "*Volume* is the mean of the bytes a rank receives over the bytes of all keys and values. *Exposed* is the "
        "predicted share of the step in which the slowest rank waits for communication: what levelling the worst "
        "rank's bytes could gain at most.",
        "",
        "| ranks | tokens | compute max | tokens max | bytes / minheap's | volume | worst rank / mean | exposed % | "
        "planning ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for equal in (False, True):
        for ranks in (8, 16, 32, 64):
            where = flexcp.cluster("h100", ranks // 8, 8)
            tolerances = {"compute_tolerance": 0.05, "token_tolerance": None if equal else 0.05}
            planner = flexcp.Planner(64, 8, 128, cluster=where, strategy="blocks", **tolerances)
            rival = flexcp.Planner(64, 8, 128, cluster=where, strategy="minheap")
            rows = []
            for seed in tracked(range(seeds), f"web {ranks} {'equal' if equal else ''}"):
                lengths = draw_lengths("web", 8192 * ranks, seed)
                how = "equal" if equal else "balanced"
                plan, ms = _timed(partial(planner, lengths, tokens=how), repeats=3)
                received = _straight(plan).bytes().sum(axis=0)
                other = int(rival(lengths).bytes().sum())
                worst = received.max() / max(1.0, received.mean())
                found = predict(plan.placement, plan.shape, plan.cluster, plan.cost)
                exposed = 100 * found.breakdown["exposed"] / found.total_ns
                balance = (imbalance(plan.work()), imbalance(plan.placement.tokens))
                rows.append((*balance, int(received.sum()), other, worst, exposed, ms))
            compute, tokens, ours, theirs, worst, exposed, times = zip(*rows, strict=True)
            volume = statistics.mean(ours) / ranks / (8192 * ranks * 4096)
            lines.append(
                f"| {ranks} | {'equal' if equal else 'tolerance 0.05'} | {max(compute):.3f} | {max(tokens):.3f} "
                f"| {sum(ours) / sum(theirs):.3f} | {volume:.4f} | {statistics.mean(worst):.2f} | "
                f"{statistics.mean(exposed):.2f} | {statistics.median(times):.1f} |"
            )
    return lines


def _growth(seeds: int) -> list[str]:
    lines = [
        "## Growth (32K tokens a rank, libra256k lengths, 64 / 8 heads, causal)",
        "",
        "| ranks | documents | transfers | blocks ms | auto ms | auto's plan, KB of tables | compressed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ranks in tracked((8, 32, 128, 256, 512, 1024), "growth"):
        lengths = draw_lengths("libra256k", 32_768 * ranks, 0)
        where = flexcp.cluster("h100", ranks // 8, 8)
        _, blocks_ms = _timed(partial(flexcp.Planner(64, 8, 128, cluster=where, strategy="blocks"), lengths), repeats=3)
        plan, auto_ms = _timed(partial(flexcp.Planner(64, 8, 128, cluster=where), lengths), repeats=3)
        moved = len(plan.programs[0][0].transfers) + len(plan.programs[0][1].transfers)
        tables = b"".join(table.matrix().tobytes() for table in plan.tables())
        lines.append(
            f"| {ranks} | {len(lengths)} | {moved} | {blocks_ms:.1f} | {auto_ms:.1f} | {len(tables) / 1e3:.0f} "
            f"| {len(zlib.compress(tables)) / 1e3:.0f} |"
        )
    return lines


def _many(seeds: int) -> list[str]:
    """Measure CPU seconds of one call each, after a small batch has loaded the compiled loops."""
    lines = [
        "## Many documents (8 nodes of 8 ranks, 64 / 8 heads, causal, seconds of CPU)",
        "",
        "*web*: documents of `web` end to end; *short and long*: 1 to 499 tokens, and 20 documents of 2,000,000.",
        "",
        "| documents | lengths | tokens | blocks s | auto s | auto took | `plan.explain()` s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    where = flexcp.cluster("h100", 8, 8)
    planners = [flexcp.Planner(64, 8, 128, cluster=where, strategy=name) for name in ("blocks", "auto")]
    for count in tracked(MANY, "many"):
        for name in ("web", "short and long"):
            lengths = _many_lengths(name, count)
            times = []
            for planner in planners:
                planner(lengths[:2000])
                begin = time.process_time()
                plan = planner(lengths)
                _ = plan.hash
                times.append(time.process_time() - begin)
            begin = time.process_time()
            plan.explain()
            explained = time.process_time() - begin
            lines.append(
                f"| {len(lengths):,} | {name} | {int(lengths.sum()):,} | {times[0]:.1f} | {times[1]:.1f} "
                f"| {plan.strategy} | {explained:.2f} |"
            )
    return lines


def _many_lengths(name: str, count: int) -> NDArray[np.int64]:
    if name == "web":
        return np.resize(np.array(draw_lengths("web", 1 << 26, 0), np.int64), count)
    lengths = np.random.default_rng(0).integers(1, 500, count)
    lengths[:20] = 2_000_000
    return lengths


def _auto(seeds: int) -> list[str]:
    lines = ["## Planning time of auto", "", "| batch | ranks | ms |", "| --- | --- | --- |"]
    for nodes in (1, 4):
        planner = flexcp.Planner(8, 2, 128, cluster=flexcp.cluster("a100", nodes, 8), **TOLERANCES)
        times = [_timed(partial(planner, b, m), repeats=3)[1] for b in BATCHES.values() for m in MASKS.values()]
        lines.append(f"| DCP's batches x 4 masks, slowest | {nodes}x8 | {max(times):.1f} |")
    for ranks in (8, 16, 32, 64):
        planner = flexcp.Planner(64, 8, 128, cluster=flexcp.cluster("h100", ranks // 8, 8))
        packs = [draw_lengths("web", 8192 * ranks, seed) for seed in range(seeds)]
        times = [_timed(partial(planner, pack), repeats=3)[1] for pack in packs]
        lines.append(f"| web packs, median | {ranks} | {statistics.median(times):.1f} |")
    return lines


if __name__ == "__main__":
    main()
