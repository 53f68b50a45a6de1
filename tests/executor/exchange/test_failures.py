"""Proves failures: when a rank dies, hangs, raises or makes different calls, every other rank soon raises an error that
says which rank was to blame and where.

The ranks are real processes in groups of their own, which are killed, stopped or made to misbehave at a chosen stage.
All groups run at the same time, because most of the time is spent waiting for the time limit.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flexcp
from flexcp.executor.exchange.transports import HostExchange
from flexcp.executor.step import Step
from flexcp.measure.local_store import joined_store, kept_store
from flexcp.measure.ranks import PRELOAD
from flexcp.plan.plan import Plan

RANKS = 4
LATENT = 8
LIMIT = 3.0
SLACK = 6.0  # extra seconds for a loaded machine


@dataclass(frozen=True)
class Report:
    """What a rank raised in its first and in its second attempt, and the seconds until the first error."""

    error: str
    message: str
    seconds: float
    next_error: str


@dataclass
class Group:
    """The processes of one running scenario, and the pipes to them."""

    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def reports(self, without: int | None) -> dict[int, Report]:
        """Return the reports of all ranks except ``without``, then kill all processes."""
        found = {}
        try:
            for rank, pipe in enumerate(self.pipes):
                if rank != without:
                    assert pipe.poll(LIMIT + SLACK + 20), f"rank {rank} hangs"
                    found[rank] = pipe.recv()
        finally:
            for process in self.processes:
                process.kill()
        return found


# --- what a rank does -------------------------------------------------------------------------------------------------


def sabotaged(wanted: Callable[[HostExchange, int], bool], act: Callable[[], None]) -> type[HostExchange]:
    """Return an exchange class that calls ``act`` before it posts a stage for which ``wanted`` is true."""

    class Sabotaged(HostExchange):
        def post(self, stage: int, sends: Any, receives: Any) -> None:
            if wanted(self, stage):
                act()
            super().post(stage, sends, receives)

    return Sabotaged


def layer(step: Step, mask: str | None = None, backward: bool = True) -> None:
    shape, mask = step.plan.shape, mask or step.plan.batch.masks[0].name
    if shape.latent is not None:
        q, latent = (torch.ones(step.local_tokens, *n, dtype=torch.float64) for n in ((shape.heads, LATENT), (LATENT,)))
        out = flexcp.latent_attention(q.requires_grad_(), latent.requires_grad_(), as_heads, [], step, mask=mask)
        if backward:
            out.sum().backward()
        return
    q, k, v = (
        torch.ones(step.local_tokens, h, shape.head_dim, dtype=torch.float64).requires_grad_()
        for h in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    out = flexcp.attention(q, k, v, step, mask=mask)
    if backward:
        assert isinstance(out, torch.Tensor)
        out.sum().backward()


def as_heads(latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of one head, both of them the latent itself."""
    return latent[:, None], latent[:, None]


def fail() -> None:
    raise ValueError("the cat sat on it")


def killed(step: Step, rank: int) -> None:
    if rank == 2:
        step.passes.host_exchange = sabotaged(
            lambda x, stage: x.this.number == 3 and stage == 2, lambda: os.kill(os.getpid(), signal.SIGKILL)
        )
    for _ in range(3):
        layer(step)


def killed_in_backward(step: Step, rank: int) -> None:
    if rank == 1:
        step.passes.host_exchange = sabotaged(
            lambda x, stage: x.this.backward and stage == 2, lambda: os.kill(os.getpid(), signal.SIGKILL)
        )
    layer(step)


def stopped(step: Step, rank: int) -> None:
    if rank == 2:
        step.passes.host_exchange = sabotaged(
            lambda x, stage: x.this.number == 3 and stage == 2, lambda: os.kill(os.getpid(), signal.SIGSTOP)
        )
    for _ in range(3):
        layer(step)


def stopped_with_gradients(step: Step, rank: int) -> None:
    if rank == 2:
        step.passes.host_exchange = sabotaged(
            lambda x, stage: x.this.backward and stage == 10, lambda: os.kill(os.getpid(), signal.SIGSTOP)
        )
    layer(step)


