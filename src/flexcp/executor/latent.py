"""Latent: multi-latent attention over ranks.

Keys and values travel as one narrow row per token, the *latent*, and are expanded on the rank that reads them.

Multi-latent attention makes the keys and values of all heads from one latent of, say, 576 numbers, while the expanded
heads have tens of thousands. A plan made with ``Planner(..., kv_heads=1, latent=576)`` counts the latent's bytes for
every key that moves and the expanded heads' FLOPs for every pair. This file runs such a plan:

    forward    receive the latents of the keys that this rank reads  ->  expand them  ->  attention of own queries
    backward   receive the latents again (unless the plan keeps them)  ->  expand them  ->  gradients of attention  ->
               gradients of ``expand``: those of its weights stay on this rank as its share, those of the latents are
               sent home and summed where their paths meet

All latents of a pass lie in one tensor, the *arena* of :mod:`flexcp.executor.latent_program`. The bytes that move are
the plan's, in both directions. Transfers and computation do not overlap: everything arrives, then everything is
computed. A backward's latents and gradients, which share stages in the plan, therefore travel one after the other here.
Each stage is one call of the step's exchange, so tags, time limits and error messages are the same as in any attention
(:mod:`flexcp.executor.exchange.transports`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.executor.arguments import attention_scale, check_call, check_running, check_tensors, refuse_meta
from flexcp.executor.autocast import Casts, without_autocast
from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.exchange.rank_calls import Call, MessageRange
from flexcp.executor.exchange.transports import Exchange
from flexcp.executor.first_derivatives import only_first
from flexcp.executor.kernels import Settings, find_kernel, lasting, on_device, uploaded
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.latent_program import LatentProgram, RowBlock, Stage, make_latent_program
from flexcp.executor.layer_masks import mask_number
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.one_device import local_backward, local_forward
from flexcp.executor.run.pass_recipe import covers
from flexcp.executor.step import Step, check_bound

Expand = Callable[..., tuple[Tensor, Tensor]]
"""The user's ``expand(latent, *weights)``, which returns k and v."""


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
    """Compute multi-latent attention of the whole batch and return this rank's rows.

    The result is ``[local tokens, heads, v_head_dim]``. ``q`` is ``[local tokens, heads, head_dim]`` and ``latent`` is
    ``[local tokens, width]``; the latent includes every part of the keys that all heads share, such as the rotated
    part. ``expand(latent, *weights)`` makes ``k`` and ``v``, both ``[rows, heads, ...]``, from any number of rows; it
    must treat each row by itself and use nothing but its arguments. Gradients reach ``q``, ``latent`` and ``weights``;
    those of ``weights`` are this rank's share, to be summed over ranks.

    The plan must be made with ``Planner(kv_heads=1, latent=width)``; other plans raise ValueError, and plans that move
    queries or split heads NotImplementedError. ``mask``, ``scale``, ``softcap`` and ``kernel`` are those of
    :func:`flexcp.attention`.
    """
    check_bound(step)
    check_tensors({"q": q, "latent": latent})
    check_running(kernel, False, 0)
    refuse_meta(q.device)
    with step.collectives.checking("latent_attention"):
        _check(q, latent, step)
        check_call(q, {"latent": latent}, scale, softcap)
        number = mask_number(step.plan.batch, mask, None)
    settings = Settings(attention_scale(q, scale), softcap)
    casts = Casts.around(q.device.type)
    asked = _Asked(expand, step, number, settings, step.choose_kernel(q.device, kernel), casts)
    with on_device(q.device), without_autocast(q.device.type):
        out: Tensor = _LatentAttention.apply(q, latent, asked, *weights)
    return out


@dataclass(frozen=True)
class _Asked:
    """The arguments of one call that are not tensors; ``mask`` is the index of the mask in the plan's batch.

    ``casts`` is the autocast around the call, under which ``expand`` runs in both directions.
    """

    expand: Expand
    step: Step
    mask: int
    settings: Settings
    kernel: str
    casts: Casts


