"""Random cases for GPU kernels, judged by the rule for every kernel, and a count of compilations.

A case is a batch of random documents with random masks, with or without sinks, softcap and an LSE gradient, run through
:func:`flexcp.slice_attention`. The error of each result against float64 may be twice the reference kernel's own error
in the same dtype plus one rounding. Kernels compile once per *model* (dtype, heads, head sizes, softcap):
:func:`compiled` counts the compilations, and no batch may add one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp import masks
from flexcp.executor.kernels import Settings, fa4_lists, find_kernel
from flexcp.executor.kernels.dq_states import EMPTY, OTHERS, dq_states
from flexcp.executor.run.laid_rows import NO_AREAS
from flexcp.executor.slice_attention import packed_slices, slice_attention
from flexcp.masks import Mask
from flexcp.measure.kernels.work import random_parents

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")
LONGEST = 700
WIDE = 6.0
"""The factor of queries in half of the cases."""


@dataclass(frozen=True)
class KernelSetup:
    """A kernel, and the sizes of the model that it is compiled for."""

    kernel: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    softcap: float | None = None
    foreign: bool = False
    """Whether all documents have one mask, and the batch goes to FlashAttention-4 at any price."""
    lists: bool = False
    """Whether the slices are run as several work lists over the same rows, some with only some heads,
    as the executor runs a plan's lists.
    """


MODELS = (
    KernelSetup("cute", "bfloat16", 8, 2, 128, 128),
    KernelSetup("cute", "float16", 6, 2, 128, 128),
    KernelSetup("cute", "bfloat16", 4, 4, 128, 128),
    KernelSetup("cute", "bfloat16", 7, 1, 128, 128, 15.0),
    KernelSetup("cute", "bfloat16", 8, 2, 128, 128, lists=True),
    KernelSetup("cute", "bfloat16", 4, 4, 128, 128, lists=True),
    KernelSetup("cute", "float16", 14, 2, 128, 128, 15.0, lists=True),
    KernelSetup("fa4", "bfloat16", 8, 2, 128, 128),
    KernelSetup("fa4", "bfloat16", 8, 2, 128, 128, foreign=True),
    KernelSetup("fa4", "float16", 4, 4, 128, 128, foreign=True),
    KernelSetup("hopper", "bfloat16", 8, 2, 128, 128),
    KernelSetup("hopper", "bfloat16", 4, 4, 64, 64),
    KernelSetup("hopper", "float16", 6, 2, 128, 64),
    KernelSetup("hopper", "bfloat16", 7, 1, 64, 128, 15.0),
    KernelSetup("triton", "bfloat16", 8, 2, 128, 128),
    KernelSetup("triton", "float16", 7, 1, 96, 96),
    KernelSetup("triton", "bfloat16", 3, 1, 64, 64, 15.0),
    KernelSetup("triton", "bfloat16", 4, 1, 192, 128),
    KernelSetup("triton", "bfloat16", 2, 2, 256, 256),
    KernelSetup("triton", "bfloat16", 8, 2, 80, 80),
    KernelSetup("triton", "float16", 4, 2, 72, 40),
    KernelSetup("triton", "float32", 4, 2, 64, 64),
    KernelSetup("triton", "float32", 2, 1, 128, 128, 15.0),
)


@dataclass(frozen=True)
class Worst:
    """The number of cases and of failures, and for each result the largest error over the allowed error."""

    model: KernelSetup
    cases: int
    failed: int
    share: dict[str, float]


def check_cases(model: KernelSetup, seeds: range) -> Worst:
    """Run the cases of ``seeds`` and return the worst errors."""
    worst: dict[str, float] = {}
    failed = 0
    if model.foreign:
        fa4_lists.OWN_PRICES = ((1e9, 1e9, 1e9), (1e9, 1e9, 1e9))
    for seed in seeds:
        shares = case_shares(model, seed)
        failed += not all(s <= 1 for s in shares.values())
        worst = {n: _larger(worst.get(n, 0.0), shares.get(n, 0.0)) for n in {**worst, **shares}}
    return Worst(model, len(seeds), failed, worst)


def _larger(a: float, b: float) -> float:
    return b if b != b or b > a else a  # NaN is the largest


def random_batch(rng: np.random.Generator, alike: bool = False) -> tuple[list[int], list[Mask]]:
    """Draw documents and their masks; with ``alike`` all are causal, full, or have one window."""
    lengths = [int(n) for n in rng.integers(1, rng.integers(2, LONGEST), rng.integers(1, 6))]
    if alike:
        one = (masks.causal(), masks.full(), masks.window(int(rng.integers(0, LONGEST)), 0))[rng.integers(3)]
        return lengths, [one] * len(lengths)
    return lengths, [_random_mask(rng, n) for n in lengths]


def _random_mask(rng: np.random.Generator, n: int) -> Mask:
    a, b = (int(x) for x in rng.integers(0, max(2, n), 2))
    made = (
        masks.causal(),
        masks.full(),
        masks.window(a, 0),
        masks.window(a, b),
        masks.lambda_(a, b + 1),
        masks.shared_question(1 + a % 5, 0.3),
        masks.causal_blockwise(1 + a % 64, b % 4),
        masks.prefix(a),
        _random_tree(rng, n),
        # Two bands with a gap, and rows without a key.
        masks.from_slices(n, [(n // 3, n, 0, n // 2, None, -1), (n // 3, n, n // 2, n, -3, 5)]),
    )
    return made[rng.integers(len(made))]


def _random_tree(rng: np.random.Generator, n: int) -> Mask:
    """Draw a tree of ``n`` tokens, of up to 12 segments."""
    borders = np.unique([0, *rng.integers(0, n, 11), n])
    return masks.tree(random_parents(rng, len(borders) - 1, 12), np.diff(borders).tolist())


def case_shares(model: KernelSetup, seed: int) -> dict[str, float]:
    """Return the error over the allowed error for each result of one case."""
    rng = np.random.default_rng(seed)
    slices = packed_slices(*random_batch(rng, model.foreign))
    tokens = int(slices[:, 1].max())
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, model.dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.float64).to(dtype)

    # In half of the cases logits are so far apart that the largest one of a row grows by more than kernels ignore.
    spread = WIDE if seed & 4 else 1.0
    inputs = [spread * normal(tokens, model.heads, model.head_dim), normal(tokens, model.kv_heads, model.head_dim)]
    inputs += [normal(tokens, model.kv_heads, model.v_head_dim), normal(model.heads)]
    grads = [normal(tokens, model.heads, model.v_head_dim), normal(tokens, model.heads)]
    sinks = bool(seed & 1) and not model.lists  # sinks apply to the sum of all lists
    extras: dict[str, Any] = {"sinks": sinks, "dlse": bool(seed & 2), "softcap": model.softcap}
    if model.lists:
        mine = list_results(model, inputs, grads, slices, extras["dlse"], rng)
    else:
        mine = results(model.kernel, inputs, grads, slices, **extras)
    own = plain_results(inputs, grads, slices, **extras)
    exact = results("reference", [x.double() for x in inputs], [g.double() for g in grads], slices, **extras)
    return {n: error_share(mine[n], own[n], exact[n], dtype) for n in exact}


def error_share(mine: Tensor, own: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Return the error over the allowed error,
    which is twice the reference's ``own`` plus one rounding of ``dtype``.
    """
    return _error(mine, exact) / (2 * _error(own, exact) + torch.finfo(dtype).eps)


