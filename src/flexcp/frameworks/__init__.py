"""Adapters for frameworks, one file each, which use only public extension points of the frameworks.

This file has what they share. Adapters are loaded on first use, because each needs its own package.
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
    """Raise RuntimeError at the end of the ``with`` block if ``step`` ran no attention inside it; yields the step.

    The model would then have trained with its own attention. ``step.loss`` and the adapters check this themselves;
    ``used`` is for loops that compute their own loss.
    """
    before = step.calls
    yield step
    if step.calls == before:
        raise RuntimeError(not_used(step))


def not_used(step: Step) -> str:
    """Return the error message for a step that was given to a model whose attention never ran under it."""
    from flexcp.executor.step_handles import given_another, run_instead  # needs torch, which a step has loaded

    other = None if step.calls else run_instead(step)
    if other is not None:
        return f"{step!r} was not used by any attention. {given_another(other)}"
    return (
        f"{step!r} was given to a model whose attention never used it: its layers still run their own attention. "
        "Turn flexcp on (docs/frameworks.md says how in each framework) or call flexcp.attention in your own layers"
    )


def __getattr__(name: str) -> Any:
    if name not in _ADAPTERS:
        raise AttributeError(f"module 'flexcp.frameworks' has no attribute {name!r}")
    return importlib.import_module(f"flexcp.frameworks.{name}")
