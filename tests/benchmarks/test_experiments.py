"""Proves the experiments on samples: batches add up, cells hold, the same seed gives the same table, the H200 fit is what docs say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flexcp.clusters import cluster
from flexcp.measure.fit import KernelFit

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
    capped = load("dcp").capped("longalign", 16_384, 0)
    assert sum(capped) == 131_072 and max(capped) <= 16_384


def test_cells_hold_and_repeat(load: Any) -> None:
    dcp, blocks = load("dcp"), load("block_fcp")
    first = dcp.sample()
    assert first > 1.5 and dcp.sample() == first, "auto over a ring across slow links"
    assert 0.6 < blocks.sample() <= 1


def test_a_small_table_is_the_same_twice(load: Any) -> None:
    magi = load("magi")
    tables = [magi.weak_scaling(1, (1,), 2048) for _ in range(2)]
    assert tables[0] == tables[1] and tables[0][2].startswith("| 8 | ") and "(" in tables[0][2]


def test_network_cards_are_shared_in_dcps_setting(load: Any) -> None:
    dcp = load("dcp")
    assert dcp.MICRO.rules.ranks_per_nic == 2 and dcp.MICRO.cluster == cluster("a100", 4, 8)
    assert set(dcp.PUBLISHED) == {"longalign", "longtail"} and len(dcp.THEIR_STATIC) == 4


def test_the_fit_to_h200_kernels(load: Any) -> None:
    """Every row of the measured table is read, and a kernel that costs what the model says is fitted to the rounding of its table."""
    fit = load("kernel_fit")
    assert len(fit.samples("hopper", fit.KERNELS.read_text())) == 22
    truth = KernelFit(forward=0.00083, backward=0.0026, tile_pairs=32_768, kernel_ns=50_000)
    lines = []
    for title, name in fit.NAMES.items():
        work = fit.workload(name, 16_384)
        tiles = sum(-(-n // fit.TILE_ROWS) for n in work.lengths) * fit.SHAPE.heads
        each = [fit.Sample(name, work.pairs() * fit.SHAPE.heads, tiles, way, 1.0) for way in (False, True)]
        flops = [(10 if s.backward else 4) * s.pairs * fit.SHAPE.head_dim / 1000 for s in each]
        forward, backward = (f / truth.ns(s) for f, s in zip(flops, each, strict=True))
        lines.append(f"| 16,384 | {title} | {forward:.0f} (80 %) / {backward:.0f} | - | - | - |")
    errors, signed = fit.left_out(fit.samples("hopper", "\n".join(lines)))
    assert len(signed) == 16
    assert errors.worst < 0.02


def test_the_table_of_fits_holds_the_errors_left_out(load: Any) -> None:
    fit = load("kernel_fit")
    errors, _ = fit.left_out(fit.samples("hopper", fit.KERNELS.read_text()))
    lines = fit.table()
    assert len(lines) == 8 and f"{errors.median:.1%} | {errors.p90:.1%}" in lines[4]
