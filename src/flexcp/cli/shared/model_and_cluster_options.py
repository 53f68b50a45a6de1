"""Option groups for a model and a cluster, and the objects that they describe."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared.option_groups import OptionGroup

if TYPE_CHECKING:
    from flexcp.clusters import Cluster
    from flexcp.models.preset import Preset
    from flexcp.shape import Shape

MOST_RANKS = 4096
"""The most ranks that a command plans for; tables of bytes have a cell for every pair of ranks."""
HEADS = (32, 8, 128)
"""Query heads, KV heads and head size where neither a model nor numbers are given."""
HEAD_DIM = 128
"""Head size of a model given by numbers, if neither ``--hidden`` nor ``--head-dim`` is given."""


class HeadsOptions(OptionGroup):
    """The heads of attention: those of a model, or given by numbers."""

    model: Annotated[
        str | None,
        typer.Option(help="Take the heads of llama3-8b, ..., or of a Hugging Face config.json or its folder."),
    ] = None
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; as many as query heads by default.")] = None
    head_dim: Annotated[int | None, typer.Option(help="Size of a query and key head.")] = None

    @property
    def told(self) -> dict[str, int]:
        """The numbers that were given, by name: ``{"heads": 32}``; ``model`` is not among them."""
        given = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: value for name, value in given.items() if name != "model" and value is not None}

    @property
    def flags(self) -> str:
        """The options that gave numbers, as they are written: ``--heads, --head-dim``."""
        return ", ".join(flag(name) for name in self.told)

    def whole(self) -> Preset | None:
        """Return the model that ``--model`` names, or None without it; raise ValueError if numbers are given, too."""
        found = self._found
        if found is not None and self.told:
            raise ValueError(f"--model {self.model} brings its own sizes; drop {self.flags}, or drop --model")
        return found

    @cached_property
    def _found(self) -> Preset | None:
        """The model that ``--model`` names, or None.

        Its file is read once, because it may be a pipe, or change while a command runs.
        """
        from flexcp.models.find import find_model

        return None if self.model is None else find_model(self.model)

    def attention(self, default: tuple[int, int, int]) -> Shape:
        """Return the attention shape of the model or, without one, of the given numbers.

        ``default`` are the query heads, KV heads and head size that are used for numbers not given. If only query heads
        are given, there are as many KV heads.
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


class ModelOptions(HeadsOptions):
    """A whole model, by name or by its numbers; or only the heads of attention."""

    model: Annotated[
        str | None,
        typer.Option(
            help="llama3-8b, llama3-70b, gpt-8b, qwen3-30b-a3b, qwen2.5-vl-7b, or a Hugging Face config.json or its "
            "folder; or describe it by --heads, --kv-heads, --head-dim, --hidden and --layers."
        ),
    ] = None
    hidden: Annotated[int | None, typer.Option(help="Width of the model; heads x head-dim by default.")] = None
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None

    def whole(self) -> Preset | None:
        """Return the model that ``--model`` names or that ``--hidden`` and ``--layers`` describe; None without these.

        Raise ValueError if the numbers are not enough for a model, contradict each other, or are given beside
        ``--model``.
        """
        from flexcp.models.find import make_model

        if self.model is not None or (self.hidden is None and self.layers is None):
            return super().whole()
        if self.heads is None or self.layers is None:
            missing = "--heads" if self.heads is None else "--layers"
            raise ValueError(f"a model by its numbers needs --heads and --layers; {missing} is missing")
        for name, value in self.told.items():
            if value < 1:
                raise ValueError(f"{flag(name)} is at least 1; got {value}")
        if self.hidden is not None and self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"--heads {self.heads} do not divide --hidden {self.hidden}; give --head-dim, too")
        head_dim = self.head_dim or (HEAD_DIM if self.hidden is None else self.hidden // self.heads)
        return make_model(self.heads, self.kv_heads or self.heads, head_dim, self.hidden, self.layers)


class ClusterOptions(OptionGroup):
    """A cluster, by its preset and shape, or as one node of H100 with ``--ranks``."""

    cluster: Annotated[
        str | None, typer.Option(help="Preset and shape, as in h100:4x8; --ranks R is one node of R H100.")
    ] = None
    ranks: Annotated[int | None, typer.Option(help="One node of this many ranks, in place of --cluster.")] = None

    def found(self, default: str = "h100") -> Cluster:
        """Return the cluster that these options describe.

        ``default`` is used if no option is given: a preset with or without a shape, as in ``h100:4x8``.
        """
        return find_cluster(self.cluster, self.ranks, default=default)


class ShapedClusterOptions(ClusterOptions):
    """A cluster whose shape and speeds may be given one by one."""

    nodes: Annotated[int | None, typer.Option(help="Number of nodes.")] = None
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks on each node.")] = None
    speeds: Annotated[str | None, typer.Option(help="Speed factor of each rank, 1 being the preset's: 1,0.93,1,1.")] = (
        None
    )

    def found(self, default: str = "h100") -> Cluster:
        """Return the cluster that these options describe.

        ``default`` is used if neither ``--cluster`` nor ``--ranks`` is given: a preset with or without a shape, as in
        ``h100:4x8``.
        """
        return find_cluster(self.cluster, self.ranks, self.nodes, self.ranks_per_node, self.speeds, default)


def flag(name: str) -> str:
    """Return an option as it is written on the command line: ``kv_heads`` gives ``--kv-heads``."""
    return f"--{name.replace('_', '-')}"


def find_cluster(
    text: str | None,
    ranks: int | None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    speeds: str | None = None,
    default: str = "h100",
) -> Cluster:
    """Return the cluster that ``--cluster`` (here ``text``), ``--ranks`` and the other arguments describe together.

    ``speeds`` is text with one factor per rank, as in ``1,0.93``. Without ``text``, the cluster is ``default`` or, with
    ``ranks``, one node of H100. Raise ValueError if options contradict each other, or for more than :data:`MOST_RANKS`
    ranks.
    """
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
