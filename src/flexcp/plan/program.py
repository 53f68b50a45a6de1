"""Program: what moves in one pass of one mask, and in which stage.

Stages. In slot s a rank first waits for the transfers of stage s, then posts those of stage s + 1 (or of later ones:
how far ahead each stage is posted is in :mod:`flexcp.plan.execution`), then computes. Work runs in the earliest slot in
which its queries and its keys are there (own tokens: slot ``own_stage``). So an input may be forwarded one stage after
it arrived, and an output may leave two stages after the slot that completed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.tables import Table
from flexcp.plan.execution import Execution
from flexcp.shape import IS_OUTPUT, Shape

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Transfers(Table):
    """Pieces on their way: tokens ``start..stop`` of ``owner`` in kept order, heads ``h0..h1``.

    A transfer whose source is not the owner of an input forwards what it received earlier; an output carries everything
    its source computed or received for that piece. ``source == target`` is a rank's own tokens entering its arena, and
    no traffic.
    """

    stage: Ints
    source: Ints
    target: Ints
    kind: Ints
    owner: Ints
    start: Ints
    stop: Ints
    h0: Ints
    h1: Ints
    partial: Ints

    def bytes(self, shape: Shape) -> Ints:
        """Bytes on the wire of each transfer."""
        each = shape.bytes_per_token_head()[self.kind, self.partial]
        return np.where(self.source == self.target, 0, (self.stop - self.start) * (self.h1 - self.h0) * each)

    @property
    def is_output(self) -> NDArray[np.bool_]:
        return IS_OUTPUT[self.kind]


@dataclass(frozen=True, eq=False)
class Program:
    """The transfers of one mask in one direction, sorted by stage, then source, then target.

    ``held[rank]`` is how much of the work on a rank's own rows and own keys, in per mille, waits until the slot after
    its last inputs, where it hides the way home of what the rank computed for others. Without entries nothing waits.

    ``keys_kept`` (backward only): every rank kept the keys it received in the forward, so none travel again. What
    arrived in stage s of the forward is there from slot s - 1 on.

    ``execution`` says of every stage how and when it is posted, and what the work beside it leaves free.
    """

    transfers: Transfers
    own_stage: int
    stages: int
    held: tuple[int, ...] = ()
    keys_kept: bool = False
    execution: Execution = field(kw_only=True)
