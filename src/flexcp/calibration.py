"""Calibration: the file in which ``flexcp calibrate`` stores its measurements of a machine, for the option ``--cost``.

The file holds a cost model, the measured speeds of a rank and its links (they replace those of the cluster preset), and
the errors of the model on shapes that it was not fitted to. :func:`read_calibration` also accepts a file with a cost
model alone (:meth:`flexcp.cost.CostModel.to_json`).

Planners compare the costs of thousands of candidates, so the cost model counts only pairs and row tiles. For the Hopper
kernel, whose blocks and tiles can be counted, the file also holds what a block, a tile and a call cost. With these
prices the simulator times a finished plan more exactly (:mod:`flexcp.measure.tile_times`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flexcp.clusters import Cluster
from flexcp.cost import FORMAT as COST_FORMAT
from flexcp.cost import CostModel
from flexcp.io.json_files import read_json
from flexcp.io.plain_values import shown

FORMAT = "flexcp-calibration-1"
SPEEDS = ("gflops", "intra_mbps", "inter_mbps", "latency_ns")
"""The fields of a :class:`~flexcp.clusters.Cluster` that a calibration may replace."""
SHORT_DOCUMENTS = "kernels, short documents"
"""The errors of a GPU's kernels on documents shorter than a row tile, which no price of row tiles fits."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of the cost model on shapes it was not fitted to (0.05 is 5 %).

    ``count`` is the number of shapes; ``median``, ``p90`` (90th percentile) and ``worst`` are over these shapes.
    """

    count: int
    median: float
    p90: float
    worst: float


@dataclass(frozen=True)
class CallPrices:
    """What a call of the Hopper kernel costs in nanoseconds.

    ``launches`` has a row for each launch of a call: the price of each thing that a program of the launch does (blocks,
    tiles; see :mod:`flexcp.measure.tile_times`). ``call_ns`` is the fixed cost of a call.
    """

    launches: tuple[tuple[float, ...], ...]
    call_ns: float


@dataclass(frozen=True)
class TileTimes:
    """Prices of the Hopper kernel on a GPU with ``multiprocessors`` multiprocessors, for one pair of head sizes.

    ``head_dim`` and ``v_head_dim`` are the sizes of a key head and a value head.
    """

    multiprocessors: int
    head_dim: int
    v_head_dim: int
    forward: CallPrices
    backward: CallPrices

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TileTimes:
        """Make tile times of the values that ``dataclasses.asdict`` gives for them, as JSON stores them."""
        forward, backward = (
            CallPrices(tuple(tuple(map(float, x)) for x in values[way]["launches"]), float(values[way]["call_ns"]))
            for way in ("forward", "backward")
        )
        units, head_dim, v_head_dim = (int(values[f]) for f in ("multiprocessors", "head_dim", "v_head_dim"))
        return cls(units, head_dim, v_head_dim, forward, backward)


@dataclass(frozen=True)
class Calibration:
    """The content of a calibration file.

    ``cost`` is the fitted cost model and ``machine`` a description of the machine. ``speeds`` are measured fields of a
    cluster (:data:`SPEEDS`), ``held_out`` the errors of the model by kind of held-out shape, and ``tiles`` the prices
    of the Hopper kernel, if it was measured.
    """

    cost: CostModel
    machine: str = ""
    speeds: Mapping[str, int] = field(default_factory=dict)
    held_out: Mapping[str, Errors] = field(default_factory=dict)
    tiles: TileTimes | None = None

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with its speeds replaced by the measured ones."""
        speeds: Any = self.speeds
        return replace(cluster, **speeds)

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as plain values for a JSON file."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "cost": self.cost.to_json(),
            "speeds": dict(self.speeds),
            "held_out": {name: vars(errors) for name, errors in self.held_out.items()},
            "tiles": None if self.tiles is None else asdict(self.tiles),
        }


HINT = "flexcp calibrate --write makes such a file"


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file, or a file with a cost model alone; raise ValueError if it is neither."""
    values = read_json(path, "cost model", HINT)
    form = values.get("format") if isinstance(values, Mapping) else None
    if form == COST_FORMAT:
        return Calibration(_cost(path, values))
    if form != FORMAT:
        raise ValueError(
            f'{path} is no cost model: it needs "format": "{FORMAT}" or "{COST_FORMAT}"; got {shown(form)}'
        )
    speeds, held_out = values.get("speeds", {}), values.get("held_out", {})
    unknown = sorted(set(speeds) - set(SPEEDS)) if isinstance(speeds, Mapping) else ["speeds"]
    if unknown:
        raise ValueError(f"{path}: {shown(unknown[0])} is no speed of a cluster; those are {', '.join(SPEEDS)}")
    for name, speed in speeds.items():
        if type(speed) is not int or speed < (name != "latency_ns"):
            raise ValueError(
                f"{path}: {name} must be a whole number of at least {int(name != 'latency_ns')}; got {shown(speed)}"
            )
    try:
        errors = {str(name): Errors(**each) for name, each in held_out.items()}
    except (TypeError, AttributeError):
        raise ValueError(
            f"{path}: held_out must hold count, median, p90 and worst of each kind; got {shown(held_out)}"
        ) from None
    try:
        tiles = None if values.get("tiles") is None else TileTimes.from_json(values["tiles"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: tiles must be as flexcp calibrate writes them; {error!r}") from None
    return Calibration(_cost(path, values.get("cost", {})), str(values.get("machine", "")), speeds, errors, tiles)


def _cost(path: Path, values: Any) -> CostModel:
    """Read the cost model in ``values``; raise ValueError, naming the file ``path``, if it is none."""
    try:
        return CostModel.from_json(values)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; {HINT}") from None
