"""The demo: a small GPT on a stream of long-tailed documents, trained on one process and under each strategy.

The single process runs torch's own attention document by document and uses neither flexcp's attention nor its plans, so
that equal losses are evidence; labels, loss and update are the same code. All runs see the same batches from the same
initial weights; gradients are summed over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flexcp.arrays.totals import imbalance
from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.io.sizes import size
from flexcp.masks import causal
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.train.documents import phrases, shrunk_lengths

if TYPE_CHECKING:
    import torch.distributed as dist
    from rich.console import Console
    from torch import Tensor

CHECKED_STEPS = 10
"""How many of the first steps are compared."""
TOLERANCE = 1e-5
"""The largest relative difference of losses that counts as equal."""


@dataclass(frozen=True)
class DemoConfig:
    """The sizes of the demo: ranks, steps, tokens a step, strategies, and the model's attention.

    Raises ValueError for values below 1, and for strategies that cannot plan the first step.
    """

    ranks: int
    steps: int
    tokens: int
    strategies: tuple[str, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"the demo needs {name} of at least 1; got {getattr(self, name)}")
        for strategy in self.strategies:
            make_plan(self, strategy, 0)


@dataclass(frozen=True)
class Result:
    """One run: its loss in each step, and means over its steps of time, planning time, bytes and imbalance.

    ``bytes`` are those of one attention layer, forward and backward. Imbalances are the largest value of a rank divided
    by the mean. ``error`` is the largest relative difference to the losses of one process, over the first
    ``CHECKED_STEPS`` steps.
    """

    name: str
    losses: list[float]
    step_ms: float
    planning_ms: float = 0.0
    bytes: float = 0.0
    compute_imbalance: float = 1.0
    token_imbalance: float = 1.0
    error: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def batch_lengths(config: DemoConfig, step: int) -> list[int]:
    """Return the document lengths of a step: the ``longtail`` distribution scaled to a small batch."""
    return shrunk_lengths("longtail", config.tokens, seed=step, shrink=16)


def make_plan(config: DemoConfig, strategy: str, step: int) -> Plan:
    """Return the plan of step number ``step`` under a strategy, the same on every rank."""
    planner = Planner(
        config.heads,
        config.kv_heads,
        config.head_dim,
        dtype="float32",
        cluster=cluster("cpu", 1, config.ranks),
        strategy=strategy,
    )
    return planner(batch_lengths(config, step))


def run_demo(config: DemoConfig, console: Console) -> list[Result]:
    """Train on one process and under each strategy, with progress on ``console``, and return a result for each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flexcp.measure.ranks import RankPool

    columns = [
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    ]
    results: list[Result] = []
    with console.status(f"starting {config.ranks} ranks"):
        pool = RankPool(config.ranks)
    with pool, Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for name in ("one process", *config.strategies):
            task = progress.add_task(name, total=config.steps, loss="")

            def show_step(loss: float, task: Any = task) -> None:
                progress.update(task, advance=1, loss=f"loss {loss:.6f}")

            if name == "one process":
                losses, seconds = pool.run(train_alone, config, ranks=1, on_item=show_step)[0]
                results.append(Result(name, losses, seconds / config.steps * 1000))
            else:
                losses, seconds = pool.run(train_on_ranks, config, name, on_item=show_step)[0]
                results.append(_measured(config, name, losses, seconds, results[0].losses))
    return results


def _measured(config: DemoConfig, name: str, losses: list[float], seconds: float, expected: list[float]) -> Result:
    begin = time.perf_counter()
    plans = [make_plan(config, name, s) for s in range(config.steps)]
    planning = (time.perf_counter() - begin) * 1000 / config.steps
    moved = [int(p.bytes().sum() + p.bytes(backward=True).sum()) for p in plans]
    pairs = list(zip(losses, expected, strict=True))[:CHECKED_STEPS]
    return Result(
        name,
        losses,
        seconds / config.steps * 1000,
        planning,
        sum(moved) / len(plans),
        sum(imbalance(p.work()) for p in plans) / len(plans),
        sum(imbalance(p.placement.tokens) for p in plans) / len(plans),
        max(abs(a - b) / abs(b) for a, b in pairs),
    )


def agree(results: list[Result]) -> bool:
    """Return whether every strategy's losses equal those of the single process, within ``TOLERANCE``."""
    return all(r.error <= TOLERANCE for r in results)


