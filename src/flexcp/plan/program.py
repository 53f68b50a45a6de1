"""Program: the transfers of one mask in one direction, and the stage of each.

In slot s a rank first waits for the transfers of stage s, then posts those of stage s + 1 (or of later stages, see
:mod:`flexcp.plan.execution`), then computes. Work runs in the earliest slot in which its queries and keys are there;
own tokens are there from slot ``own_stage`` on. So an input can be forwarded one stage after it arrived, and an output
can leave two stages after the slot that completed it.
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
    """Pieces that travel: tokens ``start..stop`` of ``owner`` in kept order, heads ``h0..h1``, ends exclusive.

    Kept order counts the owner's tokens in stream order. ``kind`` is a :class:`flexcp.shape.Kind`, and ``partial`` is 1
    for a result to which other ranks contribute. If the source of an input is not its owner, it forwards what it
    received earlier. An output carries the sum of all that its source computed or received for the piece. If source and
    target are the same, a rank's own tokens enter its arena (the buffer of received tokens), without traffic.
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
        """Return the bytes that each transfer moves between ranks; 0 if source and target are the same."""
        each = shape.bytes_per_token_head()[self.kind, self.partial]
        return np.where(self.source == self.target, 0, (self.stop - self.start) * (self.h1 - self.h0) * each)

    @property
    def is_output(self) -> NDArray[np.bool_]:
        return IS_OUTPUT[self.kind]


@dataclass(frozen=True, eq=False)
class Program:
    """The transfers of one mask in one direction, sorted by stage, then source, then target.

    There are ``stages`` slots: in slot s a rank waits for the transfers of stage s, posts later stages, and computes.
    Work on own tokens can run from slot ``own_stage`` on.

    ``held[rank]`` is the share, in per mille, of a rank's work on its own rows and keys that waits until the slot after
    its last inputs, where it hides the transfers of results to other ranks. If ``held`` is empty, no work waits.

    ``keys_kept`` (backward only) says that every rank kept the keys it received in the forward, so that no keys travel.
    Keys that arrived in stage s of the forward are there from slot s - 1 of the backward on.

    ``execution`` says how and when each stage is posted, and how many multiprocessors its slot leaves free.
    """

    transfers: Transfers
    own_stage: int
    stages: int
    held: tuple[int, ...] = ()
    keys_kept: bool = False
    execution: Execution = field(kw_only=True)
