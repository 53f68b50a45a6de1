"""Dump: write the last steps of a rank to a JSON file after an error, and read such files. Reading runs no code.

    flexcp-dump-<UTC time>-rank<global rank>.json
    {format, version, reason, message, time, host, pid, global_rank, flexcp, torch, threads (of a stall),
     steps: [{number, hash, strategy, ranks, rank, tokens, lengths, planning_wait_ms, error, plan: wire bytes in base64,
              passes: [{pass, number, reached, error, wait_ms, pack_ms, compute_ms}, ...]}, ...]}

A pass is one direction of one attention layer. ``flexcp verify @file`` (or ``@folder``, for the dumps of all ranks)
replays the plans.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flexcp.io.atomic_files import write_whole
from flexcp.io.json_files import read_json
from flexcp.io.plain_values import shown
from flexcp.plan.file import load_plan, save_plan, version_1_hash
from flexcp.plan.plan import Plan
from flexcp.telemetry.records import PassRecord, StepRecord

FORMAT, VERSION = "flexcp dump", 1
LAST_PASSES = 32
"""How many of the last passes (one direction of one layer each) of a step are written; errors are in the last ones."""


@dataclass(frozen=True)
class DumpedStep:
    """One step in the dump of a rank: its number on this rank (from 0), its plan, its last passes and its error.

    Each of ``passes`` is a dict that says how far the pass got, how long it took and which error ended it. ``error`` is
    the error of binding the plan, empty if there was none; it does not include errors of passes.
    """

    number: int
    plan: Plan
    passes: list[dict[str, Any]]
    error: str


@dataclass(frozen=True)
class Dump:
    """The dump of one rank: why it was written, and the last steps of the rank.

    ``reason`` is a word (``error``, ``stall``, ``nan``, ``mismatch``, or the user's own), and ``message`` has the
    details.
    """

    path: Path
    reason: str
    message: str
    global_rank: int
    steps: list[DumpedStep]


def write_dump(
    folder: Path,
    reason: str,
    message: str,
    steps: list[StepRecord],
    global_rank: int,
    threads: dict[str, list[str]] | None = None,
) -> Path:
    """Write a dump into ``folder``, completely or not at all, and return its path.

    ``threads`` are stack traces as lines of text, by thread. ``reason`` and ``message`` say why the dump is written.
    """
    import torch

    from flexcp.version import __version__

    now = datetime.now(UTC)
    text = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "reason": reason,
            "message": message,
            "time": now.isoformat(timespec="milliseconds"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "global_rank": global_rank,
            "flexcp": __version__,
            "torch": str(torch.__version__),
            "threads": threads or {},
            "steps": [_step(step) for step in steps],
        },
        indent=1,
    )
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"flexcp-dump-{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}-rank{global_rank}"
    path, number = folder / f"{stem}.json", 1
    while path.exists():  # a rank may dump twice in a millisecond
        number += 1
        path = folder / f"{stem}-{number}.json"
    write_whole(path, text)
    return path


def _step(step: StepRecord) -> dict[str, Any]:
    """Return a step as JSON values."""
    plan = step.plan
    return {
        "number": step.number,
        "hash": plan.hash,
        "strategy": plan.strategy,
        "ranks": plan.ranks,
        "rank": step.rank,
        "tokens": plan.batch.tokens,
        "lengths": plan.batch.lengths.tolist(),
        "planning_wait_ms": step.planning_wait / 1e6,
        "error": step.error,
        "passes": [_pass(p) for p in list(step.passes)[-LAST_PASSES:]],
        "plan": base64.b64encode(save_plan(plan)).decode(),
    }


def _pass(p: PassRecord) -> dict[str, Any]:
    """Return a pass as JSON values."""
    times = p.times()
    return {
        "pass": p.name,
        "number": p.number,
        "reached": p.reached(),
        "error": p.error,
        "wait_ms": times.wait / 1e6,
        "pack_ms": times.pack / 1e6,
        "compute_ms": times.compute / 1e6,
    }


def find_dumps(path: Path) -> list[Path]:
    """Return the path of a dump, or the sorted paths of all dumps if ``path`` is a folder.

    Raises ValueError if there is none.
    """
    if path.is_dir():
        found = sorted(path.glob("flexcp-dump-*.json"))
        if not found:
            raise ValueError(f"no flexcp-dump-*.json in {path}; give a dump, or the folder that ranks dumped to")
        return found
    if not path.is_file():
        raise ValueError(f"no dump at {path}; give a flexcp-dump-*.json, or the folder that ranks dumped to")
    return [path]


def read_dump(path: Path) -> Dump:
    """Read a dump from a file, or raise a ValueError that says what is wrong with it."""
    data = read_json(path, "dump", "copy it again")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is JSON, but no flexcp dump; give a flexcp-dump-*.json")
    if data.get("version") != VERSION:
        raise ValueError(
            f"{path} is a dump of version {shown(data.get('version'))}, and this flexcp reads version {VERSION}; "
            "replay it with the flexcp that wrote it"
        )
    try:
        steps = [_read_step(path, step) for step in data["steps"]]
        return Dump(path, str(data["reason"]), str(data["message"]), _integer(data["global_rank"]), steps)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is a damaged dump: {type(error).__name__} {error}; copy it again") from None


def _integer(value: Any) -> int:
    """Return ``value`` if it is an int, else raise TypeError."""
    if type(value) is not int:
        raise TypeError(f"{shown(value)} is no whole number")
    return value


def _read_step(path: Path, step: dict[str, Any]) -> DumpedStep:
    """Read a step of a dump with its plan.

    Raises ValueError if the plan is unreadable or not the one that the dump names; missing or wrong entries raise
    KeyError, TypeError or AttributeError.
    """
    number = _integer(step["number"])
    try:
        plan = load_plan(base64.b64decode(step["plan"], validate=True))
    except ValueError as error:  # of the plan, or of text that is not base64
        raise ValueError(f"{path}: the plan of step {number} cannot be read: {error}") from None
    if step["hash"] not in (plan.hash, version_1_hash(plan)):  # old dumps hold plans of version 1 with their own hash
        raise ValueError(
            f"{path}: step {number} says its plan is {str(step['hash'])[:12]}, but holds {plan.hash[:12]}; "
            "copy the dump again"
        )
    return DumpedStep(number, plan, list(step["passes"]), str(step["error"]))
