"""Averaging: find out whether a DDP or FSDP2 module averages or sums a step's gradients over its ranks.

Every rank holds a share of one loss, so gradients must be summed over the ranks of a step. Data-parallel wrappers
average them instead. That is right for a loss that was multiplied by the number of ranks (``gradients="averaged"``);
for other losses the gradient would be too small by the number of ranks. DistributedDataParallel tells which module's
forward is running, FSDP2 keeps a state for each module that it shards, and attention runs inside these modules, so the
mistake can be found. A forward that ended with an exception stays marked as running in FSDP2's state, so a model
counts only if one of its modules is among the callers of attention.

DDP does not average the gradients of a forward under ``no_sync``. A communication hook of the user's own may do
anything, so it is not judged; torch's own hooks average.

Gradients are summed or averaged over all ranks that FSDP2 shards a model over. If these are more than the ranks of a
step, several groups of ranks (replicas) have batches of their own, and a sum over all ranks is the sum over replicas.
It may be meant (the loss may be divided by the replicas), so there is a warning until
``sum_gradients(model, replicas=...)`` says what is. A number of replicas that the ranks of the step do not have is
warned of as well.

FSDP2 reduces gradients by its settings at the time of the backward, and ``sum_gradients`` may be called after the loss
was computed. So the backward checks the modules that attention ran in again.

If users compute a cross entropy themselves, as the usual mean over a rank's rows, averaged gradients weigh every rank
the same. That is the batch's gradient only if all ranks hold the same number of labels. So there is a warning for a
backward under a wrapper that averages, if the ranks hold different numbers of tokens and no loss of the step was
reported. A loss that was divided correctly by hand looks the same, so the warning describes both cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flexcp.plan.placement import Placement

Gradients = Literal["summed", "averaged"]
"""What happens to gradients over the ranks of a step."""
FsdpModule = Callable[[], Any]
"""A weak reference to FSDP2's state of a module; it is called to get the state, or None if that no longer exists."""
FSDP_AVERAGES = "FSDP2, without flexcp.frameworks.fsdp.sum_gradients(model),"
FSDP_SUMS = "FSDP2, after flexcp.frameworks.fsdp.sum_gradients(model) or set_gradient_divide_factor(1.0),"
MIXED = (
    "some FSDP2 modules of this model sum gradients and others average them: call "
    "flexcp.frameworks.fsdp.sum_gradients(model) after the last fully_shard, which is the root's, or not at all with "
    "gradients='averaged'"
)
TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def share_factor(gradients: Gradients, ranks: int) -> int:
    """Return the factor of each rank's share of the loss: ``ranks`` if gradients are averaged, 1 if they are summed.

    With it, the gradients that are reduced over ranks are those of the whole batch. Raise ValueError if ``gradients``
    is something else.
    """
    if gradients not in ("summed", "averaged"):
        raise ValueError(
            f"gradients={gradients!r} is neither 'summed' nor 'averaged': say what happens to gradients over the ranks "
            "of a batch"
        )
    return ranks if gradients == "averaged" else 1


class CountOfAllRanks(int):
    """A count over all ranks of a batch, such as the loader's ``batch.valid``.

    It is an int whose type shows that it is not one rank's own count.
    """


class Replicas(float):
    """FSDP2's divisor of summed gradients, if ``sum_gradients`` was told the number of replicas.

    It is a float whose type shows that it was given by the user.
    """


def wrong_count(count: float, rows: int, ranks: int, pads: int = 0) -> str:
    """Return the message for ``count=`` of ``step.share`` that is not this rank's own count of labels.

    ``rows`` is how many rows of this rank can count, ``pads`` how many pads it has besides, ``ranks`` how many ranks
    share the batch.
    """
    if rows < count <= rows + pads:
        return (
            f"count={count:g} is more than the {rows} rows that count on this rank: it counts some of the {pads} pads, "
            "and a loss that counts pads trains on them. Label pads by -100: labels of your own by "
            "step.shard(labels, pad=-100), next tokens by step.labels(tokens), and count (labels != -100).sum()"
        )
    return (
        f"count={count:g} is not what this rank's sum is over: it holds {rows} rows, and step.share itself adds up the "
        f"counts of all {ranks} ranks. Pass this rank's own count, (labels != -100).sum(), or divide by the batch's "
        "count yourself: total / batch.valid, times the number of ranks if gradients are averaged, is the same share. "
        "If every row counts more than once, divide total and count by how often it does"
    )


def counted_rows(count: float, labels: int) -> str:
    """Return the warning for ``count=`` of ``step.share`` that counts rows, of which only ``labels`` have a label."""
    return (
        f"count={count:g} counts rows, but only {labels} rows of the cross entropy in total have a label that is not "
        "ignored: rows without a label add nothing to the sum, so the loss and its gradient would be too "
        f"small. Pass count={labels}, (labels != ignore_index).sum(); if the mean over all rows is meant, filter this "
        "warning"
    )


