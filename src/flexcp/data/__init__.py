"""Data: the loader that turns a dataset into planned steps, and functions that read document lengths.

:class:`Loader` is the main class; :class:`Samples`, :class:`Batches` and :class:`Planning` are its settings. Names
load on first use, so that planner processes can import this package without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Batches": "loader_settings",
    "Loader": "loader",
    "LocalBatch": "local_batch",
    "Planning": "loader_settings",
    "PlanningError": "planning.planning_pool",
    "Samples": "loader_settings",
    "Stats": "stats",
    "dataset_lengths": "arrow_lengths",
    "jsonl_lengths": "lengths",
    "parse_lengths": "lengths",
}

__all__ = [
    "Batches",
    "Loader",
    "LocalBatch",
    "Planning",
    "PlanningError",
    "Samples",
    "Stats",
    "dataset_lengths",
    "jsonl_lengths",
    "parse_lengths",
]

if TYPE_CHECKING:
    from flexcp.data.arrow_lengths import dataset_lengths
    from flexcp.data.lengths import jsonl_lengths, parse_lengths
    from flexcp.data.loader import Loader
    from flexcp.data.loader_settings import Batches, Planning, Samples
    from flexcp.data.local_batch import LocalBatch
    from flexcp.data.planning.planning_pool import PlanningError
    from flexcp.data.stats import Stats


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flexcp.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flexcp.data.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
