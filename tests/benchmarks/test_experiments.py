"""Tests of the simulated experiments on small samples: batches have the tokens asked for, sampled ratios lie in the
expected range, the same seed gives the same table, and the kernel models fitted on an H200 have the documented errors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flexcp.clusters import cluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def fresh(name: str) -> Any:
        for each in (name, "simulated"):
            monkeypatch.delitem(sys.modules, each, raising=False)
        return __import__(name)

    return fresh


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0])
def test_scaled_batches_have_their_tokens(load: Any, scale: float) -> None:
    lengths = load("simulated").scaled_lengths("longalign", 131_072, scale, 1)
    assert sum(lengths) == 131_072 and min(lengths) >= 1


def test_cells_hold_and_repeat(load: Any) -> None:
    dcp, blocks = load("dcp"), load("block_fcp")
    first = dcp.sample()
    assert first > 1.4 and dcp.sample() == first, "auto over a ring across slow links"
    assert 0.6 < blocks.sample() <= 1


def test_a_small_table_is_the_same_twice(load: Any) -> None:
    magi = load("magi")
    tables = [magi.weak_scaling(1, (1,), 2048) for _ in range(2)]
    assert tables[0] == tables[1] and tables[0][2].startswith("| 8 | ") and "(" in tables[0][2]


def test_network_cards_are_shared_in_dcps_setting(load: Any) -> None:
    dcp = load("dcp")
    assert dcp.MICRO.rules.ranks_per_nic == 2 and dcp.MICRO.cluster == cluster("a100", 4, 8)
    assert set(dcp.PUBLISHED) == {"longalign", "longtail"} and len(dcp.THEIR_STATIC) == 4


def test_both_models_are_judged_on_what_they_were_not_fitted_to(load: Any) -> None:
    """All measurements of the raw file are read. Prices by tile are off by at most 5 % (median) and 12 % (90th
    percentile), less than the prices that planners use.
    """
    fit = load("kernel_fit")
    raw = json.loads(fit.RAW.read_text())
    single = fit.singles(raw)
    assert [len(found) for found in single.values()] == [106, 106]
    # Measured plans that planners no longer make are skipped. When none is left, the raw file must be measured again.
    assert len(raw["plans"]) == 36 and fit.plan_slots(raw)
    rows = fit.rows(raw)
    stated, pairs, short, tiles, plans, longer = (errors for _, _, errors in rows)
    assert pairs.count + short.count == 24 and short.median > pairs.worst
    assert (tiles.count, longer.count) == (48, 34) and plans.count > 0
    assert max(tiles.median, plans.median) <= 0.05 and max(tiles.p90, plans.p90) <= 0.12
    assert tiles.p90 < pairs.p90 and plans.p90 < stated.p90 and longer.median < stated.median
    faster = fit.rows(json.loads(fit.CUTE.read_text()))
    analytic, fitted, _ = (errors for _, _, errors in faster)
    assert fitted.median < 0.1 < analytic.median  # the analytic model describes the kernel that runs without extras
    lines = fit.table({"hopper": rows, "fa4": faster})
    assert len(lines) == 11 and f"| {plans.count} | {plans.median:.1%} | {plans.p90:.1%} |" in lines[6]
