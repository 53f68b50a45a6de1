"""Tests of the page that benchmarks/trees.py makes of several shares of its batches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import trees


def share(loss: float, wrong_bytes: int = 0) -> trees.Found:
    return trees.Found(
        "2026-01-01",
        "machine",
        batches=2,
        tokens=1000,
        sequences=7,
        wrong_bytes=wrong_bytes,
        runs=Counter({"blocks/3": 2, "ulysses/2": 1}),
        refused=Counter({"ulysses/3": 1}),
        worst={"loss": loss, "log_probs": 2e-16},
    )


def test_shares_add_up_and_the_worst_error_counts() -> None:
    found = trees.joined([share(3e-12), share(1e-16)])
    assert (found.batches, found.tokens, found.sequences, found.wrong_bytes) == (4, 2000, 14, 0)
    assert found.worst == {"loss": 3e-12, "log_probs": 2e-16} and not found.failed
    page = trees.page(found)
    assert "in 2 shares" in page and "shares" not in trees.page(share(1e-16))
    assert "4 batches" in page and "2,000 tokens" in page and "loss 3.0e-12, log-probs 2.0e-16" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith(("| blocks", "| ulysses"))]
    assert [row[3] for row in rows] == ["0 (2 refused)", "4"] and rows[0][2] == "2"


def test_an_error_above_the_limit_and_other_bytes_fail() -> None:
    assert trees.joined([share(1e-16), share(2e-9)]).failed
    assert trees.joined([share(1e-16, wrong_bytes=1), share(1e-16)]).failed


def test_a_saved_share_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    trees.save(share(1e-16), file)
    assert json.loads(file.read_text())["runs"] == {"blocks/3": 2, "ulysses/2": 1}
    assert trees.read(file) == share(1e-16)


def test_a_sample_meets_all_numbers_of_ranks() -> None:
    for number in (5, 20, 40):
        seeds = trees.sampled(range(200), number, 5)
        assert len(seeds) == number and {seed % 5 for seed in seeds} == set(range(5))
    assert trees.sampled(range(200), 20, 5)[-1] > 150
