"""Tests of the command line: JSON has the documented keys and the numbers of ``Planner``, text forms of lengths, masks
and clusters are parsed correctly, and mistakes end with one readable line.

A mistake is exit code 2 and one line on stderr that names the value; stdout stays empty. Most runs are in this process;
exit codes of the installed command, and ``verify`` with its ranks, are checked in a process of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.cli import main
from flexcp.cli.main import app, run
from flexcp.data.lengths import draw_lengths
from flexcp.plan.plan import Plan
from flexcp.report.rounds_table import rounds_columns, rounds_table

PLAN_KEYS = [
    "strategy",
    "chosen",
    "why",
    "ranks",
    "tokens",
    "planning_ms",
    "first_plan_ms",
    "forward_bytes",
    "forward_inter_node_bytes",
    "backward_bytes",
    "max_rank_sent_bytes",
    "max_rank_received_bytes",
    "compute_imbalance",
    "token_imbalance",
    "stages",
    "max_rank_peers",
    "max_rank_arena_bytes",
    "max_rank_memory_bytes",
    "hash",
]
VERIFY_KEYS = ["out", "lse", "dq", "dk", "dv", "bytes_match", "passed"]
SMALL = ["--ranks", "4", "--heads", "8", "--kv-heads", "2"]


def invoke(*arguments: str) -> Any:
    """Run a command in this process with typer's runner; it must succeed."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def plan_json(*arguments: str) -> dict[str, Any]:
    result = invoke("plan", *arguments, "--json")
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def installed(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the installed command, which lies beside this interpreter, in a process of its own."""
    command = Path(sys.executable).parent / "flexcp"
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=timeout)


def test_a_result_that_does_not_fit_the_disk_is_one_line() -> None:
    command = Path(sys.executable).with_name("flexcp")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([command, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "flexcp: cannot write the result: No space left on device\n")


def planned(lengths: list[int], mask: Any = None, nodes: int = 1, each: int = 4, **options: Any) -> Plan:
    """Plan with ``Planner`` what the options ``SMALL`` describe, or the same on another cluster."""
    call = {name: options.pop(name) for name in ("layout", "tokens", "pad_to") if name in options}
    planner = flexcp.Planner(8, 2, 128, cluster=flexcp.cluster("h100", nodes, each), **options)
    return planner(lengths, mask, **call)


# --- plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["blocks", "zigzag", "usp:2,2", "dp"])
def test_plan_json_is_the_planners_numbers(strategy: str) -> None:
    found = plan_json("--lengths", "900,31,1", *SMALL, "--strategy", strategy)
    plan = planned([900, 31, 1], strategy=strategy)
    forward, backward = plan.bytes(), plan.bytes(backward=True)
    assert list(found) == PLAN_KEYS
    assert found.pop("planning_ms") > 0
    assert found.pop("first_plan_ms") > 0
    assert found == {
        "strategy": strategy,
        "chosen": strategy,
        "why": plan.explain(),
        "ranks": 4,
        "tokens": 932,
        "forward_bytes": forward.sum(),
        "forward_inter_node_bytes": 0,
        "backward_bytes": backward.sum(),
        "max_rank_sent_bytes": forward.sum(1).max(),
        "max_rank_received_bytes": forward.sum(0).max(),
        "compute_imbalance": round(imbalance(plan.work()), 6),
        "token_imbalance": round(imbalance(plan.placement.tokens), 6),
        "stages": plan.programs[0][0].stages,
        "max_rank_peers": max(len(plan.peers(r)) for r in range(4)),
        "max_rank_arena_bytes": max(plan.memory(r).arena for r in range(4)),
        "max_rank_memory_bytes": max(plan.memory(r).total for r in range(4)),
        "hash": plan.hash,
    }


def test_plan_json_of_a_plan_worked_out_by_hand() -> None:
    """One causal document of 8 tokens, all keys gathered on 2 nodes of 1 rank:
    4 tokens x 2 KV heads x 2 x 16 x 2 bytes each way.
    """
    arguments = ["--lengths", "8", "--cluster", "h100:2x1", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    found = plan_json(*arguments, "--strategy", "allgather")
    assert found["forward_bytes"] == found["forward_inter_node_bytes"] == 2 * 512
    assert found["max_rank_sent_bytes"] == found["max_rank_received_bytes"] == 512
    assert found["backward_bytes"] == 2 * (512 + 1024)
    assert found["compute_imbalance"] == pytest.approx(26 / 18, abs=1e-6)
    assert found["token_imbalance"] == 1.0


def test_plan_text_is_the_picture() -> None:
    result = invoke("plan", "--lengths", "900,31,1", *SMALL)
    plan = planned([900, 31, 1])
    assert result.stdout == str(plan) + "\n"
    for words in ("kept by", "rows down, keys right", "work/mean", "imbalance"):
        assert words in result.stdout


def test_plan_shows_rounds_when_asked() -> None:
    plan = planned([900, 31, 1])
    assert invoke("plan", "--lengths", "900,31,1", *SMALL, "--rounds").stdout == f"{plan!s}\n\n{rounds_table(plan)}\n"
    found = plan_json("--lengths", "900,31,1", *SMALL, "--rounds")
    assert found["rounds"] == {"forward": rounds_columns(plan, False), "backward": rounds_columns(plan, True)}


def test_options_reach_the_planner() -> None:
    arguments = ["--lengths", "900,31,1", *SMALL]
    blocks = ["--strategy", "blocks"]
    base = planned([900, 31, 1], strategy="blocks").hash
    for given, options in (
        (["--layout", "contiguous"], {"layout": "contiguous"}),
        (["--layout", "zigzag", "--strategy", "ring"], {"layout": "zigzag", "strategy": "ring"}),
        (["--tokens", "equal"], {"tokens": "equal"}),
        (["--tokens", "equal", "--pad-to", "128"], {"tokens": "equal", "pad_to": 128}),
        (["--dtype", "float32"], {"dtype": "float32"}),
        (["--v-head-dim", "64"], {"v_head_dim": 64}),
        (["--compute-tolerance", "0.3"], {"compute_tolerance": 0.3}),
        (["--token-tolerance", "0.01"], {"token_tolerance": 0.01}),
        (["--max-tokens-per-rank", "250"], {"max_tokens_per_rank": 250}),
    ):
        found = plan_json(*arguments, *([] if "--strategy" in given else blocks), *given)["hash"]
        assert found == planned([900, 31, 1], **{"strategy": "blocks", **options}).hash, given
        assert found != base or given[0] in ("--token-tolerance", "--max-tokens-per-rank"), given


def test_lengths_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lengths").write_text("300\n20\n1\n")
    monkeypatch.chdir(tmp_path)
    for text, lengths in (
        ("300,20,1", [300, 20, 1]),
        ("16x64", [64] * 16),
        ("@lengths", [300, 20, 1]),
        (str(tmp_path / "lengths"), [300, 20, 1]),
        ("lengths", [300, 20, 1]),
        ("web:8192:0", draw_lengths("web", 8192, 0)),
    ):
        found = plan_json("--lengths", text, *SMALL, "--strategy", "ring")
        assert found["tokens"] == sum(lengths), text
        assert found["hash"] == planned(lengths, strategy="ring").hash, text


def test_a_list_longer_than_a_file_name_is_a_list() -> None:
    assert plan_json("--lengths", ",".join(["50"] * 200), *SMALL, "--strategy", "ring")["tokens"] == 10_000


def test_masks_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "mask.json"
    rows = [[0, 300, 0, 300, None, 0]], [[0, 10, 0, 20, -3, 2], [10, 20, 0, 20, None, None]]
    file.write_text(
        json.dumps({"documents": [{"length": n, "slices": s} for n, s in zip((300, 20), rows, strict=True)]})
    )
    for text, mask in (
        ("causal", flexcp.causal()),
        ("full", flexcp.full()),
        ("window:16", flexcp.window(15, 0)),
        ("lambda:4,32", flexcp.masks.lambda_(4, 32)),
        ("shared-question:4,0.2", flexcp.masks.shared_question(4, 0.2)),
        ("blockwise:16,2", flexcp.masks.causal_blockwise(16, 2)),
        ("prefix:30", flexcp.masks.prefix(30)),
        (f"@{file}", [flexcp.from_slices(300, rows[0]), flexcp.from_slices(20, rows[1])]),
    ):
        found = plan_json("--lengths", "300,20", *SMALL, "--strategy", "ring", "--mask", text)
        assert found["hash"] == planned([300, 20], mask, strategy="ring").hash, text


def test_clusters_in_every_form() -> None:
    arguments = ["--lengths", "900,31,1", "--heads", "8", "--kv-heads", "2"]
    for given, (nodes, each) in (
        (["--cluster", "h100:2x4"], (2, 4)),
        (["--nodes", "2", "--ranks-per-node", "4"], (2, 4)),
        (["--cluster", "h100", "--nodes", "3", "--ranks-per-node", "1"], (3, 1)),
        (["--nodes", "2"], (2, 8)),
        (["--ranks", "5"], (1, 5)),
        ([], (1, 8)),
    ):
        found = plan_json(*arguments, *given, "--strategy", "ring")
        assert found["ranks"] == nodes * each, given
        assert found["hash"] == planned([900, 31, 1], None, nodes, each, strategy="ring").hash, given
    slow = plan_json(*arguments, "--ranks", "2", "--speeds", "1,0.5", "--strategy", "blocks")
    machine = flexcp.cluster("h100", 1, 2, speeds=[1, 0.5])
    assert slow["hash"] == flexcp.Planner(8, 2, 128, cluster=machine, strategy="blocks")([900, 31, 1]).hash
    across = plan_json(*arguments, "--cluster", "h100:2x4", "--strategy", "ring")
    assert 0 < across["forward_inter_node_bytes"] < across["forward_bytes"]
    assert plan_json(*arguments, "--cluster", "a100:2x4", "--strategy", "ring")["hash"] != across["hash"]


# --- mistakes ---------------------------------------------------------------------------------------------------------

ASK = ["plan", "--lengths", "100,7"]
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "missing file": (["plan", "--lengths", "@nowhere.txt"], ["nowhere.txt", "No such file"]),
    "empty file": (["plan", "--lengths", "@empty"], ["empty", "holds no lengths"]),
    "file of words": (["plan", "--lengths", "words"], ["words, line 2", "'abc'"]),
    "binary file": (["plan", "--lengths", "@binary"], ["binary", "not a text file"]),
    "directory": (["plan", "--lengths", "@."], ["directory"]),
    "text": (["plan", "--lengths", "hello"], ["'hello'", "web:131072:0"]),
    "length 0": (["plan", "--lengths", "5,0"], ["'5,0'", "0 is not a length"]),
    "negative length": (["plan", "--lengths", "-5"], ["-5 is not a length"]),
    "no documents": (["plan", "--lengths", "0x5"], ["'0x5'", "at least 1"]),
    "unknown distribution": (["plan", "--lengths", "wiki:100:0"], ["'wiki'", "did you mean 'wikipedia'?"]),
    "unknown strategy": ([*ASK, "--strategy", "blcks"], ["'blcks'", "did you mean 'blocks'?"]),
    "unknown mask": ([*ASK, "--mask", "casual"], ["'casual'", "did you mean 'causal'?"]),
    "unknown cluster": ([*ASK, "--cluster", "a10:2x4"], ["'a10'", "did you mean 'a100'?"]),
    "cluster shape": ([*ASK, "--cluster", "h100:4"], ["'h100:4'", "h100:4x8"]),
    "cluster of no nodes": ([*ASK, "--cluster", "h100:0x8"], ["nodes", "got 0"]),
    "no ranks": ([*ASK, "--ranks", "0"], ["at least 1", "got 0"]),
    "no nodes": ([*ASK, "--nodes", "0"], ["at least 1", "got 0"]),
    "no ranks per node": ([*ASK, "--ranks-per-node", "0"], ["at least 1", "got 0"]),
    "negative ranks": ([*ASK, "--ranks", "-2"], ["at least 1", "got -2"]),
    "ranks and nodes": ([*ASK, "--ranks", "4", "--nodes", "2"], ["--ranks", "--nodes"]),
    "ranks and cluster": ([*ASK, "--ranks", "4", "--cluster", "h100"], ["--ranks", "--cluster"]),
    "shape twice": ([*ASK, "--cluster", "h100:2x4", "--nodes", "2"], ["h100:2x4", "drop --nodes"]),
    "window without size": ([*ASK, "--mask", "window"], ["'window'", "window:4096"]),
    "window 0": ([*ASK, "--mask", "window:0"], ["'window:0'", "at least 1"]),
    "mask of words": ([*ASK, "--mask", "prefix:many"], ["'prefix:many'"]),
    "missing mask file": ([*ASK, "--mask", "@nowhere.json"], ["nowhere.json", "No such file"]),
    "mask file of words": ([*ASK, "--mask", "@words"], ["words", '"documents"']),
    "mask of other lengths": ([*ASK, "--mask", "@mask.json"], ["9 tokens"]),
    "heads": ([*ASK, "--heads", "6", "--kv-heads", "4"], ["6 heads", "4 KV heads"]),
    "dtype": ([*ASK, "--dtype", "fp8"], ["'fp8'", "bfloat16"]),
    "layout": ([*ASK, "--layout", "round"], ["'round'", "contiguous"]),
    "tokens": ([*ASK, "--tokens", "same"], ["'same'", "equal"]),
    "pad without equal": ([*ASK, "--pad-to", "8"], ["pad_to=8", "equal"]),
    "document over the cap": (
        [*ASK, "--ranks", "4", "--max-tokens-per-rank", "20"],
        ["document 0", "100 tokens", "=20"],
    ),
    "batch over the cap": (
        [*ASK, "--ranks", "4", "--max-tokens-per-rank", "26"],
        ["107 tokens", "=26", "micro-batches"],
    ),
    "cap of dp": ([*ASK, "--strategy", "dp", "--max-tokens-per-rank", "90"], ["100 tokens on rank", "=90"]),
    "cap 0": ([*ASK, "--max-tokens-per-rank", "0"], ["max_tokens_per_rank", "got 0"]),
    "memory": (
        [*ASK, "--ranks", "4", "--strategy", "ring", "--max-memory-per-rank", "100000"],
        ["max_memory_per_rank=100000", "bytes on rank", "raise the cap"],
    ),
    "memory 0": ([*ASK, "--max-memory-per-rank", "0"], ["max_memory_per_rank", "got 0"]),
    "effort": ([*ASK, "--effort", "-1"], ["effort", "got -1"]),
    "token tolerance": ([*ASK, "--token-tolerance", "-0.5"], ["token_tolerance", "-0.5"]),
    "tolerance NaN": ([*ASK, "--compute-tolerance", "nan"], ["compute_tolerance", "nan"]),
    "tolerance of ring": (
        [*ASK, "--strategy", "ring", "--compute-tolerance", "0.1"],
        ["compute_tolerance=0.1", "blocks"],
    ),
    "more nodes than ranks": ([*ASK, "--ranks", "2", "--nodes", "4"], ["--nodes 4", "--ranks 2", "at least one rank"]),
    "speed 0": ([*ASK, "--ranks", "2", "--speeds", "1,0"], ["rank 1", "0.0"]),
    "negative speed": ([*ASK, "--ranks", "2", "--speeds=-1,1"], ["rank 0", "-1.0"]),
    "speed NaN": ([*ASK, "--ranks", "2", "--speeds", "1,nan"], ["rank 1", "nan"]),
    "too few speeds": ([*ASK, "--ranks", "3", "--speeds", "1,1"], ["2 speed factors", "= 3 ranks"]),
    "speeds of words": ([*ASK, "--ranks", "2", "--speeds", "fast,slow"], ["'fast,slow'", "1,0.93,1,1"]),
    "tolerance": ([*ASK, "--compute-tolerance", "-1"], ["compute_tolerance", "-1"]),
    "tolerance and equal": ([*ASK, "--token-tolerance", "0.1", "--tokens", "equal"], ["token_tolerance"]),
    "ulysses": ([*ASK, "--strategy", "ulysses", "--heads", "6", "--ranks", "4"], ["ulysses:4", "6 query heads"]),
    "verify too": (["verify", "--lengths", "7", "--ranks", "2", "--strategy", "rings"], ["'rings'", "'ring'"]),
    "verify's kernel": (
        ["verify", "--lengths", "7", "--ranks", "1", "--kernel", "flash"],
        ["'flash'", "cpu, reference"],
    ),
    "verify's longest document": (
        ["verify", "--lengths", "16385", "--ranks", "1", "--heads", "1", "--head-dim", "2"],
        ["16384", "16385"],
    ),
    "demo's strategy": (
        ["demo", "--ranks", "1", "--steps", "1", "--tokens", "64", "--strategies", "rings"],
        ["'rings'"],
    ),
    "demo's steps": (["demo", "--ranks", "1", "--steps", "0"], ["steps", "0"]),
    "demo's tokens": (["demo", "--ranks", "1", "--tokens", "0"], ["tokens", "0"]),
    "demo's ranks": (["demo", "--ranks", "0"], ["rank", "0"]),
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "words").write_text("12\nabc\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x81")
    (tmp_path / "mask.json").write_text('{"documents": [{"length": 9, "slices": []}, {"length": 7, "slices": []}]}')
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    name: str, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = MISTAKES[name]
    monkeypatch.setattr(sys, "argv", ["flexcp", *arguments, *(["--json"] if as_json else [])])
    with pytest.raises(SystemExit) as end:
        run()
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("flexcp: ")
    assert err.count("\n") == 1, err
    assert not [w for w in words if w not in err], err


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", "--length", "5"], ["pln"], ["plan", "--lengths", "5", "--ranks", "x"]]
)
def test_a_wrong_option_is_a_usage_error(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "Usage" in result.stderr


@pytest.mark.parametrize("command", ["plan", "verify", "demo"])
def test_help_shows_an_example(command: str) -> None:
    assert f"Example: flexcp {command}" in " ".join(invoke(command, "--help").stdout.replace("`", "").split())


def test_version_and_bare_command() -> None:
    assert invoke("--version").stdout == f"{flexcp.__version__}\n"
    assert "Usage" in CliRunner().invoke(app, []).output


# --- as installed -----------------------------------------------------------------------------------------------------


def test_installed_plan_prints_only_json_and_exits_0() -> None:
    done = installed("plan", "--lengths", "64x20", *SMALL, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == PLAN_KEYS


def test_installed_plan_exits_2_without_a_traceback() -> None:
    done = installed("plan", "--lengths", "@nowhere.txt", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "flexcp: cannot read lengths from nowhere.txt: No such file or directory\n"


VERIFY = ["verify", "--lengths", "70,1,2,33", "--ranks", "2", "--heads", "4", "--kv-heads", "2", "--json"]


def test_installed_verify_passes_on_two_ranks() -> None:
    done = installed(*VERIFY)
    assert done.returncode == 0, done.stderr
    check_passed(done.stdout)


def test_verify_passes_on_two_ranks() -> None:
    """As the installed command, but its ranks are forked from the server of this process, which has imported torch."""
    check_passed(invoke(*VERIFY).stdout)


def check_passed(text: str) -> None:
    """Check the JSON that ``flexcp verify --json`` prints where all is right."""
    found = json.loads(text)
    assert list(found) == VERIFY_KEYS
    assert found["passed"] is True
    assert found["bytes_match"] is True
    assert all(0 <= found[name] <= 1e-10 for name in VERIFY_KEYS[:5])
    assert found["out"] > 0, "float64 sums in another order are never all equal"


def test_a_failed_verification_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank pool is replaced by one that reports bytes that do not match."""
    from flexcp.measure import ranks
    from flexcp.measure.verify import Verdict

    class Pool:
        def __init__(self, size: int) -> None:
            assert size == 2

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, *_: object, on_item: object) -> list[Verdict]:
            return [Verdict({"out": 0.0}, {"out": 1e-10}, bytes_match=False)]

    monkeypatch.setattr(ranks, "RankPool", Pool)
    arguments = ["verify", "--lengths", "9", "--ranks", "2"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"out": 0.0, "bytes_match": False, "passed": False}
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "DIFFER" in result.stdout


