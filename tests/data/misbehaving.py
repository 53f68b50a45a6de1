"""Planners for tests of the loader: a plain one, and one that misbehaves on purpose.

This file does not import torch, because planner processes import it.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import flexcp
from flexcp.plan.plan import Plan


def planner(ranks: int, strategy: str = "zigzag", **limits: int) -> flexcp.Planner:
    where = flexcp.cluster("cpu", 1, ranks)
    return flexcp.Planner(4, 2, 32, dtype="float32", cluster=where, strategy=strategy, **limits)


class Misbehaving:
    """A planner that dies, stops, sleeps, exhausts memory or fails before it plans, as files in a folder tell it.

    Only failing also happens in the process that made the planner; the rest happens in planner processes alone.
    """

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        self.folder, self.inner = folder, planner(ranks)
        self.cluster, self.strategy = self.inner.cluster, "misbehaving"
        self.home = os.getpid()

    def __call__(self, lengths: Any, **arguments: Any) -> Plan:
        tokens = int(np.sum(lengths))
        if os.getpid() != self.home:
            self._do_once("die", lambda: os.kill(os.getpid(), signal.SIGKILL))
            self._do_once("stop", lambda: os.kill(os.getpid(), signal.SIGSTOP))
            self._do_once("exhaust", _exhaust)
            self._do_once("slow", lambda: time.sleep(1.5))
            if (self.folder / "always exhaust").exists():
                _exhaust()
            if (self.folder / "always die").exists():
                os.kill(os.getpid(), signal.SIGKILL)
        if (self.folder / f"fail {tokens}").exists():
            raise ValueError(f"no plan for {tokens} tokens")
        return self.inner(lengths, **arguments)

    def _do_once(self, what: str, act: Any) -> None:
        try:
            (self.folder / what).unlink()
        except FileNotFoundError:
            return
        act()


def _exhaust() -> None:
    """Ask for more memory than this process may have, as a planner does where the machine has none left."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    np.ones(1 << 30, np.uint8)


class Unloadable:
    """A planner that can be unpickled only in the process that pickled it."""

    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)

    def __call__(self, lengths: Any) -> Any:
        raise AssertionError("never called")


def _only_in(pid: int) -> Unloadable:
    if os.getpid() != pid:
        raise RuntimeError("only here")
    return Unloadable()
