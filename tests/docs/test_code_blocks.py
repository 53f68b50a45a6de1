"""Tests that the Python blocks of the docs run. The blocks of a page run in order in one namespace; scripts run on
several real processes.
"""

from __future__ import annotations

import socket
from pathlib import Path

import blocks
import pytest

from flexcp.measure.fork_server import server
from flexcp.measure.ranks import PRELOAD

BLOCKS = blocks.all_blocks()
ELSEWHERE = {"data.md"}
"""Pages whose blocks another test runs (tests/data/test_docs.py)."""
PAGES = sorted({block.page for block in BLOCKS if block.ranks == 0 and block.excuse is None} - ELSEWHERE)
SCRIPTS = {block.name: block for block in BLOCKS if block.ranks}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__docs__"}
    for block in BLOCKS:
        if block.page == page and block.ranks == 0 and block.excuse is None:
            # Empty lines before the code make line numbers in tracebacks those of the page.
            code = compile("\n" * block.line + block.code, str(blocks.ROOT / page), "exec")
            exec(block.before, names)
            exec(code, names)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run_on_several_processes(name: str, tmp_path: Path) -> None:
    """Processes get the environment variables that torchrun would set. They are forked from a server that has already
    imported torch, because importing takes seconds.
    """
    block = SCRIPTS[name]
    (tmp_path / "script.py").write_text(block.code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    context, started = server(PRELOAD), []
    for rank in range(block.ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(block.ranks)}
        environment = {**shared, **own, "LOCAL_WORLD_SIZE": str(block.ranks)}
        started.append(context.Process(target=blocks.run_script, args=(tmp_path, f"said {rank}", environment)))
        started[-1].start()
    try:
        for process in started:
            process.join(240)
    finally:
        for process in started:
            process.kill()
    told = [(tmp_path / f"said {rank}").read_text() for rank in range(block.ranks)]
    assert [process.exitcode for process in started] == [0] * block.ranks, told


def test_the_pages_that_matter_have_blocks_that_run() -> None:
    assert {"tutorial.md", "concepts.md", "strategies.md", "help.md", "telemetry.md", "kernels.md"} <= set(PAGES)
    assert any(name.startswith("tutorial.md") for name in SCRIPTS)


def test_what_comments_mean() -> None:
    text = "a\n\n```python\nx = 1\n```\n\n<!-- run: torchrun 3 -->\n```python\ny\n```\n"
    text += "<!-- not run here: needs eight GPUs -->\n\n```py\nz\n```\n```\nq\n```\n```bash\nflexcp x\n```\n"
    found = list(blocks.blocks_of(text, "p"))
    assert [(b.code, b.ranks, b.excuse, b.line) for b in found] == [
        ("x = 1\n", 0, None, 3),
        ("y\n", 3, None, 8),
        ("z\n", 0, "needs eight GPUs", 13),
        ("flexcp x\n", 0, None, 19),
    ]
    assert [b.language for b in found] == ["python", "python", "python", "bash"]
    with pytest.raises(ValueError, match="none of"):
        list(blocks.blocks_of("<!-- not run here: no -->\n```python\nx\n```\n", "p"))


@pytest.mark.parametrize("page", ["frameworks.md", "data.md"])
def test_whoever_reads_how_to_sum_gradients_reads_that_a_mean_is_wrong_there(page: str) -> None:
    """No code can detect this mistake, so the text beside the snippet must warn of it and say what to do instead."""
    paragraphs = blocks.pages()[page].split("\n\n")
    warned = [text for text in paragraphs if "fsdp.sum_gradients`" in text and "too large as there are ranks" in text]
    assert len(warned) == 1 and "mean" in warned[0] and "share(" in warned[0]
    shown = [i for i, text in enumerate(paragraphs) if text.rstrip().endswith("```") and "fsdp.sum_gradients(" in text]
    assert all(paragraphs[i + 1] == warned[0] for i in shown) and (shown or page == "data.md")
