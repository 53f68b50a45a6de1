"""CostModel: what work costs, as integers.

Planners compare costs, so a cost is an exact integer on every machine: nanoseconds, bytes, per mille. Three things cost
time:

- *attention*: pairs x query heads at an efficiency of the rank's peak, one for each direction (backward does 2.5 times
  the FLOPs). Kernels work in tiles of 128 rows and pay a fixed price for each, so rows count in whole tiles and short
  documents cost more than their area.
- *linear*: what a token costs in the rest of a layer, forward and backward, from a :class:`Model`.
- *links*: bytes at a port's bandwidth, a start-up per exchange and a little per message.

What compute and transfers cost each other on one device is a slowdown of both while they overlap, and how much depends
on the multiprocessors that compute leaves free: a larger *margin* makes transfers faster and attention slower.
:class:`Contention` is a row of that for each margin that was measured. Planners leave it out (it is nearly the same for
all their choices); the plan chooses a margin for every stage by it (:mod:`flexcp.schedule.execution`), the event
simulator applies it.

The defaults are analytic. Attention is fitted to what one H200 does: with 560 per mille of peak and 32,768 pairs (two
tiles of 128 x 128) for a tile of rows the formula gives 543, 376 and 190 TFLOP/s for 1, 16 and 64 causal documents in
16,384 tokens, where our Triton probe measured 546, 382 and 190, and FlexAttention's 411, 273 and 142 lie on the same
curve at 420 per mille. ``error_permille`` is what a predicted gain must exceed to be called one; how far off
predictions were is :mod:`flexcp.known_errors`'s to say. A model fitted on the user's machine has the same fields and
comes from a JSON file.

Besides nanoseconds there is one relative unit, the *pair*: the attention of one (query, key) pair over all heads in
both directions. With ``pairs_per_token`` a planner prices compute and tokens in one number,
``load = area + tokens * pairs_per_token``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, astuple, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import Cluster
from flexcp.io.plain_values import shown
from flexcp.shape import Shape

Ints = NDArray[np.int64]
TILE_ROWS = 128

PEAK_PERMILLE = {"bfloat16": 1000, "float16": 1000, "float32": 500, "float64": 62}
"""Tensor-core peak of a dtype against bf16 (float32 as TF32), as on an A100 or H100."""

LARGEST = 2**62
FORMAT = "flexcp-cost-1"


@dataclass(frozen=True)
class Model:
    """A transformer as far as cost goes: the width of the stream, layers,
    and a gated feed-forward of which a token uses some copies.
    """

    name: str
    hidden: int
    layers: int
    feed_forward: int
    experts_active: int = 1

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "feed_forward", "experts_active"):
            _check_number("model", field, getattr(self, field), 1)

    def linear_flops_per_token(self, shape: Shape) -> int:
        """Forward FLOPs of one token in one layer outside attention:
        projections and the feed-forward's three matrices.
        """
        projections = self.hidden * (shape.heads + shape.kv_heads) * (shape.head_dim + shape.v_head_dim)
        return 2 * (projections + 3 * self.hidden * self.feed_forward * self.experts_active)


def dense_model(shape: Shape) -> Model:
    """The model assumed when none is given: hidden = heads x head_dim, a gated feed-forward of 3.5 times that."""
    hidden = shape.heads * shape.head_dim
    return Model("dense", hidden, layers=1, feed_forward=max(1, 7 * hidden // 2))


@dataclass(frozen=True)
class Contention:
    """Attention that leaves ``margin`` multiprocessors free, and a transfer beside it, per mille of either alone.

    ``forward`` and ``backward`` are how long attention takes while a transfer is under way, ``forward_alone`` and
    ``backward_alone`` how long with nothing under way, against attention that takes every multiprocessor; ``link`` is
    how fast a transfer is beside attention.
    """

    margin: int
    forward: int
    backward: int
    forward_alone: int
    backward_alone: int
    link: int

    def __post_init__(self) -> None:
        least = {"margin": 0, "forward_alone": 1000, "backward_alone": 1000, "link": 1}
        least |= {"forward": self.forward_alone, "backward": self.backward_alone}
        for field, low in least.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or (isinstance(low, int) and value < low):
                raise ValueError(
                    f"a row of contention needs {field} as a whole number of at least {low}; got {shown(value)}"
                )

    def compute(self, backward: bool) -> tuple[int, int]:
        """How long attention takes in a direction: (while a transfer is under way, with nothing under way)."""
        return (self.backward, self.backward_alone) if backward else (self.forward, self.forward_alone)


H200_CONTENTION = (
    Contention(0, 9561, 35765, 1000, 1000, 884),
    Contention(4, 11643, 22067, 1010, 1000, 884),
    Contention(8, 9540, 21125, 1046, 1027, 884),
    Contention(16, 1135, 1098, 1103, 1079, 884),
    Contention(24, 1241, 1187, 1167, 1168, 884),
)
"""An H200 with a transfer of 16 blocks, as NCCL has inside a node, beside the ``cute`` kernel. This and the next are
what
``flexcp.measure.calibrate`` makes of the table in docs/results/kernels.md.
"""
H200_CONTENTION_ACROSS = (
    Contention(0, 9167, 40882, 1000, 1000, 890),
    Contention(4, 1018, 1000, 1009, 1000, 890),
    Contention(8, 1052, 1028, 1042, 1024, 890),
    Contention(16, 1125, 1079, 1106, 1079, 890),
    Contention(24, 1197, 1167, 1186, 1164, 890),
)
"""The same with a transfer of 4 blocks, as NCCL has across nodes."""
NO_CONTENTION = (Contention(0, 1000, 1000, 1000, 1000, 1000),)
"""Compute and transfers that do not slow each other: CPU ranks whose kernel times were measured with all
of them running.
"""
CONTENTIONS = ("contention", "contention_across")
_OLD_FIELDS = ("overlap_forward", "overlap_backward", "overlap_link")
OLD_MARGIN, OLD_DEFAULT = 16, (1141, 1160, 930)
"""Cost models once described one margin, by three fields with these defaults."""


@dataclass(frozen=True)
class CostModel:
    """Efficiencies are per mille of a rank's peak or of a link's bandwidth;
    ``model=None`` stands for :func:`dense_model`.

    ``row_tile_pairs`` is the fixed price of 128 rows of one head in pairs, ``kernel_ns`` that of starting a kernel,
    ``message_ns`` that of one more peer in an exchange. ``contention`` is what compute and transfers inside a node cost
    each other, by ascending margins from 0 on (the default is an H200's), ``contention_across`` the same of transfers
    that only cross nodes, for the same margins (None: an H200's beside an H200's, else like ``contention``).
    ``crowding`` is what a port loses, in per mille, for each further message that arrives there in the same call: 0,
    because no rounds were measured to be faster than one call (docs/results/communication.md). ``token_bytes`` is what
    a token occupies in a layer's activations, 0 when nobody measured it.
    """

    name: str = "analytic"
    forward_efficiency: int = 560
    backward_efficiency: int = 500
    linear_efficiency: int = 700
    link_efficiency: int = 800
    row_tile_pairs: int = 32_768
    kernel_ns: int = 5_000
    message_ns: int = 1_000
    error_permille: int = 80
    model: Model | None = None
    token_bytes: int = 0
    contention: tuple[Contention, ...] = H200_CONTENTION
    contention_across: tuple[Contention, ...] | None = None
    crowding: int = 0

    def __post_init__(self) -> None:
        for field in ("forward_efficiency", "backward_efficiency", "linear_efficiency", "link_efficiency"):
            _check_number("cost model", field, getattr(self, field), 1)
        for field in ("row_tile_pairs", "kernel_ns", "message_ns", "error_permille", "token_bytes", "crowding"):
            _check_number("cost model", field, getattr(self, field), 0)
        margins, others = ([row.margin for row in self.rows_beside(across)] for across in (False, True))
        if margins[:1] != [0] or any(a >= b for a, b in pairwise(margins)):
            raise ValueError(
                f"a cost model's contention has a row for margin 0, then larger ones; got margins {margins}"
            )
        if margins != others:
            raise ValueError(
                f"a cost model's contention and contention_across are for the same margins; got {margins} and {others}"
            )

    def rows_beside(self, across: bool) -> tuple[Contention, ...]:
        """Contention with transfers inside a node, or with such as only cross nodes."""
        if not across:
            return self.contention
        if self.contention_across is not None:
            return self.contention_across
        return H200_CONTENTION_ACROSS if self.contention == H200_CONTENTION else self.contention

    # --- attention ----------------------------------------------------------------------------------------------------

    def row_tiles_work(self, rows: Ints) -> Ints:
        """Pairs that stand for the fixed price of so many rows of one head."""
        return np.asarray(-(-rows // TILE_ROWS) * self.row_tile_pairs)

    def attention_ns(self, work: Ints, shape: Shape, cluster: Cluster, backward: bool) -> Ints:
        """Time of each rank for ``work[rank]`` pairs x query heads, the price of row tiles included."""
        efficiency = self.backward_efficiency if backward else self.forward_efficiency
        flops = (5 if backward else 2) * (shape.head_dim + shape.v_head_dim)
        return _times(work, flops, efficiency, shape, cluster)

    # --- the rest of a layer ------------------------------------------------------------------------------------------

    def linear_flops(self, shape: Shape) -> int:
        """Forward FLOPs of one token in the rest of one layer."""
        return (self.model or dense_model(shape)).linear_flops_per_token(shape)

    def linear_ns(self, tokens: Ints, shape: Shape, cluster: Cluster) -> Ints:
        """Time of each rank for ``tokens[rank]`` in the rest of one layer, forward and backward (twice the FLOPs)."""
        return _times(tokens, 3 * self.linear_flops(shape), self.linear_efficiency, shape, cluster)

    def head_ns(self, tokens: Ints, flops_per_token: int, shape: Shape, cluster: Cluster) -> Ints:
        """Time of each rank for the vocabulary's projection of ``tokens[rank]``, forward and backward."""
        return _times(tokens, 3 * flops_per_token, self.linear_efficiency, shape, cluster)

    def pairs_per_token(self, shape: Shape) -> int:
        """How many attention pairs the rest of a layer costs per token, forward and backward."""
        forward, backward = self.forward_efficiency, self.backward_efficiency
        attention = 2 * shape.heads * (shape.head_dim + shape.v_head_dim)
        # linear * 3 / linear_efficiency over attention * (1 / forward + 2.5 / backward)
        above = self.linear_flops(shape) * 3 * 2 * forward * backward
        return max(1, above // (attention * self.linear_efficiency * (2 * backward + 5 * forward)))

    # --- links --------------------------------------------------------------------------------------------------------

    def link_ns(self, size: Ints, mbps: int) -> Ints:
        """Time of ``size`` bytes through a port of ``mbps``, start-up not included."""
        return _divided_up(size, 1_000_000, mbps * self.link_efficiency)

    # --- files --------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        given = {name: rows for name in CONTENTIONS if (rows := getattr(self, name)) is not None}
        rows = {name: [list(astuple(row)) for row in rows] for name, rows in given.items()}
        return {"format": FORMAT, **asdict(self), **rows}

    def version_1(self) -> dict[str, Any]:
        """The fields as plans hashed them when a cost model described one margin."""
        found = asdict(self)
        for name in (*CONTENTIONS, "crowding"):
            del found[name]
        return {**found, **_one_margin(self.contention)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CostModel:
        """The cost model of :meth:`to_json`'s values; what is missing has its default."""
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            raise ValueError(f'this is no cost model: it must be a JSON object with "format": "{FORMAT}"')
        given = {key: value for key, value in values.items() if key != "format"}
        given["contention"] = _read_contention(given)
        if given.get("contention_across") is not None:
            given["contention_across"] = _rows(given, "contention_across")
        _check_fields(cls, given, "cost model")
        model = given.get("model")
        if model is not None:
            if not isinstance(model, Mapping):
                raise ValueError(f"a cost model's model is null or an object; got {shown(model)}")
            _check_fields(Model, model, "model")
            given["model"] = Model(**model)
        return cls(**given)


def _read_contention(given: dict[str, Any]) -> tuple[Contention, ...]:
    """The rows of a file; the three fields of an older one, which are taken out,
    stand for one margin of the default's.
    """
    old = {name: given.pop(name) for name in _OLD_FIELDS if name in given}
    if "contention" not in given:
        known = _one_margin(H200_CONTENTION)
        described = {**known, **old}
        if described == known:
            return H200_CONTENTION
        forward, backward, link = (described[name] for name in _OLD_FIELDS)
        if (forward, backward, link) == (1000, 1000, 1000):
            return NO_CONTENTION
        found = Contention(OLD_MARGIN, forward, backward, forward, backward, link)
        return tuple(found if row.margin == OLD_MARGIN else row for row in H200_CONTENTION)
    return _rows(given, "contention")


def _rows(given: dict[str, Any], name: str) -> tuple[Contention, ...]:
    rows = given[name]
    size = len(fields(Contention))
    if not isinstance(rows, list | tuple) or any(not isinstance(r, list | tuple) or len(r) != size for r in rows):
        raise ValueError(f"a cost model's {name} is a list of rows of {size} numbers; got {shown(rows)}")
    return tuple(Contention(*row) for row in rows)


def row_for(rows: Sequence[Contention], margin: int) -> Contention:
    """The row of the largest margin that was measured and is not over ``margin``."""
    return [row for row in rows if row.margin <= margin][-1]


def _one_margin(rows: Sequence[Contention]) -> dict[str, int]:
    """The three fields by which cost models once described one margin;
    the default's are those of the default of then.
    """
    if tuple(rows) == H200_CONTENTION:
        return dict(zip(_OLD_FIELDS, OLD_DEFAULT, strict=True))
    row = next((row for row in rows if row.margin == OLD_MARGIN), rows[0])
    return dict(zip(_OLD_FIELDS, (row.forward, row.backward, row.link), strict=True))


def _times(amount: Ints, flops_each: int, efficiency: int, shape: Shape, cluster: Cluster) -> Ints:
    """Nanoseconds of each rank for its amount of work, rounded up; GFLOP/s are FLOPs per nanosecond."""
    # Efficiency, dtype and speed are per mille.
    peak = cluster.gflops * efficiency * PEAK_PERMILLE[shape.dtype]
    if len(set(cluster.rank_speeds)) == 1:
        return _divided_up(amount, flops_each * 10**9, peak * cluster.rank_speeds[0])
    return _exactly_divided_up(amount, flops_each * 10**9, peak * np.array(cluster.rank_speeds, object))


def _divided_up(amount: Ints, numerator: int, denominator: int) -> Ints:
    """``amount * numerator / denominator`` rounded up."""
    common = math.gcd(numerator, denominator)
    numerator, denominator = numerator // common, denominator // common
    if numerator == 1:  # most links: asked for a hundred times a plan
        return np.asarray(-(-amount // denominator))
    if len(amount) and int(amount.max()) * numerator > LARGEST:
        return _exactly_divided_up(amount, numerator, denominator)
    return np.asarray(-(-amount * numerator // denominator))


def _exactly_divided_up(amount: Ints, numerator: int, denominator: Any) -> Ints:
    """The same in Python's integers, for products beyond 64 bits."""
    return np.asarray(-(-amount.astype(object) * numerator // denominator)).astype(np.int64)


def _check_number(owner: str, field: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"a {owner} needs {field} as a whole number of at least {least}; got {shown(value)}")


def _check_fields(kind: type[Any], given: Mapping[str, Any], owner: str) -> None:
    """Refuses names that are not fields; their values are checked where the object is made."""
    known = [f.name for f in fields(kind)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"a {owner} has no field {shown(unknown[0])}; its fields are {', '.join(known)}")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
    if missing:
        raise ValueError(f"a {owner} needs a value for {missing[0]!r}")
    if not isinstance(given.get("name", ""), str):
        raise ValueError(f"a {owner}'s name is a text; got {shown(given['name'])}")
