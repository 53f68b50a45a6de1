"""Tests that docs/api.md has the signature and docstring of every public name as in the code, in Markdown that is
readable without building the site.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import flexcp
import flexcp.data

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def api_names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_names", PAGE.with_name("api_names.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_this_code(api_names: ModuleType) -> None:
    text = PAGE.read_text()
    assert text == api_names.page(), "run python docs/api_names.py --write"
    names = [*flexcp.__all__, *flexcp.data.__all__]
    assert not [name for name in names if f"\n### `{name}`\n" not in text]
    assert "    timeout: timedelta | float = ...,\n" in text
    assert ":::" not in text and ":func:" not in text and "``" not in text.replace("```", "")


def test_words_around_the_reference_are_kept(
    api_names: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_names, "PAGE", tmp_path / "api.md")
    monkeypatch.setattr(api_names, "reference", lambda: "new\n")
    api_names.PAGE.write_text(f"# A\n\n{api_names.BEGIN}\n\nold\n\n{api_names.END}\n\n## B\n")
    assert api_names.page() == f"# A\n\n{api_names.BEGIN}\n\nnew\n\n{api_names.END}\n\n## B\n"
    api_names.PAGE.write_text(f"# A\n\n{api_names.BEGIN}\n\nold\n")
    with pytest.raises(ValueError, match=r"api\.md needs the lines .* and .*end of what is written"):
        api_names.page()


def test_a_new_public_name_needs_a_group(api_names: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api_names.GROUPS, "Plans in files", ("save_plan",))
    with pytest.raises(ValueError, match=r"without a group.*load_plan"):
        api_names.page()


def test_help_of_a_step_begins_with_what_users_take_from_it(api_names: ModuleType) -> None:
    doc = flexcp.Step.__doc__ or ""
    assert not [name for name in api_names.PARTS["Step"] if f"``{name}``" not in doc]
