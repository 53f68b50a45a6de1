"""Vision-language models of Hugging Face: encoder and language model each under its own plan, over the same ranks.

An encoder sees many small documents (frames) with full attention, a language model few long ones, and a balanced plan
for one is not balanced for the other. So each has its own plan. Between them :func:`image_rows` moves every encoded
patch from the rank that encoded it to the rank that keeps its token, and gradients back. Patches are merged into tokens
*there*, so that no layout has to keep neighbouring patches together.

    multimodal.turn_on(model)                                                     # both parts attend under their step
    encoder  = flexcp.bind(vision_planner(batch.encoder_lengths, masks=multimodal.encoder_masks(model, batch)), group)
    language = flexcp.bind(text_planner(batch.lengths, batch.masks()), group)
    logits   = multimodal.qwen_vl(model, documents, batch, encoder, language)     # [local tokens, vocabulary]

The plan's mask decides which pairs attend, in both directions if it allows; Transformers' own mask is not built.
Anything that would be ignored raises: padding, windows, borders of documents, unknown keywords, and a step that no
attention used. :func:`qwen_vl` is for Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose encoders work patch by patch outside of
attention; other models need a similar function of a dozen lines. Qwen2.5-VL has windows in most layers of its encoder,
which are a second mask of the encoder's plan. Qwen3-VL has learned positions, and gives its language model the patches
of several layers, which travel together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flexcp.data.images import ImageBatch
from flexcp.executor import local_rows
from flexcp.executor.attention import attention
from flexcp.executor.run.rank_rows import local_stream
from flexcp.executor.step import Step
from flexcp.frameworks import used
from flexcp.frameworks.huggingface_attention import refuse_ignored, refuse_padding
from flexcp.frameworks.huggingface_checks import check_use, positions_given
from flexcp.frameworks.huggingface_layers import refuse_growing_rope, refuse_unless_handled
from flexcp.masks import Mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "flexcp-planned"
TEXT, IMAGE, VIDEO = 0, 1, 2
"""The kinds of tokens in :attr:`VisionDocument.kinds`."""


@dataclass(frozen=True)
class VisionDocument:
    """One document with images or videos, each of which is a *span* of placeholder tokens.

    ``tokens`` are token ids ``[tokens]``, and ``kinds`` the kind of each token: 0 text, 1 image, 2 video. ``patches``
    are the patches of all its frames, a row for each. ``grids`` ``[spans, 3]`` has for each span its frames and the
    patches of a frame down and across. ``seconds`` is the time between the frames of each video, from which Qwen2.5-VL
    computes positions; 1 by default.
    """

    tokens: Tensor
    kinds: Tensor
    patches: Tensor
    grids: Tensor
    seconds: Tensor | None = None


def turn_on(model: PreTrainedModel, other_layers: Literal["refused", "handled"] = "refused") -> None:
    """Let all parts of ``model`` run attention under the ``step`` they are called with, with the plan's own mask.

    From then on a call without a step raises ValueError, and one whose step is not used RuntimeError. A model with
    layers that mix tokens otherwise than by attention raises NotImplementedError here. ``other_layers="handled"`` says
    that you adapted those layers, with ``step.relayout`` and ``step.restore``; flexcp cannot check it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    refuse_unless_handled(model, other_layers)
    AttentionInterface.register(NAME, planned_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    model.set_attn_implementation(NAME)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.register_forward_pre_hook(_refuse_no_positions, with_kwargs=True)
            check_use(part)


def _refuse_no_positions(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raise ValueError if a model is given a step and no position_ids, because it would number this rank's rows."""
    at, given = positions_given(module, arguments, keywords)
    if isinstance(keywords.get("step"), Step) and at is not None and given is None:
        raise ValueError(
            f"{type(module).__name__} was given a step without position_ids: pass this rank's rows of the model's own "
            "positions, step.shard(positions), as multimodal.qwen_vl does"
        )


def planned_attention(
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
    step: Step | None = None,
    layer_mask: str | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run attention of one layer, called by Transformers: ``[1, H, S, D]`` in, ``[1, S, H, D]`` out, and no weights.

    ``layer_mask`` names the plan's mask if there are several. ``is_causal`` is ignored because the plan has the mask,
    and ``position_ids`` because queries and keys already include them. Raise ValueError without a step, and
    NotImplementedError for a mask or a window.
    """
    refuse_ignored(module, others)
    if step is None:
        raise ValueError(f"{type(module).__name__} was called without a step; pass step=flexcp.bind(plan, group)")
    if attention_mask is not None or sliding_window:
        raise NotImplementedError("the plan has the mask of these layers; drop attention_mask and sliding_window")
    if query.shape[0] != 1:
        raise ValueError(f"a rank's tokens are one row [1, tokens]; got {query.shape[0]} rows")
    if not torch.compiler.is_compiling():
        refuse_growing_rope(getattr(module, "config", None), step)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attention(q, k, v, step, mask=layer_mask, scale=scaling, softcap=softcap, sinks=s_aux, dropout=dropout)
    assert isinstance(out, Tensor)
    return out[None], None


def no_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """Make no mask, because the plan has it, where Transformers asks for one; raise NotImplementedError for padding."""
    refuse_padding(attention_mask)


def image_rows(features: Tensor, encoder: Step, language: Step, batch: ImageBatch) -> tuple[Tensor, Tensor]:
    """Return the indices of this rank's rows that are image tokens, and the encoder's rows that are merged into each.

    Tokens of videos are included. The second result is ``[image tokens, merge, ...]``, moved here from the ranks that
    encoded the patches. Differentiable. ``features`` are this rank's rows under the ``encoder`` step. Both steps must
    be bound to the same group, and their plans made for ``batch``, else ValueError.
    """
    if encoder.cp_size != language.cp_size or encoder.rank != language.rank:
        raise ValueError(
            f"rank {encoder.rank} of {encoder.cp_size} encodes and rank {language.rank} of {language.cp_size} keeps "
            "tokens; bind both plans to the same group"
        )
    sources = batch.sources()
    if encoder.plan.batch.tokens != sum(batch.encoder_lengths) or language.plan.batch.tokens != len(sources):
        raise ValueError(
            f"the batch has {sum(batch.encoder_lengths)} patches and {len(sources)} tokens, but the plans are of "
            f"{encoder.plan.batch.tokens} and {language.plan.batch.tokens}; "
            "plan batch.encoder_lengths and batch.lengths"
        )
    padded = np.concatenate([sources, np.full((language.plan.placement.pads, batch.merge), -1)])
    wanted = [padded[local_stream(language.plan.placement, r)] for r in range(language.cp_size)]
    rows = np.flatnonzero(wanted[language.rank][:, 0] >= 0)
    maps = [w[w[:, 0] >= 0].reshape(-1) for w in wanted]
    found = local_rows.relayout(
        features, encoder.plan.placement, encoder.collectives, maps, back=False, place="image_rows"
    )
    return torch.from_numpy(rows).to(features.device), found.unflatten(0, (len(rows), batch.merge))


def encoder_masks(model: Any, batch: ImageBatch) -> dict[str, tuple[list[Mask], int]]:
    """Return ``masks=`` for the encoder's plan: masks for the batch's frames, and how many layers use each, by name.

    Raise ValueError if the windows of ``batch`` are not those of the model's encoder.
    """
    visual = model.model.visual
    _check_window(visual, batch)
    layers, whole = len(visual.blocks), len(getattr(visual, "fullatt_block_indexes", visual.blocks))
    count = {"full": whole if batch.window else layers, "window": layers - whole}
    return {name: (masks, count[name]) for name, masks in batch.encoder_masks().items()}


def qwen_vl(
    model: Any, documents: Sequence[VisionDocument], batch: ImageBatch, encoder: Step, language: Step
) -> Tensor:
    """Return the logits ``[local tokens, vocabulary]`` of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL model.

    ``model`` is its ``ForConditionalGeneration``. Every rank is given all documents, and ``batch`` describes the same
    documents. ``encoder`` and ``language`` are the steps of the two plans; the encoder's plan has the masks of
    :func:`encoder_masks`. Qwen3-VL writes a time before every frame of a video, so in its documents each frame is a
    span of its own.
    """
    visual, text = model.model.visual, model.model.language_model
    features = encoded(visual, documents, batch, encoder)  # [local patches, levels, width]
    stream = torch.cat([d.tokens for d in documents])
    embeddings = text.embed_tokens(language.shard(stream))
    rows, patches = image_rows(features, encoder, language, batch)  # [rows, merge, levels, width]
    mergers = (visual.merger, *getattr(visual, "deepstack_merger_list", ()))
    merged = [merger(patches[:, :, level].flatten(0, 1).contiguous()) for level, merger in enumerate(mergers)]
    embeddings = embeddings.index_copy(0, rows, merged[0])
    positions = torch.cat([_positions(model.model, d) for d in documents], dim=1)
    local = language.shard(positions.T).T[:, None]
    deeper: dict[str, Any] = {}
    if len(merged) > 1:
        seen = torch.zeros(1, len(embeddings), dtype=torch.bool, device=embeddings.device)
        seen[0, rows] = True
        deeper = {"visual_pos_masks": seen, "deepstack_visual_embeds": merged[1:]}
    with used(language):
        found = text(inputs_embeds=embeddings[None], position_ids=local, use_cache=False, step=language, **deeper)
    logits: Tensor = model.lm_head(found.last_hidden_state.flatten(0, 1))
    return logits


def encoded(visual: Any, documents: Sequence[VisionDocument], batch: ImageBatch, step: Step) -> Tensor:
    """Return this rank's patches after the encoder, not yet merged into tokens, ``[local patches, levels, width]``.

    The first level is the result of the last block; Qwen3-VL also uses those of some earlier blocks, which follow.
    ``visual`` is the model's encoder, ``step`` that of the encoder's plan.
    """
    from transformers.vision_utils import get_vision_position_ids

    _check_window(visual, batch)
    order = torch.from_numpy(batch.encoder_order()) if batch.window else slice(None)
    grids = torch.cat([d.grids for d in documents])
    places = get_vision_position_ids(grids, visual.spatial_merge_size)
    hidden: Tensor = visual.patch_embed(step.shard(torch.cat([d.patches for d in documents])[order]))
    if hasattr(visual, "pos_embed"):
        hidden = hidden + _learned_positions(visual, grids, step).to(hidden.dtype)
    angles = visual.rotary_pos_emb(hidden, step.shard(places[order]))
    # Transformers sees one sequence; the plan knows which patches form a frame or a window.
    whole = torch.tensor([0, len(hidden)])
    full, tapped = getattr(visual, "fullatt_block_indexes", ()), getattr(visual, "deepstack_visual_indexes", ())
    taps: list[Tensor] = []
    with used(step):
        for number, block in enumerate(visual.blocks):
            name = None if not batch.window else "full" if number in full else "window"
            hidden = block(hidden, cu_seqlens=whole, position_embeddings=angles, step=step, layer_mask=name)
            taps += [hidden] if number in tapped else []
    return torch.stack([hidden, *taps], dim=1)


def _learned_positions(visual: Any, grids: Tensor, step: Step) -> Tensor:
    """Return Qwen3-VL's learned positions, interpolated for this rank's patches, ``[local patches, width]``."""
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    indices, weights = get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=visual.spatial_merge_size,
    )
    found: Tensor = (visual.pos_embed(step.shard(indices)) * step.shard(weights)[:, :, None]).sum(1)
    return found


def _check_window(visual: Any, batch: ImageBatch) -> None:
    """Raise ValueError if the windows of ``batch`` have another side than those of the encoder (0 for none)."""
    side = 0
    if hasattr(visual, "fullatt_block_indexes"):
        side = visual.window_size // visual.spatial_merge_size // visual.patch_size
    if batch.window != side:
        raise ValueError(
            f"{type(visual).__name__} has windows of {side} x {side} tokens, but the batch has window={batch.window}; "
            f"make it with ImageBatch(..., window={side})"
        )


def _positions(model: Any, document: VisionDocument) -> Tensor:
    """Return the positions of each token in time, height and width, ``[3, tokens]``, as the model counts them.

    Raise ValueError for a Qwen3-VL document in which a span has several frames.
    """
    if hasattr(model.visual, "deepstack_merger_list") and (document.grids[:, 0] > 1).any():
        raise ValueError(
            f"a span of {int(document.grids[:, 0].max())} frames: Qwen3-VL writes a time before every frame, so give "
            "each frame of a video a span and a grid (1, height, width) of its own"
        )
    spans = document.kinds[document.kinds.diff(prepend=document.kinds.new_tensor([TEXT])).nonzero().flatten()]
    spans = spans[spans != TEXT]
    grids = {kind: document.grids[spans == kind] for kind in (IMAGE, VIDEO)}
    times = {} if document.seconds is None else {"second_per_grid_ts": document.seconds}
    found: Tensor = model.get_rope_index(
        document.tokens[None], document.kinds[None], grids[IMAGE], grids[VIDEO], **times
    )[0]
    return found[:, 0]
