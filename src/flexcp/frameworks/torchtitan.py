"""torchtitan: its trainer, models and FSDP2, with flexcp's attention and batches.

    config = torchtitan.turn_on(llama3_8b(), cluster=flexcp.cluster("h100", nodes=2, ranks_per_node=8))
    config.build().train()

Two extension points of torchtitan are used. ``@override`` replaces the configuration of every inner attention (SDPA,
varlen or flex) by :class:`FlexcpAttention`, selective checkpointing by one that keeps attention's results, and metrics
by ones that include the balance of ranks. ``post_dataloading_process`` is where a trainer prepares a batch: there the
documents that the data parallel ranks loaded become one batch of all ranks, planned and sharded, and the step goes to
every layer as its attention mask. Loss and gradients need no change: they already are sums over ranks / valid tokens of
all ranks.

A layer's window is that of its varlen attention, and the plan has one mask for each window. Flex attention has its
windows in masks that the model makes for every batch, which flexcp does not see; layers with such a window are refused.

flexcp shares batches over the data parallel ranks, so torchtitan's own context parallelism stays at 1. Pipelines,
compiled CUDA graphs, and layers with an attention that flexcp does not replace are refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from flexcp.batch import MaskLike
from flexcp.clusters import Cluster
from flexcp.executor.attention import attention
from flexcp.executor.step import Step
from flexcp.frameworks import not_used
from flexcp.frameworks.shared_batch import share
from flexcp.frameworks.trainer_logs import SharedBatches
from flexcp.masks import causal, window
from flexcp.planner import Planner


class FlexcpAttention(Module):
    """An inner attention that runs under the step it is given as ``attention_masks``: ``[1, L, N, H]`` in and out."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """``window`` is the number of keys that a query sees, itself included; 0 means all keys before it."""

        window: int = 0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window = config.window

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        out_transform: Any = None,
        **others: Any,
    ) -> Tensor:
        if not isinstance(attention_masks, Step):
            raise ValueError(
                f"flexcp's attention runs a step, but attention_masks is {type(attention_masks).__name__}: train with "
                "the configuration that flexcp.frameworks.torchtitan.turn_on returns"
            )
        unknown = [name for name, value in others.items() if value is not None]
        if unknown or not is_causal:
            raise NotImplementedError(
                f"this model asks its attention for {unknown or 'is_causal=False'}, which flexcp would ignore"
            )
        q_THD, k_TGD, v_TGD = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        empty = len(q_THD) == 1 and attention_masks.local_tokens == 0
        if empty:
            q_THD, k_TGD, v_TGD = q_THD[:0], k_TGD[:0], v_TGD[:0]
        out_THD, lse_TH = attention(
            q_THD, k_TGD, v_TGD, attention_masks, window=self.window, scale=scale, return_lse=True
        )
        if empty:
            out_THD, lse_TH = (torch.nn.functional.pad(x, (0,) * (2 * x.dim() - 1) + (1,)) for x in (out_THD, lse_TH))
        return out_THD[None] if out_transform is None else out_transform(out_THD[None], lse_TH[None])


class FlexcpSelectiveAC(SelectiveAC):
    """Selective checkpointing that keeps attention's results: recomputing them would exchange keys again."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """The same fields as torchtitan's."""

    def get_save_ops(self) -> set[Any]:
        """Return torchtitan's operators and flexcp's attention."""
        return set(super().get_save_ops()) | {torch.ops.flexcp.attention.default}


class FlexcpMetrics(MetricsProcessor):
    """torchtitan's metrics with ``flexcp/attention_balance`` and ``flexcp/token_balance``:
    the busiest rank over the mean of all ranks.

    Ranks share a batch, so no rank has a loss of its own. ``global_max_loss`` is therefore the batch's loss; torchtitan
    would divide by the labels that a rank loaded instead of those it computed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The same fields as torchtitan's."""

    batches: SharedBatches

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log torchtitan's entry with the balances added."""
        even = {f"flexcp/{name}": value for name, value in self.batches.entries().items() if name.endswith("balance")}
        super().log(step, global_avg_loss, global_avg_loss, grad_norm, {**(extra_metrics or {}), **even})


@override(target=ScaledDotProductAttention.Config, description="flexcp attention")
def sdpa(config: ScaledDotProductAttention.Config) -> FlexcpAttention.Config:
    """Replace SDPA: causal layers."""
    return derive(config, FlexcpAttention.Config)


@override(target=FlexAttention.Config, description="flexcp attention")
def flex(config: FlexAttention.Config) -> FlexcpAttention.Config:
    """Replace flex attention: layers with the model's one mask, which is causal inside documents."""
    return derive(config, FlexcpAttention.Config)


@override(target=VarlenAttention.Config, description="flexcp attention")
def varlen(config: VarlenAttention.Config) -> FlexcpAttention.Config:
    """Replace varlen attention: causal layers, and windows, where (W, 0) means W tokens before the query."""
    left, right = config.window_size
    if right != 0:
        raise NotImplementedError(
            f"window_size={config.window_size} sees tokens after the query, which is not supported"
        )
    return derive(config, FlexcpAttention.Config, window=0 if left < 0 else left + 1)


@override(target=SelectiveAC.Config, exact=True, description="keeps flexcp attention's results")
def selective(config: SelectiveAC.Config) -> FlexcpSelectiveAC.Config:
    """Replace selective checkpointing: recompute what torchtitan recomputes, but not attention."""
    return derive(config, FlexcpSelectiveAC.Config)


@override(target=MetricsProcessor.Config, exact=True, description="says how even ranks were")
def metrics(config: MetricsProcessor.Config) -> FlexcpMetrics.Config:
    """Replace the metrics."""
    return derive(config, FlexcpMetrics.Config)


