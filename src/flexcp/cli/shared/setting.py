"""What ``simulate`` and ``compare`` are asked about: a batch, a model, a cluster and a cost model, from the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.cli.shared.options import CostFile as CostFile

if TYPE_CHECKING:
    from flexcp.calibration import Calibration
    from flexcp.cli.shared.options import Described
    from flexcp.clusters import Cluster
    from flexcp.compare.compare import Compute
    from flexcp.planners.request import Request
    from flexcp.simulator.passes import Rules
    from flexcp.simulator.training import Training

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
    taken: str = ""
    """Which batch of a file this is, in words."""

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
            f"{f'; {self.taken}' if self.taken else ''}"
        )


def make_setting(
    lengths: str, batch: int | None, mask: str | None, where: Cluster, model: Described, cost: Path | None, sync: str = "fsdp",
    overlap: float = 1.0, contention: bool = True, max_tokens_per_rank: int | None = None,
) -> Setting:  # fmt: skip
    """What the options describe; a model brings its own heads and masks."""
    from flexcp.batch import make_batch
    from flexcp.calibration import Calibration, read_calibration
    from flexcp.cli.shared.batches import take_batch
    from flexcp.cost import CostModel
    from flexcp.masks import parse_mask
    from flexcp.planners.request import Request, refuse_over_cap
    from flexcp.simulator.passes import Rules
    from flexcp.simulator.training import Training

    if sync not in SYNCS:
        raise ValueError(f"--sync is {', '.join(SYNCS)}; got {sync!r}")
    if not 0 <= overlap <= 1:
        raise ValueError(f"--overlap is a share between 0 and 1; got {overlap}")
    if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
        raise ValueError(f"--max-tokens-per-rank is at least 1; got {max_tokens_per_rank}")
    found = Calibration(CostModel()) if cost is None else read_calibration(cost)
    preset, rule = model.whole(), None if mask is None else parse_mask(mask)
    taken = take_batch(lengths, where.ranks, max_tokens_per_rank, batch)
    if preset is None:
        made = make_batch(taken.lengths, parse_mask("causal") if rule is None else rule)
        priced, training = found.cost, None
    else:
        masks: Any = preset.masks() if rule is None else {"mask": (rule, preset.model.layers)}
        made = make_batch(taken.lengths, masks=masks)
        priced, training = replace(found.cost, model=preset.model), Training(preset, sync, round(1000 * overlap))  # type: ignore[arg-type]
    request = Request(
        made, model.attention((32, 8, 128)), found.on(where), priced, max_tokens_per_rank=max_tokens_per_rank
    )
    refuse_over_cap(request)
    return Setting(request, training, Rules(contention=contention), found, taken.words)
