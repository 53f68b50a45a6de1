"""Defines ``--all-changes``: try every change of a config.json with every model family, also with families that do not
know the changed fields. This takes minutes.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all-changes``."""
    parser.addoption(
        "--all-changes", action="store_true", help="every change of a config.json with every family, minutes"
    )
