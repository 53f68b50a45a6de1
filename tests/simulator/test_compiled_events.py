"""Proves the order of simulated events when compute ends earlier than was scheduled, and the order of ports' queues:
what waits happens in turn.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexcp.simulator.compiled_events import (
    AFTER,
    BEGIN,
    CHUNK_ROWS,
    END,
    HEAD,
    IN,
    NONE,
    OUT,
    PORT_IN,
    PORT_OUT,
    QUEUE_ROWS,
    queued,
    run_events,
    take_out,
)

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


@given(data=st.data())
def test_a_queue_keeps_its_order_when_chunks_leave_it_anywhere(data: st.DataObject) -> None:
    ends = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
    chunks = np.zeros((len(ends), CHUNK_ROWS), np.int64)
    chunks[:, [PORT_OUT, PORT_IN]] = ends
    queue = np.zeros((2, 4, QUEUE_ROWS), np.int64)
    waits, chunk_at, place = queued(chunks, queue)
    left = list(range(len(ends)))
    for gone in (None, *data.draw(st.permutations(left))):
        if gone is not None:
            left.remove(gone)
        for side, port_of in ((OUT, PORT_OUT), (IN, PORT_IN)):
            if gone is not None:
                take_out(place[side, gone], side, chunks[gone, port_of], queue, waits)
            for port in range(4):
                found, at = [], queue[side, port, HEAD]
                while at != NONE:
                    found.append(int(chunk_at[side, at]))
                    at = waits[side, at, AFTER]
                assert found == [c for c in left if chunks[c, port_of] == port]
