"""Random cases; a case depends on the campaign's seed and its number alone, so that each can be drawn again.

Most cases are small, because small ones reach the corners: documents of one token, ranks without tokens, rows without
keys. A few are so long that they can only be checked by ranges. Strategies that take seconds to plan are drawn rarely.
"""

from __future__ import annotations

import random
from typing import Any

from flexcp.fuzz.cases import Case, Layer, Run
from flexcp.fuzz.draw_masks import document_mask, named_mask

STRATEGIES = {
    "blocks": 20,
    "auto": 8,
    "groups": 8,
    "dp": 4,
    "ring": 6,
    "zigzag": 8,
    "allgather": 6,
    "ulysses": 6,
    "usp": 6,
    "fcp": 4,
    "dhp": 3,
    "minheap": 3,
    "pow2": 3,
    "hdp": 3,
    "wlb": 3,
    "dcp": 0.5,
    "hypergraph": 0.15,
}
"""The strategies, and how often each is drawn relative to the others."""
KEEP_LAYOUTS = ("auto", "ring", "zigzag", "allgather", "ulysses", "usp", "blocks", "fcp", "hypergraph")
BALANCED = ("blocks", "auto", "hypergraph")
"""Strategies that accept tolerances."""
SHAPES = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 7), (1, 8), (2, 1), (2, 2), (2, 3), (3, 1), (3, 3), (2, 8))
"""The clusters that are drawn: (nodes, ranks per node)."""
ON_RANKS = 8
"""Number of ranks that are started for cases on real ranks."""
HEADS = ((1, 1), (2, 1), (4, 2), (4, 4), (6, 3), (6, 2), (8, 1), (8, 8), (10, 5), (12, 4))
"""The attention shapes that are drawn: (query heads, KV heads)."""
DTYPES = ("float64", "float64", "float64", "bfloat16", "float32", "float16")


def draw(seed: int, number: int, most_ranks: int | None = None) -> Case:
    """Draw case ``number`` of a campaign.

    With ``most_ranks`` the case is for real ranks: it has at most that many ranks, and short documents.
    """
    rng = random.Random(f"{seed}/{number}")
    on_ranks = most_ranks is not None
    long = not on_ranks and rng.random() < 0.03
    strategy = rng.choices(list(STRATEGIES), list(STRATEGIES.values()))[0]
    nodes, each = rng.choice([shape for shape in SHAPES if most_ranks is None or shape[0] * shape[1] <= most_ranks])
    ranks = nodes * each
    lengths = _lengths(rng, ranks, long)
    heads, kv_heads = rng.choice(HEADS)
    if strategy in ("ulysses", "usp") and rng.random() < 0.8:  # they need enough heads for the ranks
        heads, kv_heads = rng.choice(((ranks, ranks), (2 * ranks, ranks), (ranks, 1)))
    machine: dict[str, Any] = {
        "name": rng.choice(("h100", "a100", "cpu", "gb200")),
        "nodes": nodes,
        "ranks_per_node": each,
    }
    if rng.random() < 0.25:
        machine["speeds"] = [rng.choice((0.5, 0.93, 1.0, 1.0, 1.2)) for _ in range(ranks)]
    attention: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": rng.choice((8, 8, 16)),
        "v_head_dim": rng.choice((8, 8, 4, 12)),
        "dtype": rng.choice(DTYPES),
    }
    if kv_heads == 1 and not on_ranks and rng.random() < 0.3:
        attention["latent"] = rng.choice((4, 16, 40))
    return Case(
        lengths,
        _layers(rng, lengths, long),
        machine,
        attention,
        *_told(rng, strategy, ranks, sum(lengths), max(lengths)),
        run=_run(rng, str(attention["dtype"])),
    )


def _lengths(rng: random.Random, ranks: int, long: bool) -> list[int]:
    if long:
        return [rng.choice((rng.randrange(1, 1 << 12), rng.randrange(1, 1 << 20))) for _ in range(rng.randrange(1, 6))]
    kind = rng.randrange(6)
    if kind == 0:
        return [1] * rng.randrange(1, 2 * ranks + 2)
    if kind == 1:
        return [rng.randrange(40, 160), *(rng.randrange(1, 5) for _ in range(rng.randrange(4)))]
    return [rng.choice((rng.randrange(1, 7), rng.randrange(1, 49))) for _ in range(rng.randrange(1, 8))]


