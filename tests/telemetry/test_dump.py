"""Tests of the flight recorder: an error, a stall, a NaN and ranks that disagree each leave a dump that says where
every rank was, and a broken dump is refused with what is wrong with it.
"""

from __future__ import annotations

import base64
import json
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import LENGTHS, kernel_forward, plan_for, qkv, train

import flexcp
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan
from flexcp.telemetry import dump
from flexcp.telemetry.dump import find_dumps, read_dump
from flexcp.telemetry.telemetry import MOST_DUMPS


def broken(*_: Any) -> None:
    raise RuntimeError("the kernel broke")


def on_death(group: dist.ProcessGroup, plan: Plan, folder: str) -> str:
    """Rank 1 fails in its kernel; the other ranks wait for it until they time out."""
    telemetry = flexcp.Telemetry(folder, stall=None)
    step = flexcp.bind(plan, group, timeout=30.0, telemetry=telemetry)
    step.collectives.timeout = timedelta(seconds=1)
    try:
        if step.rank == 1:
            with kernel_forward(broken):
                flexcp.attention(*qkv(step), step)
        flexcp.attention(*qkv(step), step)
    except RuntimeError as error:
        return f"{error} {error.__notes__}"
    return "nothing happened"


def on_disagreement(group: dist.ProcessGroup, plans: list[Plan], folder: str) -> str:
    telemetry = flexcp.Telemetry(folder)
    try:
        flexcp.bind(plans[dist.get_rank(group)], group, timeout=30.0, telemetry=telemetry)
    except RuntimeError as error:
        return str(error)
    return "nothing happened"


def on_stall(group: dist.ProcessGroup, plan: Plan, folder: str) -> list[str]:
    """Rank 0 is slow in its second call; in the end all ranks finish."""
    telemetry = flexcp.Telemetry(folder, stall=0.2)
    step = flexcp.bind(plan, group, telemetry=telemetry)
    train(step)

    def slow(right: Any, *arguments: Any) -> None:
        if not telemetry.dumps:
            end = time.monotonic() + 20
            while not telemetry.dumps and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.3)  # so that the other ranks, which began to wait later, notice the stall too
        right(*arguments)

    if step.rank == 0:
        with kernel_forward(slow):
            flexcp.attention(*qkv(step), step)
    else:
        flexcp.attention(*qkv(step), step)
    telemetry.close()
    return [str(path) for path in telemetry.dumps]


def test_an_error_leaves_a_dump_that_holds_the_last_plans(tmp_path: Path) -> None:
    telemetry = flexcp.Telemetry(tmp_path, keep=3)
    plans = [plan_for(1, lengths=[*LENGTHS, n]) for n in (3, 4, 5, 6)]
    for plan in plans:
        step = flexcp.bind(plan, telemetry=telemetry)
        train(step)
    with kernel_forward(broken), pytest.raises(RuntimeError, match="the kernel broke") as caught:
        flexcp.attention(*qkv(step), step)
    (path,) = telemetry.dumps
    assert any(str(path) in note and "flexcp verify @" in note for note in caught.value.__notes__)
    assert path.name.startswith("flexcp-dump-") and path.name.endswith("-rank0.json")
    data = json.loads(path.read_text())
    assert (data["reason"], data["global_rank"]) == ("error", 0)
    assert data["message"] == "forward mask, which begins: RuntimeError: the kernel broke"
    assert [s["lengths"] for s in data["steps"]] == [p.batch.lengths.tolist() for p in plans[1:]]
    assert [s["hash"] for s in data["steps"]] == [p.hash for p in plans[1:]]
    last = data["steps"][-1]["passes"]
    assert [(p["pass"], p["reached"], p["error"]) for p in last] == [
        ("forward mask", "done", ""),
        ("backward mask", "done", ""),
        ("forward mask", "begins", "RuntimeError: the kernel broke"),
    ]
    dump = read_dump(path)
    assert [s.plan for s in dump.steps] == plans[1:]
    assert [s.number for s in dump.steps] == [1, 2, 3]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    telemetry = flexcp.Telemetry(nan_check=True)
    step = flexcp.bind(plan_for(1), telemetry=telemetry)
    with kernel_forward(broken), pytest.raises(RuntimeError, match="the kernel broke"):
        flexcp.attention(*qkv(step), step)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"no folder.*Telemetry\('folder'\)"):
        telemetry.dump()


def test_a_dump_that_cannot_be_written_never_hides_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    step = flexcp.bind(plan_for(1), telemetry=flexcp.Telemetry(tmp_path / "file"))
    with (
        kernel_forward(broken),
        pytest.warns(UserWarning, match="could not write a dump"),
        pytest.raises(RuntimeError, match="the kernel broke"),
    ):
        flexcp.attention(*qkv(step), step)


def test_dumps_are_bounded(tmp_path: Path) -> None:
    telemetry = flexcp.Telemetry(tmp_path)
    step = flexcp.bind(plan_for(1), telemetry=telemetry)
    asked_for = [telemetry.dump() for _ in range(MOST_DUMPS)]
    for _ in range(MOST_DUMPS + 3):
        with kernel_forward(broken), pytest.raises(RuntimeError):
            flexcp.attention(*qkv(step), step)
        step.collectives.failure = None
    assert len(list(tmp_path.iterdir())) == len(telemetry.dumps) == len(asked_for) + MOST_DUMPS


def test_two_dumps_in_a_millisecond_are_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Still:
            return cls(2026, 11, 19, 3, 14, 13, 390_000, tzinfo=tz)

    monkeypatch.setattr(dump, "datetime", Still)
    paths = [dump.write_dump(tmp_path, "asked", f"number {number}", [], 0) for number in range(3)]
    assert [path.name for path in paths] == [
        f"flexcp-dump-20261119T031413.390-rank0{end}.json" for end in ("", "-2", "-3")
    ]
    assert {read_dump(path).message for path in find_dumps(tmp_path)} == {"number 0", "number 1", "number 2"}


