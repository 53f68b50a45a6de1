"""Hugging Face Transformers: ``attn_implementation="flexcp"``.

    huggingface.turn_on(model)                              # or register() and attn_implementation="flexcp"
    plan = planner(lengths, masks=huggingface.masks(model.config))
    step = flexcp.bind(plan, mesh["cp"])
    loss = model(**huggingface.inputs(tokens, step)).loss   # gradients="averaged" under DDP

The step is a keyword of the model's forward: Transformers passes keywords it does not know to every attention function.
``[1, H, S, D]`` is viewed as flexcp's ``[S, H, D]`` without a copy. If the caller gives no positions, they are filled
in from the step, because the model itself would number this rank's rows. A layer finds its mask in the plan by the
value of its window, never by the layer's number.

Without a step, the documents of this process attend alone (``cu_seq_lens_q``, or ``position_ids`` that restart), as in
packing on one process. On several ranks that would be a silent mistake, so it must be stated: ``step="alone"``.

The functions that Transformers calls in every layer are in :mod:`flexcp.frameworks.huggingface_attention`; the checks
around a model's forward are in :mod:`flexcp.frameworks.huggingface_checks`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from flexcp.batch import MaskLike
from flexcp.clusters import Cluster
from flexcp.executor.arguments import check_ids, named_kind, refuse_unsigned
from flexcp.executor.exchange.plan_agreement import said_by_all
from flexcp.executor.local_rows import next_tokens, refuse_shifted
from flexcp.executor.losses.averaging import Gradients
from flexcp.executor.step import Step, check_bound
from flexcp.frameworks.huggingface_attention import NAME as NAME
from flexcp.frameworks.huggingface_attention import chunks_named, flexcp_attention, flexcp_mask
from flexcp.frameworks.huggingface_checks import ValidLabels, check_forwards
from flexcp.frameworks.huggingface_layers import CHUNKED, PLANNED, SLIDING, refuse_unless_handled
from flexcp.frameworks.shared_batch import IGNORE, Rows, rows_of
from flexcp.masks import Mask, causal, chunked, window, windowed
from flexcp.masks.mask import TREE
from flexcp.models.config import attention_heads
from flexcp.models.config_fields import Fields
from flexcp.plan.positions import refuse_branches
from flexcp.planner import Planner

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def register() -> None:
    """Make ``attn_implementation="flexcp"`` known to Transformers; may be called repeatedly."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, flexcp_attention)
    AttentionMaskInterface.register(NAME, flexcp_mask)


def turn_on(
    model: PreTrainedModel | DistributedDataParallel, other_layers: Literal["refused", "handled"] = "refused"
) -> None:
    """Let ``model`` use flexcp's attention from now on, and check each forward that is given a step.

    A forward raises RuntimeError if no attention used its step, and ValueError for inputs or labels that do not fit the
    step. A model that does not take its attention from Transformers' AttentionInterface, or whose positions do not
    begin at 0 (RoBERTa), raises NotImplementedError here. The choice is kept in ``model.config``, where every layer
    looks for it, as ``model.set_attn_implementation`` does. Another model made from the same config object uses
    flexcp's attention too, without the checks; make it from ``copy.deepcopy(config)`` instead.

    A model with layers that mix tokens otherwise than by attention (convolutions, state space layers, linear attention)
    raises NotImplementedError too, because they would run on this rank's rows as they lie. ``other_layers="handled"``
    says that you adapted those layers, with ``step.relayout`` and ``step.restore``; flexcp cannot check it.
    """
    model = _inside(model)
    if not hasattr(model, "is_backend_compatible"):
        raise ValueError(
            f"turn_on takes a model of Transformers; got {named_kind(model)}: in layers of your own, call "
            "flexcp.attention"
        )
    if not model.is_backend_compatible():
        raise NotImplementedError(
            f"{type(model).__name__} does not take its attention from Transformers' AttentionInterface, so flexcp "
            "cannot replace it; call flexcp.attention in the layers themselves"
        )
    refuse_unless_handled(model, other_layers)
    _refuse_later_positions(model)
    register()
    model.set_attn_implementation(NAME)
    check_forwards(model)