def _layers(rng: random.Random, lengths: list[int], long: bool) -> list[Layer]:
    count = rng.choice((1, 1, 1, 1, 2, 3))
    found = []
    for name in ("one", "two", "three")[:count]:
        each = not long and rng.random() < 0.5
        words = [document_mask(rng, n) for n in lengths] if each else named_mask(rng, max(lengths))
        found.append(Layer(name, rng.choice((1, 1, 2, 9)), words, each))
    return found


def _told(
    rng: random.Random, strategy: str, ranks: int, tokens: int, longest: int
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the planner's options, the options of its call, and whether micro-batches are wanted.

    ``tokens`` are those of all documents, ``longest`` is the length of the longest one.
    """
    options: dict[str, Any] = {"strategy": strategy + _argument(rng, strategy, ranks)}
    call: dict[str, Any] = {}
    micro_batches = False
    wish = rng.choice(
        ("free", "free", "free", "equal", "priced", "cap", "micro", "memory", "contiguous", "zigzag", "map")
    )
    if wish == "equal":
        call = {"tokens": "equal", "pad_to": rng.choice((None, 1, 4, 16))}
    elif wish == "priced":
        call = {"tokens": "priced"}
    elif wish == "cap":
        options["max_tokens_per_rank"] = -(-tokens // ranks) + rng.randrange(20)
    elif wish == "micro":
        options["max_tokens_per_rank"] = -(-rng.randrange(longest, tokens + 1) // ranks) + rng.randrange(3)
        micro_batches = True
    elif wish == "memory":
        options["max_memory_per_rank"] = rng.choice((1, 10_000, 100_000, 1_000_000, 1 << 40))
    elif strategy in KEEP_LAYOUTS and wish in ("contiguous", "zigzag"):
        call = {"layout": wish}
    elif strategy in KEEP_LAYOUTS and wish == "map" and tokens < 1000:
        order = rng.sample(range(tokens), tokens)
        call = {"layout": [order[rank::ranks] for rank in range(ranks)]}
    if strategy in BALANCED and rng.random() < 0.3:
        options["compute_tolerance"] = rng.choice((0.0, 0.05, 0.5))
        if "layout" not in call and "tokens" not in call:
            options["token_tolerance"] = rng.choice((0.0, 0.05, 0.5))
    if strategy in BALANCED:
        options["effort"] = 1 if strategy == "hypergraph" else rng.choice((None, 0, 3))
    if rng.random() < 0.4:
        options["keep_kv"] = rng.choice((1, 5_000, 1 << 30))
    if rng.random() < 0.08:
        options["max_peers"] = rng.randrange(ranks + 1)
    return options, call, micro_batches


def _argument(rng: random.Random, strategy: str, ranks: int) -> str:
    degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
    degree = rng.choice(degrees)
    texts = {
        **dict.fromkeys(("ring", "zigzag", "allgather", "ulysses"), ("", "", f":{degree}", f":{degree}@load")),
        "usp": ("", f":{degree},{ranks // degree}", f":1,{degree}"),
        "minheap": (":1", ":5", ":16", ""),
        "fcp": (":8", ":16", ""),
        "dcp": (":16", ""),
        "dhp": ("", ":40"),
        "pow2": ("", ":40"),
        "hdp": ("", ":40"),
        "hypergraph": (":16", ""),
        "groups": (
            *("", "", ":team=1", ":slack=2+long=poured"),
            *(":slack=25+split=all", ":slack=0+split=shared", ":split=keys", ":slack=12+level=yes"),
        ),
    }
    return rng.choice(texts.get(strategy, ("",)))


def _run(rng: random.Random, dtype: str) -> Run:
    return Run(
        seed=rng.randrange(1 << 30),
        softcap=3.0 if rng.random() < 0.25 else None,
        sinks=rng.random() < 0.25,
        lse_gradient=rng.random() < 0.3,
        kernel="reference" if dtype == "float64" and rng.random() < 0.15 else "cpu",
        values=rng.choice(("normal", "normal", "normal", "large", "equal")) if dtype == "float64" else "normal",
        rounds_per_call=rng.choice((None, None, None, 0, 1, 2)),
        chunk_bytes=None,
    )
