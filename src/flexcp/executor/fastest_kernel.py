"""Fastest kernel: choose a kernel by timing, instead of by the rules of :mod:`flexcp.executor.kernels.choose`.

    print(fastest_kernel("cuda", torch.bfloat16, heads=32, kv_heads=8, head_dim=128))

:func:`fastest_kernel` times every kernel that can run such tensors on this device, forward and backward, on one causal
document or on slices of yours, and names the fastest one together with the times of all. Run it once for a model and
pass the name as ``kernel=``; training itself never times kernels.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from flexcp.executor.kernels import HOMES, Ints, Settings, find_kernel
from flexcp.executor.kernels.choose import Choice, why_not
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.one_device import local_backward, local_forward
from flexcp.executor.run.pass_recipe import covers
from flexcp.masks import K1, Q1, causal

SLOW = ("cpu", "reference")
"""Kernels that are not timed on a GPU: plain torch, written for exactness and not for speed."""


def fastest_kernel(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    slices: Ints | None = None,
    repeats: int = 10,
) -> Choice:
    """Time all kernels that can run these sizes and return the one whose forward and backward together are fastest.

    The reason in the result lists the milliseconds of all. ``v_head_dim`` is the head size of values, by default
    ``head_dim``. ``slices`` is the work to time, a NumPy array ``[slices, 6]`` such as
    ``flexcp.causal().slices(8192)``, which is the default: one causal document of 8,192 tokens. Each direction is timed
    ``repeats`` times, and the median counts. On a GPU the plain-torch kernels are left out.
    """
    times = kernel_times(
        device,
        dtype,
        heads,
        kv_heads,
        head_dim,
        v_head_dim or head_dim,
        causal().slices(8192) if slices is None else slices,
        repeats,
    )
    if not times:
        raise NotImplementedError(
            f"no kernel runs {dtype} with heads of {head_dim} on {torch.device(device)}; `flexcp doctor` says which "
            "kernels run here, and why others do not"
        )
    best = min(times, key=lambda name: sum(times[name]))
    told = ", ".join(f"{name} {a:.3g} + {b:.3g} ms" for name, (a, b) in times.items())
    return Choice(best, f"measured fastest on {torch.device(device)}: {told}")


def kernel_times(
    device: torch.device | str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    slices: Ints,
    repeats: int,
) -> dict[str, tuple[float, float]]:
    """Return the median milliseconds (forward, backward) of every kernel that can run these sizes, by kernel name.

    ``slices`` is the work to time, ``[slices, 6]``, and ``repeats`` how often each direction is timed. On a GPU the
    kernels of :data:`SLOW` are left out.
    """
    device = torch.device(device)
    sizes = (heads, kv_heads, head_dim, v_head_dim)
    queries, keys = int(slices[:, Q1].max()), int(slices[:, K1].max())
    q, k = (torch.randn(n, h, head_dim, device=device, dtype=dtype) for n, h in ((queries, heads), (keys, kv_heads)))
    v, do = (torch.randn(n, h, v_head_dim, device=device, dtype=dtype) for n, h in ((keys, kv_heads), (queries, heads)))
    types, settings, whole = types_of(q), Settings(head_dim**-0.5), covers(slices, queries)
    found = {}
    for name in HOMES:
        if (device.type == "cuda" and name in SLOW) or why_not(name, device, dtype, head_dim, v_head_dim):
            continue
        kernel = find_kernel(name)
        work = kernel.prepare(np.ascontiguousarray(slices), *sizes, device)
        out, lse = local_forward(kernel, work, whole, types, settings, q, k, v, rounded=True)
        inputs = (q, k, v, lse, OutputGradient(do, out, None, lse.dtype))
        forward = partial(local_forward, kernel, work, whole, types, settings, q, k, v, rounded=True)
        backward = partial(local_backward, kernel, work, whole, types, settings, *inputs)
        found[name] = (_median(forward, device, repeats), _median(backward, device, repeats))
    return found


def _median(call: Any, device: torch.device, repeats: int) -> float:
    """Return the median milliseconds of ``repeats`` calls, after one call to warm up."""
    call()
    times = []
    for _ in range(repeats):
        _settle(device)
        begin = time.perf_counter()
        call()
        _settle(device)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def _settle(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
