"""Reading of mutated plan files; ``make fuzz-plans`` reads 100,000 of them.

Each begins as the file of a good plan and is changed in one of three ways:

- *raw*: bits, bytes and ranges of the file, as disks and cables do;
- *sealed*: the inflated body, or a value of its facts, is changed, deflated and sealed again with a correct checksum,
  as an attacker does;
- *forged*: fields or cells of the plan itself are changed, and the plan is saved with everything around them correct.

Reading a file must give an equal plan, another valid plan (if it was forged), or a PlanFormatError. Reads are watched:
an audit hook sees every import, file, process, socket and piece of code; memory is limited, and its peak is measured on
a sample; an alarm ends a read that takes too long. The hook cannot be removed, so this is a program of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import resource
import signal
import struct
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

import flexcp
from flexcp.fuzz.readers import change_value
from flexcp.masks import Mask
from flexcp.plan import file as wire
from flexcp.plan.plan import Plan

SECONDS = 20
MEMORY = 512 << 20
MEASURED_EVERY = 25
PEAK_ROOM, PEAK_PER_BYTE = 16 << 20, 512
"""Memory that a read may use at its peak: a fixed part, and a part for each byte of its file."""
FORBIDDEN = (
    "exec",
    "compile",
    "import",
    "open",
    "os.",
    "subprocess.",
    "socket.",
    "pickle.",
    "marshal.",
    "ctypes.",
    "code.",
)
EXTREMES = [
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    65_535,
    1 << 20,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 53,
    1 << 61,
    -(1 << 61),
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
    10**30,
]


@dataclass
class Outcome:
    """The results of all reads."""

    files: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    read: int = 0
    slowest_ms: float = 0.0
    peak: float = 0.0
    """The largest share of the allowed memory that a measured read used."""
    failures: list[str] = field(default_factory=list)


def good_plans() -> list[Plan]:
    """Return small plans of several strategies and masks, so that mutations hit what matters."""
    lengths = [700, 31, 1, 256, 90]
    each = [flexcp.masks.modality([(3, 9), (20, 40)]) if n > 64 else flexcp.causal() for n in lengths]
    slices = [flexcp.from_slices(n, [(n // 3, n, 0, n // 2, None, -1)]) for n in lengths]
    two = {"near": (flexcp.window(100, 0), 3), "all": (flexcp.masks.shared_question(4, 0.2), 1)}
    one, nodes = flexcp.cluster("cpu", 1, 3), flexcp.cluster("h100", 2, 2, speeds=[1, 0.9, 1, 1])

    def planner(where: flexcp.Cluster, strategy: str) -> flexcp.Planner:
        return flexcp.Planner(8, 2, 64, cluster=where, strategy=strategy)

    return [
        planner(nodes, "blocks")(lengths, each),
        planner(one, "blocks")(lengths, masks=two),
        planner(nodes, "zigzag")(lengths, slices),
        planner(one, "ulysses:1")(lengths, flexcp.masks.lambda_(4, 64), tokens="equal", pad_to=16),
        planner(nodes, "groups")(lengths, flexcp.masks.causal_blockwise(16, 2)),
        planner(one, "allgather")(lengths, flexcp.masks.prefix(50), layout="contiguous"),
    ]


# --- mutations --------------------------------------------------------------------------------------------------------


def raw(data: bytes, _: Plan, rng: random.Random) -> bytes:
    """Change bits, bytes and ranges of a file."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        kind, at = rng.randrange(8), rng.randrange(max(1, len(out)))
        size = rng.choice((1, 2, 4, 8, 64, 512))
        if kind < 3 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            out = out[:at]
        elif kind == 4:
            out[at : at + size] = rng.randbytes(size)
        elif kind == 5:
            out[at : at + size] = b""
        elif kind == 6:
            out[at:at] = out[at : at + size] or b"\0"
        else:
            out += rng.randbytes(size)
    return bytes(out)


