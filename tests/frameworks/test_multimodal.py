"""Tests that a Hugging Face vision-language model under two plans, one for the encoder and one for the language model,
gives the losses and gradients of the same model on one process.

Documents have images of several sizes and a video with text around them; masks are causal, as the model is trained, or
let image spans see both ways. Further tests are of image batches as data, and of why one plan cannot balance both
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vision_runs import Arrays, summed_backward, trained

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.data.images import ImageBatch, Span
from flexcp.frameworks import multimodal
from flexcp.frameworks.multimodal import VisionDocument
from flexcp.measure.ranks import RankPool

VOCABULARY, PLACE = 50, 1
GRIDS = [[(1, 4, 8), (1, 2, 2)], [], [(3, 4, 4)], [(1, 8, 6)], [(1, 2, 4)]]
TEXTS = [(5, 3, 9), (7,), (2, 11), (1, 4), (3, 1)]
"""Text tokens before, between and after the spans of each document."""
STEPS = 3


def with_images(
    lengths: Sequence[int], shares: Sequence[float], merge: int = 4, frames: Sequence[int] | None = None
) -> ImageBatch:
    """Make a batch in which each document is at most 16 tokens of text, one span, and text again.

    ``shares[document]`` is the share of the span in the document's tokens, rounded down to whole tokens per frame;
    without any, the document is text. ``frames[document]`` is the number of frames of the span (1 by default).
    """
    spans = []
    for document, (n, share) in enumerate(zip(lengths, shares, strict=True)):
        size = int(n * share)
        count = 1 if frames is None else frames[document]
        size -= size % count  # whole tokens a frame
        start = min(16, n - size)
        spans.append((Span(start, start + size, count),) if size else ())
    return ImageBatch(tuple(int(n) for n in lengths), tuple(spans), merge)


def documents() -> tuple[list[VisionDocument], ImageBatch]:
    generator = torch.Generator().manual_seed(3)
    found, spans = [], []
    for grids, texts in zip(GRIDS, TEXTS, strict=True):
        tokens, kinds, here = [], [], []
        for number, text in enumerate(texts):
            tokens.append(torch.randint(2, VOCABULARY, (text,), generator=generator))
            kinds.append(torch.zeros(text, dtype=torch.long))
            if number < len(grids):
                t, h, w = grids[number]
                start, size = sum(len(x) for x in tokens), t * h * w // 4
                here.append(Span(start, start + size, t))
                tokens.append(torch.full((size,), PLACE))
                kinds.append(torch.full((size,), multimodal.VIDEO if t > 1 else multimodal.IMAGE))
        patches = torch.randn(sum(t * h * w for t, h, w in grids), 24, generator=generator, dtype=torch.float64)
        grid = torch.tensor(grids, dtype=torch.long).reshape(-1, 3)
        found.append(VisionDocument(torch.cat(tokens), torch.cat(kinds), patches, grid))
        spans.append(tuple(here))
    return found, ImageBatch(tuple(len(d.tokens) for d in found), tuple(spans))


def model(attention: str) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 2}
    text = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    config = Qwen2VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=PLACE,
        video_token_id=PLACE,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(config).double()


def objective(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / valid


def one_process(group: dist.ProcessGroup, both_ways: bool) -> tuple[list[float], Arrays]:
    """Train the stock model document by document; for spans that see both ways it is given their mask."""
    vlm = model("eager")
    return trained(vlm, lambda: stock_backward(vlm, both_ways), STEPS)


def stock_backward(vlm: Any, both_ways: bool) -> float:
    found, batch = documents()
    valid, total = sum(batch.lengths) - len(found), 0.0
    for document, mask in zip(found, batch.masks(), strict=True):
        hidden = vlm.model.language_model.embed_tokens(document.tokens)
        if len(document.grids):
            features = vlm.model.visual(document.patches, grid_thw=document.grids).pooler_output
            hidden = hidden.masked_scatter((document.tokens == PLACE)[:, None], features)
        rule = mask if both_ways else flexcp.causal()
        hides = torch.zeros(1, 1, *[len(document.tokens)] * 2, dtype=torch.float64)
        hides.masked_fill_(~torch.from_numpy(rule.dense(len(document.tokens))), -torch.inf)
        positions = multimodal._positions(vlm.model, document)[:, None]
        out = vlm.model.language_model(
            inputs_embeds=hidden[None],
            position_ids=positions,
            attention_mask={"full_attention": hides},
            use_cache=False,
        )
        loss = objective(vlm.lm_head(out.last_hidden_state[0])[:-1], document.tokens[1:], valid)
        loss.backward()
        total += float(loss.detach())
    return total


def two_plans(group: dist.ProcessGroup, both_ways: bool, strategy: str) -> tuple[list[float], Arrays, list[int]]:
    """Return losses, gradients summed over ranks, and the patches, tokens and image tokens of this rank."""
    found, batch = documents()
    where = flexcp.cluster("cpu", 1, dist.get_world_size(group))
    common = {"dtype": "float64", "cluster": where, "strategy": strategy}
    masks = batch.masks() if both_ways else flexcp.causal()
    encoder = flexcp.bind(flexcp.Planner(4, 4, 8, **common)(batch.encoder_lengths, flexcp.full()), group)
    language = flexcp.bind(flexcp.Planner(4, 2, 8, **common)(batch.lengths, masks), group)
    vlm = model("eager")
    multimodal.turn_on(vlm)
    stream = torch.cat([d.tokens for d in found])

    def backward() -> float:
        logits = multimodal.qwen_vl(vlm, found, batch, encoder, language)
        loss = language.loss(logits, language.labels(stream))
        return summed_backward(vlm, loss, group)

    places = int((language.shard(stream) == PLACE).sum())
    return *trained(vlm, backward, STEPS), [encoder.local_tokens, language.local_tokens, places]


@pytest.mark.parametrize(
    ("ranks", "both_ways", "strategy"),
    [(2, True, "blocks"), (4, True, "groups"), (4, False, "blocks"), (2, False, "zigzag")],
)
def test_two_plans_equal_one_process(pool: RankPool, ranks: int, both_ways: bool, strategy: str) -> None:
    losses, gradients = pool.run(one_process, both_ways, ranks=1)[0]
    assert losses[-1] < losses[0]
    results = pool.run(two_plans, both_ways, strategy, ranks=ranks)
    assert len(gradients) > 40
    for found, summed, _ in results:
        np.testing.assert_allclose(found, losses, rtol=1e-7)
        assert set(summed) == set(gradients)
        for name, wanted in gradients.items():
            # The model computes rotary embeddings in float32.
            np.testing.assert_allclose(summed[name], wanted, atol=1e-7 * max(1e-3, np.abs(wanted).max()), err_msg=name)
    _, batch = documents()
    totals = np.sum([counts for _, _, counts in results], axis=0)
    assert totals.tolist() == [sum(batch.encoder_lengths), sum(batch.lengths), sum(batch.encoder_lengths) // 4]


# --- batches as data --------------------------------------------------------------------------------------------------


def test_an_image_batch_is_two_batches() -> None:
    batch = ImageBatch((10, 4, 6), ((Span(1, 3), Span(5, 9, frames=2)), (), (Span(0, 6, frames=3),)), merge=2)
    assert batch.encoder_lengths == [4, 4, 4, 4, 4, 4]
    assert batch.masks() == [flexcp.masks.modality([(1, 3), (5, 9)]), flexcp.causal(), flexcp.masks.modality([(0, 6)])]
    sources = batch.sources()
    assert sources[:, 0].tolist() == [-1, 0, 2, -1, -1, 4, 6, 8, 10, -1, -1, -1, -1, -1, 12, 14, 16, 18, 20, 22]
    assert np.array_equal(np.sort(sources[sources >= 0]), np.arange(24))


@pytest.mark.parametrize(
    ("lengths", "spans", "words"),
    [
        ((4,), ((), ()), "2 lists of spans for 1 documents"),
        ((4,), ((Span(2, 5),),), "document 0 of 4 tokens"),
        ((9,), ((Span(2, 5), Span(4, 6)),), "at token 5 or later"),
        ((9,), ((Span(2, 5, frames=5),),), "which 5 equal frames cannot have"),
    ],
)
def test_spans_that_cannot_be_are_refused(lengths: Any, spans: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ImageBatch(lengths, spans)


def test_batches_that_are_not_the_plans_are_refused() -> None:
    planner = flexcp.Planner(4, 4, 8, dtype="float64", cluster=flexcp.cluster("cpu", 1, 1))
    batch = with_images([40, 30], [0.5, 0.0])
    encoder, language = flexcp.bind(planner([80])), flexcp.bind(planner([71]))
    with pytest.raises(ValueError, match=r"80 patches and 70 tokens.*80 and 71"):
        multimodal.image_rows(torch.zeros(80, 3), encoder, language, batch)
    rows, found = multimodal.image_rows(torch.arange(80.0)[:, None], encoder, flexcp.bind(planner([40, 30])), batch)
    assert rows.tolist() == list(range(16, 36))
    assert found.shape == (20, 4, 1)
    assert found.flatten().tolist() == list(range(80))


def test_a_call_without_a_step_or_with_a_mask_is_refused() -> None:
    x = torch.zeros(1, 4, 5, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="without a step"):
        multimodal.planned_attention(nn.Linear(1, 1), x, x, x, None)
    step = flexcp.bind(flexcp.Planner(4, 4, 8, dtype="float64", cluster=flexcp.cluster("cpu", 1, 1))([5]))
    with pytest.raises(NotImplementedError, match="drop attention_mask"):
        multimodal.planned_attention(nn.Linear(1, 1), x, x, x, x, step=step)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "position_bias", "output_attentions"])
def test_keywords_that_would_be_ignored_are_refused_by_name(name: str) -> None:
    x = torch.zeros(1, 4, 5, 8, dtype=torch.float64)
    step = flexcp.bind(flexcp.Planner(4, 4, 8, dtype="float64", cluster=flexcp.cluster("cpu", 1, 1))([5]))
    known = {"is_causal": False, "position_ids": torch.arange(5), "use_cache": False, name: None}
    assert multimodal.planned_attention(nn.Linear(1, 1), x, x, x, None, step=step, **known)[0].shape == (1, 5, 4, 8)
    with pytest.raises(NotImplementedError, match=f"Linear passes {name}="):
        multimodal.planned_attention(nn.Linear(1, 1), x, x, x, None, step=step, **known | {name: torch.ones(2)})


def alone() -> tuple[list[VisionDocument], ImageBatch, flexcp.Step, flexcp.Step]:
    """Return all documents, and the steps of encoder and language model on one rank."""
    found, batch = documents()
    common = {"dtype": "float64", "cluster": flexcp.cluster("cpu", 1, 1)}
    encoder = flexcp.bind(flexcp.Planner(4, 4, 8, **common)(batch.encoder_lengths, flexcp.full()))
    return found, batch, encoder, flexcp.bind(flexcp.Planner(4, 2, 8, **common)(batch.lengths))


def test_a_padding_mask_is_refused_on_its_way_through_the_model() -> None:
    found, _, _, language = alone()
    vlm = model("eager")
    multimodal.turn_on(vlm)
    tokens = torch.cat([d.tokens for d in found])[None]
    seen = torch.ones_like(tokens)
    text = vlm.model.language_model
    given = {"position_ids": language.positions[None], "use_cache": False, "step": language}
    assert text(tokens, attention_mask=seen, **given).last_hidden_state.shape[1] == len(tokens[0])
    seen[0, 3] = 0
    with pytest.raises(NotImplementedError, match="padding mask"):
        text(tokens, attention_mask=seen, **given)


def test_a_language_model_without_positions_is_refused() -> None:
    found, _, _, language = alone()
    vlm = model("eager")
    multimodal.turn_on(vlm)
    with pytest.raises(ValueError, match=r"Qwen2VLTextModel was given a step without position_ids.*step\.shard"):
        vlm.model.language_model(torch.cat([d.tokens for d in found])[None], use_cache=False, step=language)


def test_a_step_that_no_attention_uses_raises() -> None:
    found, batch, encoder, language = alone()
    vlm = model("eager")
    with pytest.raises(RuntimeError, match="never used it"):  # the model was not turned on
        multimodal.encoded(vlm.model.visual, found, batch, encoder)
    multimodal.turn_on(vlm.model.visual)
    with pytest.raises(RuntimeError, match="never used it"):  # only the encoder was turned on
        multimodal.qwen_vl(vlm, found, batch, encoder, language)
    multimodal.turn_on(vlm)
    assert len(multimodal.encoded(vlm.model.visual, found, batch, encoder)) == sum(batch.encoder_lengths)
    multimodal.qwen_vl(vlm, found, batch, encoder, language)
    vlm.model.language_model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="never used it"):
        multimodal.qwen_vl(vlm, found, batch, encoder, language)
    with pytest.raises(RuntimeError, match="never used it"):  # in a user's own loop
        tokens = torch.cat([d.tokens for d in found])[None]
        vlm.model.language_model(tokens, position_ids=language.positions[None], use_cache=False, step=language)


def test_what_balances_the_encoder_does_not_balance_the_language_model() -> None:
    batch = with_images([4096, 512, 512, 256, 256, 128, 64, 64], [0.25, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    where = flexcp.cluster("h100", 1, 4)
    language = flexcp.Planner(8, cluster=where, strategy="groups")(batch.lengths, batch.masks())
    encoder = flexcp.Planner(8, cluster=where, strategy="groups")(batch.encoder_lengths, flexcp.full())
    assert imbalance(encoder.work()) < 1.3
    owner = np.zeros(sum(batch.lengths), np.int64)
    for rank, start, stop in zip(*language.placement.runs.matrix().tolist(), strict=True):
        owner[start:stop] = rank
    sources = batch.sources()
    # Instead of under the encoder's own plan, every image is encoded where its tokens are kept: an image of n patches
    # costs n x n, divided over ranks as its tokens are.
    size = np.repeat(batch.encoder_lengths, batch.encoder_lengths)[np.maximum(sources[:, 0], 0)] * (sources[:, 0] >= 0)
    beside = np.bincount(owner, size, minlength=4)
    assert beside.max() * 4 / beside.sum() > 1.2 * imbalance(encoder.work())