def plain_results(
    inputs: list[Tensor], grads: list[Tensor], slices: Tensor, sinks: bool, dlse: bool, softcap: float | None
) -> dict[str, Tensor]:
    """Return the reference kernel's results with all sums in float32, as the rule demands."""
    own = results("reference", inputs, grads, slices, sinks, dlse, softcap)
    if sinks:
        own["dsinks"] = _plain_sinks_gradient(inputs[3], own, grads, dlse)
    return own


def _plain_sinks_gradient(sinks: Tensor, own: dict[str, Tensor], grads: list[Tensor], dlse: bool) -> Tensor:
    """Return the gradient of sinks summed in float32;
    ours sums in float64 (:mod:`flexcp.executor.kernels.sinks_and_delta`).
    """
    delta = (grads[0].float() * own["out"].float()).sum(-1) - (grads[1].float() if dlse else 0.0)
    lse = own["lse"].float()
    terms = torch.exp(sinks.float() - torch.where(lse == -torch.inf, 0.0, lse)) * delta
    return -terms.sum(0).to(sinks.dtype)


def results(
    kernel: str,
    inputs: list[Tensor],
    grads: list[Tensor],
    slices: Tensor,
    sinks: bool,
    dlse: bool,
    softcap: float | None,
) -> dict[str, Tensor]:
    """Return all results of a kernel for q, k, v and sinks, by name."""
    q, k, v, sink = (x.detach().clone().requires_grad_() for x in inputs)
    result: Any = slice_attention(
        q, k, v, slices, softcap=softcap, sinks=sink if sinks else None, return_lse=True, kernel=kernel
    )
    out, lse = result
    outputs = [out, lse] if dlse else [out]
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=False)])
    found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if sinks:
        found["dsinks"] = sink.grad
    return {n: x.detach() for n, x in found.items() if x is not None}


