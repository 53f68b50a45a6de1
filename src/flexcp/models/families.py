"""Families: how models of each ``model_type`` use the fields of a ``config.json``, according to Transformers.

A family says how its layers are built where no field says so (two or three matrices of a feed-forward), the names of
its fields, what a missing field means, and which fields it ignores. The table contains only families whose Transformers
models were compared with what is read from their files (tests/models/test_families.py). Every other ``model_type`` is
refused, so that a new type is never read as if it were a Llama. Defaults of families are not copied here: the user has
to write such a field into the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Experts:
    """The names of a family's fields for experts; of several names for one field, the first one present is read.

    ``count``, ``width`` and ``per_token`` are the fields for the number of experts of a layer, their width, and how
    many a token uses. ``shared_count`` and ``shared_width`` are those for experts that all tokens use: how many, or
    their width in all. ``dense_first`` is how many of the first layers have no experts if the file does not say it in
    ``first_k_dense_replace``; with None that field is not read.
    """

    count: tuple[str, ...] = ("num_experts",)
    width: tuple[str, ...] = ("moe_intermediate_size",)
    per_token: tuple[str, ...] = ("num_experts_per_tok",)
    shared_count: str | None = None
    shared_width: str | None = None
    always: int | None = None
    """How many experts a token uses, if this number is fixed in the model."""
    dense_first: int | None = None
    sparse_step: bool = False
    """Whether ``mlp_only_layers`` and ``decoder_sparse_step`` say which layers have no experts."""
    kinds: bool = False
    """Whether ``mlp_layer_types``, if given, says which layers have no experts, before all other fields."""


@dataclass(frozen=True)
class Family:
    """How models of one ``model_type`` use their fields.

    ``kv_heads`` says what a file without a number of KV heads means: as many as query heads (``heads``), or a default
    of the family, which the user is asked to write into the file (``asked``). With ``never`` the field is not read, and
    there are as many as query heads; ``multi_query`` and ``falcon`` are the rules of GPT BigCode and Falcon, which
    depend on switches. ``head_dim`` is alike, with ``even`` for hidden / heads. ``gated`` feed-forwards have three
    matrices, others two. ``tied`` says that embedding and head are one matrix if the file does not say it. ``windows``
    says which layers have a window: none (``never``), all, all but one in ``every`` (``pattern``), those from
    ``max_window_layers`` on (``from``), or those that ``layer_types`` names (``listed``). ``width`` is the field for
    the width of feed-forwards.
    """

    kv_heads: Literal["heads", "asked", "never", "multi_query", "falcon"] = "heads"
    head_dim: Literal["even", "asked", "never"] = "even"
    gated: bool = True
    tied: bool = False
    windows: Literal["never", "all", "pattern", "from", "listed"] = "never"
    window_switch: bool = False
    """Whether there are windows only if ``use_sliding_window`` is true."""
    window_asked: bool = False
    """Whether the family has a window by default, so that a file without ``sliding_window`` is refused."""
    every: int = 0
    """In a pattern, one of this many consecutive layers has no window."""
    full_first: bool = False
    """Whether the layer without a window is the first of them, and not the last."""
    every_field: bool = False
    """Whether the field ``sliding_window_pattern`` replaces ``every``."""
    layer_types: bool = False
    """Whether the model reads ``layer_types``."""
    experts: Experts | None = None
    sizes: Literal["new", "gpt", "any"] = "new"
    """The names of the fields for heads, width and layers: num_attention_heads, n_head, or whichever is given."""
    width: str = "intermediate_size"
    fourfold: bool = False
    """Whether a missing width of the feed-forward is four times the hidden size."""


LLAMA = Family()
ASKED = replace(LLAMA, kv_heads="asked")
PLAIN = replace(LLAMA, gated=False)
GPT = Family("never", "never", gated=False, sizes="gpt", width="n_inner", fourfold=True)
GEMMA = Family("asked", "asked", tied=True)
MISTRAL = replace(ASKED, windows="all", window_asked=True)
QWEN2 = replace(ASKED, windows="from", window_switch=True, layer_types=True)
PATTERN = Family("asked", windows="pattern", every=4, window_asked=True, layer_types=True)
LOCAL = Experts(("num_local_experts", "num_experts"), ("intermediate_size",))
SPARSE = Experts(sparse_step=True)
QWEN3 = Experts(("num_experts", "num_local_experts"), sparse_step=True)

UNKNOWN = Family(sizes="any")
"""How the heads of a configuration in memory are read if its ``model_type`` has no family."""

FAMILIES: dict[str, Family] = {
    "apertus": PLAIN,
    "arcee": PLAIN,
    "bitnet": replace(ASKED, head_dim="never"),
    "codegen": GPT,
    "cohere": replace(LLAMA, tied=True),
    "cohere2": replace(PATTERN, kv_heads="heads", tied=True, every_field=True),
    "cohere2_moe": Family(
        head_dim="asked",
        tied=True,
        windows="listed",
        window_asked=True,
        layer_types=True,
        experts=Experts(width=("intermediate_size",), shared_count="num_shared_experts", dense_first=0, kinds=True),
    ),
    "cwm": replace(PATTERN, head_dim="asked", full_first=True),
    "dots1": replace(
        ASKED,
        windows="from",
        window_asked=True,
        layer_types=True,
        experts=Experts(("n_routed_experts",), shared_count="n_shared_experts", dense_first=0),
    ),
    "ernie4_5": Family("asked", "asked", tied=True),
    "exaone4": replace(PATTERN, every_field=True),
    "exaone_moe": replace(
        ASKED,
        windows="listed",
        window_asked=True,
        layer_types=True,
        experts=Experts(shared_count="num_shared_experts", dense_first=1, kinds=True),
    ),
    "falcon": Family("falcon", "never", gated=False, tied=True, width="ffn_hidden_size", fourfold=True),
    "flex_olmo": replace(LLAMA, experts=replace(LOCAL, count=("num_experts",))),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, windows="pattern", every=2, window_asked=True, layer_types=True),
    "gemma3_text": replace(GEMMA, windows="pattern", every=6, every_field=True, window_asked=True, layer_types=True),
    "glm": Family("asked", "asked"),
    "glm4": Family("asked", "asked"),
    "glm4_moe": replace(ASKED, experts=Experts(("n_routed_experts",), shared_count="n_shared_experts", dense_first=1)),
    "gpt2": replace(GPT, tied=True),
    "gpt_bigcode": replace(GPT, kv_heads="multi_query", tied=True),
    "gpt_neox": Family("never", "never", gated=False),
    "gpt_oss": replace(
        PATTERN,
        head_dim="asked",
        every=2,
        experts=replace(LOCAL, per_token=("num_experts_per_tok", "experts_per_token")),
    ),
    "gptj": GPT,
    "granite": LLAMA,
    "granite_swa": replace(PATTERN, tied=True, full_first=True),
    "granitemoe": replace(LLAMA, experts=LOCAL),
    "granitemoeshared": replace(LLAMA, experts=replace(LOCAL, shared_width="shared_intermediate_size")),
    "helium": Family("asked", "never"),
    "hunyuan_v1_dense": replace(LLAMA, head_dim="asked"),
    "hyperclovax": LLAMA,
    "jais2": Family("heads", "asked", gated=False),
    "llama": LLAMA,
    "mellum": Family(
        "asked",
        "asked",
        windows="listed",
        window_asked=True,
        layer_types=True,
        experts=Experts(("num_experts", "num_local_experts"), kinds=True),
    ),
    "minimax_m2": Family("asked", "asked", experts=LOCAL),
    "ministral": replace(MISTRAL, head_dim="asked", layer_types=True),
    "ministral3": replace(MISTRAL, head_dim="asked", window_asked=False),
    "mistral": MISTRAL,
    "mixtral": replace(ASKED, windows="all", experts=LOCAL),
    "nanochat": PLAIN,
    "nemotron": replace(PLAIN, kv_heads="asked"),
    "olmo": LLAMA,
    "olmo2": LLAMA,
    "olmo3": replace(PATTERN, kv_heads="heads"),
    "olmoe": replace(LLAMA, head_dim="never", experts=replace(LOCAL, count=("num_experts",))),
    "opt": Family("never", "never", gated=False, tied=True, width="ffn_dim"),
    "persimmon": Family("never", "never", gated=False),
    "phi": PLAIN,
    "phi3": replace(LLAMA, windows="all"),
    "phimoe": replace(ASKED, windows="all", experts=replace(LOCAL, always=2)),
    "qwen2": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen2_moe": replace(
        QWEN2, windows="listed", experts=replace(SPARSE, shared_width="shared_expert_intermediate_size")
    ),
    "qwen2_vl_text": QWEN2,
    "qwen3": replace(QWEN2, head_dim="asked"),
    "qwen3_moe": replace(ASKED, windows="all", window_switch=True, experts=QWEN3),
    "qwen3_vl_moe_text": replace(ASKED, tied=True, experts=QWEN3),
    "qwen3_vl_text": Family("asked", "asked"),
    "seed_oss": Family("asked", "asked"),
    "smollm3": replace(QWEN2, windows="listed", tied=True),
    "solar_open": Family("asked", "asked", experts=Experts(("n_routed_experts",), shared_count="n_shared_experts")),
    "stablelm": replace(ASKED, head_dim="never"),
    "starcoder2": replace(ASKED, gated=False, tied=True, windows="all"),
    "vaultgemma": replace(GEMMA, windows="pattern", every=2, window_asked=True, layer_types=True),
}

_ALIBI = "its attention has a bias by distance (ALiBi), which flexcp does not run"
STATE = "not all of its layers are softmax attention"
"""Why types with recurrent layers, convolutions or linear attention are refused."""
REFUSED = {
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "diffllama": "its layers subtract two attentions from each other",
    "doge": "its attention has a learned mask",
    "gpt_neo": "its local layers are windows that only attention_types names",
    "llama4_text": "its layers see chunks",
    "mllama": "some of its layers attend to images alone",
    "paligemma": "its prompts are seen from both sides",
    "recurrent_gemma": STATE,
    **dict.fromkeys(
        ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"), STATE
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_next", "rwkv", "xlstm", "zamba", "zamba2"),
        STATE,
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), STATE),
    **dict.fromkeys(("bert", "roberta", "electra", "modernbert"), "it is an encoder"),
}
"""Known types that are refused, and why."""
