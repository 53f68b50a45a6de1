"""Calls of a rank: what one rank posts together, stage by stage, derived from the plan. Integers only;
no tensor, no group.

A stage is issued as the plan says (:mod:`flexcp.plan.issue`): in one call of whole messages, where whatever moves in it
starts at once and the transport shares the links, or in conflict-free rounds, some to a call. Chunks of a message that
meet in a call and touch are one part again.

Every rank derives its calls from the same table, so what one posts as its n-th call of a stage the other posts as its
n-th too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.issue import issued_parts
from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]


class MessageRange(NamedTuple):
    """Bytes ``start..stop`` of the stage's message to or from ``peer``."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """What a rank posts together: call ``number`` of its stage, the same on all ranks."""

    number: int
    receives: tuple[MessageRange, ...]
    sends: tuple[MessageRange, ...]


@dataclass(frozen=True)
class CallSettings:
    """What is asked for in the place of the plan's calls: how many rounds make one (None: as the plan says; 0: all that
    moves in a stage), and the most bytes of a chunk (None: as pays).
    """

    rounds_per_call: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("rounds_per_call", 0), ("chunk_bytes", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} is a whole number of at least {least}, or None; got {value!r}")
        if self.chunk_bytes is not None and not self.rounds_per_call:
            raise ValueError(
                f"chunk_bytes={self.chunk_bytes} cuts messages for rounds; give rounds_per_call too, or neither"
            )


AS_PLANNED = CallSettings()


def rank_calls(
    plan: Plan, rank: int, mask: int, backward: bool, settings: CallSettings = AS_PLANNED
) -> tuple[tuple[Call, ...], ...]:
    """The calls of ``rank`` in each stage of a program; none where it neither sends nor receives.

    A call in which the rank has nothing to do is left out: nobody expects it there.
    """
    program = plan.programs[mask][backward]
    rounds = settings.rounds_per_call
    asked = None if rounds is None else np.full(program.stages, rounds, np.int64)
    parts = issued_parts(plan, mask, backward, asked, settings.chunk_bytes)
    found: dict[tuple[int, int], tuple[list[MessageRange], list[MessageRange]]] = {}
    for sends in (False, True):
        mine = parts.take((parts.source if sends else parts.target) == rank)
        peer = mine.target if sends else mine.source
        # Everyone begins with the next rank after it, so that they do not all begin with the same one.
        order = np.lexsort([mine.start, (peer - rank) % plan.ranks, mine.call, mine.stage])
        rows = np.stack([mine.stage, mine.call, peer, mine.start, mine.stop])[:, order]
        for at, turn, other, start, stop in rows.T.tolist():
            side = found.setdefault((at, turn), ([], []))[sends]
            if side and side[-1].peer == other and side[-1].stop == start:
                start = side.pop().start
            side.append(MessageRange(other, start, stop))
    stages: list[list[Call]] = [[] for _ in range(program.stages)]
    for (at, turn), sides in sorted(found.items()):
        stages[at].append(Call(turn, *(tuple(side) for side in sides)))
    return tuple(tuple(calls) for calls in stages)
