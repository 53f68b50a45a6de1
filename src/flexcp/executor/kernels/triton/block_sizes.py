"""The block sizes of the Triton kernels, by GPU, dtype and head size.

They are those that were fastest on an H200 (docs/lab-notes.md), or that fit the shared memory of other GPUs.
"""

from __future__ import annotations

import torch

from flexcp.executor.kernels.triton.work import Blocks, WorkList


def forward_blocks(work: WorkList, dtype: torch.dtype) -> Blocks:
    """Return the block sizes of the forward kernel."""
    if dtype == torch.float32:
        return _float32_blocks(work)
    if work.copy_engine:
        return Blocks(128, 64, 4, 2, 2, tma=True) if work.widest <= 128 else Blocks(128, 64, 8, 2, tma=True)
    return Blocks(128, 64, 8, 2) if work.widest <= 128 else Blocks(64, 32, 4, 2)


def keys_blocks(work: WorkList, dtype: torch.dtype) -> Blocks:
    """Return the block sizes of the kernel of dk and dv."""
    if dtype == torch.float32:
        return _float32_blocks(work)
    if work.copy_engine:
        return Blocks(64, 64, 4, 2, 2, tma=True) if work.widest <= 128 else Blocks(64, 64, 8, 1, tma=True)
    return Blocks(64, 64, 4, 1) if work.widest <= 128 else Blocks(32, 32, 4, 1)


def queries_blocks(work: WorkList, dtype: torch.dtype) -> Blocks:
    """Return the block sizes of the kernel of dq."""
    if dtype == torch.float32:
        return _float32_blocks(work)
    if work.copy_engine:
        return Blocks(64, 64, 4, 2, 2, tma=True) if work.widest <= 128 else Blocks(64, 32, 8, 2, tma=True)
    return Blocks(64, 64, 4, 1) if work.widest <= 128 else Blocks(32, 32, 4, 1)


def _float32_blocks(work: WorkList) -> Blocks:
    """Return the block sizes that all kernels use in float32."""
    return Blocks(32, 32, 8, 1) if work.widest <= 128 else Blocks(16, 32, 8, 1)
