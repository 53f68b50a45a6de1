"""Proves the agreement of ranks at bind through their store: either all ranks go on or all raise, with a message that
names the rank to blame, and no key is left in the store.

In most tests the ranks are threads that share one store in memory.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import flexcp
from flexcp.data.planning.plan_sharing import SharedPlans
from flexcp.executor.exchange.plan_agreement import agree, said_by_all
from flexcp.executor.exchange.rank_calls import CallSettings
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan
from flexcp.telemetry.gather_on_rank_0 import gather_on_rank_0

SOON = timedelta(seconds=0.4)


@dataclass(frozen=True)
class Group:
    """The parts of a process group that an agreement uses."""

    rank: int
    size: int
    store: Any

    def get_group_store(self) -> Any:
        return self.store


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)


def on_ranks(size: int, store: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Call ``function`` on every rank; return what each rank gets, or the text of the error it raises."""

    def one(rank: int) -> Any:
        try:
            return function(Group(rank, size, store))
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def left(store: Any) -> int:
    """Count the keys that the first two binds have left in the store."""
    return sum(store.check([key]) for key in (f"flexcp/bind/{n}/{name}" for n in (1, 2) for name in PARTS))


PARTS = ("first", "count", "verdict", "left")


def test_binds_are_numbered_and_leave_no_key() -> None:
    store = dist.HashStore()
    for number in (1, 2):
        assert on_ranks(3, store, lambda group: agree("a" * 40, group, timedelta(seconds=20))) == [number] * 3
        assert left(store) == 0


def test_a_rank_that_knows_of_a_mistake_says_it_and_the_others_hear_of_it() -> None:
    wrong = {1: "the plan is for 4 ranks"}
    found = on_ranks(
        2, dist.HashStore(), lambda group: agree("a" * 40, group, timedelta(seconds=20), wrong.get(group.rank))
    )
    assert found == [
        "RuntimeError: rank 1 cannot bind: the plan is for 4 ranks",
        "ValueError: the plan is for 4 ranks",
    ]


@pytest.mark.parametrize(
    ("digests", "calls", "words"),
    [
        (("a" * 40, "b" * 40), (CallSettings(), CallSettings()), "ranks disagree on the plan of bind number 1"),
        (("a" * 40, "a" * 40), (CallSettings(), CallSettings(2)), "ranks disagree on the calls of bind number 1"),
    ],
)
def test_ranks_that_differ_all_raise_with_both_values(
    digests: tuple[str, str], calls: tuple[CallSettings, CallSettings], words: str
) -> None:
    found = on_ranks(
        2,
        dist.HashStore(),
        lambda group: agree(digests[group.rank], group, timedelta(seconds=20), calls=calls[group.rank]),
    )
    assert found[0] == found[1] and found[0].startswith(f"RuntimeError: {words}")
    assert "rank 0 has" in found[0] and "rank 1 has" in found[0]


def test_who_did_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"only 1 of 3 ranks came to bind number 1 .*, without ranks 1, 2; a rank"):
        agree("a" * 40, Group(0, 3, store), SOON)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"only 2 of 3 ranks came to bind number 1 .*, without rank 2; a rank"):
        agree("a" * 40, Group(1, 3, store), SOON)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Failing:
    """A store in memory of which one method raises an error."""

    method: str
    error: RuntimeError
    store: Any

    def __getattr__(self, name: str) -> Any:
        return self.fail if name == self.method else getattr(self.store, name)

    def fail(self, *arguments: Any) -> Any:
        raise self.error


ERRORS = (RuntimeError("Wait timeout"), dist.DistStoreError("Wait timeout"))
"""What torch's FileStore raises if a key does not come, and what its other stores raise."""


@pytest.mark.parametrize("error", ERRORS, ids=["RuntimeError", "DistStoreError"])
def test_a_wait_in_vain_says_for_whom_whatever_the_store_raises(error: RuntimeError) -> None:
    def group(rank: int = 0, size: int = 2) -> Any:
        return Group(rank, size, Failing("wait", error, dist.HashStore()))

    with pytest.raises(
        RuntimeError, match=r"^only 1 of 2 ranks came to bind number 1 within 0\.4 s, without rank 1; a"
    ):
        agree("a" * 40, group(), SOON)
    with pytest.raises(RuntimeError, match=r"^all 1 ranks came to bind number 1, but .* look for the error of another"):
        agree("a" * 40, group(size=1), SOON)
    with pytest.raises(RuntimeError, match=r"^rank 1 did not say its size within 0\.4 s\. asked 1 for 0\.1$"):
        said_by_all("size", "7", notes_of(group()), SOON)
    with pytest.raises(RuntimeError, match=r"^rank 0 waited for rank 1 for 0\.4 s; every rank of the group must call"):
        gather_on_rank_0({}, group(), SOON)
    shared = SharedPlans(SimpleNamespace(jobs=(), finished=lambda: ()), group(), SOON)  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match=r"^rank 1 did not share the plan of step 1 within 0\.4 s; it died or stalled$"
    ):
        shared.take(1)


