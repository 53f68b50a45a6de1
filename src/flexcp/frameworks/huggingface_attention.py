"""The attention and mask functions that :mod:`flexcp.frameworks.huggingface` registers with Transformers.

The window of a layer is a keyword of its attention function, or, where the model puts windows into its masks alone, a
matter of the configuration. Whether a layer attends inside chunks follows only from its place in the configuration's
``layer_types``.

Anything that flexcp cannot do raises: dropout, padding, 4-D masks, bidirectional layers, biases, KV caches from earlier
calls, attention weights as output, and unknown keywords.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from flexcp.executor.arguments import ranks_of_run
from flexcp.executor.attention import attention
from flexcp.executor.layer_masks import MissingMaskError
from flexcp.executor.slice_attention import slice_attention
from flexcp.executor.step import Step, check_bound
from flexcp.frameworks.huggingface_layers import CHUNKED, SLIDING, refuse_growing_rope, refuse_other_layers
from flexcp.frameworks.llama4_temperature import retuned
from flexcp.frameworks.router_loss import refuse_whole_router_loss
from flexcp.frameworks.shared_batch import lengths_of
from flexcp.masks import causal, chunked, window

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "flexcp"
"""The name of flexcp's attention in Transformers: ``attn_implementation="flexcp"``."""
ELSEWHERE = frozenset(
    {
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "use_cache",
        "past_key_values",
        "past_key_value",
        "cache_position",
        "position_embeddings",
        "labels",
        "shift_labels",
        "return_dict",
        "gradients",
    }
)
"""Keywords that reach attention functions but are meant for other parts of a model."""
_WINDOW_IN_MASKS = frozenset({"phimoe"})
"""Families whose layers all have the configuration's window, which only the masks of the model say."""
WITH_MASKS = (
    "plan with the masks of the model's layers: planner(lengths, masks=huggingface.masks(model.config)), or "
    "prepared(batch, planner, masks=huggingface.masks(model.config)); for trees huggingface.masks(model.config, mask)"
)
"""How to plan the masks of a model's layers, for messages."""


def flexcp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    step: Step | Literal["alone"] | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run attention of one layer, called by Transformers: ``[B, H, S, D]`` in, ``[B, S, H, D]`` out, and no weights.

    ``step`` is the step to run under. With ``"alone"`` the rows are this process's own documents, and with None too if
    there is only one rank; on several ranks None raises ValueError. ``sliding_window`` is the number of keys that a
    query sees, ``s_aux`` one extra logit per head (sinks). What flexcp cannot do raises NotImplementedError.
    """
    _refuse(module, query, key, attention_mask, dropout, is_causal, others)
    query, key, value = (_autocast(x) for x in (query, key, value))
    # Under autocast a parameter kept in float32 is cast here to the activations' dtype, as in the model's own
    # attention.
    sinks = None if s_aux is None else s_aux.to(query.dtype)
    chunk, keys = _chunk(module), _window(module, sliding_window)
    # Views whose backward is a view too; x[0] would make the backward fill zeros and copy the gradient into them.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if step is None or step == "alone":
        _refuse_alone(module, step)
        lengths = _lengths(query, position_ids, cu_seq_lens_q, cu_seq_lens_k)
        q = retuned(module, q, query.shape[2], torch.cat([torch.arange(n) for n in lengths]))
        mask = chunked(chunk) if chunk else window(keys - 1) if keys else causal()
        out = slice_attention(q, k, v, mask, lengths, scale=scaling, softcap=softcap, sinks=sinks)
        assert isinstance(out, Tensor)
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    check_bound(step)
    if query.shape[0] != 1:
        raise ValueError(
            f"under a step a rank's tokens are one row: shape [1, tokens], but the model got {query.shape[0]} rows of "
            f"{query.shape[2]}; lay the documents end to end"
        )
    if not torch.compiler.is_compiling():
        refuse_growing_rope(getattr(module, "config", None), step)
        if not step.calls:
            refuse_other_layers(module)
    _check_documents(step, query, position_ids, cu_seq_lens_q)
    if others.get("gradients") is not None and not isinstance(others.get("num_items_in_batch"), int | float | Tensor):
        refuse_whole_router_loss(module, step)  # a model that was turned on got a plain number of labels
    if query.shape[2] == 1 and step.local_tokens == 0:
        q, k, v = q[:0], k[:0], v[:0]
    else:
        q = retuned(module, q, len(q), step.tables.positions)
    layer: dict[str, Any] = {"mask": chunks_named(chunk)} if chunk else {"window": keys}
    out = _attended(q, k, v, step, scale=scaling, softcap=softcap, sinks=sinks, **layer)
    if query.shape[2] == 1 and step.local_tokens == 0:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    return out[None], None


def _attended(q: Tensor, k: Tensor, v: Tensor, step: Step, **options: Any) -> Tensor:
    """Run :func:`flexcp.attention`; if the plan lacks the mask of a layer, say how the model's masks are planned."""
    if torch.compiler.is_compiling():
        out = attention(q, k, v, step, **options)
    else:
        try:
            out = attention(q, k, v, step, **options)
        except MissingMaskError as error:
            raise ValueError(f"{error.what}; {WITH_MASKS}") from None
    assert isinstance(out, Tensor)
    return out


