"""The most memory that attention needs on any rank over an epoch of the user's documents.

Memory follows from a plan (:mod:`flexcp.plan.memory`), so the passes of the epoch are planned, not simulated. Short
data is planned whole. Of long data at most :data:`MOST_PASSES` passes are planned: half of them are those with the
longest documents, which are divided over most ranks and bring them most keys, and the others are evenly spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flexcp.compare.compare import planned
from flexcp.io.sizes import size
from flexcp.plan.plan import Plan
from flexcp.planners.request import Refused, Request

MOST_PASSES = 24
"""The most passes of an epoch that are planned."""


@dataclass(frozen=True)
class EpochMemory:
    """The rank that needs most memory for attention in any planned pass of an epoch.

    ``bytes`` is its :attr:`flexcp.plan.memory.Memory.total`, ``rank`` which rank it is, and ``pass_number`` in which
    pass, counted from 0. ``planned`` of the epoch's ``passes`` were planned. The strategy refused ``refused`` of them,
    the first for the reason ``why``. ``most_tokens`` are those of the fullest rank in any of the others.
    """

    strategy: str
    bytes: int
    rank: int
    pass_number: int
    most_tokens: int
    passes: int
    planned: int
    refused: int = 0
    why: str = ""

    def words(self) -> str:
        """Return the numbers in sentences for a user."""
        where = f"rank {self.rank}" + (f" in pass {self.pass_number}" if self.passes > 1 else "")
        epoch = f"an epoch of {self.passes:,} passes" if self.passes > 1 else "an epoch of one pass"
        seen = (
            ""
            if self.planned == self.passes
            else f", of which {self.planned} were planned, those with the longest documents among them"
        )
        refused = f" It refuses {self.refused} of the planned passes: {self.why}." if self.refused else ""
        return (
            f"Memory, over {epoch}{seen}: with {self.strategy} attention needs at most {size(self.bytes)} on a rank "
            f"({where}), one arena and what all layers keep for their backward without recomputation, and the fullest "
            f"rank keeps {self.most_tokens:,} tokens.{refused}"
        )


def passes_to_plan(longest: Sequence[int]) -> list[int]:
    """Return the numbers of the passes to plan; ``longest`` has the length of each pass's longest document.

    They are ascending: all passes, or those with the longest documents and some others.
    """
    if len(longest) <= MOST_PASSES:
        return list(range(len(longest)))
    half = MOST_PASSES // 2
    chosen = set(np.argsort(-np.array(longest, np.int64), kind="stable")[:half].tolist())
    others = [number for number in range(len(longest)) if number not in chosen]
    return sorted(chosen | {others[i * len(others) // (MOST_PASSES - half)] for i in range(MOST_PASSES - half)})


def epoch_memory(
    name: str,
    strategy: str,
    longest: Sequence[int],
    request_of: Callable[[int], Request],
    tell: Callable[[str], None] = lambda _: None,
) -> EpochMemory:
    """Plan passes of an epoch with ``strategy``, which messages call ``name``, and return the rank that needs most.

    ``longest`` has the length of each pass's longest document, ``request_of(number)`` returns the request of a pass,
    and ``tell`` receives progress messages. Raise :class:`Refused` if the strategy refuses every pass that was planned.
    """
    numbers = passes_to_plan(longest)
    worst, tokens, refusals = (-1, 0, 0), 0, list[str]()
    for done, number in enumerate(numbers, 1):
        tell(f"{name}: planning pass {done} of {len(numbers)} for its memory")
        try:
            plan = planned(request_of(number), strategy, search=False)[1]
        except Refused as refusal:
            refusals.append(str(refusal))
            continue
        needed, rank = fullest_rank(plan)
        worst = max(worst, (needed, rank, number), key=lambda found: found[0])
        tokens = max(tokens, int(plan.placement.tokens.max()))
    if len(refusals) == len(numbers):
        raise Refused(refusals[0])
    why = refusals[0] if refusals else ""
    return EpochMemory(name, *worst, tokens, len(longest), len(numbers), len(refusals), why)


def fullest_rank(plan: Plan) -> tuple[int, int]:
    """Return the most bytes that attention needs on a rank of a plan, and that rank."""
    needed = [plan.memory(rank).total for rank in range(plan.ranks)]
    most = max(needed)
    return most, needed.index(most)
