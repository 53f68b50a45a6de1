"""Proves that attention runs the Triton kernel right: real ranks, small plans, the kernel in Triton's interpreter on the CPU.

Held to the rule of ``flexcp verify``: float32 results within twice the reference kernel's own error, with softcap, sinks, an LSE gradient,
rows without keys, and head sizes that are no powers of two. Skipped where Triton is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, sys
import flexcp
from flexcp.measure.ranks import RankPool
from flexcp.measure.verify import Options, verify_on

gaps = flexcp.from_slices(60, [(20, 60, 0, 30, None, -1), (20, 60, 30, 60, -3, 5)])

def main():
    with RankPool(2) as pool:
        for strategy, sizes, mask, options in (
            ("ring", (64, 96), flexcp.causal(), Options(kernel="triton", lse_gradient=True)),
            ("blocks", (72, 80), gaps, Options(kernel="triton", sinks=True)),
            ("ulysses", (80, 40), flexcp.window(9, 2), Options(kernel="triton", softcap=3.0)),
        ):
            planner = flexcp.Planner(4, 2, *sizes, "float32", flexcp.cluster("cpu", 1, 2), strategy=strategy)
            plan = planner([60] if mask.length else [41, 1, 18], mask)
            verdict = pool.run(verify_on, plan, options)[0]
            print(json.dumps([strategy, verdict.passed, str(verdict)]))

if __name__ == "__main__":
    main()
"""


def test_attention_with_the_triton_kernel() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    result = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [strategy for strategy, _, _ in answers] == ["ring", "blocks", "ulysses"]
    assert all(passed for _, passed, _ in answers), answers
