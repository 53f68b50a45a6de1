"""A pool of local processes that stand for GPUs, connected by gloo.

Starting torch takes seconds, so processes are forked from a server that has imported it once, and live as long as the
pool. A pool of 8 serves any smaller number: ``pool.run(function, ranks=3)`` runs on the first three, in a process group
of only these.

A function is called as ``function(group, *arguments)``; it must be importable by name, and its arguments and result
picklable. An exception on any rank is raised here, with the rank and its traceback. A rank that dies is an error, never
a hang.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import GeneratorType, TracebackType
from typing import Any, Self

from flexcp.measure.fork_server import server, without_interrupt
from flexcp.measure.local_store import joined_store, kept_store, stay_local

# The first call of a registered operator imports torch._dynamo.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "flexcp.executor.attention", "flexcp.planner"]


MOST_RANKS = 256
"""The most ranks of a pool; more take the memory of a machine, and the files that a process may have open."""


class RankError(RuntimeError):
    """A function failed on a rank, or a rank died or did not answer; the message holds a failed rank's traceback."""


class RankPool:
    """A pool of ``size`` local processes, each a rank with one thread; use it as a context manager.

    The ranks are connected by gloo. ``timeout`` is how many seconds to wait for an answer before RankError is raised.
    """

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        check_size(size)
        self.size, self.timeout = size, timeout
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        context = server(PRELOAD)
        try:
            with without_interrupt():
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_serve, args=(rank, size, theirs), daemon=True)
                    process.start()
                    theirs.close()
                    self.pipes.append(ours)
                    self.processes.append(process)
            port = self._collect([0])[0]
            for pipe in self.pipes:
                pipe.send(port)
            self._collect(list(range(size)))
        except BaseException:  # the caller has no pool yet that it could close
            self.close()
            raise

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        on_item: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Call ``function(group, *arguments)`` on the first ``ranks`` ranks and return their results in rank order.

        A generator function reports progress: ``on_item`` is called with each item that rank 0 yields, and the
        generator's return value is its result. Raise :class:`RankError` if the function fails on a rank, or a rank dies
        or does not answer.
        """
        count = self.size if ranks is None else ranks
        if not 1 <= count <= self.size:
            raise ValueError(f"this pool has {self.size} ranks; {count} were asked for")
        if not all(process.is_alive() for process in self.processes):
            self.close()
            raise RankError("the ranks of this pool have stopped; make a new pool")
        for pipe in self.pipes:
            pipe.send((function, arguments, count))
        return self._collect(list(range(self.size)), on_item)[:count]

    def _collect(self, ranks: list[int], on_item: Callable[[Any], None] | None = None) -> list[Any]:
        """Return the next result of each of these ranks.

        ``on_item`` is called with the items that rank 0 yields before its result.
        """
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = set(ranks)
        while waiting:
            ready = wait([self.pipes[r] for r in waiting], self.timeout)
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(waiting)} did not answer within {self.timeout:g} s")
            for rank in [r for r in waiting if self.pipes[r] in ready]:
                try:
                    what, value = self.pipes[rank].recv()
                except EOFError:
                    self.close()
                    raise RankError(f"rank {rank} died; the others were stopped") from None
                if what == "item":
                    if rank == 0 and on_item is not None:
                        on_item(value)
                    continue
                waiting.discard(rank)
                (failures if what == "failed" else results)[rank] = value
        if failures:
            rank = min(failures)
            others = [f"rank {r}: {failures[r].strip().splitlines()[-1]}" for r in sorted(failures) if r != rank]
            raise RankError("\n".join([f"rank {rank} failed ({len(failures)} in all):\n{failures[rank]}", *others]))
        return [results[r] for r in ranks]

    def close(self) -> None:
        """Stop all ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_size(ranks: int, what: str = "a pool") -> None:
    """Raise ValueError unless a pool can have so many ranks; ``what`` names their number."""
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"{what} is at least 1 rank and at most {MOST_RANKS} on one machine; got {ranks:,}")


def _serve(rank: int, size: int, pipe: Connection) -> None:
    """Run one rank: join the others, then run the functions that come through the pipe until it closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stay_local()
    limit = timedelta(seconds=120)
    if rank == 0:
        store = kept_store(limit)
        pipe.send(("done", store.port))
        pipe.recv()
    else:
        store = joined_store(pipe.recv(), limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    pipe.send(("done", None))
    answer_calls(rank, size, pipe)


def answer_calls(rank: int, size: int, pipe: Connection) -> None:
    """Run each (function, arguments, number of ranks) from the pipe and send the result back, until the pipe closes."""
    import torch.distributed as dist

    groups = {size: dist.group.WORLD}
    while True:
        try:
            function, arguments, count = pipe.recv()
        except EOFError:
            return
        if count not in groups:
            groups[count] = dist.new_group(list(range(count)))
        try:
            value = function(groups[count], *arguments) if rank < count else None
            if isinstance(value, GeneratorType):
                value = _drained(value, pipe)
            answer = ("done", value)
        except Exception:  # the parent raises any exception, with this traceback
            answer = ("failed", traceback.format_exc())
        pipe.send(answer)


def _drained(items: Generator[Any, None, Any], pipe: Connection) -> Any:
    """Send each item of a generator through the pipe, and return the generator's return value."""
    while True:
        try:
            pipe.send(("item", next(items)))
        except StopIteration as end:
            return end.value
