"""The verification matrix: every strategy x mask x cluster, with heads, lengths, layouts and extras cycled through.

``full_matrix`` is the whole product of strategy, mask, cluster and head arrangement; ``pairwise_matrix`` is the smallest part of
it in which every two of strategy, mask and cluster meet. The other factors run along with coprime strides; every second case may keep
received keys for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from flexcp import masks
from flexcp.clusters import Cluster, cluster
from flexcp.masks import Mask
from flexcp.measure.verify import Options, Verdict, verify_on
from flexcp.plan.plan import Plan
from flexcp.planner import Planner

CLUSTERS = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 7), (1, 8), (2, 2), (2, 3))
OURS = ("dp", "ring", "zigzag", "allgather", "ulysses", "usp", "blocks", "grouped", "tolerant", "groups")
RIVALS = ("minheap", "pow2", "hdp", "wlb")
STRATEGIES = OURS + RIVALS
PLACE_TOKENS = ("dp", "grouped", "groups", *RIVALS)
HEADS = ("MHA", "GQA", "MQA")
LAYOUTS = ("free", "equal", "contiguous", "zigzag", "index map")
LOW_PRECISION = ("bfloat16", "float32", "float16")
DTYPES = ("float64", *LOW_PRECISION)

MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: masks.full(),
    "causal": lambda n: masks.causal(),
    "window": lambda n: masks.window(9, 2),
    "lambda": lambda n: masks.lambda_(3, 11),
    "shared question": lambda n: masks.shared_question(3, 0.3),
    "blockwise": lambda n: masks.causal_blockwise(8, 2),
    "prefix": lambda n: masks.prefix(20),
    "modality": lambda n: masks.modality([(n // 4, n // 2), (n // 2, n - n // 5)], self_only=n % 2 == 0),
    # A staircase that leaves the first third of the rows without a key.
    "slices": lambda n: masks.from_slices(n, [(n // 3, n, 0, n // 2, None, -1), (n // 3, n, n // 2, n, -3, 5)]),
}


@dataclass(frozen=True)
class Case:
    """One cell: a name for people, the plan and how to run it."""

    name: str
    strategy: str
    mask: str
    cluster: str
    plan: Plan
    options: Options


def full_matrix(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Every strategy x mask x cluster x head arrangement (rivals: one head arrangement each, cycled)."""
    number = 0
    for strategy in STRATEGIES:
        for mask in MASKS:
            for shape in CLUSTERS:
                for heads in HEADS if strategy in OURS else HEADS[number % 3 :][:1]:
                    yield _case(number, strategy, mask, shape, heads, dtypes)
                    number += 1


def pairwise_matrix(dtypes: tuple[str, ...] = DTYPES) -> Iterator[Case]:
    """Every two of strategy, mask and cluster meet (a Latin square), everything else along the way."""
    for i, strategy in enumerate(STRATEGIES):
        for j, mask in enumerate(MASKS):
            number = i * len(MASKS) + j
            yield _case(number, strategy, mask, CLUSTERS[(i + j) % len(CLUSTERS)], HEADS[number % 3], dtypes)


def verify_cases(group: dist.ProcessGroup, cases: list[Case]) -> list[Verdict | None]:
    """Run cases one after the other on the ranks of ``group``."""
    return [verify_on(group, case.plan, case.options) for case in cases]


def _case(number: int, strategy: str, mask: str, shape: tuple[int, int], heads: str, dtypes: tuple[str, ...]) -> Case:
    where = cluster("cpu", *shape)
    lengths = _lengths(number, where.ranks)
    # Two layouts in five are free: most strategies place tokens themselves.
    layout = LAYOUTS[number % len(LAYOUTS)]
    if strategy in PLACE_TOKENS and layout not in ("free", "equal"):
        layout = "free"
    if layout == "index map" and strategy not in ("blocks", "tolerant"):
        layout = "zigzag"
    kind = dtypes[number // 3 % len(dtypes)]
    planner, name = _planner(strategy, where, heads, kind, number)
    rules = [MASKS[mask](n) for n in lengths]
    plan = planner(
        lengths,
        rules,
        layout=_index_map(sum(lengths), where.ranks)
        if layout == "index map"
        else "free"
        if layout == "equal"
        else layout,
        tokens="equal" if layout == "equal" else "balanced",
        pad_to=4 if layout == "equal" else None,
    )
    options = Options(
        seed=number,
        softcap=3.0 if number % 4 == 1 else None,
        sinks=number % 7 == 3,
        lse_gradient=number % 3 == 0,
        # In low precision the rule is the reference kernel's own error: it is the yardstick there, not a candidate.
        kernel="reference" if number % 11 == 5 and kind == "float64" else "cpu",
    )
    kept = ", keys kept" if plan.programs[0][1].keys_kept else ""
    title = f"{name} {mask} {where.nodes}x{where.ranks_per_node} {heads} {layout} {kind} {lengths}{kept}"
    return Case(title, strategy, mask, f"{where.nodes}x{where.ranks_per_node}", plan, options)


def _planner(strategy: str, where: Cluster, heads: str, dtype: str, number: int) -> tuple[Planner, str]:
    ranks = where.ranks
    q, kv = {"MHA": (ranks, ranks), "GQA": (2 * ranks, ranks), "MQA": (ranks, 1)}[heads]
    name, tolerance = strategy, None
    if strategy == "grouped":
        degree = max(d for d in range(1, ranks + 1) if ranks % d == 0 and (d < ranks or ranks < 3))
        name = f"{('ring', 'zigzag', 'allgather', 'ulysses')[number % 4]}:{degree}"
    if strategy == "tolerant":
        name, tolerance = "blocks", 0.05
    planner = Planner(
        q, kv, head_dim=8, v_head_dim=(8, 4, 12)[number % 3], dtype=dtype, cluster=where, strategy=name, compute_tolerance=tolerance,
        keep_kv=(1 << 30) * (number % 2),
    )  # fmt: skip
    return planner, name


def _lengths(number: int, ranks: int) -> list[int]:
    """Ragged ones (with 1, 2 and ranks-1), only length 1, one prime length, fewer tokens than ranks."""
    sets = ([1, 2, max(1, ranks - 1), 37, 113, 61, 7], [1] * 11, [1, 211], [2, 1], [83, 3, 1, 90, 17])
    return sets[number // 2 % len(sets)]


def _index_map(tokens: int, ranks: int) -> list[list[int]]:
    order = np.random.default_rng(tokens).permutation(tokens)
    return [part.tolist() for part in np.array_split(order, ranks)]
