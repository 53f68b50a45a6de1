"""CostModel: predicted costs of attention, of the rest of a layer and of transfers, as integers.

Planners compare costs and must decide alike on every machine, so costs are exact integers: nanoseconds, bytes, per
mille. Three things cost time:

- *attention*: pairs x query heads at an efficiency of the rank's peak, one for each direction (backward does 2.5 times
  the FLOPs). Kernels work in tiles of 128 rows and pay a fixed price for each, so rows count in whole tiles and short
  documents cost more than their area.
- *linear*: what a token costs in the rest of a layer, forward and backward, from a :class:`Model`.
- *links*: bytes at a port's bandwidth, a start-up cost per exchange and a small cost per message.

Compute and transfers that overlap on one device slow each other down. How much depends on the *margin*, the number of
multiprocessors that attention leaves free. A larger margin makes attention slower; with a smaller one than a transfer
has blocks, attention waits for the transfer. A :class:`Contention` holds the slowdowns measured for one margin.
Planners ignore contention, because it is nearly the same for all their candidates. The schedule uses it to choose a
margin for every stage (:mod:`flexcp.schedule.execution`), and the event simulator applies it.

The default values are analytic. Attention is fitted to one H200. With 560 per mille of peak, and 32,768 pairs (two
tiles of 128 x 128) as the price of a row tile, the formula gives 543, 376 and 190 TFLOP/s for 1, 16 and 64 causal
documents in 16,384 tokens; our Triton kernel measured 546, 382 and 190 when this was fitted. FlexAttention's 411, 273
and 142 then lay on the same curve with 420 per mille. On Hopper GPUs newer kernels run. These prices miss the
``hopper`` kernel, which needs no extra package, by 10 % in the median, and the faster kernels of ``flexcp[fa4]`` by
15 %, so their users should calibrate. A model fitted on the user's machine (``flexcp calibrate``) has the same fields
and is read from a JSON file. A predicted gain counts as a gain only if it exceeds ``error_permille``;
:mod:`flexcp.known_errors` lists the errors of past predictions.

Besides nanoseconds there is one relative unit, the *pair*: the attention of one (query, key) pair over all heads,
forward and backward. With ``pairs_per_token`` a planner adds up attention and the rest of a layer in this unit:
``load = area + tokens * pairs_per_token``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, astuple, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import Cluster
from flexcp.io.plain_values import shown
from flexcp.shape import Shape

Ints = NDArray[np.int64]
TILE_ROWS = 128
"""Rows of a kernel tile."""

PEAK_PERMILLE = {"bfloat16": 1000, "float16": 1000, "float32": 500, "float64": 62}
"""Tensor-core peak of each dtype in per mille of bf16's, as on an A100 or H100 (float32 runs as TF32)."""

LARGEST = 2**62
"""Products above this are computed in Python integers, because they may not fit 64 bits."""
LARGEST_SIZE = 2**22
"""The largest size of a model; with any size, FLOPs and bytes of its layers would not fit 64 bits."""
LARGEST_MODEL = 2**50
"""The largest product of a model's sizes; FLOPs and bytes of larger ones would not fit 64 bits."""
FORMAT = "flexcp-cost-1"


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer that its cost depends on.

    ``hidden`` is the width of the residual stream and ``feed_forward`` the inner width of the gated feed-forward, of
    which a token uses ``experts_active`` copies (1 in a dense model). Sizes below 1 or above 4,194,304 raise
    ValueError.
    """

    name: str
    hidden: int
    layers: int
    feed_forward: int
    experts_active: int = 1

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "feed_forward", "experts_active"):
            _check_number("model", field, getattr(self, field), 1, LARGEST_SIZE)
        if self.hidden * self.feed_forward * self.experts_active * self.layers > LARGEST_MODEL:
            raise ValueError(
                f"a model of {self.layers:,} layers of width {self.hidden:,} with a feed-forward of "
                f"{self.experts_active:,} x {self.feed_forward:,} is too large to count: the product of these is at "
                f"most {LARGEST_MODEL:,}"
            )

    def linear_flops_per_token(self, shape: Shape) -> int:
        """Return the forward FLOPs of one token in one layer outside attention: projections and feed-forward."""
        projections = self.hidden * (shape.heads + shape.kv_heads) * (shape.head_dim + shape.v_head_dim)
        return 2 * (projections + 3 * self.hidden * self.feed_forward * self.experts_active)


def dense_model(shape: Shape) -> Model:
    """Return the model assumed when none is given: hidden = heads x head_dim, gated feed-forward of 3.5 x hidden."""
    hidden = shape.heads * shape.head_dim
    return Model("dense", hidden, layers=1, feed_forward=max(1, 7 * hidden // 2))


@dataclass(frozen=True)
class Contention:
    """How attention and transfers slow each other down when attention leaves ``margin`` multiprocessors free.

    All values but ``margin`` are per mille. The first four are times of attention, relative to attention alone on all
    multiprocessors: ``forward`` and ``backward`` during a transfer, ``forward_alone`` and ``backward_alone`` without a
    transfer. ``link`` is the speed of a transfer during attention, relative to a transfer alone.
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
        """Return the time of attention in one direction: (during a transfer, without a transfer).

        Both are per mille of attention alone on all multiprocessors.
        """
        return (self.backward, self.backward_alone) if backward else (self.forward, self.forward_alone)


