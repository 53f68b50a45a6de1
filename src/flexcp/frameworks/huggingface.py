"""Hugging Face Transformers: ``attn_implementation="flexcp"``.

    huggingface.turn_on(model)                                           # or register() and attn_implementation="flexcp"
    plan = planner(lengths, masks=huggingface.masks(model.config))
    step = flexcp.bind(plan, mesh["cp"])
    loss = model(**huggingface.inputs(tokens, step)).loss               # gradients="averaged" under DDP

The step is a keyword of the model's forward: Transformers hands keywords it does not know to every attention function. ``[1, H, S, D]`` is
seen as flexcp's ``[S, H, D]`` without a copy. Positions that nobody gave are filled in from the step: the model itself would count this
rank's rows. A layer's window picks its mask from the plan by value, never by the layer's number.

Without a step the documents of this process attend alone (``cu_seq_lens_q``, or ``position_ids`` that start anew), which is what one
process means by packing. On several ranks that would be a silent mistake, so it must be said: ``step="alone"``.

What cannot be honoured raises: dropout, padding, 4-D masks, bidirectional and chunked layers, biases, KV caches from earlier calls,
weights as output, keywords nobody here knows.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flexcp.batch import MaskLike
from flexcp.clusters import Cluster
from flexcp.executor.arguments import check_rows
from flexcp.executor.averaging import Gradients, share_factor
from flexcp.executor.exchange.agree import same_as_first
from flexcp.executor.layout import next_tokens, refuse_shifted
from flexcp.executor.op import attention
from flexcp.executor.slice_attention import slice_attention
from flexcp.executor.step import Step, check_bound
from flexcp.frameworks import fsdp, not_used
from flexcp.frameworks.shared_batch import IGNORE, Rows, lengths_of, rows_of
from flexcp.masks import causal, full, window
from flexcp.planner import Planner

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NAME = "flexcp"
ELSEWHERE = frozenset({
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "max_length_q", "max_length_k", "seq_idx", "use_cache",
    "past_key_values", "past_key_value", "cache_position", "position_embeddings", "labels", "shift_labels", "return_dict",
    "gradients",
})  # fmt: skip
"""Keywords that reach attention functions and mean something to other parts of a model."""


def register() -> None:
    """Make ``attn_implementation="flexcp"`` known to Transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, flexcp_attention)
    AttentionMaskInterface.register(NAME, flexcp_mask)


def turn_on(model: PreTrainedModel | DistributedDataParallel) -> None:
    """Let ``model`` attend by flexcp from now on, and raise whenever it is given a step that its attention does not use."""
    model = _inside(model)
    if not model.is_backend_compatible():
        raise NotImplementedError(
            f"{type(model).__name__} does not take its attention from Transformers' AttentionInterface, so flexcp cannot replace it; "
            "call flexcp.attention in the layers themselves"
        )
    register()
    model.set_attn_implementation(NAME)
    if _refuse_wrong_use in model._forward_pre_hooks.values():
        return  # turned on before
    model.register_forward_pre_hook(_refuse_wrong_use, with_kwargs=True)
    model.register_forward_pre_hook(_with_count, with_kwargs=True)
    model.register_forward_pre_hook(_with_positions, with_kwargs=True)
    check_use(model)


def check_use(model: nn.Module) -> None:
    """Raise from now on whenever ``model`` is given a step and no attention inside it uses it, or a loss whose gradients come out wrong."""
    model.register_forward_pre_hook(_note_calls, with_kwargs=True)
    model.register_forward_hook(_check_calls, with_kwargs=True)


