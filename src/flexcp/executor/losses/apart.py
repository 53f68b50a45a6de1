"""Apart: ranks of a step, or parameters of a model, over which DDP and FSDP2 do not reduce gradients.

A wrapper may reduce gradients over other ranks than those of the step, such as those of a mesh's data-parallel axis
alone. And ``fully_shard`` of every layer without the model itself, or DDP around a part of the model, leaves the other
parameters to themselves. In both cases the loss is right, but every rank of the step keeps the gradient of its own part
of the batch, and weights drift apart. Gradients may still be reduced by the user's own code, so these are warnings.

Attention runs inside the model's forward, so the outermost module on the call stack is the model, and its parameters
can be compared with those that wrappers hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flexcp.executor.losses.averaging import FsdpModule, fsdp_states, is_trained, running_ddp

Spot = tuple[int, str]
"""A parameter, as the id of its module and its name there: FSDP2 replaces the tensor during a forward."""


def ranks_apart(modules: Iterable[FsdpModule], group: dist.ProcessGroup | None) -> str | None:
    """Return a warning if wrappers run that reduce gradients, but not over all ranks of ``group``.

    The wrappers are the running DDP module and trained parameter groups of ``modules``; what any of them reduces over
    counts. Return None if nothing is wrong, no wrapper runs, or there is no group.
    """
    if group is None:
        return None
    wrapper, found = running_ddp(), list[tuple[str, list[int]]]()
    if wrapper is not None:
        found.append((type(wrapper).__name__, dist.get_process_group_ranks(wrapper.process_group)))
    param_groups = (each for module in modules for each in getattr(module(), "_fsdp_param_groups", ()))
    meshes = {id(each.mesh_info.mesh): each.mesh_info.mesh for each in param_groups if is_trained(each)}
    found += [("FSDP2", mesh.mesh.flatten().tolist()) for mesh in meshes.values()]
    shared = set(dist.get_process_group_ranks(group))
    reduced = shared & {rank for _, ranks in found for rank in ranks}
    return apart_words(found[0][0], len(reduced), len(shared)) if found and reduced < shared else None


def apart_words(who: str, reduced: int, ranks: int) -> str:
    """Return the warning for ``who``, which reduces gradients over only ``reduced`` of a step's ``ranks`` ranks."""
    return (
        f"{who} reduces gradients over {reduced} of the {ranks} ranks that share this batch: each rank's gradient is "
        "that of its own part, and the weights of the ranks drift apart. Wrap the model over all ranks, those of the "
        "data-parallel axis and of the step: DistributedDataParallel(model) without a process group, or fully_shard "
        "with a mesh that has both axes. If your own code reduces gradients over the step's ranks, filter this warning"
    )


def unwrapped_parameters(callers: list[nn.Module], group: dist.ProcessGroup | None) -> str | None:
    """Return a warning if some trained parameters of the outermost of ``callers`` are wrapped and others are not.

    ``callers`` are the modules whose methods are running, innermost first. Return None if all are wrapped or none is,
    or if there is no group of ranks that share a step.
    """
    if group is None or not callers or dist.get_world_size(group) < 2:
        return None
    model = callers[-1]
    wrapped = {*_held_by_ddp(model), *_held_by_fsdp()}
    inside, outside = 0, list[str]()
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if (id(module), own) in wrapped:
                inside += 1
            else:
                outside.append(f"{name}.{own}" if name else own)
    return unwrapped_words(type(model).__name__, outside) if inside and outside else None


def _held_by_ddp(model: nn.Module) -> Iterator[Spot]:
    """Yield the parameters that DDP modules inside ``model``, or the model itself if it is one, hold."""
    for wrapper in model.modules():
        if isinstance(wrapper, DistributedDataParallel):
            for module in wrapper.module.modules():
                yield from ((id(module), name) for name, _ in module.named_parameters(recurse=False))


def _held_by_fsdp() -> Iterator[Spot]:
    """Yield the parameters that FSDP2 holds, of all models of this process."""
    # These names are internal to torch; if a release changes them, only this check is lost.
    for state in fsdp_states().values():
        for group in getattr(state(), "_fsdp_param_groups", ()):
            for held in getattr(group, "fsdp_params", ()):
                yield from _spots(getattr(held, "_module_info", None))


def _spots(info: Any) -> Iterator[Spot]:
    """Yield the places of one parameter of FSDP2; modules that share it have one each."""
    if info is not None:
        yield id(info.module), info.param_name
        yield from zip(map(id, info.shared_modules), info.shared_param_names, strict=True)


def unwrapped_words(model: str, names: list[str]) -> str:
    """Return the warning for trained parameters (``names``) of a model that no wrapper reduces."""
    several = f"{len(names)} trained parameters of {model}, such as {names[0]}, are" if len(names) > 1 else ""
    return (
        f"{several or f'{names[0]}, a trained parameter of {model}, is'} outside of DDP and FSDP2, which hold other "
        "parts of the model: each rank keeps the gradient of its own part of the batch there, and the weights of the "
        "ranks drift apart. Wrap the whole model: DistributedDataParallel(model), or fully_shard(model) after "
        "fully_shard of its layers. If your own code reduces these gradients over the ranks, filter this warning"
    )
