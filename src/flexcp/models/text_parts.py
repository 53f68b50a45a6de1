"""The text model inside a ``config.json`` of a model with images around it.

Such a file has the text model's fields in ``text_config``. Of which type that is where it does not say, and which of
two ``tie_word_embeddings`` counts, differs between the outer types: those that are here were compared with
Transformers' own models, and all others are refused. The text model of any of them can be saved and read as a file of
its own.
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
    """One ``model_type`` with a text model inside."""

    text: str
    """The type of its text model, where that does not say."""
    fixed: bool = False
    """Whether it is that one whatever the text model says."""
    tied: bool = False
    """Whether embedding and head are one matrix, where the outer file does not say."""
    inner_ties: bool = False
    """Whether they also are where only the text model says so."""
    flat: bool = False
    """Whether the fields may stand in the outer file, without a ``text_config``."""


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
"""What a text model takes from the file around it where it does not say it itself."""


def text_part(file: Path, values: Mapping[str, Any]) -> Fields:
    """The fields of a file's text model, which is the file itself where it has no other around it."""
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
    kind = values.get("model_type", "")
    return kind if isinstance(kind, str) else ""
