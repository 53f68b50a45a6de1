"""dcp's divisions: when the keys of each token block travel to each rank, by DCP's greedy rule (arXiv 2510.10620).

DCP divides a rank's work into four divisions, and the keys for a division arrive while the one before is computed. The
first division is local work. After that, division by division, the rank with the least ready work takes the key block
that makes most of its work ready. What a rank sends to other nodes in a division is limited to an even part of all that
it sends there; the last division takes what is left. Inside a node nothing is limited, so on one node a single division
has everything. DCP's rule takes computation blocks with all their inputs. Here moved queries arrive before the first
division, so a key block stands for all computation blocks of a rank that wait for it.
"""

from __future__ import annotations

import heapq

import numpy as np

from flexcp.arrays.totals import sums
from flexcp.plan.placement import Divisions
from flexcp.planners.hypergraph.partition import Partition

DIVISIONS = 4
"""The number of divisions, local work included."""


def divisions_of(partition: Partition, ranks_per_node: int) -> Divisions:
    """Return in which division, from 1 on, each rank receives each key block; 1 for blocks that it does not receive.

    In each division, the rank with the least ready work takes next. It takes the block that makes most of its work
    ready, among the blocks that it lacks and whose owner may still send that many tokens in this division. (Only what
    goes to other nodes is limited, and nothing in the last division.)
    """
    tiling, ranks, count = partition.tiling, partition.tiling.ranks, len(partition.owner)
    owner, tokens = partition.owner.tolist(), (tiling.blocks.stop - tiling.blocks.start).tolist()
    ready_by = sums(partition.worker * count + tiling.tiles.keys, tiling.tiles.load, ranks * count).reshape(
        ranks, count
    )
    waiting = [
        [b for b in np.argsort(-ready_by[r], kind="stable").tolist() if ready_by[r, b] and owner[b] != r]
        for r in range(ranks)
    ]
    sent = [0] * ranks
    for rank, blocks in enumerate(waiting):
        for block in blocks:
            sent[owner[block]] += tokens[block] * (owner[block] // ranks_per_node != rank // ranks_per_node)
    stage = np.ones((ranks, count), np.int64)
    for division in range(1, DIVISIONS):
        last = division == DIVISIONS - 1
        room = [-(-total // (DIVISIONS - 1)) for total in sent]
        heap = [(0, rank) for rank in range(ranks)]
        while heap:
            ready, rank = heapq.heappop(heap)
            for block in waiting[rank]:
                near = owner[block] // ranks_per_node == rank // ranks_per_node
                if near or last or tokens[block] <= room[owner[block]]:
                    room[owner[block]] -= 0 if near else tokens[block]
                    stage[rank, block] = division
                    waiting[rank].remove(block)
                    heapq.heappush(heap, (ready + int(ready_by[rank, block]), rank))
                    break
    borders = np.append(tiling.blocks.start, tiling.blocks.stop[-1])
    return Divisions(borders, stage)
