"""Tests of ``Telemetry(check_every=...)``: correct results with every mask, and with various layouts and dtypes, pass;
wrong results raise on all ranks and name the row.

The check shares no code with kernels, programs or transfers, so a mistake in any of them is a mismatch. Each test
checks many rows, so that it does not depend on which rows are drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import HEADS, LENGTHS, TOKENS, kernel_forward, plan_for, qkv, sinks_of
from torch import Tensor

import flexcp
from flexcp.executor.exchange.transports import HostExchange
from flexcp.executor.kernels import Settings
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan
from flexcp.telemetry.sample import MismatchError, Row, chosen_rows, worst_row
from lib.matrix import MASKS

Call = dict[str, Any]


def on_rows(group: dist.ProcessGroup | None, plans: list[tuple[Plan, Call]]) -> list[Row]:
    """Return the row with the largest error, of every third row of each plan's batch, after an attention call."""
    found = []
    for plan, call in plans:
        step = flexcp.bind(plan, group)
        sinks = sinks_of(step) if call.get("sinks") else None
        q, k, v = qkv(step, call.get("size", 1.0))
        softcap = call.get("softcap")
        out, lse = flexcp.attention(q, k, v, step, sinks=sinks, softcap=softcap, return_lse=True)
        settings = Settings(q.shape[-1] ** -0.5, softcap)
        tokens = np.arange(0, plan.batch.tokens, 3)
        found.append(worst_row(step, 0, settings, (q, k, v), sinks, out, lse, tokens))
    return found


def on_check(group: dist.ProcessGroup, plan: Plan, wrong: dict[int, str], call: Call, folder: str) -> dict[str, Any]:
    """Run three calls with check_every=2; ``wrong`` says which mistake the kernel makes on which rank."""
    telemetry = flexcp.Telemetry(folder, check_every=2, check_rows=TOKENS, stall=None)
    step = flexcp.bind(plan, group, telemetry=telemetry)
    mistake = wrong.get(step.rank, "")

    def kernel(
        right: Any, q: Tensor, k: Tensor, v: Tensor, work: Any, settings: Settings, out: Tensor, lse: Tensor
    ) -> None:
        right(q, k * 1.1 if mistake == "keys" else k, v * 1.06 if mistake == "values" else v, work, settings, out, lse)
        if mistake == "scaled":
            out.mul_(1 + 1e-6)
        if mistake == "nan" and len(out):
            out[-1] = torch.nan
        if mistake == "lse":
            lse.add_(1e-3)

    done = 0
    with kernel_forward(kernel):
        try:
            for _ in range(3):
                flexcp.attention(*qkv(step), step, **call)
                done += 1
        except MismatchError as error:
            return {"done": done, "error": str(error), "notes": error.__notes__, "dumps": len(telemetry.dumps)}
    return {"done": done, "error": "", "dumps": len(telemetry.dumps)}


