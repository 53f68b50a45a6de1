"""Config: read the heads, widths, layers, experts and windows of a model from a Hugging Face ``config.json``.

The file is read as plain JSON, so Transformers and torch are not loaded and no code of a model runs.
:mod:`flexcp.models.families` knows how models of each ``model_type`` use the fields; other types are refused, and so is
a file without a ``model_type``, because what its fields mean is not known. A file is also refused if it leaves a number
to a default of its family, or contains a number that its family does not read. For models that combine text with
images, the ``text_config`` is read (:mod:`flexcp.models.text_parts`).

Feed-forwards are read by :mod:`flexcp.models.feed_forwards`, windows by :mod:`flexcp.models.layer_windows`. Attention
that is neither causal nor a causal window is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexcp.cost import Model
from flexcp.io.json_files import json_line
from flexcp.models.config_fields import NUMBERS, Fields
from flexcp.models.families import FAMILIES, REFUSED, UNKNOWN, Family
from flexcp.models.feed_forwards import feed_forwards
from flexcp.models.layer_windows import layer_windows
from flexcp.models.preset import Preset
from flexcp.models.text_parts import text_part
from flexcp.shape import Shape

FILE = "config.json"
LARGEST = 1 << 24
"""The most bytes of a ``config.json`` that is read."""
DTYPES = ("bfloat16", "float16", "float32", "float64")
SIZES = {
    "new": (("num_attention_heads",), ("hidden_size",), ("num_hidden_layers",)),
    "gpt": (("n_head", "num_attention_heads"), ("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers")),
    "any": (("num_attention_heads", "n_head"), ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer")),
}
"""The names of the fields for heads, width and layers, by :attr:`Family.sizes`; the first one present is read."""


def read_config(path: Path) -> Preset:
    """Read a model from a ``config.json``, or from a folder that contains one.

    Raise ValueError if the file cannot be read or lacks a field, and NotImplementedError if such models are not read.
    """
    values, file = config_values(path), _file(path)
    name = file.parent.resolve().name if path.is_dir() else f"{file.parent.resolve().name}/{file.name}"
    return _preset(text_part(file, values), name)


def _file(path: Path) -> Path:
    """Return the path of the ``config.json``, which may be given as its folder."""
    return path / FILE if path.is_dir() else path


def config_values(path: Path) -> Mapping[str, Any]:
    """Return the fields of a ``config.json``, given as the file or its folder; raise ValueError if it cannot be read.

    Only this function opens such files.
    """
    file = _file(path)
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError(f"{file} has {file.stat().st_size:,} bytes; no {FILE} of a model is that large")
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read a model from {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no JSON: it is not a text file") from None
    values = json_line(text, str(file))
    if not isinstance(values, Mapping):
        raise ValueError(f"{file} holds a {type(values).__name__}; the {FILE} of a model is an object")
    return values


def _preset(fields: Fields, place: str) -> Preset:
    """Make the model from the fields of a file; ``place`` is its name if the file has none."""
    family = _family(fields)
    heads, kv_heads, head_dim = attention_heads(fields, family)
    _, hidden, layers = (fields.need(names) for names in SIZES[family.sizes])
    width, active, experts = feed_forwards(fields, family, hidden, layers)
    try:
        shape = Shape(heads, kv_heads, head_dim, head_dim, _dtype(fields))
    except ValueError as error:
        raise ValueError(f"{fields.file}: {error}") from None
    model = Model(_name(fields, place), hidden, layers, width, active)
    windows, tied = layer_windows(fields, family, layers), fields.switch("tie_word_embeddings", family.tied)
    return Preset(model, shape, fields.need(["vocab_size"]), experts, windows, tied)


def attention_heads(fields: Fields, family: Family | None = None) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head size) of a configuration, as models of ``family`` read them.

    Without ``family``, it is that of the configuration's type. A type without a family is read by the field names that
    families share.
    """
    family = family or FAMILIES.get(fields.family, UNKNOWN)
    heads, hidden = (fields.need(names) for names in SIZES[family.sizes][:2])
    return heads, _kv_heads(fields, family, heads), _head_dim(fields, family, hidden, heads)


