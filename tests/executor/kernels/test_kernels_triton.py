"""Proves the Triton kernel in Triton's interpreter: every arrangement of heads, mask and way to call it keeps within
twice the reference kernel's error plus one rounding.

Also which inputs it refuses, and how. bfloat16 is tested on a GPU (benchmarks/gpu.py), because the interpreter
multiplies bfloat16 values as if their bits were integers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton_cases import all_shares

from flexcp import masks
from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.tiles import tile_list
from flexcp.executor.kernels.triton import arguments
from flexcp.executor.kernels.triton import kernel as triton_kernel
from flexcp.executor.kernels.triton.block_sizes import keys_blocks
from flexcp.executor.kernels.triton.turns import CHUNK, tiles_in_turn
from flexcp.executor.kernels.triton.work import SHORTEST_PART, Blocks, WorkList, check
from flexcp.measure.kernels.work import workload
from triton_interpreter import interpreting_pool

NAMES = {"out", "lse", "dq", "dk", "dv"}


@pytest.fixture(scope="module")
def shares(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """Return error / allowed error of each result of each case, computed in a process that uses the interpreter."""
    with interpreting_pool(1) as pool:
        found: dict[str, dict[str, float]] = pool.run(all_shares, request.config.getoption("--long"))[0]
    return found


def test_every_case_keeps_the_error_rule(shares: dict[str, dict[str, float]], request: pytest.FixtureRequest) -> None:
    assert len(shares) == (26 if request.config.getoption("--long") else 15)
    for name, share in shares.items():
        assert set(share) == NAMES, name
        assert all(s <= 1 for s in share.values()), (name, share)


def test_refuses_what_it_cannot_run() -> None:
    cpu = torch.device("cpu")
    assert "runs on CUDA tensors" in (triton_kernel.supports(cpu, torch.bfloat16, 128, 128) or "")
    for size in (0, 4, 84, 264):
        reason = triton_kernel.supports(cpu, torch.bfloat16, 128, size) or ""
        assert f"multiples of 8 up to 256; got {size}." in reason
        assert ("Pad the heads" in reason) == (size <= 256)
    assert "got torch.float64" in (triton_kernel.supports(cpu, torch.float64, 128, 128) or "")
    with pytest.raises(NotImplementedError, match="got 84"):
        triton_kernel.prepare(np.zeros((0, 6), np.int64), 4, 2, 84, 80, cpu)
    with pytest.raises(ValueError, match=r"above 0; got -1\.0"):
        arguments.scales(Settings(-1.0), torch.bfloat16)


def test_refuses_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    reason = triton_kernel.supports(torch.device("cuda", 0), torch.bfloat16, 128, 128)
    assert reason is not None
    assert "8.0 (Ampere) or newer; Tesla T4 has 7.5" in reason


def test_odd_strides_are_copied_or_refused() -> None:
    odd = torch.zeros(5, 2, 72)[..., :64]  # heads are 72 elements apart
    assert arguments.aligned(odd).is_contiguous()
    some_heads = torch.zeros(5, 4, 64)[:, 1:3]
    assert arguments.aligned(some_heads) is some_heads
    work = WorkList(np.zeros((0, 6), np.int64), 2, 2, 64, 64, torch.device("cpu"))
    q = torch.zeros(5, 2, 64)
    with pytest.raises(ValueError, match=r"multiples of 16 elements; got strides \(144, 72, 1\)"):
        check(work, lambda *_: None, q, q, q, odd)


@pytest.mark.parametrize(
    ("sizes", "unit", "columns"),
    [((128, 64), 16, [128, 64]), ((80, 16), 16, [128, 16]), ((72, 64), 8, [128, 64]), ((8, 136), 8, [16, 256])],
)
def test_heads_of_any_supported_size_are_read_where_they_are(
    sizes: tuple[int, int], unit: int, columns: list[int]
) -> None:
    """The user's tensors are not copied, neither whole tensors nor views of one projection's output."""
    work = WorkList(np.zeros((0, 6), np.int64), 4, 2, *sizes, torch.device("cpu"))
    assert work.unit == unit
    assert [arguments.columns(size) for size in sizes] == columns
    for size in sizes:
        both = torch.zeros(5, 6, size, dtype=torch.bfloat16)
        for x in (both, both[:, :4], both[:, 4:], both[1:3, 1:2]):
            assert arguments.aligned(x, work.unit) is x
    assert arguments.strides(torch.zeros(5, 6, sizes[0]), unit=unit) == [6 * sizes[0] // unit, sizes[0] // unit]


def test_packs_heads() -> None:
    pointers, boxes = Blocks(128, 64, 4, 2), Blocks(128, 64, 4, 2, tma=True)
    assert [pointers.pack(s) for s in (1, 3, 4, 7, 8, 128, 256)] == [1, 3, 4, 7, 8, 128, 128]
    assert [boxes.pack(s) for s in (1, 3, 4, 7, 12, 256)] == [1, 1, 4, 1, 4, 128]


@pytest.mark.parametrize(
    ("name", "rows", "turn"),
    [
        ("full", 32, 512),
        ("full", 16, 1024),
        ("causal", 32, 32),
        ("blockwise", 32, 32),
        ("docs16", 32, 32),
        ("docs64", 16, 32),
    ],
)
def test_heads_take_turns_where_tiles_are_uneven(name: str, rows: int, turn: int) -> None:
    """An H200 runs 264 programs at a time; here with 8 groups of heads and blocks of 64 keys."""
    made = tile_list(workload(name, 16_384).slices(), rows, 64)
    assert tiles_in_turn(made, 8, 264) == turn


def test_a_part_of_a_programs_work_is_long() -> None:
    made = tile_list(masks.full().slices(2048), 32, 64)  # 64 tiles of 32 blocks
    assert tiles_in_turn(made, 57, 256) == CHUNK  # of 456 blocks a program, 32 are 7.0 %
    assert tiles_in_turn(made, 58, 256) == 64  # of 464 blocks, 6.9 %


def test_long_key_tiles_are_split() -> None:
    work = WorkList(masks.window(400, 0).slices(500), 2, 1, 64, 64, torch.device("cpu"))
    blocks = keys_blocks(work, torch.float32)
    whole, parts = work.keys(blocks).counts, work.split_keys(blocks).counts
    assert parts.blocks == whole.blocks
    assert parts.longest <= SHORTEST_PART < whole.longest
    assert len(parts.tiles) > len(whole.tiles)


def test_a_work_list_knows_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A work list made for "cuda" belongs to the current device, since tensors name their device with a number."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    wanted = [torch.device("cuda"), torch.device("cuda", 1), torch.device("cpu")]
    found = [WorkList(np.zeros((0, 6), np.int64), 2, 2, 64, 64, d).device for d in wanted]
    assert found == [torch.device("cuda", 3), torch.device("cuda", 1), torch.device("cpu")]
