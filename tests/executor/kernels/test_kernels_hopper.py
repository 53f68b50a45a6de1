"""Proves that the Hopper kernels compile for sm90, with the installed Triton and without a GPU, into Hopper's own
instructions.

Their results are checked on a GPU (benchmarks/gpu.py), because Gluon has no interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from flexcp import masks
from flexcp.executor.kernels.hopper import kernel as hopper_kernel

SCRIPT = Path(__file__).with_name("hopper_compile.py")
SHARED_MEMORY = 227 << 10


def test_compiles_for_hopper() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in made] == ["forward_kernel", "keys_kernel", *["queries_kernel"] * 2]
    for name, shared, instructions in made:
        assert shared <= SHARED_MEMORY, (name, shared)
        assert all(instructions), (name, instructions)


def test_refuses_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert "9.0 (H100, H200); got cpu" in (hopper_kernel.supports(torch.device("cpu"), torch.bfloat16, 128, 128) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "9.0" in (hopper_kernel.supports(cuda, torch.bfloat16, 128, 128) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert hopper_kernel.supports(cuda, torch.bfloat16, 128, 64) is None
    assert "64, 128; got 80 and 128" in (hopper_kernel.supports(cuda, torch.bfloat16, 80, 128) or "")
    assert "got torch.float32" in (hopper_kernel.supports(cuda, torch.float32, 128, 128) or "")


def test_a_work_list_counts_its_turns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    work = hopper_kernel.HopperWork(masks.full().slices(65_536), 32, 8, 128, 128, torch.device("cpu"))
    assert work.forward_segments.count == 2048 and work.in_turn(132) == 132 and work.in_turn(116) == 116
    monkeypatch.setattr(hopper_kernel, "tiles_in_turn", lambda *_: 0)
    assert work.in_turn(132) == 132 and work.in_turn(100) == 0
    nothing = hopper_kernel.HopperWork(np.zeros((0, 6), np.int64), 8, 2, 128, 128, torch.device("cpu"))
    assert nothing.forward_segments.count == 0
