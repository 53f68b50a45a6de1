"""Run the ``main`` of an example on the ranks of a pool, in a process group that already exists; light to import (see
parallel_runs.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch.distributed as dist
from loss_warning import refusing_the_loss_warning

EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name: str) -> ModuleType:
    """Return an example, imported as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(group: dist.ProcessGroup, name: str, arguments: list[str]) -> str:
    """Run an example and return what it prints on this rank."""
    text = io.StringIO()
    with (
        patch("sys.argv", [name, *arguments]),
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(text),
        refusing_the_loss_warning(),
    ):
        loaded(name).main()
    return text.getvalue()
