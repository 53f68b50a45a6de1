"""slice_attention: attention on one device, without a plan or a group, for packed documents and structured masks.

    out = flexcp.slice_attention(q, k, v, flexcp.causal(), lengths=[5000, 120, 77])

A mask is turned into slices, six integers each, over the rows of the packed documents; :func:`packed_slices` makes them
once for all layers that share a mask. Both directions are registered operators whose shapes torch can trace, so a
compiled model has no graph break. Under torch.compile the mask must be passed as this tensor of slices, because a
Python object would be a constant of the graph and make torch compile again for every batch. The values of the tensor
never enter the graph; only the number of slices does, as a dynamic shape.

Work lists are cached by the values of the slices, so the layers of a model and the backward share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp.batch import Batch, MaskLike, make_batch
from flexcp.executor.arguments import attention_scale, check_call, check_running, check_tensors
from flexcp.executor.kernels import Ints, accumulator_dtype, find_kernel, lasting, uploaded
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.executor.kernels.sinks_and_delta import OutputGradient, sinks_gradient, with_sinks
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.one_device import local_backward, local_forward
from flexcp.executor.run.pass_recipe import covers
from flexcp.executor.torch_operators import Gradients, Inputs, Numbers, Results, register_attention
from flexcp.masks import K1, Q1, is_empty, overlapping_pair, shift, trim

REMEMBERED = 64
"""How many work lists are cached: more than a model has masks, and few enough to drop old batches soon."""


def packed_slices(lengths: Sequence[int] | Ints, mask: MaskLike) -> Tensor:
    """Return the slices of documents laid end to end, int64 ``[slices, 6]`` on the CPU, for :func:`slice_attention`.

    ``mask`` is one mask for all documents, or a list with one for each. The table may end with empty slices, because it
    has at least two rows.
    """
    return _slices_of(make_batch(lengths, mask))


def slice_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | Batch | Tensor,
    lengths: Sequence[int] | Ints | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of packed documents on one device.

    ``q`` is ``[tokens, heads, head_dim]``; ``k`` and ``v`` have the KV heads, and ``v`` may have another head size.
    ``mask`` is one mask for documents of the given ``lengths`` (by default one document), a list with a mask for each
    document, a :class:`flexcp.batch.Batch` with one mask, or the tensor that :func:`packed_slices` makes of
    masks and lengths, which torch.compile needs. With a batch or a tensor ``lengths`` is not used. ``sm_margin`` is how
    many multiprocessors the kernel leaves free. The other arguments and the result are those of
    :func:`flexcp.attention`.
    """
    check_tensors({"q": q, "k": k, "v": v}, sinks)
    check_running(kernel, deterministic, sm_margin, return_lse)
    if isinstance(mask, Tensor):
        slices = mask
    elif torch.compiler.is_compiling():
        raise ValueError(
            "under torch.compile pass the mask as a tensor made outside: slices = flexcp.packed_slices(lengths, mask)"
        )
    else:
        batch = mask if isinstance(mask, Batch) else make_batch([len(q)] if lengths is None else lengths, mask)
        if len(batch.masks) > 1:
            raise ValueError(
                f"the batch has {len(batch.masks)} masks, {', '.join(m.name for m in batch.masks)}, and nothing says "
                "which one this call is for: give the mask and lengths= of this layer"
            )
        if batch.tokens != len(q):
            raise ValueError(f"the documents have {batch.tokens} tokens in all, but q has {len(q)} rows")
        slices = _slices_of(batch)
    _check(q, k, v, slices, sinks, scale, softcap)
    numbers = Numbers(attention_scale(q, scale), softcap, deterministic, sm_margin, kernel)
    out, lse = _forward(q, k, v, sinks, slices, *numbers)
    return (out, lse.to(accumulator_dtype(q.dtype))) if return_lse else out


def _slices_of(batch: Batch) -> Tensor:
    """Return the slices of a batch's mask over the rows of all documents end to end, int64 ``[slices, 6]``."""
    mask = batch.masks[0]
    begin = np.repeat(batch.starts[:-1], np.diff(mask.first))
    table = shift(mask.slices, begin, begin)
    # torch.compile specialises on sizes 0 and 1: add empty slices so that there are at least two.
    table = np.concatenate([table, np.zeros((max(0, 2 - len(table)), 6), np.int64)])
    return uploaded(table, torch.device("cpu"))


