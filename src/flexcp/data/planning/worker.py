"""Worker: a process that plans what comes through its pipe, and ends with the process that started it.

It is a fresh interpreter (never a fork: no threads, locks, store clients or CUDA contexts come along) and imports
neither torch nor the user's script. Plans go back as wire bytes, with what a rank derives of them. A second pipe, of
which only the parent holds the writing end, is its lifeline: when that closes, however the parent ended, the worker
leaves at once, in the middle of a plan too.
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
"""What the interpreter of a worker runs: the parent's import path first, so that both find the same flexcp."""


def main(pipe_fd: int, lifeline_fd: int) -> None:
    """Say ready or broken, then answer every order, or shared plans,
    with ("parts", seconds, parts) or ("failed", seconds, text).
    """
    threading.Thread(target=_follow, args=(lifeline_fd,), daemon=True).start()
    pipe = Connection(pipe_fd)
    try:
        planner, wish = pickle.loads(pipe.recv_bytes())
        from flexcp.data.planning.plan_orders import from_shared_bytes, fulfil, packed, with_recipes
    except Exception:  # unpickling runs a user's code; whatever it is, the training process raises it with this text
        pipe.send(("broken", traceback.format_exc()))
        return
    pipe.send(("ready", ""))
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
        except (ValueError, NotImplementedError) as error:  # a user's mistake, which says itself what to do
            answer = ("failed", f"{type(error).__name__}: {error}")
        except Exception:  # whatever it is, the training process raises it with this text
            answer = ("failed", traceback.format_exc())
        pipe.send((answer[0], time.perf_counter() - begin, answer[1]))


def _follow(lifeline_fd: int) -> None:
    """Wait for the parent's end."""
    while os.read(lifeline_fd, 1):
        pass
    os._exit(0)
