"""The CuTe kernel: head size 128 in bf16 or fp16 on sm90, in NVIDIA's CuTe DSL (``flexcp[cute]``).

It has the interface of :mod:`flexcp.executor.kernels`. This file launches the functions of
:mod:`flexcp.executor.kernels.cute.gpu_functions` on the tables of
:class:`~flexcp.executor.kernels.cute.work.CuteWork`; a launch costs the host about 20 microseconds. ``deterministic``
gradients are computed by the hopper kernel, because here dq is added to memory in any order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.executor.kernels import NO_ROWS, Ints, Settings
from flexcp.executor.kernels.cute.gpu_functions import (
    HEAD_SIZE,
    compiled_after,
    compiled_backward,
    compiled_before,
    compiled_close,
    compiled_forward,
    compiled_open,
)
from flexcp.executor.kernels.cute.parts import FAR
from flexcp.executor.kernels.cute.rows import SPARE
from flexcp.executor.kernels.cute.work import CuteWork
from flexcp.executor.kernels.dq_states import ADDED, EMPTY
from flexcp.executor.kernels.hopper import kernel as hopper_kernel
from flexcp.executor.kernels.hopper.kernel import programs_of
from flexcp.executor.kernels.hopper.tiles import BLOCK, QUERIES, TILE, key_tiles, packed_heads, query_tiles
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.kernels.tiles import useful
from flexcp.executor.kernels.triton.arguments import ALIGNMENT, aligned
from flexcp.executor.kernels.triton.work import check

FRESH = True
FINISHES = True


def useful_share(slices: Ints, share: int, backward: bool) -> float:
    """Return the fraction of the (query, key) pairs in computed blocks that attend.

    It is an upper bound of the kernel's efficiency. ``share`` is the number of query heads per KV head.
    """
    pack = packed_heads(share)
    if backward:
        return useful(slices, key_tiles(slices, share), QUERIES // pack * BLOCK)
    return useful(slices, query_tiles(slices, share, compact=True), TILE // pack * BLOCK)


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return why this kernel cannot run tensors like these, naming what it can run; None if it can."""
    reason = hopper_kernel.supports(device, dtype, head_dim, v_head_dim)
    if reason is None and (head_dim, v_head_dim) != (HEAD_SIZE, HEAD_SIZE):
        reason = f"the cute kernel has head size {HEAD_SIZE}; got {head_dim} and {v_head_dim}"
    return reason


def prepare(
    slices: Ints,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    device: torch.device,
    begins: Ints = NO_ROWS,
    finishes: Ints = NO_ROWS,
) -> CuteWork:
    """Make the work list of ``slices``, for every layer and for forward and backward.

    Raises NotImplementedError if the kernel does not support the device or head sizes.
    """
    reason = supports(device, torch.bfloat16, head_dim, v_head_dim)
    if reason:
        raise NotImplementedError(reason)
    return CuteWork(slices, heads, kv_heads, head_dim, v_head_dim, device, begins=begins, finishes=finishes)


def forward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    work: CuteWork,
    settings: Settings,
    out_THV: Tensor,
    lse_TH: Tensor,
    finished_THV: Tensor | None = None,
) -> None:
    """Add the slices' attention to ``out`` and ``lse``; with ``settings.fresh`` overwrite them.

    Rows that the list finishes (no later list adds to them) are written to ``finished`` instead of ``out``, if it is
    given.
    """
    made = work.forward_segments
    if not made.count:
        return
    finishes = finished_THV is not None and len(work.begins) + len(work.finishes) > 0
    rounded = finished_THV if finished_THV is not None and finishes else q_THD
    q, k, v = _fitting(work, (q_THD, k_TGD, v_TGV), (out_THV, lse_TH, rounded))
    programs, tables = work.forward_tables(programs_of(FAR, settings, work), settings.fresh)
    model = (q.dtype, out_THV.dtype, work.share, work.pack, settings.softcap is not None)
    zeroes = not (settings.fresh and work.covered_keys == len(k))
    compiled_forward(*model, settings.fresh, finishes, zeroes)(
        *_addresses(q, k, v, out_THV, lse_TH, rounded, *tables),
        len(q),
        len(k),
        work.heads,
        work.kv_heads,
        *_strides(q, k, v, out_THV, lse_TH, rounded),
        *_numbers(settings),
        programs,
        _stream(q.device),
    )