def sealed(data: bytes, _: Plan, rng: random.Random) -> bytes:
    """Change the body or its facts and add a correct checksum."""
    start = wire._PREFIX.size
    body = zlib.decompress(data[start:])
    size = struct.unpack_from("<Q", body)[0]
    if rng.random() < 0.5:
        facts = json.loads(body[8 : 8 + size])
        for _ in range(rng.choice((1, 1, 2))):
            change_value(facts, rng)
        text = json.dumps(facts).encode()
        if rng.random() < 0.1:
            text = rng.choice((b"[" * 100_000, b'{"a":' * 20_000, b"1" * 100_000, b"NaN", b'"\\ud800"', text[:-1]))
        body = struct.pack("<Q", len(text)) + text + body[8 + size :]
    elif rng.random() < 0.2:
        body = body[: rng.randrange(len(body))] + bytes(rng.choice((1, 1 << 16, 1 << 22)))  # as in a zip bomb
    else:
        out = bytearray(body)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(8 + size if rng.random() < 0.7 else 0, len(out) - 8)
            number = rng.choice(EXTREMES) % (1 << 64)
            out[at : at + 8] = struct.pack("<Q", number) if rng.random() < 0.5 else rng.randbytes(8)
        body = bytes(out)
    deflated = zlib.compress(body, 1)
    if rng.random() < 0.1:
        deflated = deflated[: rng.randrange(1, len(deflated))] + rng.randbytes(rng.choice((0, 1, 9)))
    said = rng.choice(EXTREMES) % (1 << 64) if rng.random() < 0.05 else len(body)
    head = wire._PREFIX.pack(wire.MAGIC, wire.VERSION, start + len(deflated), said, bytes(16))
    return wire._sealed(head, deflated)


def forged(_: bytes, plan: Plan, rng: random.Random) -> bytes:
    """Change cells or fields of a plan and save it as if it were good."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        plan = rng.choice((_forged_cell, _forged_cell, _forged_rule, _forged_fact))(plan, rng)
    return wire.save_plan(plan)


def _forged_cell(plan: Plan, rng: random.Random) -> Plan:
    tables = plan.tables()
    number = rng.randrange(len(tables))
    table = tables[number]
    if len(table) == 0:
        return plan
    name, row = rng.choice(table.names()), rng.randrange(len(table))
    column = getattr(table, name).copy()
    column[row] = rng.choice((column[row] + 1, column[row] - 1, rng.choice([e for e in EXTREMES if abs(e) < 1 << 62])))
    tables[number] = replace(table, **{name: column})
    placement = replace(plan.placement, runs=tables[0], regions=tuple(tables[1::3]))
    programs = tuple(
        (replace(a, transfers=f), replace(b, transfers=g))
        for (a, b), f, g in zip(plan.programs, tables[2::3], tables[3::3], strict=True)
    )
    return replace(plan, placement=placement, programs=programs)


def _forged_rule(plan: Plan, rng: random.Random) -> Plan:
    numbers = [e for e in EXTREMES if abs(e) < 1 << 61]
    rule = rng.choice(
        (
            Mask("shared-question", (rng.choice(numbers), 0.5)),
            Mask("window", (rng.choice(numbers), rng.choice(numbers))),
            Mask("blockwise", (rng.choice(numbers), rng.choice(numbers))),
            Mask("modality", ((0, 1, 1, rng.choice(numbers)), False)),
            Mask("slices", (), rng.choice(numbers), ((0, 1, 0, 1, -rng.choice(numbers), 0),)),
            Mask("prefix", (rng.choice(numbers),)),
            Mask("lambda", (rng.choice(numbers), rng.choice(numbers))),
        )
    )
    masks = list(plan.batch.masks)
    masks[0] = replace(masks[0], rules=(rule,) * rng.choice((1, len(plan.batch.lengths))))
    if rng.random() < 0.3:
        masks = masks * 2
    return replace(plan, placement=replace(plan.placement, batch=replace(plan.batch, masks=tuple(masks))))


def _forged_fact(plan: Plan, rng: random.Random) -> Plan:
    number = rng.choice(EXTREMES)
    which = rng.randrange(4)
    if which == 0:
        return replace(plan, placement=replace(plan.placement, pads=number))
    if which == 1:
        lengths = plan.batch.lengths.copy()
        lengths[rng.randrange(len(lengths))] = rng.choice([e for e in EXTREMES if abs(e) < 1 << 62])
        return replace(plan, placement=replace(plan.placement, batch=replace(plan.batch, lengths=lengths)))
    target = copy.copy(rng.choice((plan.shape, plan.cost)))
    name = rng.choice([f.name for f in fields(target) if f.name not in ("name", "model", "dtype")])
    object.__setattr__(target, name, number)
    return replace(plan, **{"shape" if isinstance(target, type(plan.shape)) else "cost": target})


MUTATIONS: dict[str, Callable[[bytes, Plan, random.Random], bytes]] = {"raw": raw, "sealed": sealed, "forged": forged}


# --- watched reads ----------------------------------------------------------------------------------------------------


class Watch:
    """Records forbidden events of a read, by an audit hook while ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._saw)

    def _saw(self, event: str, _: Any) -> None:
        if self.on and event.startswith(FORBIDDEN):
            self.seen.append(event)


