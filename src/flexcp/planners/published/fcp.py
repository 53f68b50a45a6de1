"""fcp: block-level flexible context parallelism, FCP (arXiv 2605.08524, MLSys'26).

The steps of the paper, and how each is done here:

1. *Blocks*: `fcp:4096` cuts documents into blocks of at most this many tokens (4,096 unless given), as few and as equal
   as possible. A block is a zig-zag pair, the i-th part of the document and the i-th from its end, so that all causal
   blocks of a document have equal work. Documents that are no longer than a block are packed into as few blocks as
   possible, best fit first.
2. *Bin-packing* by two criteria, longest processing time first: blocks, sorted by the larger of their shares of tokens
   and of work, go to the rank whose larger share stays smallest, among the ranks with room. A rank has room for the
   mean of tokens and 1/``DELTA`` more, or for ``max_tokens_per_rank``. If none has room, the rank with the fewest
   tokens takes the block.
3. *Rounds*: transfers form a bipartite graph of senders and receivers and are sent in as many conflict-free rounds as
   its largest degree (:mod:`flexcp.plan.rounds`, for every plan).
4. *Coalescing*: 16 rounds per call, which this strategy asks for.
5. *Pipeline*: pull, compute and push overlap, in stages (:mod:`flexcp.schedule.stages`) instead of block by block.
6. *Reshuffle* before and after attention: with a fixed layout, tokens stay where the rest of the model has them, and
   the rows of a block travel to its rank and back. Keys come directly from the rank that keeps them, without a stop at
   the rank of their block.

FCP does not know about nodes, so nothing is relayed. Masks other than causal are counted with their exact areas, but
zig-zag pairs then do not have equal work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.plan.placement import Placement, Traffic, Wishes
from flexcp.planners.published.ranges import area, best_fit, mean_tokens, placed, refuse_tiny_parts, whole_number
from flexcp.planners.request import Request

Ints = NDArray[np.int64]
BLOCK = 4096
"""The tokens of a block unless given."""
DELTA = 8
"""A rank may keep 1/8 more than the mean of tokens."""
ROUNDS_PER_CALL = 16
"""The rounds per call that FCP coalesces."""
BITS = 31
"""The work of all blocks is scaled to this many bits, so that shares can be compared exactly."""


def fcp(request: Request) -> Placement:
    """Place a batch as FCP does: blocks of long and short documents, bin-packed onto ranks by work and tokens."""
    size = whole_number(request.argument, "fcp", "tokens in a block", BLOCK) or BLOCK
    refuse_tiny_parts(request, "fcp", size)
    block, start, stop = cut_into_blocks(request.batch.lengths, request.batch.starts, size)
    tokens, work = (np.zeros(int(block.max()) + 1, np.int64) for _ in range(2))
    np.add.at(tokens, block, stop - start)
    np.add.at(work, block, area(request.batch, start, stop))
    room = request.token_cap or mean_tokens(request) + mean_tokens(request) // DELTA
    rank = _packed(tokens, work, request.ranks, room)[block]
    wishes = Wishes(rounds_per_call=ROUNDS_PER_CALL)
    note = f"{len(tokens)} blocks of at most {size} tokens"
    return placed(request, "fcp", (rank, start, stop), Traffic(relay=False), note, wishes, any_layout=True)


def cut_into_blocks(lengths: Ints, starts: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Return (block, start, stop) of each stream range of a block; blocks have at most ``size`` tokens.

    A long document is cut into zig-zag pairs of ranges, each pair one block; then come whole short documents, several
    in a block.
    """
    long, short = np.flatnonzero(lengths > size), np.flatnonzero(lengths <= size)
    count = -(-lengths[long] // size)
    which, part = spread(2 * count)
    parts, begin, length = 2 * count[which], starts[long[which]], lengths[long[which]]
    pair = (np.cumsum(count) - count)[which] + np.minimum(part, parts - 1 - part)
    start, stop = (begin + length * at // parts for at in (part, part + 1))
    packs, _ = best_fit(lengths[short], size)
    pack = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
    whole = short[np.array([one for pack in packs for one in pack], np.int64)]
    return (
        np.concatenate([pair, int(count.sum()) + pack]),
        np.concatenate([start, starts[whole]]),
        np.concatenate([stop, starts[whole + 1]]),
    )


def _packed(tokens: Ints, work: Ints, ranks: int, room: int) -> Ints:
    """Return the rank of each block, from its tokens and its work.

    Blocks with the largest share of all tokens or all work go first, each to the rank whose larger share of the two
    stays smallest, among the ranks that then keep at most ``room`` tokens; if there is none, to the rank with the
    fewest tokens.
    """
    work = work >> max(0, int(work.sum()).bit_length() - BITS)
    all_tokens, all_work = int(tokens.sum()), max(1, int(work.sum()))
    kept, busy = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    found = np.zeros(len(tokens), np.int64)
    for block in np.argsort(-np.maximum(tokens * all_work, work * all_tokens), kind="stable").tolist():
        more = kept + tokens[block]
        share = np.maximum(more * all_work, (busy + work[block]) * all_tokens)
        fits = more <= room
        rank = int(np.where(fits, share, np.iinfo(np.int64).max).argmin() if fits.any() else kept.argmin())
        found[block] = rank
        kept[rank] += tokens[block]
        busy[rank] += work[block]
    return found