def chunks_named(size: int) -> str:
    """Return the name that ``huggingface.masks`` gives the mask of layers with chunks of ``size`` tokens."""
    return f"chunks of {size}"


def _chunk(module: nn.Module) -> int:
    """Return the number of tokens in this layer's chunks; 0 for a layer without chunks.

    Raise NotImplementedError if some layers have chunks and this one does not say which layer it is.
    """
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if CHUNKED not in kinds:
        return 0
    number = getattr(module, "layer_idx", None)
    if number is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not say which layer it is, so flexcp cannot tell whether it has chunks"
        )
    return int(config.attention_chunk_size) if kinds[number] == CHUNKED else 0


def _window(module: nn.Module, given: int | None) -> int:
    """Return the number of keys that a query of this layer sees; 0 for a layer without a window.

    ``given`` is what the layer says. Layers of Qwen2-MoE and PhiMoE say nothing, because the masks that their models
    make have the window; flexcp makes no masks, so they would see all keys.
    """
    config: Any = getattr(module, "config", None)
    kinds, number = getattr(config, "layer_types", None) or (), getattr(module, "layer_idx", None)
    listed = number is not None and number < len(kinds) and kinds[number] == SLIDING
    if given or not (listed or getattr(config, "model_type", None) in _WINDOW_IN_MASKS):
        return given or 0
    return int(getattr(config, "sliding_window", None) or 0)


def _autocast(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's dtype, or as it is if autocast is off or ``x`` is float64.

    RoPE in float32 leaves queries and keys in another dtype than values.
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def flexcp_mask(
    attention_mask: Tensor | None = None,
    mask_function: Any = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: PreTrainedConfig | None = None,
    **others: Any,
) -> None:
    """Make no mask, because the plan has it, where Transformers asks for a model's mask.

    Raise NotImplementedError for what the plan cannot express: a model's own mask functions, padding, and chunks if
    ``layer_types`` do not say which layers have them.
    """
    if use_vmap or (not torch.compiler.is_compiling() and not _is_plain(mask_function)):
        raise NotImplementedError(
            f"this model adds a mask function of its own ({_name(mask_function)}) to causal and window masks, which "
            "flexcp would ignore; plan such a mask with masks={...} and call flexcp.attention in the layers themselves"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if local_size is not None and local_size == chunk and CHUNKED not in (getattr(config, "layer_types", None) or ()):
        raise NotImplementedError(
            f"attention_chunk_size={local_size}, but layer_types of "
            f"{getattr(config, 'model_type', 'the configuration')} do not say which layers are {CHUNKED!r}"
        )
    refuse_padding(attention_mask)


def refuse_padding(attention_mask: Tensor | None) -> None:
    """Raise NotImplementedError for a mask that hides tokens; under torch.compile, for any mask."""
    if attention_mask is not None and (torch.compiler.is_compiling() or not bool(attention_mask.all())):
        raise NotImplementedError(
            "a padding mask is not supported: lay the documents end to end without padding and drop attention_mask"
        )


PLAIN = (
    "causal_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "chunked_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
)
"""Mask functions that express only causal masks, windows, chunks and the borders of documents."""


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))


def _is_plain(function: Any) -> bool:
    """Return whether a mask function is None, one of :data:`PLAIN`, or an intersection of such functions."""
    if function is None or _name(function) in PLAIN:
        return True
    if _name(function) != "and_masks.<locals>.and_mask":
        return False
    return all(_is_plain(part) for cell in function.__closure__ for part in cell.cell_contents)


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    others: Mapping[str, Any],
) -> None:
    if dropout:
        raise NotImplementedError(
            f"attention dropout is not supported (got {dropout}); set {_dropout_fields(module, dropout)} in the config"
        )
    if mask is not None:
        raise NotImplementedError(
            f"{type(module).__name__} got a mask tensor of shape {tuple(mask.shape)}, which is not supported: if you "
            "passed attention_mask, drop it and plan with masks=...; if you passed none, the model itself makes this "
            "mask, and flexcp cannot run its attention"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError(f"{type(module).__name__} is bidirectional (is_causal=False), which is not supported")
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"{query.shape[2]} queries against {key.shape[2]} keys: a KV cache from an earlier call is not supported; "
            "generate with another attn_implementation"
        )
    refuse_ignored(module, others)


