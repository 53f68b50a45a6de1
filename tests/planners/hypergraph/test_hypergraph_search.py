"""Proves the search over partitions: the change in bytes of a move is computed exactly, repair brings ranks back within
their limits, and climbing (moves that save bytes) never moves more bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypergraphs import CASES, shuffled

from flexcp.planners.request import Request


@pytest.mark.parametrize(("request_", "seed"), CASES)
def test_moves_are_judged_exactly(request_: Request, seed: int) -> None:
    search, random = shuffled(request_, seed), np.random.default_rng(seed)
    partition = search.partition
    for bundles in list(search._kinds(None)):
        changes, before = search._changes(bundles), partition.bytes()
        for i in random.integers(0, len(bundles.name), 6):
            one, target = bundles.take(np.array([i])), int(random.integers(request_.ranks))
            trial = partition.copy()
            trial.owner[bundles.block_label == one.name] = target
            trial.worker[bundles.tile_label == one.name] = target
            trial.count()
            assert trial.bytes() - before == changes[i, target]
            search._move(one, target)
            for name in ("counts", "reads", "readers", "loads", "tokens", "owner", "worker"):
                assert np.array_equal(getattr(partition, name), getattr(trial, name)), name
            search._move(replace(one, source=np.array([target])), int(one.source[0]))


def test_repair_brings_ranks_back_within_limits() -> None:
    search = shuffled(CASES[0][0], 5)
    most_load, most_tokens = int(search.mean_load * 1.12), int(search.mean_tokens * 1.12)  # reachable by moves
    ranks = search.partition.tiling.ranks
    search.limits = replace(search.limits, loads=np.full(ranks, most_load), tokens=np.full(ranks, most_tokens))
    assert search.partition.loads.max() > most_load
    assert search.repair(search.partition.bytes())
    assert search.partition.loads.max() <= most_load
    assert search.partition.tokens.max() <= most_tokens


def test_climbing_only_saves_and_keeps_limits() -> None:
    search = shuffled(CASES[1][0], 6)
    partition = search.partition
    limits = search.limits = replace(
        search.limits,
        loads=np.maximum(search.limits.loads, partition.loads),
        tokens=np.maximum(search.limits.tokens, partition.tokens),
    )
    before = partition.bytes()
    search.climb()
    assert partition.bytes() < before
    assert (partition.loads <= limits.loads).all()
    assert (partition.tokens <= limits.tokens).all()
