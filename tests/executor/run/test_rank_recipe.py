"""Proves that what a planner process derives from a plan for a rank equals what the rank derives itself, also after its
transfer through a pipe.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import flexcp
from flexcp.executor import step_tables
from flexcp.executor.exchange import pass_exchanges
from flexcp.executor.exchange.pass_exchanges import Passes
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.rank_recipe import rank_recipe
from flexcp.executor.run.recipe_bytes import pack_recipe, unpack_recipe
from flexcp.executor.step import Step
from flexcp.plan.plan import Plan

LENGTHS = [700, 31, 1, 256, 90, 512]
TYPES = types_of(torch.empty(0, dtype=torch.float64))


def plan_of(strategy: str, **options: Any) -> Plan:
    machine = flexcp.cluster("h100", 2, 2)
    planner = flexcp.Planner(8, 4, 16, dtype="float64", cluster=machine, strategy=strategy)
    return planner(LENGTHS, masks={"full": (flexcp.causal(), 2), "near": (flexcp.window(63), 1)}, **options)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and b.flags.c_contiguous and np.array_equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("packing", ["fields", "rows"])
@pytest.mark.parametrize("strategy", ["blocks", "zigzag", "ulysses:2"])
def test_recipes_come_back_as_they_were(strategy: str, packing: str) -> None:
    plan = plan_of(strategy)
    made = rank_recipe(plan, 1, packing)
    assert same(made, unpack_recipe(pack_recipe(made)))


def test_equal_arrays_travel_once() -> None:
    found = unpack_recipe(pack_recipe(rank_recipe(plan_of("zigzag"), 1, "fields")))
    ways = [[w.work.slices for slot in found.passes[0, way].launches for w in slot] for way in (False, True)]
    assert any(a is b for a in ways[0] for b in ways[1])


def test_a_step_with_a_recipe_derives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.random.default_rng(0).permutation(sum(LENGTHS))
    for options in ({}, {"layout": [order[r::4].tolist() for r in range(4)]}):
        plan = plan_of("blocks", **options)
        plain = Step(Passes(plan, 2, None, timedelta(seconds=9)))
        recipe = unpack_recipe(pack_recipe(rank_recipe(plan, 2, "fields")))
        ready = Step(Passes(plan, 2, None, timedelta(seconds=9), calls=recipe.calls), recipe)
        keys = [(mask, backward) for mask in range(2) for backward in (False, True)]
        wanted = [plain.prepared(*key, "cpu", TYPES) for key in keys]
        with monkeypatch.context() as patch:
            for module, name in (
                (step_tables, "rank_program"),
                (step_tables, "pass_recipe"),
                (step_tables, "rank_rows"),
            ):
                patch.setattr(module, name, None)
            patch.setattr(pass_exchanges, "rank_calls", None)
            patch.setattr(Plan, "memory", None)
            found = [ready.prepared(*key, "cpu", TYPES) for key in keys]
            calls = [ready.passes.calls(*key) for key in keys]
            rows = (ready.tables.tokens, ready.tables.positions, ready.tables.order)
        assert calls == [plain.passes.calls(*key) for key in keys]
        assert torch.equal(rows[0], plain.tables.tokens) and torch.equal(rows[1], plain.tables.positions)
        assert (rows[2] is None) == (plain.tables.order is None)
        assert rows[2] is None or torch.equal(rows[2], plain.tables.order)  # type: ignore[arg-type]
        assert rows[2] is not None or not options
        for a, b in zip(wanted, found, strict=True):
            names = ("program", "work", "opens", "closes", "sends", "receives")
            assert all(same(getattr(a, name), getattr(b, name)) for name in names)


def test_calls_that_were_asked_for_are_not_the_recipes() -> None:
    plan = plan_of("blocks")
    recipe = rank_recipe(plan, 0)
    asked = pass_exchanges.CallSettings(rounds_per_call=1)
    passes = Passes(plan, 0, None, timedelta(seconds=9), settings=asked, calls=recipe.calls)
    assert passes.calls(0, False) == Passes(plan, 0, None, timedelta(seconds=9), settings=asked).calls(0, False)


def test_a_recipe_of_another_plan_is_refused() -> None:
    planner = flexcp.Planner(4, 2, 8, cluster=flexcp.cluster("cpu", 1, 1))
    one, other = planner([9, 4]), planner([9, 5])
    with pytest.raises(ValueError, match=f"recipe= is of rank 0 and plan {other.hash[:12]}.*leave it out"):
        flexcp.bind(one, recipe=rank_recipe(other, 0))
    assert flexcp.bind(one, recipe=rank_recipe(one, 0)).local_tokens == 13


def test_deriving_a_recipe_needs_no_torch() -> None:
    code = "import sys, flexcp.data.planning.plan_orders; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