def stopped_between_calls(step: Step, rank: int) -> None:
    if rank == 2:
        step.passes.host_exchange = sabotaged(lambda x, stage: stage == 2, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    layer(step)


def store_stopped(step: Step, rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    layer(step)


def failed_itself(step: Step, rank: int) -> None:
    if rank == 3:
        step.passes.host_exchange = sabotaged(lambda x, stage: stage == 2, fail)
    layer(step)


def other_masks(step: Step, rank: int) -> None:
    for mask in ("narrow", "wide") if rank == 1 else ("wide", "narrow"):
        layer(step, mask, backward=False)


def one_call_less(step: Step, rank: int) -> None:
    for _ in range(1 if rank == 1 else 2):
        layer(step, backward=False)
    layer(step)


def gone_early(step: Step, rank: int) -> None:
    for _ in range(1 if rank == 1 else 2):
        layer(step)
    if rank == 1:
        time.sleep(60)  # alive, but makes no more calls


def rows(step: Step) -> torch.Tensor:
    return torch.ones(step.local_tokens, 3, dtype=torch.float64, requires_grad=True)


def stop(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def rolled(step: Step, rank: int) -> None:
    stop(rank)
    for shift in (-1, 1, -1, 1):
        step.roll(rows(step), shift)


def rolled_back(step: Step, rank: int) -> None:
    for shift in (-1, 1, -1, 1):
        result = step.roll(rows(step), shift).sum()
        stop(rank)
        result.backward()


def counted(step: Step, rank: int) -> None:
    stop(rank)
    step.loss(rows(step), torch.zeros(step.local_tokens, dtype=torch.int64), without_attention=True)


def gathered(step: Step, rank: int) -> None:
    stop(rank)
    step.gather(rows(step))


def gathered_back(step: Step, rank: int) -> None:
    result = step.gather(rows(step)).sum()
    stop(rank)
    result.backward()


EVERYBODY = [list(range(rank, 64, RANKS)) for rank in range(RANKS)]
"""A layout in which every rank holds tokens that each other rank holds under the plan."""


def laid_out(step: Step, rank: int) -> None:
    stop(rank)
    step.relayout(rows(step), EVERYBODY)


def restored_back(step: Step, rank: int) -> None:
    result = step.restore(step.relayout(rows(step), EVERYBODY), EVERYBODY).sum()
    stop(rank)
    result.backward()


def of_another_shape(step: Step, rank: int) -> None:
    shape = step.plan.shape
    if rank == 1 and not step.calls:
        q, k, v = (torch.ones(3, h, shape.head_dim, dtype=torch.float64) for h in (4, 4, 4))
        flexcp.attention(q, k, v, step, mask="wide")
    layer(step, "wide")


def rows_of_another_shape(step: Step, rank: int) -> None:
    step.gather(rows(step)[: 3 if rank == 1 else None])


@dataclass(frozen=True)
class Scenario:
    """What the ranks run, which of them is to blame, and the pattern that the other ranks' errors must match.

    ``reports`` says whether the blamed rank sends a report too, ``latent`` whether the plan is for latent attention.
    """

    run: Callable[[Step, int], None]
    blamed: int
    stage: str
    reports: bool = False
    latent: bool = False
    usable: bool = False
    """Whether the blamed rank may go on using its step, because it failed before anything was exchanged."""


SCENARIOS = {
    "killed": Scenario(killed, 2, r"in stage [12] of 4 of the forward of mask 'wide' \(pass 3 of step 2\)"),
    "killed in backward": Scenario(killed_in_backward, 1, r"in stage [12] of 6 of the backward of mask 'wide'"),
    "stopped": Scenario(stopped, 2, "in stage [12] of 4 of the forward"),
    "stopped between calls": Scenario(stopped_between_calls, 2, "in stage [12] of 4 of the forward"),
    "keeper of the store stopped": Scenario(store_stopped, 0, "in stage 1 of 4 of the forward"),
    "failed itself": Scenario(failed_itself, 3, r"ended with ValueError\('the cat sat on it'\)", reports=True),
    "other masks": Scenario(other_masks, 1, "mask 'narrow'.* the ranks made different calls", reports=True),
    "one call less": Scenario(
        one_call_less, 1, "in stage 1 of 6 of the backward.* the ranks made different calls", True
    ),
    "gone early": Scenario(gone_early, 1, "in stage 1 of 4 of the forward of mask 'wide'"),
    "stopped before a roll": Scenario(rolled, 2, r"in step\.roll \(call \d of step 2\)"),
    "stopped before the backward of a roll": Scenario(rolled_back, 2, r"in the backward of step\.roll \(call"),
    "stopped before a loss": Scenario(counted, 2, r"receive from rank 2 in step\.loss \(call 1"),
    "stopped before a gather": Scenario(gathered, 2, r"receive from rank 2 in step\.gather \(call 1"),
    "stopped before the backward of a gather": Scenario(gathered_back, 2, r"rank 2 in the backward of step\.gather"),
    "stopped before a relayout": Scenario(laid_out, 2, r"in step\.relayout \(call 1"),
    "stopped before the backward of a restore": Scenario(
        restored_back, 2, r"in the backward of step\.restore \(call 1"
    ),
    "a wrong shape": Scenario(
        of_another_shape, 1, r"Rank 1 says: attention ended with ValueError\('q has shape", True, usable=True
    ),
    "rows of a wrong shape": Scenario(
        rows_of_another_shape, 1, r"Rank 1 says: step.gather ended with ValueError\('rank 1 keeps", True, usable=True
    ),
    "latents stopped": Scenario(stopped, 2, r"in stage [12] of 4 of the forward .*\(pass 3", latent=True),
    "latents' gradients stopped": Scenario(
        stopped_with_gradients, 2, r"in stage (9|1\d) of 12 of the backward", latent=True
    ),
    "latents, one call less": Scenario(
        one_call_less, 1, "in stage 1 of 12 of the backward.* the ranks made different calls", True, True
    ),
}


def serve(name: str, rank: int, plan: Plan, pipe: Connection) -> None:
    """Run one rank of the scenario ``name`` and send its report."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patience = timedelta(seconds=60)
    if rank == 0:
        store = kept_store(patience)
        pipe.send(store.port)
    else:
        store = joined_store(pipe.recv(), patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=patience)
    layer(flexcp.bind(plan, dist.group.WORLD))  # warm-up: pays for everything that is slow the first time
    dist.barrier()
    calls = {"rounds_per_call": 1, "chunk_bytes": 256} if name == "stopped between calls" else {}
    step = flexcp.bind(plan, dist.group.WORLD, timeout=LIMIT, **calls)
    dist.barrier()
    step.prepare("cpu")
    dist.barrier()
    errors, begin = [], time.monotonic()
    for _ in range(2):
        try:
            SCENARIOS[name].run(step, rank)
        except Exception as error:
            errors.append((type(error).__name__, str(error), time.monotonic() - begin))
    pipe.send(Report(*errors[0], errors[1][1]) if len(errors) == 2 else Report("nothing", "", 0.0, ""))
    time.sleep(LIMIT + SLACK)  # keeps its sockets open: closing them would tell the others


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, Group]]:
    """Start all scenarios together."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    where = flexcp.cluster("cpu", 1, RANKS)
    common: dict[str, Any] = {"dtype": "float64", "cluster": where, "strategy": "ring"}
    planners = {False: flexcp.Planner(4, 4, 8, **common), True: flexcp.Planner(4, 1, LATENT, latent=LATENT, **common)}
    masks = {"wide": (flexcp.causal(), 1), "narrow": (flexcp.causal(), 1)}
    plans = {latent: planner([64], masks=masks) for latent, planner in planners.items()}
    found = {}
    for name, scenario in SCENARIOS.items():
        group, plan = Group(), plans[scenario.latent]
        found[name] = group
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(name, rank, plan, theirs), daemon=True)
            process.start()
            theirs.close()
            group.processes.append(process)
            group.pipes.append(ours)
    for group in found.values():
        port = group.pipes[0].recv()
        for pipe in group.pipes[1:]:
            pipe.send(port)
    yield found
    for group in found.values():
        for process in group.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_other_rank_raises_in_time_and_says_who_and_where(name: str, groups: dict[str, Group]) -> None:
    scenario = SCENARIOS[name]
    for rank, report in groups[name].reports(None if scenario.reports else scenario.blamed).items():
        assert report.seconds < LIMIT + SLACK
        if rank == scenario.blamed and report.error == "ValueError":
            assert scenario.usable or "this step is unusable since" in report.next_error
            continue  # the blamed rank raised its own error unchanged
        assert "this step is unusable since an earlier failure" in report.next_error
        assert report.error == "ExchangeError", report
        assert re.search(
            rf"(?i)^rank {rank} could not (send to|receive from) rank \d in (stage \d|.*step\.)", report.message
        )
        assert f"nothing within {0.75 * LIMIT:g} s (of {LIMIT:g} s" in report.message or "onnection" in report.message
        if name == "keeper of the store stopped" and f"rank {scenario.blamed} in" not in report.message:
            assert "the group's store does not answer" in report.message  # so the culprit is unknown
            continue
        assert re.search(scenario.stage, report.message), report.message
        assert re.search(rf"(?i)rank {scenario.blamed} (left no word|says)|^rank {scenario.blamed}", report.message)
