"""Tests that a ``config.json`` is read as Transformers reads it, or refused. Files are of all model families, written
by hand or saved by Transformers, and with changed fields.

A small model of each file is built and run, and compared with what was read: heads, head sizes, the keys that layers
see, weights, multiplications of a token (without the experts that it does not use), vocabulary, and whether matrices
are tied. What ``huggingface.masks`` and ``huggingface.planner`` make of the same configuration is compared as well.

A change is tried with the families that know one of its fields; ``--all-changes`` (``make families``) tries it with all
families.
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
"""Changes ("change" or "family, change") after which flexcp reads a file although Transformers builds no model of it,
and why no number that was read is wrong.
"""
UNBUILT_WORDS = "is read, but Transformers makes no model of it"


def read(folder: Path, values: dict[str, Any]) -> Preset | None:
    """Return what is read of a file, or None if it is refused; the refusal must be one line that names the file."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return find_model(str(folder))
    except (ValueError, NotImplementedError) as error:
        assert "config.json" in str(error) and "\n" not in str(error)
        return None


def read_layers(preset: Preset) -> Counter[Layer]:
    """Return the layers of a preset in the form in which ``transformers_probe`` counts them."""
    shape = preset.shape
    one = (shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
    found = Counter({(*one, keys): count for keys, count in preset.windows})
    found[(*one, ALL)] = preset.model.layers - found.total()
    return +found


def without_sizes(layers: Counter[Layer]) -> Counter[Layer]:
    """Return the layers with KV heads and head sizes left out."""
    found: Counter[Layer] = Counter()
    for (heads, *_, keys), count in layers.items():
        found[(heads, 0, 0, 0, keys)] += count
    return found


def differences(preset: Preset, found: Seen, dense: bool) -> list[str]:
    """Return how a model of Transformers differs from what was read; ``dense`` says whether some of its layers have no
    experts.
    """
    shape, model = preset.shape, preset.model
    # Attention that could not be replaced by the probe multiplies as well: queries by keys, and weights by values.
    attention = 0 if found.replaced else model.layers * 2 * TOKENS * shape.heads * shape.head_dim
    # Routers and learned positions are not part of what is read, and up to an eighth of the layers may be without
    # experts.
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
    """Return WINDOW, the window of all files here, if the mask is that window, else UNKNOWN."""
    return WINDOW if mask == window(WINDOW - 1) else UNKNOWN


def planned_otherwise(config: Any, found: Seen) -> list[str]:
    """Return how ``huggingface.masks`` and ``huggingface.planner`` differ from the model of a configuration; nothing if
    they refuse the configuration.
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
    """Return what is wrong about reading a file; nothing if it is refused, unless it ``must`` be read."""
    preset = read(folder, values)
    if preset is None:
        return ["is refused"] if must else []
    try:
        config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))
        found = seen(config)
    except Exception as error:  # Transformers raises many kinds of errors for files that it cannot build
        return [f"{UNBUILT_WORDS}: {error!r:.200}"]
    # Only files of eight layers have a layer without experts.
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