def list_results(
    model: KernelSetup, inputs: list[Tensor], grads: list[Tensor], slices: Tensor, dlse: bool, rng: np.random.Generator
) -> dict[str, Tensor]:
    """Return the same results, computed from several lists that add to the same tensors.

    A random number of lists leaves dq open, if the kernel can, and in half of the cases lists write the rows that they
    finish. If all of them leave dq open, it is closed into another tensor in half of the cases, of which a random part
    comes from elsewhere.
    """
    kernel, settings = find_kernel(model.kernel), Settings(model.head_dim**-0.5, model.softcap)
    (q, k, v), (do, dlse_TH) = inputs[:3], grads
    made: list[tuple[slice, slice, np.ndarray]] = []
    for part in np.array_split(rng.permutation(slices.numpy()), rng.integers(1, 4)):
        cut = int(rng.integers(0, model.kv_heads))  # KV heads of the first of two lists; 0: one list with all heads
        for first, last in ((0, cut), (cut, model.kv_heads)):
            if last > first:
                share = model.heads // model.kv_heads
                made.append((slice(first * share, last * share), slice(first, last), part))
    finished_GT, finishes = _first_to_add(made[::-1], model.kv_heads, len(q))
    begun_GT, begins = _first_to_add(made, model.kv_heads, len(q))
    runs = list(zip(begins, reversed(finishes), strict=True))
    may_finish = getattr(kernel, "FINISHES", False) and bool(rng.integers(2))
    lists = []
    for (heads, groups, part), (begun_rows, finished_rows) in zip(made, runs, strict=True):
        sizes = (heads.stop - heads.start, groups.stop - groups.start, model.head_dim, model.v_head_dim)
        own_rows = {"begins": begun_rows, "finishes": finished_rows} if may_finish else {}
        lists.append((heads, groups, kernel.prepare(part, *sizes, q.device, **own_rows)))
    # Rows that a list begins may hold anything; other rows start as empty sums.
    begun = torch.from_numpy(begun_GT.T).to(q.device).repeat_interleave(model.heads // model.kv_heads, 1) & may_finish
    out = torch.where(begun[..., None], torch.nan, torch.zeros(do.shape, device=q.device))
    lse = torch.where(begun, 3.0, torch.full(do.shape[:2], -torch.inf, device=q.device))
    rounded = torch.full_like(do, torch.nan)
    for heads, groups, work in lists:
        finished = {"finished_THV": rounded[:, heads]} if may_finish else {}
        own_out, own_lse = out[:, heads], lse[:, heads]
        kernel.forward(q[:, heads], k[:, groups], v[:, groups], work, settings, own_out, own_lse, **finished)
    written = torch.from_numpy(finished_GT.T).to(q.device).repeat_interleave(model.heads // model.kv_heads, 1)
    out = torch.where((written & may_finish)[..., None], rounded.float(), out)
    delta = (out.to(q.dtype).float() * do.float()).sum(-1) - (dlse_TH.float() if dlse else 0.0)
    dq, dk, dv = (torch.zeros(x.shape, device=q.device) for x in (q, k, v))
    left_open = int(rng.integers(0, len(lists) + 1)) if hasattr(kernel, "close_dq") else 0
    elsewhere: Tensor | None = None
    if left_open:
        dq.fill_(torch.nan)
        added = [(part, heads) for heads, _, part in made[:left_open]]
        states = torch.from_numpy(dq_states(len(q), model.heads, added, NO_AREAS)).to(q.device)
        if left_open == len(lists) and rng.integers(2):
            elsewhere = torch.full_like(q, torch.nan)
            others = torch.rand(states.shape, device=q.device) < 0.5
            states[others & (states == EMPTY)], elsewhere[others] = OTHERS, 0.0
        opened = kernel.open_dq(dq, lse, delta, lists[0][2], None if elsewhere is None else states)
    for number, (heads, groups, work) in enumerate(lists):
        back = (x[:, heads] for x in (do, lse, delta))
        own = replace(settings, open_dq=number < left_open)
        shared = {"opened": opened, "first_head": heads.start} if own.open_dq else {}
        mine = (q[:, heads], k[:, groups], v[:, groups], *back, work, own)
        kernel.backward(*mine, dq[:, heads], dk[:, groups], dv[:, groups], **shared)
        if number + 1 == left_open:
            kernel.close_dq(dq, settings, states, elsewhere)
    dq = dq if elsewhere is None else elsewhere
    return dict(zip(RESULTS, (out.to(q.dtype), lse, *(x.to(q.dtype) for x in (dq, dk, dv))), strict=False))


def _first_to_add(
    lists: list[tuple[slice, slice, np.ndarray]], kv_heads: int, rows: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return as ``[KV head, row]`` whether some list is the first to add to the row in all of the list's heads,
    and the runs of such rows for each list.
    """
    before, found = (np.zeros((kv_heads, rows), np.bool_) for _ in range(2))
    runs = []
    for _, groups, part in lists:
        touched = np.zeros(rows, np.bool_)
        for first, last in masks.trim(part)[:, :2].tolist():
            touched[first:last] = True
        alone = touched & ~before[groups].any(axis=0)
        before[groups] |= touched
        found[groups] |= alone
        runs.append(np.flatnonzero(np.diff(np.concatenate([[False], alone, [False]]))).reshape(-1, 2))
    return found, runs


def _error(x: Tensor, exact: Tensor) -> float:
    x = x.double()
    finite = torch.isfinite(exact)
    if not torch.equal(finite, torch.isfinite(x)):
        return float("nan")
    if not finite.any():
        return 0.0
    return float((x - exact)[finite].abs().max() / max(1.0, float(exact[finite].abs().max())))


def compiled(kernel: str) -> int:
    """Return how many variants of the kernel's functions this process has compiled."""
    module = find_kernel(kernel)
    functions = [f for f in vars(module).values() if hasattr(f, "device_caches")]
    made_once = [f for name, f in vars(module).items() if name.startswith("compiled_")]
    variants = sum(len(caches[0]) for f in functions for caches in f.device_caches.values())
    return int(variants + sum(f.cache_info().currsize for f in made_once))


def recompiles(model: KernelSetup, batches: int = 100) -> tuple[int, int]:
    """Return the number of compiled variants after two batches and after ``batches`` more; both must be equal.

    Two batches, because one with rows without keys runs other variants of the forward and of dq, which add to results
    instead of writing them.
    """
    for mask in (masks.causal(), masks.from_slices(40, [(20, 40, 0, 40, None, None)])):
        _run(model, packed_slices([40], mask))
    first = compiled(model.kernel)
    for seed in range(1000, 1000 + batches):
        _run(model, packed_slices(*random_batch(np.random.default_rng(seed))))
    torch.cuda.synchronize()
    return first, compiled(model.kernel)


def _run(model: KernelSetup, slices: Tensor) -> None:
    tokens, dtype = int(slices[:, 1].max()), getattr(torch, model.dtype)
    sizes = ((model.heads, model.head_dim), (model.kv_heads, model.head_dim), (model.kv_heads, model.v_head_dim))
    q, k, v = (torch.randn(tokens, *s, device="cuda").to(dtype).requires_grad_() for s in sizes)
    out: Any = slice_attention(q, k, v, slices, softcap=model.softcap, kernel=model.kernel)
    out.sum().backward()
