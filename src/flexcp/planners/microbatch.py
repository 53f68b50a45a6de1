"""microbatch: a global batch that exceeds the token cap, cut into micro-batches.

A micro-batch spans all ranks, so every rank takes part in the same number of them by construction. What is decided here
is which documents go together; each micro-batch is then a batch like any other, for any strategy.

1. *As few as possible.* Each micro-batch costs a whole pass over the layers and exposed communication of its own. Try
   the fewest that the tokens allow, then one more, until the documents fit. (Memory depends on the plan, so whoever has
   a cap on it asks for one more itself.)
2. *Balanced in time.* Documents, longest first, go to the micro-batch that is then the least full, in load or in
   tokens, whichever is worse. Where that puts too many tokens into one, a repair exchanges documents, or pairs of them,
   until all fit; if it cannot, documents go longest first to where they fit tightest (best fit), which packs closer and
   balances worse.
3. *Repaired.* Documents move or change places between the slowest micro-batch and another while that makes the slowest
   faster.

A load is an integer: pairs of attention over all layers, with tokens priced in pairs
(:meth:`flexcp.cost.CostModel.pairs_per_token`). Documents keep their stream order inside a micro-batch, and
micro-batches are ordered by their first document. There are never more than best fit needs: 11/9 of the fewest
possible, and one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch
from flexcp.cost import CostModel
from flexcp.planners.request import Refused
from flexcp.shape import Shape

Ints = NDArray[np.int64]
REPAIRS = 256
SINGLES, PAIRED = 128, 24
"""Documents of a micro-batch that a repair looks at one by one, and in pairs."""
TOO_MANY = 8
"""How many tokens' load one token over the room is worth."""
CLOSE_TO_MEAN = 1000
"""Micro-batches within 1/1000 of the mean are balanced."""


def document_loads(batch: Batch, shape: Shape, cost: CostModel) -> Ints:
    """What each document costs in pairs, its tokens' share of the rest of the layers included."""
    documents = np.arange(batch.documents, dtype=np.int64)
    layers = sum(m.layers for m in batch.masks)
    attention = batch.weighted_rows_area(documents, np.zeros_like(documents), batch.lengths)
    return attention + layers * cost.pairs_per_token(shape) * batch.lengths


