"""Proves the order of simulated events when compute ends earlier than was scheduled: what waits for it
happens in turn.
"""

from __future__ import annotations

import numpy as np

from flexcp.simulator.compiled_events import BEGIN, CHUNK_ROWS, END, run_events

SLOWED = 2000  # per mille: compute takes twice as long beside a transfer


def test_compute_that_is_fast_again_ends_before_what_comes_later() -> None:
    """Rank 0 begins slot 1 beside a transfer that soon ends, so its compute speeds up again.

    It then posts a message to a receiver before rank 2 posts one to the same receiver, so rank 0's message goes first.
    """
    ranks, slots = 3, 4
    work = np.zeros((ranks, slots), np.int64)
    work[0, :2] = 100, 1000
    work[2, 0] = 1500
    # Stage, ports out and in, source, target, nanoseconds. Stages 1 and 2 are posted in slot 0, stage 3 in slot 2.
    moves = [(2, 0, 1, 0, 1, 300), (3, 0, 1, 0, 1, 500), (3, 2, 1, 2, 1, 500)]
    chunks = np.zeros((len(moves), CHUNK_ROWS), np.int64)
    chunks[:, :6] = moves
    opens = np.array([1, 3, 3, 4, 4])
    ports = np.array([[0, 1, 2], [3, 4, 5]])
    pace = np.full((2, ranks, slots), 1000, np.int64)
    pace[0, 0] = SLOWED

    start, copies, rule = np.zeros(ranks, np.int64), np.zeros((2, ranks, slots), np.int64), np.zeros(2, np.int64)
    begin, end = run_events(start, work, copies, chunks, ports, rule, pace, opens)

    # Slot 0 is slowed throughout; slot 1 for its first 100 ns, in which only half as much work is done.
    assert end[0, :2].tolist() == [200, 300 + 1000 - 50]
    assert begin[0, 2] == 1250
    assert chunks[:, BEGIN].tolist() == [0, 1250, 1750]
    assert chunks[:, END].tolist() == [300, 1750, 2250]
