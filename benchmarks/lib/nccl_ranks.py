"""NCCL ranks: real ranks that share one GPU, to test correctness, not speed.

Each rank gets its own NCCL host id, because NCCL refuses two ranks of a host on one GPU; messages then go through
sockets. A function runs on all ranks: :func:`on_nccl_ranks` returns its results, :func:`ends_of_nccl_ranks` how the
processes ended when they are meant to fail.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch._C._distributed_c10d import TCPStore

from flexcp.executor.exchange.start_group import start_group
from flexcp.measure.local_store import joined_store, kept_store
from flexcp.measure.shared_gpu import share_gpu

NCCL_LIMIT = 120.0
"""Seconds that NCCL waits for a rank in checks that should pass."""
DUMP_WAIT_MS = 500
"""PyTorch's watchdog ends a process four times this long after the limit (15 s by default, so a minute),
to leave time for writing its records.
"""


def on_nccl_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, patience: float = 300.0) -> list[Any]:
    """Run ``function(groups, *arguments)`` on NCCL ranks that share GPU 0 and return the results by rank.
    ``groups[n]`` is the group of the first n ranks, for the ranks in it.
    """
    processes, answers, _store = _started(ranks, function, arguments, NCCL_LIMIT)
    results: dict[int, Any] = {}
    deadline = time.monotonic() + patience
    try:
        while len(results) < ranks:
            try:
                rank, error, value = answers.get(timeout=1)
            except queue.Empty:
                codes = [p.exitcode for i, p in enumerate(processes) if i not in results]
                if any(codes):
                    raise RuntimeError(f"ranks without an answer ended with exit codes {codes}") from None
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{ranks - len(results)} of {ranks} ranks have no answer after {patience:g} s"
                    ) from None
                continue
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
            results[rank] = value
    finally:
        for process in processes:
            process.join(10) if len(results) == ranks else process.kill()
    return [results[rank] for rank in range(ranks)]


def ends_of_nccl_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, limit: float, patience: float, staying: int = 0
) -> list[dict[str, Any]]:
    """Return how each rank ended if NCCL waits at most ``limit`` seconds: exit code, time, and the error it raised, if
    any.

    This is for functions that are meant to fail, which on NCCL may end a process. A rank that still runs after
    ``patience`` seconds, or when at most ``staying`` ranks are left, is killed (code None).
    """
    processes, answers, _store = _started(ranks, function, arguments, limit)
    begin = time.monotonic()
    ends: list[dict[str, Any]] = [{"code": None, "seconds": None, "error": None} for _ in processes]
    while time.monotonic() < begin + patience and sum(end["code"] is None for end in ends) > staying:
        for process, end in zip(processes, ends, strict=True):
            if end["code"] is None and process.exitcode is not None:
                end.update(code=process.exitcode, seconds=round(time.monotonic() - begin, 1))
        time.sleep(0.1)
    for process in processes:
        process.kill()
    while not answers.empty():
        rank, error, _ = answers.get()
        ends[rank]["error"] = error
    return ends


def _started(ranks: int, function: Callable[..., Any], arguments: Any, limit: float) -> tuple[list[Any], Any, TCPStore]:
    context = multiprocessing.get_context("spawn")
    store = kept_store()
    answers = context.Queue()
    work = (ranks, store.port, function, arguments, answers, limit)
    processes = [context.Process(target=_rank, args=(rank, *work), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes, answers, store


def _rank(
    rank: int, ranks: int, port: int, function: Callable[..., Any], arguments: Any, answers: Any, limit: float
) -> None:
    share_gpu(rank)
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = str(DUMP_WAIT_MS)
    try:
        torch.cuda.set_device(0)
        store = joined_store(port)
        start_group(True, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit))
        groups = {n: dist.new_group(list(range(n))) for n in range(2, ranks)} | {ranks: dist.group.WORLD}
        value = function({n: g for n, g in groups.items() if rank < n}, *arguments)
        torch.cuda.synchronize()
        answers.put((rank, None, value))
        dist.destroy_process_group()
    except Exception as error:  # the parent raises it
        answers.put((rank, repr(error), None))
        raise
