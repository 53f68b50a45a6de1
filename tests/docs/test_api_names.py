"""Proves that the list of public names in docs/api.md is that of the code, so that a reader of the repository sees what there is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import flexcp

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def api_names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_names", PAGE.with_name("api_names.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_is_made_from_this_code(api_names: ModuleType) -> None:
    assert PAGE.read_text() == api_names.page(), "run python docs/api_names.py --write"
    listed = api_names.names()
    assert not [name for name in flexcp.__all__ if f"\n- `{name}" not in listed]
    assert "- `bind(plan, group=None, timeout=..., " in listed


def test_help_of_a_step_begins_with_what_users_take_from_it(api_names: ModuleType) -> None:
    doc = flexcp.Step.__doc__ or ""
    assert not [name for name in api_names.PARTS["Step"] if f"``{name}``" not in doc]
