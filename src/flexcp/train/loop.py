"""The training loop of ``flexcp train``: plan, bind, forward, backward, sum gradients, optimizer step, report.

The loop is one generator that every rank runs, in our own pool of CPU processes or under torchrun. Every rank holds the
whole model, and gradients are summed over ranks by all-reduce. ``examples/fsdp2_pretrain.py`` shows the same loop with
a sharded model.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from flexcp.arrays.totals import imbalance
from flexcp.clusters import cluster
from flexcp.executor.bind import bind
from flexcp.plan.plan import Plan
from flexcp.schedule.predict import predict
from flexcp.train.documents import Documents
from flexcp.train.model_setup import make_outline, make_trainee, refuse_long_documents
from flexcp.train.source import check_data, check_model, check_numbers
from flexcp.train.update import total_loss, update


@dataclass(frozen=True)
class TrainConfig:
    """The model, data, planning and optimizer settings of a run; raises ValueError for invalid ones.

    ``model`` is ``gpt`` or the path of a Hugging Face configuration, ``data`` a length distribution, ``@file`` with
    lengths or a text file, and ``tokens`` are those of one step.
    """

    model: str = "gpt"
    data: str = "longtail"
    tokens: int = 4096
    steps: int = 20
    strategy: str = "auto"
    layout: str = "free"
    dtype: str = "float32"
    learning_rate: float = 3e-3
    preset: str = "cpu"
    """The preset of the cluster whose speeds predictions use."""
    sizes: tuple[tuple[str, int], ...] = ()
    """For ``gpt``: (name, value) pairs of its configuration that differ from the defaults."""

    def __post_init__(self) -> None:
        check_model(self.model)
        check_data(self.data)
        check_numbers(self.tokens, self.steps, self.dtype, self.layout, self.learning_rate)


@dataclass(frozen=True)
class StepReport:
    """The numbers of one step over all ranks.

    ``measured_ms`` is the time of forward, backward and optimizer, without planning, ``predicted_ms`` what the cost
    model says. ``bytes`` are those of all attention layers, forward and backward. Imbalances are the largest value of a
    rank divided by the mean.
    """

    step: int
    loss: float
    documents: int
    tokens: int
    planning_ms: float
    measured_ms: float
    predicted_ms: float
    bytes: int
    compute_imbalance: float
    token_imbalance: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.measured_ms * 1000

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def check_run(config: TrainConfig, ranks: int) -> None:
    """Raise, in the process that launches ranks, what every one of them would raise.

    A wrong model, strategy or layout is found by making the outline of the model and the plan of the first step,
    without weights; documents longer than the model's learned positions by the lengths of all steps.
    """
    where = cluster(config.preset, 1, ranks)
    outline = make_outline(config.model, config.dtype, _device(), where, config.strategy, dict(config.sizes))
    documents = Documents(config.data, config.tokens, outline.vocabulary)
    refuse_long_documents(documents, config.steps, outline.learned)
    parts = documents.step(0)
    outline.planner([len(part) for part in parts], masks=outline.masks, layout=config.layout)


def _device() -> torch.device:
    """Return the device on which this process trains."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def train(group: dist.ProcessGroup, config: TrainConfig) -> Generator[StepReport, None, list[StepReport]]:
    """Run this rank's part of the training; all ranks of ``group`` must call it.

    Yields the report of each step, and returns all reports.
    """
    ranks = dist.get_world_size(group)
    device = _device()
    where = cluster(config.preset, 1, ranks)
    trainee = make_trainee(config.model, config.dtype, device, where, config.strategy, dict(config.sizes))
    outline = trainee.outline
    documents = Documents(config.data, config.tokens, outline.vocabulary)
    refuse_long_documents(documents, config.steps, outline.learned)
    optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=config.learning_rate, eps=1e-6)
    reports = []
    for number in range(config.steps):
        parts = documents.step(number)
        begin = time.perf_counter()
        plan = outline.planner([len(part) for part in parts], masks=outline.masks, layout=config.layout)
        planning = time.perf_counter() - begin
        step = bind(plan, group)
        tokens = torch.cat(parts).to(device)
        labels = step.labels(tokens)
        dist.barrier(group)
        begin = time.perf_counter()
        loss = step.loss(trainee.logits(tokens, step), labels)
        update(optimizer, loss, group)
        value = total_loss(loss, group)
        reports.append(_report(number, value, plan, planning, time.perf_counter() - begin))
        yield reports[-1]
    return reports


def _report(number: int, loss: float, plan: Plan, planning: float, seconds: float) -> StepReport:
    prediction = predict(plan.placement, plan.shape, plan.cluster, plan.cost)
    layers = [mask.layers for mask in plan.batch.masks]
    moved = sum(n * int(plan.bytes(way, mask).sum()) for mask, n in enumerate(layers) for way in (False, True))
    work = plan.work_of_layers()
    return StepReport(
        number,
        loss,
        plan.batch.documents,
        plan.batch.tokens,
        planning * 1000,
        seconds * 1000,
        prediction.total_ns / 1e6,
        moved,
        imbalance(work),
        imbalance(plan.placement.tokens),
    )