def masks(config: PreTrainedConfig) -> dict[str, tuple[MaskLike, int]]:
    """The masks of a model's layers, for ``planner(lengths, masks=...)``: ``full`` and ``window``, with how many layers use each."""
    layers = int(config.num_hidden_layers)
    keys = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if keys else "full_attention"] * layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise NotImplementedError(
            f"{config.model_type} has layers of kind {', '.join(sorted(unknown))}, for which masks() knows no mask; "
            "give planner(lengths, masks={'name': (mask, layers)}) yourself"
        )
    windows = sum(kind == "sliding_attention" for kind in kinds)
    found: dict[str, tuple[MaskLike, int]] = {}
    if windows < layers:
        found["full"] = (causal(), layers - windows)
    if windows:
        if not keys:
            raise ValueError(f"{config.model_type} has {windows} window layers but sliding_window={keys!r}")
        found["window"] = (window(int(keys) - 1), windows)
    return found


def planner(
    model: PreTrainedModel | PreTrainedConfig | DistributedDataParallel,
    cluster: Cluster,
    dtype: Any = None,
    tp: int = 1,
    **options: Any,
) -> Planner:
    """A planner for a model's attention, from the model or its configuration; ``tp`` is over how many ranks heads are split.

    ``dtype`` is what the activations are in. By default it is that of the model's weights or the configuration's ``dtype``, and float32
    where a configuration says nothing, as Transformers makes such a model. Say it where autocast or FSDP2's ``MixedPrecisionPolicy``
    computes in another one.
    """
    model = _inside(model)
    config: PreTrainedConfig = getattr(model, "config", model)
    dtype = dtype or getattr(model, "dtype", None) or getattr(config, "dtype", None) or "float32"
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % tp or kv_heads % tp:
        raise ValueError(f"{heads} query and {kv_heads} KV heads cannot be split over tp={tp} ranks")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Planner(heads // tp, kv_heads // tp, int(head_dim), dtype=str(dtype), cluster=cluster, **options)


def inputs(tokens: Tensor, step: Step, labels: Tensor | None = None, gradients: Gradients = "summed") -> dict[str, Any]:
    """Keywords of a model's forward for this rank's rows of a batch, from the stream's token ids ``[T]``.

    Labels, by default each token's successor, are shifted inside documents before they are sharded; ``model(**inputs).loss`` is this rank's
    sum / the batch's valid labels. ``gradients`` says what happens to gradients over the ranks of the step, as in ``step.loss``: where they
    are summed the batch's loss is the sum of the ranks'; where they are averaged (DDP) each rank's is multiplied by the number of ranks,
    and the batch's loss is their mean. A rank that keeps no token gets one that nobody sees, because models are not written for none.
    The stream is the same on every rank; the first of a group is compared.
    """
    check_bound(step)
    check_rows(tokens, "huggingface.inputs")
    batch = step.plan.batch
    shifted = next_tokens(tokens if labels is None else labels, batch, IGNORE)
    if labels is not None:
        refuse_shifted(tokens, labels, next_tokens(tokens, batch, IGNORE), IGNORE, "huggingface.inputs")
    _refuse_other_stream(step, tokens)
    valid = batch.tokens - batch.documents if labels is None else int((shifted != IGNORE).sum())
    return keywords_of(rows_of(step, tokens, shifted), max(1, valid), gradients)


def _refuse_other_stream(step: Step, tokens: Tensor) -> None:
    """Raise where another rank gave other token ids to the group's first step, as samplers do that deal documents over ranks.

    Documents of equal lengths have equal plans on all ranks, so binding cannot see it.
    """
    if step.group is None or step.talk.step != 1 or step.loss_said:
        return
    digest = hashlib.sha256(tokens.cpu().to(torch.int64).numpy().tobytes()).hexdigest()
    if not same_as_first("tokens", digest, step.group, step.timeout):
        raise ValueError(
            f"the token ids of rank {step.rank} are not those of another rank: huggingface.inputs takes the stream of the whole batch, the "
            "same on every rank. Where a sampler gives every rank documents of its own, gather them with "
            "flexcp.frameworks.huggingface_trainer.prepared(batch, planner, gradients=...)"
        )


class ValidLabels:
    """The number a model's loss is divided by. Dividing by it raises where no attention ran under the step, or gradients come out wrong.

    A model that was not turned on takes a step among its keywords and drops it; its loss is the first thing that can tell. One that was
    turned on gets the plain number, and is checked after its forward. As an integer it is the batch's valid labels, those of all ranks, by
    which losses of several batches are weighed; under ``gradients="averaged"`` the divisor is that / the number of ranks.
    """

    def __init__(self, valid: int | Tensor, step: Step, gradients: Gradients) -> None:
        self.valid, self.step, self.gradients = valid, step, gradients
        factor = share_factor(gradients, step.cp_size)
        self.count = valid if factor == 1 else valid / factor

    def __rtruediv__(self, total: Tensor) -> Tensor:
        if not self.step.calls:
            raise RuntimeError(not_used(self.step))
        if total.requires_grad:
            self.step.check_reduction(self.gradients)
        return total / self.count

    def __int__(self) -> int:
        return int(self.valid)

    def __eq__(self, other: object) -> bool:
        return bool(self.count == other)

    def __hash__(self) -> int:
        return hash(self.count)

    def __repr__(self) -> str:
        return f"{self.count} labels"


def keywords_of(rows: Rows, valid: int | Tensor, gradients: Gradients) -> dict[str, Any]:
    """Keywords of a model's forward for this rank's rows of a batch with so many ``valid`` labels on all ranks."""
    divisor = ValidLabels(valid, rows.step, gradients)
    rows.step.loss_said = True
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
    """What Transformers calls in every layer: ``[B, H, S, D]`` in, ``[B, S, H, D]`` out, and no weights."""
    _refuse(module, query, key, attention_mask, dropout, is_causal, others)
    query, key, value = (_autocast(x) for x in (query, key, value))
    # A parameter kept in float32 under autocast joins the activations here, as in the model's own attention.
    sinks = None if s_aux is None else s_aux.to(query.dtype)
    # Views whose backward is a view too: one taken by x[0] would fill zeros and copy the gradient into them.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if step is None or step == "alone":
        _refuse_alone(step)
        lengths = _lengths(query, position_ids, cu_seq_lens_q, cu_seq_lens_k)
        mask = window(sliding_window - 1) if sliding_window else causal()
        out = slice_attention(q, k, v, mask, lengths, scale=scaling, softcap=softcap, sinks=sinks)
        assert isinstance(out, Tensor)
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    check_bound(step)
    if query.shape[0] != 1:
        raise ValueError(
            f"under a step a rank's tokens are one row: shape [1, tokens], but the model got {query.shape[0]} rows of {query.shape[2]}; "
            "lay the documents end to end"
        )
    _check_documents(step, query, position_ids, cu_seq_lens_q)
    if query.shape[2] == 1 and step.local_tokens == 0:
        q, k, v = q[:0], k[:0], v[:0]
    out = attention(q, k, v, step, window=sliding_window or 0, scale=scaling, softcap=softcap, sinks=sinks)
    assert isinstance(out, Tensor)
    if query.shape[2] == 1 and step.local_tokens == 0:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    return out[None], None


def _autocast(x: Tensor) -> Tensor:
    """``x`` in autocast's dtype where that is on: RoPE in float32 leaves queries and keys in another dtype than values."""
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
    """What Transformers calls for a model's mask. There is none to build: the plan has it, and what it cannot have is refused."""
    if use_vmap or (not torch.compiler.is_compiling() and not _is_plain(mask_function)):
        raise NotImplementedError(
            f"this model adds a mask function of its own ({_name(mask_function)}) to causal and window masks, which flexcp would ignore; "
            "plan such a mask with masks={...} and call flexcp.attention in the layers themselves"
        )
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        raise NotImplementedError(f"chunked attention (attention_chunk_size={local_size}) is not supported")
    refuse_padding(attention_mask)


def refuse_padding(attention_mask: Tensor | None) -> None:
    """Raise for a mask that hides tokens; one that hides none says nothing."""
    if attention_mask is not None and (torch.compiler.is_compiling() or not bool(attention_mask.all())):
        raise NotImplementedError(
            "a padding mask is not supported: lay the documents end to end without padding and drop attention_mask"
        )


PLAIN = (
    "causal_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
)
"""Mask functions that say nothing but causal, window and the borders of documents."""


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))


