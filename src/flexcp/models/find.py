"""Find: models by name, with the sizes that planning and simulation need.

A name is that of a preset, or the path of a Hugging Face ``config.json`` or of its folder. :func:`make_model` makes a
model from numbers alone. Nothing is downloaded: the name of a model on the Hugging Face hub is refused.

Sizes are from the published configurations of the models (Llama 3, Qwen3, Qwen2.5-VL). ``gpt-8b`` is our reading of
DCP's end-to-end model: width, layers and heads of Llama with a plain feed-forward of four times the width (two
matrices, described here as a gated one of the same FLOPs).
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from flexcp.cost import Model, dense_model
from flexcp.models.config import read_config
from flexcp.models.preset import Preset
from flexcp.shape import Shape

NEAR = 0.8
"""How similar (0 to 1) an unknown name must be to a preset's for that to be suggested."""


def _preset(
    name: str,
    hidden: int,
    layers: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    active: int = 1,
    experts: int = 1,
) -> Preset:
    """Make a preset with heads of size 128; a token uses ``active`` of the ``experts`` feed-forwards of a layer."""
    return Preset(
        Model(name, hidden, layers, feed_forward, active), Shape(heads, kv_heads, 128, 128), vocabulary, experts
    )


PRESETS = {
    preset.model.name: preset
    for preset in (
        _preset("llama3-8b", 4096, 32, 14_336, 32, 8, 128_256),
        _preset("llama3-70b", 8192, 80, 28_672, 64, 8, 128_256),
        _preset("gpt-8b", 4096, 32, 10_923, 32, 8, 50_257),
        _preset("qwen3-30b-a3b", 2048, 48, 768, 32, 4, 151_936, active=8, experts=128),
        _preset("qwen2.5-vl-7b", 3584, 28, 18_944, 28, 4, 152_064),
    )
}


def find_model(name: str) -> Preset:
    """Return the preset with a name, or the model of a ``config.json`` or of a folder with one.

    Raise ValueError if there is neither, or as :func:`flexcp.models.config.read_config` does.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name).expanduser()
    if path.exists():
        return read_config(path)
    raise ValueError(f"unknown model {name!r}: {_way_out(name)}")


def make_model(heads: int, kv_heads: int, head_dim: int, hidden: int | None, layers: int) -> Preset:
    """Make a dense model of these sizes, with a gated feed-forward of 3.5 times the width and Llama 3's vocabulary.

    The width is ``hidden``, by default heads x head_dim.
    """
    shape = Shape(heads, kv_heads, head_dim, head_dim)
    width = dense_model(shape).hidden if hidden is None else hidden
    name = f"a model of {layers} layers of {width}"
    return Preset(Model(name, width, layers, max(1, 7 * width // 2)), shape, PRESETS["llama3-8b"].vocabulary)


def _way_out(name: str) -> str:
    """Return the end of an error message for an unknown model: what to write instead."""
    known = f"give the path of its config.json or of the folder with it, or one of {', '.join(PRESETS)}"
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        return f"there is no such file or folder; {known}"
    if "/" in name:
        return f"there is no such folder here, and nothing is downloaded from a hub; {known}"
    close = _nearest(name)
    return f"did you mean {close!r}? Otherwise {known}" if close else known


def _nearest(name: str) -> str | None:
    """Return a preset with nearly the same name, or None; a name with another size means another model."""
    word = name.lower()
    sizes = set(_sizes(word))
    near = {known for known in PRESETS if not sizes or sizes == set(_sizes(known))}
    return next(iter(difflib.get_close_matches(word, sorted(near), n=1, cutoff=NEAR)), None)


def _sizes(name: str) -> list[str]:
    """Return the sizes in the name of a model: 30b and a3b of qwen3-30b-a3b."""
    return re.findall(r"a?\d+(?:\.\d+)?b\b", name)
