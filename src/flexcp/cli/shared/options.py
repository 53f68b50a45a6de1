"""Options that commands share; they carry the names of ``Planner``'s arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flexcp.clusters import Cluster
    from flexcp.models.preset import Preset
    from flexcp.plan.plan import Plan
    from flexcp.planner import Planner
    from flexcp.shape import Shape


def tokens(text: str | int) -> int:
    """A count of tokens on the command line, 32768 or 32k; or an option's default."""
    from flexcp.data.lengths import parse_count

    try:
        return parse_count(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no count of tokens; write 32768 or 32k") from None


def writable(path: Path | None) -> Path | None:
    """A file that a command is to write: a folder that is not there is told before the work, not after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    return path


Lengths = Annotated[str, typer.Option(help="4096,4k,1 or 64x2048 or @file or NAME:TOKENS:SEED (web:131072:0).")]
MASKS = "causal, full, window:W, lambda:S,W, shared-question:N,SHARE, blockwise:B,L, prefix:P, @mask.json"
MaskText = Annotated[str, typer.Option("--mask", help=f"{MASKS}.")]
MaybeMask = Annotated[
    str | None, typer.Option("--mask", help=f"{MASKS}; what the model's layers have, else causal, by default.")
]
ClusterText = Annotated[
    str | None, typer.Option("--cluster", help="Preset and shape, as in h100:4x8; --ranks R is one node of R H100.")
]
Nodes = Annotated[int | None, typer.Option(help="Number of nodes.")]
RanksPerNode = Annotated[int | None, typer.Option(help="Ranks on each node.")]
Ranks = Annotated[int | None, typer.Option(help="One node of this many ranks, in place of --cluster.")]
Speeds = Annotated[str | None, typer.Option(help="Speed factor of each rank, 1 being the preset's: 1,0.93,1,1.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="llama3-8b, llama3-70b, gpt-8b, qwen3-30b-a3b, qwen2.5-vl-7b, or a Hugging Face config.json or its folder; or describe it "
        "by --heads, --kv-heads, --head-dim, --hidden and --layers.",
    ),
]
HeadsOf = Annotated[
    str | None,
    typer.Option("--model", help="Take the heads of llama3-8b, ..., or of a Hugging Face config.json or its folder."),
]
Heads = Annotated[int | None, typer.Option(help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="KV heads; as many as query heads by default.")]
HeadDim = Annotated[int | None, typer.Option(help="Size of a query and key head.")]
Hidden = Annotated[int | None, typer.Option(help="Width of the model; heads x head-dim by default.")]
Layers = Annotated[int | None, typer.Option(help="Layers of the model.")]
BatchNumber = Annotated[
    int | None, typer.Option("--batch", help="Which batch of a lengths file; the first by default.")
]
VHeadDim = Annotated[int | None, typer.Option(help="Size of a value head; head-dim by default.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")]
Strategy = Annotated[str, typer.Option(help="A strategy, with its degree: blocks, zigzag:4, usp:4,2, ...")]
Effort = Annotated[int | None, typer.Option(help="Candidates that may be evaluated; a count, never a clock.")]
ComputeTolerance = Annotated[float | None, typer.Option(help="Compute over the mean a rank may have: 0.05 is 5 %.")]
TokenTolerance = Annotated[float | None, typer.Option(help="Tokens over the mean a rank may keep.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens-per-rank", parser=tokens, metavar="TOKENS", help="Hard cap on the tokens a rank keeps, as in 32k."
    ),
]
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
    Path | None,
    typer.Option("--html", callback=writable, help="Write a report to this file: one page with pictures, no network."),
]
MOST_RANKS = 4096
"""Tables of bytes have a cell for every pair of ranks."""
HEAD_DIM = 128
"""Of a model by its numbers, where neither its width nor the head's size is told."""


@dataclass(frozen=True)
class PlanOptions:
    """Everything that decides a plan, as given on the command line."""

    lengths: str
    batch: int | None
    mask: str | None
    cluster: str | None
    nodes: int | None
    ranks_per_node: int | None
    ranks: int | None
    speeds: str | None
    model: str | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    hidden: int | None
    layers: int | None
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

    def planner(self, default: tuple[int, int, int]) -> Planner:
        """The planner these options describe; ``default`` are query heads, KV heads and head size where they say nothing."""
        from flexcp.calibration import Calibration, read_calibration
        from flexcp.cost import CostModel
        from flexcp.planner import Planner

        measured = Calibration(CostModel()) if self.cost is None else read_calibration(self.cost)
        found, shape = self.described.whole(), self.described.attention(default)
        return Planner(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.dtype,
            cluster=measured.on(find_cluster(self.cluster, self.ranks, self.nodes, self.ranks_per_node, self.speeds)),
            cost=measured.cost,
            model=None if found is None else found.model,
            strategy=self.strategy,
            effort=self.effort,
            compute_tolerance=self.compute_tolerance,
            token_tolerance=self.token_tolerance,
            max_tokens_per_rank=self.max_tokens_per_rank,
            max_memory_per_rank=self.max_memory_per_rank,
            keep_kv=self.keep_kv,
            max_peers=self.max_peers,
        )

    @property
    def described(self) -> Described:
        """The model, by name or by numbers."""
        return Described(self.model, self.heads, self.kv_heads, self.head_dim, self.hidden, self.layers)

    def plan(self, planner: Planner, lengths: list[int]) -> Plan:
        """One uncached call of the planner."""
        from flexcp.masks import parse_mask

        found, rule = self.described.whole(), None if self.mask is None else parse_mask(self.mask)
        way: Any = {"layout": self.layout, "tokens": self.tokens, "pad_to": self.pad_to}
        if found is None:
            return planner(lengths, rule, **way)
        masks: Any = found.masks() if rule is None else {"mask": (rule, found.model.layers)}
        return planner(lengths, masks=masks, **way)


@dataclass(frozen=True)
class Described:
    """A model as commands are told it: by ``--model``, or by its numbers; or only the heads of attention alone."""

    model: str | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    hidden: int | None
    layers: int | None

    def whole(self) -> Preset | None:
        """The whole model; None where nothing, or only heads, are told."""
        from flexcp.models.find import find_model, make_model

        numbers = {"--heads": self.heads, "--kv-heads": self.kv_heads, "--head-dim": self.head_dim}
        numbers |= {"--hidden": self.hidden, "--layers": self.layers}
        given = [flag for flag, value in numbers.items() if value is not None]
        if self.model is not None:
            found = find_model(self.model)
            if given:
                raise ValueError(f"--model {self.model} brings its own sizes; drop {', '.join(given)}, or drop --model")
            return found
        if self.hidden is None and self.layers is None:
            return None
        if self.heads is None or self.layers is None:
            missing = "--heads" if self.heads is None else "--layers"
            raise ValueError(f"a model by its numbers needs --heads and --layers; {missing} is missing")
        for flag, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{flag} is at least 1; got {value}")
        head_dim = self.head_dim or (HEAD_DIM if self.hidden is None else max(1, self.hidden // self.heads))
        return make_model(self.heads, self.kv_heads or self.heads, head_dim, self.hidden, self.layers)

    def attention(self, default: tuple[int, int, int]) -> Shape:
        """The heads of the model, or those told; else ``default``'s query heads, KV heads and head size.

        There are as many KV heads as query heads once those are told.
        """
        from flexcp.shape import Shape

        found = self.whole()
        if found is not None:
            return found.shape
        heads, kv_heads, size = default
        if self.heads is not None:
            heads = kv_heads = self.heads
        kv_heads = kv_heads if self.kv_heads is None else self.kv_heads
        size = size if self.head_dim is None else self.head_dim
        return Shape(heads, kv_heads, size, size)


def find_cluster(
    text: str | None,
    ranks: int | None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    speeds: str | None = None,
    default: str = "h100",
) -> Cluster:
    """The cluster that ``--cluster``, ``--ranks``, ``--nodes`` and ``--ranks-per-node`` describe together."""
    from flexcp.clusters import cluster

    shaped = nodes is not None or ranks_per_node is not None
    if ranks is not None:
        if nodes is not None and nodes > ranks:
            raise ValueError(f"--nodes {nodes} is more than --ranks {ranks}: every node has at least one rank")
        if text or shaped:
            raise ValueError("--ranks R is one node of R; drop it, or drop --cluster, --nodes and --ranks-per-node")
        nodes, ranks_per_node, default = 1, ranks, "h100"
    if text and re.fullmatch(r"\d+x\d+", text):
        raise ValueError(
            f"--cluster {text} is a shape without a machine; write h100:{text}, or another preset in its place"
        )
    found = cluster(text or default)
    if text and ":" in text and shaped:
        raise ValueError(f"--cluster {text} already gives the shape; drop --nodes and --ranks-per-node")
    made = cluster(
        found.name,
        found.nodes if nodes is None else nodes,
        found.ranks_per_node if ranks_per_node is None else ranks_per_node,
        None if speeds is None else _factors(speeds),
    )
    if made.ranks > MOST_RANKS:
        raise ValueError(f"{made.ranks:,} ranks are more than a command plans for, which is {MOST_RANKS:,}")
    return made


def _factors(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--speeds {text!r} is no list of numbers; write one factor per rank, as in 1,0.93,1,1"
        ) from None
