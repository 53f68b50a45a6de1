"""Tests of calibration on real ranks: kernels, layers and links are measured together and give a usable cost model. The
measured times themselves are not judged.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.cost import Model
from flexcp.measure.calibrate import layers
from flexcp.measure.calibrate.calibrate import calibrated, measure
from flexcp.measure.calibrate.kernels import KernelTask
from flexcp.measure.calibrate.layers import layer_times
from flexcp.measure.calibrate.links import link_times
from flexcp.measure.kernels.work import workload
from flexcp.measure.ranks import RankPool
from flexcp.shape import Shape

SHAPE = Shape(4, 2, 16, 16, "float32")
TASK = KernelTask(SHAPE, tokens=(96, 200), names=("causal", "full", "docs4"), repeats=1)
MODEL = Model("small", hidden=32, layers=1, feed_forward=64)


def test_two_ranks_measure_together(pool: RankPool) -> None:
    said: list[str] = []

    def run(function, *arguments):  # type: ignore[no-untyped-def]
        return pool.run(function, *arguments, ranks=2)

    found = measure(run, 2, TASK, MODEL, said.append)
    assert said == ["matrix products", "attention kernels", "the rest of a layer", "links"]
    assert len(found.samples) == 2 * 3 * 2 and all(s.ns > 0 for s in found.samples)
    first = found.samples[0]
    assert (first.pairs, first.tiles) == (workload("causal", 96).pairs() * 4, 4)
    result = calibrated(found, TASK, MODEL, "mine", "two ranks")
    assert result.cost.forward_efficiency >= 1 and result.speeds["intra_mbps"] >= 1
    assert {name: e.count for name, e in result.held_out.items()} == {"kernels": 4, "layers": 2, "links": 2}


def test_links_need_somebody(pool: RankPool) -> None:
    with pytest.raises(RuntimeError, match="links need at least 2 ranks"):
        pool.run(link_times, ranks=1)


def test_kept_bytes_are_counted_once() -> None:
    dist_group: dist.ProcessGroup | None = None
    found = layer_times(dist_group, SHAPE, MODEL, "cpu", (8,), repeats=1)
    # Numbers kept of a token, four bytes each: x before and after attention (32 each), the output of attention (a view
    # of qkv: 64 + 64), gate and value (128), the result of silu and the product (64 each), out (64) and LSE (4).
    kept = 32 + 32 + (64 + 64) + 128 + 64 + 64 + 64 + 4
    assert found.token_bytes == pytest.approx(4 * kept, rel=0.01)
    assert torch.is_grad_enabled()


def test_layers_are_measured_on_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU multiplies equal numbers with less power, and so at a higher clock than in training."""
    spread: list[float] = []

    def recorded(x: Tensor, weights: list[Tensor], out_size: int, real: Any = layers._layer) -> Tensor:
        spread.extend(float(each.detach().std()) for each in (x, *weights))
        out: Tensor = real(x, weights, out_size)
        spread.append(float(out.detach().std()))
        if out.requires_grad:
            out.register_hook(lambda gradient: spread.append(float(gradient.std())))
        return out

    monkeypatch.setattr(layers, "_layer", recorded)
    monkeypatch.setattr(layers, "_kept_bytes", lambda *_: 0)
    layer_times(None, SHAPE, MODEL, "cpu", (64,), repeats=1)
    assert len(spread) == 2 * (1 + 4 + 1 + 1) and min(spread) > 0.05 and max(spread) < 4