def running_ddp() -> Any:
    """Return the DDP module whose forward is running, or None."""
    # This name is internal to torch; if a release changes it, only the checks that use it are lost.
    active = getattr(DistributedDataParallel, "_get_active_ddp_module", None)
    return None if active is None else active()


def fsdp_states() -> dict[nn.Module, FsdpModule]:
    """Return the FSDP2 modules of this process, each with a weak reference to its state."""
    # These names are internal to torch; if a release changes them, only the checks that use them are lost. If nothing
    # imported FSDP2, there are no modules.
    known = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None)
    return dict(known or {})


def running_average(group: dist.ProcessGroup | None) -> str | None:
    """Return the class name of the running DDP wrapper that averages gradients over ranks of ``group``, or None.

    Running means that this call is inside its forward. A wrapper counts if it averages over at least two ranks of the
    group, is not under ``no_sync`` and has no communication hook but torch's own.
    """
    wrapper = running_ddp()
    if wrapper is None or group is None or not wrapper.require_backward_grad_sync:
        return None
    hooks = getattr(wrapper, "_comm_hooks", ())
    if any(not getattr(hook, "__module__", "").startswith(TORCH_HOOKS) for hook, _ in hooks):
        return None
    averaged = set(dist.get_process_group_ranks(wrapper.process_group))
    return type(wrapper).__name__ if len(averaged & set(dist.get_process_group_ranks(group))) > 1 else None


def fsdp_reduction(param_groups: Iterable[Any], group: dist.ProcessGroup) -> tuple[str | None, str | None]:
    """Return what averages and what sums the gradients of FSDP2's parameter groups over ranks of ``group``, by name.

    The two names are for messages; each is None if no parameter group does so. Frozen parameter groups, those over
    other ranks and those with a divisor of the user's own are left out.
    """
    shared = set(dist.get_process_group_ranks(group))
    overlaps: dict[int, bool] = {}  # by mesh: modules usually have the same one
    averaged = summed = None
    for found in param_groups:
        mesh = found.mesh_info.mesh
        if id(mesh) not in overlaps:
            overlaps[id(mesh)] = len(shared & set(mesh.mesh.flatten().tolist())) > 1
        if not overlaps[id(mesh)] or not is_trained(found):
            continue
        if found.gradient_divide_factor is None:
            averaged = FSDP_AVERAGES
        elif found.gradient_divide_factor == 1 or isinstance(found.gradient_divide_factor, Replicas):
            summed = FSDP_SUMS
    return averaged, summed


def is_trained(param_group: Any) -> bool:
    """Return whether a parameter group of FSDP2 has a parameter that is not frozen; True if that is not known."""
    # These names are internal to torch; with a release that changes them, frozen groups count too.
    parameters = [getattr(x, "sharded_param", None) for x in getattr(param_group, "fsdp_params", ())]
    return not parameters or any(x is None or x.requires_grad for x in parameters)


def wrong_replicas(modules: Iterable[FsdpModule], group: dist.ProcessGroup | None) -> str | None:
    """Return a warning if FSDP2 modules sum gradients over other ranks than those of ``group``, without their mean.

    That is the case if ``sum_gradients`` was not told of replicas and there are some, or if it was told a number that
    is neither 1 nor that of the replicas. Modules count only if their ranks include all of the group. Return None if
    nothing is wrong. Without a group, the step is this rank's alone.
    """
    shared = {dist.get_rank()} if group is None else set(dist.get_process_group_ranks(group))
    found: dict[tuple[int, bool], tuple[Any, float | None]] = {}  # modules usually have the same mesh and divisor
    for each in (g for module in modules for g in getattr(module(), "_fsdp_param_groups", ())):
        mesh, divisor = each.mesh_info.mesh, each.gradient_divide_factor
        found[id(mesh), isinstance(divisor, Replicas)] = mesh, divisor
    for mesh, divisor in found.values():
        ranks = set(mesh.mesh.flatten().tolist())
        if not shared <= ranks:
            continue
        if isinstance(divisor, Replicas) and divisor not in (1, len(ranks) / len(shared)):
            return untrue_replicas(divisor, len(ranks), len(shared))
        if divisor == 1 and not isinstance(divisor, Replicas) and shared < ranks:
            return unsaid_replicas(len(ranks), len(shared))
    return None


def untrue_replicas(said: float, summed: int, ranks: int) -> str:
    """Return the warning for ``sum_gradients(model, replicas=said)`` if there are other numbers of replicas.

    Gradients are summed over ``summed`` ranks, of which ``ranks`` share a batch.
    """
    divides = f"fsdp.sum_gradients(model, replicas={said:g}) divides gradients by {said:g}"
    if summed == ranks:
        return (
            f"{divides}, but all {ranks} ranks that they are summed over share this batch, so that there are no "
            f"replicas: the gradient is {1 / said:g} times that of the batch. Call fsdp.sum_gradients(model)"
        )
    replicas = f"{summed / ranks:g}"
    return (
        f"{divides}, but they are summed over {summed} ranks, of which {ranks} share this batch, so that there are "
        f"{replicas} replicas: the gradient is {summed / ranks / said:g} times the mean of theirs. Call "
        f"fsdp.sum_gradients(model, replicas={replicas}), or replicas=1 if your loss is divided by the replicas, or by "
        "the labels of all of them"
    )


