"""Plan orders: what the loader wants planned for a step, and the parts that come of it.

An order is plain data that travels to a planner process, and fulfilling it is a pure function of the order and the
planner. A step has one part, or several micro-batches where the order says so. With every plan comes what this rank
derives of it (its *recipe*, :mod:`flexcp.executor.run.rank_recipe`), so that the training process is left with what
needs the device.

Between processes plans travel as plan files, with their checks and their hash; recipes as
:mod:`flexcp.executor.run.recipe_bytes` has them. Between ranks only plans travel: each derives its own recipe.
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
"""Documents, plan and recipe of a part."""


@dataclass(frozen=True)
class RecipeWish:
    """For which rank recipes are derived, and how its messages will be packed (``"fields"`` or ``"rows"``)."""

    rank: int
    packing: str


@dataclass(frozen=True)
class PlanOrder:
    """A step to plan: the planner's arguments, whether it may be cut into micro-batches, and the speeds of ranks in per
    mille where they are not the planner's own.
    """

    lengths: Ints
    arguments: dict[str, Any] = field(default_factory=dict)
    micro_batches: bool = False
    speeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PlannedPart:
    """A batch of its own: which documents of the step are in it, its plan,
    and what this rank derives of that where it was wished for.
    """

    documents: list[int]
    plan: Plan
    recipe: RankRecipe | None = None


def fulfil(planner: PlannerLike, order: PlanOrder, wish: RecipeWish | None) -> list[PlannedPart]:
    """The parts of a step."""
    asked: Any = planner  # the loader has made sure that it has what an order asks of it
    if order.speeds is not None:
        asked = asked.with_speeds(order.speeds)
    if order.micro_batches:
        found = asked.micro_batches(order.lengths, **order.arguments)
    else:
        found = [(list(range(len(order.lengths))), asked(order.lengths, **order.arguments))]
    return [PlannedPart(documents, plan, _recipe(plan, wish)) for documents, plan in found]


def with_recipes(parts: list[PlannedPart], wish: RecipeWish | None) -> list[PlannedPart]:
    """The same parts with recipes for this rank."""
    return [PlannedPart(part.documents, part.plan, _recipe(part.plan, wish)) for part in parts]


def _recipe(plan: Plan, wish: RecipeWish | None) -> RankRecipe | None:
    return None if wish is None else rank_recipe(plan, wish.rank, wish.packing)


def packed(parts: list[PlannedPart]) -> list[PackedPart]:
    """Parts as they travel between processes of a rank."""
    return [
        (part.documents, save_plan(part.plan), None if part.recipe is None else pack_recipe(part.recipe))
        for part in parts
    ]


def unpacked(parts: list[PackedPart]) -> list[PlannedPart]:
    """What :func:`packed` made plain values of."""
    return [
        PlannedPart(documents, load_plan(plan), None if recipe is None else unpack_recipe(recipe))
        for documents, plan, recipe in parts
    ]


def shared_bytes(parts: list[PlannedPart]) -> bytes:
    """Parts as they travel between ranks, without recipes: the length of a head, the head as JSON, and the plans."""
    plans = [save_plan(part.plan) for part in parts]
    head = json.dumps([[part.documents, len(plan)] for part, plan in zip(parts, plans, strict=True)]).encode()
    return b"".join([struct.pack("<Q", len(head)), head, *plans])


def from_shared_bytes(data: bytes) -> list[PlannedPart]:
    """What :func:`shared_bytes` wrote."""
    size = struct.unpack_from("<Q", data)[0]
    at, found = 8 + size, []
    for documents, length in json.loads(data[8:at]):
        found.append(PlannedPart(documents, load_plan(data[at : at + length])))
        at += length
    return found