H200_CONTENTION = (
    Contention(0, 9561, 35765, 1000, 1000, 884),
    Contention(4, 11643, 22067, 1010, 1000, 884),
    Contention(8, 9540, 21125, 1046, 1027, 884),
    Contention(16, 1135, 1098, 1103, 1079, 884),
    Contention(24, 1241, 1187, 1167, 1168, 884),
)
"""Contention on an H200 between the ``cute`` kernel and a transfer of 16 blocks, as NCCL uses inside a node.

``flexcp.measure.calibrate`` computes this table and :data:`H200_CONTENTION_ACROSS` from docs/results/kernels.md.
"""
H200_CONTENTION_ACROSS = (
    Contention(0, 9167, 40882, 1000, 1000, 890),
    Contention(4, 1018, 1000, 1009, 1000, 890),
    Contention(8, 1052, 1028, 1042, 1024, 890),
    Contention(16, 1125, 1079, 1106, 1079, 890),
    Contention(24, 1197, 1167, 1186, 1164, 890),
)
"""Contention on an H200 between the ``cute`` kernel and a transfer of 4 blocks, as NCCL uses across nodes."""
NO_CONTENTION = (Contention(0, 1000, 1000, 1000, 1000, 1000),)
"""No slowdown: for CPU ranks, whose kernel times were measured while all ranks were running."""
CONTENTIONS = ("contention", "contention_across")
"""The fields of :class:`CostModel` that hold rows of :class:`Contention`."""
_OLD_FIELDS = ("overlap_forward", "overlap_backward", "overlap_link")
OLD_MARGIN, OLD_DEFAULT = 16, (1141, 1160, 930)
"""The one margin that cost models of plan version 1 describe, and the defaults of the three fields for it."""