def read(data: bytes, was: Plan, kind: str, outcome: Outcome, watch: Watch, measured: bool) -> None:
    """Read one file and record the result."""
    if measured:
        tracemalloc.start()
    begin, watch.on = time.perf_counter(), True
    signal.alarm(SECONDS)
    try:
        plan = wire.load_plan(data)
    except wire.PlanFormatError as error:
        outcome.refused[_reason(str(error))] += 1
        if len(str(error)) > 600:
            outcome.failures.append(f"a message of {len(str(error))} characters")
    except BaseException as error:
        outcome.failures.append(f"{kind}: {type(error).__name__}: {str(error)[:300]}")
    else:
        outcome.read += 1
        if kind == "raw" and plan != was:
            outcome.failures.append("a damaged file was read as another plan")
        if len(plan.hash) != 32 or wire.load_plan(wire.save_plan(plan)) != plan:
            outcome.failures.append(f"{kind}: a plan that cannot be saved again")
    finally:
        signal.alarm(0)
        watch.on = False
    outcome.slowest_ms = max(outcome.slowest_ms, (time.perf_counter() - begin) * 1000)
    outcome.files += 1
    if watch.seen:
        outcome.failures.append(f"{kind}: reading caused {watch.seen[:3]}")
        watch.seen.clear()
    if measured:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        share = peak / (PEAK_ROOM + PEAK_PER_BYTE * len(data))
        outcome.peak = max(outcome.peak, share)
        if share > 1:
            outcome.failures.append(f"{kind}: {peak} bytes of memory for a file of {len(data)}")


def _reason(message: str) -> str:
    """Return the beginning of a refusal without numbers, to count kinds of refusals."""
    detail = message.removeprefix("this is no valid flexcp plan: ").split("; got")[0]
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*|'.*'|hash \w+", "#", detail)[:50]


def fuzz(count: int, seed: int, tell: Callable[[int], None]) -> Outcome:
    """Read ``count`` mutated files; the same seed gives the same files."""
    plans = good_plans()
    files = [wire.save_plan(plan) for plan in plans]
    for plan, data in zip(plans, files, strict=True):
        assert wire.load_plan(data) == plan
    np.seterr(all="ignore")
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    signal.signal(signal.SIGALRM, _too_slow)
    rng, outcome, watch = random.Random(seed), Outcome(), Watch()
    kinds = list(MUTATIONS)
    for number in range(count):
        which = rng.randrange(len(plans))
        kind = rng.choice(kinds)
        data = _made(MUTATIONS[kind], files[which], plans[which], rng)
        read(data, plans[which], kind, outcome, watch, number % MEASURED_EVERY == 0)
        tell(number + 1)
    return outcome


def _made(mutation: Callable[..., bytes], data: bytes, plan: Plan, rng: random.Random) -> bytes:
    """Return a mutated file; a forgery that even the writer refuses is tried again."""
    while True:
        try:
            return mutation(data, plan, rng)
        except (ValueError, OverflowError, TypeError, MemoryError):
            continue


def _too_slow(*_: Any) -> None:
    raise TimeoutError(f"a read took more than {SECONDS} s")


def main() -> int:
    """Fuzz and report; returns 1 if a file gave anything but a refusal or a valid plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    begin = time.monotonic()

    def tell(done: int) -> None:
        if done % 1000 == 0 or done == asked.count:
            rate = done / (time.monotonic() - begin)
            print(f"\r{done:,} of {asked.count:,} files, {rate:.0f} a second", end="", file=sys.stderr, flush=True)

    outcome = fuzz(asked.count, asked.seed, tell)
    print(file=sys.stderr)
    found = {
        "files": outcome.files,
        "refused": sum(outcome.refused.values()),
        "read": outcome.read,
        "reasons": len(outcome.refused),
        "slowest_ms": round(outcome.slowest_ms, 1),
        "peak_memory_share": round(outcome.peak, 3),
        "seconds": round(time.monotonic() - begin, 1),
        "failures": len(outcome.failures),
    }
    if asked.json:
        print(json.dumps(found))
    else:
        for reason, count in outcome.refused.most_common():
            print(f"{count:>8}  {reason}")
        print(", ".join(f"{key} {value}" for key, value in found.items()))
    for failure in outcome.failures[:20]:
        print(f"FAILED {failure}", file=sys.stderr)
    return int(bool(outcome.failures))


if __name__ == "__main__":
    sys.exit(main())