def test_every_mask_of_a_model_is_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rank pool is replaced by one that reports an error under the second mask, that of layers with a window."""
    from flexcp.measure import ranks
    from flexcp.measure.verify import Options, Verdict

    class Pool:
        def __init__(self, size: int) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, _: object, plan: object, options: Options, on_item: object) -> list[Verdict]:
            return [Verdict({"out": options.mask / 10}, {"out": 1e-10}, bytes_match=True)]

    monkeypatch.setattr(ranks, "RankPool", Pool)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 96}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 192, "vocab_size": 80, "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", **sizes}))
    arguments = ["verify", "--lengths", "90,31", "--ranks", "2", "--strategy", "zigzag", "--model", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1
    each = {"full": {"out": 0.0, "bytes_match": True}, "window": {"out": 0.1, "bytes_match": True}}
    assert json.loads(result.stdout) == {"out": 0.1, "bytes_match": True, "passed": False, "masks": each}
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "layers with the mask 'window':" in result.stdout


def test_plan_and_simulate_take_the_same_heads_where_none_are_given() -> None:
    words = ["--lengths", "500,3", "--ranks", "2", "--strategy", "ring"]
    assert "; 32 / 8 heads of 128; " in CliRunner().invoke(app, ["plan", *words]).stdout.splitlines()[0]
    assert "32 / 8 heads of 128" in CliRunner().invoke(app, ["simulate", *words]).stdout


@pytest.mark.parametrize("cause", [EOFError("marshal data too short"), KeyboardInterrupt()])
def test_the_end_of_a_file_is_not_taken_for_an_interrupt(
    cause: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """typer raises Abort for both: a file that ends too soon, such as a damaged compiled module, and Ctrl-C."""

    def stopped(**options: Any) -> None:
        raise typer.Abort from cause

    monkeypatch.setattr(main, "app", stopped)
    if isinstance(cause, EOFError):
        with pytest.raises(EOFError, match="marshal data too short"):
            run()
    else:
        with pytest.raises(SystemExit, match="130"):
            run()
    assert ("interrupted" in capsys.readouterr().err) == isinstance(cause, KeyboardInterrupt)
