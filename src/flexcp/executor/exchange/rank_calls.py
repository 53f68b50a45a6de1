"""Rank calls: which messages, or ranges of messages, a rank posts together in each stage, as integers.

A stage is issued as the plan says (:mod:`flexcp.plan.issue`): in one call of whole messages, so that everything starts
at once and the transport shares the links, or in conflict-free rounds, one or more to a call. Chunks of a message that
are in the same call and adjacent are joined.

All ranks derive their calls from the same plan, so a message that one rank sends in its n-th call of a stage is
received by the other in its n-th call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.io.setting_checks import check_whole
from flexcp.plan.issue import issued_parts
from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]


class MessageRange(NamedTuple):
    """Bytes ``start <= b < stop`` of the stage's message to or from ``peer``."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """What a rank posts together: call ``number`` of a stage, whose numbers mean the same calls on all ranks."""

    number: int
    receives: tuple[MessageRange, ...]
    sends: tuple[MessageRange, ...]


@dataclass(frozen=True)
class CallSettings:
    """Settings that replace the plan's choice of what is posted together.

    ``rounds_per_call`` is how many conflict-free rounds of transfers one call has (0: everything that moves in a stage
    is one call; None: as the plan says). ``chunk_bytes`` is the most bytes of the chunks into which messages are cut
    for rounds (None: chosen by :mod:`flexcp.plan.rounds`); it needs ``rounds_per_call`` of at least 1. Other values
    raise ValueError.
    """

    rounds_per_call: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("rounds_per_call", 0), ("chunk_bytes", 1)):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, f"a whole number of at least {least}, or None", least)
        if self.chunk_bytes is not None and not self.rounds_per_call:
            raise ValueError(
                f"chunk_bytes={self.chunk_bytes} cuts messages for rounds; give rounds_per_call too, or neither"
            )


AS_PLANNED = CallSettings()


def rank_calls(
    plan: Plan, rank: int, mask: int, backward: bool, settings: CallSettings = AS_PLANNED
) -> tuple[tuple[Call, ...], ...]:
    """Return, for each stage of the program of a mask and direction, the calls of ``rank``.

    Calls in which the rank neither sends nor receives are left out.
    """
    program = plan.programs[mask][backward]
    rounds = settings.rounds_per_call
    asked = None if rounds is None else np.full(program.stages, rounds, np.int64)
    parts = issued_parts(plan, mask, backward, asked, settings.chunk_bytes)
    found: dict[tuple[int, int], tuple[list[MessageRange], list[MessageRange]]] = {}
    for sends in (False, True):
        mine = parts.take((parts.source if sends else parts.target) == rank)
        peer = mine.target if sends else mine.source
        # Each rank begins with the rank after it, so that not all ranks send to the same one first.
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
