"""Proves that attention runs the Triton kernel and the GPU's row packing correctly, on real ranks with small plans, in
Triton's interpreter on the CPU.

Applies the rule of ``flexcp verify``: float32 results within twice the reference kernel's own error, with softcap,
sinks, an LSE gradient, rows without keys, and head sizes that are not powers of two. Skipped where Triton is not
installed. One pool of ranks runs all cases, because its ranks must be started with the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, sys
import torch
import flexcp
from flexcp.executor import attention
from flexcp.executor.run import prepared
from flexcp.executor.run.message_layout import Types
from flexcp.measure.ranks import RankPool
from flexcp.measure.verify import Options, verify_on

GAPS = flexcp.from_slices(60, [(20, 60, 0, 30, None, -1), (20, 60, 30, 60, -3, 5)])
KERNEL = [
    ("ring", (64, 96), flexcp.causal(), Options(kernel="triton", lse_gradient=True)),
    ("blocks", (72, 80), GAPS, Options(kernel="triton", sinks=True)),
    ("ulysses", (80, 40), flexcp.window(9, 2), Options(kernel="triton", softcap=3.0)),
]
ORDER = [i * 17 % 43 for i in range(43)]
ROWS = [("usp:3,1", {}), ("ring", {}), ("blocks", {"layout": [ORDER[r::3] for r in range(3)]})]

def on_rows(group, plan, options):
    # As on a GPU: all statistics in float32, packed by rows.
    attention.types_of = lambda x: Types(x.dtype, torch.float32, torch.float32, x.device)
    prepared.packs_by_rows = lambda device_type: True
    return verify_on(group, plan, options)

def main():
    with RankPool(3) as pool:
        for strategy, sizes, mask, options in KERNEL:
            planner = flexcp.Planner(4, 2, *sizes, "float32", flexcp.cluster("cpu", 1, 2), strategy=strategy)
            plan = planner([60] if mask.length else [41, 1, 18], mask)
            verdict = pool.run(verify_on, plan, options, ranks=2)[0]
            print(json.dumps(["kernel", strategy, verdict.passed, str(verdict)]))
        for strategy, layout in ROWS:
            planner = flexcp.Planner(6, 3, 8, 4, "float32", flexcp.cluster("cpu", 1, 3), strategy=strategy)
            plan = planner([24, 1, 18], flexcp.window(9, 2), **layout)
            verdict = pool.run(on_rows, plan, Options(lse_gradient=True))[0]
            print(json.dumps(["rows", strategy, verdict.passed, str(verdict)]))

if __name__ == "__main__":
    main()
"""


def test_attention_with_the_triton_kernel_and_with_row_packing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = [sys.executable, "-W", "ignore", str(tmp_path / "script.py")]
    result = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    kernel, rows = ([strategy for of, strategy, _, _ in answers if of == which] for which in ("kernel", "rows"))
    assert kernel == ["ring", "blocks", "ulysses"] and rows == ["usp:3,1", "ring", "blocks"]
    assert all(passed for _, _, passed, _ in answers), answers
