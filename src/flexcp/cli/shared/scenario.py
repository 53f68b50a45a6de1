"""The scenario of ``simulate`` and ``compare``: a batch, a model, a cluster and a cost model, from the command line."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.batches import BatchOptions
from flexcp.cli.shared.model_and_cluster_options import HEADS, ClusterOptions, ModelOptions
from flexcp.cli.shared.option_groups import OptionGroup
from flexcp.cli.shared.parallel import ParallelOptions
from flexcp.cli.shared.step_options import StepOptions
from flexcp.io.sizes import count_of

if TYPE_CHECKING:
    from flexcp.calibration import Calibration
    from flexcp.compare.compare import Compute
    from flexcp.planners.request import Request
    from flexcp.simulator.passes import Rules


@dataclass(frozen=True)
class Scenario:
    """What is planned and simulated (``request``), the rules of the simulation, and the calibration that prices it."""

    request: Request
    rules: Rules
    calibration: Calibration
    taken: str = ""
    """Which batch of a file this is, in words."""
    divided: str = ""
    """How other parallelisms divide the cluster, in words."""

    @property
    def compute(self) -> Compute | None:
        """The function that predicts kernel times from the calibration's tile times; None if it has no tile times.

        It returns the nanoseconds ``[rank, slot]`` of a pass. Raise ValueError if tile times were measured for other
        head sizes.
        """
        tiles = self.calibration.tiles
        if tiles is None:
            return None
        from flexcp.measure.tile_times import refuse_other_heads, slot_times

        refuse_other_heads(self.request.shape, tiles)
        return partial(slot_times, times=tiles)

    @property
    def title(self) -> str:
        """The scenario in one line, with the known error of such simulations."""
        from flexcp.known_errors.words import error_words

        batch, shape = self.request.batch, self.request.shape
        training = self.request.training
        model = "attention alone" if training is None else f"a step of {training.model.model.name}"
        masks = ", ".join(str(m.rules[0]) if len(m.rules) == 1 else "one mask per document" for m in batch.masks)
        return (
            f"simulated: {model} on {self.request.cluster}, {count_of(batch.documents, 'document')}, "
            f"{count_of(batch.tokens, 'token')}, {masks}, {shape.heads} / {shape.kv_heads} heads of {shape.head_dim}"
            f"{'' if shape.dtype == 'bfloat16' else f' in {shape.dtype}'}; "
            f"{error_words(self.request.cost, self.calibration.held_out)}"
            f"{f'; {self.taken}' if self.taken else ''}{f'; {self.divided}' if self.divided else ''}"
        )


class ScenarioOptions(OptionGroup):
    """The options that describe a scenario."""

    batch: BatchOptions
    cluster: ClusterOptions
    model: ModelOptions
    parallel: ParallelOptions
    cost: o.CostFile = None
    step: StepOptions
    no_contention: Annotated[
        bool, typer.Option("--no-contention", help="Compute and transfers of a rank do not slow each other.")
    ] = False
    max_tokens_per_rank: o.MaxTokens = None

    def naming_ranks(self) -> AbstractContextManager[None]:
        """Return a context that adds to a ValueError about ranks how ``--tp`` and ``--pp`` divide the GPUs."""
        return self.parallel.naming_ranks(self.cluster.found)

    def scenario(self) -> Scenario:
        """Return the scenario that the options describe; a model brings its own heads and masks.

        Raise ValueError if options contradict each other, or if the batch does not fit the ranks under the cap on
        tokens.
        """
        from flexcp.batch import make_batch
        from flexcp.masks import causal
        from flexcp.planners.request import Request, refuse_over_cap
        from flexcp.simulator.passes import Rules

        cap = self.max_tokens_per_rank
        if cap is not None and cap < 1:
            raise ValueError(f"--max-tokens-per-rank is at least 1; got {cap}")
        found = o.cost_of(self.cost)
        where, heads = found.on(self.cluster.found()), self.model.attention(HEADS)
        divided = self.parallel.divided(where, heads, self.model.whole())
        where, preset, rule = divided.topology.cluster, divided.preset, self.batch.rule
        with self.naming_ranks():
            taken = self.batch.taken(where.ranks, cap)
        priced, training = found.cost, self.step.training(preset, self.parallel.tp)
        if preset is None:
            made = make_batch(taken.lengths, causal() if rule is None else rule)
        else:
            made = make_batch(taken.lengths, masks=self.batch.layer_masks(preset))
            priced = replace(found.cost, model=preset.model)
        request = Request(
            made,
            divided.topology.shape,
            where,
            priced,
            max_tokens_per_rank=taken.max_tokens_per_rank,
            training=training,
        )
        with self.naming_ranks():
            refuse_over_cap(request)
        rules = Rules(contention=not self.no_contention)
        return Scenario(request, rules, found, taken.words, divided.words)
