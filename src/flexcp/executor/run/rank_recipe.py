"""Rank recipe: everything that one rank needs to run a plan, derived ahead of time as integers, without torch.

A rank derives its programs, calls, memory and rows from the plan. That takes some milliseconds, or up to a sixth of a
second with many ranks. The result depends on nothing but the plan and the rank, so a planner process derives it right
after planning (:mod:`flexcp.data.planning.worker`), and the training process binds a step with it. A step without a
recipe derives the same things on first use.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.executor.exchange.rank_calls import Call, rank_calls
from flexcp.executor.run.pass_recipe import PassRecipe, pass_recipe
from flexcp.executor.run.rank_program import rank_program
from flexcp.executor.run.rank_rows import RankRows, rank_rows
from flexcp.plan.plan import Plan

Calls = tuple[tuple[Call, ...], ...]
"""For each stage of a pass, the calls that a rank makes in it."""


@dataclass(frozen=True)
class RankRecipe:
    """What one rank needs to run the plan whose hash is ``plan_hash``.

    ``passes`` and ``calls`` are keyed by (mask, backward), where ``mask`` is the mask's index in the plan; both are
    empty for latent attention, which has programs of its own. ``peers`` are the ranks with which this rank exchanges
    messages.
    """

    plan_hash: str
    rank: int
    passes: dict[tuple[int, bool], PassRecipe]
    calls: dict[tuple[int, bool], Calls]
    rows: RankRows
    peers: list[int]
    arena: int
    """Bytes of the arena, the buffer that all passes work in."""


def rank_recipe(plan: Plan, rank: int, packing: str | None = None) -> RankRecipe:
    """Derive the recipe of a rank; ``packing`` is passed to :func:`flexcp.executor.run.pass_recipe.pass_recipe`."""
    masks = (
        () if plan.shape.latent is not None else range(len(plan.programs))
    )  # latent attention has a program of its own
    which = [(mask, backward) for mask in masks for backward in (False, True)]
    return RankRecipe(
        plan.hash,
        rank,
        {key: pass_recipe(rank_program(plan, rank, *key), key[1], plan.shape, packing) for key in which},
        {key: rank_calls(plan, rank, *key) for key in which},
        rank_rows(plan, rank),
        plan.peers(rank),
        plan.memory(rank).arena,
    )
