"""Step handles: a step as a tensor of one number, because a registered operator takes no Python object.

torch.compile makes a Python object a constant of the graph and compiles anew for every step; a tensor's value never
enters the graph. So a step carries a tensor that holds its number, that tensor travels through graphs, recomputation
and backward threads, and the operator looks the step up. This table is all of flexcp's process-wide state. It is weak:
it keeps no step alive, decides nothing, and two models or two steps in one process cannot meet in it, because numbers
are never used twice.
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
    """A tensor by which :func:`step_of` finds ``step`` as long as somebody keeps it."""
    number = next(_numbers)
    _steps[number] = step
    return torch.tensor(number)


def live_steps() -> list[Step]:
    """Every step of this process that somebody keeps."""
    return list(_steps.values())


def step_of(handle: Tensor) -> Step:
    """The step of a handle."""
    step = _steps.get(int(handle))
    if step is None:
        raise RuntimeError(
            "the step of this attention call is gone: a compiled model keeps only its number, so keep the step itself "
            "(any variable) until backward has run"
        )
    return step
