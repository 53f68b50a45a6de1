"""Plan sharing: each step is planned by one rank, and the others read its plan from the group's store.

Rank ``step % ranks`` plans a step. So planning is spread over the cores of all nodes, and a planner that may find
different plans on different ranks plans a step only once. The training thread waits for every call to the store, and
every call has a time limit (:func:`through_store`), because a client that blocks would block all other users of the
store. Whenever a rank begins a step, it puts its own finished plans into the store, and reads the plans of other ranks
that are ready, so that its planner processes can derive its recipes (what it executes of a plan) ahead of time. The
last reader of a plan deletes it. If planning fails, the error is shared instead, so that all ranks raise it.

Every iteration over the loader has a run number of its own, counted in the store, so that plans left behind by an
iteration that was broken off are never used.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from flexcp.data.planning.plan_orders import PlannedPart, PlanOrder, from_shared_bytes, shared_bytes
from flexcp.data.planning.planning_pool import PlanningError, Pool
from flexcp.executor.exchange.failure_notes import read_key, through_store, wait_for

READ = "read"
"""Marks the key of a job of the pool that derives recipes from another rank's plans."""


class SharedPlans:
    """Plans for all ranks of a group, made by a :class:`~flexcp.data.planning.planning_pool.Pool` on each rank."""

    def __init__(self, pool: Pool, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.pool, self.timeout = pool, timeout
        self.store = group.get_group_store()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.run: int | None = None
        self.mine: dict[int, list[PlannedPart] | PlanningError | None] = {}
        """The steps that this rank plans: plans or error if they are in the store already, else None."""
        self.others: list[int] = []
        """The steps that other ranks plan and that this rank has not read from the store yet."""
        self.refused: dict[int, bytes] = {}
        """The errors of other ranks that were read ahead, by step."""
        self.unread: set[str] = set()

    def ask(self, step: int, order: PlanOrder) -> None:
        """Order the plan of a step: start it if it is this rank's turn, else note that another rank plans it."""
        if self.run is None:
            self.run = through_store(self.timeout, lambda: self.store.add(f"flexcp/plans/runs/{self.rank}", 1))
        if step % self.size == self.rank:
            self.pool.ask(step, order)
            self.mine[step] = None
        else:
            self.others.append(step)

    def take(self, step: int) -> list[PlannedPart]:
        """Return the parts of a step, the same plans on every rank; wait for them if necessary.

        Raise PlanningError if the step could not be planned, or if the rank that plans it does not share it in time.
        """
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
        """Put the plans of a step, or the error of planning it, into the store; wait for them if necessary.

        ``counted`` says whether the wait enters the statistics.
        """
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
        # The type hints of torch ask for a string, but bytes work.
        through_store(self.timeout, lambda: self.store.set(key, data))  # type: ignore[arg-type]
        self.unread.add(key)
        self.pool.stats.sharing_s += time.perf_counter() - begin

    def _read_ahead(self) -> None:
        """Give plans of other ranks that are in the store to this rank's planner processes, in the order of steps.

        It stops at the first step that is not in the store. Without planner processes nothing is read ahead.
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
        """Return the parts of a step that another rank plans; raise PlanningError if planning failed there."""
        if (READ, step) in self.pool.jobs:
            return self.pool.take((READ, step))
        data = self.refused.pop(step, None) or through_store(self.timeout, lambda: self._received(step))
        if data[:1] != b"=":
            raise PlanningError(f"rank {step % self.size}: {data[1:].decode()}")
        return from_shared_bytes(data[1:])

    def _received(self, step: int) -> bytes:
        """Wait until another rank has put the plans of a step, or an error, into the store, and return the bytes.

        Raise PlanningError if that takes longer than ``timeout``.
        """
        key = self._key(step)
        begin = time.perf_counter()
        ready = self.store.check([key])
        try:
            wait_for(self.store, [key], self.timeout)
        except dist.DistStoreError as error:
            raise PlanningError(
                f"rank {step % self.size} did not share the plan of step {step} within "
                f"{self.timeout.total_seconds():g} s; it died or stalled"
            ) from error
        self.pool.stats.waited(0.0 if ready else time.perf_counter() - begin)
        return self._fetched(step)

    def _fetched(self, step: int) -> bytes:
        """Read the bytes of a step from the store; the last rank that reads them deletes them."""
        key = self._key(step)
        begin = time.perf_counter()
        self.others.remove(step)
        data = read_key(self.store, key)
        if self.store.add(f"{key}/read", 1) == self.size - 1:
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/read")
        self.pool.stats.sharing_s += time.perf_counter() - begin
        return data

    def _key(self, step: int) -> str:
        """Return the key of a step in the store."""
        return f"flexcp/plans/{self.run}/{step}"

    def forget(self) -> None:
        """Drop all steps that were ordered and not taken, and delete those that this rank planned from the store."""
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
        """End this rank's planner processes."""
        self.pool.close()
