"""A Hugging Face ``config.json`` as far as planning and simulation need it: heads, widths, layers, experts, windows.

The file is read as plain JSON, so nothing of Transformers or torch is loaded and no code of a model runs. What is read is what the families
share (Llama, Qwen, Mistral, Mixtral, Gemma, gpt-oss, and GPT-2's older names); a field that the file leaves to its family's defaults is
missing here and named. KV heads and head size follow from the heads in families that make them so, and in a file that names no family.
Models with images or sound around them are read by their ``text_config``.

A layer is priced as one kind: in models with experts as a layer of experts, the shared ones counted among the active. A plain feed-forward
(two matrices) is written as a gated one of the same FLOPs. Attention that is neither causal nor a causal window is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexcp.cost import Model
from flexcp.io.json_files import json_line
from flexcp.models.preset import Preset
from flexcp.shape import Shape

FILE = "config.json"
LARGEST = 1 << 24
PLAIN = frozenset({"gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt"})
"""Families whose feed-forward is two matrices instead of three."""
KINDS = ("full_attention", "sliding_attention")
ALTERNATING = {"gemma2": 2, "gemma3_text": 6}
"""Families in which every so-many-th layer sees all keys and the others a window, where the file does not say which."""
MULTI_HEAD = frozenset(
    {
        "", "apertus", "arcee", "bloom", "codegen", "cohere", "cohere2", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
        "granite", "granitemoe", "llama", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
    }
)  # fmt: skip
"""Families in which a missing number of KV heads is that of the query heads, or 1 where ``multi_query`` says so."""
EVEN_HEADS = MULTI_HEAD | frozenset(
    {
        "bitnet", "dbrx", "dots1", "ernie4_5_moe", "exaone4", "glm4_moe", "ministral", "mistral", "mixtral", "phi4_multimodal", "phimoe",
        "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3_moe", "qwen3_vl_moe_text", "smollm3",
        "stablelm", "starcoder2",
    }
)  # fmt: skip
"""Families in which a missing head size is hidden size / heads."""
WINDOWED = frozenset({"cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral", "mistral", "olmo3"})
"""Families with a window where the file says nothing of one; ``null`` says that there is none."""
WITHOUT_WINDOWS = frozenset(
    {
        "apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "dbrx", "ernie4_5_moe", "falcon", "glm4_moe", "gpt2", "gpt_bigcode",
        "gpt_neo", "gpt_neox", "gptj", "granite", "granitemoe", "llama", "mpt", "nemotron", "olmo", "olmo2", "olmoe", "opt", "persimmon",
        "phi", "stablelm",
    }
)  # fmt: skip
"""Families whose models in Transformers see all keys, whatever a file says of a window."""
SWITCHED = frozenset(
    {
        "qwen2",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
"""Families whose window is used only where ``use_sliding_window`` says so, by layers from ``max_window_layers`` on."""
TIED = frozenset(
    {
        "bloom", "cohere", "cohere2", "ernie4_5_moe", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo", "mpt",
        "opt", "qwen3_vl_moe_text", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Families whose embedding and head are one matrix where the file does not say."""
DENSE_PART = 8
"""Up to this part of a model's layers may have no experts and be priced as if they had."""
DTYPES = ("bfloat16", "float16", "float32", "float64")


def read_config(path: Path) -> Preset:
    """The model of a ``config.json``, or of a folder that holds one."""
    values, file = config_values(path), _file(path)
    name = file.parent.resolve().name if path.is_dir() else f"{file.parent.resolve().name}/{file.name}"
    inner = values.get("text_config")
    config = {**values, **inner} if isinstance(inner, Mapping) else values
    return _Reader(file, config, name).preset()


def _file(path: Path) -> Path:
    return path / FILE if path.is_dir() else path