def _dropout_fields(module: nn.Module, dropout: float) -> str:
    """Return the settings of a layer's configuration that turn attention dropout off, as in ``attn_pdrop=0``."""
    config: Any = getattr(module, "config", None)
    values = {} if config is None else config.to_dict()
    found = [name for name, value in values.items() if "drop" in name and value == dropout]
    named = [name for name in found if name in attention_dropouts(config)] or found or ["attention_dropout"]
    return " and ".join(f"{name}=0" for name in named)


def attention_dropouts(config: PreTrainedConfig) -> dict[str, float]:
    """Return the fields of a configuration that turn attention dropout on, with their values."""
    fields = config.to_dict().items()
    return {n: x for n, x in fields if "att" in n and "drop" in n and isinstance(x, int | float) and x > 0}


def refuse_ignored(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for attention keywords that flexcp would ignore.

    ``others`` are the keywords that flexcp's attention function does not have. Those in :data:`ELSEWHERE`, and those
    that are None or False, are accepted.
    """
    for name, value in others.items():
        if name not in ELSEWHERE and value is not None and value is not False:
            raise NotImplementedError(
                f"{type(module).__name__} passes {name}=... to attention, which flexcp would ignore"
            )


def _refuse_alone(module: nn.Module, step: str | None) -> None:
    if step is None and ranks_of_run() > 1:
        raise ValueError(
            f"no step was given to the model on {ranks_of_run()} ranks: call model(..., step=flexcp.bind(plan, "
            "group)), or model(..., step='alone') when every rank attends to its own documents only. To generate, turn "
            "flexcp off before: model.set_attn_implementation('sdpa'). If the model was given a step, "
            f"{not_passed_on(type(module).__name__)}"
        )


def not_passed_on(name: str) -> str:
    """Return why a step that was given to a model does not reach its attention; ``name`` says whose attention."""
    return (
        f"its layers do not pass keywords on to {name} (Nemotron's do not), so flexcp cannot run it; pass **kwargs on "
        "in the layers' forward"
    )


def _lengths(query: Tensor, position_ids: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None) -> list[int]:
    """Return the lengths of this process's documents, row after row, for attention without a step.

    They follow from ``cu_seq_lens_q``, else from where ``position_ids`` restart; without both, each row is a document.
    Raise ValueError under torch.compile.
    """
    if torch.compiler.is_compiling():
        raise ValueError("under torch.compile give the model a step, on one process too: step=flexcp.bind(plan)")
    rows, tokens = query.shape[0], query.shape[2]
    if (cu_q is None) != (cu_k is None) or (cu_q is not None and cu_k is not None and not torch.equal(cu_q, cu_k)):
        raise NotImplementedError(f"cu_seq_lens_q and cu_seq_lens_k must be the same; got {cu_q} and {cu_k}")
    if cu_q is not None:
        return [n for n in cu_q.diff().tolist() if n]
    if position_ids is None or position_ids.dim() != 2:
        return [tokens] * rows
    return lengths_of(position_ids.expand(rows, -1))


def _check_documents(step: Step, query: Tensor, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> None:
    """Raise ValueError if the caller's document borders or positions are not those of the step's plan.

    Positions are wrong if they only number this rank's rows. They are checked in a step's first call only; under
    torch.compile nothing is compared, and borders raise.
    """
    if torch.compiler.is_compiling():
        if cu_seq_lens is not None:
            raise ValueError(
                "the step says where documents end; under torch.compile drop cu_seq_lens_q and cu_seq_lens_k"
            )
        return
    if step.calls:
        return
    starts = step.plan.batch.starts
    if cu_seq_lens is not None and cu_seq_lens.tolist() != starts.tolist():
        raise ValueError(
            f"cu_seq_lens_q {cu_seq_lens.tolist()} is not the batch of the step's plan, {starts.tolist()}; drop it, or "
            "plan these lengths"
        )
    refuse_counted(position_ids, step)


def refuse_counted(position_ids: Tensor | None, step: Step) -> None:
    """Raise ValueError for positions that only number this rank's rows from 0, if the step's positions are others.

    The step's own positions are recognised without reading them, because a read from a GPU makes the host wait.
    """
    tokens = step.local_tokens
    if position_ids is None or position_ids.shape[-1] != tokens or step.tables.are_positions(position_ids):
        return
    counted = torch.arange(tokens)
    given = position_ids.reshape(-1)[-tokens:].cpu()
    if torch.equal(given, counted) and not torch.equal(step.tables.positions, counted):
        raise ValueError(
            "position_ids count this rank's rows, not the documents' tokens: pass position_ids=step.positions[None], "
            "which RoPE needs"
        )
