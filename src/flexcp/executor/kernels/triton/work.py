"""The work list of the Triton kernel: the slices of a call as tiles, on the device.

The kernels of the output and of dq compute tiles of rows, and the kernel of dk and dv tiles of keys. The sizes of a
kernel's blocks (:class:`Blocks`) decide how large its tiles are. So a list makes the tiles of a kernel when it is first
asked for them, and keeps them for all layers of a step. ``check`` refuses tensors that do not fit a list.

The work lists of the Hopper and CuTe kernels are built on this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from flexcp.executor.kernels import Ints
from flexcp.executor.kernels.tiles import TileList, split, tile_list, transposed
from flexcp.executor.kernels.triton.arguments import UNIT, fits

RESIDENT = 2
"""Programs that run at a time on one multiprocessor."""
PARTS, SHORTEST_PART = 6, 16
"""For dk and dv: about how many parts of tiles each running program gets, and the fewest blocks of a part."""


@dataclass(frozen=True)
class Blocks:
    """Sizes of one kernel: packed queries (``m``) and keys (``n``) of a block, and warps of a GPU program.

    A packed query is a token and one of the query heads that share a KV head. ``stages`` and ``edge_stages`` are the
    depths of the software pipelines of blocks without and with a mask.
    """

    m: int
    n: int
    warps: int
    stages: int
    edge_stages: int = 1
    tma: bool = False
    """Whether blocks are loaded by tensor descriptors (the copy engine of Hopper and later GPUs)."""

    def pack(self, share: int) -> int:
        """Return how many of the ``share`` query heads of a KV head are in one block: the largest divisor that fits."""
        fit = [p for p in range(1, min(share, self.m) + 1) if share % p == 0]
        # The boxes of a tensor descriptor must fill a block exactly.
        return max(p for p in fit if not self.tma or self.m % p == 0)


@dataclass(frozen=True)
class Tiles:
    """A tile list on the host (``counts``), and its tables on the device."""

    counts: TileList
    tiles: Tensor
    entries: Tensor

    @staticmethod
    def on_device(made: TileList, device: torch.device) -> Tiles:
        """Upload a tile list."""
        tables = (torch.from_numpy(x.reshape(-1)) for x in (made.tiles, made.entries))
        if device.type == "cuda":
            return Tiles(made, *(t.pin_memory().to(device, non_blocking=True) for t in tables))
        return Tiles(made, *tables)

    def __len__(self) -> int:
        return len(self.counts.tiles)


class WorkList:
    """The slices of a call as tiles, for the given heads; each kernel's tiles are made when they are first needed."""

    def __init__(self, slices: Ints, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device):
        self.slices, self.heads, self.kv_heads, self.device = slices, heads, kv_heads, numbered(device)
        self.head_dim, self.v_head_dim, self.share = head_dim, v_head_dim, heads // kv_heads
        self.widest = max(head_dim, v_head_dim)
        self.unit = math.gcd(UNIT, head_dim, v_head_dim)

    @cached_property
    def copy_engine(self) -> bool:
        """Whether the device can load blocks by tensor descriptors (Hopper, data-centre Blackwell)."""
        return self.device.type == "cuda" and (9, 0) <= torch.cuda.get_device_capability(self.device) < (12, 0)

    @cached_property
    def residents(self) -> int:
        """How many GPU programs run at a time.

        On a CPU (Triton's interpreter) it is a small number, so that tests split short lists too.
        """
        return RESIDENT * (multiprocessors(self.device) if self.device.type == "cuda" else 2)

    @cached_property
    def _made(self) -> dict[tuple[str, int, int], Tiles]:
        return {}

    def rows(self, blocks: Blocks) -> Tiles:
        """Return tiles of packed query rows (a token and a head), for blocks of these sizes."""
        return self._tiles("rows", blocks.m // blocks.pack(self.share), blocks.n)

    def keys(self, blocks: Blocks) -> Tiles:
        """Return tiles of keys with blocks of packed query rows, for blocks of these sizes."""
        return self._tiles("keys", blocks.n, blocks.m // blocks.pack(self.share))

    def split_keys(self, blocks: Blocks) -> Tiles:
        """Return tiles of keys like :meth:`keys`, with long ones split for balance."""
        return self._tiles("split", blocks.n, blocks.m // blocks.pack(self.share))

    def _tiles(self, side: str, height: int, block: int) -> Tiles:
        """Return the tiles of one side ("rows", "keys" or "split"), made on first use.

        ``height`` is the number of rows (or keys) of a tile, ``block`` that of keys (or rows) of a block.
        """
        key = (side, height, block)
        if key not in self._made:
            if side == "rows":
                made = tile_list(self.slices, height, block)
            else:
                made = tile_list(transposed(self.slices), height, block, odd_clear=False)
            if side == "split":
                each = made.blocks * self.kv_heads // (self.residents * PARTS)
                made = split(made, block, max(SHORTEST_PART, each))
            self._made[key] = Tiles.on_device(made, self.device)
        return self._made[key]


def check(
    work: WorkList, supports: Callable[..., str | None], q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> None:
    """Raise if tensors do not fit the work list.

    Raises ValueError for another device, unsuitable strides, several dtypes, or other heads or head sizes, and
    NotImplementedError for what ``supports``, the kernel's function, refuses.
    """
    for x in (q, k, v, *others):
        if x.device != work.device:
            raise ValueError(f"the work list was prepared for {work.device}, but a tensor is on {x.device}")
        if x.dim() == 3 and not fits(x, work.unit):
            raise ValueError(
                f"results need rows and heads at multiples of {work.unit} elements; got strides {tuple(x.stride())}"
            )
    reason = supports(work.device, q.dtype, work.head_dim, work.v_head_dim)
    if reason:
        raise NotImplementedError(reason)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v need one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    found = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    made = (work.heads, work.kv_heads, work.head_dim, work.v_head_dim)
    if found != made:
        raise ValueError(f"the work list is for (heads, KV heads, head size, V head size) {made}; got {found}")


def numbered(device: torch.device) -> torch.device:
    """Return the device with its number, as tensors name it: ``cuda`` is the current CUDA device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
