"""Frameworks: flexcp in other people's models, through their public seams only. One file a framework;
this one is what they share.

Adapters load on first use, because each needs a package of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexcp.executor.step import Step

_ADAPTERS = (
    "fsdp",
    "huggingface",
    "huggingface_trainer",
    "megatron",
    "multimodal",
    "pipeline",
    "rollouts",
    "shared_forward",
    "torchtitan",
)


@contextmanager
def used(step: Step) -> Iterator[Step]:
    """Raise at the end of the block when ``step`` ran no attention inside it:
    the model would have trained on something else.

    ``step.loss`` and the adapters of this room check the same by themselves; this is for loops with a loss of their
    own.
    """
    before = step.calls
    yield step
    if step.calls == before:
        raise RuntimeError(not_used(step))


def not_used(step: Step) -> str:
    """What to say of a step that was given to a model and never ran."""
    return (
        f"{step!r} was given to a model whose attention never used it: its layers still run their own attention. "
        "Turn flexcp on (docs/frameworks.md says how in each framework) or call flexcp.attention in your own layers"
    )


def __getattr__(name: str) -> Any:
    if name not in _ADAPTERS:
        raise AttributeError(f"module 'flexcp.frameworks' has no attribute {name!r}")
    return importlib.import_module(f"flexcp.frameworks.{name}")