def _is_plain(function: Any) -> bool:
    """Whether a mask function is made of :data:`PLAIN` ones by intersection alone."""
    if function is None or _name(function) in PLAIN:
        return True
    if _name(function) != "and_masks.<locals>.and_mask":
        return False
    return all(_is_plain(part) for cell in function.__closure__ for part in cell.cell_contents)


def _refuse(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, is_causal: bool | None, others: Mapping[str, Any]
) -> None:  # fmt: skip
    if dropout:
        raise NotImplementedError(
            f"attention dropout is not supported (got {dropout}); set attention_dropout=0 in the config"
        )
    if mask is not None:
        raise NotImplementedError(
            f"a mask tensor of shape {tuple(mask.shape)} is not supported; plan with masks=... and drop attention_mask"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError(f"{type(module).__name__} is bidirectional (is_causal=False), which is not supported")
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"{query.shape[2]} queries against {key.shape[2]} keys: a KV cache from an earlier call is not supported; "
            "generate with another attn_implementation"
        )
    refuse_ignored(module, others)


def refuse_ignored(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise for a keyword of attention that nobody here knows and that is not for :data:`ELSEWHERE`."""
    for name, value in others.items():
        if name not in ELSEWHERE and value is not None and value is not False:
            raise NotImplementedError(
                f"{type(module).__name__} passes {name}=... to attention, which flexcp would ignore"
            )


def _refuse_alone(step: str | None) -> None:
    if step is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"no step was given to the model on {dist.get_world_size()} ranks: call model(..., step=flexcp.bind(plan, group)), or "
            "model(..., step='alone') when every rank attends to its own documents only. To generate, turn flexcp off before: "
            "model.set_attn_implementation('sdpa')"
        )


def _lengths(query: Tensor, position_ids: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None) -> list[int]:
    """Documents of this process, row after row."""
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
    """Refuse borders that are not the plan's, and positions nobody gave; once a step, and never inside a graph."""
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
            f"cu_seq_lens_q {cu_seq_lens.tolist()} is not the batch of the step's plan, {starts.tolist()}; drop it, or plan these lengths"
        )
    _refuse_counted(position_ids, step)