def show(results: list[Result], config: DemoConfig, console: Console) -> None:
    """Print the results as a table, with the meaning of its columns."""
    from rich.table import Table

    table = Table(
        title=f"A small GPT, {config.tokens} tokens a step in long-tailed documents, {config.steps} steps, "
        f"{config.ranks} CPU ranks"
    )
    for column in (
        "run",
        "last loss",
        "loss error",
        "bytes a layer",
        "compute max/mean",
        "tokens max/mean",
        "ms a step",
    ):
        table.add_column(column, justify="left" if column == "run" else "right")
    for r in results:
        alone = r is results[0]
        table.add_row(
            r.name,
            f"{r.losses[-1]:.6f}",
            "" if alone else f"{r.error:.1e}",
            "" if alone else size(r.bytes),
            "" if alone else f"{r.compute_imbalance:.2f}",
            "" if alone else f"{r.token_imbalance:.2f}",
            f"{r.step_ms:.0f}",
        )
    console.print(table)
    console.print(
        f"Loss error: largest relative difference to one process over the first {CHECKED_STEPS} steps, at most "
        f"{TOLERANCE:g} allowed. Bytes: attention forward and backward, mean over steps. Times are of ranks that share "
        "this machine's cores."
    )


Run = tuple[list[float], float]
"""What a training function returns: (losses, seconds of all steps)."""

# --- functions that run on the ranks ----------------------------------------------------------------------------------


def train_alone(group: dist.ProcessGroup, config: DemoConfig) -> Generator[float, None, Run]:
    """Train on one process with torch's attention; yields each loss, returns (losses, seconds of all steps)."""
    import torch

    from flexcp.executor.bind import DEFAULT_TIMEOUT
    from flexcp.executor.exchange.collectives import Collectives
    from flexcp.executor.local_rows import next_tokens, token_mean_loss
    from flexcp.train.update import update

    model, optimizer = _model(config)
    losses, seconds = [], 0.0
    for step in range(config.steps):
        lengths = batch_lengths(config, step)
        batch = make_batch(lengths, causal())
        tokens = phrases(step, lengths, model.config.vocabulary)
        positions = torch.cat([torch.arange(n) for n in lengths])
        labels = next_tokens(tokens, batch, -100)

        def attend(q: Tensor, k: Tensor, v: Tensor, sizes: list[int] = lengths) -> Tensor:
            parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
            return torch.cat([_torch_attention(*part) for part in parts])

        begin = time.perf_counter()
        loss = token_mean_loss(model(tokens, positions, attend), labels, Collectives(None, DEFAULT_TIMEOUT), -100)
        update(optimizer, loss, None)
        seconds += time.perf_counter() - begin
        losses.append(float(loss.detach()))
        yield losses[-1]
    return losses, seconds


def train_on_ranks(group: dist.ProcessGroup, config: DemoConfig, strategy: str) -> Generator[float, None, Run]:
    """Train this rank's share under a strategy; yields each batch's loss, returns (losses, seconds of all steps)."""
    import torch.distributed as dist

    from flexcp.executor.attention import attention
    from flexcp.executor.bind import bind
    from flexcp.executor.step import Step
    from flexcp.train.update import total_loss, update

    model, optimizer = _model(config)
    losses, seconds = [], 0.0
    for number in range(config.steps):
        plan = make_plan(config, strategy, number)
        step = bind(plan, group)
        tokens = phrases(number, plan.batch.lengths.tolist(), model.config.vocabulary)
        local, labels = step.shard(tokens), step.labels(tokens)

        def attend(q: Tensor, k: Tensor, v: Tensor, step: Step = step) -> Tensor:
            out = attention(q, k, v, step)
            assert not isinstance(out, tuple)
            return out

        dist.barrier(group)
        begin = time.perf_counter()
        loss = step.loss(model(local, step.positions, attend), labels)
        update(optimizer, loss, step.group)
        seconds += time.perf_counter() - begin
        losses.append(total_loss(loss, step.group))
        yield losses[-1]
    return losses, seconds


def _model(config: DemoConfig) -> tuple[Any, Any]:
    import torch

    from flexcp.train.gpt import Gpt, GptConfig

    torch.manual_seed(0)
    model = Gpt(GptConfig(heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim))
    return model, torch.optim.AdamW(model.parameters(), lr=config.learning_rate, eps=1e-6)


def _torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import torch

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
