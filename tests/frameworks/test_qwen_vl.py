"""Tests that Qwen2.5-VL, whose encoder has windows, and Qwen3-VL, whose language model reads several layers of its
encoder, give under two plans (encoder and language model) the losses and gradients of the stock models on one process.

The stock model is called as users call it, one document at a time, with pixels and grids, so positions, windows,
placeholders and features are computed by its own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vision_runs import Arrays, summed_backward, trained

import flexcp
from flexcp.data.images import ImageBatch, Span
from flexcp.frameworks import multimodal
from flexcp.frameworks.multimodal import IMAGE, TEXT, VIDEO, VisionDocument
from flexcp.measure.ranks import RankPool

VOCABULARY = 50
PLACE = {IMAGE: 1, VIDEO: 0}
WINDOW = 2
GRIDS = [[(1, 4, 10), (1, 2, 2)], [], [(3, 6, 4)], [(1, 8, 6)]]
TEXTS = [(5, 3, 9), (7,), (2, 11), (1, 4)]
"""Text tokens before, between and after the images and videos of each document."""
STEPS = 2


@dataclass(frozen=True)
class Stock:
    """A document with the inputs of the stock model."""

    tokens: Tensor
    kinds: Tensor
    patches: Tensor
    grids: Tensor


def documents(family: str) -> tuple[list[Stock], list[VisionDocument], ImageBatch]:
    """Return documents of text with images and a video. Qwen3-VL has text before every frame, and a span for each."""
    generator = torch.Generator().manual_seed(3)
    stock, ours, spans = [], [], []
    for grids, texts in zip(GRIDS, TEXTS, strict=True):
        tokens, kinds, here, single = [], [], [], []

        def words(count: int, tokens: list[Tensor] = tokens, kinds: list[Tensor] = kinds) -> None:
            tokens.append(torch.randint(2, VOCABULARY, (count,), generator=generator))
            kinds.append(torch.full((count,), TEXT))

        for number, text in enumerate(texts):
            words(text)
            if number == len(grids):
                break
            t, h, w = grids[number]
            kind, parts = (VIDEO if t > 1 else IMAGE), [(t, h, w)]
            if family == "qwen3" and t > 1:
                parts = [(1, h, w)] * t
            for part, (frames, _, _) in enumerate(parts):
                if part:
                    words(2)
                start, size = sum(len(x) for x in tokens), frames * h * w // 4
                here.append(Span(start, start + size, frames, width=w))
                tokens.append(torch.full((size,), PLACE[kind]))
                kinds.append(torch.full((size,), kind))
            single += parts
        patches = torch.randn(sum(t * h * w for t, h, w in grids), 24, generator=generator, dtype=torch.float64)
        text_ids, kind_ids = torch.cat(tokens), torch.cat(kinds)
        stock.append(Stock(text_ids, kind_ids, patches, torch.tensor(grids, dtype=torch.long).reshape(-1, 3)))
        grid = torch.tensor(single, dtype=torch.long).reshape(-1, 3)
        ours.append(VisionDocument(text_ids, kind_ids, patches, grid))
        spans.append(tuple(here))
    window = WINDOW if family == "qwen2.5" else 0
    return stock, ours, ImageBatch(tuple(len(d.tokens) for d in ours), tuple(spans), window=window)


def model(family: str) -> Any:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    vision: dict[str, Any] = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    text = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    vision |= {"depth": 3, "patch_size": 2}
    if family == "qwen2.5":
        vision |= {"window_size": WINDOW * 2 * 2, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        config, made = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    else:
        vision |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
        config, made = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    names = {"image_token_id": PLACE[IMAGE], "video_token_id": PLACE[VIDEO]}
    torch.manual_seed(0)
    return made(config(vision_config=vision, text_config=text, attn_implementation="eager", **names)).double()


def one_process(group: dist.ProcessGroup, family: str) -> tuple[list[float], Arrays]:
    """Train the stock model, document by document."""
    vlm = model(family)
    stock, _, batch = documents(family)
    valid = sum(batch.lengths) - len(stock)

    def backward() -> float:
        total = 0.0
        for document in stock:
            given: dict[str, Any] = {}
            if len(document.grids):
                video = bool((document.kinds == VIDEO).any())
                given["pixel_values_videos" if video else "pixel_values"] = document.patches
                given["video_grid_thw" if video else "image_grid_thw"] = document.grids
            out = vlm(document.tokens[None], mm_token_type_ids=document.kinds[None], use_cache=False, **given)
            loss = nn.functional.cross_entropy(out.logits[0, :-1], document.tokens[1:], reduction="sum") / valid
            loss.backward()
            total += float(loss.detach())
        return total

    return trained(vlm, backward, STEPS)


def two_plans(group: dist.ProcessGroup, family: str, strategy: str) -> tuple[list[float], Arrays, int]:
    """Return losses, gradients summed over ranks, and the number of patches of this rank."""
    _, found, batch = documents(family)
    common = {"dtype": "float64", "cluster": flexcp.cluster("cpu", 1, dist.get_world_size(group)), "strategy": strategy}
    vlm = model(family)
    multimodal.turn_on(vlm)
    masks = multimodal.encoder_masks(vlm, batch)
    encoder = flexcp.bind(flexcp.Planner(4, 4, 8, **common)(batch.encoder_lengths, masks=masks), group)
    language = flexcp.bind(flexcp.Planner(4, 2, 8, **common)(batch.lengths), group)
    stream = torch.cat([d.tokens for d in found])

    def backward() -> float:
        loss = language.loss(multimodal.qwen_vl(vlm, found, batch, encoder, language), language.labels(stream))
        return summed_backward(vlm, loss, group)

    return *trained(vlm, backward, STEPS), encoder.local_tokens


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "zigzag"), (3, "blocks")])
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_two_plans_equal_the_stock_model(pool: RankPool, family: str, ranks: int, strategy: str) -> None:
    losses, gradients = pool.run(one_process, family, ranks=1)[0]
    assert losses[-1] < losses[0]
    results = pool.run(two_plans, family, strategy, ranks=ranks)
    assert len(gradients) > 50
    for found, summed, patches in results:
        assert patches
        np.testing.assert_allclose(found, losses, rtol=1e-7)
        assert set(summed) == set(gradients)
        for name, wanted in gradients.items():
            # The models compute rotary embeddings and norms in float32.
            np.testing.assert_allclose(summed[name], wanted, atol=5e-7 * max(1e-3, np.abs(wanted).max()), err_msg=name)


def test_windows_are_those_of_the_model() -> None:
    from transformers.vision_utils import get_vision_window_index

    stock, _, batch = documents("qwen2.5")
    grids = torch.cat([d.grids for d in stock])
    tokens, borders = get_vision_window_index(grids, spatial_merge_size=2, window_size=WINDOW * 4, patch_size=2)
    assert batch.encoder_order().tolist() == (tokens[:, None] * 4 + torch.arange(4)).flatten().tolist()
    windows = batch.encoder_masks()["window"]
    sizes = [n for mask, size in zip(windows, batch.encoder_lengths, strict=True) for n in row_runs(mask.dense(size))]
    assert sizes == borders.diff().tolist()
    assert max(sizes) == 16 < max(batch.encoder_lengths)


def row_runs(seen: np.ndarray) -> list[int]:
    """Return the number of rows of each block of a block-diagonal mask."""
    counts, row = [], 0
    while row < len(seen):
        size = int(seen[row].sum())
        assert seen[row : row + size, row : row + size].all() and seen[row : row + size].sum() == size * size
        counts.append(size)
        row += size
    return counts


def test_sources_follow_the_windows() -> None:
    _, _, batch = documents("qwen2.5")
    sources = batch.sources()
    assert np.array_equal(np.sort(sources[sources >= 0]), np.arange(sum(batch.encoder_lengths)))
    order = batch.encoder_order()
    assert order[sources[sources[:, 0] >= 0]].reshape(-1).tolist() == list(range(len(order)))


def test_what_does_not_fit_the_model_is_refused() -> None:
    _, found, batch = documents("qwen2.5")
    flat = ImageBatch(batch.lengths, batch.spans)
    with pytest.raises(ValueError, match=r"windows of 2 x 2 tokens.*window=0.*ImageBatch\(\.\.\., window=2\)"):
        multimodal.encoder_masks(model("qwen2.5"), flat)
    with pytest.raises(ValueError, match="windows of 0 x 0"):
        multimodal.encoder_masks(model("qwen3"), batch)
    with pytest.raises(ValueError, match=r"width=0 patches.*width=grid\[2\]"):
        ImageBatch((9,), ((Span(1, 5),),), window=2)
    with pytest.raises(ValueError, match="3 frames: Qwen3-VL writes a time"):
        multimodal._positions(model("qwen3").model, found[2])