OVERRIDES = [f"{__name__}.{function.__name__}" for function in (sdpa, flex, varlen, selective, metrics)]


def window_of(attention: Any) -> int:
    """Return the number of keys that a query of this layer sees, 0 for all before it,
    from the layer's configuration.
    """
    keys: int = attention.inner_attention.window
    said = getattr(attention, "sliding_window_size", None) or 0
    if said != keys and said:
        raise NotImplementedError(
            f"a layer has sliding_window_size={said}, which its inner attention does not know, as flex attention does "
            "not: make the model with attn_backend='varlen'"
        )
    return keys


class FlexcpTrainer(Trainer):
    """torchtitan's trainer, whose data parallel ranks share every batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's fields, and how to plan: the ``cluster``, the ``strategy``,
        and ``options`` of the planner's call.
        """

        cluster: Cluster | None = None
        strategy: str = "auto"
        options: dict[str, Any] = field(default_factory=dict)

        def to_dict(self) -> dict[str, Any]:
            """Return JSON values; the cluster is given as text."""
            found: dict[str, Any] = super(FlexcpTrainer.Config, self).to_dict()
            return found | {"cluster": repr(self.cluster)}

    def __init__(self, config: Config) -> None:
        if config.parallelism.context_parallel_degree != 1 or config.parallelism.pipeline_parallel_degree != 1:
            raise NotImplementedError(
                "flexcp shares batches over data parallel ranks; set context_parallel_degree and "
                "pipeline_parallel_degree to 1"
            )
        if config.validator.enable:
            raise NotImplementedError(
                "torchtitan's validator makes batches of its own, which flexcp does not see; disable it"
            )
        super().__init__(config)
        self._masks, self._planner = self._planning()
        self._batches = SharedBatches()
        if isinstance(self.metrics_processor, FlexcpMetrics):
            self.metrics_processor.batches = self._batches

    def _planning(self) -> tuple[dict[str, tuple[MaskLike, int]], Planner]:
        """Return the masks of the model's layers, and a planner for its heads."""
        layers = [layer.attention for layer in self.model_config.layers]
        kinds = {type(a.inner_attention) for a in layers} - {FlexcpAttention.Config}
        if kinds:
            names = ", ".join(kind.__qualname__ for kind in kinds)
            raise NotImplementedError(f"this model has an inner attention that flexcp does not replace: {names}")
        windows = [window_of(a) for a in layers]
        masks: dict[str, tuple[MaskLike, int]] = {}
        for keys in sorted(set(windows)):
            mask = window(keys - 1) if keys else causal()
            masks[f"window {keys}" if keys else "full"] = (mask, windows.count(keys))
        tp, first = self.parallel_dims.tp, layers[0]
        head_dim = first.head_dim if first.head_dim is not None else first.dim // first.n_heads
        kv_heads = first.n_heads if first.n_kv_heads is None else first.n_kv_heads
        heads = (first.n_heads // tp, kv_heads // tp, head_dim)
        where = self.config.cluster or self._one_node()
        dtype = self.config.training.mixed_precision_param
        planner = Planner(*heads, dtype=dtype, cluster=where, strategy=self.config.strategy)
        return masks, planner

    def _one_node(self) -> Cluster:
        from flexcp.clusters import cluster

        return cluster("h100" if self.device.type == "cuda" else "cpu", 1, self.parallel_dims.get_mesh("batch").size())

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return this rank's rows of all ranks' documents, ``[1, rows]``.

        A document begins where a position is 0, and at the beginning of every loaded row.
        """
        positions = input_dict.get("positions")
        if positions is None:
            positions = torch.arange(labels.shape[1]).expand_as(labels)
        starts = (positions == 0).cpu()
        starts[:, 0] = True
        edges = starts.flatten().nonzero().flatten().tolist()
        lengths = [b - a for a, b in zip(edges, [*edges[1:], labels.numel()], strict=True)]
        group = self.parallel_dims.get_mesh("batch").get_group()
        planning = {"masks": self._masks, **self._rows_for_loss(), **self.config.options}
        rows = share(input_dict["input"].flatten(), labels.flatten(), lengths, self._planner, group, **planning)
        self.ntokens_seen += labels.numel()
        self._step = rows.step
        self._batches.note(rows.step)
        # torchtitan computes the loss itself, and divides it by the labels of all ranks
        self._step.losses.settled = self._step.losses.replicas_settled = True
        return rows.tokens[None], rows.labels[None], {"positions": rows.positions[None], "attention_masks": rows.step}

    def _rows_for_loss(self) -> dict[str, Any]:
        """Return options of the planner's call: a loss that is computed in chunks needs a number of rows
        that the chunks divide, and ignores padding.
        """
        chunks = getattr(self.loss_fn, "num_chunks", 1)
        return {"tokens": "equal", "pad_to": chunks} if chunks > 1 and "tokens" not in self.config.options else {}

    def forward_backward_step(self, **given: Any) -> Tensor:
        """Run torchtitan's step, and raise RuntimeError if the model did not use the plan."""
        loss: Tensor = super().forward_backward_step(**given)
        if not self._step.calls:
            raise RuntimeError(not_used(self._step))
        return loss


def turn_on(config: Trainer.Config, **planning: Any) -> FlexcpTrainer.Config:
    """Return a trainer configuration with flexcp's attention.
    ``planning`` are the fields that :class:`FlexcpTrainer.Config` adds to torchtitan's.
    """
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    found = FlexcpTrainer.Config(**shared, **planning)
    found.override = dataclasses.replace(config.override, imports=[*config.override.imports, *OVERRIDES])
    found.training = dataclasses.replace(config.training, disable_cuda_graphs=True)
    found.parallelism = dataclasses.replace(config.parallelism, spmd_backend="partial_dtensor")
    return found
