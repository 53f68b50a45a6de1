"""Tests of what ``flexcp advise`` says of trees (sequences that share prefixes): tokens and query-key pairs are those
counted by hand, trees and separate documents are both simulated, and a line that is no tree is named.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexcp.cli.main import app
from flexcp.compare.tree_advice import read_trees
from flexcp.io.sizes import size

STAR = {"parents": [-1, 0, 0, 0, 0], "lengths": [4096, 256, 256, 256, 256]}
SETTING = ["--cluster", "h100:1x2", "--max-tokens-per-rank", "16k"]


def test_what_trees_save(tmp_path: Path) -> None:
    path = tmp_path / "trees.jsonl"
    path.write_text("\n".join(json.dumps(tree) for tree in (STAR, STAR)))
    answer = CliRunner().invoke(app, ["advise", str(path), *SETTING, "--json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["trees"]["tokens"] == 2 * 5120 and found["separate"]["tokens"] == 8 * 4352
    assert found["tokens_saved"] == 8 * 4352 - 2 * 5120
    assert found["separate"]["documents"] == 8 and found["separate"]["pairs"] == 8 * (4352 * 4353 // 2)
    assert found["trees"]["pairs"] == 2 * (4096 * 4097 // 2 + 4 * (256 * 4096 + 256 * 257 // 2))
    assert found["simulated"] and 2 < found["gain"] < 4352 * 8 / (5120 * 2) * 1.5
    needed = [found[side]["max_rank_memory_bytes"] for side in ("trees", "separate")]
    assert needed[0] * 2 < needed[1], "a third of the tokens"
    words = CliRunner().invoke(app, ["advise", str(path), *SETTING])
    told = " ".join(words.output.split())
    assert f"at most {size(needed[0])} on a rank as trees, {size(needed[1])} as documents of their own" in told
    assert (
        "2 trees hold 8 sequences: 10,240 tokens in the place of 34,816" in words.output and "Simulated" in words.output
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"parents": [-1, 5], "lengths": [1, 1]}', "line 2: segment 1 has the parent 5"),
        ('{"length": 7}', "line 2 is no tree"),
    ],
)
def test_a_line_that_is_no_tree_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trees.jsonl"
    path.write_text(json.dumps(STAR) + "\n" + line)
    answer = CliRunner().invoke(app, ["advise", str(path), *SETTING])
    assert answer.exit_code != 0 and words in " ".join((answer.output + str(answer.exception)).split())


def test_a_file_of_trees_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "trees.jsonl"
    path.write_text(json.dumps(STAR) + "\n", encoding="utf-8-sig")
    found = read_trees(path)
    assert found is not None and [mask.length for mask in found] == [5120]