@dataclass(frozen=True)
class CostModel:
    """Prices of compute and transfers, from which the time of a plan is predicted.

    Efficiencies are per mille of a rank's peak or of a link's bandwidth; ``model=None`` stands for :func:`dense_model`.
    ``row_tile_pairs`` is the fixed price of 128 rows of one head, in pairs; ``kernel_ns`` the price of starting a
    kernel; ``message_ns`` the price of each further peer in an exchange. ``error_permille`` is how large a predicted
    gain must be to count as one, because predictions err. ``contention`` says how compute and transfers inside a node
    slow each other down, for ascending margins that begin with 0; the default is that of an H200. ``contention_across``
    says the same for transfers that only cross nodes, for the same margins; None stands for the H200's values if
    ``contention`` is the H200's, and for ``contention`` otherwise. ``crowding`` is the per mille of bandwidth that a
    port loses for each further message arriving in the same call; it is 0 because splitting a call into rounds was
    never measured to be faster (docs/results/communication.md). ``token_bytes`` is the size of a token's activations in
    one layer, 0 if not measured.
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
        """Return the contention rows for transfers that only cross nodes (``across``) or for those inside a node."""
        if not across:
            return self.contention
        if self.contention_across is not None:
            return self.contention_across
        return H200_CONTENTION_ACROSS if self.contention == H200_CONTENTION else self.contention

    # --- attention ----------------------------------------------------------------------------------------------------

    def row_tiles_work(self, rows: Ints) -> Ints:
        """Return the fixed price, in pairs, of computing ``rows`` rows of one head: that of whole tiles of 128 rows."""
        return np.asarray(-(-rows // TILE_ROWS) * self.row_tile_pairs)

    def attention_ns(self, work: Ints, shape: Shape, cluster: Cluster, backward: bool) -> Ints:
        """Return the nanoseconds of each rank for ``work[rank]`` pairs x query heads, in one direction.

        ``work`` includes the price of row tiles (:meth:`row_tiles_work`).
        """
        efficiency = self.backward_efficiency if backward else self.forward_efficiency
        flops = (5 if backward else 2) * (shape.head_dim + shape.v_head_dim)
        return _times(work, flops, efficiency, shape, cluster)

    def with_kernels(self, percent: int) -> CostModel:
        """Return these prices with attention that takes ``percent`` of its time, row tiles included."""
        speeds = {
            f"{way}_efficiency": getattr(self, f"{way}_efficiency") * 100 // percent for way in ("forward", "backward")
        }
        return replace(self, row_tile_pairs=self.row_tile_pairs * percent // 100, **speeds)

    # --- the rest of a layer ------------------------------------------------------------------------------------------

    def linear_flops(self, shape: Shape) -> int:
        """Return the forward FLOPs of one token in one layer outside attention."""
        return (self.model or dense_model(shape)).linear_flops_per_token(shape)

    def linear_ns(self, tokens: Ints, shape: Shape, cluster: Cluster) -> Ints:
        """Return the nanoseconds of each rank for ``tokens[rank]`` tokens in one layer outside attention.

        They include the backward, which takes twice the FLOPs of the forward.
        """
        return _times(tokens, 3 * self.linear_flops(shape), self.linear_efficiency, shape, cluster)

    def vocabulary_ns(self, tokens: Ints, flops_per_token: int, shape: Shape, cluster: Cluster) -> Ints:
        """Return the nanoseconds of each rank to project ``tokens[rank]`` tokens to the vocabulary.

        Forward and backward are included; ``flops_per_token`` are those of the forward.
        """
        return _times(tokens, 3 * flops_per_token, self.linear_efficiency, shape, cluster)

    def pairs_per_token(self, shape: Shape) -> int:
        """Return the cost of one token in a layer outside attention, in pairs, forward and backward; at least 1."""
        forward, backward = self.forward_efficiency, self.backward_efficiency
        attention = 2 * shape.heads * (shape.head_dim + shape.v_head_dim)
        # linear * 3 / linear_efficiency over attention * (1 / forward + 2.5 / backward)
        above = self.linear_flops(shape) * 3 * 2 * forward * backward
        return max(1, above // (attention * self.linear_efficiency * (2 * backward + 5 * forward)))

    def attention_alone(self, shape: Shape) -> bool:
        """Return whether a token costs next to nothing outside attention, so that layers count as attention alone."""
        return self.pairs_per_token(shape) <= 1

    # --- links --------------------------------------------------------------------------------------------------------

    def link_ns(self, size: Ints, mbps: int) -> Ints:
        """Return the nanoseconds of ``size`` bytes through a port of ``mbps`` megabytes per second.

        The start-up of the transfer is not included.
        """
        return _divided_up(size, 1_000_000, mbps * self.link_efficiency)

    # --- files --------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the cost model as plain values for a JSON file."""
        given = {name: rows for name in CONTENTIONS if (rows := getattr(self, name)) is not None}
        rows = {name: [list(astuple(row)) for row in rows] for name, rows in given.items()}
        return {"format": FORMAT, **asdict(self), **rows}

    def version_1(self) -> dict[str, Any]:
        """Return the fields that enter the hash of a plan of version 1, in which a cost model described one margin."""
        found = asdict(self)
        for name in (*CONTENTIONS, "crowding"):
            del found[name]
        return {**found, **_one_margin(self.contention)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CostModel:
        """Make a cost model of the values that :meth:`to_json` gives; missing values have their defaults.

        Raise ValueError for unknown fields and wrong values.
        """
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
    """Return the contention of a cost model file, and remove the fields of version 1 from ``given``.

    A file of version 1 has three fields for one margin instead of rows. They replace the row of that margin in the
    default; if they say that nothing slows down, the result is ``NO_CONTENTION``.
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
    """Read the contention rows in ``given[name]``; raise ValueError if they are no rows of numbers."""
    rows = given[name]
    size = len(fields(Contention))
    if not isinstance(rows, list | tuple) or any(not isinstance(r, list | tuple) or len(r) != size for r in rows):
        raise ValueError(f"a cost model's {name} is a list of rows of {size} numbers; got {shown(rows)}")
    return tuple(Contention(*row) for row in rows)


def row_for(rows: Sequence[Contention], margin: int) -> Contention:
    """Return the row with the largest margin that is not above ``margin``; ``rows`` ascend by margin, from 0 on."""
    return [row for row in rows if row.margin <= margin][-1]


def _one_margin(rows: Sequence[Contention]) -> dict[str, int]:
    """Return the three fields with which cost models of version 1 described one margin.

    For the default contention these are the default values of version 1, so that hashes of such plans stay the same.
    """
    if tuple(rows) == H200_CONTENTION:
        return dict(zip(_OLD_FIELDS, OLD_DEFAULT, strict=True))
    row = next((row for row in rows if row.margin == OLD_MARGIN), rows[0])
    return dict(zip(_OLD_FIELDS, (row.forward, row.backward, row.link), strict=True))


def _times(amount: Ints, flops_each: int, efficiency: int, shape: Shape, cluster: Cluster) -> Ints:
    """Return the nanoseconds that each rank takes for ``amount[rank]`` units of ``flops_each`` FLOPs, rounded up.

    ``efficiency`` is per mille of the rank's peak.
    """
    # GFLOP/s are FLOPs per nanosecond; efficiency, dtype and speed are in per mille, hence the 10**9.
    peak = cluster.gflops * efficiency * PEAK_PERMILLE[shape.dtype]
    if len(set(cluster.rank_speeds)) == 1:
        return _divided_up(amount, flops_each * 10**9, peak * cluster.rank_speeds[0])
    return _exactly_divided_up(amount, flops_each * 10**9, peak * np.array(cluster.rank_speeds, object))


def _divided_up(amount: Ints, numerator: int, denominator: int) -> Ints:
    """Return ``amount * numerator / denominator``, rounded up."""
    common = math.gcd(numerator, denominator)
    numerator, denominator = numerator // common, denominator // common
    if numerator == 1:  # a shortcut that most links take, called about a hundred times per plan
        return np.asarray(-(-amount // denominator))
    if len(amount) and int(amount.max()) * numerator > LARGEST:
        return _exactly_divided_up(amount, numerator, denominator)
    return np.asarray(-(-amount * numerator // denominator))


def _exactly_divided_up(amount: Ints, numerator: int, denominator: Any) -> Ints:
    """Return ``amount * numerator / denominator``, rounded up, in Python integers: the product may exceed 64 bits."""
    return np.asarray(-(-amount.astype(object) * numerator // denominator)).astype(np.int64)


def _check_number(owner: str, field: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ValueError unless ``value`` is an integer from ``least`` to ``most`` (None: any); two texts name it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ValueError(f"a {owner} needs {field} as a whole number {allowed}; got {shown(value)}")


def _check_fields(kind: type[Any], given: Mapping[str, Any], owner: str) -> None:
    """Raise ValueError if ``given`` has unknown names, lacks a required one, or its name is no text.

    The dataclass ``kind`` checks the other values itself; ``owner`` names it.
    """
    known = [f.name for f in fields(kind)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"a {owner} has no field {shown(unknown[0])}; its fields are {', '.join(known)}")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
    if missing:
        raise ValueError(f"a {owner} needs a value for {missing[0]!r}")
    if not isinstance(given.get("name", ""), str):
        raise ValueError(f"a {owner}'s name is a text; got {shown(given['name'])}")