class _LatentAttention(torch.autograd.Function):
    """The autograd function of :func:`latent_attention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, latent: Tensor, asked: _Asked, *weights: Tensor) -> Tensor:
        step = asked.step
        program, types = make_latent_program(step.plan, step.rank, asked.mask), types_of(q)
        messages = _open_messages(program, step, latent, backward=False)
        step.note_call()
        with messages.exchange:
            arena = _fetched(latent, program.forward, program, step, messages)
            messages.exchange.finish()
            k, v = _expanded(asked, arena, weights, q)
            module = find_kernel(asked.kernel)
            with lasting():
                work = module.prepare(program.slices, q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.device)
            rows = step.tables.in_stream_order(q)
            whole = covers(program.slices, len(rows))
            out, lse = local_forward(module, work, whole, types, asked.settings, rows, k, v, rounded=True)
        out = out.to(q.dtype)
        ctx.save_for_backward(rows, latent, out, lse, arena if program.keys_kept else None, *weights)
        ctx.call = (asked, program, module, work)
        return step.tables.in_local_order(out)

    @staticmethod
    @only_first("latent_attention")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, out, lse, arena, *weights = ctx.saved_tensors
        asked, program, module, work = ctx.call
        step = asked.step
        step.losses.note_backward()
        do, types = step.tables.in_stream_order(grads[0].to(out.dtype)), types_of(q)
        messages = _open_messages(program, step, latent, backward=True)
        with without_autocast(q.device.type), messages.exchange:
            if arena is None:
                arena = _fetched(latent, program.backward, program, step, messages)
            leaves = [x.detach().requires_grad_() for x in (arena, *weights)]
            with torch.enable_grad():
                k, v = _expanded(asked, leaves[0], leaves[1:], q)
            inputs = (q, k.detach(), v.detach(), lse, OutputGradient(do, out, None, lse.dtype))
            dq, dk, dv = local_backward(module, work, covers(program.slices, len(q)), types, asked.settings, *inputs)
            found = torch.autograd.grad((k, v), leaves, (dk.to(k.dtype), dv.to(v.dtype)), allow_unused=True)
            darena = torch.zeros_like(arena) if found[0] is None else found[0]
            dlatent = _returned(darena.to(types.accumulator), program, messages, latent.dtype)
            messages.exchange.finish()
        return step.tables.in_local_order(dq).to(q.dtype), step.tables.in_local_order(dlatent), None, *found[1:]


# --- exchanges --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentMessages:
    """The exchange of one pass, and the form of its messages.

    A message consists of rows of ``width`` numbers: final rows in the dtype ``dtype``, and partial sums of gradients in
    the accumulator dtype ``wide``.
    """

    exchange: Exchange
    width: int
    dtype: torch.dtype
    wide: torch.dtype

    def exchanged(self, number: int, stage: Stage, arena: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Run one stage: send rows of ``arena``, then yield (arena rows, values received for them) in a fixed order.

        ``number`` is the number of the stage in the exchange. The arena is not changed here.
        """
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
        """Yield for each block its arena rows, and its part of the peer's message as a view ``[rows, width]``.

        Blocks in the wide dtype come first in a message, so every part is aligned.
        """
        left = dict(buffers.messages)
        for peer, rows, partial in blocks:
            dtype = self.wide if partial else self.dtype
            size = len(rows) * self.width * dtype.itemsize
            part, left[peer] = left[peer][:size], left[peer][size:]
            yield uploaded(rows, part.device), part.view(dtype).view(len(rows), self.width)


def _open_messages(program: LatentProgram, step: Step, latent: Tensor, backward: bool) -> LatentMessages:
    """Open the exchange of the step's next pass, forward or backward, with the messages of ``program``."""
    form = (latent.shape[1], latent.dtype, types_of(latent).accumulator)
    stages = program.backward + program.home if backward else program.forward
    calls = tuple(_calls(stage, *form) for stage in stages)
    return LatentMessages(step.open_exchange(program.mask, backward, latent.device, calls), *form)


def _calls(stage: Stage, *form: Any) -> tuple[Call, ...]:
    """Return the only call of a stage, or none if nothing moves in it; ``form`` is (width, dtype, wide dtype)."""
    receives, sends = (
        tuple(MessageRange(peer, 0, size) for peer, size in _sizes(blocks, *form).items())
        for blocks in (stage.receives, stage.sends)
    )
    return (Call(0, receives, sends),) if receives or sends else ()


def _sizes(blocks: tuple[RowBlock, ...], width: int, dtype: torch.dtype, wide: torch.dtype) -> Counter[int]:
    """Return the bytes of the message to or from each peer, by peer; partial sums travel in the dtype ``wide``."""
    found: Counter[int] = Counter()
    for peer, rows, partial in blocks:
        found[peer] += len(rows) * width * (wide if partial else dtype).itemsize
    return found


def _fetched(
    latent: Tensor, stages: tuple[Stage, ...], program: LatentProgram, step: Step, messages: LatentMessages
) -> Tensor:
    """Return the arena ``[program.rows, width]``, filled with this rank's own latents and those that it received.

    Latents that this rank relays are sent on in later stages.
    """
    arena = latent.new_zeros((program.rows, latent.shape[1]))
    arena[uploaded(program.own, latent.device)] = step.tables.in_stream_order(latent)
    for number, stage in enumerate(stages):
        for rows, message in messages.exchanged(number, stage, arena):
            arena[rows] = message
    return arena


def _returned(gradient: Tensor, program: LatentProgram, messages: LatentMessages, dtype: torch.dtype) -> Tensor:
    """Send and sum gradients of latents by the plan, and return those of this rank's own latents, in stream order.

    ``gradient`` has a row for each row of the arena, and is changed in place.
    """
    for number, stage in enumerate(program.home, len(program.backward)):
        for rows, message in messages.exchanged(number, stage, gradient):
            gradient[rows] += message
    return gradient[uploaded(program.own, gradient.device)].to(dtype)


# --- rows -------------------------------------------------------------------------------------------------------------


def _expanded(asked: _Asked, arena: Tensor, weights: Sequence[Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the k and v that ``expand`` makes of the arena's latents; raise ValueError if their shapes are wrong.

    If the call was made under autocast, ``expand`` runs under it, and what it made becomes q's dtype.
    """
    with asked.casts.again():
        k, v = asked.expand(arena, *weights)
    if asked.casts.on:
        k, v = k.to(q.dtype), v.to(q.dtype)
    made = k.dim() == v.dim() == 3 and k.shape[:2] == v.shape[:2]
    if not made or len(k) != len(arena) or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"expand must make k [rows, heads, {q.shape[2]}] and v [rows, heads, value size] of {len(arena)} rows; "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    return k, v


def _check(q: Tensor, latent: Tensor, step: Step) -> None:
    """Raise ValueError unless the plan is one for latents, and q and the latent have its shapes and dtype."""
    shape = step.plan.shape
    if shape.latent is None:
        raise ValueError(
            "this plan moves keys and values of heads, not latents; plan with Planner(kv_heads=1, latent=WIDTH)"
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
