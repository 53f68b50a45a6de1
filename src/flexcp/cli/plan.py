"""``flexcp plan``: plan one batch and show the plan."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import typer

from flexcp.cli import options as o
from flexcp.cli.progress import compiling

if TYPE_CHECKING:
    from flexcp.plan import Plan

REPEATS = 7


def plan(
    lengths: o.Lengths,
    mask: o.MaskText = "causal",
    cluster: o.ClusterText = None,
    nodes: o.Nodes = None,
    ranks_per_node: o.RanksPerNode = None,
    ranks: o.Ranks = None,
    speeds: o.Speeds = None,
    heads: o.Heads = 32,
    kv_heads: o.KvHeads = None,
    head_dim: o.HeadDim = 128,
    v_head_dim: o.VHeadDim = None,
    dtype: o.Dtype = "bfloat16",
    strategy: o.Strategy = "auto",
    effort: o.Effort = None,
    compute_tolerance: o.ComputeTolerance = None,
    token_tolerance: o.TokenTolerance = None,
    max_tokens_per_rank: o.MaxTokens = None,
    tokens: o.Tokens = "priced",
    pad_to: o.PadTo = None,
    layout: o.Layout = "free",
    as_json: o.Json = False,
) -> None:
    """Plan one batch: who keeps and computes what, and what moves.

    Example: `flexcp plan --lengths 4096,800,1 --ranks 8 --heads 8 --kv-heads 2 --strategy blocks`
    """
    from flexcp.data.lengths import parse_lengths

    given = dict(locals())
    asked = o.PlanOptions(**{name: given[name] for name in o.PlanOptions.__dataclass_fields__})
    numbers = parse_lengths(lengths)
    planner = asked.planner()
    times, found = [], None
    with compiling():
        for _ in range(1 + (REPEATS if as_json else 0)):
            begin = time.perf_counter()
            found = asked.plan(planner, numbers)
            _ = found.hash
            times.append((time.perf_counter() - begin) * 1000)
    assert found is not None
    if as_json:
        typer.echo(json.dumps(summary(found, times), indent=2))
    else:
        typer.echo(str(found))


def summary(plan: Plan, times_ms: list[float]) -> dict[str, Any]:
    """The documented JSON keys; ``times_ms`` are the first call and its repeats."""
    from flexcp.plan import imbalance

    forward = plan.bytes()
    return {
        "strategy": plan.strategy,
        "ranks": plan.ranks,
        "tokens": plan.batch.tokens,
        "planning_ms": round(statistics.median(times_ms[1:] or times_ms), 3),
        "first_plan_ms": round(times_ms[0], 3),
        "forward_bytes": int(forward.sum()),
        "forward_inter_node_bytes": plan.inter_node_bytes(),
        "backward_bytes": int(plan.bytes(backward=True).sum()),
        "max_rank_sent_bytes": int(forward.sum(axis=1).max()),
        "max_rank_received_bytes": int(forward.sum(axis=0).max()),
        "compute_imbalance": round(imbalance(plan.work()), 6),
        "token_imbalance": round(imbalance(plan.placement.tokens), 6),
        "stages": plan.programs[0][0].stages,
        "hash": plan.hash,
    }
