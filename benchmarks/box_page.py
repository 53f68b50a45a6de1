"""Tables of predicted and measured steps, and the page of results that ``box_error.py`` writes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date

from flexcp.calibration import Errors
from flexcp.known_errors.entries import KnownError
from flexcp.measure.calibrate.fit import errors
from lib.box_calibration import Host
from lib.box_judging import BoxStep, Calibrated, order, regrets
from lib.box_machine import INSIDE, SHAPE
from lib.record_errors import record_errors
from simulated import table

BUSY = 0.5
"""A machine with a load average above this is not idle."""
ROW_HEADS = ("batch", "load", "strategy", "communication / compute", "measured ms", "predicted ms", "error")


def step_errors(steps: Sequence[BoxStep]) -> Errors:
    """Return the errors of predicted steps."""
    return errors([step.predicted_ms for step in steps], [step.measured_ms for step in steps])


def _by_load(steps: Sequence[BoxStep]) -> list[tuple[str, list[BoxStep]]]:
    loads = sorted({step.load for step in steps})
    parts = [(f"{load:.1f}", [step for step in steps if step.load == load]) for load in loads]
    return [*parts, ("all", list(steps))]


def summary(steps: Sequence[BoxStep]) -> list[str]:
    """Return a table of errors and order at each load."""
    rows = []
    for load, some in _by_load(steps):
        off, found, late = step_errors(some), order(some), regrets(some)
        right = f"{found.right} of {found.pairs} ({found.right / found.pairs:.0%})" if found.pairs else "-"
        cells = [load, str(off.count), *(f"{x:.1%}" for x in (off.median, off.p90, off.worst)), right]
        rows.append([*cells, f"{max(late):.2f}" if late else "-"])
    heads = [
        "load",
        "steps",
        "median error",
        "90th percentile",
        "worst",
        "order right, of pairs predicted more than 10 % apart",
    ]
    return table([*heads, "auto over the best, measured, at worst"], rows)


def machine_words(busy: float) -> str:
    """Describe the machine, and whether it was idle."""
    idle = "idle" if busy <= BUSY else f"not idle: load average {busy:.1f} before it began"
    return f"{os.cpu_count()} cores ({platform.machine()}), {idle}"


def page(steps: Sequence[BoxStep], calibrated: Sequence[Calibrated], host: Host, busy: float, command: str) -> str:
    """Return the page of results."""
    ports = [
        [
            c.batch,
            f"{c.load:g}",
            f"{c.mbit / 8:.1f}",
            *_port(c, "across"),
            f"{c.mbit * INSIDE / 8:.1f}",
            *_port(c, "inside"),
        ]
        for c in calibrated
    ]
    level = ["measured", "latency, ms", "held out: median", "worst"]
    lines = [
        "# A cluster in a box, predicted and measured",
        "",
        f"**Measured against simulated**, by `{command}` on {date.today().isoformat()}: {machine_words(busy)}. Four "
        "ranks in two nodes are processes, each with its own network namespace. They communicate over real TCP "
        f"(gloo) through ports limited by `tc`: one across nodes, and one inside the node that is {INSIDE} times as "
        "fast. A rank's kernel is paced: it sleeps as long as a device of a stated speed would compute. Everything "
        "else is as in training: plans, messages, packing, merging, Python. Ports, sleeps and hosts are measured "
        "first, with other messages and another batch; then the event simulator predicts each step, and the step is "
        "run. Nothing is fitted to a step.",
        "",
        f"A step is attention forward and backward ({SHAPE.heads} / {SHAPE.kv_heads} heads of {SHAPE.head_dim}, "
        f"{SHAPE.dtype}, causal), with all ranks starting together in each; its time is that of the slowest rank in "
        "the fastest repeat. The *load* is the time that the busiest port is busy over the compute time of the "
        "slowest rank, for the median strategy; *communication / compute* is the same ratio for each strategy. "
        "Strategies with the same plan share a row.",
        "",
        "## How far off",
        "",
        *summary(steps),
        "## Every step",
        "",
        *table(ROW_HEADS, [step.cells() for step in steps]),
        "## What was measured first",
        "",
        f"Hosts: {host.slot_ns / 1e3:.0f} us a slot, {host.piece_ns / 1e3:.0f} us a piece that leaves or comes, copies "
        f"at {host.copy_mbps:,} MB/s, {host.kernel_ns / 1e3:.0f} us of a kernel beyond its pace; passes that were not "
        f"fitted are off by {host.off.median:.0%} in the median, {host.off.worst:.0%} at worst. Ports, MB/s:",
        "",
        *table(["batch", "load", "across nodes: set", *level, "inside: set", *level], ports),
    ]
    return "\n".join(lines)


def _port(each: Calibrated, name: str) -> list[str]:
    port = getattr(each, name)
    return [f"{port.mbps:.1f}", f"{port.latency_ns / 1e6:.2f}", f"{port.off.median:.1%}", f"{port.off.worst:.1%}"]


def record(steps: Sequence[BoxStep], calibrated: Sequence[Calibrated], busy: float) -> None:
    """Record the errors that flexcp prints, if the machine was idle."""
    if busy > BUSY:
        print(
            f"errors are not recorded: load average {busy:.1f} before it began, and an idle machine has at most {BUSY}"
        )
        return
    today, machine = date.today().isoformat(), machine_words(busy)
    found = []
    for load, some in _by_load(steps):
        key = "steps, box" if load == "all" else f"steps, box at {load}"
        pairs = order(some)
        found.append(KnownError(key, step_errors(some), today, machine, pairs.pairs, pairs.right))
    ports = [port for c in calibrated for port in (c.inside, c.across)]
    sides = [[x for port in ports for x in side] for side in zip(*(port.held for port in ports), strict=True)]
    found.append(KnownError("links, box", errors(*sides), today, machine))
    record_errors(found)
