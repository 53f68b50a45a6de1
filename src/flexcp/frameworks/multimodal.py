"""Vision-language models of Hugging Face: the encoder and the language model each under a plan of its own, over the same ranks.

An encoder sees many small documents (frames) with full attention, a language model few long ones; what balances one does not balance the
other. So each has its plan, and between them :func:`image_rows` moves every encoded patch from the rank that encoded it to the rank that
keeps its token, with gradients on the way back. Patches are merged into tokens *there*, so that no layout must keep neighbouring patches
together.

    multimodal.turn_on(model)                                            # both parts attend under the step they are given
    encoder  = flexcp.bind(vision_planner(batch.encoder_lengths, flexcp.full()), group)
    language = flexcp.bind(text_planner(batch.lengths, batch.masks()), group)
    logits   = multimodal.qwen2_vl(model, documents, batch, encoder, language)      # [local tokens, vocabulary]

The plan's mask decides who attends whom, in both directions if it says so: Transformers' own mask is not built. What would be ignored
raises: padding, windows, borders of documents, keywords nobody here knows, and a step that no attention used. :func:`qwen2_vl` is for the
Qwen2-VL family, whose encoder works patch by patch besides attention; other models need their own dozen lines of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "flexcp-planned"
TEXT, IMAGE, VIDEO = 0, 1, 2


@dataclass(frozen=True)
class VisionDocument:
    """Token ids (placeholders inside spans), the kind of each token, the patches of all its frames, and its grids ``[spans, 3]``."""

    tokens: Tensor
    kinds: Tensor
    patches: Tensor
    grids: Tensor


def turn_on(model: PreTrainedModel) -> None:
    """Let all parts of ``model`` attend under the ``step`` they are called with, by the plan's own mask; a step not used raises."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, planned_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    model.set_attn_implementation(NAME)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.register_forward_pre_hook(_refuse_no_positions, with_kwargs=True)
            check_use(part)


def _refuse_no_positions(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raise for a model that would count this rank's rows, because nobody said where its tokens are."""
    at, given = positions_given(module, arguments, keywords)
    if isinstance(keywords.get("step"), Step) and at is not None and given is None:
        raise ValueError(
            f"{type(module).__name__} was given a step without position_ids: pass this rank's rows of the model's own positions, "
            "step.shard(positions), as multimodal.qwen2_vl does"
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
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in every layer: ``[1, H, S, D]`` in, ``[1, S, H, D]`` out.

    ``is_causal`` is the plan's to say, and ``position_ids`` are in the queries and keys already.
    """
    refuse_ignored(module, others)
    if step is None:
        raise ValueError(f"{type(module).__name__} was called without a step; pass step=flexcp.bind(plan, group)")
    if attention_mask is not None or sliding_window:
        raise NotImplementedError("the plan has one mask for these layers; drop attention_mask and sliding_window")
    if query.shape[0] != 1:
        raise ValueError(f"a rank's tokens are one row [1, tokens]; got {query.shape[0]} rows")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attention(q, k, v, step, scale=scaling, softcap=softcap, sinks=s_aux, dropout=dropout)
    assert isinstance(out, Tensor)
    return out[None], None


def no_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """What Transformers calls for a mask. There is none to build, whatever rule it would follow: the plan has it."""
    refuse_padding(attention_mask)


def image_rows(features: Tensor, encoder: Step, language: Step, batch: ImageBatch) -> tuple[Tensor, Tensor]:
    """(rows of this rank that are image tokens, ``[rows, merge, ...]`` the encoder's rows that make each). Differentiable.

    ``features`` are this rank's rows under the ``encoder`` step. Both steps must be of the same group.
    """
    if encoder.cp_size != language.cp_size or encoder.rank != language.rank:
        raise ValueError(
            f"rank {encoder.rank} of {encoder.cp_size} encodes and rank {language.rank} of {language.cp_size} keeps tokens; "
            "bind both plans to the same group"
        )
    sources = batch.sources()
    if encoder.plan.batch.tokens != sum(batch.encoder_lengths) or language.plan.batch.tokens != len(sources):
        raise ValueError(
            f"the batch has {sum(batch.encoder_lengths)} patches and {len(sources)} tokens, but the plans are of "
            f"{encoder.plan.batch.tokens} and {language.plan.batch.tokens}; plan batch.encoder_lengths and batch.lengths"
        )
    padded = np.concatenate([sources, np.full((language.plan.placement.pads, batch.merge), -1)])
    wanted = [padded[local_stream(language.plan.placement, r)] for r in range(language.cp_size)]
    rows = np.flatnonzero(wanted[language.rank][:, 0] >= 0)
    maps = [w[w[:, 0] >= 0].reshape(-1) for w in wanted]
    found = local_rows.relayout(
        features, encoder.plan.placement, encoder.collectives, maps, back=False, place="image_rows"
    )
    return torch.from_numpy(rows).to(features.device), found.unflatten(0, (len(rows), batch.merge))


def qwen2_vl(
    model: Any, documents: Sequence[VisionDocument], batch: ImageBatch, encoder: Step, language: Step
) -> Tensor:
    """Logits ``[local tokens, vocabulary]`` of a ``Qwen2VLForConditionalGeneration``. Every rank is given all documents."""
    features = encoded(model.model.visual, documents, encoder)  # [local patches, width]
    text = model.model.language_model
    stream = torch.cat([d.tokens for d in documents])
    embeddings = text.embed_tokens(language.shard(stream))
    rows, patches = image_rows(features, encoder, language, batch)
    embeddings = embeddings.index_copy(0, rows, model.model.visual.merger(patches.flatten(0, 1)))
    positions = torch.cat([_positions(model.model, d) for d in documents], dim=1)
    local = language.shard(positions.T).T[:, None]
    with used(language):
        found = text(inputs_embeds=embeddings[None], position_ids=local, use_cache=False, step=language)
    logits: Tensor = model.lm_head(found.last_hidden_state.flatten(0, 1))
    return logits


def encoded(visual: Any, documents: Sequence[VisionDocument], step: Step) -> Tensor:
    """This rank's patches through the encoder's blocks; unmerged."""
    from transformers.vision_utils import get_vision_position_ids

    patches = step.shard(torch.cat([d.patches for d in documents]))
    places = get_vision_position_ids(torch.cat([d.grids for d in documents]), visual.spatial_merge_size)
    hidden: Tensor = visual.patch_embed(patches)
    angles = visual.rotary_pos_emb(hidden, step.shard(places))
    # One stretch for Transformers: which patches are a frame is in the plan.
    whole = torch.tensor([0, len(hidden)])
    with used(step):
        for block in visual.blocks:
            hidden = block(hidden, cu_seqlens=whole, position_embeddings=angles, step=step)
    return hidden


def _positions(model: Any, document: VisionDocument) -> Tensor:
    """``[3, tokens]``: time, height and width of each token, as the model counts them."""
    spans = document.kinds[document.kinds.diff(prepend=document.kinds.new_tensor([TEXT])).nonzero().flatten()]
    spans = spans[spans != TEXT]
    grids = {kind: document.grids[spans == kind] for kind in (IMAGE, VIDEO)}
    found: Tensor = model.get_rope_index(document.tokens[None], document.kinds[None], grids[IMAGE], grids[VIDEO])[0]
    return found[:, 0]
