"""Planner: the public entry point of planning.

A planner is made once per training run and called once per batch. Planning is integer arithmetic: it needs no torch,
reads no clock, and gives the same plan on every rank. (Only ``hypergraph``, which ``auto`` also tries at high effort,
and ``dcp`` call a partitioner that computes with floating point; their plans must be made once and shared.)
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from flexcp.batch import Batch, MaskLike, make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel, Model
from flexcp.masks import causal
from flexcp.plan.plan import Plan
from flexcp.plan.user_layouts import user_layout
from flexcp.planners.auto.auto import auto_plan
from flexcp.planners.microbatch import document_loads, split
from flexcp.planners.request import Refused, Request, refuse_over_cap, refuse_over_memory, refuse_over_peers
from flexcp.planners.strategies import find_strategy
from flexcp.planners.token_runs import check_queries_stay
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training


class Planner:
    """Plans batches for one attention shape on one cluster.

    ``v_head_dim`` defaults to ``head_dim``; ``dtype`` decides how many bytes move. ``cluster`` is the machine
    (:func:`flexcp.cluster`); ``cost`` are the prices of compute and transfers, by default analytic.

    ``strategy`` is a name of ``flexcp.planners.strategies.STRATEGIES``, with a degree if the strategy takes one
    (``"zigzag:4"``); ``auto`` chooses the strategy with the least simulated step time. ``model`` says what a layer
    costs outside attention (by default a dense model of hidden size heads x head_dim). ``training`` replaces ``model``
    and also describes the rest of a step (vocabulary, gradient sync, all-reduces of tensor parallelism), so that
    ``auto`` compares whole steps. ``effort`` is how many candidates may be evaluated.

    ``compute_tolerance`` and ``token_tolerance`` limit how far a rank's compute and tokens may exceed the mean (0.05 is
    5 %); without them they differ as far as this shortens the step. ``max_tokens_per_rank`` caps the tokens that a rank
    keeps. ``max_memory_per_rank`` caps the bytes that a rank's attention needs: one arena and what all layers keep for
    their backward, as ``plan.memory(rank).total`` counts them. ``max_peers`` caps the other ranks that a rank exchanges
    with (``plan.peers(rank)``), because each needs a connection with buffers. A plan over a cap is refused.

    ``keep_kv`` is how many bytes a rank may use, over all layers, to keep keys and values received in the forward for
    the backward, so that they do not travel again; static strategies always send them again. With ``latent``, keys and
    values travel as that many numbers per token for all heads (multi-latent attention, ``kv_heads=1``), and
    :func:`flexcp.latent_attention` runs the plan.

    >>> planner = Planner(heads=8, kv_heads=2, head_dim=64, cluster=cluster("h100", ranks_per_node=4))
    >>> planner(lengths=[1000, 30, 1]).ranks
    4
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int = 128,
        v_head_dim: int | None = None,
        dtype: str = "bfloat16",
        cluster: Cluster = cluster(),
        cost: CostModel | None = None,
        model: Model | None = None,
        strategy: str = "auto",
        effort: int | None = None,
        compute_tolerance: float | None = None,
        token_tolerance: float | None = None,
        max_tokens_per_rank: int | None = None,
        max_memory_per_rank: int | None = None,
        keep_kv: int = 0,
        max_peers: int | None = None,
        latent: int | None = None,
        training: Training | None = None,
    ) -> None:
        self.shape = Shape(
            heads,
            heads if kv_heads is None else kv_heads,
            head_dim,
            head_dim if v_head_dim is None else v_head_dim,
            str(dtype).removeprefix("torch."),
            latent,
        )
        if not isinstance(cluster, Cluster):
            name = cluster if isinstance(cluster, str) else "h100"
            shape = "" if ":" in name else ", nodes=1, ranks_per_node=8"
            raise ValueError(
                "cluster= is made by flexcp.cluster(preset, nodes=..., ranks_per_node=...), such as "
                f"flexcp.cluster({name!r}{shape}); got {cluster!r}"
            )
        self.cluster = cluster
        if not isinstance(cost, CostModel | None):
            raise ValueError(f"cost= is a flexcp.cost.CostModel or None; got {cost!r}")
        if not isinstance(model, Model | None):
            raise ValueError(f"model= is a flexcp.Model or None, for what the rest of a layer costs; got {model!r}")
        self.training = _checked_training(training, model)
        if self.training is not None:
            model = self.training.model.model
        self.cost = cost or CostModel()
        if model is not None:
            self.cost = replace(self.cost, model=model)
        self.effort = _checked_count("effort", effort, 0, "a count of evaluated candidates")
        self.strategy = strategy
        self.place, self.argument = find_strategy(strategy)
        self.compute_tolerance = _checked_tolerance("compute_tolerance", compute_tolerance)
        self.token_tolerance = _checked_tolerance("token_tolerance", token_tolerance)
        self.max_tokens_per_rank = _checked_count("max_tokens_per_rank", max_tokens_per_rank, 1, "a rank's most tokens")
        self.keep_kv = _checked_count("keep_kv", keep_kv, 0, "bytes a rank may keep received keys in") or 0
        self.max_memory_per_rank = _checked_count("max_memory_per_rank", max_memory_per_rank, 1, "bytes of attention")
        self.max_peers = _checked_count("max_peers", max_peers, 0, "the most ranks that a rank exchanges with")

    def __call__(
        self,
        lengths: Sequence[int] | Any,
        mask: MaskLike | None = None,
        *,
        masks: Mapping[str, tuple[MaskLike, int]] | None = None,
        layout: str | Sequence[Sequence[int]] = "free",
        tokens: str = "balanced",
        pad_to: int | None = None,
    ) -> Plan:
        """Plan one batch.

        ``mask`` is one mask for all documents or a list with one per document; without ``mask`` and ``masks`` it is
        causal. It holds for every layer of the ``model``, or for one layer if the planner has no model. ``masks`` names
        several masks with their layer counts, ``{"name": (mask, layers), ...}``. ``layout`` keeps tokens on the ranks
        that have them (``"contiguous"``, ``"zigzag"``, or an index array per rank); ``"free"`` lets the planner place
        them. ``tokens="equal"`` gives every rank the same token count, padded to a multiple of ``pad_to``;
        ``"balanced"`` lets counts differ a little; ``"priced"`` lets ``blocks`` balance the sum of attention and the
        rest of the layer. Raise ValueError for wrong arguments, and if the strategy cannot plan the batch within the
        planner's caps.
        """
        batch = self._batch(lengths, mask, masks)
        return self._planned(batch, layout, tokens, pad_to)

    def micro_batches(
        self,
        lengths: Sequence[int] | Any,
        mask: MaskLike | None = None,
        *,
        masks: Mapping[str, tuple[MaskLike, int]] | None = None,
        tokens: str = "balanced",
        pad_to: int | None = None,
    ) -> list[tuple[list[int], Plan]]:
        """Split a global batch into as few micro-batches as fit the planner's caps; return (documents, plan) of each.

        The caps are ``max_tokens_per_rank`` and ``max_memory_per_rank``, of which one must be set. Micro-batches are
        balanced in predicted time, and each spans all ranks. ``documents`` are indices into ``lengths`` in stream
        order; every document is in exactly one micro-batch. Raise ValueError if even a document alone does not fit.
        """
        if self.max_tokens_per_rank is None and self.max_memory_per_rank is None:
            raise ValueError(
                "micro_batches needs a cap: make the Planner with max_tokens_per_rank=... or max_memory_per_rank=..."
            )
        batch = self._batch(lengths, mask, masks)
        _checked_tokens(tokens, pad_to, fixed=False)
        cap, multiple = batch.tokens, 1  # without a cap on tokens, only memory divides the batch
        if self.max_tokens_per_rank is not None:
            cap, multiple = self.max_tokens_per_rank, pad_to or 1
        loads, least = document_loads(batch, self.shape, self.cost), 1
        while True:
            parts = split(batch.lengths, loads, self.cluster.ranks, cap, least, multiple)
            try:
                return [(part, self._planned(batch.take(part), "free", tokens, pad_to)) for part in parts]
            except Refused:
                # The memory of attention is known only once there is a plan. So try again with one more micro-batch,
                # until every plan fits or every micro-batch has one document.
                if self.max_memory_per_rank is None or len(parts) == batch.documents:
                    raise
            least = len(parts) + 1

    def _batch(
        self, lengths: Sequence[int] | Any, mask: MaskLike | None, masks: Mapping[str, tuple[MaskLike, int]] | None
    ) -> Batch:
        """Make the batch; a single mask is used by all layers of the model, or by one layer if there is no model."""
        if masks is None:
            layers = 1 if self.cost.model is None else self.cost.model.layers
            return make_batch(lengths, masks={"mask": (causal() if mask is None else mask, layers)})
        return make_batch(lengths, mask, masks)

    def with_speeds(self, speeds: Sequence[int]) -> Planner:
        """Return a copy of this planner for other compute speeds of the ranks, in per mille of ``cluster.gflops``."""
        other = copy.copy(self)
        other.cluster = replace(self.cluster, speeds=tuple(speeds))
        return other

    def _planned(self, batch: Batch, layout: str | Sequence[Sequence[int]], tokens: str, pad_to: int | None) -> Plan:
        """Plan a batch with the planner's strategy.

        Raise ValueError if options contradict each other, Refused if the plan would be over the planner's caps.
        """
        maps = user_layout(layout, batch.tokens, self.cluster.ranks)
        equal = _checked_tokens(tokens, pad_to, maps is not None)
        if (equal or maps is not None) and self.token_tolerance is not None:
            raise ValueError(
                "token_tolerance applies only where the planner chooses token counts; "
                "drop it with tokens='equal' or a fixed layout"
            )
        request = Request(
            batch=batch,
            shape=self.shape,
            cluster=self.cluster,
            cost=self.cost,
            argument=self.argument,
            layout=maps,
            equal_tokens=equal,
            pad_to=int(pad_to or 1),
            compute_tolerance=self.compute_tolerance,
            token_tolerance=self.token_tolerance,
            max_tokens_per_rank=self.max_tokens_per_rank,
            effort=self.effort,
            max_memory_per_rank=self.max_memory_per_rank,
            keep_kv=self.keep_kv,
            max_peers=self.max_peers,
            priced_tokens=tokens == "priced",
            training=self.training,
        )
        refuse_over_cap(request)
        if self.strategy == "auto":  # it returns a plan, not a placement, because it has scheduled what it simulated
            plan = auto_plan(request)
        else:
            placement = self.place(request)
            check_queries_stay(request, placement)
            plan = make_plan(
                placement, self.shape, self.cluster, self.cost, self.strategy, self.keep_kv, request.most_ahead
            )
        refuse_over_memory(request, plan)
        refuse_over_peers(request, plan)
        return plan if maps is None else replace(plan, layout_given=True)


