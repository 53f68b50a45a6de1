"""Functions that run on ranks in tests of averaged gradients; light to import (see parallel_runs.py)."""

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
from flexcp.executor.local_rows import next_tokens
from flexcp.executor.losses.averaging import Gradients
from flexcp.executor.step import Step
from lib.model_runs import Run, make_model, make_plan

LENGTHS = [19, 1, 8, 5]
VOCABULARY, HEADS, SIZE = 11, 2, 4
RUN = Run("llama")


class Small(nn.Module):
    """A model with one layer of attention, as a user would write it."""

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
"""Which tokens each of two ranks keeps: not equally many."""
EVEN = [19, 1, 8, 6]
"""Documents that two ranks can hold in equal parts."""


def bound(group: dist.ProcessGroup | None, layout: Any = "free", lengths: list[int] = LENGTHS) -> Step:
    ranks = 1 if group is None else dist.get_world_size(group)
    planner = flexcp.Planner(
        HEADS, HEADS, SIZE, dtype="float64", cluster=flexcp.cluster("cpu", 1, ranks), strategy="blocks"
    )
    return flexcp.bind(planner(lengths, layout=layout), group)


def sum_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotation that is a string
    """A communication hook of a user, which sums gradients instead of averaging them."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


def whole(gradient: Any) -> Tensor:
    """Return a gradient, gathered if FSDP2 has sharded it."""
    found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def run_small(group: dist.ProcessGroup | None, gradients: Gradients, wrapping: str = "none") -> dict[str, Any]:
    """Return the batch's loss and gradients of :class:`Small`, or the message of a refusal. ``wrapping`` says whether
    and how DDP or FSDP2 is used.
    """
    model: nn.Module = Small()
    if wrapping.startswith("FSDP2"):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        from flexcp.frameworks import fsdp

        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        if wrapping == "FSDP2 summed":
            fsdp.sum_gradients(model)
        if wrapping == "FSDP2 compiled":
            model.compile(backend="eager")
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
    with torch.no_grad():  # not refused: without a backward nothing is averaged
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


class Deep(nn.Module):
    """A layer with attention, and a head outside that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Small()
        self.again = nn.Linear(VOCABULARY, VOCABULARY, dtype=torch.float64)

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        found: Tensor = self.again(self.layer(tokens, step))
        return found


