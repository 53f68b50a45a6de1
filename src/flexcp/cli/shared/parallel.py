"""``--tp``, ``--pp`` and ``--ep``: how other parallelisms divide the GPUs and the model of a command.

They are the degrees of tensor, pipeline and expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared.option_groups import OptionGroup
from flexcp.cli.shared.progress import say

if TYPE_CHECKING:
    from flexcp.clusters import Cluster
    from flexcp.models.preset import Preset
    from flexcp.models.topology import Topology
    from flexcp.shape import Shape


@dataclass(frozen=True)
class Divided:
    """What other parallelisms leave to context parallelism.

    ``topology`` has the ranks and heads that are left, ``preset`` is the part of the model that one rank has (None if
    only heads are given), and ``words`` describe the division (empty if nothing is divided).
    """

    topology: Topology
    preset: Preset | None
    words: str = ""

    def announced(self) -> Divided:
        """Say on stderr how GPUs and model are divided, if they are, and return this object."""
        if self.words:
            say(self.words)
        return self


class ParallelOptions(OptionGroup):
    """Parallelisms beside context parallelism."""

    tp: Annotated[
        int, typer.Option(help="Tensor parallelism: divides heads and a node's GPUs; --cluster counts GPUs then.")
    ] = 1
    pp: Annotated[int, typer.Option(help="Pipeline stages: divide GPUs and layers.")] = 1
    ep: Annotated[int, typer.Option(help="Expert parallelism: divides experts' weights; ranks and heads stay.")] = 1

    def divided(self, cluster: Cluster, shape: Shape, preset: Preset | None) -> Divided:
        """Divide the GPUs of ``cluster`` and a model by these parallelisms; raise ValueError if that leaves a rest.

        ``preset`` is None if only attention's ``shape`` is known.
        """
        from flexcp.models.topology import topology

        found = topology(cluster, shape, None if preset is None else preset.model, tp=self.tp, pp=self.pp)
        if preset is None and self.ep != 1:
            raise ValueError(f"--ep {self.ep} divides the experts of a whole model; give --model, or drop --ep")
        gpus = cluster.ranks // self.pp
        if preset is not None and preset.experts > 1 and self.ep > 0 and (gpus % self.ep or preset.experts % self.ep):
            fits = [n for n in range(1, gpus + 1) if gpus % n == 0 and preset.experts % n == 0]
            raise ValueError(
                f"--ep {self.ep} does not divide both the {preset.experts} experts of {preset.model.name} and the "
                f"{gpus} GPUs of {cluster} that hold the same layers; use one of {fits}"
            )
        part = None if preset is None else self.part(preset)
        return Divided(found, part, self._words(cluster, shape, found))

    @contextmanager
    def naming_ranks(self, cluster: Callable[[], Cluster]) -> Iterator[None]:
        """Extend a ValueError about ranks that is raised in the ``with`` block: say how many GPUs make so few ranks.

        It adds, for example, ``(32 GPUs / tp 8 = 4 context-parallel ranks)``. The GPUs are those of ``cluster()``,
        which is called only for such an error.
        """
        try:
            yield
        except ValueError as error:
            degrees = [f"{name} {value}" for name, value in (("tp", self.tp), ("pp", self.pp)) if value > 1]
            gpus = cluster().ranks if degrees and "rank" in str(error) else 0
            left, rest = divmod(gpus, self.tp * self.pp)
            if not left or rest:
                raise
            of = " / ".join([f"{gpus} GPUs", *degrees])
            raise ValueError(f"{error} ({of} = {left} context-parallel {'rank' if left == 1 else 'ranks'})") from None

    def part(self, preset: Preset) -> Preset:
        """Return the part of a whole model that one rank has; raise ValueError if a degree does not divide it."""
        from flexcp.models.topology import divided_preset

        return divided_preset(preset, **vars(self))

    def _words(self, cluster: Cluster, shape: Shape, found: Topology) -> str:
        degrees = {name: value for name, value in vars(self).items() if value > 1}
        if not degrees:
            return ""
        ranks, each = found.cluster.ranks, found.cluster.ranks_per_node
        copied = f" (a copy of one of {shape.kv_heads})" if shape.kv_heads < self.tp else ""
        text = (
            f"{cluster} under {', '.join(f'{name} {value}' for name, value in degrees.items())}: {ranks} "
            f"context-parallel {'rank' if ranks == 1 else 'ranks'}, {each} a node, each with {found.shape.heads} query "
            f"and {found.shape.kv_heads} KV heads{copied}"
        )
        if self.pp > 1:
            text += "; times are of one stage, without bubbles"
        if self.ep > 1:
            text += "; experts use the same ranks, and their exchange of tokens is left out"
        return text