def unsaid_replicas(summed: int, ranks: int) -> str:
    """Return the warning for gradients that are summed over ``summed`` ranks, of which only ``ranks`` share a batch."""
    replicas = f"{summed / ranks:g}"
    return (
        f"{FSDP_SUMS} sums gradients over {summed} ranks, of which {ranks} share this batch: the gradient is the sum, "
        f"not the mean, of {replicas} replicas with batches of their own. Call fsdp.sum_gradients(model, "
        f"replicas={replicas}) for their mean; if your loss is divided by the replicas, or by the labels of all of "
        "them, call fsdp.sum_gradients(model, replicas=1), which ends this warning"
    )


def running_fsdp_modules() -> list[FsdpModule]:
    """Return the FSDP2 modules of the models whose forward is running, as weak references to their states.

    A model's forward is running if FSDP2 marks one of its modules so, and one of the modules so marked is among the
    callers of this function. All modules of such a model are returned, because those that were compiled together do not
    all appear among the callers.
    """
    known = fsdp_states()
    found = [
        (module, state)
        for module, state in known.items()
        if getattr(getattr(state(), "_training_state", None), "name", "") == "FORWARD"
    ]
    if not found:
        return []
    callers = {id(module) for module in calling_modules()}
    running = {id(_model_of(state)) for module, state in found if id(module) in callers}
    return [state for state in known.values() if id(_model_of(state)) in running]


def _model_of(state: FsdpModule) -> Any:
    """Return an object that is the same for all FSDP2 modules of one model.

    If torch has no such object, it is the state of the module itself.
    """
    return getattr(state(), "_state_ctx", state())


def calling_modules() -> Iterator[nn.Module]:
    """Yield the modules whose methods are on the call stack of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(caller := frame.f_locals.get("self"), nn.Module):
            yield caller
        frame = frame.f_back


def reduction_of(modules: Iterable[FsdpModule], group: dist.ProcessGroup | None) -> tuple[str | None, str | None]:
    """Return :func:`fsdp_reduction` for the parameter groups of FSDP2 modules now; (None, None) without a group."""
    if group is None:
        return None, None
    return fsdp_reduction([g for module in modules for g in getattr(module(), "_fsdp_param_groups", ())], group)


def wrong_factor(who: str, gradients: Gradients, ranks: int, late: bool = False) -> str:
    """Return the message for a loss made for ``gradients`` if ``who`` reduces gradients in the other way.

    ``ranks`` is how many ranks share the batch. ``late`` says that FSDP2's setting was changed after the loss was
    computed.
    """
    done, off = ("averages", f"1/{ranks} of") if gradients == "summed" else ("sums", f"{ranks} times")
    right = "averaged" if gradients == "summed" else "summed"
    when = "set how FSDP2 reduces before the forward, not between the loss and its backward, and " if late else ""
    return (
        f"{who} {done} gradients over the {ranks} ranks that share this batch, but each of them holds a share of one "
        f"loss made for gradients={gradients!r}, so gradients would be {off} the batch's: {when}say "
        f"gradients={right!r} (in step.loss, step.share, "
        "huggingface.inputs or prepared) and drop any factor of your own"
    )


def uneven(placement: Placement) -> tuple[int, int] | None:
    """Return the fewest and the most tokens of a rank, without pads; None if all ranks have the same number."""
    runs, real = placement.runs, placement.batch.tokens
    tokens = np.minimum(runs.stop, real) - np.minimum(runs.start, real)
    counts = [int(tokens[runs.rank == rank].sum()) for rank in range(placement.ranks)]
    return (min(counts), max(counts)) if max(counts) > min(counts) else None


def unsaid_loss(who: str, least: int, most: int) -> str:
    """Return the warning for a backward whose loss was not reported while ``who`` averages gradients.

    ``least`` and ``most`` are the fewest and the most tokens of a rank.
    """
    return (
        f"{who} averages gradients over ranks that hold {least} to {most} tokens of this batch, and nothing says what "
        "this rank's loss was divided by. If it is the mean over this rank's own rows, the gradient is not the "
        "batch's: tokens weigh more on ranks that hold few. If it is this rank's sum / the labels of all ranks x "
        "ranks, the gradient is right; to end this warning, compute the same share by step.share(total, count, "
        "gradients='averaged') from this rank's sum and its own count of labels, or by step.loss(logits, labels, "
        "gradients='averaged') from its logits"
    )
