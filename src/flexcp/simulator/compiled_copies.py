"""Loops of copies: the bytes that ranks read and write to pack and unpack messages, transfer by transfer (compiled).

A result that arrives complete at the owner of its tokens is *laid*: copied as it came, with the inputs of the stage.
Row k of the table ``kinds`` describes kind k: the bytes of one token and head when it travels whole (WIRE), when it
travels as a partial result (WIRE_IN_PART) and in the accumulator's dtype (SHELF), and whether it is a RESULT.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.jit import compiled

Ints = NDArray[np.int64]
WIRE, WIRE_IN_PART, SHELF, RESULT = range(4)


@compiled
def sum_copies(
    stage: Ints,
    source: Ints,
    target: Ints,
    kind: Ints,
    owner: Ints,
    start: Ints,
    stop: Ints,
    h0: Ints,
    h1: Ints,
    partial: Ints,
    kinds: Ints,
    sizes: Ints,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return three tables ``[rank, stage]``: bytes copied to pack, bytes copied to unpack, launches to unpack.

    The fourth result is, for each rank, the bytes of the results that it lays, as they came and as they would be in the
    accumulator's dtype together: what it need not read and write when it rounds its results. The fifth is 1 for ranks
    that add results from others to their own.

    The columns ``stage`` to ``partial`` are those of the transfers, sorted by stage, then source. Row k of ``kinds``
    describes kind k of piece (see the module's docstring); ``sizes`` holds the numbers of ranks and stages. One launch
    of a kernel unpacks all inputs and laid results of a stage, and one reduces its other results. That one reads and
    writes what they are reduced into once, but it is counted for each of them here: see :func:`read_again`.
    """
    shape = (sizes[0], sizes[1])
    pack, take_in, launches = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    copies, reduces = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)  # any copied yet; any reduced yet
    complete, adds = np.zeros(sizes[0], np.int64), np.zeros(sizes[0], np.int64)
    for i in range(len(stage)):
        s, a, b, k = stage[i], source[i], target[i], kind[i]
        tokens = (stop[i] - start[i]) * (h1[i] - h0[i])
        wire, result = tokens * kinds[k, WIRE + partial[i]], kinds[k, RESULT]
        shelf = tokens * kinds[k, SHELF] if result else wire
        copied = result == 0 or (partial[i] == 0 and owner[i] == b)
        if result == 1 and copied:
            complete[b] += shelf + wire
        if result == 1 and not copied and owner[i] == b:
            adds[b] = 1
        take_in[b, s] += wire if copied else 2 * shelf
        if a == b:
            take_in[b, s] += shelf
            continue
        take_in[b, s] += wire
        pack[a, s] += shelf + wire
        if copied and copies[b, s] == 0:
            copies[b, s] = 1
            launches[b, s] += 1
        if not copied and reduces[b, s] == 0:
            reduces[b, s] = 1
            launches[b, s] += 1
    return pack, take_in, launches, complete, adds


@compiled
def read_again(place: Ints, target: Ints, start: Ints, stop: Ints, size: Ints, places: int) -> Ints:
    """Return, for each place, the bytes of targets into which more than one result is reduced, once for each but one.

    A result has tokens ``start`` to ``stop`` of a ``target``, whose results all arrive at one ``place``; ``places`` is
    their number, and ``size`` the bytes of a token. Results are sorted by target, then start.
    """
    again, end = np.zeros(places, np.int64), np.int64(0)
    for i in range(len(place)):
        if i == 0 or target[i] != target[i - 1]:
            end = start[i]
        again[place[i]] += max(0, min(end, stop[i]) - start[i]) * size[i]
        end = max(end, stop[i])
    return again
