"""Step handles: represent a step by a tensor of one number, because a registered operator cannot take a Python object.

torch.compile would make a Python object a constant of the graph and compile again for every step; a tensor's value
never enters the graph. So each step has a tensor with its number, its *handle*. The handle travels through graphs,
recomputation and backward threads, and the operator looks up the step by it. The table of steps is process-wide. It
holds weak references, so it keeps no step alive, and numbers are never used twice, so steps of several models in one
process cannot be confused. Attention calls take their numbers from the same counter, so a call of one step is known to
be later than the making of another.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flexcp.executor.kernels import lasting

if TYPE_CHECKING:
    from flexcp.executor.step import Step

_numbers = count()
_steps: WeakValueDictionary[int, Step] = WeakValueDictionary()


def new_handle(step: Step) -> Tensor:
    """Return a new tensor by which :func:`step_of` finds ``step``, as long as something else refers to the step."""
    number = next_number()
    _steps[number] = step
    # On the CPU whatever torch's default device is: reading the number must not wait for a device.
    with lasting():
        return torch.tensor(number, device="cpu")


def next_number() -> int:
    """Return a number that is larger than those of all steps and attention calls of this process so far."""
    return next(_numbers)


def run_instead(step: Step) -> Step | None:
    """Return another step that ran attention after ``step`` was made, the one that did so last; None if there is none.

    If ``step`` itself ran none, the model was probably given that one. It must have as many rows on this rank: a step
    of another model, such as an image encoder, seldom has. Only steps that are still referred to are found.
    """
    others = [other for other in live_steps() if other is not step and other.local_tokens == step.local_tokens]
    later = [other for other in others if other.last_call > int(step.handle)]
    return max(later, key=lambda other: other.last_call, default=None)


def given_another(other: Step) -> str:
    """Return the part of an error message for a model that was given the step ``other`` in place of its batch's."""
    return (
        f"Attention ran under another step in the meantime, {other!r}: the model was given that step, kept from an "
        "earlier batch or inside a function of its own. Give the model the step that was bound for its batch, and ask "
        "the same step for labels and loss. If that step is another model's, turn flexcp on for this model "
        "(docs/frameworks.md)"
    )


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