def test_rows_are_chosen_by_seed_and_call_alone() -> None:
    first = chosen_rows(1000, 4, 7, 3)
    np.testing.assert_array_equal(first, chosen_rows(1000, 4, 7, 3))
    assert len(set(first.tolist())) == 4
    assert first.tolist() != chosen_rows(1000, 4, 7, 4).tolist()
    assert first.tolist() != chosen_rows(1000, 4, 8, 3).tolist()
    assert chosen_rows(3, 10, 0, 0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_right_results_of_every_mask_pass(pool: RankPool, dtype: str) -> None:
    calls: list[Call] = [{}, {"softcap": 2.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True}]
    strategies = ("blocks", "zigzag", "usp:1,3", "ring")
    plans = [
        (plan_for(3, [make(n) for n in LENGTHS], strategies[i % 4], dtype), calls[(i // 2) % 4])
        for i, make in enumerate(MASKS.values())
    ]
    for (plan, call), worst in zip(plans, pool.run(on_rows, plans, ranks=3)[0], strict=True):
        assert worst.right, f"{plan} {call}: {worst}"


def test_right_results_pass_under_every_layout_and_size(pool: RankPool) -> None:
    maps = [np.random.default_rng(0).permutation(TOKENS)[r::4].tolist() for r in range(4)]
    plans: list[tuple[Plan, Call]] = [
        (plan_for(4, tokens="equal", pad_to=8), {}),
        (plan_for(4, layout="contiguous", dtype="float32"), {"size": 1e-3}),
        (plan_for(4, layout=maps, dtype="float32"), {"size": 30.0}),
        (plan_for(4, dtype="float16"), {"size": 1e-2}),
        (plan_for(4, lengths=[2, 1]), {"sinks": True}),
    ]
    for (plan, call), worst in zip(plans, pool.run(on_rows, plans, ranks=4)[0], strict=True):
        assert worst.right, f"{plan} {call}: {worst}"


def test_every_rank_sees_the_same_worst_row(pool: RankPool) -> None:
    answers = pool.run(on_rows, [(plan_for(3, dtype="float32"), {})], ranks=3)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("mistake", "dtype", "call"),
    [
        ("scaled", "float64", {}),
        ("keys", "bfloat16", {"softcap": 5.0}),
        ("values", "bfloat16", {}),
        ("nan", "float32", {}),
        ("lse", "float64", {}),
    ],
)
def test_one_rank_with_a_wrong_kernel_stops_all(
    pool: RankPool, tmp_path: Path, mistake: str, dtype: str, call: Call
) -> None:
    plan = plan_for(3, flexcp.full(), "ring", dtype)
    answers = pool.run(on_check, plan, {1: mistake}, call, str(tmp_path), ranks=3)
    for answer in answers:
        assert answer["done"] == 1, "the second call is the one that is checked"
        assert answer["error"] == answers[0]["error"]
        assert "kept by rank 1" in answer["error"]
        assert "row " in answer["error"] and " of document " in answer["error"] and "head " in answer["error"]
        assert plan.hash[:12] in answer["error"]
        assert answer["dumps"] == 1
        assert "flexcp verify @" in answer["notes"][0]
    assert len(list(tmp_path.glob("flexcp-dump-*.json"))) == 3


class Corrupting(HostExchange):
    """A transport that flips a bit in the exponent of one number of every message that it sends."""

    def send(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        changed = message.clone()
        if len(changed) >= 8:
            changed[6] ^= 0x10
        self.kept = [*getattr(self, "kept", []), changed]  # must live until it has been sent
        return super().send(changed, peer, tag)


def on_corruption(group: dist.ProcessGroup, plan: Plan, folder: str) -> dict[str, Any]:
    """Run two calls, of which the second is checked, while rank 0 sends corrupted messages."""
    telemetry = flexcp.Telemetry(folder, check_every=2, check_rows=TOKENS, stall=None)
    step = flexcp.bind(plan, group, telemetry=telemetry)
    inputs = qkv(step)
    if step.rank == 0:
        step.passes.host_exchange = Corrupting
    done = 0
    try:
        for _ in range(2):
            flexcp.attention(*inputs, step)
            done += 1
    except MismatchError as error:
        return {"done": done, "error": str(error)}
    return {"done": done, "error": ""}


def test_a_message_whose_bytes_were_changed_on_its_way_stops_all(pool: RankPool, tmp_path: Path) -> None:
    """Transports have no checksums, so only ``check_every`` finds such an error."""
    answers = pool.run(on_corruption, plan_for(3, flexcp.full(), "ring"), str(tmp_path), ranks=3)
    for answer in answers:
        assert answer == answers[0] and answer["done"] == 1
        assert "kept by rank 1" in answer["error"] or "kept by rank 2" in answer["error"], "rank 0 got what was sent"


def test_right_results_go_on(pool: RankPool, tmp_path: Path) -> None:
    for answer in pool.run(on_check, plan_for(3), {}, {}, str(tmp_path), ranks=3):
        assert answer == {"done": 3, "error": "", "dumps": 0}
    assert not list(tmp_path.iterdir())


def test_nan_that_came_in_is_no_mismatch() -> None:
    plan = plan_for(1, flexcp.full())
    step = flexcp.bind(plan, telemetry=flexcp.Telemetry(check_every=1, check_rows=TOKENS))
    q, k, v = qkv(step)
    with torch.no_grad():
        v[3, 0, 1] = torch.nan
        k[40] = torch.nan
    out = flexcp.attention(q, k, v, step)
    assert isinstance(out, Tensor)
    assert out.isnan().any() and not out.isnan().all()


def test_a_row_without_keys_must_be_zero() -> None:
    """Errors are relative to the size of a row's values. A row without keys has no values, so it must be exactly 0."""
    mask = flexcp.from_slices(6, [(3, 6, 0, 6, None, None)])
    plan = plan_for(1, mask, lengths=[6])
    step = flexcp.bind(plan)
    q, k, v = qkv(step)
    out, lse = flexcp.attention(q, k, v, step, return_lse=True)
    settings = Settings(q.shape[-1] ** -0.5)

    def worst(out: Tensor) -> Row:
        return worst_row(step, 0, settings, (q, k, v), None, out, lse, np.arange(6))

    assert worst(out).right
    bad = out.detach().clone()
    bad[1, HEADS - 1, 0] = 1e-30
    found = worst(bad)
    assert not found.right
    assert (found.document, found.row, found.head, found.what) == (0, 1, HEADS - 1, "out")
