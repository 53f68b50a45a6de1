"""Bind: make a :class:`flexcp.Step` from a plan and this rank of a process group.

Before that, the ranks check that all of them hold the same plan.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from flexcp.executor.arguments import process_group, time_limit
from flexcp.executor.exchange.arena import Arena
from flexcp.executor.exchange.connect import Progress, connect
from flexcp.executor.exchange.pass_exchanges import NOTHING, Passes
from flexcp.executor.exchange.plan_agreement import agree
from flexcp.executor.exchange.rank_calls import CallSettings
from flexcp.executor.run.rank_recipe import RankRecipe
from flexcp.executor.step import Step
from flexcp.executor.step_watcher import Watcher
from flexcp.plan.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for the others, unless ``bind`` is told otherwise."""


def bind(
    plan: Plan,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    telemetry: Watcher | None = None,
    arena: Arena | None = None,
    rounds_per_call: int | None = None,
    chunk_bytes: int | None = None,
    progress: Progress | None = None,
    recipe: RankRecipe | None = None,
) -> Step:
    """Bind a plan to this rank of ``group``: a 1-D DeviceMesh axis, a ProcessGroup, or None for one rank.

    Every rank of the group calls this with the same plan. The ranks compare the plan's hash and their versions of
    flexcp through the group's store; if they differ, all ranks raise RuntimeError within ``timeout`` (seconds or
    timedelta), which is also the time limit of the step's exchanges. A plan whose cluster puts ranks of different hosts
    on one node, or that is for another number of ranks, raises ValueError. A plan that puts ranks of one host on
    different nodes is allowed, so that one machine can stand for several. ``telemetry``, a :class:`flexcp.Telemetry`,
    records what the step does. ``arena`` is the arena of an earlier step, ``step.arena``, whose memory is then used
    again.

    The plan says how messages are issued. ``rounds_per_call`` overrides that in every stage, and must be the same on
    all ranks: that many conflict-free rounds are posted at a time, in chunks of at most ``chunk_bytes``; with 0 all
    messages of a stage are posted at once (docs/communication.md). ``progress(done, all)`` is called with the number of
    connected peers while NCCL connects them; by default progress is shown on a terminal. ``recipe`` is what this rank
    derives from the plan, made ahead of time by the loader's planner processes; without it the step derives the same on
    first use.
    """
    calls = CallSettings(rounds_per_call, chunk_bytes)
    _check_bind(plan, telemetry, arena)
    limit = time_limit(timeout)
    with nullcontext() if telemetry is None else telemetry.binding(plan):
        step = _bound(plan, group, limit, calls, progress, recipe)
    step.telemetry, step.arena = telemetry, arena or step.arena
    return step


def cannot_bind(group: dist.ProcessGroup | None, reason: str, timeout: timedelta) -> None:
    """Tell the ranks of ``group`` that this rank has nothing to bind: their next bind raises RuntimeError.

    ``reason`` is for their message. It counts as a bind of this rank. If the group's store does not answer within
    ``timeout``, nobody is told.
    """
    if group is not None and dist.get_world_size(group) > 1:
        with suppress(ValueError, RuntimeError):  # agreeing on a mistake raises it here, too
            agree("", group, timeout, reason)


def _check_bind(plan: object, telemetry: object, arena: object) -> None:
    """Raise ValueError unless the arguments are a plan, a :class:`flexcp.Telemetry` or None, and an arena or None."""
    if not isinstance(plan, Plan):
        raise ValueError(f"bind takes a plan, made by a planner from lengths: planner([...]); got {plan!r}")
    if telemetry is not None and not hasattr(telemetry, "binding"):
        raise ValueError(f"telemetry= is a flexcp.Telemetry(...) or None; got {telemetry!r}")
    if arena is not None and not isinstance(arena, Arena):
        raise ValueError(f"arena= is that of an earlier step, step.arena, or None; got {arena!r}")


def _bound(
    plan: Plan,
    group: dist.ProcessGroup | DeviceMesh | None,
    limit: timedelta,
    calls: CallSettings,
    progress: Progress | None,
    recipe: RankRecipe | None,
) -> Step:
    """Agree with the other ranks on the plan, connect to this rank's peers (NCCL only), and make the step.

    ``limit`` is the time limit, ``calls`` the user's settings of how messages are posted. Raise ValueError if the plan
    is for another number of ranks than the group has.
    """
    ahead = NOTHING if recipe is None else recipe.calls
    if group is None:
        if plan.ranks != 1:
            raise ValueError(
                f"the plan is for {plan.ranks} ranks: bind it to a process group or a DeviceMesh axis of that size"
            )
        _check_recipe(recipe, plan, 0)
        return Step(Passes(plan, 0, None, limit, settings=calls, calls=ahead), recipe)
    ranks = process_group(group, "bind")
    size = dist.get_world_size(ranks)
    mistake = None
    if size != plan.ranks:
        mistake = (
            f"the plan is for {plan.ranks} ranks but the group has {size}; plan for a cluster of {size}, or bind to "
            f"the group, or the axis of a DeviceMesh, of the {plan.ranks} ranks that share the batch"
        )
    rank, number = dist.get_rank(ranks), 0
    _check_recipe(recipe, plan, rank)
    if size > 1:
        number = agree(plan.hash, ranks, limit, mistake, calls, plan.cluster)
        if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(ranks)):
            # The first NCCL call of a group needs all its ranks; the first exchange of a plan may not involve all.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=ranks)
            peers = plan.peers(rank) if recipe is None else recipe.peers
            connect(peers, ranks, torch.device("cuda"), limit, progress)
    elif mistake:
        raise ValueError(mistake)
    return Step(Passes(plan, rank, ranks if size > 1 else None, limit, number, calls, ahead), recipe)


def _check_recipe(recipe: RankRecipe | None, plan: Plan, rank: int) -> None:
    """Raise ValueError if the recipe was made from another plan, or for another rank."""
    if recipe is not None and (recipe.plan_hash, recipe.rank) != (plan.hash, rank):
        raise ValueError(
            f"recipe= is of rank {recipe.rank} and plan {recipe.plan_hash[:12]}, but this is rank {rank} and plan "
            f"{plan.hash[:12]}; leave it out, and the step derives its own"
        )
