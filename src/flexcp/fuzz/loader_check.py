"""Loader check: a loader over a case's documents gives every sample once an epoch, with the right rows, and can resume.

It has one rank and plans in this process. How ranks share a batch is the executor's work and checked on real ranks.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from flexcp.clusters import cluster
from flexcp.data.loader import Loader
from flexcp.data.loader_settings import Planning
from flexcp.fuzz.cases import Case
from flexcp.fuzz.token_machine import require
from flexcp.planner import Planner


class _Documents:
    """Documents with recognizable tokens: document d has the tokens d * 10,000, d * 10,000 + 1, ..."""

    def __init__(self, lengths: list[int], known: bool) -> None:
        self.sizes = lengths
        if known:
            self.lengths = lengths

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(self.sizes[number]) + 10_000 * number}


def check_loader(case: Case) -> None:
    """Check two epochs of a loader, then the first epoch again with a second loader that resumes in its middle.

    Raises :class:`flexcp.fuzz.token_machine.Wrong`.
    """
    rng = random.Random(case.run.seed)
    known, shuffle = rng.random() < 0.5, rng.random() < 0.5
    budget = max(case.lengths) + rng.randrange(sum(case.lengths))
    lookahead = rng.randrange(3)

    def loader() -> Loader:
        planner = Planner(4, 2, 8, cluster=cluster("cpu", 1, 1), strategy="blocks")
        data = _Documents(case.lengths, known)
        return Loader(
            data,
            planner,
            budget=budget,
            group="alone",
            shuffle=shuffle,
            seed=case.run.seed,
            planning=Planning(lookahead=lookahead, workers=0),
        )

    with loader() as first:
        epochs = []
        for _ in range(2):
            epochs.append([_checked(batch, case, budget) for batch in first])
    for epoch in epochs:
        given = sorted(sample for batch in epoch for sample in batch)
        require(given == list(range(len(case.lengths))), f"an epoch of {len(case.lengths)} samples gave {given}")
        fullest = [sum(case.lengths[s] for s in batch) for batch in epoch]
        heads = [case.lengths[batch[0]] for batch in epoch[1:]]
        require(
            all(a + b > budget for a, b in zip(fullest, heads, strict=False)), "a batch left room for the next document"
        )
    require(shuffle or epochs[0] == epochs[1], "epochs differ although nothing is shuffled")
    stop = rng.randrange(1, len(epochs[0]) + 1)
    with loader() as left, loader() as resumed:
        steps = iter(left)
        before = [_checked(next(steps), case, budget) for _ in range(stop)]
        resumed.load_state_dict(left.state_dict())
        after = [_checked(batch, case, budget) for batch in resumed] if stop < len(epochs[0]) else []
    require(before + after == epochs[0], f"left after {stop} of {len(epochs[0])} batches, the rest was another")


def _checked(batch: Any, case: Case, budget: int) -> list[int]:
    """Check tokens, labels, positions and size of a batch, and return the numbers of its samples."""
    samples: list[int] = batch.samples.tolist()
    rows = [torch.arange(case.lengths[s]) + 10_000 * s for s in samples]
    stream = torch.cat(rows)
    require(len(stream) <= budget, f"a batch of {len(stream)} tokens, over the budget of {budget}")
    order = batch.step.indices
    require(torch.equal(batch.tokens, stream[order]), f"the rows of samples {samples} are others")
    following = torch.cat([torch.cat([row[1:], torch.tensor([-100])]) for row in rows])
    require(torch.equal(batch.labels, following[order]), f"the labels of samples {samples} are not the next tokens")
    places = torch.cat([torch.arange(len(row)) for row in rows])
    require(torch.equal(batch.positions, places[order]), f"the positions of samples {samples} do not count from 0")
    counted = int((following != -100).sum())
    require(int(batch.valid) == max(1, counted), f"valid is {int(batch.valid)} for {counted} labels")
    return samples
