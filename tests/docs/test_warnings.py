"""Tests that the pages keep the warnings without which a reader would do something wrong or unsafe."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_loader_before_the_swap_and_states_the_price_of_the_swap() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    loader, swap, price = (text.index(words) for words in ("flexcp.data.Loader(", "Or swap attention", "**The price**"))
    snippet = text.index("step.loss(logits, labels", swap)
    assert loader < swap < price < snippet


def test_readme_states_the_gradient_rule_beside_both_snippets() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count('gradients="averaged")') >= 2
    assert text.index("**The gradient rule.**") - text.index("loss = step.loss(") < 400


@pytest.mark.parametrize("page", ["docs/help.md", "docs/launch.md", "SECURITY.md", "src/flexcp/cli/commands/warmup.py"])
def test_the_folder_of_compiled_loops_is_said_to_hold_code(page: str) -> None:
    text = (ROOT / page).read_text().lower()
    assert any(words in text for words in ("holds code", "hold code", "loops are code"))