def split(
    lengths: Sequence[int] | Ints, loads: Sequence[int] | Ints, ranks: int, cap: int, least: int = 1
) -> list[list[int]]:
    """Documents of each micro-batch: every document once, at most ``cap * ranks`` tokens in each, loads balanced.

    ``lengths`` and ``loads`` are tokens and cost of each document, ``cap`` is the most tokens one rank keeps (a
    multiple of ``pad_to`` where tokens are padded), ``least`` how many micro-batches there are at least.
    """
    tokens, costs = [int(n) for n in lengths], [int(x) for x in loads]
    if len(tokens) != len(costs):
        raise ValueError(f"{len(costs)} loads for {len(tokens)} documents; give one each")
    if ranks < 1 or cap < 1:
        raise ValueError(
            f"micro-batches need at least 1 rank and a cap of at least 1 token; got {ranks} ranks and a cap of {cap}"
        )
    room = cap * ranks
    for document, n in enumerate(tokens):
        if n > room:
            raise Refused(
                f"document {document} has {n} tokens, more than all {ranks} ranks hold together with "
                f"max_tokens_per_rank={cap} ({room}); raise the cap, add ranks, or cut the document"
            )
    count = max(least, -(-sum(tokens) // room))
    while (found := _fitted(tokens, costs, count, room)) is None:
        count += 1
    found.balance()
    return found.in_stream_order()


class _MicroBatches:
    """Documents in micro-batches, and the tokens that still fit into each (less than none while one is too full)."""

    def __init__(self, tokens: list[int], costs: list[int], count: int, room: int) -> None:
        self.tokens, self.costs = tokens, costs
        self.documents: list[list[int]] = [[] for _ in range(count)]
        self.room = [room] * count
        self.load = [0] * count

    def add(self, at: int, document: int) -> None:
        self.documents[at].append(document)
        self.room[at] -= self.tokens[document]
        self.load[at] += self.costs[document]

    def move(self, source: int, target: int, document: int) -> None:
        self.documents[source].remove(document)
        self.room[source] += self.tokens[document]
        self.load[source] -= self.costs[document]
        self.add(target, document)

    def make_fit(self) -> bool:
        """Exchange documents until none is too full; False if that fails."""
        for _ in range(REPAIRS):
            by_room = sorted(range(len(self.room)), key=lambda i: (-self.room[i], i))
            fullest = by_room.pop()
            if self.room[fullest] >= 0:
                return True
            # Pairs of documents only where single ones do not do: there are many more of them.
            if not any(self._emptied(fullest, other, pairs) for pairs in (False, True) for other in by_room):
                return False
        return min(self.room) >= 0

    def balance(self) -> None:
        """Exchange documents while the slowest gets faster, with the fastest one that can help."""
        for _ in range(REPAIRS):
            by_load = sorted(range(len(self.load)), key=lambda i: (self.load[i], i))
            slowest = by_load.pop()
            if self.load[slowest] * len(self.load) * CLOSE_TO_MEAN <= sum(self.load) * (CLOSE_TO_MEAN + 1):
                return
            if not any(self._lightened(slowest, other) for other in by_load):
                return

    def _emptied(self, fullest: int, other: int, pairs: bool) -> bool:
        """Do the exchange after which the two are least too full, every token too many priced as several;
        False if none helps.
        """
        grows, after, do = self._exchanges(fullest, other, pairs)
        over = np.maximum(0, np.maximum(-self.room[fullest] - grows, grows - self.room[other]))
        price = after + over * (TOO_MANY * sum(self.load) // sum(self.tokens))
        return do(over < -self.room[fullest], price)

    def _lightened(self, slowest: int, other: int) -> bool:
        """Do the exchange that evens out the two best and fits; False if none helps."""
        grows, after, do = self._exchanges(slowest, other, False)
        fits = (grows <= self.room[other]) & (-grows <= self.room[slowest])
        return do(fits & (after < self.load[slowest]), after)

    def _exchanges(
        self, one: int, other: int, pairs: bool
    ) -> tuple[Ints, Ints, Callable[[NDArray[np.bool_], Ints], bool]]:
        """For every choice of documents of the two: the tokens that the other gains,
        the larger load of the two afterwards.

        And a function that does the cheapest exchange among those that help, or says that there is none.
        """
        mine, theirs = self._choices(one, pairs), self._choices(other, pairs)
        sides = [
            [np.array([sum(of[d] for d in choice) for choice in choices], np.int64) for choices in (mine, theirs)]
            for of in (self.tokens, self.costs)
        ]
        grows, moved = (a[:, None] - b for a, b in sides)

        def do(helps: NDArray[np.bool_], price: Ints) -> bool:
            if not helps.any():
                return False
            best = int(np.where(helps, price, price.max() + 1).argmin())
            for source, target, choice in (
                (one, other, mine[best // len(theirs)]),
                (other, one, theirs[best % len(theirs)]),
            ):
                for document in choice:
                    self.move(source, target, document)
            return True

        return grows, np.maximum(self.load[one] - moved, self.load[other] + moved), do

    def _choices(self, at: int, pairs: bool) -> list[tuple[int, ...]]:
        """No document, and single ones from light to heavy or also some pairs;
        of many, an even choice with the heaviest.
        """
        ordered = sorted(self.documents[at], key=lambda d: (-self.costs[d], d))
        singles, paired = (ordered[:: max(1, -(-len(ordered) // most))] for most in (SINGLES, PAIRED))
        return [(), *((d,) for d in reversed(singles)), *(combinations(paired, 2) if pairs else ())]

    def in_stream_order(self) -> list[list[int]]:
        return sorted(sorted(documents) for documents in self.documents if documents)


def _fitted(tokens: list[int], costs: list[int], count: int, room: int) -> _MicroBatches | None:
    """All documents in ``count`` micro-batches, balanced if that fits, packed tightly if only that fits, else None."""
    longest_first = sorted(range(len(tokens)), key=lambda d: (-tokens[d], -costs[d], d))
    total = sum(costs)
    balanced = _MicroBatches(tokens, costs, count, room)
    for document in longest_first:
        # Load over its mean against tokens over the room, without fractions.
        fullness = [
            max((load + costs[document]) * count * room, (room - left + tokens[document]) * total)
            for load, left in zip(balanced.load, balanced.room, strict=True)
        ]
        balanced.add(fullness.index(min(fullness)), document)
    if balanced.make_fit():
        return balanced
    tight = _MicroBatches(tokens, costs, count, room)
    for document in longest_first:
        fits = [i for i in range(count) if tight.room[i] >= tokens[document]]
        if not fits:
            return None
        tight.add(min(fits, key=lambda i: (tight.room[i], i)), document)
    return tight