def backward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    do_THV: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    work: CuteWork,
    settings: Settings,
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGV: Tensor,
    opened: OpenRows | None = None,
    first_head: int = 0,
) -> None:
    """Add the slices' gradients to ``dq``, ``dk`` and ``dv``.

    With ``settings.fresh`` dq is overwritten. With ``settings.open_dq`` it is left open, for :func:`close_dq` to
    finish. ``opened`` is the result of :func:`open_dq` for a dq of which this one is all rows and the heads from
    ``first_head`` on.
    """
    if not work.forward_segments.count:
        return
    if settings.deterministic:
        inputs = (q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH, work, settings)
        hopper_kernel.backward(*inputs, dq_THD, dk_TGD, dv_TGV)
        return
    q, k, v, do = _fitting(work, (q_THD, k_TGD, v_TGV, do_THV), (lse_TH, delta_TH, dq_THD, dk_TGD, dv_TGV))
    programs, tables = work.backward_tables(programs_of(FAR, settings, work))
    order = "open" if settings.open_dq or settings.fresh else "rows"
    run = compiled_backward(q.dtype, work.share, work.pack, settings.softcap is not None, order, True)
    sums = torch.empty(dq_THD.shape, dtype=torch.float32, device=q.device) if settings.fresh else dq_THD
    if opened is None or opened.pack != work.pack or first_head % work.pack:
        opened, first_head = _opened(sums, lse_TH, delta_TH, work.pack, settings.fresh), 0
    statistics = opened.statistics[first_head * 2 * len(q) :]
    run(
        *_addresses(q, k, v, do, statistics, sums, dk_TGD, dv_TGV, *tables),
        len(q),
        len(k),
        work.heads,
        work.kv_heads,
        *_strides(q, k, v, do, sums, dk_TGD, dv_TGV),
        *_numbers(settings),
        0,
        programs,
        _stream(q.device),
    )
    if settings.fresh:
        _close(sums, dq_THD, settings)


@dataclass(frozen=True)
class OpenRows:
    """What the work lists of an open dq share.

    ``statistics`` are the LSEs and deltas of its rows in all heads, in the order of
    :mod:`flexcp.executor.kernels.cute.rows` for ``pack`` query heads in a block.
    """

    statistics: Tensor
    pack: int


def open_dq(
    dq_THD: Tensor, lse_TH: Tensor, delta_TH: Tensor, work: CuteWork, states_TH: Tensor | None = None
) -> OpenRows:
    """Set a dq to 0 and return what the lists that leave it open share; ``work`` is one of them.

    With ``states`` (:mod:`flexcp.executor.kernels.dq_states`) only what lists add to is set to 0.
    """
    if not work.heads or dq_THD.shape[1] % work.pack:
        raise ValueError(f"the heads of dq must be a multiple of {work.pack}; got {dq_THD.shape[1]}")
    return _opened(dq_THD, lse_TH, delta_TH, work.pack, True, states_TH)


def _opened(
    dq_THD: Tensor, lse_TH: Tensor, delta_TH: Tensor, pack: int, clears: bool, states_TH: Tensor | None = None
) -> OpenRows:
    """Pack the statistics of all rows of dq; with ``clears``, set dq, or what lists add to of it, to 0."""
    rows, heads = lse_TH.shape
    statistics = torch.empty(2 * rows * heads + SPARE, dtype=torch.float32, device=lse_TH.device)
    if rows * heads:
        run = compiled_open(pack, clears)
        tensors = (dq_THD, lse_TH, delta_TH)
        where = _addresses(*tensors, statistics, lse_TH if states_TH is None else states_TH)
        some = int(states_TH is not None)
        run(*where, rows, heads, some, *_strides(*tensors), _stream(lse_TH.device))
    return OpenRows(statistics, pack)


