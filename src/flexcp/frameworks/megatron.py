"""Megatron-Core: its models under a flexcp plan, through its own extension points.

Tensor and pipeline parallelism stay Megatron's. The ranks that share a pipeline stage and a tensor slice, Megatron's
data-parallel x context-parallel group, are one *pool*. A micro-batch is a list of documents for the whole pool, and the
plan says which tokens each rank keeps. Four extension points are used, and nothing is patched:

- the layer spec's ``core_attention`` becomes :class:`PlannedAttention` (:func:`planned_spec`);
- ``PackedSeqParams``, which Megatron passes to every layer of a micro-batch, carries the step
  (:class:`PlannedSequences`). Each pipeline stage binds the same plan to its own pool, so no plan has to be sent from
  stage to stage;
- Megatron asks a rotary embedding for its length and then calls the same module with that length:
  :class:`PlannedRotary` returns the step as the length, and then the angles of this rank's positions (:func:`adapt`);
- the data iterator yields :class:`MicroBatch` inside Megatron's ``RerunDataIterator``, and :func:`forward_step` returns
  the (sum, tokens, report) of ``calculate_per_token_loss``: gradients are summed over the pool and divided by its
  tokens once.

By default all ranks of a pool have equal numbers of tokens, with sequence parallelism a multiple of the tensor-parallel
size. The number may still differ from one micro-batch to the next; a pipeline then needs ``variable_seq_lengths``.

The sequences are passed as ``sbhd`` with one row of local tokens, so that Megatron does not cut tokens or angles by its
own zig-zag. Its multi-latent attention accepts only ``thd``, and only with a ``context_parallel_size`` of 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from flexcp.batch import MaskLike
from flexcp.clusters import Cluster
from flexcp.cost import Model
from flexcp.executor.attention import attention
from flexcp.executor.bind import bind
from flexcp.executor.step import Step
from flexcp.masks import causal, window
from flexcp.planner import Planner

FULL, WINDOW = "full", "window"
"""Names of a plan's masks: of layers that see all keys that the mask allows, and of layers with a window."""
IGNORE = -100
"""The mark of tokens without a label, before labels are handed to Megatron."""


@dataclass
class PlannedSequences(PackedSeqParams):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's parameters of one micro-batch, which every layer gets, with the step that its attention runs under."""

    step: Step | None = None


