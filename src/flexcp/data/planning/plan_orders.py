"""Plan orders: the loader's order to plan a step, and the planned parts that result.

An order is plain data that is sent to a planner process; fulfilling it is a pure function of the order and the planner.
A step has one part, or several micro-batches if the order allows them. Each plan comes with the *recipe* that this rank
derives from it (:mod:`flexcp.executor.run.rank_recipe`), so that the training process only has to do what needs the
device.

Between processes, plans travel as plan files, with their checks and hashes, and recipes as
:mod:`flexcp.executor.run.recipe_bytes`. Between ranks only plans travel: each rank derives its own recipe.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.run.rank_recipe import RankRecipe, rank_recipe
from flexcp.executor.run.recipe_bytes import pack_recipe, unpack_recipe
from flexcp.plan.file import load_plan, save_plan
from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]
PlannerLike = Callable[..., Plan]
PackedPart = tuple[list[int], bytes, bytes | None]
"""A part as plain values: numbers of its documents, plan file, and the bytes of the recipe (None without a recipe)."""


@dataclass(frozen=True)
class RecipeWish:
    """The rank for which recipes are derived, and how its messages will be packed.

    ``packing`` is ``"fields"`` (one field of a message after the other) or ``"rows"`` (by tables of rows, on CUDA).
    """

    rank: int
    packing: str


@dataclass(frozen=True)
class PlanOrder:
    """A step to plan.

    ``lengths`` and ``arguments`` are the arguments of the planner's call, ``micro_batches`` says that the step may be
    split into micro-batches, and ``speeds`` are the speeds of ranks in per mille (None: the planner's own).
    """

    lengths: Ints
    arguments: dict[str, Any] = field(default_factory=dict)
    micro_batches: bool = False
    speeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PlannedPart:
    """A planned batch or micro-batch: the numbers of its documents in the step, its plan, and this rank's recipe.

    A recipe is what a rank derives from a plan to run it (:mod:`flexcp.executor.run.rank_recipe`); None if it is
    derived later.
    """

    documents: list[int]
    plan: Plan
    recipe: RankRecipe | None = None


def fulfil(planner: PlannerLike, order: PlanOrder, wish: RecipeWish | None) -> list[PlannedPart]:
    """Plan a step and return its parts, one or several micro-batches; without a ``wish`` they have no recipes."""
    asked: Any = planner  # the loader has checked that the planner has these methods
    if order.speeds is not None:
        asked = asked.with_speeds(order.speeds)
    if order.micro_batches:
        found = asked.micro_batches(order.lengths, **order.arguments)
    else:
        found = [(list(range(len(order.lengths))), asked(order.lengths, **order.arguments))]
    return [PlannedPart(documents, plan, _recipe(plan, wish)) for documents, plan in found]


def with_recipes(parts: list[PlannedPart], wish: RecipeWish | None) -> list[PlannedPart]:
    """Return the same parts with the recipes that ``wish`` describes; None for no recipes."""
    return [PlannedPart(part.documents, part.plan, _recipe(part.plan, wish)) for part in parts]


def _recipe(plan: Plan, wish: RecipeWish | None) -> RankRecipe | None:
    """Derive the recipe that ``wish`` describes from a plan; None without a wish."""
    return None if wish is None else rank_recipe(plan, wish.rank, wish.packing)


def packed(parts: list[PlannedPart]) -> list[PackedPart]:
    """Return parts as plain values, to be sent between the processes of a rank."""
    return [
        (part.documents, save_plan(part.plan), None if part.recipe is None else pack_recipe(part.recipe))
        for part in parts
    ]


def unpacked(parts: list[PackedPart]) -> list[PlannedPart]:
    """Return the parts from which :func:`packed` made these plain values."""
    return [
        PlannedPart(documents, load_plan(plan), None if recipe is None else unpack_recipe(recipe))
        for documents, plan, recipe in parts
    ]


def shared_bytes(parts: list[PlannedPart]) -> bytes:
    """Return parts without their recipes as bytes, to be sent between ranks.

    They are the length of a head (8 bytes), the head as JSON, and the plan files. The head has the documents and the
    size of the plan file of each part.
    """
    plans = [save_plan(part.plan) for part in parts]
    head = json.dumps([[part.documents, len(plan)] for part, plan in zip(parts, plans, strict=True)]).encode()
    return b"".join([struct.pack("<Q", len(head)), head, *plans])


def from_shared_bytes(data: bytes) -> list[PlannedPart]:
    """Return the parts that :func:`shared_bytes` wrote, which have no recipes."""
    size = struct.unpack_from("<Q", data)[0]
    at, found = 8 + size, []
    for documents, length in json.loads(data[8:at]):
        found.append(PlannedPart(documents, load_plan(data[at : at + length])))
        at += length
    return found
