"""Calls of a rank: what one rank posts together, stage by stage, derived from the plan. Integers only; no tensor, no group.

By default a stage is one call of whole messages: whatever moves in it starts at once, and the transport shares the links. With
``rounds_per_call`` the stage runs in the plan's conflict-free rounds (:mod:`flexcp.plan.rounds`), that many consecutive ones to a call.
Levels have ports of their own, so the n-th call holds the n-th rounds inside nodes and the n-th across nodes. Chunks of a message that meet
in a call and touch are one part again.

Every rank derives its calls from the same table, so what one posts as its n-th call of a stage the other posts as its n-th too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.plan import Plan
from flexcp.plan.rounds import find_messages

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
    """How stages are cut into calls: how many rounds make one (None: all), and the most bytes of a chunk (None: as pays)."""

    rounds_per_call: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("rounds_per_call", "chunk_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} is a whole number of at least 1, or None; got {value!r}")
        if self.chunk_bytes is not None and self.rounds_per_call is None:
            raise ValueError(
                f"chunk_bytes={self.chunk_bytes} cuts messages for rounds; give rounds_per_call too, or neither"
            )


WHOLE_STAGES = CallSettings()


def rank_calls(
    plan: Plan, rank: int, mask: int, backward: bool, settings: CallSettings = WHOLE_STAGES
) -> tuple[tuple[Call, ...], ...]:
    """The calls of ``rank`` in each stage of a program; none where it neither sends nor receives.

    A call in which the rank has nothing to do is left out: nobody expects it there.
    """
    program = plan.programs[mask][backward]
    if settings.rounds_per_call is None:
        messages, stage_of, _ = find_messages(program, plan.shape, plan.cluster)
        stage, call = stage_of[messages.exchange], np.zeros(len(messages), np.int64)
        table = [stage, call, messages.source, messages.target, np.zeros(len(messages), np.int64), messages.size]
    else:
        rounds = plan.rounds(mask, backward, settings.chunk_bytes, settings.rounds_per_call)
        chunks = rounds.chunks
        stage = rounds.exchanges.stage[chunks.exchange]
        table = [stage, rounds.call, chunks.source, chunks.target, chunks.start, chunks.stop]
    found: dict[tuple[int, int], tuple[list[MessageRange], list[MessageRange]]] = {}
    for number, peers in enumerate((table[3], table[2])):  # 0: receives, where the target is here; 1: sends
        here = np.flatnonzero(peers == rank)
        other = (table[2], table[3])[number][here]
        # Everyone begins with the next rank after it, so that they do not all begin with the same one.
        keys = [table[4][here], (other - rank) % plan.ranks, table[1][here], table[0][here]]
        order = np.lexsort(keys)
        rows = np.stack([keys[3], keys[2], other, table[4][here], table[5][here]])[:, order]
        for at, turn, peer, start, stop in rows.T.tolist():
            parts = found.setdefault((at, turn), ([], []))[number]
            if parts and parts[-1].peer == peer and parts[-1].stop == start:
                start = parts.pop().start
            parts.append(MessageRange(peer, start, stop))
    stages: list[list[Call]] = [[] for _ in range(program.stages)]
    for (at, turn), (receives, sends) in sorted(found.items()):
        stages[at].append(Call(turn, tuple(receives), tuple(sends)))
    return tuple(tuple(calls) for calls in stages)
