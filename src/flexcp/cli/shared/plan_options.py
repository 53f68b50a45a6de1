"""Options that decide a plan, for commands that make one; they have the names of ``Planner``'s arguments."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.batches import BatchOptions
from flexcp.cli.shared.model_and_cluster_options import ModelOptions, ShapedClusterOptions
from flexcp.cli.shared.option_groups import OptionGroup
from flexcp.cli.shared.parallel import ParallelOptions
from flexcp.cli.shared.step_options import StepOptions

if TYPE_CHECKING:
    from flexcp.plan.plan import Plan
    from flexcp.planner import Planner


class PlannerOptions(OptionGroup):
    """Arguments of ``Planner`` as options, with the same names and defaults; only ``dtype`` defaults to the model's."""

    v_head_dim: Annotated[int | None, typer.Option(help="Size of a value head; head-dim by default.")] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16, float32 or float64; that of the model's config.json, else bfloat16."),
    ] = None
    strategy: o.Strategy = "auto"
    effort: Annotated[int | None, typer.Option(help="Candidates that may be evaluated; a count, never a clock.")] = None
    compute_tolerance: Annotated[
        float | None, typer.Option(help="Compute over the mean a rank may have: 0.05 is 5 %.")
    ] = None
    token_tolerance: Annotated[float | None, typer.Option(help="Tokens over the mean a rank may keep.")] = None
    max_tokens_per_rank: o.MaxTokens = None
    max_memory_per_rank: Annotated[
        int | None, typer.Option(help="Hard cap on the bytes attention needs on a rank.")
    ] = None
    keep_kv: Annotated[
        int, typer.Option(help="Bytes a rank may keep received keys in for the backward; 0 fetches them again.")
    ] = 0
    max_peers: Annotated[int | None, typer.Option(help="Hard cap on the other ranks that a rank exchanges with.")] = (
        None
    )


class TokenOptions(OptionGroup):
    """Arguments of a planner's call as options, with the same names and defaults."""

    tokens: Annotated[str, typer.Option(help="balanced, priced, or equal for the same count on every rank.")] = (
        "balanced"
    )
    pad_to: Annotated[int | None, typer.Option(help="With --tokens equal: round counts up to a multiple.")] = None
    layout: o.Layout = "free"


class PlanOptions(OptionGroup):
    """All options that decide a plan."""

    batch: BatchOptions
    cluster: ShapedClusterOptions
    model: ModelOptions
    parallel: ParallelOptions
    step: StepOptions
    planner: PlannerOptions
    tokens: TokenOptions
    cost: o.CostFile = None

    def made_planner(self, default: tuple[int, int, int]) -> Planner:
        """Return the planner that these options describe; say on stderr how ``--tp``, ``--pp`` and ``--ep`` divide it.

        ``default`` are the query heads, KV heads and head size for those not given.
        """
        from flexcp.planner import Planner

        measured = o.cost_of(self.cost)
        where, shape = measured.on(self.cluster.found()), self.model.attention(default)
        divided = self.parallel.divided(where, shape, self.model.whole()).announced()
        training = self.step.training(divided.preset, self.parallel.tp)
        given = {name: value for name, value in vars(self.planner).items() if name != "dtype" or value is not None}
        return Planner(cost=measured.cost, training=training, **(divided.topology.arguments | given))

    def taken(self, planner: Planner) -> tuple[Planner, list[int]]:
        """Return a copy of the planner with the cap on tokens by which the batch was cut, and the lengths of the batch.

        If the batch is part of a file of lengths, say on stderr which part.
        """
        with self.parallel.naming_ranks(self.cluster.found):
            found = self.batch.announced(planner.cluster.ranks, self.planner.max_tokens_per_rank)
        capped = copy(planner)
        capped.max_tokens_per_rank = found.max_tokens_per_rank
        return capped, found.lengths

    def plan(self, planner: Planner, lengths: list[int]) -> Plan:
        """Plan a batch of these lengths with ``planner``; a model brings its own masks unless ``--mask`` is given."""
        found = self.model.whole()
        with self.parallel.naming_ranks(self.cluster.found):
            if found is None:
                return planner(lengths, self.batch.rule, **vars(self.tokens))
            masks = self.batch.layer_masks(self.parallel.part(found))
            return planner(lengths, masks=masks, **vars(self.tokens))