@pytest.mark.parametrize("error", ERRORS, ids=["RuntimeError", "DistStoreError"])
def test_a_key_that_cannot_be_read_says_where_to_look(error: RuntimeError) -> None:
    here = flexcp.cluster("cpu", 1, 2)
    for cluster in (None, here):  # the verdict, and the hosts of the ranks
        store = Failing("get", error, dist.HashStore())
        found = on_ranks(2, store, lambda group, c=cluster: agree("a" * 40, group, SOON, cluster=c))
        assert (
            "RuntimeError: the group's store failed: Wait timeout; look after the process or the disk"
            in found[0] + found[1]
        )
        assert not [said for said in found if said.endswith("Error: Wait timeout")]
    found = on_ranks(2, store, lambda group: said_by_all("size", "7", notes_of(group), SOON))
    assert [said.startswith("RuntimeError: the group's store failed: Wait timeout; look") for said in found] == [
        True
    ] * 2


def test_who_did_not_come_is_named_by_a_store_in_a_file(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(
        RuntimeError, match=r"^only 1 of 2 ranks came to bind number 1 within 0\.4 s, without rank 1; a"
    ):
        agree("a" * 40, Group(0, 2, store), SOON)  # type: ignore[arg-type]


def with_a_full_store(group: dist.ProcessGroup, plan: Plan, path: str) -> tuple[str, float]:
    """Bind through a store in a file to which rank 1 cannot write another byte, as on a full disk."""
    store, soft_and_hard = dist.FileStore(path, 2), resource.getrlimit(resource.RLIMIT_FSIZE)
    store.set(f"begun/{dist.get_rank(group)}", "")
    if dist.get_rank(group) == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, soft_and_hard[1]))
    begin = time.monotonic()
    try:
        with patch.object(dist.ProcessGroup, "get_group_store", lambda _: store):
            flexcp.bind(plan, group, timeout=3)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)
    return "bound", 0.0


def test_a_store_that_is_full_ends_in_an_error_on_every_rank(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the ranks of this test are processes, not threads
    plan = flexcp.Planner(4, 4, 8, cluster=flexcp.cluster("cpu", 1, 2), strategy="ring")([64])
    (here, seconds), (full, at_once) = pool.run(with_a_full_store, plan, str(tmp_path / "store"), ranks=2)
    assert "without rank 1" in here or "store does not answer within 3 s" in here, here
    assert full.startswith("the group's store failed: File too large; look after"), full
    assert seconds < 3 + 6 and at_once < 3 + 6


def notes_of(group: Any) -> Any:
    return SimpleNamespace(group=group, rank=group.rank, explain=lambda rank, seconds: f"asked {rank} for {seconds:g}")


def test_all_hear_what_all_say_and_no_key_is_left() -> None:
    store = dist.HashStore()
    for name in ("colour", "size"):
        found = on_ranks(3, store, lambda g, n=name: said_by_all(n, f"{n} {g.rank}", notes_of(g), SOON * 50))
        assert found == [[f"{name} {rank}" for rank in range(3)]] * 3
        assert not any(store.check([f"flexcp/said/{name}/{what}"]) for what in (0, 1, 2, "left"))


def test_of_the_time_limit_some_is_kept_for_asking_who_is_missing() -> None:
    limits: list[timedelta] = []

    class Deaf:
        """A store to which only ranks 0 and 1 have written."""

        def set(self, key: str, said: str) -> None:
            assert (key, said) == ("flexcp/said/size/1", "7")

        def wait(self, keys: list[str], limit: timedelta) -> None:
            limits.append(limit)
            raise dist.DistStoreError("nothing came")

        def check(self, keys: list[str]) -> bool:
            return keys[0][-1] in "01"

    with pytest.raises(RuntimeError, match=r"rank 2 did not say its size within 8 s\. asked 2 for 2"):
        said_by_all("size", "7", notes_of(Group(1, 4, Deaf())), timedelta(seconds=8))
    assert limits == [timedelta(seconds=6)]
