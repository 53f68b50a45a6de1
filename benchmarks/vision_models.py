"""Vision-language models with their encoders, simulated: a step runs the encoder and the language model,
one after the other.

Sizes are those of public configurations, 7B or 8B; a feed-forward of two matrices is treated as a gated one of two
thirds of its width. The encoder of Qwen2.5-VL attends inside windows of 4 x 4 tokens in 28 of 32 layers, those of
Qwen2-VL and Qwen3-VL over whole frames. Spans of the language model see both ways (``modality``), or causally. Moving
features from one plan to the other is not counted: it happens once a step, attention's traffic in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import flexcp
from flexcp.batch import make_batch
from flexcp.clusters import Cluster
from flexcp.compare.compare import planned
from flexcp.cost import CostModel, Model
from flexcp.data.images import ImageBatch, Span
from flexcp.data.lengths import draw_lengths
from flexcp.models.preset import Preset
from flexcp.planners.request import Refused, Request
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import simulate

FRAME, WIDTH = 256, 32
"""Tokens of a video's frame, and patches in a row of it."""


@dataclass(frozen=True)
class VisionModel:
    """An encoder and a language model; ``full`` layers of the encoder attend over frames,
    the others in windows of ``window`` x ``window`` tokens.
    """

    name: str
    encoder: Preset
    language: Preset
    full: int
    window: int = 0


def _encoder(hidden: int, layers: int, feed_forward: int, head_dim: int) -> Preset:
    return Preset(Model("encoder", hidden, layers, feed_forward), Shape(16, 16, head_dim, head_dim), 0)


def _language(name: str, hidden: int, layers: int, feed_forward: int, heads: int, kv_heads: int) -> Preset:
    return Preset(Model(name, hidden, layers, feed_forward), Shape(heads, kv_heads, 128, 128), 152_064)


MODELS = {
    model.name: model
    for model in (
        VisionModel(
            "Qwen2-VL 7B", _encoder(1280, 32, 3413, 80), _language("qwen2-vl-7b", 3584, 28, 18_944, 28, 4), full=32
        ),
        VisionModel(
            "Qwen2.5-VL 7B",
            _encoder(1280, 32, 3420, 80),
            _language("qwen2.5-vl-7b", 3584, 28, 18_944, 28, 4),
            full=4,
            window=4,
        ),
        VisionModel(
            "Qwen3-VL 8B", _encoder(1152, 27, 2869, 72), _language("qwen3-vl-8b", 4096, 36, 12_288, 32, 8), full=27
        ),
    )
}


def video_batch(tokens: int, seed: int, window: int = 0) -> ImageBatch:
    """Return videos with a little text around them, with this many tokens in all."""
    lengths, spans = draw_lengths("video", tokens, seed), []
    for n in lengths:
        frames = int(n * 0.9) // FRAME
        spans.append((Span(16, 16 + frames * FRAME, frames, WIDTH),) if frames else ())
    return ImageBatch(tuple(lengths), tuple(spans), window=window)


def requests_of(model: VisionModel, batch: ImageBatch, where: Cluster, both_ways: bool) -> list[tuple[Request, Preset]]:
    """Return the requests for the encoder's batch and the language model's, with their presets."""
    counts = {"full": model.full, "window": model.encoder.model.layers - model.full}
    encoder = make_batch(
        batch.encoder_lengths, masks={kind: (masks, counts[kind]) for kind, masks in batch.encoder_masks().items()}
    )
    masks = batch.masks() if both_ways else flexcp.causal()
    language = make_batch(batch.lengths, masks={"mask": (masks, model.language.model.layers)})
    parts = ((encoder, model.encoder), (language, model.language))
    return [(Request(b, p.shape, where, replace(CostModel(), model=p.model)), p) for b, p in parts]


def part_ns(
    model: VisionModel, batch: ImageBatch, where: Cluster, strategy: str, both_ways: bool = True
) -> tuple[int, int] | None:
    """Return the simulated nanoseconds of a step of the encoder and of the language model, both under ``strategy``;
    None if it refuses either.
    """
    encoder, language = each_part_ns(model, batch, where, strategy, both_ways)
    return None if encoder is None or language is None else (encoder, language)


def each_part_ns(
    model: VisionModel, batch: ImageBatch, where: Cluster, strategy: str, both_ways: bool = True
) -> tuple[int | None, int | None]:
    """Return the simulated nanoseconds of a step of the encoder and of the language model under ``strategy``,
    None for a part that it refuses.
    """
    encoder, language = (
        _step_ns(request, preset, strategy) for request, preset in requests_of(model, batch, where, both_ways)
    )
    return encoder, language


def _step_ns(request: Request, preset: Preset, strategy: str) -> int | None:
    try:
        plan = planned(request, strategy, search=False)[1]
    except Refused:
        return None
    step = simulate(plan, training=Training(preset)).step
    assert step is not None
    return step.total_ns