def _family(fields: Fields) -> Family:
    """Return the family of the file's ``model_type``, or raise NotImplementedError if such models are not read."""
    file, config, kind = fields.file, fields.config, fields.family[:40]
    if config.get("kv_lora_rank"):
        raise NotImplementedError(
            f"{file} is a model with multi-latent attention (kv_lora_rank), which is not read from a file; {NUMBERS}"
        )
    if config.get("is_encoder_decoder") is True:
        raise NotImplementedError(f"{file} is an encoder with a decoder; only decoders are read from a file")
    if kind in REFUSED:
        raise NotImplementedError(
            f"{file} is a model of the type {kind!r}, which is not read: {REFUSED[kind]}; to plan attention of its "
            f"sizes all the same, {NUMBERS}, and one mask for all layers with --mask"
        )
    if not kind:
        raise ValueError(
            f"{file} has no model_type, which says how the other fields are read; write it into the file, "
            f'"model_type": "llama" or that of a model with the same layers, or {NUMBERS}'
        )
    if kind not in FAMILIES:
        raise NotImplementedError(
            f"{file} is a model of the type {kind!r}, whose layers are not known here; name the model_type of one with "
            f"the same layers, as in llama, qwen3 or mixtral, or {NUMBERS}"
        )
    for name, usual in (
        ("is_causal", True),
        ("use_bidirectional_attention", False),
        ("add_cross_attention", False),
        ("alibi", False),
    ):
        if config.get(name) not in (None, usual):
            raise NotImplementedError(
                f"{file} has {name} {config[name]!r:.20}; only causal attention without biases is read from a file"
            )
    wide = fields.count("word_embed_proj_dim")
    if wide is not None and wide != fields.count("hidden_size"):
        raise NotImplementedError(f"{file} has word_embed_proj_dim {wide}, another width than hidden_size; {NUMBERS}")
    return FAMILIES[kind]


def _kv_heads(fields: Fields, family: Family, heads: int) -> int:
    """Return the number of KV heads, by the rule ``family.kv_heads``; ``heads`` is the number of query heads."""
    own = {"never": heads, "multi_query": 1 if fields.switch("multi_query", True) else heads}.get(family.kv_heads)
    if family.kv_heads == "falcon":
        if fields.switch("new_decoder_architecture", False):
            return fields.read(["num_kv_heads"]) or heads
        # Files of the old decoder architecture may contain num_kv_heads too, but the model does not read it.
        return 1 if fields.switch("multi_query", True) else heads
    if own is not None:
        for name in ("num_key_value_heads", "num_kv_heads"):
            fields.agree(name, own, "the heads alone")
        return own
    given = fields.read(["num_key_value_heads"])
    if given is None and family.kv_heads == "asked":
        raise fields.asked("num_key_value_heads", f"{heads} if every head has its own")
    if given is None and family.sizes == "any" and fields.switch("multi_query", False):
        return 1
    return given or heads


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    """Return the size of a head, by the rule ``family.head_dim``; raise ValueError if the file does not say it."""
    even = hidden // heads
    if family.head_dim == "never":
        fields.agree("head_dim", even, "the heads alone")
        return even
    given = fields.count("head_dim")
    if given is None and family.head_dim == "asked":
        raise fields.asked("head_dim", f"{even} if it follows from the heads")
    if given is None and hidden % heads:
        raise ValueError(
            f"{fields.file}: {heads} heads do not divide a hidden size of {hidden}, and there is no head_dim; write it "
            "into the file"
        )
    return given or even


def _name(fields: Fields, place: str) -> str:
    """Return the last part of the name under which the model was saved, or ``place`` if there is none."""
    given = fields.config.get("_name_or_path")
    name = given.strip("/").rpartition("/")[2] if isinstance(given, str) else ""
    # The name is printed in terminals and on pages, so only letters, digits, dots, dashes and slashes are kept.
    return re.sub(r"[^\w./-]", "_", name or place)[:60]


def _dtype(fields: Fields) -> str:
    """Return the dtype in which the model was saved, or bfloat16 if plans do not know it or the file has none."""
    given = fields.config.get("dtype", fields.config.get("torch_dtype"))
    return given if given in DTYPES else "bfloat16"
