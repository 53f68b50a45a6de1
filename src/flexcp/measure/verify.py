"""Verification: run a plan on real ranks, forward and backward, and compare with dense attention on one rank.

Every rank makes the same random stream from the seed, runs its share under the plan, and gathers the results in stream
order. Rank 0 compares them with dense float64 attention, by the rule that every kernel is held to: in float64 the error
is at most 1e-10, in lower precisions at most twice the reference kernel's own error in that dtype plus one rounding.
Bytes are counted where they are sent.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor import kernels
from flexcp.executor.attention import attention
from flexcp.executor.bind import bind
from flexcp.executor.kernels import Settings, reference
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.masks import shift
from flexcp.plan.plan import Plan

NAMES = ("out", "lse", "dq", "dk", "dv")
"""The results that are compared. With sinks there is also ``dsinks``."""
LARGEST_DENSE = 16_384
"""The most tokens of a document that is verified, because the reference is dense."""


@dataclass(frozen=True)
class Options:
    """What to verify with.

    ``seed`` draws the inputs; ``softcap``, ``sinks`` and ``lse_gradient`` (a gradient of the LSE too) are extras of the
    attention call. ``kernel`` is its name (None: the step chooses), and ``mask`` the number of the plan's mask.
    """

    seed: int = 0
    softcap: float | None = None
    sinks: bool = False
    lse_gradient: bool = False
    kernel: str | None = "cpu"
    mask: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Verdict:
    """The error of each result by name, the allowed errors, and whether the sent bytes are those of the plan.

    Errors are relative to the largest value of the result, if that is above 1.
    """

    errors: dict[str, float]
    allowed: dict[str, float]
    bytes_match: bool

    @property
    def passed(self) -> bool:
        return self.bytes_match and all(self.errors[n] <= self.allowed[n] for n in self.errors)


@dataclass(frozen=True)
class _Stream:
    """Random inputs of a whole batch, and the gradients of its outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    sinks: Tensor | None


def verify_on(group: dist.ProcessGroup | None, plan: Plan, options: Options) -> Verdict | None:
    """Verify a plan; collective over ``group`` (None: one rank). Return the verdict on rank 0 and None elsewhere."""
    return _ended(verifying(group, plan, options))


def verifying(group: dist.ProcessGroup | None, plan: Plan, options: Options) -> Generator[str, None, Verdict | None]:
    """Do the same as :func:`verify_on`, and yield messages about what is being done.

    Dense attention of long documents takes minutes.
    """
    yield f"forward and backward under the plan, on {plan.ranks} process{'es' if plan.ranks > 1 else ''}"
    dtype = getattr(torch, plan.shape.dtype)
    stream = _converted(_stream(plan, options, dtype), torch.device(options.device))
    step = bind(plan, group)
    results = _under_plan(step, stream, options)
    sent = [step.sent_bytes[d] for d in ("forward", "backward")]
    everyone: list[Any] = [sent] * plan.ranks
    if group is not None:
        dist.all_gather_object(everyone, sent, group=group)
    if step.rank:
        return None
    match = all(
        [everyone[r][d] for r in range(plan.ranks)] == plan.bytes(bool(d), options.mask).tolist() for d in (0, 1)
    )
    exact = yield from _dense(plan, _converted(stream, torch.float64), options, torch.float64)
    errors = {n: _error(results[n], exact[n]) for n in results}
    allowed = dict.fromkeys(errors, 1e-10)
    if dtype != torch.float64:
        rounded = yield from _dense(plan, stream, options, dtype)
        eps = torch.finfo(dtype).eps
        allowed = {n: 2 * _error(rounded[n], exact[n]) + eps for n in errors}
    return Verdict(errors, allowed, match)


def check_verifiable(plan: Plan, options: Options) -> None:
    """Raise an error for a plan that cannot be verified, before any rank is started.

    It is ValueError if a document is too long for dense attention, and NotImplementedError if the kernel cannot run.
    """
    choose_kernel(
        options.device, getattr(torch, plan.shape.dtype), plan.shape.head_dim, plan.shape.v_head_dim, options.kernel
    )
    longest = int(plan.batch.lengths.max())
    if longest > LARGEST_DENSE:
        raise ValueError(
            f"verification is dense, up to {LARGEST_DENSE} tokens a document; got {longest}. Verify shorter lengths"
        )


def _stream(plan: Plan, options: Options, dtype: torch.dtype) -> _Stream:
    generator = torch.Generator().manual_seed(options.seed)
    shape, tokens = plan.shape, plan.batch.tokens

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return _Stream(
        normal(tokens, shape.heads, shape.head_dim),
        normal(tokens, shape.kv_heads, shape.head_dim),
        normal(tokens, shape.kv_heads, shape.v_head_dim),
        normal(tokens, shape.heads, shape.v_head_dim),
        normal(tokens, shape.heads).to(kernels.accumulator_dtype(dtype)),
        normal(shape.heads) if options.sinks else None,
    )


