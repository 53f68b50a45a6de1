"""``--all-changes``: every change of a file with every family of models,
also those that do not know its fields; minutes.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the whole matrix."""
    parser.addoption(
        "--all-changes", action="store_true", help="every change of a config.json with every family, minutes"
    )
