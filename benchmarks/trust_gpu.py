"""Trust on a GPU: what only a GPU and real NCCL ranks can show, part by part, each with its own time.

    python benchmarks/trust_gpu.py --only memory,telemetry,soak --minutes 9 --write trust_gpu.json
    python benchmarks/trust_gpu.py --page trust_gpu.json --on "one H200, torch 2.11"   # the tables of docs/trust.md
    python benchmarks/trust_gpu.py --device cpu --small                                # a sample on gloo ranks

| part | what |
| --- | --- |
| memory | plan.memory(rank) beside the allocator's peak, 8K to 1M tokens; what NCCL takes; batches at 95 % of a cap |
| telemetry | a layer with and without Telemetry, in turns |
| soak | changing batches for as long as there is time: nothing may grow |
| nccl | telemetry, check_every, the loader, latents, preparing on another stream, and ranks out of step, over NCCL |
| numbers | adversarial values beside single-device attention, both against float64 |

A part runs in a process of its own, in a session of its own, and is killed with all it started when its time is over:
rows that it had are kept, and one more says so. The file is written again after every part. Ranks share the one GPU, so
times over NCCL mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lib.trust_page import write_page
from lib.trust_ranks import Setting

PARTS = {"memory": 2.0, "telemetry": 1.2, "soak": 3.0, "nccl": 1.8, "numbers": 1.0}
"""Parts and their share of the time."""
LEAST = 20.0
"""Seconds a part gets at least."""


def main(words: list[str] | None = None) -> int:
    """Run parts, or make the page; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by name")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a sample of everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, default=Path("trust_gpu.json"))
    parser.add_argument("--page", type=Path, nargs="+", help="files of runs: write their tables into docs/trust.md")
    parser.add_argument("--on", help="with --page: the machine, in words")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what a part's own process is told
    asked = parser.parse_args(words)
    if asked.page:
        write_page([json.loads(path.read_text()) for path in asked.page], asked.on or "an unnamed machine")
        return 0
    if asked.part:
        return run_part(asked.part, asked)
    names = asked.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    return run_parts(names, asked)


def run_parts(names: list[str], asked: argparse.Namespace) -> int:
    """Each part in its own process; the file after each."""
    end = time.monotonic() + 60 * asked.minutes
    found: dict[str, Any] = {
        "machine": _machine(asked.device),
        "device": asked.device,
        "small": asked.small,
        "parts": {},
    }
    for number, name in enumerate(names):
        share = PARTS[name] / sum(PARTS[other] for other in names[number:])
        limit = max(LEAST, share * (end - time.monotonic()))
        found["parts"][name] = _watched_part(name, asked, limit)
        asked.write.write_text(json.dumps(found, indent=1))
        for row in found["parts"][name]["rows"]:
            print(f"{name}: {json.dumps(row)}", flush=True)
    wrong = [row for part in found["parts"].values() for row in part["rows"] if row.get("ok") is False]
    print(f"{len(wrong)} rows are not as they should be", flush=True)
    return int(bool(wrong))


def _watched_part(name: str, asked: argparse.Namespace, limit: float) -> dict[str, Any]:
    """The rows of a part; a last one that says so where it failed or ran out of time."""
    with TemporaryDirectory() as folder:
        rows_at = Path(folder) / "rows.json"
        words = [sys.executable, __file__, "--part", name, "--device", asked.device, "--seed", str(asked.seed)]
        words += ["--minutes", str(limit / 60), "--write", str(rows_at), *(["--small"] if asked.small else [])]
        begin = time.monotonic()
        process = subprocess.Popen(words, start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        rows = json.loads(rows_at.read_text()) if rows_at.exists() else []
    seconds = round(time.monotonic() - begin, 1)
    if code is None:
        rows.append({"what": "the rest", "ok": False, "why": f"killed after {limit:.0f} s"})
    elif code and not any(row.get("ok") is False for row in rows):
        rows.append({"what": "the rest", "ok": False, "why": f"its process ended with {code}"})
    return {"seconds": seconds, "limit": round(limit), "rows": rows}


def _end(process: subprocess.Popen[bytes]) -> None:
    """A part and all it started: they have a session, so a group, of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_part(name: str, asked: argparse.Namespace) -> int:
    """In the part's own process: its rows, written as they come."""
    rows: list[dict[str, Any]] = []
    # A fifth of the time is for ending by itself.
    setting = Setting(asked.device, time.monotonic() + 48 * asked.minutes, asked.small, asked.seed)
    begin = time.monotonic()
    try:
        for row in importlib.import_module(f"lib.trust_{name}").rows(setting):
            rows.append(row | {"at": round(time.monotonic() - begin, 1)})
            _written(asked.write, rows)
    except Exception as error:  # whatever it is, it is this part's row
        why = f"{type(error).__name__}: {error}"
        rows.append({"what": "the rest", "ok": False, "why": why[-1500:], "at": round(time.monotonic() - begin, 1)})
        _written(asked.write, rows)
        print(why, file=sys.stderr, flush=True)
    return int(any(row.get("ok") is False for row in rows))


def _written(path: Path, rows: list[dict[str, Any]]) -> None:
    """Whole or not at all: the process may be killed while it writes."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(rows))
    beside.replace(path)


def _machine(device: str) -> str:
    if device != "cuda":
        return "CPU ranks (gloo)"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {nccl}"


if __name__ == "__main__":
    sys.exit(main())
