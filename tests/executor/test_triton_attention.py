"""Proves that attention runs the Triton kernel and the GPU's row packing correctly, on real ranks with small plans, in
Triton's interpreter on the CPU.

Applies the rule of ``flexcp verify``: float32 results within twice the reference kernel's own error, with softcap,
sinks, an LSE gradient, rows without keys, and head sizes that are not powers of two. Skipped where Triton is not
installed. One pool of ranks runs all cases, because its ranks must choose the interpreter before they import a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import flexcp
from flexcp.executor import attention
from flexcp.executor.run import prepared
from flexcp.executor.run.message_layout import Types
from flexcp.masks import Mask
from flexcp.measure.ranks import RankPool
from flexcp.measure.verify import Options, Verdict, verify_on
from flexcp.plan.plan import Plan
from triton_interpreter import interpreting_pool

GAPS = flexcp.from_slices(60, [(20, 60, 0, 30, None, -1), (20, 60, 30, 60, -3, 5)])
ORDER = [i * 17 % 43 for i in range(43)]


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with interpreting_pool(3) as pool:
        yield pool


@pytest.mark.parametrize(
    ("strategy", "sizes", "mask", "options"),
    [
        pytest.param("ring", (64, 96), flexcp.causal(), Options(kernel="triton", lse_gradient=True), id="ring"),
        pytest.param("blocks", (72, 80), GAPS, Options(kernel="triton", sinks=True), id="blocks"),
        pytest.param("ulysses", (80, 40), flexcp.window(9, 2), Options(kernel="triton", softcap=3.0), id="ulysses"),
    ],
)
def test_attention_with_the_triton_kernel(
    three: RankPool, strategy: str, sizes: tuple[int, int], mask: Mask, options: Options
) -> None:
    planner = flexcp.Planner(4, 2, *sizes, "float32", flexcp.cluster("cpu", 1, 2), strategy=strategy)
    plan = planner([60] if mask.length else [41, 1, 18], mask)
    verdict = three.run(verify_on, plan, options, ranks=2)[0]
    assert verdict.passed, verdict


def on_rows(group: dist.ProcessGroup, plan: Plan, options: Options) -> Verdict | None:
    """Verify as on a GPU: all statistics in float32, packed by rows."""
    attention.types_of = lambda x: Types(x.dtype, torch.float32, torch.float32, x.device)  # type: ignore[attr-defined]
    prepared.packs_by_rows = lambda device_type: True
    return verify_on(group, plan, options)


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [("usp:3,1", {}), ("ring", {}), ("blocks", {"layout": [ORDER[r::3] for r in range(3)]})],
    ids=["usp:3,1", "ring", "blocks"],
)
def test_attention_with_row_packing(three: RankPool, strategy: str, layout: dict[str, Any]) -> None:
    planner = flexcp.Planner(6, 3, 8, 4, "float32", flexcp.cluster("cpu", 1, 3), strategy=strategy)
    plan = planner([24, 1, 18], flexcp.window(9, 2), **layout)
    verdict = three.run(on_rows, plan, Options(lse_gradient=True))[0]
    assert verdict.passed, verdict
