"""Proves that the CuTe kernels compile for sm90 without a GPU into matrix products that overlap, and that their work
items are dealt out evenly to programs.

Their results are checked on a GPU (benchmarks/gpu.py), because the CuTe DSL has no interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexcp import masks
from flexcp.executor.kernels import NO_ROWS
from flexcp.executor.kernels.cute import work as cute_work
from flexcp.executor.kernels.cute.items import (
    ROW_PRICE,
    SAVED,
    dealt,
    group_by_group,
    in_turns,
    longest_program,
    tiles_together,
)
from flexcp.executor.kernels.hopper.tiles import key_tiles
from flexcp.executor.kernels.tiles import TILE_PRICE, SegmentList, segment_list

SCRIPT = Path(__file__).with_name("cute_compile.py")
INSTRUCTIONS = {
    "forward": ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"),
    "forward_finishing": ("wgmma.mma_async", "cp.async.bulk.tensor", "stmatrix", "setmaxnreg"),
    "backward": ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "add.v4.f32", "setmaxnreg"),
    "backward_open": ("wgmma.mma_async", "cp.reduce.async.bulk.tensor", "add.v4.f32", "st.shared.v4", "setmaxnreg"),
    "backward_alone": ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.reduce.async.bulk.global", "setmaxnreg"),
}
WAITS = {"forward": 8, "forward_finishing": 8, "backward": 20, "backward_open": 20, "backward_alone": 20}
"""Most waits for matrix products in a kernel; a compiler that serialises products waits after each of the 48 or 64."""


def disassembler() -> Path:
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm"


def compiled(kernel: str, folder: Path) -> str:
    """Compile the kernel; return its PTX. The folder then contains PTX and machine code."""
    pytest.importorskip("cutlass")
    settings = {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": str(folder)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), kernel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-3000:]
    (ptx,) = folder.glob("*.ptx")
    return ptx.read_text()


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        ("before", "ld.global.v4", "st.global.v4"),
        ("after", "ld.global.v4", "st.global"),
        ("open", "ld.global", "st.global.v4"),
        ("close", "ld.global.v4", "st.global.v4"),
    ],
)
def test_what_stands_around_the_backward_moves_whole_words(
    kernel: str, loads: str, stores: str, tmp_path: Path
) -> None:
    code = compiled(kernel, tmp_path)
    assert loads in code and stores in code


@pytest.mark.parametrize("kernel", ["open", "close"])
def test_states_of_dq_are_read_as_bytes(kernel: str, tmp_path: Path) -> None:
    assert re.search(r"ld\.global\.[bsu]8\b", compiled(kernel, tmp_path))


@pytest.mark.parametrize("kernel", list(INSTRUCTIONS))
def test_compiles_for_hopper_without_serialising_products(kernel: str, tmp_path: Path) -> None:
    code = compiled(kernel, tmp_path)
    assert all(i in code for i in INSTRUCTIONS[kernel]), [i for i in INSTRUCTIONS[kernel] if i not in code]
    if not disassembler().exists():
        pytest.skip(f"the PTX is right, but waits in machine code are not counted: there is no {disassembler()}")
    (cubin,) = tmp_path.glob("*.cubin")
    machine = subprocess.run([disassembler(), "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert machine.count("HGMMA") >= 48
    assert machine.count("WARPGROUP.DEPBAR") <= WAITS[kernel]


def test_refuses_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from flexcp.executor.kernels.cute import kernel as cute_kernel

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda", 0)
    assert cute_kernel.supports(cuda, torch.bfloat16, 128, 128) is None
    assert "head size 128; got 64 and 64" in (cute_kernel.supports(cuda, torch.bfloat16, 64, 64) or "")
    assert "9.0 (H100, H200); got cpu" in (cute_kernel.supports(torch.device("cpu"), torch.bfloat16, 128, 128) or "")
    with pytest.raises(NotImplementedError, match="got 64"):
        cute_kernel.prepare(np.zeros((0, 6), np.int64), 8, 2, 64, 64, cuda)


@given(
    blocks=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    groups=st.integers(1, 8),
    programs=st.integers(1, 40),
    turn=st.integers(1, 50),
    by_group=st.booleans(),
)
def test_every_item_is_dealt_once_and_no_program_gets_much_more(
    blocks: list[int], groups: int, programs: int, turn: int, by_group: bool
) -> None:
    sizes = np.array(blocks)
    order = group_by_group(np.arange(len(sizes))[::-1], groups) if by_group else in_turns(len(sizes), groups, turn)
    assert sorted(order.tolist()) == list(range(len(sizes) * groups))
    table = dealt(order, sizes, groups, programs)
    assert (table[-1] == -1).all() and table.shape[1] == programs
    assert sorted(table[table >= 0].tolist()) == sorted(order.tolist())
    # A program stops at the first round without an item, so no item may follow in a later round.
    assert not ((table[:-1] < 0) & (table[1:] >= 0)).any()
    work = np.where(table >= 0, sizes[np.maximum(table, 0) // groups] + TILE_PRICE, 0).sum(0)
    assert longest_program(table, sizes, groups) == work.max()
    if len(order) >= programs:
        assert work.max() - work.min() <= 2 * (sizes.max() + TILE_PRICE)


@pytest.mark.parametrize(
    ("lengths", "together"),
    [([8192], False), ([512] * 16, True), ([300] * 27, True), ([7085, 213, 53], False), ([128] * 64, False)],
)
def test_tiles_of_short_documents_are_dealt_together_if_that_saves_enough_rows(
    lengths: list[int], together: bool
) -> None:
    slices = packed(lengths)
    made = segment_list(key_tiles(slices, 4), 16, 64, descending=True)
    order = tiles_together(made, 16, 16)
    assert sorted(order.tolist()) == list(range(len(made.tiles)))
    by_keys = np.argsort(made.tiles[:, 0], kind="stable")
    saved = rows_read(made, np.arange(len(order)), 16) - rows_read(made, by_keys, 16)
    assert (ROW_PRICE * saved > SAVED * made.tiles[:, 3].sum()) == together
    if together:
        assert rows_read(made, order, 16) <= rows_read(made, by_keys, 16)
        assert (np.diff(made.tiles[order, 0]) >= 0).all()
    else:
        assert order.tolist() == list(range(len(order)))


def packed(lengths: list[int]) -> np.ndarray:
    """Return the slices of causal documents one after the other."""
    starts = np.cumsum([0, *lengths[:-1]])
    return np.concatenate([masks.shift(masks.causal().slices(n), s, s) for n, s in zip(lengths, starts, strict=True)])


def rows_read(made: SegmentList, order: np.ndarray, at_once: int) -> int:
    """Return the rows that each round of ``at_once`` tiles walks, each counted once, summed over the rounds."""
    total = 0
    for begin in range(0, len(order), at_once):
        rows = set()
        for _, _, at, left in made.tiles[order[begin : begin + at_once]].tolist():
            while left > 0:
                first, blocks = made.segments[at, :2].tolist()
                rows.update(range(first, first + blocks * 16))
                left, at = left - blocks, at + 1
        total += len(rows)
    return total


@pytest.mark.parametrize(
    ("lengths", "in_step"),
    [([6128], False), ([6144], True), ([6968, 1224], True), ([1024] * 8, False), ([1024] * 9, True)],
)
def test_lists_of_long_documents_add_to_96_mib_of_dq_in_step_and_compute_every_block_once(
    lengths: list[int], in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cute_work, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    slices, cpu = packed(lengths), torch.device("cpu")
    work = cute_work.CuteWork(slices, 32, 8, 128, 128, cpu, begins=NO_ROWS, finishes=NO_ROWS)
    used, (tiles, segments, items) = work.backward_tables(132)
    made = SegmentList(tiles.numpy().reshape(-1, 4), segments.numpy().reshape(-1, 8))
    found = items.numpy().reshape(-1, used)
    whole = segment_list(key_tiles(slices, 4), 16, descending=True)
    expected = [(key, query, group) for key, query in blocks_of(whole, range(len(whole.tiles))) for group in range(8)]
    computed = [(*x, item % 8) for item in found[found >= 0].tolist() for x in blocks_of(made, [item // 8])]
    assert sorted(computed) == sorted(expected)
    # In step, all programs begin with the first KV heads; otherwise they begin with all of them.
    assert len(set((found[0] % 8).tolist())) in ((1, 2) if in_step else (8,))
    assert work.in_step == (sum(lengths) > 8192)


def blocks_of(made: SegmentList, tiles: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first key and the first query of every block of these tiles."""
    found = []
    for tile in tiles:
        key, _, at, left = made.tiles[tile].tolist()
        while left > 0:
            first, blocks = made.segments[at, :2].tolist()
            found += [(key, first + 16 * i) for i in range(blocks)]
            left, at = left - blocks, at + 1
    return found


def test_descending_segments_are_the_same_blocks_from_the_other_end() -> None:
    slices = np.concatenate([masks.causal().slices(700), masks.shift(masks.window(99, 0).slices(500), 700, 700)])
    made = key_tiles(slices, 4)
    up, down = segment_list(made, 16, 20), segment_list(made, 16, 20, descending=True)
    assert np.array_equal(up.tiles[:, [0, 1, 3]], down.tiles[:, [0, 1, 3]])
    for a, b in zip(up.tiles, down.tiles, strict=True):
        rising, falling = [], []
        for tile, table, found in ((a, up.segments, rising), (b, down.segments, falling)):
            left, at = int(tile[3]), int(tile[2])
            while left > 0:
                found.append(table[at].tolist())
                left -= int(table[at, 1])
                at += 1
            assert left == 0
        assert rising == falling[::-1]
        assert [row[0] for row in falling] == sorted((row[0] for row in falling), reverse=True)
