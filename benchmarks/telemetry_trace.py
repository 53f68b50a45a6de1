"""A trace of 4 CPU ranks, and a small picture of it for the docs.

    python benchmarks/telemetry_trace.py --write docs/pictures/telemetry-trace.svg --trace /tmp/trace.json

Nothing is trained: two layers of attention run forward and backward under one plan. The trace is of the same kind as a
user's own; open it at ui.perfetto.dev. The picture shows the passes of the last layer, with a lane for each rank and
time to the right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import flexcp
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

COLOURS = {"compute": "#3b7dd8", "wait": "#d8d8d8", "pack": "#e6a23c", "receive": "#7ab87a"}
WIDTH, LANE, LEFT, TOP = 760, 34, 56, 28


def main() -> None:
    """Run, trace and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True, help="where the picture goes")
    parser.add_argument("--trace", type=Path, help="where the trace goes")
    parser.add_argument("--strategy", default="ring")
    asked = parser.parse_args()
    planner = flexcp.Planner(4, 2, 64, dtype="float32", cluster=flexcp.cluster("cpu", 1, 4), strategy=asked.strategy)
    plan = planner([3000, 700, 300, 96], flexcp.causal())
    with TemporaryDirectory() as folder, RankPool(4) as pool:
        path = asked.trace or Path(folder) / "trace.json"
        pool.run(traced, plan, str(path))
        asked.write.write_text(picture(json.loads(path.read_text()), plan))


def traced(group: dist.ProcessGroup, plan: Plan, path: str) -> None:
    """Warm up, then trace one step."""
    for telemetry in (flexcp.Telemetry(keep=1), flexcp.Telemetry(keep=1)):
        step = flexcp.bind(plan, group, telemetry=telemetry)
        sizes = (plan.shape.heads, plan.shape.kv_heads, plan.shape.kv_heads)
        q, k, v = (torch.randn(step.local_tokens, n, plan.shape.head_dim, requires_grad=True) for n in sizes)
        for _ in range(2):
            out = flexcp.attention(q, k, v, step)
            assert isinstance(out, torch.Tensor)
            out.sum().backward()
    telemetry.trace(path, group)


def picture(trace: dict[str, Any], plan: Plan) -> str:
    """Return the last layer's forward and backward as SVG."""
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    last = max(e["args"]["pass"] for e in slices)
    shown = [e for e in slices if e["args"]["pass"] >= last - 1 and e["cat"] in COLOURS]
    begin, end = min(e["ts"] for e in shown), max(e["ts"] + e["dur"] for e in shown)
    scale = WIDTH / (end - begin)
    parts = []
    for e in shown:
        low = e["cat"] == "receive"
        x, y = LEFT + (e["ts"] - begin) * scale, TOP + e["pid"] * LANE + (20 if low else 0)
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(e["dur"] * scale, 0.3):.1f}" height="{5 if low else 18}" '
            f'fill="{COLOURS[e["cat"]]}"/>'
        )
    ranks = "".join(f'<text x="4" y="{TOP + r * LANE + 14}">rank {r}</text>' for r in range(plan.ranks))
    key = "".join(
        f'<rect x="{LEFT + 90 * i}" y="6" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LEFT + 90 * i + 16}" y="16">{name}</text>'
        for i, (name, colour) in enumerate(COLOURS.items())
    )
    height = TOP + plan.ranks * LANE + 22
    words = f"{plan.label}, one layer forward and backward: {(end - begin) / 1e3:.0f} ms"
    scale_text = f'<text x="{LEFT}" y="{height - 6}">{words}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 8} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" '
        f'fill="white"/>{key}{ranks}{"".join(parts)}{scale_text}</svg>\n'
    )


if __name__ == "__main__":
    main()
