"""The verification matrix: every strategy x mask x cluster x head arrangement, with varying lengths,
layouts and extras.

A :class:`Cell` says what to run, and a :class:`Case` has its plan too: cells are made by the thousand and planned where
they run. ``full_matrix`` is the whole product in float64, with a document of several thousand tokens in every 37th
cell. ``low_precision_matrix`` has each strategy, mask and cluster once, with head arrangements and dtypes in turn.
``pairwise_matrix``, for tests, is the smallest part in which every two of strategy, mask and cluster meet. All other
settings are drawn from the cell's number; every second case may keep received keys for the backward. ``sampled`` takes
a part of a matrix in which all factors occur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2s
from itertools import product

import numpy as np
import torch.distributed as dist

from flexcp import masks
from flexcp.clusters import Cluster, cluster
from flexcp.masks import Mask
from flexcp.measure.verify import Options, Verdict, verify_on
from flexcp.plan.plan import Plan
from flexcp.planner import Planner

CLUSTERS = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8), (2, 2), (2, 3))
OURS = (
    "auto",
    "dp",
    "ring",
    "zigzag",
    "allgather",
    "ulysses",
    "usp",
    "blocks",
    "grouped",
    "tolerant",
    "groups",
    "hypergraph",
)
RIVALS = ("dhp", "fcp", "dcp", "minheap", "pow2", "hdp", "wlb")
STRATEGIES = OURS + RIVALS
PLACE_TOKENS = ("dp", "grouped", "groups", *(rival for rival in RIVALS if rival != "fcp"))
ANY_LAYOUT = ("auto", "blocks", "tolerant", "fcp")
HEADS = ("MHA", "GQA", "MQA")
LAYOUTS = ("free", "equal", "contiguous", "zigzag", "index map")
LOW_PRECISION = ("bfloat16", "float32", "float16")
DTYPES = ("float64", *LOW_PRECISION)
LONG, EVERY = (3001, 1, 640), 37
"""Lengths with a document of several thousand tokens, and the distance between cells of a matrix that have them."""

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


EXTRAS = {
    "lengths": 5,
    "layout": len(LAYOUTS),
    "softcap": 4,
    "sinks": 7,
    "lse gradient": 3,
    "kernel": 11,
    "value size": 3,
    "kept keys": 2,
    "method": 4,
}
"""The settings that are drawn for each cell, and how many values each has."""


def drawn(number: int, extra: str) -> int:
    """Return the value of an extra in a cell.

    Values are drawn from a hash: as remainders of the cell's number, some would never meet, because numbers and factors
    have common periods.
    """
    return int.from_bytes(blake2s(f"{extra} {number}".encode()).digest()[:8]) % EXTRAS[extra]


@dataclass(frozen=True)
class Cell:
    """What to run: a number that determines the extras, and one value of every factor."""

    number: int
    strategy: str
    mask: str
    shape: tuple[int, int]
    heads: str
    dtype: str
    lengths: tuple[int, ...]

    @property
    def cluster(self) -> str:
        return "{}x{}".format(*self.shape)

    @property
    def layout(self) -> str:
        """The drawn layout, or another one if the strategy does not support it."""
        layout = LAYOUTS[drawn(self.number, "layout")]
        if self.strategy in PLACE_TOKENS and layout not in ("free", "equal"):
            return "free"
        return "zigzag" if layout == "index map" and self.strategy not in ANY_LAYOUT else layout


@dataclass(frozen=True)
class Case:
    """A cell with a readable name, its plan and how to run it."""

    cell: Cell
    name: str
    plan: Plan
    options: Options


def full_matrix() -> list[Cell]:
    """Return every strategy x mask x cluster x head arrangement in float64 (rivals:
    one head arrangement each, in turn).
    """
    found: list[Cell] = []
    for strategy, mask, shape in product(STRATEGIES, MASKS, CLUSTERS):
        for heads in HEADS if strategy in OURS else HEADS[len(found) % 3 :][:1]:
            number = len(found)
            found.append(_cell(number, strategy, mask, shape, heads, "float64", long=number % EVERY == EVERY // 2))
    return found


def low_precision_matrix() -> list[Cell]:
    """Return every strategy x mask x cluster, each with one head arrangement and dtype.

    Every strategy, mask and cluster meets all head arrangements and dtypes.
    """
    found: list[Cell] = []
    for (i, strategy), (j, mask), (k, shape) in product(enumerate(STRATEGIES), enumerate(MASKS), enumerate(CLUSTERS)):
        number, heads, dtype = len(found), HEADS[(i + j + k) % 3], LOW_PRECISION[(i + 2 * j + k // 3) % 3]
        found.append(_cell(number, strategy, mask, shape, heads, dtype, long=number % EVERY == EVERY // 2))
    return found


def pairwise_matrix() -> list[Cell]:
    """Return a Latin square in which every two of strategy, mask and cluster meet; all other settings vary.
    Six ranks are two nodes only.
    """
    clusters = [shape for shape in CLUSTERS if shape != (1, 6)]
    return [
        _cell(n, strategy, mask, clusters[(i + j) % len(clusters)], HEADS[n % 3], DTYPES[n // 3 % len(DTYPES)])
        for i, strategy in enumerate(STRATEGIES)
        for j, mask in enumerate(MASKS)
        for n in [i * len(MASKS) + j]
    ]


def sampled(cells: list[Cell], one_in: int) -> list[Cell]:
    """Return one in ``one_in`` cells in their order.

    They are drawn, because a fixed stride that divides a factor's period would never reach all its values.
    """
    drawn = np.random.default_rng(0).permutation(len(cells))[: -(-len(cells) // one_in)]
    return [cells[i] for i in sorted(drawn.tolist())]


def verify_cases(group: dist.ProcessGroup, cases: list[Case]) -> list[Verdict | None]:
    """Run cases one after the other on the ranks of ``group``."""
    return [verify_on(group, case.plan, case.options) for case in cases]


def case_of(cell: Cell) -> Case:
    """Plan a cell."""
    number, where, lengths = cell.number, cluster("cpu", *cell.shape), list(cell.lengths)
    planner, name = _planner(cell.strategy, where, cell.heads, cell.dtype, number)
    layout = "free" if cell.layout == "equal" else cell.layout
    plan = planner(
        lengths,
        [MASKS[cell.mask](n) for n in lengths],
        layout=_index_map(sum(lengths), where.ranks) if layout == "index map" else layout,
        tokens="equal" if cell.layout == "equal" else "balanced",
        pad_to=4 if cell.layout == "equal" else None,
    )
    options = Options(
        seed=number,
        softcap=None if drawn(number, "softcap") else 3.0,
        sinks=drawn(number, "sinks") == 0,
        lse_gradient=drawn(number, "lse gradient") == 0,
        # In low precision the allowed error is based on the reference kernel, so that kernel is not tested there.
        kernel="reference" if drawn(number, "kernel") == 0 and cell.dtype == "float64" else "cpu",
    )
    kept = ", keys kept" if plan.programs[0][1].keys_kept else ""
    title = f"{name} {cell.mask} {cell.cluster} {cell.heads} {cell.layout} {cell.dtype} {lengths}{kept}"
    return Case(cell, title, plan, options)


def _cell(
    number: int, strategy: str, mask: str, shape: tuple[int, int], heads: str, dtype: str, long: bool = False
) -> Cell:
    lengths = LONG if long else _lengths(number, shape[0] * shape[1])
    return Cell(number, strategy, mask, shape, heads, dtype, lengths)


def _planner(strategy: str, where: Cluster, heads: str, dtype: str, number: int) -> tuple[Planner, str]:
    ranks = where.ranks
    q, kv = {"MHA": (ranks, ranks), "GQA": (2 * ranks, ranks), "MQA": (ranks, 1)}[heads]
    name, tolerance = strategy, None
    if strategy == "grouped":
        degree = max(d for d in range(1, ranks + 1) if ranks % d == 0 and (d < ranks or ranks < 3))
        name = f"{('ring', 'zigzag', 'allgather', 'ulysses')[drawn(number, 'method')]}:{degree}"
    if strategy in ("fcp", "dcp"):
        name = f"{strategy}:16"  # documents here are shorter than the default blocks
    if strategy == "tolerant":
        name, tolerance = "blocks", 0.05
    planner = Planner(
        q,
        kv,
        head_dim=8,
        v_head_dim=(8, 4, 12)[drawn(number, "value size")],
        dtype=dtype,
        cluster=where,
        strategy=name,
        compute_tolerance=tolerance,
        keep_kv=(1 << 30) * drawn(number, "kept keys"),
    )
    return planner, name


def _lengths(number: int, ranks: int) -> tuple[int, ...]:
    """Return ragged lengths (with 1, 2 and ranks-1), only length 1, one prime length, or fewer tokens than ranks."""
    sets = ((1, 2, max(1, ranks - 1), 37, 113, 61, 7), (1,) * 11, (1, 211), (2, 1), (83, 3, 1, 90, 17))
    return sets[drawn(number, "lengths")]


def _index_map(tokens: int, ranks: int) -> list[list[int]]:
    order = np.random.default_rng(tokens).permutation(tokens)
    return [part.tolist() for part in np.array_split(order, ranks)]
