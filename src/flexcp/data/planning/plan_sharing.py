"""Plan sharing: every step is planned by one rank, and the others read its plan from the group's store.

Rank ``step % ranks`` plans a step, so planning spreads over the cores of all nodes, and a planner that would not find
the same answer twice is asked once. The training thread waits for every call to the store, which has a time limit: a
client that blocks would block whoever else uses the store. A rank puts its finished plans there whenever it comes for
its next step, and takes out those of others that are ready by then, so that its own planner processes derive its part
of them ahead; the last reader of a plan deletes it. A plan that fails is shared as its error, so that all ranks stop
with the cause.

Every iteration has its own run number, counted in the store, so what a broken-off one left behind is never mistaken for
a plan.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from flexcp.data.planning.plan_orders import PlannedPart, PlanOrder, from_shared_bytes, shared_bytes
from flexcp.data.planning.planning_pool import PlanningError, Pool
from flexcp.executor.exchange.failure_notes import through_store

READ = "read"
"""Marks a job of the pool whose plans another rank made."""


class SharedPlans:
    """A :class:`~flexcp.data.planning.planning_pool.Pool` of which each rank's works for all."""

    def __init__(self, pool: Pool, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.pool, self.timeout = pool, timeout
        self.store = group.get_group_store()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.run: int | None = None
        self.mine: dict[int, list[PlannedPart] | PlanningError | None] = {}
        """Steps this rank plans: what became of those that are shared already."""
        self.others: list[int] = []
        """Steps that other ranks plan and whose plans are still in the store."""
        self.refused: dict[int, bytes] = {}
        """What was read ahead and is no plan but a reason."""
        self.unread: set[str] = set()

    def ask(self, step: int, order: PlanOrder) -> None:
        """Have a step planned, here or on the rank whose turn it is."""
        if self.run is None:
            self.run = through_store(self.timeout, lambda: self.store.add(f"flexcp/plans/runs/{self.rank}", 1))
        if step % self.size == self.rank:
            self.pool.ask(step, order)
            self.mine[step] = None
        else:
            self.others.append(step)

    def take(self, step: int) -> list[PlannedPart]:
        """The parts of a step, with the same plans on every rank."""
        for key in self.pool.finished():
            if isinstance(key, int):
                self._share(key, counted=False)
        if step % self.size != self.rank:
            found = self._read(step)
            self._read_ahead()
            return found
        self._read_ahead()
        if self.mine[step] is None:
            self._share(step, counted=True)
        else:
            self.pool.stats.waited(0.0)
        parts = self.mine.pop(step)
        self.unread.discard(self._key(step))
        if isinstance(parts, PlanningError):
            raise parts
        assert parts is not None
        return parts

    def _share(self, step: int, counted: bool) -> None:
        """Put a plan, or the reason why there is none, where the others find it."""
        key = self._key(step)
        try:
            parts = self.pool.take(step, counted)
        except PlanningError as error:
            self.mine[step] = error
            data = b"!" + str(error).encode()
        else:
            self.mine[step] = parts
            data = b"=" + shared_bytes(parts)
        begin = time.perf_counter()
        # bytes pass as they are
        through_store(self.timeout, lambda: self.store.set(key, data))  # type: ignore[arg-type]
        self.unread.add(key)
        self.pool.stats.sharing_s += time.perf_counter() - begin

    def _read_ahead(self) -> None:
        """Hand plans of others that are ready to this rank's planner processes,
        in the order in which they will be taken.
        """
        while self.pool.shared is not None and self.others:
            step = self.others[0]
            if not through_store(self.timeout, partial(self.store.check, [self._key(step)])):
                return
            data = through_store(self.timeout, partial(self._fetched, step))
            if data[:1] == b"=":
                self.pool.ask((READ, step), data[1:])
            else:
                self.refused[step] = data

    def _read(self, step: int) -> list[PlannedPart]:
        if (READ, step) in self.pool.jobs:
            return self.pool.take((READ, step))
        data = self.refused.pop(step, None) or through_store(self.timeout, lambda: self._received(step))
        if data[:1] != b"=":
            raise PlanningError(f"rank {step % self.size}: {data[1:].decode()}")
        return from_shared_bytes(data[1:])

    def _received(self, step: int) -> bytes:
        """What the rank whose turn it is puts into the store, waited for."""
        key = self._key(step)
        begin = time.perf_counter()
        ready = self.store.check([key])
        try:
            self.store.wait([key], self.timeout)
        except dist.DistStoreError as error:
            raise PlanningError(
                f"rank {step % self.size} did not share the plan of step {step} within "
                f"{self.timeout.total_seconds():g} s; it died or stalled"
            ) from error
        self.pool.stats.waited(0.0 if ready else time.perf_counter() - begin)
        return self._fetched(step)

    def _fetched(self, step: int) -> bytes:
        """What is in the store for a step; the last to read it takes it out."""
        key = self._key(step)
        begin = time.perf_counter()
        self.others.remove(step)
        data: bytes = self.store.get(key)
        if self.store.add(f"{key}/read", 1) == self.size - 1:
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/read")
        self.pool.stats.sharing_s += time.perf_counter() - begin
        return data

    def _key(self, step: int) -> str:
        return f"flexcp/plans/{self.run}/{step}"

    def forget(self) -> None:
        """Drop what was asked for and not taken; nobody comes for those plans any more."""
        for step in self.mine:
            key = self._key(step)
            if key in self.unread:
                through_store(self.timeout, partial(self.store.delete_key, key))
        self.mine.clear()
        self.others.clear()
        self.refused.clear()
        self.unread.clear()
        self.run = None
        self.pool.forget()

    def close(self) -> None:
        """End the workers."""
        self.pool.close()
