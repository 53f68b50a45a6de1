"""Proves that the docs' Python blocks run. A page's blocks run in order in one namespace; scripts run under torchrun on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import blocks
import pytest

BLOCKS = blocks.all_blocks()
PAGES = sorted({block.page for block in BLOCKS if block.ranks == 0 and block.excuse is None})
SCRIPTS = {block.name: block for block in BLOCKS if block.ranks}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__docs__"}
    for block in BLOCKS:
        if block.page == page and block.ranks == 0 and block.excuse is None:
            # Lines in tracebacks are the page's own.
            code = compile("\n" * block.line + block.code, str(blocks.ROOT / page), "exec")
            exec(block.before, names)
            exec(code, names)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run_under_torchrun(name: str, tmp_path: Path) -> None:
    block = SCRIPTS[name]
    (tmp_path / "script.py").write_text(block.code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(block.ranks), "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_pages_that_matter_have_blocks_that_run() -> None:
    assert {"tutorial.md", "concepts.md", "strategies.md", "tuning.md", "reports.md"} <= set(PAGES)
    assert any(name.startswith("README.md") for name in SCRIPTS)
    assert any(name.startswith("tutorial.md") for name in SCRIPTS)


def test_what_comments_mean() -> None:
    text = "a\n\n```python\nx = 1\n```\n\n<!-- run: torchrun 3 -->\n```python\ny\n```\n<!-- not run here: needs eight GPUs -->\n\n```py\nz\n```\n```\nq\n```\n"
    found = list(blocks.blocks_of(text, "p"))
    assert [(b.code, b.ranks, b.excuse, b.line) for b in found] == [
        ("x = 1\n", 0, None, 3),
        ("y\n", 3, None, 8),
        ("z\n", 0, "needs eight GPUs", 13),
    ]
    with pytest.raises(ValueError, match="none of"):
        list(blocks.blocks_of("<!-- not run here: no -->\n```python\nx\n```\n", "p"))
