"""Common parts of the simulated experiments: planning and simulating a batch in many ways, and writing tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flexcp.batch import make_batch
from flexcp.clusters import Cluster
from flexcp.compare.compare import Comparison, Row, compare
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.masks import Mask, causal
from flexcp.models.preset import Preset
from flexcp.planners.request import Request
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import Simulation

STATIC = ("dp", "ring", "zigzag", "allgather", "ulysses", "usp")


@dataclass(frozen=True)
class Experiment:
    """Where batches run: cluster, shape, cost, rules; with ``training`` a whole step is timed."""

    cluster: Cluster
    shape: Shape
    cost: CostModel = CostModel()
    rules: Rules = Rules()
    training: Training | None = None

    def compare(
        self, lengths: Sequence[int], names: Sequence[str], mask: Mask | None = None, search: bool = True
    ) -> Comparison:
        """Compare the strategies on one batch; with ``search`` a static one without a degree has its best degree."""
        return compare(self.request(lengths, mask), names, self.rules, search=search)

    def request(self, lengths: Sequence[int], mask: Mask | None = None) -> Request:
        """Return the planners' request for one batch."""
        if self.training is None:
            return Request(make_batch(lengths, mask or causal()), self.shape, self.cluster, self.cost)
        model = self.training.model.model
        batch = make_batch(lengths, masks={"mask": (mask or causal(), model.layers)})
        return Request(batch, self.shape, self.cluster, replace(self.cost, model=model), training=self.training)


def step_of(preset: Preset, cluster: Cluster, sync: str = "fsdp", rules: Rules = Rules()) -> Experiment:
    """Return an experiment on whole steps of a model."""
    return Experiment(cluster, preset.shape, rules=rules, training=Training(preset, sync))  # type: ignore[arg-type]


def scaled_lengths(name: str, tokens: int, scale: float, seed: int) -> list[int]:
    """Draw documents of a distribution, each ``scale`` times as long, with ``tokens`` tokens in all."""
    found = [max(1, round(n * scale)) for n in draw_lengths(name, round(tokens / scale), seed)]
    found[-1] = max(1, found[-1] + tokens - sum(found))
    return found


def cut_lengths(lengths: Sequence[int], longest: int) -> list[int]:
    """Cut documents that are longer than ``longest`` tokens."""
    parts: list[int] = []
    for n in lengths:
        parts += [longest] * (n // longest) + [n % longest] * (n % longest > 0)
    return parts


def simulations(found: Comparison, names: Iterable[str]) -> dict[str, Simulation]:
    """Return simulations by the requested strategy, without its degree."""
    wanted = set(names)
    return {
        row.name if row.name in wanted else row.name.partition(":")[0]: row.simulation
        for row in found.rows
        if row.simulation is not None and (row.name in wanted or row.name.partition(":")[0] in wanted)
    }


def row_of(found: Comparison, name: str) -> Row:
    """Return the row of a strategy that must have run."""
    for row in found.rows:
        if row.name.partition(":")[0] == name and row.simulation is not None:
            return row
    raise ValueError(f"{name} has no simulation")


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean."""
    return statistics.mean(values)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return [
        "| " + " | ".join(headers) + " |",
        "| --- " * len(headers) + "|",
        *("| " + " | ".join(r) + " |" for r in rows),
        "",
    ]


def off(simulated: float, published: float) -> str:
    """Return the error of a simulated figure against a published one."""
    return f"{simulated / published - 1:+.0%}"