def run_summed_between(group: dist.ProcessGroup, gradients: Gradients, how: str) -> str | None:
    """Return why a loss is refused, or None, if a part of the model is sharded after ``fsdp.sum_gradients``."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from flexcp.frameworks import fsdp

    mesh, model, step = DeviceMesh.from_group(group, "cpu"), Deep(), bound(group)
    model.again.requires_grad_(how != "before a frozen head")
    fully_shard(model.layer, mesh=mesh)
    fsdp.sum_gradients(model)
    if how != "before the root":
        fully_shard(model.again, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        step.loss(model(step.shard(tokens()), step), step.labels(tokens()), gradients=gradients).backward()
    except ValueError as error:
        return str(error)
    return None


def run_replicas(group: dist.ProcessGroup, how: str, replicas: int | None) -> dict[str, Any]:
    """Return gradients and warnings of two replicas of two ranks, or four of one rank, with FSDP2 over all ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from flexcp.frameworks import fsdp

    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "cp"))
    model = Small()
    fully_shard(model, mesh=mesh if how == "HSDP" else DeviceMesh("cpu", torch.arange(4)))
    if how != "averaged":
        fsdp.sum_gradients(model, replicas)
    step = bound(None if how == "alone" else mesh.get_group("cp"))
    stream = tokens().roll(dist.get_rank() if how == "alone" else dist.get_rank() // 2)
    labels = step.labels(stream)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = model(step.shard(stream), step)
        if how == "own loss":
            own = nn.functional.cross_entropy(logits, labels, reduction="sum")
            loss = own / (len(stream) - len(LENGTHS))
        else:
            loss = step.loss(logits, labels, gradients="averaged" if how == "averaged" else "summed")
        (loss / 2 if how == "divided" else loss).backward()
    said = [str(w.message) for w in caught if "replicas" in str(w.message)]
    return {"warnings": said, "gradients": {name: whole(p.grad) for name, p in model.named_parameters()}}


def run_apart(group: dist.ProcessGroup, wrapping: str) -> dict[str, Any]:
    """Return the warnings of a step of two of four ranks, and whether its ranks have the same gradients afterwards."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "cp"))
    alone = DeviceMesh("cpu", torch.arange(4).view(4, 1), mesh_dim_names=("each", "one"))
    model: nn.Module = Deep()
    if wrapping == "FSDP2 over dp":
        fully_shard(model, mesh=mesh["dp"])
    elif wrapping == "a frozen layer over all":
        model.again.requires_grad_(False)
        fully_shard(model.again, mesh=DeviceMesh("cpu", torch.arange(4)))
        fully_shard(model, mesh=mesh["dp"])
    elif wrapping != "none":
        over = {"DDP over dp": mesh.get_group("dp"), "DDP over one": alone.get_group("one"), "DDP": None}
        model = DistributedDataParallel(model, process_group=over[wrapping])
    step = bound(mesh.get_group("cp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            logits = model(step.shard(tokens()), step)
            gradients: Gradients = "averaged" if wrapping == "DDP" else "summed"
            step.loss(logits, step.labels(tokens()), gradients=gradients).backward()
    gradient = whole(next(p.grad for p in model.parameters() if p.grad is not None)).clone()
    both = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(both, gradient, group=mesh.get_group("cp"))
    said = [str(w.message) for w in caught if "drift apart" in str(w.message)]
    return {"warnings": said, "same": torch.equal(*both)}


class Two(nn.Module):
    """Two models that are trained together, each of which may be wrapped by itself."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        found: Tensor = self.first(tokens, step) + self.second(tokens, step)
        return found


def run_unwrapped(group: dist.ProcessGroup, wrapping: str) -> dict[str, Any]:
    """Return the warnings of a step, and the names of parameters whose gradients differ on its two ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")  # only the first step of a group is checked
    model: nn.Module = Deep()
    gradients: Gradients = "averaged"
    if wrapping == "FSDP2 of a layer, frozen head":
        model.again.requires_grad_(False)
    if wrapping == "FSDP2 of tied weights":
        model.layer.head.weight = model.layer.embed.weight
    elif wrapping.startswith("FSDP2"):
        fully_shard(model.layer, mesh=mesh)
    if wrapping in ("FSDP2", "FSDP2 of tied weights", "FSDP2 without a parameter"):
        ignored = {model.again.weight} if wrapping == "FSDP2 without a parameter" else None
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    if wrapping == "DDP of a layer":
        model.layer = DistributedDataParallel(model.layer, process_group=mesh.get_group())
    if wrapping == "DDP of both":
        model = Two(*(DistributedDataParallel(Small(), process_group=mesh.get_group()) for _ in range(2)))
    if wrapping == "DDP":
        model = DistributedDataParallel(model, process_group=mesh.get_group())
    if wrapping == "none":
        gradients = "summed"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step = bound(mesh.get_group())
            loss = step.loss(model(step.shard(tokens()), step), step.labels(tokens()), gradients=gradients)
            loss.backward()
    apart = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            mine = whole(parameter.grad).clone()
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine, group=mesh.get_group())
            apart += [] if torch.equal(*both) else [name]
    return {"warnings": [str(w.message) for w in caught if "outside of DDP" in str(w.message)], "apart": apart}


class Failing(Small):
    """A model whose forward ends in an exception after its attention."""

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        super().forward(tokens, step)
        raise ArithmeticError("a user's own mistake")


def run_after_a_failure(group: dist.ProcessGroup, gradients: Gradients, wrapping: str) -> dict[str, Any]:
    """Call :func:`run_small` after the forward of another model under FSDP2 ended in an exception."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    failing, step = Failing(), bound(group)
    fully_shard(failing, mesh=DeviceMesh.from_group(group, "cpu"))
    try:
        failing(step.shard(tokens()), step)
    except ArithmeticError:
        return run_small(group, gradients, wrapping)
    raise AssertionError("the forward did not fail")


def warned(group: dist.ProcessGroup, taken: str) -> dict[str, Any]:
    """Return the warnings of training steps under DDP whose loss is computed as ``taken`` says, and gradients."""
    model = DistributedDataParallel(Small(), process_group=group)
    kept = evaluated(model, group) if taken == "own, beside an evaluation" else None
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
            elif taken == "two batches":
                other = bound(group, UNEVEN)
                loss = step.loss(logits, labels, gradients="averaged")
                loss = loss + other.loss(model(rows, other), labels, gradients="averaged")
            else:
                loss = own / (labels >= 0).sum()
            model.zero_grad()
            loss.backward()
            del logits, own, loss, step
    del kept
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {"warnings": loss_warnings(caught), "gradients": found}


def loss_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "loss was divided by" in " ".join(str(w.message).split())]


