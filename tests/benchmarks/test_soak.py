"""Tests of the soak test (``benchmarks/soak.py``) on a few dozen steps instead of thousands: no resource grows, and
growth or wrong results would be reported.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from flexcp.executor.kernels import cpu
from flexcp.measure.ranks import RankPool
from lib.soaking import Soaked, held, soak, soaked
from soak import page, record, verdicts


def test_nothing_grows_in_changing_steps(pool: RankPool) -> None:
    answers = pool.run(soak, 20, 10, 1, "cpu", None, 5, ranks=2)[:2]
    assert all(answer.same for answer in answers)
    assert [(answer.checked, answer.wrong) for answer in answers] == [(4, ()), (4, ())]
    for answer in answers:
        assert answer.after.sockets <= answer.before.sockets + 1
        assert answer.after.threads <= answer.before.threads
        assert answer.after.files <= answer.before.files
        # After so few steps memory may still grow to its steady size, so the bound is loose.
        assert 0 < answer.after.resident < 1.2 * answer.before.resident


def doubled_outputs(group: dist.ProcessGroup) -> Soaked:
    """Run four steps, each compared with dense attention, with a kernel whose outputs are twice the right ones."""
    right = cpu.forward

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[5].mul_(2)

    with patch.object(cpu, "forward", wrong):
        return soaked(group, 4, 2, 1, "cpu", None, 1)


def test_wrong_results_are_told(pool: RankPool) -> None:
    found = pool.run(doubled_outputs, ranks=2)[0]
    assert found.checked == 4 and len(found.wrong) >= 3 and found.wrong[0].startswith("step 0: errors {'out': ")


def test_the_page_is_made_of_the_files(pool: RankPool) -> None:
    answers = pool.run(soak, 12, 6, 1, "cpu", None, 4, ranks=2)[:2]
    asked = argparse.Namespace(device="cpu", seed=1, steps=12)
    found = json.loads(json.dumps(record(answers, asked, 3.4)))
    assert list(found["ranks"][0]) == ["0", "6", "12"] and found["grown"] == verdicts(
        [a.before for a in answers], [a.after for a in answers], True
    )
    text = page([found, found | {"device": "cuda", "steps": 12, "asked": 5000}])
    assert "12 steps in 3 s" in text and "12 steps of 5,000 asked for in 3 s" in text
    assert "| rank | after step | resident memory, MB | threads |" in text
    assert "CUDA memory allocated, MB | CUDA memory reserved, MB" in text
    assert "Of 3 batches, one every 250 steps, 0 differed" in text


def test_what_grows_is_named() -> None:
    before = held()
    grown = replace(before, resident=int(before.resident * 1.03), sockets=before.sockets + 1)
    assert verdicts([before], [before], True) == []
    assert [line.split(": ")[1].split(" grew")[0] for line in verdicts([before], [grown], True)] == [
        "resident memory",
        "sockets",
    ]
    assert verdicts([before], [before], False) == ["the results of the first batch have changed"]
