"""microbatch: divide a global batch that exceeds the token cap into micro-batches.

A micro-batch spans all ranks, so every rank takes part in every micro-batch. This module only decides which documents
go together; each micro-batch is then a batch like any other, for any strategy.

1. *As few as possible.* Each micro-batch costs a whole pass over the layers and has exposed communication of its own.
   The smallest number that the tokens allow is tried first, then one more, until the documents fit. (Memory depends on
   the plan, so a caller with a limit on memory asks for one more itself.)
2. *Balanced in time.* Documents, longest first, go to the micro-batch that is then least full, measured by load or by
   tokens, whichever is fuller. If a micro-batch then has too many tokens, documents or pairs of documents are exchanged
   until all fit. If this fails, documents go longest first to the micro-batch where they leave the least room (best
   fit), which packs more tightly and balances worse.
3. *Repaired.* Documents are moved or exchanged between the slowest micro-batch and another, as long as this makes the
   slowest faster.

A load is an integer: the (query, key) pairs of attention over all layers, plus the cost of the rest of each layer as a
number of pairs that cost as much (:meth:`flexcp.cost.CostModel.pairs_per_token`). Documents keep their stream order
inside a micro-batch, and micro-batches are ordered by their first document. There are never more micro-batches than
best fit decreasing needs, which for many documents is at most about 11/9 of the smallest possible number.
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
"""The most exchanges that are done to make documents fit, and the most that are done to balance loads."""
SINGLES, PAIRED = 128, 24
"""How many documents of a micro-batch are tried for an exchange one by one, and how many of them in pairs."""
TOO_MANY = 8
"""In the price of an exchange, one token too many counts as much as the load of this many average tokens."""
CLOSE_TO_MEAN = 1000
"""Loads are balanced if the largest is within 1/1000 of the mean."""


def document_loads(batch: Batch, shape: Shape, cost: CostModel) -> Ints:
    """Return the cost of each document over all layers in (query, key) pairs, including the rest of each layer."""
    documents = np.arange(batch.documents, dtype=np.int64)
    layers = sum(m.layers for m in batch.masks)
    attention = batch.weighted_rows_area(documents, np.zeros_like(documents), batch.lengths)
    return attention + layers * cost.pairs_per_token(shape) * batch.lengths


def split(
    lengths: Sequence[int] | Ints,
    loads: Sequence[int] | Ints,
    ranks: int,
    cap: int,
    least: int = 1,
    pad_to: int = 1,
) -> list[list[int]]:
    """Return the documents of each micro-batch, as indices: every document once, loads balanced.

    ``lengths`` and ``loads`` are the tokens and the cost of each document. ``cap`` is the most tokens that a rank
    keeps, of which whole multiples of ``pad_to`` are used; a micro-batch has at most so many on all ranks. ``least`` is
    the least number of micro-batches. Raise Refused if a document alone has too many tokens, ValueError if arguments do
    not match.
    """
    tokens, costs = [int(n) for n in lengths], [int(x) for x in loads]
    if len(tokens) != len(costs):
        raise ValueError(f"{len(costs)} loads for {len(tokens)} documents; give one each")
    if ranks < 1 or cap < 1:
        raise ValueError(
            f"micro-batches need at least 1 rank and a cap of at least 1 token; got {ranks} ranks and a cap of {cap}"
        )
    if cap < pad_to:
        raise ValueError(
            f"max_tokens_per_rank={cap} is below pad_to={pad_to}, so no rank may keep a token; raise the cap to at "
            f"least {pad_to}, or lower pad_to"
        )
    room = cap // pad_to * pad_to * ranks
    multiples = f" in multiples of pad_to={pad_to}" if pad_to > 1 else ""
    for document, n in enumerate(tokens):
        if n > room:
            raise Refused(
                f"document {document} has {n} tokens, more than all {ranks} ranks hold together with "
                f"max_tokens_per_rank={cap}{multiples} ({room}); raise the cap, add ranks, or cut the document"
            )
    count = max(least, -(-sum(tokens) // room))
    while (found := _fitted(tokens, costs, count, room)) is None:
        count += 1
    found.balance()
    return found.in_stream_order()


class _MicroBatches:
    """Documents in micro-batches: ``load[i]`` is the cost of micro-batch i, ``room[i]`` how many tokens still fit.

    ``room[i]`` is negative if the micro-batch has too many tokens.
    """

    def __init__(self, tokens: list[int], costs: list[int], count: int, room: int) -> None:
        self.tokens, self.costs = tokens, costs
        self.documents: list[list[int]] = [[] for _ in range(count)]
        self.room = [room] * count
        self.load = [0] * count

    def add(self, at: int, document: int) -> None:
        """Add a document to micro-batch ``at``."""
        self.documents[at].append(document)
        self.room[at] -= self.tokens[document]
        self.load[at] += self.costs[document]

    def move(self, source: int, target: int, document: int) -> None:
        """Move a document from one micro-batch to another."""
        self.documents[source].remove(document)
        self.room[source] += self.tokens[document]
        self.load[source] -= self.costs[document]
        self.add(target, document)

    def make_fit(self) -> bool:
        """Exchange documents until no micro-batch has too many tokens; return whether this succeeded."""
        for _ in range(REPAIRS):
            by_room = sorted(range(len(self.room)), key=lambda i: (-self.room[i], i))
            fullest = by_room.pop()
            if self.room[fullest] >= 0:
                return True
            # Pairs of documents are tried only if single ones do not help, because there are many more pairs.
            if not any(self._emptied(fullest, other, pairs) for pairs in (False, True) for other in by_room):
                return False
        return min(self.room) >= 0

    def balance(self) -> None:
        """Exchange documents between the slowest micro-batch and others while the slowest gets faster.

        Each time, the fastest micro-batch that can help takes part.
        """
        for _ in range(REPAIRS):
            by_load = sorted(range(len(self.load)), key=lambda i: (self.load[i], i))
            slowest = by_load.pop()
            if self.load[slowest] * len(self.load) * CLOSE_TO_MEAN <= sum(self.load) * (CLOSE_TO_MEAN + 1):
                return
            if not any(self._lightened(slowest, other) for other in by_load):
                return

    def _emptied(self, fullest: int, other: int, pairs: bool) -> bool:
        """Do the cheapest exchange that lowers the tokens too many of ``fullest``; return False if there is none.

        After it, neither of the two micro-batches may have as many tokens too many as ``fullest`` has now. Its price is
        the larger load of the two afterwards, plus the load of ``TOO_MANY`` average tokens for each token too many.
        With ``pairs``, two documents of each may be exchanged at once.
        """
        grows, after, do = self._exchanges(fullest, other, pairs)
        over = np.maximum(0, np.maximum(-self.room[fullest] - grows, grows - self.room[other]))
        price = after + over * (TOO_MANY * sum(self.load) // sum(self.tokens))
        return do(over < -self.room[fullest], price)

    def _lightened(self, slowest: int, other: int) -> bool:
        """Do the exchange after which the larger load of the two is lowest; return False if none fits and helps."""
        grows, after, do = self._exchanges(slowest, other, False)
        fits = (grows <= self.room[other]) & (-grows <= self.room[slowest])
        return do(fits & (after < self.load[slowest]), after)

    def _exchanges(
        self, one: int, other: int, pairs: bool
    ) -> tuple[Ints, Ints, Callable[[NDArray[np.bool_], Ints], bool]]:
        """Return what exchanges of documents between two micro-batches change, and a function that does one.

        The first two results are the tokens that ``other`` gains and the larger load of the two afterwards, both
        ``[choice of one, choice of other]``, where a choice is up to one document, or two with ``pairs``. The function
        takes which exchanges help and their prices, does the cheapest that helps, and returns whether there was one.
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
        """Return choices of documents of micro-batch ``at``: none, single ones from light to heavy, maybe pairs.

        Of many documents, an evenly spaced selection that contains the heaviest is used, a smaller one for ``pairs``.
        """
        ordered = sorted(self.documents[at], key=lambda d: (-self.costs[d], d))
        singles, paired = (ordered[:: max(1, -(-len(ordered) // most))] for most in (SINGLES, PAIRED))
        return [(), *((d,) for d in reversed(singles)), *(combinations(paired, 2) if pairs else ())]

    def in_stream_order(self) -> list[list[int]]:
        """Return the documents of each micro-batch that is not empty.

        Documents are sorted, and micro-batches are sorted by their first document.
        """
        return sorted(sorted(documents) for documents in self.documents if documents)


def _fitted(tokens: list[int], costs: list[int], count: int, room: int) -> _MicroBatches | None:
    """Put all documents into ``count`` micro-batches with at most ``room`` tokens each; return None if they do not fit.

    They are balanced if that fits, else packed tightly.
    """
    longest_first = sorted(range(len(tokens)), key=lambda d: (-tokens[d], -costs[d], d))
    total = sum(costs)
    balanced = _MicroBatches(tokens, costs, count, room)
    for document in longest_first:
        # The larger of load / mean load and tokens / room, multiplied by a common denominator.
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
