"""What programs of all three Triton kernels do alike: find their tile, and load blocks of rows.

A program computes a tile for a group of heads, or with an SM margin several one after the other. Blocks are loaded by
the copy engine (``TMA``: the tensor is a tensor descriptor) or by pointers. A block is as wide as the next power of two
of the head size (``BLOCK_D``, ``BLOCK_V``). Columns beyond the head size are read as zeros, by masks or by the bounds
of the tensor descriptor, and are never written.

Integer arguments are never specialised (``UNSPECIALISED``), so no batch makes a kernel compile again. Only properties
of the model are constants (dtype, head sizes, heads per KV head, softcap or not).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

UNSPECIALISED = [
    "n_tiles",
    "groups",
    "chunk",
    "n_programs",
    "scale",
    "softcap",
    "sq0",
    "sq1",
    "sk0",
    "sk1",
    "sv0",
    "sv1",
    "so0",
    "so1",
    "sl0",
    "sl1",
    "sd0",
    "sd1",
    "sdq0",
    "sdq1",
    "sdk0",
    "sdk1",
    "sdv0",
    "sdv1",
    "rows",
    "heads",
]
"""All arguments of the three kernels that are numbers and not constants; each kernel has some of them."""


@triton.jit
def whose(program, n_tiles, groups, chunk):
    """Return the tile and the group of heads of item ``program``.

    Each group takes ``chunk`` tiles before the next group's turn. With large chunks, programs that run at the same time
    read the same keys; with small ones, long tiles of the last group do not start late.
    """
    first = program // (chunk * groups) * chunk
    within = program - first * groups
    width = tl.minimum(chunk, n_tiles - first)
    return first + within % width, within // width


@triton.jit
def load_block(
    x, row, head, s0, s1, n, d, live, N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr
):
    """Load ``N`` rows of one head from row ``row`` on.

    A tensor descriptor (``TMA``) ignores ``live``. Pointers give 0 where ``live`` is false, unless ``WHOLE`` says that
    it never is.
    """
    if TMA:
        block = x.load([row, head, 0]).reshape(N, BLOCK_D)
    else:
        at = x + row * s0.to(tl.int64) + head * s1.to(tl.int64) + (n * s0)[:, None] + d[None, :]
        block = tl.load(at) if WHOLE else tl.load(at, mask=live, other=0.0)
    return block


@triton.jit
def load_packed(
    x,
    row0,
    head0,
    s0,
    s1,
    row,
    head,
    d,
    live,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load a block of packed rows (a token and a head each) from row ``row0`` and head ``head0`` on.

    A tensor descriptor (``TMA``) ignores ``live``. Pointers give 0 where ``live`` is false, unless ``WHOLE`` says that
    it never is.
    """
    if TMA:
        block = x.load([row0, head0, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        at = x + row0 * s0.to(tl.int64) + head0 * s1.to(tl.int64) + (row * s0 + head * s1)[:, None] + d[None, :]
        block = tl.load(at) if WHOLE else tl.load(at, mask=live, other=0.0)
    return block
