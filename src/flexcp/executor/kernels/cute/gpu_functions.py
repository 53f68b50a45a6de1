"""The GPU functions of the CuTe kernel, compiled once for a model (dtype, heads that share a KV head, softcap).

Compiling takes some seconds, so the result is kept on disk (:mod:`flexcp.executor.kernels.cute.kept`). Addresses, sizes
and strides are numbers in the arguments of a function, so no batch makes it compile again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
import tvm_ffi  # noqa: F401  (compiled functions are called through it; without it this kernel cannot be imported)
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_ptr

from flexcp.executor.kernels.cute.backward import Backward
from flexcp.executor.kernels.cute.forward import Forward
from flexcp.executor.kernels.cute.kept import kept
from flexcp.executor.kernels.cute.rows import After, Before, Close, Open
from flexcp.executor.kernels.hopper.kernel import STAGES
from flexcp.executor.kernels.hopper.tiles import BLOCK

HEAD_SIZE = 128
TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}


@cache
def compiled_before(dtype: torch.dtype, pack: int, has_dlse: bool) -> Any:
    """Return the compiled :class:`Before`, which runs before a backward whose launch alone adds to dq."""
    kind = TYPES[dtype]
    pointers = [_pointer(kind)] * 2 + [_pointer(Float32, 4)] * 3 + [_pointer(Float32)]
    numbers = [Int32(1)] * 2 + [Int64(8)] * 8
    return _compiled(Before(kind, pack, has_dlse), pointers, numbers, "before", dtype, pack, has_dlse)


@cache
def compiled_after(dtype: torch.dtype, pack: int) -> Any:
    """Return the compiled :class:`After`, which runs after a backward whose launch alone adds to dq."""
    pointers = [_pointer(Float32), _pointer(TYPES[dtype])]
    numbers = [Int32(1)] * 2 + [Int64(8)] * 2 + [Float32(1.0)]
    return _compiled(After(TYPES[dtype], pack), pointers, numbers, "after", dtype, pack)


@cache
def compiled_open(pack: int, clears: bool) -> Any:
    """Return the compiled :class:`Open`, which packs the statistics of rows; with ``clears`` it sets their dq to 0."""
    pointers = [_pointer(Float32)] + [_pointer(Float32, 4)] * 3 + [_pointer(Uint8, 1)]
    numbers = [Int32(1)] * 3 + [Int64(8)] * 6
    return _compiled(Open(pack, clears), pointers, numbers, "open", pack, clears)


@cache
def compiled_close(dtype: torch.dtype) -> Any:
    """Return the compiled :class:`Close`, which closes an open dq and writes it in this dtype."""
    pointers = [_pointer(Float32), _pointer(TYPES[dtype]), _pointer(Uint8, 1)]
    numbers = [Int32(1)] * 3 + [Int64(8)] * 4 + [Float32(1.0)]
    return _compiled(Close(TYPES[dtype]), pointers, numbers, "close", dtype)


@cache
def compiled_forward(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    share: int,
    pack: int,
    softcap: bool,
    fresh: bool,
    finishes: bool,
    zeroes: bool,
) -> Any:
    """Return the compiled forward kernel of a model; the arguments mean what they do in :class:`Forward`."""
    kind, out = TYPES[dtype], TYPES[out_dtype]
    key = (dtype, out_dtype, share, pack, softcap, fresh, finishes, zeroes)
    kernel = Forward(kind, out, share, pack, HEAD_SIZE, HEAD_SIZE, BLOCK, STAGES, softcap, fresh, finishes, zeroes)
    pointers = [_pointer(kind)] * 3 + [_pointer(out), _pointer(Float32, 4), _pointer(kind)] + [_pointer(Int32)] * 3
    numbers = [Int32(1)] * 4 + [Int64(8)] * 12 + [Float32(1.0), Float32(1.0), Int32(1)]
    return _compiled(kernel, pointers, numbers, "forward", *key)


@cache
def compiled_backward(dtype: torch.dtype, share: int, pack: int, softcap: bool, order: str, zeroes: bool) -> Any:
    """Return the compiled backward kernel of a model; the arguments mean what they do in :class:`Backward`."""
    kind = TYPES[dtype]
    kernel = Backward(kind, share, pack, HEAD_SIZE, HEAD_SIZE, STAGES, softcap, order, zeroes)
    pointers = [_pointer(kind)] * 4 + [_pointer(Float32, 4)] + [_pointer(Float32)] * 3 + [_pointer(Int32)] * 3
    numbers = [Int32(1)] * 4 + [Int64(8)] * 14 + [Float32(1.0), Float32(1.0), Int32(1), Int32(1)]
    return _compiled(kernel, pointers, numbers, "backward", dtype, share, pack, softcap, order, zeroes)


def _compiled(kernel: Any, pointers: list[Any], numbers: list[Any], *key: Any) -> Any:
    """Compile a kernel for such arguments, or load it from disk.

    ``key`` holds what tells it from other kernels of this package.
    """
    arguments = (*pointers, *numbers, cuda.CUstream(0))
    name = "-".join(str(x).removeprefix("torch.") for x in key)
    return kept(name, lambda: cute.compile(kernel, *arguments, options="--enable-tvm-ffi"))


def _pointer(kind: Any, alignment: int = 16) -> Any:
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=alignment)
