"""Proves that the examples run: each on two real ranks with tiny sizes, with a loss that falls, or equals what it must."""

from __future__ import annotations

import re

import pytest
from example_runs import EXAMPLES, printed

from flexcp.measure.ranks import RankPool


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.parametrize("name", ["attention_swap", "fsdp2_pretrain"])
def test_an_example_trains(two: RankPool, name: str) -> None:
    first, second = two.run(printed, name, ["--steps", "4", "--tokens", "256"])
    found = losses(first)
    assert len(found) == 4
    assert min(found[1:]) < found[0]
    assert second == "", "only the first rank talks"


def test_the_loader_example_trains(two: RankPool) -> None:
    text, _ = two.run(printed, "finetune_with_loader", ["--tokens", "1024", "--budget", "256"])
    assert len(losses(text)) >= 2


def test_the_swap_is_the_attention_only_swap() -> None:
    """The README's first example is cut from this file: few marked lines, the user's layout."""
    text = (EXAMPLES / "attention_swap.py").read_text()
    assert 'layout="contiguous"' in text
    assert text.count("# new") == 3
