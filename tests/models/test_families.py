"""Proves that a ``config.json`` is read as Transformers reads it, or refused: families, written by hand and saved,
with fields changed.

A small model of each file is built and run, and what it does is compared with what was read: heads, head sizes, the
keys that layers see, weights, multiplications of a token (which experts that a token does not use are not in),
vocabulary, tied or not. So is what ``huggingface.masks`` and ``huggingface.planner`` make of the same configuration.

A change is tried with the families that know one of its fields; ``--all-changes`` (``make families``) tries it with
all.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexcp.clusters import cluster
from flexcp.masks import window
from flexcp.models.find import find_model
from flexcp.models.preset import Preset

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from config_files import CHANGES, NAMED, WINDOW, by_hand, changed, concerns  # noqa: E402 - needs Transformers
from transformers_probe import ALL, TOKENS, UNKNOWN, Layer, Seen, seen  # noqa: E402

from flexcp.frameworks import huggingface  # noqa: E402

MROPE = "sections of its rotary embedding are for another head size"
NO_WINDOW = "no layer has a window, and Transformers makes the window's mask all the same"
UNBUILT = {
    "null head_dim": "read as if it were left out, which Transformers' rotary embedding takes for a size",
    "cohere2_moe, null window": NO_WINDOW,
    "exaone_moe, null window": NO_WINDOW,
    "helium, no head_dim": "Transformers has a default that fits one width of models alone",
    "ministral, null window": NO_WINDOW,
    "qwen2_5_vl_text, other head_dim": MROPE,
    "qwen2_vl_text, other head_dim": MROPE,
}
"""Changes, or those of a family, after which a file is read although Transformers makes no model of it,
and why no number is wrong.
"""
UNBUILT_WORDS = "is read, but Transformers makes no model of it"


def read(folder: Path, values: dict[str, Any]) -> Preset | None:
    """What is read of a file, or None where it is refused, in one line that names it."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return find_model(str(folder))
    except (ValueError, NotImplementedError) as error:
        assert "config.json" in str(error) and "\n" not in str(error)
        return None


def read_layers(preset: Preset) -> Counter[Layer]:
    """Layers as the probe counts them."""
    shape = preset.shape
    one = (shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
    found = Counter({(*one, keys): count for keys, count in preset.windows})
    found[(*one, ALL)] = preset.model.layers - found.total()
    return +found


def without_sizes(layers: Counter[Layer]) -> Counter[Layer]:
    """Heads and keys alone."""
    found: Counter[Layer] = Counter()
    for (heads, *_, keys), count in layers.items():
        found[(heads, 0, 0, 0, keys)] += count
    return found


def differences(preset: Preset, found: Seen, dense: bool) -> list[str]:
    """What a model of Transformers does otherwise than was read;
    ``dense`` says whether some of its layers have no experts.
    """
    shape, model = preset.shape, preset.model
    # Attention that cannot be replaced multiplies too: queries with keys, and weights with values.
    attention = 0 if found.replaced else model.layers * 2 * TOKENS * shape.heads * shape.head_dim
    # Routers, and positions that are learned, are left out of what is read; of layers without experts there may be an
    # eighth.
    near = 0.15 if dense else 0.03
    numbers = {
        "weights": (model.layers * preset.layer_parameters, found.weights),
        "multiplications": (model.layers * model.linear_flops_per_token(shape) // 2 + attention, found.multiplications),
    }
    wrong = [
        f"{name}: read {ours}, is {theirs}"
        for name, (ours, theirs) in numbers.items()
        if abs(ours - theirs) > near * theirs
    ]
    layers = read_layers(preset) if found.replaced else without_sizes(read_layers(preset))
    if layers != found.layers:
        wrong.append(f"layers: read {layers}, are {found.layers}")
    if (preset.vocabulary, model.hidden) != found.vocabulary:
        wrong.append(f"vocabulary: read {preset.vocabulary, model.hidden}, is {found.vocabulary}")
    if found.tied is not None and preset.tied != found.tied:
        wrong.append(f"tied: read {preset.tied}, is {found.tied}")
    return wrong


def window_keys(mask: Any) -> int:
    """Keys of the window that files here have; UNKNOWN for any other mask."""
    return WINDOW if mask == window(WINDOW - 1) else UNKNOWN


def planned_otherwise(config: Any, found: Seen) -> list[str]:
    """What ``huggingface.masks`` and ``huggingface.planner`` make otherwise of a configuration,
    where they do not refuse it.
    """
    if not found.replaced:
        return []  # turn_on refuses such models
    try:
        masks = huggingface.masks(config)
        shape = huggingface.planner(config, cluster("cpu", 1, 1), "float32").shape
    except (ValueError, NotImplementedError):
        return []
    one = (shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
    planned: Counter[Layer] = Counter()
    for name, (mask, layers) in masks.items():
        planned[(*one, ALL if name == "full" else window_keys(mask))] += layers
    return [] if planned == found.layers else [f"huggingface plans {planned}, layers are {found.layers}"]


def wrong_in(folder: Path, values: dict[str, Any], must: bool) -> list[str]:
    """What is wrong about a file; nothing where it is refused, unless it ``must`` be read."""
    preset = read(folder, values)
    if preset is None:
        return ["is refused"] if must else []
    try:
        config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))
        found = seen(config)
    except Exception as error:  # whatever Transformers says of a file that it cannot make a model of
        return [f"{UNBUILT_WORDS}: {error!r:.200}"]
    # Only files of eight layers have one without experts.
    return differences(preset, found, dense=preset.model.layers == 8) + planned_otherwise(config, found)


@pytest.mark.parametrize("family", NAMED)
def test_a_file_is_read_as_transformers_reads_it_or_refused(
    tmp_path: Path, family: str, request: pytest.FixtureRequest
) -> None:
    written, everything = by_hand(family), request.config.getoption("--all-changes")
    saved = transformers.CONFIG_MAPPING[family].from_dict(dict(written)).to_dict()
    files = {"as written": written, "saved": json.loads(json.dumps(saved, default=str))}
    files |= {change: changed(written, change) for change in CHANGES if everything or concerns(change, family)}
    wrong, done = [], list[str]()
    for name, values in files.items():
        if json.dumps(values) in done:
            continue
        done.append(json.dumps(values))
        found = wrong_in(tmp_path, values, name in ("as written", "saved", "tied", "untied"))
        known = name in UNBUILT or f"{family}, {name}" in UNBUILT
        if found and not (known and found[0].startswith(UNBUILT_WORDS)):
            wrong.append(f"{family}, {name}: {'; '.join(found)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_tried_with_a_family_that_knows_its_fields(change: str) -> None:
    assert any(concerns(change, family) for family in NAMED)