def config_values(path: Path) -> Mapping[str, Any]:
    """What a ``config.json``, or that of a folder, holds: the one place where such a file is opened."""
    file = _file(path)
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError(f"{file} has {file.stat().st_size:,} bytes; no {FILE} of a model is that large")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read a model from {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no JSON: it is not a text file") from None
    values = json_line(text, str(file))
    if not isinstance(values, Mapping):
        raise ValueError(f"{file} holds a {type(values).__name__}; the {FILE} of a model is an object")
    return values


class _Reader:
    """Fields of one file, with errors that name it."""

    def __init__(self, file: Path, config: Mapping[str, Any], place: str) -> None:
        self.file, self.config, self.place = file, config, place
        self.family = str(config.get("model_type", ""))

    def preset(self) -> Preset:
        """Everything, put together."""
        self._refuse()
        heads, hidden = self._need("num_attention_heads", "n_head"), self._need("hidden_size", "n_embd")
        all_heads = 1 if self.config.get("multi_query") is True else heads
        kv_heads = self._count("num_key_value_heads") or self._count("num_kv_heads")
        head_dim = self._count("head_dim")
        if kv_heads is None:
            kv_heads = self._derived("num_key_value_heads", all_heads, MULTI_HEAD)
        if head_dim is None:
            head_dim = self._derived("head_dim", hidden // heads, EVEN_HEADS)
        layers = self._need("num_hidden_layers", "n_layer")
        width, active, experts = self._feed_forward(hidden)
        try:
            shape = Shape(heads, kv_heads, head_dim, head_dim, self._dtype())
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None
        if experts > 1:
            self._refuse_dense(layers)
        model = Model(self._name(), hidden, layers, width, active)
        return Preset(model, shape, self._need("vocab_size"), experts, self._windows(layers), self._tied())

    def _derived(self, name: str, value: int, families: frozenset[str]) -> int:
        """What a missing field follows from, where the family is one that makes it so and not one with a default of its own."""
        if self.family not in families:
            raise ValueError(
                f"{self.file} has no {name}, and models of the type {self.family[:40]!r} may have a default of their own: write it into "
                f'the file, "{name}": {value} if it follows from the heads, or save the file with config.save_pretrained(folder)'
            )
        return value

    def _refuse(self) -> None:
        if self.config.get("kv_lora_rank"):
            raise NotImplementedError(
                f"{self.file} is a model with multi-latent attention (kv_lora_rank), which is not read from a file; describe it with "
                "--heads, --kv-heads, --head-dim, --hidden and --layers"
            )
        if self.config.get("is_encoder_decoder") is True:
            raise NotImplementedError(f"{self.file} is an encoder with a decoder; only decoders are read from a file")

    def _refuse_dense(self, layers: int) -> None:
        """Models with experts of which many layers have none: all layers are priced alike."""
        given = self.config.get("mlp_only_layers")
        every = self._count("decoder_sparse_step") or self._count("interleave_moe_layer_step") or 1
        dense = set(given) if isinstance(given, list) else set()
        dense |= set(range(self._count("first_k_dense_replace") or 0)) | {i for i in range(layers) if (i + 1) % every}
        if DENSE_PART * len(dense) > layers:
            raise NotImplementedError(
                f"{self.file} has {len(dense)} of {layers} layers without experts, and layers are priced as one kind; describe the model "
                "with --heads, --kv-heads, --head-dim, --hidden and --layers"
            )

    def _name(self) -> str:
        """The last part of the name the model was saved under, or where its file is."""
        given = self.config.get("_name_or_path")
        name = given.strip("/").rpartition("/")[2] if isinstance(given, str) else ""
        # Whatever a file says goes to terminals and pages: letters, digits, dots, dashes, slashes.
        return re.sub(r"[^\w./-]", "_", name or self.place)[:60]

    def _dtype(self) -> str:
        """What it was saved in, where plans know it; bfloat16 otherwise, as everybody trains."""
        given = self.config.get("dtype", self.config.get("torch_dtype"))
        return given if given in DTYPES else "bfloat16"

    def _feed_forward(self, hidden: int) -> tuple[int, int, int]:
        """Width of a feed-forward, how many of them a token uses, and how many there are in a layer."""
        dense = self._count("intermediate_size") or self._count("n_inner")
        experts = self._count("num_experts") or self._count("num_local_experts") or self._count("n_routed_experts")
        if not experts:
            if dense is None and self.family in PLAIN:
                dense = 4 * hidden
            width = dense or self._need("intermediate_size")
            return (-(-2 * width // 3) if self.family in PLAIN else width), 1, 1
        width = self._count("moe_intermediate_size") or dense or self._need("moe_intermediate_size")
        shared = self._count("n_shared_experts") or -(-(self._count("shared_expert_intermediate_size") or 0) // width)
        return width, self._need("num_experts_per_tok", "experts_per_token") + shared, experts + shared

    def _tied(self) -> bool:
        """Whether embedding and head are one matrix."""
        value = self.config.get("tie_word_embeddings")
        if value is None:
            return self.family in TIED
        if not isinstance(value, bool):
            raise ValueError(f"{self.file}: tie_word_embeddings must be true or false; got {value!r:.60}")
        return value

    def _windows(self, layers: int) -> tuple[tuple[int, int], ...]:
        """(keys, layers) of the layers that see a window only."""
        keys = self._count("sliding_window")
        if "sliding_window" not in self.config and self.family in WINDOWED:
            raise ValueError(
                f"{self.file} has no sliding_window, and models of the type {self.family!r} have a window by default: write it into the "
                'file, "sliding_window": null if there is none, or save the file with config.save_pretrained(folder)'
            )
        if keys is not None and "layer_types" not in self.config and self.family in WITHOUT_WINDOWS:
            raise ValueError(
                f"{self.file} has sliding_window {keys}, which models of the type {self.family!r} do not read: they see all keys; take it "
                "out of the file, or name a model_type that has windows"
            )
        kinds = self.config.get("layer_types")
        if kinds is None:
            kinds = self._guessed(layers, keys)
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(f"{self.file}: layer_types must be a list with a kind for each of the {layers} layers")
        unknown = sorted({str(kind) for kind in kinds if kind not in KINDS})
        if unknown:
            raise NotImplementedError(
                f"{self.file} has layers of kind {', '.join(unknown)}; attention is known of {' and '.join(KINDS)} only"
            )
        windows = kinds.count("sliding_attention")
        if windows and keys is None:
            raise ValueError(f"{self.file} has {windows} window layers but no sliding_window, the keys that they see")
        return ((keys, windows),) if windows and keys is not None else ()

    def _guessed(self, layers: int, keys: int | None) -> list[str]:
        """Kinds of layers of a file from before ``layer_types``."""
        if keys is None or self.config.get("use_sliding_window") is False:
            return ["full_attention"] * layers
        if self.family in SWITCHED:
            for name in ("use_sliding_window", "max_window_layers"):
                if self.config.get(name) is None and (self.family, name) != ("qwen3_moe", "max_window_layers"):
                    raise ValueError(
                        f"{self.file} has sliding_window {keys} but no {name}, of which models of the type {self.family!r} have a default: "
                        "write it, or layer_types, into the file, or save the file with config.save_pretrained(folder)"
                    )
        every = self._count("sliding_window_pattern") or ALTERNATING.get(self.family)
        first = self._count("max_window_layers") or 0
        return [
            "full_attention" if i < first or (every is not None and (i + 1) % every == 0) else "sliding_attention"
            for i in range(layers)
        ]

    def _count(self, name: str) -> int | None:
        """A whole number of at least 1, or None where the field is missing, null or 0."""
        value = self.config.get(name)
        if value is None or value == 0:
            return None
        if type(value) is not int or value < 0 or value >= 1 << 31:
            raise ValueError(f"{self.file}: {name} must be a whole number of at least 1; got {value!r:.60}")
        return value

    def _need(self, *names: str) -> int:
        found = next((value for name in names if (value := self._count(name)) is not None), None)
        if found is None:
            raise ValueError(
                f"{self.file} has no {' or '.join(names)}; write the whole file with config.save_pretrained(folder), or describe the "
                "model with --heads, --kv-heads, --head-dim, --hidden and --layers"
            )
        return found
