"""Averaging: who averages a step's gradients over its ranks, as far as a step can see.

Every rank holds a share of one loss, so gradients belong summed over the ranks of a step. Data parallel wrappers
average them, which is right for a loss that was multiplied by the number of ranks (``gradients="averaged"``) and
1/ranks of the gradient for one that was not. DistributedDataParallel says which module's forward is running, FSDP2
keeps a state of each module it shards, and attention runs inside them, so the mistake can be named. A forward that
ended in an exception stays in FSDP2's state for good, so the modules that attention is called from are looked for among
the callers too.

A forward whose gradients stay on their rank (``no_sync``) is not averaged by DDP, and a communication hook of the
user's own does what its author wants; torch's own hooks average.

FSDP2 reduces gradients as it is set when they are made, and ``sum_gradients`` may be called after the loss was taken.
So the backward looks once more at the modules that attention ran in.

A cross entropy that a user takes himself, by the usual mean over his rows, weighs every rank alike when gradients are
averaged. That is the batch's gradient where all ranks hold as many labels, and another one where they do not. So a
backward under a wrapper that averages, of a step whose ranks hold different numbers of tokens and of whose loss nobody
said how it was divided, gets a warning. A loss that was divided rightly by hand looks the same, so the warning says
what it does not know.
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
FsdpModule = Callable[[], Any]
"""A weak reference to FSDP2's state of a module, as torch keeps it."""
TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def share_factor(gradients: Gradients, ranks: int) -> int:
    """What a rank's share of the loss is multiplied by, so that gradients treated as said are those
    of the whole batch.
    """
    if gradients not in ("summed", "averaged"):
        raise ValueError(
            f"gradients={gradients!r} is neither 'summed' nor 'averaged': say what happens to gradients over the ranks "
            "of a batch"
        )
    return ranks if gradients == "averaged" else 1


class CountOfAllRanks(int):
    """A count over all ranks of a batch, such as the loader's ``batch.valid``:
    a number like any other, but never one rank's own.
    """


def wrong_count(count: float, rows: int, ranks: int) -> str:
    """What to say of a count that is not this rank's own."""
    return (
        f"count={count:g} is not what this rank's sum is over: it holds {rows} rows, and step.share itself adds up the "
        f"counts of all {ranks} ranks. Pass this rank's own, (labels != -100).sum(), or divide by the batch's count "
        "yourself: total / batch.valid, times the ranks where gradients are averaged, is the same share. Where a row "
        "counts more than once, divide total and count by how often"
    )


def running_average(group: dist.ProcessGroup | None) -> str | None:
    """The name of the wrapper whose forward is running and whose backward averages over ranks of ``group``,
    if there is one.
    """
    # Names of torch's own: a release without them loses this check, not its attention.
    active = getattr(DistributedDataParallel, "_get_active_ddp_module", None)
    wrapper = None if active is None else active()
    if wrapper is None or group is None or not wrapper.require_backward_grad_sync:
        return None
    hooks = getattr(wrapper, "_comm_hooks", ())
    if any(not getattr(hook, "__module__", "").startswith(TORCH_HOOKS) for hook, _ in hooks):
        return None
    averaged = set(dist.get_process_group_ranks(wrapper.process_group))
    return type(wrapper).__name__ if len(averaged & set(dist.get_process_group_ranks(group))) > 1 else None


def fsdp_reduction(param_groups: Iterable[Any], group: dist.ProcessGroup) -> tuple[str | None, str | None]:
    """Who averages and who sums the gradients of FSDP2's parameter groups over ranks of ``group``;
    None where nobody does.
    """
    shared = set(dist.get_process_group_ranks(group))
    averaged = summed = None
    for found in param_groups:
        if len(shared & set(found.mesh_info.mesh.mesh.flatten().tolist())) < 2:
            continue
        if found.gradient_divide_factor is None:
            averaged = "FSDP2, without flexcp.frameworks.fsdp.sum_gradients(model),"
        elif found.gradient_divide_factor == 1:
            summed = "FSDP2, after flexcp.frameworks.fsdp.sum_gradients(model),"
    return averaged, summed


def running_fsdp_modules() -> list[FsdpModule]:
    """FSDP2's modules whose forward is running: those that say so, of models of which a module is among the callers.

    Modules that are compiled as one with their model are not among the callers by themselves.
    """
    # Names of torch's own: a release without them loses this check, not its attention. Modules of which nobody imported
    # FSDP2 have none.
    known = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None)
    found = [
        (module, state)
        for module, state in (known or {}).items()
        if getattr(getattr(state(), "_training_state", None), "name", "") == "FORWARD"
    ]
    if not found:
        return []
    callers = {id(module) for module in _calling_modules()}
    running = {id(_model_of(state)) for module, state in found if id(module) in callers}
    return [state for _, state in found if id(_model_of(state)) in running]


def _model_of(state: FsdpModule) -> Any:
    """What FSDP2's modules of one model share, or the module's own state in a release that shares nothing."""
    return getattr(state(), "_state_ctx", state())


def _calling_modules() -> Iterator[nn.Module]:
    """The modules whose methods are running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(caller := frame.f_locals.get("self"), nn.Module):
            yield caller
        frame = frame.f_back


def reduction_of(modules: Iterable[FsdpModule], group: dist.ProcessGroup | None) -> tuple[str | None, str | None]:
    """:func:`fsdp_reduction` of FSDP2's modules as they are set now."""
    if group is None:
        return None, None
    return fsdp_reduction([g for module in modules for g in getattr(module(), "_fsdp_param_groups", ())], group)


def wrong_factor(who: str, gradients: Gradients, ranks: int, late: bool = False) -> str:
    """What to say of shares that are said to be reduced one way and are reduced the other; ``late``:
    since the loss was taken.
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
    """The least and the most tokens of a rank, pads left out, where they differ."""
    runs, real = placement.runs, placement.batch.tokens
    tokens = np.minimum(runs.stop, real) - np.minimum(runs.start, real)
    counts = [int(tokens[runs.rank == rank].sum()) for rank in range(placement.ranks)]
    return (min(counts), max(counts)) if max(counts) > min(counts) else None


def unsaid_loss(who: str, least: int, most: int) -> str:
    """What to say of a backward of whose loss a step knows nothing,
    under a wrapper that averages over ranks of different token counts.
    """
    return (
        f"{who} averages gradients over ranks that hold {least} to {most} tokens of this batch, and nothing says what "
        "this rank's loss was divided by. If it is the mean over this rank's own rows, the gradient is not the "
        "batch's: tokens weigh more where few are. If it is this rank's sum / the labels of all ranks x ranks, the "
        "gradient is right, and this warning ends where step.share(total, count, gradients='averaged') takes the same "
        "share from this rank's sum and its own count of labels, or step.loss(logits, labels, gradients='averaged') "
        "from its logits"
    )