def test_ranks_that_wait_for_a_broken_one_dump_where_they_were(tmp_path: Path) -> None:
    plan = plan_for(3, flexcp.full(), "ring")
    with RankPool(3) as own:  # a pool of its own, because its group is unusable afterwards
        answers = own.run(on_death, plan, str(tmp_path))
    assert "the kernel broke" in answers[1]
    dumps = {d.global_rank: d for d in map(read_dump, find_dumps(tmp_path))}
    assert sorted(dumps) == [0, 1, 2]
    assert dumps[1].steps[0].passes[-1]["reached"] == "computes slot 0"
    waiting = {dumps[r].steps[0].passes[-1]["reached"] for r in (0, 2)}
    assert all(words.startswith("waits ") for words in waiting)
    for rank, answer in enumerate(answers):
        assert str(dumps[rank].path) in answer


def test_ranks_with_different_plans_each_dump_their_own(pool: RankPool, tmp_path: Path) -> None:
    plans = [plan_for(2), plan_for(2, flexcp.full())]
    for answer in pool.run(on_disagreement, plans, str(tmp_path), ranks=2):
        assert "disagree on the plan" in answer
    dumps = {d.global_rank: d for d in map(read_dump, find_dumps(tmp_path))}
    assert [dumps[r].steps[0].plan for r in (0, 1)] == plans
    assert all("disagree" in d.steps[0].error for d in dumps.values())


def test_a_stall_is_dumped_while_it_lasts(pool: RankPool, tmp_path: Path) -> None:
    plan = plan_for(3, flexcp.full(), "ring")
    for rank, paths in enumerate(pool.run(on_stall, plan, str(tmp_path), ranks=3)):
        assert len(paths) >= 1, f"rank {rank} saw no stall"
        data = json.loads(Path(paths[0]).read_text())
        assert data["reason"] == "stall"
        assert "nothing moved for 0.2 s: forward mask (pass 2)" in data["message"]
        here = "(pass 2) computes slot 0" if rank == 0 else "(pass 2) waits "
        assert here in data["message"]
        assert any("slow" in line for lines in data["threads"].values() for line in lines) == (rank == 0)


@pytest.mark.parametrize("where", ["k", "kernel"])
def test_nan_in_the_output_is_warned_of_and_dumped(tmp_path: Path, where: str) -> None:
    telemetry = flexcp.Telemetry(tmp_path, nan_check=True)
    step = flexcp.bind(plan_for(1), telemetry=telemetry)
    train(step)
    assert not telemetry.dumps
    q, k, v = qkv(step)

    def kernel(right: Any, *arguments: Any) -> None:
        right(*arguments)
        arguments[-2][5] = torch.inf

    if where == "k":
        with torch.no_grad():
            k[3] = torch.nan
        with pytest.warns(UserWarning, match=r"NaN or Inf in k, out of pass 2 of step 0 \(mask\); it came in"):
            flexcp.attention(q, k, v, step)
    else:
        with kernel_forward(kernel), pytest.warns(UserWarning, match=r"in out of pass 2 .* own inputs are finite"):
            flexcp.attention(q, k, v, step)
    assert read_dump(telemetry.dumps[0]).reason == "nan"


def test_nan_is_not_looked_for_unless_asked(tmp_path: Path) -> None:
    telemetry = flexcp.Telemetry(tmp_path)
    step = flexcp.bind(plan_for(1), telemetry=telemetry)
    q, k, v = qkv(step)
    flexcp.attention(q * torch.nan, k, v, step)
    telemetry.close()
    assert not telemetry.dumps


def good_dump(folder: Path) -> dict[str, Any]:
    telemetry = flexcp.Telemetry(folder)
    flexcp.bind(plan_for(1), telemetry=telemetry)
    return json.loads(telemetry.dump().read_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: json.dumps(d)[:-40], "not JSON, or cut off"),
        (lambda d: "[1, 2]", "JSON, but no flexcp dump"),
        (lambda d: json.dumps(d | {"version": 7}), "version 7, and this flexcp reads version 1"),
        (lambda d: json.dumps({k: v for k, v in d.items() if k != "steps"}), "damaged dump: KeyError 'steps'"),
        (lambda d: json.dumps(d | {"steps": [3]}), "damaged dump"),
        (lambda d: json.dumps(with_plan(d, "!!")), "the plan of step 0 cannot be read"),
        (lambda d: json.dumps(with_plan(d, flipped(d))), "checksum is wrong"),
        (lambda d: json.dumps(d | {"steps": [d["steps"][0] | {"hash": "f" * 32}]}), "says its plan is ffffffffffff"),
    ],
)
def test_a_broken_dump_is_refused_by_what_is_wrong(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(change(good_dump(tmp_path / "good")))
    with pytest.raises(ValueError, match=words) as caught:
        read_dump(path)
    assert str(path) in str(caught.value)


def with_plan(dump: dict[str, Any], plan: str) -> dict[str, Any]:
    return dump | {"steps": [dump["steps"][0] | {"plan": plan}]}


def flipped(dump: dict[str, Any]) -> str:
    data = bytearray(base64.b64decode(dump["steps"][0]["plan"]))
    data[-5] ^= 1
    return base64.b64encode(bytes(data)).decode()


def test_a_missing_dump_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no dump at .*gone\.json"):
        find_dumps(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"no flexcp-dump-\*\.json in"):
        find_dumps(tmp_path)
