"""Proves that the Hopper kernels compile for sm90 with the Triton at hand, without a GPU, into Hopper's own instructions.

What they compute is the GPU suite's to prove (benchmarks/gpu.py): Gluon has no interpreter.
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
from flexcp.executor.kernels import hopper_kernel

SCRIPT = Path(__file__).with_name("hopper_compile.py")
SHARED_MEMORY = 227 << 10


def test_compiles_for_hopper() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in made] == ["forward_kernel", "keys_kernel", "queries_kernel"]
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
    assert "64, 128; got 80" in (hopper_kernel.supports(cuda, torch.bfloat16, 80, 80) or "")
    assert "got torch.float32" in (hopper_kernel.supports(cuda, torch.float32, 128, 128) or "")


def test_heads_take_turns_by_the_l2() -> None:
    """As many tiles as programs where keys and values of all KV heads are more than 128 MiB: 8 KV heads of 128, over 32,768 keys."""
    row = (128 + 128) * 2
    turns = [hopper_kernel.tiles_in_turn(n, row, 8, 132) for n in (16_384, 32_768, 32_769, 65_536)]
    assert turns == [1, 1, 132, 132]
    assert hopper_kernel.tiles_in_turn(65_536, row, 1, 132) == 1
    assert hopper_kernel.tiles_in_turn(65_536, row // 2, 4, 132) == 1
    assert hopper_kernel.tiles_in_turn(65_536, row, 8, 116) == 116  # with a margin of 16


@pytest.mark.parametrize(("mask", "keys"), [(masks.full(), 1024), (masks.causal(), 1024), (masks.window(255, 0), 384)])
def test_reach_is_the_longest_tiles(monkeypatch: pytest.MonkeyPatch, mask: masks.Mask, keys: int) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    work = hopper_kernel.HopperWork(mask.slices(1000), 8, 2, 128, 128, torch.device("cpu"))
    assert work.forward_segments.reach == keys  # in blocks of 128
    nothing = hopper_kernel.HopperWork(np.zeros((0, 6), np.int64), 8, 2, 128, 128, torch.device("cpu"))
    assert nothing.forward_segments.reach == 0
