"""Turns: in which order the programs of a launch take their items.

An *item* is a tile with one group of heads: a KV head in the kernel of dk and dv, else the query heads that are packed
into one tile. Items are numbered so that a group takes some tiles before the next group's turn. How many is decided
here; ``whose`` in :mod:`flexcp.executor.kernels.triton.programs` finds the tile and the group of an item.
"""

from __future__ import annotations

from flexcp.executor.kernels.tiles import TileList
from flexcp.executor.kernels.triton.work import Tiles, WorkList

CHUNK, UNEVEN = 32, 0.07
"""How many tiles a group of heads takes per turn, if tiles are uneven; and when they are uneven.

They are if the longest tile is more than the share ``UNEVEN`` of one program's work.
"""


def item_order(tiles: Tiles, groups: int, work: WorkList) -> tuple[int, int, int]:
    """Return the number of tiles, the number of groups of heads, and how many tiles a group takes per turn."""
    return len(tiles), groups, tiles_in_turn(tiles.counts, groups, work.residents)


def tiles_in_turn(made: TileList, groups: int, residents: int) -> int:
    """Return how many tiles a group of heads takes before the next group's turn; ``residents`` programs run at a time.

    Programs that run at the same time should read the same keys. So if tiles are even, a group takes all of them in one
    turn (on an H200 with a full mask and 16,384 tokens the forward ran at 457 TFLOP/s that way, and at 447 in turns of
    32). But then long tiles of the last group start late, and the launch waits for them at its end. So if the longest
    tile is a large share of one program's work, groups take turns of ``CHUNK`` tiles.
    """
    uneven = made.longest > UNEVEN * made.blocks * groups / residents
    return CHUNK if uneven else len(made.tiles)