def _refuse_later_positions(model: PreTrainedModel) -> None:
    """Raise NotImplementedError if a document's positions in ``model`` begin behind the id of the padding token.

    They do in RoBERTa and its relatives, whose tables of learned positions have a row for padding, where the step's
    positions begin at 0.
    """
    for part in model.modules():
        table = getattr(part, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None:
            raise NotImplementedError(
                f"{type(model).__name__} numbers the tokens of a document from {table.padding_idx + 1}, behind the row "
                f"for padding in the position_embeddings of {type(part).__name__}, but flexcp numbers them from 0 and "
                "its loss would be wrong; train a model whose positions begin at 0, such as GPT-2, OPT or any with RoPE"
            )


def masks(
    model: PreTrainedModel | PreTrainedConfig | DistributedDataParallel, mask: MaskLike | None = None
) -> dict[str, tuple[MaskLike, int]]:
    """Return the masks of a model's layers, each with the number of layers that use it, as ``masks=`` for a planner.

    The names are ``full``, ``window`` and ``chunks of N``, as far as the model has such layers. ``model`` is the model
    or its configuration. ``mask`` says which documents are trees: a tree, or a list with a tree or ``causal()`` for
    each document. Layers with a window then have the same trees in that window. Without ``mask`` all documents are
    causal. Raise NotImplementedError for layers of other kinds, and for trees in a model with chunks.
    """
    model = _inside(model)
    config = _text_config(model)
    layers = int(config.num_hidden_layers)
    keys = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [SLIDING if keys else "full_attention"] * layers
    unknown = set(kinds) - PLANNED
    if unknown:
        raise NotImplementedError(
            f"{config.model_type} has layers of kind {', '.join(sorted(unknown))}, for which masks() knows no mask; "
            "give planner(lengths, masks={'name': (mask, layers)}) those of the attention layers yourself, and first "
            "adapt layers that mix tokens otherwise (docs/frameworks.md#hybrid-models)"
        )
    windows, chunks = (sum(kind == name for kind in kinds) for name in (SLIDING, CHUNKED))
    found: dict[str, tuple[MaskLike, int]] = {}
    if windows + chunks < layers:
        found["full"] = (causal() if mask is None else mask, layers - windows - chunks)
    if chunks:
        size = getattr(config, "attention_chunk_size", None)
        if not size:
            raise ValueError(f"{config.model_type} has {chunks} chunked layers but attention_chunk_size={size!r}")
        if mask is not None:
            raise NotImplementedError(
                f"{config.model_type} has layers that attend in chunks of {size} tokens, which are not defined on "
                "trees: leave mask= out"
            )
        found[chunks_named(size)] = (chunked(int(size)), chunks)
    if windows:
        if not keys:
            raise ValueError(f"{config.model_type} has {windows} window layers but sliding_window={keys!r}")
        found["window"] = (_in_window(causal() if mask is None else mask, int(keys) - 1), windows)
    return found


def _text_config(model: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the text layers of a model, given the model or its configuration.

    In a model with images it is a part of the model's configuration.
    """
    config: PreTrainedConfig = getattr(model, "config", model)
    return config.get_text_config()


def _in_window(mask: MaskLike, left: int) -> MaskLike:
    if not isinstance(mask, Mask):
        return [_in_window(each, left) for each in mask]  # type: ignore[misc]
    if mask.name == TREE:
        return windowed(mask, left)
    if mask != causal():
        raise NotImplementedError(
            f"this model has window layers, and the mask {mask} has no window on its paths; give causal() or "
            "flexcp.tree(parents, lengths) for each document (a shared question is the tree of a question "
            "and its answers)"
        )
    return window(left)


def planner(
    model: PreTrainedModel | PreTrainedConfig | DistributedDataParallel,
    cluster: Cluster,
    dtype: Any = None,
    tp: int = 1,
    **options: Any,
) -> Planner:
    """Return a planner for a model's attention, from the model or its configuration.

    ``tp`` is the number of ranks over which heads are split by tensor parallelism. ``dtype`` is the dtype of the
    activations. By default it is that of the model's weights or the configuration's ``dtype``, or float32 if a
    configuration names none, as Transformers then makes the model. Give it if autocast or FSDP2's
    ``MixedPrecisionPolicy`` computes in another dtype. ``options`` are the other options of :class:`flexcp.Planner`;
    sizes of heads are not among them, because the model knows them.
    """
    for name in ("heads", "kv_heads", "head_dim", "v_head_dim"):
        if name in options:
            raise ValueError(
                f"huggingface.planner reads the sizes of heads from the model; got {name}={options[name]!r} besides. "
                "Leave it out, or make a planner for sizes of your own: flexcp.Planner(heads, kv_heads, head_dim, "
                "v_head_dim=..., dtype=..., cluster=...)"
            )
    model = _inside(model)
    config = _text_config(model)
    _refuse_sizes_by_layer(config)
    dtype = dtype or getattr(model, "dtype", None) or getattr(config, "dtype", None) or "float32"
    heads, kv_heads, head_dim, v_head_dim = _heads(config)
    if heads % tp or kv_heads % tp:
        raise ValueError(f"{heads} query and {kv_heads} KV heads cannot be split over tp={tp} ranks")
    sizes = heads // tp, kv_heads // tp, head_dim
    return Planner(*sizes, v_head_dim=v_head_dim, dtype=str(dtype), cluster=cluster, **options)


def _refuse_sizes_by_layer(config: PreTrainedConfig) -> None:
    """Raise NotImplementedError if layers differ in the number or the size of heads, because a plan has one of each."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else ()
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        listed = getattr(config, f"{name}_per_layer", None) or ()
        sizes = sorted({getattr(layer, name, None) for layer in layers} | set(listed), key=str)
        if len(sizes) > 1:
            raise NotImplementedError(
                f"layers of {config.model_type} differ in {name} ({', '.join(map(str, sizes))}), but a plan is for one "
                "shape of heads, so flexcp cannot run all attention of such a model; take a configuration whose "
                f"layers have the same {name}, or call flexcp.attention in the layers, under a plan for each shape"
            )


def _heads(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Return (query heads, KV heads, head size of queries and keys, head size of values) of a configuration.

    They are read as from ``config.json``. A model with multi-latent attention gives its attention a key and a value for
    each query head.
    """
    if getattr(config, "kv_lora_rank", None):
        heads = config.num_attention_heads
        return heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    # Transformers provides the usual names of every family's sizes, whatever the file calls them.
    usual = {name: getattr(config, name) for name in ("num_attention_heads", "hidden_size")}
    found = attention_heads(Fields(type(config).__name__, config.to_dict() | usual, config.model_type))
    return *found, found[-1]


def inputs(tokens: Tensor, step: Step, labels: Tensor | None = None, gradients: Gradients = "summed") -> dict[str, Any]:
    """Return the keywords of a model's forward for this rank's rows of a batch, from the stream's token ids ``[T]``.

    ``labels`` ``[T]`` are not shifted: each stands beside its own token, -100 where it is not to be predicted; by
    default they are the tokens. They are shifted here inside documents before they are sharded.
    ``model(**inputs).loss`` is this rank's sum / the batch's valid labels. ``gradients`` says how gradients are reduced
    over the ranks of the step, as in ``step.loss``. If they are summed, the batch's loss is the sum of the ranks'
    losses. If they are averaged (DDP), each rank's loss is multiplied by the number of ranks, and the batch's loss is
    their mean. A rank without tokens gets one row that no other row sees, because models cannot run on none. The stream
    and its labels must be the same on every rank. In a group's first step this is checked, so there every rank of the
    group must call this function, and waits for the others at most the ``timeout`` of ``bind``.

    A batch with a document that branches has no labels, because a row may have several: use
    ``model(**inputs).logits[0]`` with ``step.loss(logits, step.edges(tokens))`` and ``step.log_probs``.
    """
    check_bound(step)
    batch = step.plan.batch
    with step.collectives.checking("huggingface.inputs"):
        check_ids(tokens, "tokens", "huggingface.inputs", batch.tokens, step.local_tokens)
        if labels is not None:
            check_ids(labels, "labels", "huggingface.inputs", batch.tokens, step.local_tokens)
            refuse_unsigned(labels, "huggingface.inputs")
            _refuse_other_marks(labels)
        if labels is not None:
            refuse_branches(batch, "labels hold")
        if batch.branches:
            _refuse_other_streams(step, tokens, tokens)
            return _without_labels(step, tokens)
        shifted = next_tokens(tokens if labels is None else labels, batch, IGNORE)
        if labels is not None:
            refuse_shifted(tokens, labels, next_tokens(tokens, batch, IGNORE), IGNORE, "huggingface.inputs")
    _refuse_other_streams(step, tokens, tokens if labels is None else labels)
    valid = batch.tokens - batch.documents if labels is None else int((shifted != IGNORE).sum())
    return keywords_of(rows_of(step, tokens, shifted), valid, gradients)


def _without_labels(step: Step, tokens: Tensor) -> dict[str, Any]:
    """Return the keywords of a forward for this rank's rows without labels, so that it gives only logits."""
    if step.local_tokens == 0:  # models cannot run on no rows
        ids = positions = tokens.new_zeros(1)
    else:
        ids, positions = step.shard(tokens), step.tables.positions_on(tokens.device)
    return {"input_ids": ids[None], "position_ids": positions[None], "step": step, "use_cache": False}


def _refuse_other_marks(labels: Tensor) -> None:
    """Raise ValueError for labels below 0 that Transformers' loss would not ignore."""
    odd = ((labels < 0) & (labels != IGNORE)).nonzero()
    if len(odd):
        at, label = int(odd[0]), int(labels[odd[0]])
        raise ValueError(
            f"the label of token {at} is {label}, which is neither a token id nor {IGNORE}, the one label that "
            f"Transformers' loss ignores; where {label} marks tokens without a label pass labels.masked_fill(labels == "
            f"{label}, {IGNORE})"
        )


def _refuse_other_streams(step: Step, tokens: Tensor, labels: Tensor) -> None:
    """Raise ValueError on every rank if ranks gave different token ids or labels to the group's first step.

    They do if a sampler deals documents over ranks. Documents of equal lengths have equal plans on all ranks, so
    :func:`flexcp.bind` cannot detect this. Only the first call is checked, and later steps not at all.
    """
    notes = step.collectives.notes
    if notes is None or step.collectives.step != 1 or step.stream_compared:
        return
    step.stream_compared = True
    said = " ".join(hashlib.sha256(x.cpu().to(torch.int64).numpy().tobytes()).hexdigest() for x in (tokens, labels))
    digests = [x.split(" ") for x in said_by_all("token ids", said, notes, step.timeout)]
    for number, what in enumerate(("token ids", "labels")):
        for rank, of_rank in enumerate(digests):
            if of_rank[number] != digests[0][number]:
                raise ValueError(
                    f"the {what} of rank {rank} are not those of rank 0: huggingface.inputs takes the stream of the "
                    "whole batch and its labels, the same on every rank. Where a sampler gives every rank documents of "
                    "its own, gather them with flexcp.frameworks.huggingface_trainer.prepared(batch, planner, "
                    "gradients=...)"
                )


def keywords_of(rows: Rows, valid: int | Tensor, gradients: Gradients) -> dict[str, Any]:
    """Return the keywords of a model's forward for this rank's rows.

    ``valid`` is the batch's number of labels on all ranks, ``gradients`` how gradients are reduced over them.
    """
    divisor = ValidLabels(valid, rows.step, gradients, (rows.labels != IGNORE).sum())
    return {
        "input_ids": rows.tokens[None],
        "position_ids": rows.positions[None],
        "labels": rows.labels[None],
        "shift_labels": rows.labels[None],
        "num_items_in_batch": divisor,
        "step": rows.step,
        "gradients": gradients,
        "use_cache": False,
    }


def _inside(model: Any) -> Any:
    """Return the model inside a DDP wrapper, or the model itself if there is none; raise ValueError for a class."""
    if isinstance(model, type):
        name = model.__name__
        raise ValueError(
            f"{name} is a class, not a model: make one, {name}(config) or {name}.from_pretrained(...), and pass that"
        )
    return model.module if isinstance(model, DistributedDataParallel) else model
