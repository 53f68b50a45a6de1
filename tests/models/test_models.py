"""Tests of models given by name or by file: presets, ``config.json`` of common families, and the errors for wrong names
and files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexcp.masks import causal, full, window
from flexcp.models.find import PRESETS, find_model, make_model
from flexcp.models.preset import Preset
from flexcp.shape import Shape

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
QWEN = LLAMA | {"model_type": "qwen2", "sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False}
BARE_QWEN = LLAMA | {"model_type": "qwen2"}
MINISTRAL = LLAMA | {"model_type": "ministral", "head_dim": 128}
MOE = LLAMA | {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts": 8, "num_experts_per_tok": 2}


def written(folder: Path, values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return file


def read(folder: Path, values: Any) -> Preset:
    return find_model(str(written(folder, values)))


def test_a_file_and_its_folder_are_the_preset_of_the_same_sizes(tmp_path: Path) -> None:
    preset = PRESETS["llama3-8b"]
    by_file, by_folder = read(tmp_path, LLAMA), find_model(str(tmp_path))
    assert (by_file.model.name, by_folder.model.name) == (f"{tmp_path.name}/config.json", tmp_path.name)
    for found in (by_file, by_folder):
        assert (found.shape, found.parameters, found.masks()) == (preset.shape, preset.parameters, preset.masks())
    assert read(tmp_path, LLAMA | {"_name_or_path": "meta-llama/Llama-3.1-8B"}).model.name == "Llama-3.1-8B"
    assert read(tmp_path, LLAMA | {"_name_or_path": "x/\x1b[31m<b>"}).model.name == "__31m_b_"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (LLAMA, {"mask": (causal(), 32)}),
        (QWEN, {"mask": (causal(), 32)}),
        (QWEN | {"use_sliding_window": True}, {"full": (causal(), 28), "window": (window(131071), 4)}),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, {"window": (window(4095), 32)}),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, {"mask": (causal(), 32)}),
        (
            LLAMA | {"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096},
            {"full": (causal(), 16), "window": (window(4095), 16)},
        ),
        (
            {
                "text_config": LLAMA
                | {"model_type": "gemma3_text", "head_dim": 256, "num_hidden_layers": 34, "sliding_window": 1024}
            },
            {"full": (causal(), 5), "window": (window(1023), 29)},
        ),
        (
            MINISTRAL
            | {"num_hidden_layers": 2, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
            {"full": (causal(), 1), "window": (window(127), 1)},
        ),
    ],
)
def test_layers_have_the_masks_of_the_file(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read(tmp_path, values)
    assert found.masks() == expected
    assert found.masks(full()) == {"mask": (full(), found.model.layers)}


def test_experts_and_older_names(tmp_path: Path) -> None:
    qwen3 = read(
        tmp_path,
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "head_dim": 128,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "vocab_size": 151936,
        },
    )
    assert qwen3.parameters == PRESETS["qwen3-30b-a3b"].parameters
    assert qwen3.shape == Shape(32, 4, 128, 128)
    mixtral = read(tmp_path, LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    assert (mixtral.model.feed_forward, mixtral.model.experts_active, mixtral.experts) == (14_336, 2, 8)
    shared = {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }
    assert read(tmp_path, LLAMA | shared | {"model_type": "qwen2_moe"}).model.experts_active == 8
    gpt2 = read(tmp_path, {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257})
    assert (gpt2.shape.head_dim, gpt2.model.feed_forward) == (64, 2048)
    assert gpt2.parameters == pytest.approx(124e6, rel=0.02), "its head and embedding are one matrix"


def test_a_field_with_a_default_of_its_family_is_asked_for(tmp_path: Path) -> None:
    given = {
        "num_attention_heads": 6,
        "hidden_size": 288,
        "num_hidden_layers": 2,
        "vocab_size": 99,
        "intermediate_size": 64,
    }
    for family, missing in (
        ("mistral", "num_key_value_heads"),
        ("gemma2", "head_dim"),
        ("qwen2", "num_key_value_heads"),
    ):
        whole = (
            given
            | {"model_type": family, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 64}
            | {"use_sliding_window": False}
        )
        assert read(tmp_path, whole).shape.kv_heads == 2
        with pytest.raises(ValueError, match=f"has no {missing}, and models of the type '{family}' have a default"):
            read(tmp_path, {name: value for name, value in whole.items() if name != missing})


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "gpt2"]
)
def test_what_transformers_writes_is_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    from flexcp.frameworks import huggingface

    config = transformers.AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)
    found = find_model(str(tmp_path))
    planner = huggingface.planner(config, _cluster(), found.shape.dtype)
    assert found.shape == planner.shape
    assert sorted(found.masks().values(), key=str) == sorted(huggingface.masks(config).values(), key=str)


def _cluster() -> Any:
    import flexcp

    return flexcp.cluster("h100")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["config.json: not JSON, or cut off"]),
        ("[" * 100_000, ["config.json: it is nested too deep"]),
        ("[1]", ["holds a list"]),
        ("{}", ["has no model_type", '"model_type": "llama"', "--heads"]),
        (json.dumps({k: v for k, v in QWEN.items() if k != "model_type"}), ["has no model_type"]),
        (json.dumps(LLAMA | {"model_type": 5}), ["has no model_type"]),
        (json.dumps({"text_config": {k: v for k, v in LLAMA.items() if k != "model_type"}}), ["has no model_type"]),
        ('{"model_type": "llama"}', ["has no num_attention_heads", "save_pretrained", "--heads"]),
        ('{"model_type": "gpt2"}', ["has no n_head or num_attention_heads", "save_pretrained", "--heads"]),
        (
            json.dumps(LLAMA | {"num_attention_heads": "32"}),
            ["num_attention_heads must be a whole number from 1 to 2**31 - 1", "got '32'"],
        ),
        (json.dumps(LLAMA | {"num_key_value_heads": 5}), ["config.json: heads must be a multiple of kv_heads"]),
        (json.dumps(LLAMA | {"hidden_size": None}), ["has no hidden_size"]),
        (json.dumps(LLAMA | {"tie_word_embeddings": 1}), ["tie_word_embeddings must be true or false", "got 1"]),
        (
            json.dumps(BARE_QWEN | {"sliding_window": 512}),
            ["sliding_window 512 but no use_sliding_window", "'qwen2'", "layer_types"],
        ),
        (
            json.dumps(BARE_QWEN | {"sliding_window": 512, "use_sliding_window": True}),
            ["but no max_window_layers", "'qwen2'"],
        ),
        (json.dumps(LLAMA | {"sliding_window": 512}), ["sliding_window 512", "type 'llama' do not read", "model_type"]),
        (json.dumps(MOE | {"mlp_only_layers": list(range(16))}), ["16 of 32 layers without experts", "--layers"]),
        (json.dumps(MOE | {"decoder_sparse_step": 2}), ["16 of 32 layers without experts"]),
        (json.dumps(LLAMA | {"hidden_size": -1}), ["hidden_size must be", "-1"]),
        (json.dumps(LLAMA | {"hidden_size": 1e400}), ["hidden_size must be", "inf"]),
        (json.dumps(LLAMA | {"kv_lora_rank": 512}), ["multi-latent attention", "--kv-heads"]),
        (json.dumps(LLAMA | {"layer_types": ["linear_attention"] * 32}), ["layers of kind linear_attention"]),
        (json.dumps(LLAMA | {"layer_types": ["full_attention"]}), ["layer_types", "32 layers"]),
        (
            json.dumps(LLAMA | {"layer_types": ["sliding_attention"] * 32}),
            ["layer_types, which models of the type 'llama' do not read"],
        ),
        (json.dumps(LLAMA | {"num_experts": 8}), ["num_experts 8", "do not read"]),
        (json.dumps(LLAMA | {"model_type": "bloom"}), ["'bloom'", "ALiBi"]),
        (json.dumps(LLAMA | {"model_type": "mamba"}), ["'mamba'", "softmax"]),
        (json.dumps(LLAMA | {"model_type": "novel"}), ["'novel'", "not known here", "--heads"]),
    ],
)
def test_a_bad_file_is_one_line_with_its_name(tmp_path: Path, content: str, words: list[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        find_model(str(file))
    text = str(caught.value)
    assert str(file) in text and "\n" not in text
    assert not [word for word in words if word not in text], text


@pytest.mark.parametrize(
    ("name", "words", "never"),
    [
        ("lama3-8b", ["did you mean 'llama3-8b'?"], []),
        ("Llama-3-8B", ["did you mean 'llama3-8b'?"], []),
        ("qwen3-8b", ["config.json", "llama3-70b"], ["did you mean"]),
        ("llama3-80b", ["config.json"], ["did you mean"]),
        ("meta-llama/Llama-3.1-8B", ["nothing is downloaded", "config.json"], ["did you mean"]),
        ("nowhere/config.json", ["no such file", "config.json"], ["did you mean", "downloaded"]),
        ("./model", ["no such file or folder"], ["did you mean"]),
    ],
)
def test_unknown_names_are_told_the_way_out(name: str, words: list[str], never: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        find_model(name)
    text = str(caught.value)
    assert repr(name) in text
    assert not [word for word in words if word not in text], text
    assert not [word for word in never if word in text], text


def test_a_model_by_its_numbers() -> None:
    found = make_model(32, 8, 128, 4096, 32)
    preset = PRESETS["llama3-8b"]
    assert (found.shape, found.parameters, found.masks()) == (preset.shape, preset.parameters, preset.masks())
    assert make_model(32, 8, 128, None, 32).model.hidden == 4096


def test_reading_a_file_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = (
        f"import sys; from flexcp.models.find import find_model; find_model({str(written(tmp_path, LLAMA))!r}); "
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1; got 0"),
        (
            {"hidden_size": 2100, "num_attention_heads": 16, "num_key_value_heads": 4},
            "16 heads do not divide a hidden size of 2100",
        ),
    ],
)
def test_numbers_that_make_no_model_are_named(tmp_path: Path, changed: dict[str, int], words: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | changed))
    with pytest.raises(ValueError, match=words):
        find_model(str(file))
