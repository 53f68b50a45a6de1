"""Tests of ``flexcp accept`` on real ranks: a correct setup passes and is reported, and a wrong version or node map
ends the run before a process group is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import flexcp
from flexcp.calibration import read_calibration
from flexcp.executor.exchange import hosts
from flexcp.measure.accept import accept as accepting
from flexcp.measure.accept import rank_cards
from flexcp.measure.accept.accept import Acceptance, Setting, accept
from flexcp.measure.accept.rank_cards import own_card, roll_call
from flexcp.measure.ranks import RankPool
from flexcp.measure.verify import Verdict
from flexcp.report.accept_tables import accept_sections
from flexcp.report.page import page
from flexcp.shape import Shape

SETTING = Setting(
    flexcp.cluster("cpu:2x1"),
    Shape(4, 2, 16, 16, "float32"),
    (200, 40),
    ("ring", "ulysses:8", "blocks"),
    rehearsal=True,
    repeats=1,
)
WRONG = Verdict({"out": 0.5, "dq": 1e-9}, {"out": 1e-3, "dq": 1e-3}, False)


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """Two ranks in a group whose store holds no cards of ranks yet."""
    with RankPool(2) as two:
        yield two


def accepted(
    group: dist.ProcessGroup, setting: Setting, names: str, versions: list[str], verdict: Verdict | None = None
) -> tuple[bool, Acceptance, list[str]]:
    """Run ``accept`` with these host names and flexcp versions; return whether it passed, its findings, its steps."""
    rank, steps = dist.get_rank(group), []

    def start() -> dist.ProcessGroup:
        steps.append("started")
        return group

    with (
        mock.patch.object(rank_cards, "this_host", lambda: names[rank]),
        mock.patch.object(hosts, "this_host", lambda: names[rank]),
        mock.patch.multiple(accepting, CPU_TOKENS=(64, 128), CPU_WORK=("causal", "docs4")),
    ):
        if verdict is not None:
            accepting.verify_on = lambda *_: verdict if rank == 0 else None  # type: ignore[assignment]
        card = replace(own_card(rank, "cpu"), flexcp=versions[rank])
        found = Acceptance(setting, roll_call(group.get_group_store(), card, 2, 30.0))
        return accept(found, start, steps.append), found, steps


def test_ranks_that_are_what_they_should_be_are_accepted(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(accepted, replace(SETTING, rehearsal=False), "ab", ["1", "1"])
    (passed, found, steps), (also, other, _) = answers
    # Links are not judged here: their speed on this machine depends on its other work.
    judged = [check.name for check in found.checks if check.name != "links"]
    assert judged == ["versions", "hosts", "exactness", "predicted time"]
    assert all(check.passed for check in found.checks if check.name != "links")
    assert passed == also == found.passed
    assert found.calibration is not None and found.calibration == other.calibration
    assert found.calibration.speeds["inter_mbps"] == round(found.links[0].mbps)
    assert "intra_mbps" in found.calibration.speeds and steps[:2] == ["the group's start", "started"]
    ring, refused, blocks = found.rows
    assert ring.error is not None and blocks.error is not None and refused.missing is not None
    assert "ring, blocks" in found.checks[2].value  # ulysses:8 refuses two ranks

    data = found.to_json()
    commands = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    documented = commands.partition("\n## JSON output\n")[2]
    nested = [*data["checks"][0], *data["ranks"][0], *data["links"][0], *data["strategies"][0]]
    assert not [key for key in [*data, *nested] if f"`{key}`" not in documented]
    assert json.loads(json.dumps(data)) == data
    (tmp_path / "cost.json").write_text(json.dumps(data["calibration"]))
    assert read_calibration(tmp_path / "cost.json").cost == found.calibration.cost
    text = page(accept_sections(found), "accepted")
    assert all(f">{title}</h2>" in text for title in ("Verdict", "Checks", "Ranks", "Links", "Strategies"))
    assert re.search(r"<td[^>]*>a</td>", text) and "ulysses:8" in text


@pytest.mark.parametrize(
    ("names", "versions", "shape", "rehearsal", "said"),
    [
        (
            "ab",
            ["1", "2"],
            "cpu:2x1",
            False,
            "versions: rank 1 on host b runs flexcp 2, others 1; install the same on every host",
        ),
        (
            "ab",
            ["1", "1"],
            "cpu:1x2",
            True,
            "hosts: cluster cpu:1x2 has ranks 0 to 1 on node 0, but rank 0 runs on host a and rank 1 on b;",
        ),
        (
            "aa",
            ["1", "1"],
            "cpu:2x1",
            False,
            "hosts: cluster cpu:2x1 has rank 0 on node 0 and rank 1 on node 1, but both run on host a;",
        ),
    ],
)
def test_a_wrong_version_or_node_map_ends_before_the_group(
    ranks: RankPool, names: str, versions: list[str], shape: str, rehearsal: bool, said: str
) -> None:
    setting = replace(SETTING, cluster=flexcp.cluster(shape), rehearsal=rehearsal)
    for passed, found, steps in ranks.run(accepted, setting, names, versions):
        assert not passed and not steps
        (line,) = found.failures
        assert line.startswith(said)
        assert [check.verdict for check in found.checks].count("not run") == 3
        assert "Not accepted" in page(accept_sections(found), "not accepted")


def test_results_that_are_off_are_not_accepted_on_any_rank(ranks: RankPool) -> None:
    answers = ranks.run(accepted, SETTING, "aa", ["1", "1"], WRONG)
    assert [passed for passed, _, _ in answers] == [False, False]
    lines = answers[0][1].failures
    assert lines[0].startswith("exactness: ring: out is off by 5.0e-01, where 1.0e-03 is allowed;")
    assert lines[1].startswith("exactness: ring: bytes on the wire differ from the plan's;") and len(lines) == 4
