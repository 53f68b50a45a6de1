"""Reports: plans and comparisons as pictures and tables, in one HTML file.

The tables and their files:

strategies_table.py  strategies side by side (``compare``, ``advise``)
plan_tables.py       a plan: its batch, ranks, masks, bytes between ranks (``plan``, ``show``)
trees.py             the trees of a plan: their picture and its table
rounds_table.py      a plan's rounds, also as text (``plan --rounds``)
training_table.py    the steps of a training run (``train``)
accept_tables.py     checks, ranks, links and strategies of a first run on a cluster (``accept``)

sections.py and markup.py make HTML of any content, and page.py writes the file. timeline.py, layer_timeline.py,
plan_data.py and plan_time.py collect the numbers that the scripts in page/ draw. code_lines.py and advice_words.py hold
the words of ``advise``.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = ("page", "plan_tables", "sections", "strategies_table")
"""Modules with public names, loaded on first use."""


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flexcp.report' has no attribute {name!r}")
    return importlib.import_module(f"flexcp.report.{name}")
