"""What ``simulate`` and ``compare`` are asked about: a batch, a model, a cluster and a cost model, from the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.options import CostFile as CostFile

if TYPE_CHECKING:
    from flexcp.calibration import Calibration
    from flexcp.planners.request import Request
    from flexcp.simulator.compare import Compute
    from flexcp.simulator.passes import Rules
    from flexcp.simulator.training import Training

ClusterText = Annotated[str, typer.Option("--cluster", help="Preset and shape, as in h100:4x8.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="llama3-8b, llama3-70b, gpt-8b, qwen3-30b-a3b or qwen2.5-vl-7b; without, attention alone."
    ),
]
Sync = Annotated[str, typer.Option(help="Gradient sync of a step: fsdp, allreduce or none.")]
Overlap = Annotated[float, typer.Option(help="Share of a layer's time behind which gradient sync may hide.")]
NoContention = Annotated[
    bool, typer.Option("--no-contention", help="Compute and transfers of a rank do not slow each other.")
]
SYNCS = ("fsdp", "allreduce", "none")


@dataclass(frozen=True)
class Setting:
    """The request, what surrounds attention, and how the cost model was made."""

    request: Request
    training: Training | None
    rules: Rules
    calibration: Calibration

    @property
    def compute(self) -> Compute | None:
        """Kernel times of a plan's slots from the calibration's prices of tiles, where it has them."""
        tiles = self.calibration.tiles
        if tiles is None:
            return None
        from flexcp.measure.tile_times import refuse_other_heads, slot_times

        refuse_other_heads(self.request.shape, tiles)
        return partial(slot_times, times=tiles)

    @property
    def title(self) -> str:
        """The setting in one line."""
        from flexcp.calibration import error_words

        batch, shape = self.request.batch, self.request.shape
        model = "attention alone" if self.training is None else f"a step of {self.training.model.model.name}"
        masks = ", ".join(str(m.rules[0]) if len(m.rules) == 1 else "one mask per document" for m in batch.masks)
        return (
            f"simulated: {model} on {self.request.cluster}, {batch.documents:,} documents, {batch.tokens:,} tokens, {masks}, "
            f"{shape.heads} / {shape.kv_heads} heads of {shape.head_dim}; {error_words(self.request.cost, self.calibration.held_out)}"
        )


def make_setting(
    lengths: str, mask: str, cluster: str, model: str | None, heads: int, kv_heads: int | None, head_dim: int, cost: Path | None,
    sync: str = "fsdp", overlap: float = 1.0, contention: bool = True, max_tokens_per_rank: int | None = None,
) -> Setting:  # fmt: skip
    """What the options describe; a model brings its own heads."""
    from flexcp.batch import make_batch
    from flexcp.calibration import Calibration, read_calibration
    from flexcp.clusters import parse_cluster
    from flexcp.cost import CostModel
    from flexcp.data.lengths import parse_lengths
    from flexcp.masks import parse_mask
    from flexcp.models import find_model
    from flexcp.pieces import Shape
    from flexcp.planners.request import Request
    from flexcp.simulator.passes import Rules
    from flexcp.simulator.training import Training

    if sync not in SYNCS:
        raise ValueError(f"--sync is {', '.join(SYNCS)}; got {sync!r}")
    if not 0 <= overlap <= 1:
        raise ValueError(f"--overlap is a share between 0 and 1; got {overlap}")
    found = Calibration(CostModel()) if cost is None else read_calibration(cost)
    where, rules, numbers = found.on(parse_cluster(cluster)), Rules(contention=contention), parse_lengths(lengths)
    if model is None:
        shape = Shape(heads, heads if kv_heads is None else kv_heads, head_dim, head_dim)
        batch = make_batch(numbers, parse_mask(mask))
        request = Request(batch, shape, where, found.cost, max_tokens_per_rank=max_tokens_per_rank)
        return Setting(request, None, rules, found)
    preset = find_model(model)
    batch = make_batch(numbers, masks={"mask": (parse_mask(mask), preset.model.layers)})
    priced = replace(found.cost, model=preset.model)
    request = Request(batch, preset.shape, where, priced, max_tokens_per_rank=max_tokens_per_rank)
    return Setting(request, Training(preset, sync, round(1000 * overlap)), rules, found)  # type: ignore[arg-type]
