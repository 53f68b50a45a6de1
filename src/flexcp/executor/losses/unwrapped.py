"""Unwrapped parameters: those of a model that are trained but in no DDP or FSDP2 module, while other parts are.

``fully_shard`` of every layer without the model itself, or DDP around a part of the model, leaves the other parameters
to themselves: every rank of a step keeps the gradient of its own part, and their weights drift apart. The loss is right
all the same. Attention runs inside the model's forward, so the outermost module on the call stack is the model, and its
parameters can be compared with those that wrappers hold. Gradients may still be reduced by the user's own code, so this
is a warning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Spot = tuple[int, str]
"""A parameter, as the id of its module and its name there: FSDP2 replaces the tensor during a forward."""


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
            if (id(module), own) in wrapped or hasattr(parameter, "device_mesh"):
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
    # These names are internal to torch; if a release changes them, only this check is lost. If nothing imported FSDP2,
    # there are no such parameters.
    known = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None)
    for state in (known or {}).values():
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