def close_dq(
    dq_THD: Tensor, settings: Settings, states_TH: Tensor | None = None, finished_THD: Tensor | None = None
) -> None:
    """Turn an open dq into the gradient, in place, or write the gradient to ``finished`` in that tensor's dtype.

    With ``states`` (:mod:`flexcp.executor.kernels.dq_states`) what lists do not add to is not read; nor is it written,
    except that results that nothing adds to are set to 0 in ``finished``.
    """
    _close(dq_THD, dq_THD if finished_THD is None else finished_THD, settings, states_TH)


def _close(open_THD: Tensor, dq_THD: Tensor, settings: Settings, states_TH: Tensor | None = None) -> None:
    """Write the gradient of an open dq to ``dq_THD``, which may be the same tensor."""
    rows, heads = dq_THD.shape[:2]
    if rows * heads:
        close = compiled_close(dq_THD.dtype)
        zeroes = ADDED if open_THD is dq_THD else EMPTY
        numbers = (rows, heads, 0 if states_TH is None else zeroes, *_strides(open_THD, dq_THD), settings.scale)
        where = _addresses(open_THD, dq_THD, dq_THD if states_TH is None else states_TH)
        close(*where, *numbers, _stream(dq_THD.device))


def backward_alone(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    lse_TH: Tensor,
    back: OutputGradient,
    work: CuteWork,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the model's dtype, by three launches; the slices must touch every query row."""
    assert back.out is not None
    q, k, v, do, out = _fitting(work, (q_THD, k_TGD, v_TGV, back.do, back.out), (lse_TH,))
    rows, heads, pack, stream = len(q), work.heads, work.pack, _stream(q.device)
    programs = programs_of(work.whole_segments.count * work.kv_heads, settings, work)
    made, whole = work.own_segments(programs)
    programs = programs_of(made.count * work.kv_heads, settings, work)
    statistics, sums = (
        torch.empty(size, dtype=torch.float32, device=q.device)
        for size in (2 * rows * heads + SPARE, heads // pack * (rows * pack + SPARE) * HEAD_SIZE)
    )
    dlse = lse_TH if back.dlse is None else back.dlse
    before = compiled_before(q.dtype, pack, back.dlse is not None)
    before(*_addresses(do, out, lse_TH, dlse, statistics, sums), rows, heads, *_strides(do, out, lse_TH, dlse), stream)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    empty = torch.empty if whole and work.covered_keys == len(k) else torch.zeros
    dk, dv = (empty(x.shape, dtype=x.dtype if whole else torch.float32, device=x.device) for x in (k, v))
    zeroes = work.covered_keys < len(k)
    run = compiled_backward(q.dtype, work.share, pack, settings.softcap is not None, "alone", zeroes)
    tables = (made.tiles, made.segments, work.items(made, programs, work.in_step))
    run(
        *_addresses(q, k, v, do, statistics, sums, dk, dv, *tables),
        rows,
        len(k),
        heads,
        work.kv_heads,
        *_strides(q, k, v, do, dq, dk, dv),
        *_numbers(settings),
        int(whole),
        programs,
        stream,
    )
    compiled_after(q.dtype, pack)(*_addresses(sums, dq), rows, heads, *_strides(dq), settings.scale, stream)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _fitting(work: CuteWork, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs, copied if the copy engine cannot load them as they are.

    Raises ValueError or NotImplementedError for tensors that this work list cannot run. Layouts that need no copy are
    remembered with the list, because another check would take the host longer than the launch.
    """
    layout = tuple((x.device, x.dtype, x.shape[1:], x.stride(), x.data_ptr() % ALIGNMENT) for x in (*inputs, *others))
    if layout in work.fitting:
        return inputs
    fitting = tuple(aligned(x) for x in inputs)
    check(work, supports, *fitting, *others)
    if all(map(operator.is_, fitting, inputs)):
        work.fitting.add(layout)
    return fitting


def _addresses(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of rows and heads of each tensor, in elements."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _numbers(settings: Settings) -> tuple[float, float]:
    """Return scale and softcap (0 for none); raise ValueError for a scale that is not above 0."""
    if not settings.scale > 0:
        raise ValueError(f"the scale of logits must be above 0; got {settings.scale}")
    return settings.scale, settings.softcap or 0.0


def _stream(device: torch.device) -> int:
    # The same as torch.cuda.current_stream, without making an object.
    return int(torch._C._cuda_getCurrentRawStream(device.index))
