"""``--sync`` and ``--overlap``: the gradient sync of a training step, for commands that time or plan one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared.option_groups import OptionGroup

if TYPE_CHECKING:
    from flexcp.models.preset import Preset
    from flexcp.simulator.step_parts import Training


class StepOptions(OptionGroup):
    """The gradient sync of a step; used only with a whole model."""

    sync: Annotated[str, typer.Option(help="Gradient sync of a step: fsdp, allreduce or none.")] = "fsdp"
    overlap: Annotated[float, typer.Option(help="Share of a layer's time behind which gradient sync may hide.")] = 1.0

    def training(self, preset: Preset | None, tp: int) -> Training | None:
        """Return the training step of a model, or None without a model; raise ValueError for wrong options.

        ``preset`` is the part of the model that one rank has, and ``tp`` the degree of tensor parallelism.
        """
        from flexcp.simulator.step_parts import SYNCS, Training

        if self.sync not in SYNCS:
            raise ValueError(f"--sync is {', '.join(SYNCS)}; got {self.sync!r}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"--overlap is a share between 0 and 1; got {self.overlap}")
        return None if preset is None else Training(preset, self.sync, round(1000 * self.overlap), tp)
