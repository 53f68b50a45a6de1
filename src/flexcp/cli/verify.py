"""``flexcp verify``: run a plan on real processes and compare with one device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flexcp.cli import options as o
from flexcp.cli.progress import compiling

Seed = Annotated[int, typer.Option(help="Seed of the random inputs.")]
Kernel = Annotated[str, typer.Option(help="cpu or reference.")]


def verify(
    lengths: o.Lengths,
    mask: o.MaskText = "causal",
    cluster: o.ClusterText = None,
    nodes: o.Nodes = None,
    ranks_per_node: o.RanksPerNode = None,
    ranks: o.Ranks = None,
    speeds: o.Speeds = None,
    heads: o.Heads = 4,
    kv_heads: o.KvHeads = None,
    head_dim: o.HeadDim = 32,
    v_head_dim: o.VHeadDim = None,
    dtype: o.Dtype = "float64",
    strategy: o.Strategy = "auto",
    effort: o.Effort = None,
    compute_tolerance: o.ComputeTolerance = None,
    token_tolerance: o.TokenTolerance = None,
    max_tokens_per_rank: o.MaxTokens = None,
    tokens: o.Tokens = "priced",
    pad_to: o.PadTo = None,
    layout: o.Layout = "free",
    seed: Seed = 0,
    kernel: Kernel = "cpu",
    as_json: o.Json = False,
) -> None:
    """Run forward and backward on real processes and compare with dense float64 attention on one.

    Example: `flexcp verify --lengths 700,31,1 --ranks 3 --strategy blocks --heads 4 --kv-heads 2`
    """
    from rich.console import Console

    from flexcp.data.lengths import parse_lengths
    from flexcp.measure.ranks import RankPool

    given = dict(locals())
    asked = o.PlanOptions(**{name: given[name] for name in o.PlanOptions.__dataclass_fields__})
    with compiling():
        plan = asked.plan(asked.planner(), parse_lengths(lengths))
    plan.check()
    from flexcp.measure.verify import Options, check_verifiable, verify_on

    options = Options(seed=seed, kernel=kernel)
    check_verifiable(plan, options)
    with Console(stderr=True).status(f"running {plan!r} on real processes"), RankPool(plan.ranks) as pool:
        verdict = pool.run(verify_on, plan, options)[0]
    result = {**verdict.errors, "bytes_match": verdict.bytes_match, "passed": verdict.passed}
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        for name, error in verdict.errors.items():
            typer.echo(f"{name:>4}  error {error:.2e}   allowed {verdict.allowed[name]:.2e}")
        typer.echo(f"bytes on the wire {'equal' if verdict.bytes_match else 'DIFFER FROM'} the plan's")
        typer.echo("passed" if verdict.passed else "FAILED")
    if not verdict.passed:
        raise typer.Exit(1)
