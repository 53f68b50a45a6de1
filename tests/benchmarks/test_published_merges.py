"""Tests of the simulated cost of merging blocks in ring-flash-attention: the bytes that its code reads and writes, and
the ring steps of a simulation that this cost is added to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import published
from flexcp.simulator.slot_work import slot_ns, slot_work
from lib.published_figures import Figure, parse_figure
from published_merges import Merges, Price, is_step_by_step, with_merges

ONE = Merges(out=1000, lse=100, kv=400, model=2, accumulator=4, masked=False)
SEVERAL = replace(ONE, masked=True)
FLOAT32 = 4
BFLOAT16 = 2


def figure(**changed: Any) -> Figure:
    values = {
        "source": "a table",
        "system": "a ring",
        "cluster": "h100:1x4",
        "heads": [8, 2, 64],
        "lengths": [8192],
        "mask": "causal",
        "method": "zigzag:4",
        "direction": "forward",
        "value": 1.5,
        "unit": "ms",
        "executor": "ring-flash-attention",
    }
    return parse_figure({**values, **changed})


def added(numbers: int) -> int:
    """Bytes of adding a block's bfloat16 result to a float32 accumulator, which is read and written."""
    return numbers * (BFLOAT16 + FLOAT32 + FLOAT32)


def moved(numbers: int, each: int) -> int:
    """Bytes of copying: each number is read, and written to another place."""
    return numbers * 2 * each


def test_a_merge_reads_the_block_and_reads_and_writes_what_is_there() -> None:
    lse = 3 * FLOAT32 * 100
    assert ONE.plain(False) == Price(added(1000) + lse, 2) == ONE.all_rows(False)
    assert SEVERAL.all_rows(False).size == ONE.all_rows(False).size + moved(200, BFLOAT16), "half of k and v gathered"
    half = added(500) + lse // 2
    assert ONE.later_half(False).size == half + moved(500 + 50, FLOAT32), "put back"
    assert SEVERAL.later_half(False).size == half + 2 * moved(500 + 50, FLOAT32), "gathered, and put back"
    assert ONE.first(False).size == ONE.end(False).size == 1000 * (BFLOAT16 + FLOAT32)


def test_gradients_are_added_in_float32() -> None:
    assert ONE.plain(True).size == added(1000 + 400)
    assert ONE.all_rows(True).size == added(1000 + 200) and ONE.later_half(True).size == added(500 + 400)
    masked = moved(200, BFLOAT16) + 2 * moved(200, FLOAT32)
    assert SEVERAL.all_rows(True).size == ONE.all_rows(True).size + masked
    assert SEVERAL.later_half(True).size == ONE.later_half(True).size + 2 * moved(500, FLOAT32)
    assert ONE.first(True).size == ONE.end(True).size == 1400 * (BFLOAT16 + FLOAT32)
    assert ONE.begin(True) == Price() and SEVERAL.begin(True).size == 3 * moved(500, BFLOAT16)
    assert ONE.begin(False).size == moved(400, BFLOAT16)
    assert SEVERAL.begin(False).size == ONE.begin(False).size + moved(500, BFLOAT16)


@pytest.mark.parametrize(("way", "all_rows", "later_half"), [(False, 4, 6), (True, 12, 4)])
def test_every_use_of_the_mask_starts_a_kernel_and_is_waited_for(way: bool, all_rows: int, later_half: int) -> None:
    assert SEVERAL.all_rows(way).starts - ONE.all_rows(way).starts == all_rows
    assert SEVERAL.later_half(way).starts - ONE.later_half(way).starts == later_half


def test_a_price_is_bytes_over_speed_and_starts() -> None:
    assert Price(2000, 3).ns(mbps=1000, kernel_ns=5) == 2000 + 15
    assert Price(1, 1) + Price(2, 3) == Price(3, 4)


@pytest.mark.parametrize("method", ["ring:4", "zigzag:4"])
@pytest.mark.parametrize("backward", [False, True])
def test_merges_are_in_the_steps_that_have_them(method: str, backward: bool) -> None:
    setting = published.Setting(figure(method=method, lengths=[4096, 2048]))
    found = setting.experiment.compare([4096, 2048], [method]).rows[0].simulation
    assert found is not None
    plan = found.plan
    work, cost = slot_work(plan, 0, backward), plan.cost
    more = with_merges(plan, cost, method, 1_000_000)(0, backward) - slot_ns(work, plan, cost, backward)
    end = np.zeros_like(more)
    tokens = 6144 // 4
    numbers = tokens * 8 * 64, tokens * 8, tokens * 2 * 2 * 64
    merges = Merges(*numbers, model=2, accumulator=4, masked=method == "zigzag:4")
    end[:, -1] = merges.end(backward).ns(1_000_000, cost.kernel_ns)
    steps = more - end
    for rank in range(4):
        for step in range(1, 4):
            price = merges.all_rows(backward) if step <= rank else merges.later_half(backward)
            if method == "ring:4":
                price = merges.plain(backward) if step <= rank else Price()
            assert steps[rank, step] == price.ns(1_000_000, cost.kernel_ns)
    assert not steps[:, 4:].any()
    assert (steps[:, 0] == (merges.begin(backward) + merges.first(backward)).ns(1_000_000, cost.kernel_ns)).all()


def test_an_executor_replaces_copies_of_messages_by_merges() -> None:
    ran = published.Setting(figure()).simulate("zigzag:4")[0]
    assert not any(copies.any() for way in ran.passes[0] for copies in way.model.copies)
    slower, plain = (
        published.simulate(1, figure(executor=x) if x else unmerged()).simulated for x in ("ring-flash-attention", "")
    )
    assert slower is not None and plain is not None and slower > plain


def unmerged() -> Figure:
    return replace(figure(), executor=None)


def test_only_rings_have_this_executor() -> None:
    assert is_step_by_step("zigzag:8") and not is_step_by_step("zigzag") and not is_step_by_step("usp:2,4")
    for wrong in ("allgather:4", "zigzag", ["ring:4", "usp:2,2"]):
        with pytest.raises(
            ValueError, match="field 'executor': ring-flash-attention is simulated with ring or zigzag and a degree"
        ):
            figure(method=wrong)
    with pytest.raises(
        ValueError, match="field 'executor': 'ring-flash' is not known: did you mean 'ring-flash-attention'"
    ):
        figure(executor="ring-flash")


def test_our_file_has_it_for_all_rings_of_that_library() -> None:
    for _, each in published.read_figures(published.FIGURES):
        is_theirs = each.system.startswith("ring-flash-attention") and all(map(is_step_by_step, each.method))
        assert (each.executor is not None) == is_theirs
