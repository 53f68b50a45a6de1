"""Text parts: find the text model in the ``config.json`` of a model that combines text with images.

Such a file has the fields of the text model in ``text_config``. The outer ``model_type`` decides which type the text
model has if ``text_config`` does not say it, and which of two ``tie_word_embeddings`` counts. The types in ``OUTER``
were compared with Transformers' own models; all others are refused. The text model of any type can be saved and read as
a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexcp.models.config_fields import Fields
from flexcp.models.families import FAMILIES, REFUSED


@dataclass(frozen=True)
class Outer:
    """How a ``model_type`` that combines text with images contains its text model."""

    text: str
    """The type of the text model if ``text_config`` does not say it."""
    fixed: bool = False
    """Whether the text model has this type even if ``text_config`` names another."""
    tied: bool = False
    """Whether embedding and head are one matrix if the outer file does not say it."""
    inner_ties: bool = False
    """Whether ``tie_word_embeddings`` in ``text_config`` also counts."""
    flat: bool = False
    """Whether the fields may be in the outer file, without a ``text_config``."""


OUTER = {
    "aya_vision": Outer("cohere2", tied=True),
    "cohere2_vision": Outer("cohere2", tied=True),
    "gemma3": Outer("gemma3_text", fixed=True, tied=True),
    "idefics3": Outer("llama"),
    "internvl": Outer("qwen2", tied=True),
    "llama4": Outer("llama4_text", fixed=True),
    "llava": Outer("llama", inner_ties=True),
    "llava_next": Outer("llama"),
    "llava_onevision": Outer("qwen2", inner_ties=True),
    "mistral3": Outer("mistral", tied=True),
    "qwen2_5_vl": Outer("qwen2_5_vl_text", fixed=True, inner_ties=True, flat=True),
    "qwen2_vl": Outer("qwen2_vl_text", fixed=True, inner_ties=True, flat=True),
    "qwen3_vl": Outer("qwen3_vl_text", fixed=True),
    "qwen3_vl_moe": Outer("qwen3_vl_moe_text", fixed=True),
    "smolvlm": Outer("llama"),
}
AROUND = ("dtype", "torch_dtype", "_name_or_path", "is_encoder_decoder")
"""The fields that a text model takes from the outer file if ``text_config`` does not have them."""


def text_part(file: Path, values: Mapping[str, Any]) -> Fields:
    """Return the fields of the text model of a file; for a plain text model these are the fields of the file itself.

    Raise ValueError if the part with the text model is missing, and NotImplementedError if such models are not read.
    """
    kind, inner = _kind(values), values.get("text_config")
    outer = OUTER.get(kind)
    if inner is None and (outer is None or outer.flat):
        return Fields(file, values, outer.text if outer else kind)
    if not isinstance(inner, Mapping):
        raise ValueError(
            f"{file} has no text_config with fields, where models of the type {kind[:40]!r} have their sizes; write "
            "the whole file with config.save_pretrained(folder)"
        )
    if kind and outer is None:
        why = f"which is not read: {REFUSED[kind]}" if kind in REFUSED else "whose text_config is not read here"
        raise NotImplementedError(
            f"{file} is a model of the type {kind[:40]!r}, {why}; give its text model as a file of its own, "
            "config.text_config.save_pretrained(folder)"
        )
    text = outer.text if outer is not None and (outer.fixed or not _kind(inner)) else _kind(inner)
    fields = Fields(file, {**{name: values[name] for name in AROUND if name in values}, **inner}, text)
    if outer is None:
        return fields
    tied = Fields(file, values, kind).switch("tie_word_embeddings", outer.tied)
    if outer.inner_ties and not tied and text in FAMILIES:
        tied = fields.switch("tie_word_embeddings", FAMILIES[text].tied)
    return Fields(file, {**fields.config, "tie_word_embeddings": tied}, text)


def _kind(values: Mapping[str, Any]) -> str:
    """Return the ``model_type`` of a config, or an empty text if it has none."""
    kind = values.get("model_type", "")
    return kind if isinstance(kind, str) else ""