def _refuse_counted(position_ids: Tensor | None, step: Step) -> None:
    """Raise for positions that a model or its caller made by counting this rank's rows."""
    tokens = step.local_tokens
    if position_ids is None or position_ids.shape[-1] != tokens:
        return
    counted = torch.arange(tokens)
    given = position_ids.reshape(-1)[-tokens:].cpu()
    if torch.equal(given, counted) and not torch.equal(step.row_positions, counted):
        raise ValueError(
            "position_ids count this rank's rows, not the documents' tokens: pass position_ids=step.positions[None], which RoPE needs"
        )


_CALLS = "_flexcp_calls"


def _inside(model: Any) -> Any:
    """The model in a wrapper that passes calls on."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _refuse_wrong_use(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raise for rows of another shape, labels that the model would shift over this rank's rows or divide by something else, and a mask
    that shows a causal model what it predicts."""
    step = keywords.get("step")
    if not isinstance(step, Step) or torch.compiler.is_compiling():
        return
    ids = arguments[0] if arguments else keywords.get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 1:
        raise ValueError(f"input_ids has shape {tuple(ids.shape)}, but a model takes [1, tokens]: pass input_ids[None]")
    if isinstance(ids, Tensor) and len(ids) == 1:
        step.seen.given(ids[0])
    if keywords.get("labels") is not None and keywords.get("shift_labels") is None:
        raise ValueError(
            "labels beside a step would be shifted over this rank's rows, across documents, and averaged over this rank alone: take the "
            "keywords of flexcp.frameworks.huggingface.inputs(tokens, step, labels), or leave labels out and call "
            "step.loss(logits[0], step.labels(tokens)): labels are next tokens, which step.labels shifts inside documents"
        )
    if keywords.get("labels") is not None and "gradients" in keywords:
        _refuse_other_count(keywords.get("num_items_in_batch"), step, keywords["gradients"])
    if any(full() in mask.rules for mask in step.plan.batch.masks) and any(
        getattr(part, "is_causal", False) is True for part in module.modules()
    ):
        raise ValueError(
            f"{type(module).__name__} is causal, but this plan's mask is full: every token would see the one it predicts; plan with "
            "masks=flexcp.frameworks.huggingface.masks(model.config)"
        )


