"""Loops of copies: bytes that ranks pack and take in, transfer by transfer; compiled.

``kinds[kind]`` has what a token and head of a kind weigh: WIRE as it travels whole and as it travels in part, SHELF in
the accumulator's dtype, whether it is a RESULT.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.jit import compiled

Ints = NDArray[np.int64]
WIRE, WIRE_IN_PART, SHELF, RESULT, KIND_COLUMNS = range(5)


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
) -> tuple[Ints, Ints, Ints]:
    """``[rank, stage]``: bytes read and written to pack and to take in, launches that take in.

    The columns are those of transfers, sorted by stage, then source; ``sizes`` are ranks and stages. Inputs of a stage
    are laid in one launch, the results of each message in one of their own.
    """
    shape = (sizes[0], sizes[1])
    pack, take_in, launches = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    laid, merged = np.zeros(shape, np.uint8), np.full(shape, -1, np.int64)  # whether inputs came; who sent results last
    for i in range(len(stage)):
        s, a, b, k = stage[i], source[i], target[i], kind[i]
        tokens = (stop[i] - start[i]) * (h1[i] - h0[i])
        wire, result = tokens * kinds[k, WIRE + partial[i]], kinds[k, RESULT]
        shelf = tokens * kinds[k, SHELF] if result else wire
        take_in[b, s] += shelf * (1 + result)
        if a == b:
            take_in[b, s] += shelf
            continue
        take_in[b, s] += wire
        pack[a, s] += shelf + wire
        if result == 0 and laid[b, s] == 0:
            laid[b, s] = 1
            launches[b, s] += 1
        if result == 1 and merged[b, s] != a:
            merged[b, s] = a
            launches[b, s] += 1
    return pack, take_in, launches
