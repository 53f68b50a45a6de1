"""Tests of fits of the cost model: the parameters that synthetic times were made with are found again, errors are those
of samples that were held out, and calibrations are unchanged after saving and loading.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flexcp
from flexcp.calibration import Calibration, Errors, read_calibration
from flexcp.cost import NO_CONTENTION, CostModel, Model
from flexcp.measure.calibrate.calibrate import Measured, calibrated
from flexcp.measure.calibrate.fit import KernelFit, Sample, errors, fit_and_judge, fit_kernels, fit_link, split
from flexcp.measure.calibrate.kernels import KernelTask, sample_of
from flexcp.measure.calibrate.layers import LayerTimes
from flexcp.measure.calibrate.links import SIZES, LinkTimes
from flexcp.shape import Shape

TRUE = KernelFit(0.02, 0.06, 2048, 30_000.0)


def samples(noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(24):
        bare = Sample(f"s{i}", int(rng.integers(10**5, 10**8)), int(rng.integers(1, 500)), i % 2 == 1, 0.0)
        made.append(replace(bare, ns=TRUE.ns(bare) * float(1 + noise * rng.uniform(-1, 1))))
    return made


def test_a_fit_finds_what_made_the_times() -> None:
    found = fit_kernels(samples())
    assert found.tile_pairs == 2048
    assert (found.forward, found.backward, found.kernel_ns) == pytest.approx((0.02, 0.06, 30_000.0))
    assert fit_kernels(samples(), launch=False).kernel_ns == 0
    noisy = fit_kernels(samples(0.05))
    assert (noisy.forward, noisy.backward) == pytest.approx((0.02, 0.06), rel=0.05)
    with pytest.raises(ValueError, match="both directions; got 12"):
        fit_kernels([s for s in samples() if not s.backward])


@pytest.mark.parametrize(
    "name, tokens, short",
    [("docs64", 4096, True), ("docs64", 8192, False), ("docs16", 2048, False), ("full", 256, False)],
)
def test_documents_are_short_if_they_have_less_than_a_row_tile_in_the_mean(name: str, tokens: int, short: bool) -> None:
    assert sample_of(name, tokens, Shape(8, 2, 64, 64), False, 1.0).short == short


def test_on_a_gpu_short_documents_are_not_fitted_and_judged_separately() -> None:
    cheap = [replace(s, ns=s.ns / 3, short=True) for s in samples()[::4]]
    found, judged = fit_and_judge([*samples(), *cheap], gpu=True)
    assert found.tile_pairs == 2048 and found.forward == pytest.approx(0.02)
    assert judged["kernels"].worst < 1e-6 and judged["kernels, short documents"].median == pytest.approx(2.0)
    assert judged["kernels"].count + judged["kernels, short documents"].count == 10
    _, together = fit_and_judge([*samples(), *cheap], gpu=False)
    assert set(together) == {"kernels"} and together["kernels"].count == 10 and together["kernels"].worst > 0.1


def test_more_work_measured_as_faster_still_fits_positive_times() -> None:
    """Such times occur on a shared machine. With a launch cost above 0 in the fit, the time of a pair would be
    negative.
    """
    times = [(10**5, 900_000.0), (10**6, 500_000.0), (10**7, 100_000.0)]
    found = fit_kernels([Sample("s", pairs, 8, backward, ns) for pairs, ns in times for backward in (False, True)])
    assert min(found.forward, found.backward) > 0 and found.kernel_ns == 0


def test_links_and_errors() -> None:
    assert fit_link([1000, 10_000, 10**6], [6000, 15_000, 1_005_000]) == pytest.approx((5000, 1.0))
    assert fit_link([1000, 2000], [500, 1500])[0] == 0  # never negative
    assert errors([90, 100, 130], [100, 100, 100]) == Errors(3, 0.1, 0.26, 0.3)
    fitted, held = split(list(range(8)))
    assert held == [1, 4, 7] and fitted == [0, 2, 3, 5, 6]


def test_a_calibration_predicts_what_was_measured() -> None:
    shape, model = Shape(8, 8, 64, 64, "float32"), Model("m", 512, 1, 1024)
    layers = LayerTimes((64, 128, 256), (64e3, 128e3, 256e3), 777)
    links = LinkTimes(SIZES, tuple(20_000 + size * 0.5 for size in SIZES), 3, 20_000 + SIZES[0] * 0.5 + 8000)
    found = calibrated(Measured(50.0, samples(), layers, links), KernelTask(shape), model, "mine", "here")
    cost = found.cost
    machine = found.on(flexcp.cluster("cpu", 1, 4))
    assert (machine.intra_mbps, machine.latency_ns, cost.message_ns) == (2000, 20_000, 4000)
    # Efficiencies are rounded to whole per mille; apart from that, predicted times are the measured ones.
    for sample in samples():
        work = np.array([sample.pairs + sample.tiles * cost.row_tile_pairs])
        ns = (
            int(cost.attention_ns(work, shape, replace(machine, nodes=1, ranks_per_node=1), sample.backward)[0])
            + cost.kernel_ns
        )
        assert ns == pytest.approx(sample.ns, rel=0.01)
    assert int(replace(cost, model=model).linear_ns(np.array([100]), shape, machine)[0]) == pytest.approx(
        100e3, rel=0.01
    )
    assert int(cost.link_ns(np.array([10**6]), machine.intra_mbps)[0]) == pytest.approx(500_000)
    assert cost.token_bytes == 777 and cost.contention == NO_CONTENTION
    assert found.held_out["kernels"].worst < 1e-6 and found.held_out["kernels"].count == 8
    assert set(found.held_out) == {"kernels", "layers", "links"}


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    found = Calibration(CostModel("x", token_bytes=5), "here", {"gflops": 7}, {"kernels": Errors(3, 0.1, 0.2, 0.3)})
    path.write_text(json.dumps(found.to_json()))
    assert read_calibration(path) == found
    path.write_text(json.dumps(CostModel("bare").to_json()))
    assert read_calibration(path) == Calibration(CostModel("bare"))
    for wrong in ({"speeds": {"mph": 3}}, {"held_out": {"kernels": {"count": 3}}}):
        path.write_text(json.dumps({**found.to_json(), **wrong}))
        with pytest.raises(ValueError, match=r"mph|held_out"):
            read_calibration(path)