@dataclass(frozen=True)
class MicroBatch:
    """This rank's rows of a micro-batch, each tensor ``[1, local tokens]``.

    ``labels`` are next tokens, 0 where there is none; ``loss_mask`` is 1 at tokens with a label, else 0.
    ``packed_seq_params`` carry the step to the layers.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    packed_seq_params: PlannedSequences
    padding_mask: Tensor | None = None
    """True at pads; None if there are none or the model has no experts.

    It is also None if sequence and pipeline parallelism are both on.
    """

    @property
    def step(self) -> Step:
        return step_of(self.packed_seq_params)


# --- the model --------------------------------------------------------------------------------------------------------


def planned_spec(spec: Any) -> Any:
    """Return a copy of a layer spec, or of a block's layer specs, in which self-attention runs under the plan.

    Raise NotImplementedError for a layer without a core attention.
    """
    found = copy.deepcopy(spec)
    layers = found.layer_specs if isinstance(found, TransformerBlockSubmodules) else [found]
    for layer in layers:
        parts: Any = layer
        for name in ("submodules", "self_attention", "submodules"):
            parts = getattr(parts, name, None)
        if not hasattr(parts, "core_attention"):
            raise NotImplementedError(
                f"flexcp plans self-attention layers; this spec has none with a core attention: {layer}"
            )
        parts.core_attention = PlannedAttention
    return found


def adapt(model: Any) -> Any:
    """Make a Megatron model's rotary embeddings take their positions from the plan, and return the same model.

    Call it before the model is wrapped. Raise NotImplementedError for multi-token prediction and mrope.
    """
    if getattr(model.config, "mtp_num_layers", None):
        raise NotImplementedError(
            "multi-token prediction shifts tokens inside Megatron, which a plan's layout does not allow; "
            f"mtp_num_layers={model.config.mtp_num_layers} must be None"
        )
    if getattr(model, "position_embedding_type", None) == "mrope":
        raise NotImplementedError("mrope is not supported under a plan; use rope, yarn, learned positions or none")
    owners = [m for m in model.modules() if isinstance(getattr(m, "rotary_pos_emb", None), torch.nn.Module)]
    for owner in owners:
        if not isinstance(owner.rotary_pos_emb, PlannedRotary):
            owner.rotary_pos_emb = PlannedRotary(owner.rotary_pos_emb)
    return model


class PlannedAttention(MegatronModule):  # type: ignore[misc]
    """Core attention under a plan, over all ranks that share a micro-batch, with the signatures of Megatron's own."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        _check_config(config)
        if attention_type != "self":
            raise NotImplementedError(f"only self-attention runs under a plan; got attention_type={attention_type!r}")
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.mask = WINDOW if windowed else FULL
        tp = 1 if pg_collection is None else pg_collection.tp.size()
        self.softmax_offset = _sinks(config, config.num_attention_heads // tp)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return ``[tokens, 1, heads x v_head_dim]`` for inputs ``[tokens, 1, heads, head_dim]``.

        Inputs without the 1 give a result without it. ``packed_seq_params`` must be a :class:`PlannedSequences`; an
        ``attention_mask`` raises ValueError, because the plan has the mask.
        """
        step = step_of(packed_seq_params)
        if attention_mask is not None:
            raise ValueError("the plan's mask says who attends whom; pass attention_mask=None to the model")
        batched = query.dim() == 4
        q, k, v = (x.squeeze(1) if batched else x for x in (query, key, value))
        # A plan with several masks names them full and window; a single mask is the one given to the data iterator.
        mask = self.mask if len(step.plan.batch.masks) > 1 else None
        dropout = self.dropout if self.training else 0.0
        out = attention(
            q, k, v, step, mask=mask, scale=self.scale, sinks=self.softmax_offset, dropout=dropout, bias=attention_bias
        )
        assert isinstance(out, Tensor)
        flat = out.flatten(1)
        return flat[:, None] if batched else flat


class PlannedRotary(torch.nn.Module):
    """A rotary embedding that takes a step in place of the length, and returns the angles of this rank's positions."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        config: Any,
        packed_seq_params: Any = None,
    ) -> Step:
        """Return the step, which Megatron passes on to :meth:`forward` as the length."""
        return step_of(packed_seq_params)

    def forward(self, step: Step, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Return the angles ``[local tokens, 1, 1, dim]``, with whatever else the wrapped module returns."""
        # Megatron keeps one table for each length; powers of two keep them few. With packed_seq=True it does not cut
        # the table for its own context parallelism.
        longest = int(step.plan.batch.lengths.max())
        found = self.inner(1 << (longest - 1).bit_length(), packed_seq=True)
        table, *more = found if isinstance(found, tuple) else (found,)
        angles = table[step.tables.positions_on(table.device)]
        return (angles, *more) if more else angles


def step_of(packed_seq_params: Any) -> Step:
    """Return the step from Megatron's parameters of a micro-batch; raise ValueError if they carry none."""
    if not isinstance(packed_seq_params, PlannedSequences) or packed_seq_params.step is None:
        raise ValueError(
            "this model runs under a plan: call it with the packed_seq_params of a flexcp MicroBatch "
            f"(flexcp.frameworks.megatron.data_iterator yields them); got {type(packed_seq_params).__name__}"
        )
    return packed_seq_params.step


# --- planning ---------------------------------------------------------------------------------------------------------


def planner(config: Any, cluster: Cluster, **options: Any) -> Planner:
    """Return a planner for a ``TransformerConfig``.

    It plans for this rank's heads under tensor parallelism, and knows the cost of the rest of each layer. ``cluster``
    describes the pool, the data-parallel x context-parallel ranks that share a micro-batch. Megatron numbers
    tensor-parallel ranks first, so with 8 GPUs a node and a tensor-parallel size of 2 a node holds 4 ranks of the pool.
    ``options`` go to :class:`flexcp.Planner`.
    """
    tp = config.tensor_model_parallel_size
    if config.multi_latent_attention:
        kv_heads = config.num_attention_heads
        head_dim, v_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    else:
        kv_heads = config.num_query_groups
        head_dim = v_head_dim = config.kv_channels
    experts = config.num_moe_experts and config.moe_router_topk
    feed_forward = config.moe_ffn_hidden_size if experts else config.ffn_hidden_size
    # Tensor parallelism divides the work of the rest of each layer as it divides heads.
    model = Model("megatron", config.hidden_size, config.num_layers, max(1, feed_forward // tp), experts or 1)
    dtype = "bfloat16" if config.bf16 else "float16" if config.fp16 else str(config.params_dtype).removeprefix("torch.")
    return Planner(
        config.num_attention_heads // tp,
        max(1, kv_heads // tp),
        head_dim,
        v_head_dim,
        dtype,
        cluster,
        model=model,
        **options,
    )


def layer_masks(config: Any, mask: MaskLike | None = None) -> dict[str, tuple[MaskLike, int]]:
    """Return the masks of a model's layers, each with the number of layers that use it, by name.

    ``"full"`` is ``mask``, causal by default; ``"window"`` is the config's window. A name is left out if no layer uses
    it. A ``mask`` in a model with window layers raises NotImplementedError.
    """
    layers = range(1, config.num_layers + 1)
    windowed = sum(is_layer_window_attention(config.window_size, config.window_attn_skip_freq, n) for n in layers)
    found: dict[str, tuple[MaskLike, int]] = {}
    if windowed < config.num_layers:
        found[FULL] = (mask or causal(), config.num_layers - windowed)
    if windowed:
        if mask is not None:
            raise NotImplementedError(f"a mask of your own and window layers together are not supported; got {mask!r}")
        left, right = config.window_size
        found[WINDOW] = (window(None if left < 0 else left, None if right < 0 else right), windowed)
    return found


# --- data and loss ----------------------------------------------------------------------------------------------------


def data_iterator(
    batches: Iterable[Sequence[Tensor]],
    planner: Planner,
    config: Any,
    *,
    mask: MaskLike | None = None,
    tokens: str = "equal",
    pad_to: int = 1,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Return Megatron's data iterator over planned micro-batches; every rank of every stage reads the same ``batches``.

    A batch is the documents of one micro-batch of the whole pool, each a tensor of token ids. ``config`` is the
    ``TransformerConfig``, ``mask`` the mask of its layers without a window (causal by default). ``group`` is the pool,
    by default Megatron's data-parallel group with context parallelism, and ``device`` the place of the tensors.
    ``tokens`` says how many tokens ranks keep, as in the planner's call; ``"equal"`` gives all ranks the same number.
    Token counts are rounded up to a multiple of ``pad_to``. If that is the most tokens that a rank ever keeps, every
    micro-batch has the same shape.
    """
    pool = group or parallel_state.get_data_parallel_group(with_context_parallel=True)
    return RerunDataIterator(
        micro_batch(documents, planner, config, pool, mask=mask, tokens=tokens, pad_to=pad_to, device=device)
        for documents in batches
    )


def micro_batch(
    documents: Sequence[Tensor],
    planner: Planner,
    config: Any,
    group: dist.ProcessGroup,
    *,
    mask: MaskLike | None = None,
    tokens: str = "equal",
    pad_to: int = 1,
    device: torch.device | str | None = None,
) -> MicroBatch:
    """Plan one micro-batch, bind it to the pool ``group`` and return this rank's rows. Every rank of the pool calls it.

    The arguments are those of :func:`data_iterator`. Raise ValueError if sequence parallelism is on and ``tokens`` is
    not ``"equal"``, and if a pipeline without ``variable_seq_lengths`` gets another number of tokens than ``pad_to``
    (rounded up for sequence parallelism).
    """
    latent = config.multi_latent_attention
    if latent and config.context_parallel_size > 1:
        raise NotImplementedError(
            f"Megatron's multi-latent attention cuts angles by context_parallel_size={config.context_parallel_size}; "
            "set it to 1: the plan spans the data-parallel ranks, which are then all of the pool"
        )
    slices = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if slices > 1 and tokens != "equal":
        raise ValueError(f"sequence parallelism needs tokens='equal', counts it can divide by {slices}; got {tokens!r}")
    multiple = math.lcm(slices, pad_to)
    lengths = [len(d) for d in documents]
    masks = layer_masks(config, mask)
    plan = planner(lengths, masks=masks, tokens=tokens, pad_to=multiple if multiple > 1 else None)
    step = bind(plan, group)
    # The loss is computed by forward_step, and Megatron divides it by the tokens of all ranks.
    step.losses.settled = step.losses.replicas_settled = True
    stream = torch.cat(list(documents))
    labels = step.labels(stream, IGNORE)
    count = step.local_tokens
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths and count != multiple:
        raise ValueError(
            f"this micro-batch needs {count} tokens a rank, and a pipeline without variable_seq_lengths the same "
            f"number in all of them; set variable_seq_lengths=True, or pad_to={count} or more (got {pad_to}) here and "
            "in the schedule's seq_length"
        )
    borders = torch.tensor([0, count], dtype=torch.int32, device=device) if latent else None
    longest = max(lengths)
    carrier = PlannedSequences(
        "thd" if latent else "sbhd", borders, borders, max_seqlen_q=longest, max_seqlen_kv=longest, step=step
    )
    # Megatron looks up every label before it applies the loss mask, so labels must not be negative. The mask of pads
    # lets experts leave pads out of their balance, where Megatron supports it.
    valid, pads = labels != IGNORE, step.indices < 0
    tell = (
        config.num_moe_experts
        and pads.any()
        and not (config.sequence_parallel and config.pipeline_model_parallel_size > 1)
    )
    rows = [x[None].to(device) for x in (step.shard(stream), labels.clamp(min=0), valid.float(), step.positions, pads)]
    return MicroBatch(rows[0], rows[1], rows[2], rows[3], carrier, rows[4] if tell else None)


def forward_step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    """Run Megatron's forward step for a language model; return the losses of its tokens and the loss function.

    ``iterator`` is that of :func:`data_iterator`.
    """
    batch = next(iterator)
    more = {} if batch.padding_mask is None else {"padding_mask": batch.padding_mask}
    losses = model(
        batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed_seq_params, **more
    )
    return losses, partial(token_loss, batch.loss_mask)


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (sum of this rank's losses, number of its labels, report), as ``calculate_per_token_loss`` needs.

    ``losses`` has a value for each token. The report is ``{"lm loss": tensor([sum, number])}``.
    """
    mask = loss_mask.flatten()
    # A pad's loss is multiplied by 0 but stays in the sum, so that every rank takes part in the backward.
    total = (losses.flatten().float() * mask).sum()
    count = mask.sum()
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}


# --- refusals ---------------------------------------------------------------------------------------------------------


def _check_config(config: Any) -> None:
    refused = {
        "qk_clip": "needs the largest logit, which a plan does not return",
        "hybrid_context_parallel": "is Megatron's own dynamic context parallelism; the plan replaces it",
        "fused_single_qkv_rope": "does not take positions",
        "experimental_attention_variant": "replaces the core attention itself",
    }
    for name, reason in refused.items():
        if getattr(config, name, None):
            raise NotImplementedError(f"{name}={getattr(config, name)} {reason}; switch it off")
    if config.multi_latent_attention and config.apply_rope_fusion:
        raise NotImplementedError(
            "the fused rotary embedding of multi-latent attention takes no positions; set apply_rope_fusion=False"
        )
    if not config.calculate_per_token_loss:
        raise ValueError(
            "under a plan ranks hold different numbers of tokens with a label: "
            "set calculate_per_token_loss=True in the config"
        )


def _sinks(config: Any, heads: int) -> Tensor | None:
    """Return the extra logit of each of ``heads`` heads that Megatron's softmax type adds, or None if it adds none."""
    if config.softmax_type == "vanilla":
        return None
    zeros = torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
    if config.softmax_type == "off-by-one":
        return zeros
    if config.softmax_type == "learnable":
        parameter = torch.nn.Parameter(zeros)
        if config.perform_initialization:
            config.init_method(parameter)
        return parameter
    raise ValueError(f"unknown softmax_type {config.softmax_type!r}")
