"""Request: everything a planner is told. A planner is a pure function ``Request -> Placement``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.pieces import Shape

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Request:
    """One batch to place.

    ``argument`` is what follows the colon of a strategy's name (``zigzag:4``). ``layout`` holds one index map per rank when the
    tokens are already placed, None when the planner places them too. ``equal_tokens`` asks for the same count on every rank,
    rounded up to a multiple of ``pad_to``. Tolerances are fractions over the mean, or None for "as time profits".
    ``effort`` is a count of evaluated candidates, None for the strategy's own choice.
    """

    batch: Batch
    shape: Shape
    cluster: Cluster
    cost: CostModel
    argument: str = ""
    layout: tuple[Ints, ...] | None = None
    equal_tokens: bool = False
    pad_to: int = 1
    compute_tolerance: float | None = None
    token_tolerance: float | None = None
    max_tokens_per_rank: int | None = None
    effort: int | None = None

    @property
    def ranks(self) -> int:
        return self.cluster.ranks


def refuse_tolerances(request: Request) -> None:
    """For strategies that balance by a rule of their own."""
    for name in ("compute_tolerance", "token_tolerance"):
        value = getattr(request, name)
        if value is not None:
            raise ValueError(
                f"this strategy balances by its own rule and takes no tolerances; got {name}={value}, use blocks"
            )
