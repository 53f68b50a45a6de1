"""Proves on a few dozen steps what ``benchmarks/soak.py`` looks for over thousands:
nothing grows, and growing would be seen.
"""

from __future__ import annotations

from dataclasses import replace

from flexcp.measure.ranks import RankPool
from lib.soaking import held, soak
from soak import verdicts


def test_nothing_grows_in_changing_steps(pool: RankPool) -> None:
    answers = pool.run(soak, 40, 20, 1, ranks=2)[:2]
    assert all(answer.same for answer in answers)
    for answer in answers:
        assert answer.after.sockets <= answer.before.sockets + 1
        assert answer.after.threads <= answer.before.threads
        assert answer.after.files <= answer.before.files
        # So few steps after the start memory may still settle; that it is looked at is all that can be said.
        assert 0 < answer.after.resident < 1.2 * answer.before.resident


def test_what_grows_is_named() -> None:
    before = held()
    grown = replace(before, resident=int(before.resident * 1.03), sockets=before.sockets + 1)
    assert verdicts([before], [before], True) == []
    assert [line.split(": ")[1].split(" grew")[0] for line in verdicts([before], [grown], True)] == [
        "resident memory",
        "sockets",
    ]
    assert verdicts([before], [before], False) == ["the results of the first batch have changed"]