def _attend(x: Inputs, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Run the forward and return the output in the model's dtype and the LSE in the dtype that the backward takes."""
    q, k, v, sinks, slices = x
    module, work, whole = _work_of(q, k, v, slices, numbers.kernel)
    out, lse = local_forward(module, work, whole, types_of(q), numbers.settings, q, k, v, rounded=sinks is None)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def _gradients(back: Gradients, x: Inputs, made: Results, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward and return dq, dk, dv and dsinks (empty without sinks)."""
    q, k, v, sinks, slices = x
    module, work, whole = _work_of(q, k, v, slices, numbers.kernel)
    gradient = OutputGradient(back.do, made.out, back.dlse, made.lse.dtype)
    dq, dk, dv = local_backward(module, work, whole, types_of(q), numbers.settings, q, k, v, made.lse, gradient)
    dsinks = q.new_empty(0) if sinks is None else sinks_gradient(sinks, made.lse, gradient.delta)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


_forward = register_attention(("slice_attention_forward", "slice_attention_backward"), _attend, _gradients, (Numbers,))


def _work_of(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, kernel: str | None) -> tuple[Any, Any, bool]:
    """Return (kernel module, its work list for these slices, whether every query row is in a slice)."""
    sizes = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    return _work(kernel, slices.numpy().tobytes(), len(q), len(k), sizes, q.dtype, q.device)


@lru_cache(REMEMBERED)
def _work(
    kernel: str | None,
    slices: bytes,
    queries: int,
    keys: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Any, Any, bool]:
    """Check the slices and make what :func:`_work_of` returns; results are cached.

    ``slices`` is the table's bytes, ``sizes`` (heads, KV heads, head_dim, v_head_dim). Slices outside of the rows, or
    that share a (query, key) pair, raise ValueError.
    """
    table = trim(np.frombuffer(slices, np.int64).reshape(-1, 6))
    table = table[~is_empty(table)]
    if len(table) and (table.min(axis=0)[:4].min() < 0 or table[:, Q1].max() > queries or table[:, K1].max() > keys):
        wrong = table[(table[:, :4].min(axis=1) < 0) | (table[:, Q1] > queries) | (table[:, K1] > keys)][0]
        raise ValueError(
            f"slice {tuple(wrong.tolist())} lies outside of {queries} queries and {keys} keys; "
            "make slices by flexcp.packed_slices from lengths that add up to them"
        )
    clash = overlapping_pair(table)
    if clash is not None:
        a, b = (tuple(table[i].tolist()) for i in clash)
        raise ValueError(
            f"slices {a} and {b} share a (query, key) pair, which would be counted twice; make them disjoint, or by "
            "flexcp.packed_slices"
        )
    module = find_kernel(choose_kernel(device, dtype, sizes[2], sizes[3], kernel).kernel)
    with lasting():
        return module, module.prepare(table, *sizes, device), covers(table, queries)


def _check(
    q: Tensor, k: Tensor, v: Tensor, slices: Tensor, sinks: Tensor | None, scale: float | None, softcap: float | None
) -> None:
    """Raise ValueError for tensors whose shapes, dtypes or devices do not fit together, or a wrong scale or softcap."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} is [tokens, heads, head size]; got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q {q.dtype}; give them one dtype")
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q, k, v are [tokens, heads, head_dim], [keys, KV heads, head_dim], [keys, KV heads, v_head_dim], heads a "
            f"multiple of KV heads; got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if slices.dtype != torch.int64 or slices.dim() != 2 or slices.shape[1] != 6 or slices.device.type != "cpu":
        raise ValueError(
            f"slices is an int64 tensor [slices, 6] on the CPU, made by flexcp.packed_slices; got {slices.dtype} of "
            f"shape {tuple(slices.shape)} on {slices.device}"
        )
    check_call(q, {"k": k, "v": v, "sinks": sinks}, scale, softcap)