def _converted(stream: _Stream, to: torch.dtype | torch.device) -> _Stream:
    parts = (stream.q, stream.k, stream.v, stream.do, stream.dlse, stream.sinks)
    return _Stream(*(None if x is None else x.to(to) for x in parts))  # type: ignore[arg-type]


def _under_plan(step: Any, stream: _Stream, options: Options) -> dict[str, Tensor]:
    q, k, v = (step.shard(x).requires_grad_() for x in (stream.q, stream.k, stream.v))
    sinks = None if stream.sinks is None else stream.sinks.clone().requires_grad_()
    name = step.plan.batch.masks[options.mask].name
    out, lse = attention(
        q, k, v, step, mask=name, softcap=options.softcap, sinks=sinks, return_lse=True, kernel=options.kernel
    )
    outputs, grads = [out], [step.shard(stream.do)]
    if options.lse_gradient:
        outputs.append(lse)
        grads.append(step.shard(stream.dlse))
    torch.autograd.backward(outputs, grads)
    found = dict(zip(NAMES, (out, lse, q.grad, k.grad, v.grad), strict=True))
    results = {n: step.gather(x.detach()) for n, x in found.items()}
    if sinks is not None:
        assert sinks.grad is not None
        total = sinks.grad.double()
        if step.group is not None:
            dist.all_reduce(total, group=step.group)
        results["dsinks"] = total
    return results


def _ended(steps: Generator[str, None, Verdict | None]) -> Verdict | None:
    """Run a generator to its end and return its return value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            verdict: Verdict | None = end.value
            return verdict


def _dense(
    plan: Plan, stream: _Stream, options: Options, dtype: torch.dtype
) -> Generator[str, None, dict[str, Tensor]]:
    """Compute all results on one rank with the reference kernel; yield a message for each piece, return the results.

    A piece is a document, or some short ones.
    """
    batch, shape = plan.batch, plan.shape
    accumulator = kernels.accumulator_dtype(dtype)
    settings = Settings(shape.head_dim**-0.5, options.softcap)
    tokens, device = batch.tokens, stream.q.device
    out = torch.zeros(tokens, shape.heads, shape.v_head_dim, dtype=accumulator, device=device)
    lse = torch.full((tokens, shape.heads), -torch.inf, dtype=accumulator, device=device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=accumulator, device=device) for x in (stream.q, stream.k, stream.v))
    pieces = list(_documents(plan, options))
    name = str(dtype).removeprefix("torch.")
    for at, slices in pieces:
        yield f"dense {name} attention to compare with, on one process: forward, {at.stop:,} of {tokens:,} tokens"
        reference.forward(stream.q[at], stream.k[at], stream.v[at], slices, settings, out[at], lse[at])
    if stream.sinks is not None:
        total = torch.logaddexp(lse, stream.sinks.to(accumulator).expand_as(lse))
        out *= torch.exp(lse - torch.where(total == -torch.inf, 0.0, total))[..., None]
        lse = total
    out = out.to(dtype)
    delta = (stream.do.to(accumulator) * out.to(accumulator)).sum(-1)
    if options.lse_gradient:
        delta -= stream.dlse.to(accumulator)
    for at, slices in pieces:
        yield f"dense {name} attention to compare with, on one process: backward, {at.stop:,} of {tokens:,} tokens"
        reference.backward(
            stream.q[at],
            stream.k[at],
            stream.v[at],
            stream.do[at],
            lse[at],
            delta[at],
            slices,
            settings,
            dq[at],
            dk[at],
            dv[at],
        )
    found = dict(zip(NAMES, (out, lse, dq.to(dtype), dk.to(dtype), dv.to(dtype)), strict=True))
    if stream.sinks is not None:
        found["dsinks"] = -(torch.exp(stream.sinks.to(accumulator) - lse) * delta).sum(0).to(dtype)
    return found


def _documents(plan: Plan, options: Options) -> Any:
    """Yield (stream rows, slices) of pieces small enough for a dense matrix; short documents share a piece."""
    batch, mask = plan.batch, plan.batch.masks[options.mask]
    first = 0
    while first < batch.documents:
        last = first + 1
        while last < batch.documents and batch.starts[last + 1] - batch.starts[first] <= 512:
            last += 1
        begin, end = int(batch.starts[first]), int(batch.starts[last])
        counts = mask.first[first + 1 : last + 1] - mask.first[first:last]
        offset = (batch.starts[first:last] - begin).repeat(counts)
        yield slice(begin, end), shift(mask.slices[mask.first[first] : mask.first[last]], offset, offset)
        first = last


def _error(found: Tensor, exact: Tensor) -> float:
    """Return max |x - ref| / max(1, max |ref|), or infinity for NaN or if -inf is not at the same places in both."""
    x, ref = found.double(), exact.double()
    empty = ref == -torch.inf
    if not torch.equal(x == -torch.inf, empty):
        return float("inf")
    x, ref = x.masked_fill(empty, 0.0), ref.masked_fill(empty, 0.0)
    error = float((x - ref).abs().max() / max(1.0, float(ref.abs().max()))) if ref.numel() else 0.0
    return error if error == error else float("inf")
