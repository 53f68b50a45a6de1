"""Tests that the text model in a ``config.json`` of a vision-language model is read as Transformers reads it: its type,
its fields, and whether its matrices are tied.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexcp.models.config import read_config
from flexcp.models.families import REFUSED
from flexcp.models.text_parts import OUTER

transformers = pytest.importorskip("transformers")

from config_files import by_hand  # noqa: E402 - needs Transformers
from test_families import wrong_in  # noqa: E402
from transformers_probe import tied_around  # noqa: E402

READ = sorted(kind for kind in OUTER if OUTER[kind].text not in REFUSED)
SAID = (None, True, False)
VISION = {"num_hidden_layers": 1, "depth": 1, "num_attention_heads": 16}
"""A small vision model; its sizes do not matter."""


def file(kind: str, outer: bool | None, inner: bool | None) -> dict[str, Any]:
    """Return a file of this type with a small text model; ``outer`` and ``inner`` say whether matrices are tied."""
    text = by_hand(OUTER[kind].text)
    text |= {} if inner is None else {"tie_word_embeddings": inner}
    return {"model_type": kind, "text_config": text, "vision_config": VISION} | (
        {} if outer is None else {"tie_word_embeddings": outer}
    )


@pytest.mark.parametrize("kind", READ)
def test_a_text_model_is_read_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    plain = file(kind, None, None)
    files = {"saved": json.loads(json.dumps(transformers.CONFIG_MAPPING[kind].from_dict(plain).to_dict(), default=str))}
    files["fields outside are not the text model's"] = plain | {
        "num_attention_heads": 8,
        "sliding_window": 5,
        "num_experts": 4,
    }
    if OUTER[kind].flat:
        files |= {f"flat, tied {outer}": _flat(kind, outer) for outer in SAID}
    if OUTER[kind].fixed:
        files["another type inside"] = plain | {"text_config": plain["text_config"] | {"model_type": "llama"}}
    text = {name: value for name, value in plain["text_config"].items() if name != "model_type"}
    files["no type inside"] = plain | {"text_config": text}
    wrong = [
        f"{name}: {'; '.join(found)}"
        for name, values in files.items()
        if (found := wrong_in(tmp_path, values, must=True))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", READ)
def test_of_two_that_say_whether_matrices_are_tied_the_one_counts_that_counts_for_transformers(
    tmp_path: Path, kind: str
) -> None:
    for outer in SAID:
        for inner in SAID:
            values = file(kind, outer, inner)
            (tmp_path / "config.json").write_text(json.dumps(values))
            config = transformers.CONFIG_MAPPING[kind].from_dict(values)
            assert read_config(tmp_path).tied == tied_around(config), (outer, inner)


def _flat(kind: str, tied: bool | None) -> dict[str, Any]:
    return by_hand(OUTER[kind].text) | {"model_type": kind} | ({} if tied is None else {"tie_word_embeddings": tied})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "novel", "text_config": by_hand("llama")}, ["'novel'", "config.text_config.save_pretrained"]),
        ({"model_type": "llama", "text_config": by_hand("llama")}, ["'llama'", "text_config is not read"]),
        ({"model_type": "paligemma", "text_config": by_hand("gemma")}, ["'paligemma'", "both sides"]),
        (
            {"model_type": "llama4", "text_config": by_hand("llama")},
            ["'llama4_text'", "chunks", "--heads, --kv-heads", "with --mask"],
        ),
        (_flat("gemma3", None), ["no text_config", "'gemma3'"]),
        ({"model_type": "gemma3", "text_config": 5}, ["no text_config", "'gemma3'"]),
    ],
)
def test_other_files_are_refused_with_a_way_out(tmp_path: Path, values: dict[str, Any], words: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises((ValueError, NotImplementedError)) as error:
        read_config(tmp_path)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
