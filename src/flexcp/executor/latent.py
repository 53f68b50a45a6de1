"""Latent: attention whose keys and values travel as one narrow row a token and are expanded where they are read.

Multi-latent attention makes the keys and values of all heads from one latent of, say, 576 numbers, where the expanded
heads have tens of thousands. A plan made with ``Planner(..., kv_heads=1, latent=576)`` counts the latent's bytes for
every key that moves and the expanded heads' FLOPs for every pair. This file runs it:

    forward    latents of the keys this rank reads arrive by the plan's table  ->  expand  ->  attention  ->  output at
               home
    backward   they arrive again  ->  expand  ->  attention's gradients  ->  expand's gradients: of its weights, which
               stay here as any parameter's share, and of the latents, which go home by the plan's table and are summed
               where paths meet

All keys lie in one *arena*, as :mod:`flexcp.executor.latent_program` derives from the plan. Bytes are the plan's, in
both directions. There is no overlap: everything arrives, then everything is computed. So a backward's latents and
gradients, which share stages in the plan, travel one after the other here. Each stage is one call of the step's
exchange: tags, time limits and words on who is late are the same as in any attention
(:mod:`flexcp.executor.exchange.transports`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.executor.arguments import attention_scale, check_call, check_running, check_tensors
from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.exchange.rank_calls import Call, MessageRange
from flexcp.executor.exchange.transports import Exchange
from flexcp.executor.kernels import Settings, find_kernel, on_device, uploaded
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.latent_program import LatentProgram, RowBlock, Stage, make_latent_program
from flexcp.executor.layer_masks import mask_number
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.one_device import local_backward, local_forward
from flexcp.executor.run.pass_recipe import covers
from flexcp.executor.step import Step, check_bound

Expand = Callable[..., tuple[Tensor, Tensor]]


def latent_attention(
    q: Tensor,
    latent: Tensor,
    expand: Expand,
    weights: Sequence[Tensor],
    step: Step,
    *,
    mask: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Attention of the whole batch, seen from this rank: ``[local tokens, heads, v_head_dim]``.

    ``q`` is ``[local tokens, heads, head_dim]`` and ``latent`` ``[local tokens, width]``, with whatever of the keys is
    shared by all heads (rotated parts too) in it. ``expand(latent, *weights)`` makes ``k`` and ``v``,
    ``[rows, heads, ...]``, of any rows; it must be a function of its arguments alone, row by row. Gradients reach
    ``q``, ``latent`` and ``weights``, the last as this rank's share.
    """
    check_bound(step)
    check_tensors({"q": q, "latent": latent})
    check_running(kernel, False, 0)
    with step.collectives.checking("latent_attention"):
        _check(q, latent, step)
        check_call(q, {"latent": latent}, scale, softcap)
        number = mask_number(step.plan.batch, mask, None)
    settings = Settings(attention_scale(q, scale), softcap)
    asked = _Asked(expand, step, number, settings, step.choose_kernel(q.device, kernel))
    with on_device(q.device):
        out: Tensor = _LatentAttention.apply(q, latent, asked, *weights)
    return out


