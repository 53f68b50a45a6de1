"""Deliberate bugs, one for each area of flexcp; ``flexcp fuzz`` should find each of them.

A bug replaces one attribute of a module or class by something made from the original. Bugs in code that runs on ranks
are planted on the ranks, all others in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch.distributed as dist

from flexcp.measure.ranks import RankPool


@dataclass(frozen=True)
class Bug:
    """A bug: ``wrong(original)`` replaces the attribute ``name`` of ``owner``, a module or ``module:Class``."""

    owner: str
    name: str
    wrong: Callable[[Any], Any]
    says: str
    on_ranks: bool = False

    def place(self) -> Any:
        """Return the module or class whose attribute is replaced."""
        module, _, inside = self.owner.partition(":")
        found = import_module(module)
        return getattr(found, inside) if inside else found


def _narrow_window(table: dict[str, Any]) -> dict[str, Any]:
    def columns(mask: Any, lengths: Any) -> Any:
        return [(*rest, lo, np.maximum(hi - 1, 0)) for *rest, lo, hi in table["window"].rule(mask, lengths)]

    return {**table, "window": replace(table["window"], rule=columns)}


def _short_region(find: Any) -> Any:
    def found(text: str) -> Any:
        place, argument = find(text)

        def planner(request: Any) -> Any:
            placement = place(request)
            first, *others = placement.regions
            k1 = first.k1.copy()
            k1[k1 - first.k0 > 40] -= 1
            return replace(placement, regions=(replace(first, k1=k1), *others))

        return planner, argument

    return found


def _final_results(program: Any) -> Any:
    """Mark small partial results as final."""

    def made(parts: Any, *rest: Any, **named: Any) -> Any:
        small = [replace(part, partial=np.where(part.stop - part.start < 4, 0, part.partial)) for part in parts]
        return program(small, *rest, **named)

    return made


def _too_fast(run: Any) -> Any:
    def ran(model: Any, start: Any) -> Any:
        found = run(model, start)
        return replace(found, begin=found.begin // 2, end=found.end // 2)

    return ran


def _lost_bytes(arrived: Any) -> Any:
    def wrong(self: Any, stage: int) -> Any:
        found = arrived(self, stage)
        if found is not None and stage >= 2:
            for _, message in found.messages:
                message[:8] = 0
        return found

    return wrong


def _weighed_merge(merge: Any) -> Any:
    return lambda out, lse, more_out, more_lse: merge(out, lse, more_out, more_lse + 1e-6)


def _no_lse_gradient(delta: Any) -> Any:
    return lambda do, out, dlse, dtype: delta(do, out, None, dtype)


def _skipped_document(following: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        found = following(*arguments)
        full = found is not None and sum(d.length for d in found.documents) == arguments[3]
        return replace(found, end=found.end + 1) if full else found

    return wrong


def _turned_traffic(traffic: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        found = traffic(*arguments)
        return {**found, "source": found["target"], "target": found["source"]}

    return wrong


BUGS: dict[str, Bug] = {
    "masks": Bug("flexcp.masks.named", "NAMED", _narrow_window, "a window sees one key too few on its right"),
    "planners": Bug("flexcp.planner", "find_strategy", _short_region, "a region of many keys loses its last one"),
    "schedule": Bug(
        "flexcp.schedule.transfers", "_program", _final_results, "small partial results travel as final ones"
    ),
    "simulator": Bug("flexcp.simulator.training", "run_pass", _too_fast, "a pass takes half its time"),
    "exchange": Bug(
        "flexcp.executor.exchange.transports:HostExchange",
        "arrived",
        _lost_bytes,
        "messages of later stages lose 8 bytes",
        True,
    ),
    "merge": Bug(
        "flexcp.executor.kernels", "merge", _weighed_merge, "a merged result weighs a millionth too much", True
    ),
    "backward": Bug(
        "flexcp.executor.kernels.sinks_and_delta",
        "delta_of",
        _no_lse_gradient,
        "the gradient of the LSE is forgotten",
        True,
    ),
    "loader": Bug(
        "flexcp.data.loader", "next_batch", _skipped_document, "the document after an exactly full batch is skipped"
    ),
    "report": Bug("flexcp.report.plan_data", "traffic", _turned_traffic, "traffic is drawn from receivers to senders"),
}


@contextmanager
def planted(area: str) -> Iterator[None]:
    """Plant the bug of an area in this process for the duration of the block."""
    bug = BUGS[area]
    place = bug.place()
    before = getattr(place, bug.name)
    setattr(place, bug.name, bug.wrong(before))
    try:
        yield
    finally:
        setattr(place, bug.name, before)


def plant(area: str) -> None:
    """Plant the bug of an area in this process for good."""
    bug = BUGS[area]
    setattr(bug.place(), bug.name, bug.wrong(getattr(bug.place(), bug.name)))


def plant_on_rank(group: dist.ProcessGroup, area: str) -> None:
    """Plant a bug on a rank; called through a pool."""
    plant(area)


def plant_on_pool(area: str, pool: RankPool) -> None:
    """Plant a bug on all ranks of a pool."""
    pool.run(plant_on_rank, area)
