"""Options that commands share; they carry the names of ``Planner``'s arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flexcp.clusters import Cluster
    from flexcp.plan import Plan
    from flexcp.planner import Planner

Lengths = Annotated[str, typer.Option(help="4096,800,1 or 64x2048 or @file or NAME:TOKENS:SEED (web:131072:0).")]
MaskText = Annotated[
    str,
    typer.Option(
        "--mask",
        help="causal, full, window:W, lambda:S,W, shared-question:N,SHARE, blockwise:B,L, prefix:P, @mask.json.",
    ),
]
ClusterText = Annotated[str | None, typer.Option("--cluster", help="Preset and shape, as in h100:4x8.")]
Nodes = Annotated[int | None, typer.Option(help="Number of nodes.")]
RanksPerNode = Annotated[int | None, typer.Option(help="Ranks on each node.")]
Ranks = Annotated[int | None, typer.Option(help="One node of this many ranks.")]
Speeds = Annotated[str | None, typer.Option(help="Speed factor of each rank, 1 being the preset's: 1,0.93,1,1.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="KV heads; as many as query heads by default.")]
HeadDim = Annotated[int, typer.Option(help="Size of a query and key head.")]
VHeadDim = Annotated[int | None, typer.Option(help="Size of a value head; head-dim by default.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")]
Strategy = Annotated[str, typer.Option(help="A strategy, with its degree: blocks, zigzag:4, usp:4,2, ...")]
Effort = Annotated[int | None, typer.Option(help="Candidates that may be evaluated; a count, never a clock.")]
ComputeTolerance = Annotated[float | None, typer.Option(help="Compute over the mean a rank may have: 0.05 is 5 %.")]
TokenTolerance = Annotated[float | None, typer.Option(help="Tokens over the mean a rank may keep.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens-per-rank", help="Hard cap on the tokens a rank keeps.")]
MaxMemory = Annotated[
    int | None, typer.Option("--max-memory-per-rank", help="Hard cap on the bytes attention needs on a rank.")
]
KeepKv = Annotated[
    int,
    typer.Option("--keep-kv", help="Bytes a rank may keep received keys in for the backward; 0 fetches them again."),
]
MaxPeers = Annotated[int | None, typer.Option(help="Hard cap on the other ranks that a rank exchanges with.")]
Tokens = Annotated[str, typer.Option(help="balanced, priced, or equal for the same count on every rank.")]
PadTo = Annotated[int | None, typer.Option(help="With --tokens equal: round counts up to a multiple.")]
Layout = Annotated[str, typer.Option(help="free, contiguous or zigzag.")]
CostFile = Annotated[Path | None, typer.Option("--cost", help="A cost model written by flexcp calibrate.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write a report to this file: one page with pictures, no network.")
]


@dataclass(frozen=True)
class PlanOptions:
    """Everything that decides a plan, as given on the command line."""

    lengths: str
    mask: str
    cluster: str | None
    nodes: int | None
    ranks_per_node: int | None
    ranks: int | None
    speeds: str | None
    heads: int
    kv_heads: int | None
    head_dim: int
    v_head_dim: int | None
    dtype: str
    strategy: str
    effort: int | None
    compute_tolerance: float | None
    token_tolerance: float | None
    max_tokens_per_rank: int | None
    max_memory_per_rank: int | None
    keep_kv: int
    max_peers: int | None
    tokens: str
    pad_to: int | None
    layout: str
    cost: Path | None

    def planner(self) -> Planner:
        """The planner these options describe."""
        from flexcp.calibration import Calibration, read_calibration
        from flexcp.cost import CostModel
        from flexcp.planner import Planner

        measured = Calibration(CostModel()) if self.cost is None else read_calibration(self.cost)
        return Planner(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.dtype,
            cluster=measured.on(self._cluster()),
            cost=measured.cost,
            strategy=self.strategy,
            effort=self.effort,
            compute_tolerance=self.compute_tolerance,
            token_tolerance=self.token_tolerance,
            max_tokens_per_rank=self.max_tokens_per_rank,
            max_memory_per_rank=self.max_memory_per_rank,
            keep_kv=self.keep_kv,
            max_peers=self.max_peers,
        )

    def plan(self, planner: Planner, lengths: list[int]) -> Plan:
        """One uncached call of the planner."""
        from flexcp.masks import parse_mask

        return planner(lengths, parse_mask(self.mask), layout=self.layout, tokens=self.tokens, pad_to=self.pad_to)

    def _cluster(self) -> Cluster:
        from flexcp.clusters import cluster, parse_cluster

        nodes, per_node = self.nodes, self.ranks_per_node
        shaped = nodes is not None or per_node is not None
        if self.ranks is not None:
            if nodes is not None and nodes > self.ranks:
                raise ValueError(f"--nodes {nodes} is more than --ranks {self.ranks}: every node has at least one rank")
            if self.cluster or shaped:
                raise ValueError("--ranks R is one node of R; drop it, or drop --cluster, --nodes and --ranks-per-node")
            nodes, per_node = 1, self.ranks
        found = parse_cluster(self.cluster or "h100")
        if self.cluster and ":" in self.cluster and shaped:
            raise ValueError(f"--cluster {self.cluster} already gives the shape; drop --nodes and --ranks-per-node")
        return cluster(
            found.name,
            found.nodes if nodes is None else nodes,
            found.ranks_per_node if per_node is None else per_node,
            None if self.speeds is None else _factors(self.speeds),
        )


def _factors(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--speeds {text!r} is no list of numbers; write one factor per rank, as in 1,0.93,1,1"
        ) from None
