"""Step handles: represent a step by a tensor of one number, because a registered operator cannot take a Python object.

torch.compile would make a Python object a constant of the graph and compile again for every step; a tensor's value
never enters the graph. So each step has a tensor with its number, its *handle*. The handle travels through graphs,
recomputation and backward threads, and the operator looks up the step by it. The table of steps is process-wide. It
holds weak references, so it keeps no step alive, and numbers are never used twice, so steps of several models in one
process cannot be confused.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flexcp.executor.step import Step

_numbers = count()
_steps: WeakValueDictionary[int, Step] = WeakValueDictionary()


def new_handle(step: Step) -> Tensor:
    """Return a new tensor by which :func:`step_of` finds ``step``, as long as something else refers to the step."""
    number = next(_numbers)
    _steps[number] = step
    return torch.tensor(number)


def live_steps() -> list[Step]:
    """Return all steps of this process that are still referred to."""
    return list(_steps.values())


def step_of(handle: Tensor) -> Step:
    """Return the step of a handle; raise RuntimeError if the step no longer exists."""
    step = _steps.get(int(handle))
    if step is None:
        raise RuntimeError(
            "the step of this attention call is gone: a compiled model keeps only its number, so keep the step itself "
            "(any variable) until backward has run"
        )
    return step
