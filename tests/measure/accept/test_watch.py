"""Tests of the watch of ``flexcp accept``: if a rank dies, hangs or fails, all ranks exit and one names that rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from flexcp.measure.accept import watch as watching
from flexcp.measure.accept.watch import Watch, Word, blame
from flexcp.measure.local_store import joined_store, kept_store

NAMES = {rank: f"rank {rank} on host {'ab'[rank // 2]}" for rank in range(4)}
PLACES = dict.fromkeys(range(4), (3, "links inside nodes"))


def made_words(*ranks: int, **fields: Any) -> dict[int, Word]:
    usual = {"number": 3, "step": "links inside nodes", "what": "ran out of time", "own": False}
    return {rank: Word(**(usual | fields)) for rank in ranks}


def test_who_says_nothing_is_blamed_before_who_complains() -> None:
    words = made_words(0, 1, 3, what="RuntimeError: connection closed", own=True)
    line = blame(words, PLACES, 4, 0, NAMES, 60)
    assert line.startswith("rank 2 on host b died or stands still in step 'links inside nodes';")
    assert blame(made_words(0), PLACES, 4, 0, NAMES, 60).startswith("ranks 1, 2, 3 died or stand still")
    assert blame(made_words(0), {0: (1, "roll call")}, 2, 0, NAMES, 60).startswith(
        "rank 1 on host a of 2 did not come; see that torchrun"
    )


def test_else_it_is_the_rank_whose_trouble_came_first() -> None:
    words = made_words(0, 1, 3) | made_words(2, what="ValueError: no kernel", own=True)
    assert (
        blame(words, PLACES, 4, 2, NAMES, 60)
        == "rank 2 on host b failed in step 'links inside nodes': ValueError: no kernel"
    )


def test_a_rank_that_is_behind_is_named_and_time_that_is_too_short() -> None:
    words = made_words(0, 1, 2) | made_words(3, number=2, step="exactness of ring")
    assert blame(words, PLACES, 4, 0, NAMES, 60).startswith(
        "rank 3 on host b did not get beyond step 'exactness of ring' in 60 s;"
    )
    assert "--timeout" in blame(made_words(0, 1, 2, 3), PLACES, 4, 0, NAMES, 60)


def watched(
    works: list[Callable[[Watch], None] | None], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[int]]:
    """Run ranks as threads, each with its work (None: a rank that never starts); return messages and who exited."""
    monkeypatch.setattr(watching, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(watching, "LOOK_EVERY_SECONDS", 0.05)
    store = kept_store()
    told: list[str] = []
    left: list[int] = []

    def rank(number: int, work: Callable[[Watch], None]) -> None:
        gone = threading.Event()

        def leave(_: int) -> None:
            left.append(number)
            gone.set()

        with Watch(joined_store(store.port), number, len(works), 2.0, 60.0, told.append, leave) as watch:
            work(watch)
            gone.wait(20)

    threads = [threading.Thread(target=rank, args=(n, work)) for n, work in enumerate(works) if work is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return told, sorted(left)


def test_a_dead_rank_ends_all_others_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told, left = watched([lambda w: w.begin("links"), lambda w: w.begin("links"), None], monkeypatch)
    assert left == [0, 1]
    (line,) = told
    assert line.startswith("rank 2 of 3 did not come; see that torchrun runs on every host")


def test_an_error_of_one_rank_ends_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(watch: Watch) -> None:
        watch.begin("links")
        watch.failed("ValueError: no such link")

    told, left = watched([lambda w: w.begin("links"), fail, lambda w: w.begin("links")], monkeypatch)
    assert left == [0, 1, 2]
    assert told == ["rank 1 failed in step 'links': ValueError: no such link"]


def test_a_rank_leaves_even_if_nobody_reads_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "GRACE_SECONDS", 0.2)
    left: list[int] = []

    def unread(line: str) -> None:
        raise BrokenPipeError(line)

    store = kept_store()
    watch = Watch(joined_store(store.port), 0, 1, 2.0, 60.0, unread, left.append)
    with pytest.raises(BrokenPipeError, match="no kernel"):
        watch.failed("no kernel")
    assert left == [1]
