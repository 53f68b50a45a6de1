"""Resume: a small training run that is killed at random moments, and its records.

Training has a process per rank, as a launcher starts them. Rank 0 writes a line per step (samples, and the loss to the
last bit), and every other step a checkpoint of model, optimizer and loader. When a rank is killed with signal 9, the
others are killed too, as launchers do, and the next attempt continues from the last checkpoint. In the end the lines
must equal those of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from flexcp.io.atomic_files import write_whole
from flexcp.measure.fork_server import server
from flexcp.measure.local_store import joined_store, kept_store, stay_local
from flexcp.measure.ranks import PRELOAD

EVERY = 2
"""Steps between checkpoints."""
SAMPLES, LONGEST, BUDGET, SEED = 37, 60, 96, 11
LIMIT = 300.0
PACE = 0.02
"""Seconds that each step sleeps, so that a random delay in seconds covers a few steps on any machine."""


@dataclass(frozen=True)
class Killed:
    """Lines of a run that was killed, and the moments of the kills: (step reached, whether training had begun)."""

    lines: list[str]
    moments: list[tuple[int, bool]]


class Documents:
    """A map-style dataset with known lengths: documents of a few repeating tokens."""

    def __init__(self) -> None:
        self.lengths = [1 + (i * 29) % LONGEST for i in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"tokens": [(number * 7 + row * row) % 64 for row in range(self.lengths[number])]}


def undisturbed(folder: Path, ranks: int, steps: int) -> list[str]:
    """Return the lines of a run from start to end."""
    with _Launch(folder, ranks, steps) as launch:
        launch.finish()
    return _lines(folder)


def disturbed(folder: Path, ranks: int, steps: int, kills: int, seed: int) -> Killed:
    """Return the lines of a run that is killed ``kills`` times, at moments drawn from ``seed``, and then left alone."""
    rng = random.Random(seed)
    moments: list[tuple[int, bool]] = []
    while len(moments) < kills:
        before = len(_lines(folder))
        with _Launch(folder, ranks, steps) as launch:
            # Some runs are killed while they start, some between steps, some inside a step or a checkpoint.
            more = rng.choice((0, 1, 1, 2, 3))
            ended = launch.wait_for(lambda n=before + more, least=more: len(_lines(folder)) >= n or least == 0)
            time.sleep(rng.random() * (0.7 if more == 0 else 2 * PACE))
            if ended:
                raise RuntimeError(f"the run ended before it was killed {kills} times; give it more than {steps} steps")
            launch.kill(rng.randrange(ranks))
            moments.append((len(_lines(folder)), more > 0))
    with _Launch(folder, ranks, steps) as launch:
        launch.finish()
    return Killed(_lines(folder), moments)


def _lines(folder: Path) -> list[str]:
    try:
        return (folder / "steps.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []


class _Launch:
    """The rank processes of one attempt."""

    def __init__(self, folder: Path, ranks: int, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.store = kept_store()
        context = server(PRELOAD)
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            process = context.Process(target=train, args=(folder, rank, ranks, steps, self.store.port))
            process.start()
            self.processes.append(process)

    def wait_for(self, condition: Any) -> bool:
        """Wait until the condition holds; returns True if all ranks ended before."""
        begin = time.monotonic()
        while not condition():
            if not any(p.is_alive() for p in self.processes):
                return True
            if time.monotonic() - begin > LIMIT:
                raise RuntimeError(f"the run made no progress in {LIMIT:g} s")
            time.sleep(0.002)
        return False

    def kill(self, rank: int) -> None:
        """Kill one rank with signal 9, and then the others."""
        for process in (self.processes[rank], *self.processes):
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def finish(self) -> None:
        for process in self.processes:
            process.join(LIMIT)
        codes = [p.exitcode for p in self.processes]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")

    def __enter__(self) -> _Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


# --- functions that run on a rank -------------------------------------------------------------------------------------


def train(folder: Path, rank: int, ranks: int, steps: int, port: int) -> None:
    """Train from the last checkpoint up to ``steps``."""
    import torch
    import torch.distributed as dist

    import flexcp
    from flexcp.data import Loader, Planning
    from flexcp.train.gpt import Gpt, GptConfig
    from flexcp.train.update import total_loss, update

    torch.set_num_threads(1)
    group = None
    if ranks > 1:
        stay_local()
        store = joined_store(port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        group = dist.group.WORLD
    torch.manual_seed(0)
    config = GptConfig(vocabulary=64, layers=1, heads=2, kv_heads=1, head_dim=16)
    model = Gpt(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    where = flexcp.cluster("cpu", 1, ranks)
    planner = flexcp.Planner(2, 1, 16, dtype="float32", cluster=where, strategy="zigzag")
    planning = Planning(lookahead=3, share_plans=ranks > 1)
    loader = Loader(Documents(), planner, budget=BUDGET, group=group, shuffle=True, seed=SEED, planning=planning)
    done = _restored(folder, model, optimizer, loader, rank)
    while done < steps:
        for batch in loader:
            logits = model(batch.tokens, batch.positions, lambda q, k, v, s=batch.step: flexcp.attention(q, k, v, s))
            total = torch.nn.functional.cross_entropy(logits, batch.labels, ignore_index=-100, reduction="sum")
            loss = (total + logits[:0].sum()) / max(1, batch.valid)
            update(optimizer, loss, group)
            value = total_loss(loss, group)
            time.sleep(PACE)
            done += 1
            if rank == 0:
                _noted(folder, done, batch, value)
                if done % EVERY == 0:
                    _saved(folder, done, model, optimizer, loader)
            if done == steps:
                break
    loader.close()


def _noted(folder: Path, done: int, batch: Any, loss: float) -> None:
    line = {"step": done, "epoch": batch.epoch, "samples": batch.samples.tolist(), "loss": loss.hex()}
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _saved(folder: Path, done: int, model: Any, optimizer: Any, loader: Any) -> None:
    import torch

    state = {
        "done": done,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
    }
    torch.save(state, folder / "checkpoint.part")
    (folder / "checkpoint.part").replace(folder / "checkpoint")


def _restored(folder: Path, model: Any, optimizer: Any, loader: Any, rank: int) -> int:
    """Load the last checkpoint, if any, and drop the lines after it; returns the number of steps done."""
    import torch

    done = 0
    if (folder / "checkpoint").exists():
        state = torch.load(folder / "checkpoint", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        done = int(state["done"])
    if rank == 0:
        lines = _lines(folder)[:done]
        write_whole(folder / "steps.jsonl", "".join(line + "\n" for line in lines))
    return done
