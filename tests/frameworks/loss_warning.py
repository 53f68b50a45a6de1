"""Turns the warning about a plain mean loss into an error, for runs whose loss is divided correctly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refusing_the_loss_warning() -> Iterator[None]:
    """Raise where a backward under a wrapper that averages gradients would warn that it is unknown what the loss was
    divided by.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*nothing says what this rank's loss was divided by")
        yield
