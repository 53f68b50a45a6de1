"""What runs on the ranks in tests of averaged gradients; light to import (see parallel_runs.py)."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import flexcp
from flexcp.executor.averaging import Gradients
from flexcp.executor.local_rows import next_tokens
from flexcp.executor.step import Step
from lib.model_runs import Run, make_model, make_plan

LENGTHS = [19, 1, 8, 5]
VOCABULARY, HEADS, SIZE = 11, 2, 4
RUN = Run("llama")


class Small(nn.Module):
    """One layer of attention, as a user's own model would have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HEADS * SIZE, dtype=torch.float64)
        self.project = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE, dtype=torch.float64)
        self.head = nn.Linear(HEADS * SIZE, VOCABULARY, dtype=torch.float64)

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        q, k, v = self.project(self.embed(tokens)).unflatten(1, (3, HEADS, SIZE)).unbind(1)
        out = flexcp.attention(q, k, v, step)
        assert isinstance(out, Tensor)
        found: Tensor = self.head(out.flatten(1))
        return found


def tokens(count: int = sum(LENGTHS)) -> Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))


UNEVEN = (range(10), range(10, sum(LENGTHS)))
"""Tokens of two ranks."""
EVEN = [19, 1, 8, 6]
"""Documents that two ranks can hold in equal parts."""


def bound(group: dist.ProcessGroup | None, layout: Any = "free", lengths: list[int] = LENGTHS) -> Step:
    ranks = 1 if group is None else dist.get_world_size(group)
    planner = flexcp.Planner(
        HEADS, HEADS, SIZE, dtype="float64", cluster=flexcp.cluster("cpu", 1, ranks), strategy="blocks"
    )
    return flexcp.bind(planner(lengths, layout=layout), group)


def sum_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotation that is a string
    """A user's own communication hook, which sums."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


def whole(gradient: Any) -> Tensor:
    """A gradient, gathered where FSDP2 has sharded it."""
    found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def run_small(group: dist.ProcessGroup | None, gradients: Gradients, wrapping: str = "none") -> dict[str, Any]:
    """(loss of the batch, gradients) of :class:`Small`, or what was refused; ``wrapping`` is how DDP or FSDP2 is used, if it is."""
    model: nn.Module = Small()
    if wrapping.startswith("FSDP2"):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        from flexcp.frameworks import fsdp

        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        if wrapping == "FSDP2 summed":
            fsdp.sum_gradients(model)
    elif wrapping != "none":
        model = DistributedDataParallel(model, process_group=group)
    if wrapping == "own hook":
        model.register_comm_hook(group, sum_hook)
    if wrapping == "torch hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(group, allreduce_hook)
    step = bound(group)
    labels = step.labels(tokens())
    if wrapping == "compiled":
        model.module.compile(backend="eager")
    try:
        if wrapping == "no_sync":
            with model.no_sync():
                loss = step.loss(model(step.shard(tokens()), step), labels, gradients=gradients)
                loss.backward()
        else:
            loss = step.loss(model(step.shard(tokens()), step), labels, gradients=gradients)
            if wrapping == "FSDP2 summed late":
                fsdp.sum_gradients(model)
            loss.backward()
    except ValueError as error:
        return {"refused": str(error)}
    found = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
    with torch.no_grad():  # nothing is averaged where there is no backward
        step.loss(model(step.shard(tokens()), step), labels)
    if group is not None and wrapping in ("none", "no_sync"):
        for gradient in found.values():
            dist.all_reduce(gradient, group=group)
            if gradients == "averaged":
                gradient /= step.cp_size
    total = loss.detach().clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return {"loss": float(total) / (step.cp_size if gradients == "averaged" else 1), "gradients": found}


def warned(group: dist.ProcessGroup, taken: str) -> dict[str, Any]:
    """What is warned of in training steps under DDP whose loss is ``taken`` so, and the gradients of the last one."""
    gc.collect()  # steps of earlier runs
    model = DistributedDataParallel(Small(), process_group=group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            layout = UNEVEN if taken not in ("equal counts", "one more") else "contiguous"
            step = bound(group, layout, EVEN if taken == "equal counts" else LENGTHS)
            stream = tokens(step.plan.batch.tokens)
            rows, labels = step.shard(stream), step.labels(stream)
            logits = (
                torch.utils.checkpoint.checkpoint(model, rows, step, use_reentrant=False)
                if number
                else model(rows, step)
            )
            own = nn.functional.cross_entropy(logits, labels, reduction="sum")
            if taken == "step.loss":
                loss = step.loss(logits, labels, gradients="averaged")
            elif taken == "step.share":
                loss = step.share(own, (labels >= 0).sum(), gradients="averaged")
            elif taken == "gathered":
                loss = nn.functional.cross_entropy(step.gather(logits), next_tokens(stream, step.plan.batch, -100))
            elif taken == "another step":
                other = bound(group, UNEVEN)
                loss = own + 0 * other.loss(logits.detach(), labels, gradients="averaged", without_attention=True)
            else:
                loss = own / (labels >= 0).sum()
            model.zero_grad()
            loss.backward()
            del logits, own, loss, step
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {"warnings": [str(w.message) for w in caught if "loss" in str(w.message)], "gradients": found}


def run_huggingface(group: dist.ProcessGroup, gradients: Gradients, wrapper: str) -> dict[str, Any]:
    """(loss of the batch, the gradient of a weight) of a Hugging Face model under DDP or FSDP2, or what was refused."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from flexcp.frameworks import fsdp, huggingface

    gc.collect()  # models whose forward was refused, for which FSDP2 goes on to say that it runs
    huggingface.register()
    model: nn.Module = make_model(RUN, "flexcp" if wrapper == "DDP, registered" else "eager")
    if wrapper != "DDP, registered":
        huggingface.turn_on(model)
    plan = make_plan(RUN, model.config, 0)
    if wrapper.startswith("DDP"):
        model = DistributedDataParallel(model, process_group=group)
    else:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        if wrapper == "FSDP2 summed":
            fsdp.sum_gradients(model)
    step = flexcp.bind(plan, group)
    try:
        given = huggingface.inputs(RUN.tokens(0), step, gradients=gradients)
        loss = model(**(given | ({"num_items_in_batch": 99} if wrapper == "DDP, another count" else {}))).loss
        if wrapper == "FSDP2 summed late":
            fsdp.sum_gradients(model)
        loss.backward()
    except ValueError as error:
        return {"refused": str(error)}
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    if gradients == "averaged":
        total /= step.cp_size
    inner = getattr(model, "module", model)
    gradient = inner.lm_head.weight.grad
    return {"loss": float(total), "gradient": getattr(gradient, "full_tensor", lambda: gradient)()}
