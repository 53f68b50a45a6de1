"""Predicted and measured steps in the box: every strategy, at three loads of the links.

    make box                                                     # an idle machine with two cores: a quarter of an hour
    sudo python benchmarks/box_error.py --batches mixed --loads 0.5 --strategies "ring zigzag groups"

Ranks are network namespaces on one machine (benchmarks/lib/box.py). Their ports are limited and their kernels paced, so
that they behave like devices of a cluster (benchmarks/lib/box_machine.py); messages, packing, merging and all of Python
are real. Ports, sleeps and hosts are measured first (benchmarks/lib/box_calibration.py), with other messages and
batches. From these the event simulator predicts every step before it is run: forward and backward of attention, with
all ranks starting together in each. Nothing is fitted to a step.

``--write`` writes the page of results. It also records the errors that ``flexcp`` prints
(src/flexcp/known_errors/errors.json) after a complete run on an idle machine. Needs root and iproute2; without them it
says so and ends with exit code 0.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

from box_options import parsed
from box_page import ROW_HEADS, machine_words, page, record, summary
from lib.box import Box
from lib.box_calibration import Host, Port, measure_host, measure_ports
from lib.box_judging import BoxStep, Calibrated
from lib.box_machine import INSIDE, communication_share, mbit_for, paced_machine
from lib.step_time import slowest_ms, time_steps

STRATEGIES = (
    "auto",
    "dp",
    "ring",
    "zigzag",
    "allgather",
    "ulysses",
    "usp:2,2",
    "ring:2",
    "zigzag:2",
    "allgather:2",
    "ulysses:2",
    "zigzag:2@load",
    "blocks",
    "groups",
    "hypergraph",
    "dhp",
    "fcp:256",
    "dcp",
    "minheap",
    "pow2",
    "hdp",
    "wlb",
)
LOADS = (0.1, 0.5, 1.0)
MAKE = "make box"
BATCHES = {
    "mixed": (2048, 256, 512, 128, 175, 75, 375, 24, 500),
    "middling": (1100, 900, 700, 500, 400, 300, 196),
    "one": (4096,),
}
CALIBRATION = (1500, 800, 640, 420, 333, 210, 120, 73)
"""The batch on which hosts are measured."""
CALIBRATION_STRATEGIES = ("zigzag", "allgather", "ulysses", "blocks", "groups", "minheap:256", "zigzag:2")
UNLIMITED = Port(1000, 500_000, ((), ()))
"""A placeholder until ports are measured; plans made with it are used only for the bytes they move."""


def main() -> None:
    """Calibrate, predict, measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a node")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.7, help="what a batch takes, perfectly divided")
    parser.add_argument("--batches", default=" ".join(BATCHES))
    parser.add_argument("--loads", default=" ".join(str(load) for load in LOADS))
    parser.add_argument("--strategies", default=" ".join(STRATEGIES))
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parsed(parser)
    if asked is None:
        return
    busy = os.getloadavg()[0]
    print(f"machine: {machine_words(busy)}", flush=True)
    begin = time.monotonic()
    steps: list[BoxStep] = []
    calibrated: list[Calibrated] = []
    with Box(asked.nodes, asked.ranks) as box:
        host = _host(box, asked)
        print(f"hosts: {host}", flush=True)
        print(f"| {' | '.join(ROW_HEADS)} |\n" + "| --- " * len(ROW_HEADS) + "|")
        for batch in asked.batches.split():
            for load in (float(word) for word in asked.loads.split()):
                for step in _steps(box, asked, batch, load, host, calibrated):
                    steps.append(step)
                    print(f"| {' | '.join(step.cells())} |", flush=True)
    print("\n".join(summary(steps)))
    print(f"{time.monotonic() - begin:.0f} s; load average before it began {busy:.2f}")
    if asked.write:
        asked.write.write_text(page(steps, calibrated, host, busy, _command(asked)))
        if _command(asked) == MAKE:
            record(steps, calibrated, busy)


def _command(asked: argparse.Namespace) -> str:
    """Return the command that was run, with its options if they are not the defaults."""
    whole = {"batches": BATCHES, "loads": map(str, LOADS), "strategies": STRATEGIES}
    parts = [
        f'--{name} "{getattr(asked, name)}"' for name, every in whole.items() if getattr(asked, name) != " ".join(every)
    ]
    return " ".join(["python benchmarks/box_error.py", *parts]) if parts else MAKE


def _host(box: Box, asked: argparse.Namespace) -> Host:
    """Measure the work of hosts, on plans of another batch."""
    nothing = Host(0, 0, 0, 1000, ((), ()))
    machine = paced_machine(asked.nodes, asked.ranks, CALIBRATION, asked.seconds, (UNLIMITED, UNLIMITED), nothing)
    return measure_host(box, list(machine.plans(CALIBRATION, CALIBRATION_STRATEGIES).values()))


def _steps(
    box: Box, asked: argparse.Namespace, batch: str, load: float, host: Host, calibrated: list[Calibrated]
) -> Iterator[BoxStep]:
    """Yield the measured and predicted steps of all strategies on one batch and machine."""
    lengths, names = BATCHES[batch], asked.strategies.split()
    size = (asked.nodes, asked.ranks, lengths, asked.seconds)
    guess = paced_machine(*size, (UNLIMITED, UNLIMITED), host)
    mbit = mbit_for(load, guess.plans(lengths, STRATEGIES), guess)
    box.network.limit(mbit, INSIDE * mbit)
    ports = measure_ports(box, False, INSIDE * mbit), measure_ports(box, True, mbit)
    calibrated.append(Calibrated(batch, load, mbit, *ports))
    print(f"  {batch} at {load}: ports set to {mbit} Mbit/s, measured {ports}", flush=True)
    machine = paced_machine(*size, ports, host)
    for name, plan in machine.plans(lengths, names).items():
        predicted = machine.predicted_ms(plan)
        measured = slowest_ms(box.run(time_steps, plan, "whole", asked.repeats, machine.gflops))
        yield BoxStep(batch, load, name, communication_share(plan, machine), measured, predicted)


if __name__ == "__main__":
    main()