def _checked_training(training: Training | None, model: Model | None) -> Training | None:
    """Return ``training``; raise ValueError if it is of another type or contradicts ``model``."""
    if not isinstance(training, Training | None):
        raise ValueError(
            f"training= is a flexcp.Training or None, for what a step has beyond its layers; got {training!r}"
        )
    if training is not None and model not in (None, training.model.model):
        raise ValueError(f"training= brings its own model, {training.model.model}; drop model={model!r}")
    return training


def _checked_tolerance(name: str, value: float | None) -> float | None:
    """Return a tolerance as a float; raise ValueError if it is not a finite number of at least 0. None stays None."""
    if value is None:
        return None
    if not isinstance(value, Real) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be a number of 0 or more (0.05 is 5 %), or None for no limit; got {value!r}")
    return float(value)


def _checked_count(name: str, value: int | None, least: int, what: str) -> int | None:
    """Return a count as an int; raise ValueError if it is not an integer of at least ``least``. None stays None.

    ``name`` and ``what`` (what it counts) are for the message.
    """
    if value is None:
        return None
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {what}, an integer of at least {least}; got {value!r}")
    return int(value)


def _checked_tokens(tokens: str, pad_to: int | None, fixed: bool) -> bool:
    """Return whether ``tokens`` is "equal"; raise ValueError if the options contradict each other.

    ``fixed`` says that the layout is fixed.
    """
    if tokens not in ("balanced", "priced", "equal"):
        raise ValueError(f"tokens must be 'balanced', 'priced' or 'equal'; got {tokens!r}")
    whole = isinstance(pad_to, Integral) and not isinstance(pad_to, bool)
    if pad_to is not None and (tokens != "equal" or not whole or pad_to < 1):
        raise ValueError(
            f"pad_to is a whole number of at least 1 and needs tokens='equal'; got pad_to={pad_to!r}, tokens={tokens!r}"
        )
    if tokens == "equal" and fixed:
        raise ValueError("a fixed layout decides token counts itself; drop tokens='equal' or the layout")
    return tokens == "equal"
