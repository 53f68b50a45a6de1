"""Tests of the coverage page: lines are counted for each top-level folder or module of flexcp, and the total is the
share of all lines, not the mean of the shares.
"""

from __future__ import annotations

import json
from pathlib import Path

import covered


def test_shares_are_of_lines(tmp_path: Path) -> None:
    counts = {"src/flexcp/plan/a.py": (30, 30), "src/flexcp/plan/b.py": (10, 0), "src/flexcp/cost.py": (60, 54)}
    files = {name: {"summary": {"num_statements": n, "covered_lines": m}} for name, (n, m) in counts.items()}
    (tmp_path / "coverage.json").write_text(json.dumps({"files": files}))
    covered.main([str(tmp_path / "coverage.json"), "--tests", "some tests", "--page", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert "with some tests: **84.0 %** of 100 lines" in page
    assert "| `plan` | 40 | 75.0 % |" in page and "| `cost` | 60 | 90.0 % |" in page
