"""Tests of the pool of ranks: results are in rank order, failures are raised with the rank's traceback, a rank that
dies is noticed soon, and items of progress arrive while a function runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist

from flexcp.measure.ranks import RankError, RankPool


def rank_and_sum(group: dist.ProcessGroup, number: int) -> tuple[int, int, int]:
    """Return (rank, size, sum over ranks of rank + number)."""
    value = torch.tensor(dist.get_rank(group) + number)
    dist.all_reduce(value, group=group)
    return dist.get_rank(group), dist.get_world_size(group), int(value)


def world_rank(group: dist.ProcessGroup) -> tuple[int, int]:
    return dist.get_rank(), torch.get_num_threads()


def stumble(group: dist.ProcessGroup, on: list[int]) -> str:
    rank = dist.get_rank(group)
    if rank in on:
        raise KeyError(f"rank {rank} stumbled over its shoelace")
    return "fine"


def vanish(group: dist.ProcessGroup, rank: int) -> None:
    if dist.get_rank(group) == rank:
        os._exit(3)
    dist.barrier(group)


def count(group: dist.ProcessGroup, to: int) -> Generator[tuple[int, int], None, str]:
    for i in range(to):
        yield dist.get_rank(group), i
    return f"counted by {dist.get_rank(group)}"


def stumble_while_counting(group: dist.ProcessGroup) -> Generator[int, None, None]:
    yield 1
    raise ValueError("lost count")


def nap(group: dist.ProcessGroup, seconds: float) -> str:
    time.sleep(seconds if dist.get_rank(group) else 0.0)
    return "awake"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_function_runs_on_the_first_ranks(pool: RankPool, ranks: int) -> None:
    expected = sum(range(ranks)) + 5 * ranks
    assert pool.run(rank_and_sum, 5, ranks=ranks) == [(r, ranks, expected) for r in range(ranks)]


def test_all_ranks_are_the_default_and_have_one_thread(pool: RankPool) -> None:
    assert pool.run(world_rank) == [(r, 1) for r in range(8)]


@pytest.mark.parametrize("ranks", [0, 9])
def test_more_ranks_than_there_are_are_refused(pool: RankPool, ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"has 8 ranks; {ranks} were asked for"):
        pool.run(world_rank, ranks=ranks)


def test_a_pool_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1 rank and .*; got 0"):
        RankPool(0)


def test_an_exception_is_raised_with_the_ranks_traceback(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(stumble, [1, 3], ranks=4)
    message = str(caught.value)
    assert message.startswith("rank 1 failed (2 in all):\nTraceback")
    assert "in stumble" in message
    assert "rank 1 stumbled over its shoelace" in message
    assert message.splitlines()[-1] == "rank 3: KeyError: 'rank 3 stumbled over its shoelace'"
    assert pool.run(stumble, [], ranks=4) == ["fine"] * 4, "the pool works on after an exception"


def test_items_of_rank_0_arrive_in_order(pool: RankPool) -> None:
    items: list[tuple[int, int]] = []
    results = pool.run(count, 4, ranks=3, on_item=items.append)
    assert items == [(0, i) for i in range(4)]
    assert results == [f"counted by {r}" for r in range(3)]
    assert pool.run(count, 2, ranks=2) == ["counted by 0", "counted by 1"]


def test_an_exception_of_a_generator_is_raised_after_its_items(pool: RankPool) -> None:
    items: list[int] = []
    with pytest.raises(RankError, match="lost count"):
        pool.run(stumble_while_counting, ranks=2, on_item=items.append)
    assert items == [1]


def test_a_rank_that_dies_is_an_error_soon() -> None:
    with RankPool(2) as own:
        begin = time.perf_counter()
        with pytest.raises(RankError, match=r"rank 1 died"):
            own.run(vanish, 1)
        assert time.perf_counter() - begin < 10
        assert not any(process.is_alive() for process in own.processes), "the others were not stopped"


def test_a_rank_that_does_not_answer_is_an_error_within_the_timeout() -> None:
    with RankPool(2) as own:
        assert own.run(nap, 0.0) == ["awake", "awake"]
        own.timeout = 0.7
        begin = time.perf_counter()
        with pytest.raises(RankError, match=r"ranks \[1\] did not answer within 0\.7 s"):
            own.run(nap, 4.0)
        assert time.perf_counter() - begin < 3.5
        # The next run must not mistake the late answer for its own.
        own.timeout = 20.0
        with pytest.raises(RankError):
            own.run(world_rank)


def test_a_stopped_pool_says_so() -> None:
    with RankPool(1) as own:
        pass
    with pytest.raises(RankError):
        own.run(world_rank)


def test_closing_ends_all_processes() -> None:
    with RankPool(2) as own:
        processes = list(own.processes)
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)
