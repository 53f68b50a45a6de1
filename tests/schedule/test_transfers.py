"""Proves in which stage each piece travels, by a table of transfers written by hand for a relay and a moved query."""

from __future__ import annotations

import numpy as np

from flexcp.clusters import cluster
from flexcp.plan.program import Transfers
from flexcp.schedule import transfers
from flexcp.schedule.needs import Pieces
from flexcp.schedule.routes import Needs, Relays, Routes
from flexcp.schedule.stages import Stages, equal_borders
from flexcp.shape import Kind

MACHINE = cluster("h100", nodes=2, ranks_per_node=2)


def travel(backward: bool, kept: bool, stage: int = 1) -> list[tuple[str, int, int, int]]:
    """Return the transfers (kind, stage, source, target) of a small example.

    Rank 1 reads keys of rank 2, on the other node, and passes them on to rank 0, which also computes queries of rank 3.
    """
    keys, queries = (Pieces(*np.array([row], np.int64).T) for row in ((1, 2, 0, 256, 0, 2, 1), (0, 3, 5, 9, 0, 4, 0)))
    relays = Relays(np.array([0]), np.array([0]))
    one = np.ones(4, np.int64)
    chosen = Stages(one, 0 * one, 0 * one, equal_borders(one))
    cut = keys, np.array([stage]), np.array([0])
    found = transfers._staged(Needs(queries, Routes(keys, relays)), chosen, cut, MACHINE, backward, kept)
    table = Transfers.join(found)
    assert {(o, a, b) for o, a, b in zip(table.owner, table.start, table.stop, strict=True)} == {(2, 0, 256), (3, 5, 9)}
    columns = (table.kind, table.stage, table.source, table.target)
    return sorted((Kind(kind).name, *map(int, row)) for kind, *row in zip(*columns, strict=True))


def test_results_leave_two_stages_after_the_last_keys_of_their_rank_relayed_ones_too() -> None:
    assert travel(False, False) == [("KV", 1, 2, 1), ("KV", 2, 1, 0), ("O", 4, 0, 3), ("Q", 1, 3, 0)]
    assert travel(False, False, 3) == [("KV", 3, 2, 1), ("KV", 4, 1, 0), ("O", 6, 0, 3), ("Q", 1, 3, 0)]


def test_gradients_of_relayed_keys_are_added_up_at_the_entry_before_they_go_home() -> None:
    queries = [("DO", 1, 3, 0), ("DQ", 4, 0, 3)]
    keys = [("KV", 1, 2, 1), ("KV", 2, 1, 0)]
    assert travel(True, False) == [("DKV", 4, 0, 1), ("DKV", 5, 1, 2), *queries, *keys, ("Q", 1, 3, 0)]


def test_kept_keys_do_not_travel_again_and_their_gradients_leave_a_stage_earlier() -> None:
    queries = [("DO", 1, 3, 0), ("DQ", 4, 0, 3)]
    assert travel(True, True, 2) == [("DKV", 4, 0, 1), ("DKV", 5, 1, 2), *queries, ("Q", 1, 3, 0)]