def _refuse_other_count(count: Any, step: Step, gradients: Gradients) -> None:
    """Raise for a number of labels that is not the one made with the labels, where that one also holds how gradients are reduced."""
    if isinstance(count, ValidLabels) or (count is not None and share_factor(gradients, step.cp_size) == 1):
        return
    raise ValueError(
        f"num_items_in_batch={count} is not what flexcp made with these labels, which under gradients={gradients!r} also holds the "
        f"{step.cp_size} ranks: leave it as it is. To accumulate gradients, multiply each loss by the labels of its batch / those of all "
        "batches"
    )


def _with_count(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The plain number of labels."""
    found = keywords.get("num_items_in_batch")
    return (arguments, keywords | {"num_items_in_batch": found.count}) if isinstance(found, ValidLabels) else None


def _with_positions(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The step's positions in the place of none, and none that were counted."""
    step = keywords.get("step")
    if not isinstance(step, Step):
        return None
    at, given = positions_given(module, arguments, keywords)
    if at is None:
        return None
    if torch.compiler.is_compiling():
        if given is None:
            raise ValueError("under torch.compile give the model position_ids: step.positions[None]")
        return None
    if given is not None:
        _refuse_counted(given, step)
        return None
    _refuse_other_rows(arguments, keywords, step)
    # A rank without a token gets a row that nobody sees.
    found = step.row_positions[None] if step.local_tokens else step.row_positions.new_zeros(1, 1)
    tensors = [x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor)]
    found = found.to(tensors[0].device) if tensors else found
    if at < len(arguments):
        return (*arguments[:at], found, *arguments[at + 1 :]), keywords
    return arguments, keywords | {"position_ids": found}


def _refuse_other_rows(arguments: tuple[Any, ...], keywords: Mapping[str, Any], step: Step) -> None:
    """Raise for ids or embeddings that are not as many as this rank's rows: positions filled in beside them would not fit."""
    for name in ("input_ids", "inputs_embeds"):
        given = arguments[0] if arguments and name == "input_ids" else keywords.get(name)
        if isinstance(given, Tensor) and given.shape[1] != max(1, step.local_tokens):
            whole = " (the whole stream)" if given.shape[1] == step.plan.batch.tokens else ""
            with step.talk.checking("the model's forward"):
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)}{whole}, but rank {step.rank} keeps {step.local_tokens} tokens under this plan: "
                    f"pass step.shard(stream)[None], or all keywords by flexcp.frameworks.huggingface.inputs(stream, step)"
                )


def positions_given(
    module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[int | None, Any]:
    """(Where a forward's ``position_ids`` stand among its parameters, None if it has none; what was given for them, or None)."""
    names = list(inspect.signature(module.forward).parameters)
    if "position_ids" not in names:
        return None, keywords.get("position_ids")
    at = names.index("position_ids")
    return at, arguments[at] if at < len(arguments) else keywords.get("position_ids")


def _note_calls(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
    step = keywords.get("step")
    if isinstance(step, Step) and not torch.compiler.is_compiling():
        setattr(module, _CALLS, step.calls)


def _check_calls(module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
    step = keywords.get("step")
    if not isinstance(step, Step) or torch.compiler.is_compiling():
        return
    if step.calls == getattr(module, _CALLS):
        raise RuntimeError(not_used(step))
    fsdp.note_reduction(module, step)
    loss = getattr(output, "loss", None)
    if loss is not None and loss.requires_grad and "gradients" in keywords:
        step.check_reduction(keywords["gradients"])