@dataclass(frozen=True)
class _Asked:
    """All of a call but its tensors."""

    expand: Expand
    step: Step
    mask: int
    settings: Settings
    kernel: str


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, latent: Tensor, asked: _Asked, *weights: Tensor) -> Tensor:
        step = asked.step
        program, types = make_latent_program(step.plan, step.rank, asked.mask), types_of(q)
        messages = _open_messages(program, step, latent, backward=False)
        step.note_call()
        with messages.exchange:
            arena = _fetched(latent, program.forward, program, step, messages)
            messages.exchange.finish()
            k, v = _expanded(asked.expand, arena, weights, q)
            module = find_kernel(asked.kernel)
            work = module.prepare(program.slices, q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.device)
            rows = step.in_stream_order(q)
            whole = covers(program.slices, len(rows))
            out, lse = local_forward(module, work, whole, types, asked.settings, rows, k, v, rounded=True)
        out = out.to(q.dtype)
        ctx.save_for_backward(rows, latent, out, lse, arena if program.keys_kept else None, *weights)
        ctx.call = (asked, program, module, work)
        return step.in_local_order(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, out, lse, arena, *weights = ctx.saved_tensors
        asked, program, module, work = ctx.call
        step = asked.step
        step.losses.note_backward()
        do, types = step.in_stream_order(grads[0].to(out.dtype)), types_of(q)
        messages = _open_messages(program, step, latent, backward=True)
        with messages.exchange:
            if arena is None:
                arena = _fetched(latent, program.backward, program, step, messages)
            leaves = [x.detach().requires_grad_() for x in (arena, *weights)]
            with torch.enable_grad():
                k, v = _expanded(asked.expand, leaves[0], leaves[1:], q)
            inputs = (q, k.detach(), v.detach(), lse, OutputGradient(do, out, None, lse.dtype))
            dq, dk, dv = local_backward(module, work, covers(program.slices, len(q)), types, asked.settings, *inputs)
            found = torch.autograd.grad((k, v), leaves, (dk.to(k.dtype), dv.to(v.dtype)), allow_unused=True)
            darena = torch.zeros_like(arena) if found[0] is None else found[0]
            dlatent = _returned(darena.to(types.accumulator), program, messages, latent.dtype)
            messages.exchange.finish()
        return step.in_local_order(dq).to(q.dtype), step.in_local_order(dlatent), None, *found[1:]


# --- exchanges --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentMessages:
    """The exchange of one pass and what its messages hold: rows of ``width`` numbers, in ``dtype`` or,
    where partial, the ``wide`` one.
    """

    exchange: Exchange
    width: int
    dtype: torch.dtype
    wide: torch.dtype

    def exchanged(self, number: int, stage: Stage, arena: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Run one stage: (rows of the arena, what arrived for them), in a fixed order."""
        leaving, arriving = (
            Buffers.alone(list(_sizes(blocks, self.width, self.dtype, self.wide).items()), arena.device)
            for blocks in (stage.sends, stage.receives)
        )
        for rows, part in self._parts(leaving, stage.sends):
            part.copy_(arena[rows])
        self.exchange.post(number, leaving, arriving)
        self.exchange.arrived(number)
        for rows, part in self._parts(arriving, stage.receives):
            yield rows, part.to(arena.dtype)

    def _parts(self, buffers: Buffers, blocks: tuple[RowBlock, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows, where they lie in the peer's message) of each block; wide ones are in front, so all are aligned."""
        left = dict(buffers.messages)
        for peer, rows, partial in blocks:
            dtype = self.wide if partial else self.dtype
            size = len(rows) * self.width * dtype.itemsize
            part, left[peer] = left[peer][:size], left[peer][size:]
            yield uploaded(rows, part.device), part.view(dtype).view(len(rows), self.width)


def _open_messages(program: LatentProgram, step: Step, latent: Tensor, backward: bool) -> LatentMessages:
    """Open the exchange of the next pass."""
    form = (latent.shape[1], latent.dtype, types_of(latent).accumulator)
    stages = program.backward + program.home if backward else program.forward
    calls = tuple(_calls(stage, *form) for stage in stages)
    return LatentMessages(step.open_exchange(program.mask, backward, latent.device, calls), *form)


def _calls(stage: Stage, *form: Any) -> tuple[Call, ...]:
    receives, sends = (
        tuple(MessageRange(peer, 0, size) for peer, size in _sizes(blocks, *form).items())
        for blocks in (stage.receives, stage.sends)
    )
    return (Call(0, receives, sends),) if receives or sends else ()


def _sizes(blocks: tuple[RowBlock, ...], width: int, dtype: torch.dtype, wide: torch.dtype) -> Counter[int]:
    """Bytes of the message to or from each peer."""
    found: Counter[int] = Counter()
    for peer, rows, partial in blocks:
        found[peer] += len(rows) * width * (wide if partial else dtype).itemsize
    return found


def _fetched(
    latent: Tensor, stages: tuple[Stage, ...], program: LatentProgram, step: Step, messages: LatentMessages
) -> Tensor:
    """The arena: own latents and those that arrive, relayed ones passed on."""
    arena = latent.new_zeros((program.rows, latent.shape[1]))
    arena[uploaded(program.own, latent.device)] = step.in_stream_order(latent)
    for number, stage in enumerate(stages):
        for rows, message in messages.exchanged(number, stage, arena):
            arena[rows] = message
    return arena


def _returned(gradient: Tensor, program: LatentProgram, messages: LatentMessages, dtype: torch.dtype) -> Tensor:
    """Gradients of own latents in stream order, from what every rank found for them."""
    for number, stage in enumerate(program.home, len(program.backward)):
        for rows, message in messages.exchanged(number, stage, gradient):
            gradient[rows] += message
    return gradient[uploaded(program.own, gradient.device)].to(dtype)


# --- rows -------------------------------------------------------------------------------------------------------------


def _expanded(expand: Expand, arena: Tensor, weights: Sequence[Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    k, v = expand(arena, *weights)
    if k.dim() != 3 or v.dim() != 3 or len(k) != len(arena) or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"expand must make k [rows, heads, {q.shape[2]}] and v [rows, heads, value size] of {len(arena)} rows; "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    return k, v


def _check(q: Tensor, latent: Tensor, step: Step) -> None:
    shape = step.plan.shape
    if shape.latent is None:
        raise ValueError(
            "this plan counts keys and values of heads; plan with Planner(kv_heads=1, latent=WIDTH) for latents"
        )
    wanted = {
        "q": (q, (step.local_tokens, shape.heads, shape.head_dim)),
        "latent": (latent, (step.local_tokens, shape.latent)),
    }
    for name, (x, size) in wanted.items():
        if tuple(x.shape) != size:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but rank {step.rank} of this plan expects {size}")
        if str(x.dtype).removeprefix("torch.") != shape.dtype:
            raise ValueError(
                f"{name} is {x.dtype}, but the plan counts bytes of {shape.dtype}; plan with Planner(dtype=...)"
            )