def evaluated(model: nn.Module, group: dist.ProcessGroup) -> tuple[Step, ...]:
    """Return steps whose loss is known but never trained on: of an evaluation, of a forward without a backward, and of
    gathered logits.
    """
    steps = tuple(bound(group, UNEVEN) for _ in range(3))
    stream = tokens()
    with torch.no_grad():
        steps[0].loss(model(steps[0].shard(stream), steps[0]), steps[0].labels(stream))
    steps[1].loss(model(steps[1].shard(stream), steps[1]), steps[1].labels(stream), gradients="averaged")
    steps[2].gather(model(steps[2].shard(stream), steps[2]))
    return steps


class TwoSteps(nn.Module):
    """An encoder and a decoder, each with the step of its own stream; both read the same tokens."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.reentrant = Small(), Small(), reentrant

    def forward(self, rows: Tensor, encoder: Step, decoder: Step) -> Tensor:
        q, k, v = self.encoder.project(self.encoder.embed(rows)).unflatten(1, (3, HEADS, SIZE)).unbind(1)
        seen = self._attend(q, k, v, encoder).flatten(1)
        q, k, v = self.decoder.project(self.decoder.embed(rows) + seen).unflatten(1, (3, HEADS, SIZE)).unbind(1)
        found: Tensor = self.decoder.head(self._attend(q, k, v, decoder).flatten(1)) + self.encoder.head(seen)
        return found

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(flexcp.attention, q, k, v, step, use_reentrant=self.reentrant)
        return found


def warned_of_two_steps(group: dist.ProcessGroup, said: bool, reentrant: bool) -> list[str]:
    """Return the warnings when the backward of one loss reaches the attention of two steps. The loss is
    ``decoder.loss`` if ``said``, else a plain mean of the user.
    """
    model = DistributedDataParallel(TwoSteps(reentrant), process_group=group)
    encoder, decoder = bound(group, UNEVEN), bound(group, UNEVEN)
    rows, labels = encoder.shard(tokens()), decoder.labels(tokens())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = model(rows, encoder, decoder)
        own = nn.functional.cross_entropy(logits, labels)
        (decoder.loss(logits, labels, gradients="averaged") if said else own).backward()
    assert not decoder.losses.in_backward, "it ended with its backward"
    return loss_warnings(caught)


def run_huggingface(group: dist.ProcessGroup, gradients: Gradients, wrapper: str) -> dict[str, Any]:
    """Return the batch's loss and a gradient of a Hugging Face model under DDP or FSDP2, or a refusal's message."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from flexcp.frameworks import fsdp, huggingface

    gc.collect()  # drop models whose forward was refused: FSDP2 still marks their forward as running
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
    if wrapper == "DDP, compiled":
        model.module.compile(backend="eager", fullgraph=True)
    step = flexcp.bind(plan, group)
    more = {"DDP, another count": {"num_items_in_batch": 99}, "DDP, as a tuple": {"return_dict": False}}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given = huggingface.inputs(RUN.tokens(0), step, gradients=gradients)
            if wrapper.endswith("own count"):  # as in a script that makes these keywords itself
                given = {name: value for name, value in given.items() if name != "gradients"} | {
                    "num_items_in_batch": 9
                }
            output = model(**(given | more.get(wrapper, {})))
            loss = output[0]
            if wrapper == "DDP, own loss":
                loss = nn.functional.cross_entropy(output.logits[0], given["shift_labels"][0])
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
    whole_gradient = getattr(gradient, "full_tensor", lambda: gradient)()
    return {"loss": float(total), "gradient": whole_gradient, "warnings": loss_warnings(caught)}
