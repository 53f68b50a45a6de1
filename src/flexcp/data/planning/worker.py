"""Worker: a planner process, which receives plan orders through a pipe and ends with the process that started it.

A worker is a fresh interpreter and not a fork, so it inherits no threads, locks, store clients or CUDA contexts. It
imports neither torch nor the user's script. It sends plans back as bytes, with the recipes derived from them. A second
pipe, whose writing end only the parent holds, is the *lifeline*: it closes when the parent ends, in whatever way, and
the worker then exits at once, even while it plans.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from flexcp.data.planning.worker import main; "
    "main(*map(int, sys.argv[2:]))"
)
"""The program of a worker's interpreter; the parent's import path comes first, so that both import the same flexcp."""

OUT_OF_MEMORY = 71
"""The exit code of a worker that ran out of memory."""


def main(pipe_fd: int, lifeline_fd: int) -> None:
    """Run a worker: receive the pickled planner, send "ready" or "broken", then answer orders until the pipe closes.

    The arguments are file descriptors: of the pipe for orders and answers, and of the pipe that closes when the parent
    ends. An order is a :class:`PlanOrder` or the bytes of plans from another rank. An answer is ("parts", seconds,
    parts) or ("failed", seconds, message). A worker that runs out of memory exits with :data:`OUT_OF_MEMORY`.
    """
    threading.Thread(target=_follow, args=(lifeline_fd,), daemon=True).start()
    pipe = Connection(pipe_fd)
    try:
        planner, wish = pickle.loads(pipe.recv_bytes())
        from flexcp.data.planning.plan_orders import from_shared_bytes, fulfil, packed, with_recipes
    except Exception:  # unpickling runs the user's code; the training process raises any error of it with this text
        _tell(pipe, ("broken", traceback.format_exc()))
        return
    _tell(pipe, ("ready", ""))
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        answer: tuple[str, Any]
        try:
            shared = isinstance(order, bytes)
            parts = with_recipes(from_shared_bytes(order), wish) if shared else fulfil(planner, order, wish)
            answer = ("parts", packed(parts))
        except MemoryError:  # the process gives back all it holds, and another one repeats the order
            os._exit(OUT_OF_MEMORY)
        except (ValueError, NotImplementedError) as error:  # a mistake of the user; the message says what to do
            answer = ("failed", f"{type(error).__name__}: {error}")
        except Exception:  # the training process raises any other error with its traceback
            answer = ("failed", traceback.format_exc())
        _tell(pipe, (answer[0], time.perf_counter() - begin, answer[1]))


def _tell(pipe: Connection, answer: tuple[Any, ...]) -> None:
    """Send the answer, or exit without a traceback if the parent ended before it could be sent."""
    try:
        pipe.send(answer)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _follow(lifeline_fd: int) -> None:
    """Wait until the parent has ended and its end of the lifeline pipe is closed, then exit."""
    while os.read(lifeline_fd, 1):
        pass
    os._exit(0)
