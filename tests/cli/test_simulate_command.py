"""Tests of ``flexcp simulate`` and ``flexcp compare``: JSON keys are documented, the known error of the simulation is
stated with every table, and mistakes are told in one line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexcp.calibration import Calibration, Errors
from flexcp.cli.main import app
from flexcp.cost import CostModel
from flexcp.known_errors.words import in_a_sentence, off_words

SMALL = ["--lengths", "9000,800,31", "--cluster", "h100:1x4", "--heads", "8", "--kv-heads", "4", "--head-dim", "64"]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=True)


def test_simulate_tells_time_bounds_and_ranks(tmp_path: Path) -> None:
    result = run("simulate", *SMALL, "--strategy", "zigzag")
    assert result.exit_code == 0, result.output
    assert (
        result.output.startswith("simulated: attention alone on h100:1x4") and off_words(CostModel()) in result.output
    )
    assert "forward" in result.output and result.output.count(" ms") >= 10
    data = json.loads(
        run("simulate", *SMALL, "--strategy", "zigzag", "--json", "--events", str(tmp_path / "e.json")).stdout
    )
    commands = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    documented = commands.partition("\n## JSON output\n")[2]
    assert data["simulated"] is True and all(f"`{key}`" in documented for key in data)
    assert data["attention_ms"] == pytest.approx(data["forward_ms"] + data["backward_ms"])
    assert data["optimality"] >= 1 and data["step_ms"] is None
    events = json.loads((tmp_path / "e.json").read_text())
    assert set(events[0]) == {"rank", "track", "name", "begin", "end", "size"} and {e["rank"] for e in events} == {
        0,
        1,
        2,
        3,
    }


def test_all_strategies_may_stand_among_others_and_none_twice() -> None:
    from flexcp.cli.shared.options import chosen_strategies
    from flexcp.compare.compare import NAMES

    assert chosen_strategies("all,usp:2,2", ("ring@load",)) == (*NAMES, "ring@load", "usp:2,2")
    assert chosen_strategies("ring,all") == ("ring", *(name for name in NAMES if name != "ring"))


def test_compare_ranks_strategies(tmp_path: Path) -> None:
    words = ["--strategies", "auto,zigzag,dp", "--model", "llama3-8b", "--sync", "allreduce"]
    result = run("compare", "--lengths", "9000,800,31", "--cluster", "h100:1x4", *words)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("simulated: a step of llama3-8b") and "optimality" in result.output
    assert "x static: against" in result.output and "#" in result.output
    data = json.loads(run("compare", "--lengths", "9000,800,31", "--cluster", "h100:1x4", *words, "--json").stdout)
    commands = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    documented = commands.partition("\n## JSON output\n")[2]
    assert all(f"`{key}`" in documented for key in [*data, *data["strategies"][0]])
    by_name = {row["strategy"].partition(":")[0]: row for row in data["strategies"] if row["asked"]}
    assert set(by_name) == {"auto", "zigzag", "dp"}
    assert by_name["auto"]["step_ms"] > by_name["auto"]["step"]["other_ms"] > 0


@pytest.mark.parametrize(
    ("words", "units"),
    [
        (["--model", "llama3-8b"], "ms: a whole step of 32 layers."),
        (["--heads", "8"], "ms: attention, forward and backward, of 1 layer."),
    ],
)
def test_compare_says_what_times_and_bytes_are_of(words: list[str], units: str) -> None:
    """A table may have the milliseconds of a whole step beside the bytes of one layer, so it says which is which."""
    asked = ("compare", "--lengths", "9000,800", "--ranks", "2", "--strategies", "ring:2", *words)
    lines = run(*asked).output.splitlines()
    head, row, said = (next(line for line in lines if line.startswith(word)) for word in ("strategy", "ring:2", "ms:"))
    assert "MB/layer" in head and said == f"{units} MB/layer: what ranks send in one layer, forward and backward."
    found = json.loads(run(*asked, "--json").stdout)["strategies"][0]
    moved = found["forward_bytes"] + found["backward_bytes"]
    assert row[head.index("MB/layer") - 1 :].split()[0] == f"{moved / 1e6:.1f}"


@pytest.mark.parametrize("model", [[], ["--model", "llama3-8b"]])
def test_speed_ups_are_over_all_static_methods_whatever_is_listed(model: list[str]) -> None:
    words = ["compare", "--lengths", "9000,800,31,4x2000", "--cluster", "h100:2x2", *model]
    every, few = (json.loads(run(*words, "--strategies", names, "--json").stdout) for names in ("all", "auto,ring:4"))
    assert all(row["asked"] for row in every["strategies"])
    rows, chosen = ({r["strategy"]: r for r in data["strategies"] if "refused" not in r} for data in (every, few))
    best = (few["best_static"], few["best_static_by_load"])
    assert best == (every["best_static"], every["best_static_by_load"]) and "ring:4" not in best
    assert [r["strategy"] for r in few["strategies"]] == ["auto", "ring:4", *best]
    assert [r["asked"] for r in few["strategies"]] == [True, True, False, False]
    assert chosen["ring:4"]["speed_up"] < 1 and chosen[best[0]]["speed_up"] == chosen[best[1]]["speed_up_by_load"] == 1
    for name in ("auto", *best):
        assert chosen[name]["speed_up"] == rows[name]["speed_up"]
        assert chosen[name]["speed_up_by_load"] == rows[name]["speed_up_by_load"]
    text = run(*words, "--strategies", "auto,ring:4").output
    assert (
        f"x static: against {best[0]}, the best of all static methods for this batch, documents dealt by tokens."
        in text
    )
    lines = [line.split()[0] for line in text.split("optimality")[1].split("\nms:")[0].splitlines()[1:] if line.strip()]
    assert sorted(lines) == sorted(["auto", "ring:4", *best])


@pytest.mark.parametrize("command", ["compare", "simulate", "plan"])
def test_a_file_is_a_data_set_of_which_a_batch_is_taken(tmp_path: Path, command: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["3k", "1k", "500", "200", "3000", "100", "2k", "1500"]))
    words = [command, "--lengths", str(file), "--ranks", "4", "--max-tokens-per-rank", "1k"]
    words += ["--strategies" if command == "compare" else "--strategy", "zigzag"]
    first, second = run(*words), run(*words, "--batch", "2")
    for result, number, tokens in ((first, 1, 3072), (second, 2, 1724)):
        assert result.exit_code == 0, result.output
        documents = "document 0" if number == 1 else "documents 1 to 3"
        assert (
            f"batch {number} of 4 in {file} ({documents} of the file, counted from 0; {tokens:,} of 11,444 tokens; up "
            "to 3,584 a batch" in result.output
        )
        assert "7/8 of 4 ranks x 1,024; --batch and --max-tokens-per-rank choose others" in result.output
    whole = run(command, "--lengths", str(file), "--ranks", "4", *words[-2:])
    assert whole.exit_code == 0 and "batch 1" not in whole.output and "11" in whole.output
    assert (
        "batch" not in run(*words[:1], "--lengths", "3k,1k", *words[3:]).output.replace("max-", "").split("zigzag")[0]
    )


def test_a_document_that_no_batch_can_hold_is_told_before_its_turn(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3k\n1k\n500\n5k\n200\n6k\n")
    found = run("plan", "--lengths", str(file), "--ranks", "4", "--max-tokens-per-rank", "1k", "--strategy", "zigzag")
    says = "document 3 of the file (5,120 tokens) and 1 more can run in no batch: 4 ranks x 1,024 tokens keep 4,096"
    assert found.exit_code == 0 and says in " ".join(found.output.split())


@pytest.mark.parametrize("command", ["compare", "simulate", "plan"])
def test_a_document_of_the_batch_that_is_too_long_has_its_number_in_the_file(tmp_path: Path, command: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("1k\n3k\n5k\n")
    found = run(command, "--lengths", str(file), "--ranks", "4", "--max-tokens-per-rank", "1k", "--batch", "3")
    says = "document 2 of the file (counted from 0) has 5,120 tokens, and 4 ranks x 1,024 tokens keep 4,096; raise "
    assert says + "--max-tokens-per-rank to 1,280" in str(found.exception)


@pytest.mark.parametrize("command", ["compare", "simulate", "plan"])
def test_a_last_batch_that_is_left_out_is_told(tmp_path: Path, command: str) -> None:
    file = tmp_path / "lengths.txt"
    words = [command, "--lengths", str(file), "--ranks", "4", "--max-tokens-per-rank", "1k"]
    words += ["--strategies" if command == "compare" else "--strategy", "zigzag"]
    for end, says in (
        (["400", "300"], "; the last 2 documents (700 tokens), less than half a batch, are left out"),
        (["900"], "; the last document (900 tokens), less than half a batch, is left out"),
        (["2000"], ""),
    ):
        file.write_text("\n".join(["3000", "500", "3500", *end]))
        count = 2 if says else 3
        told = run(*words).output
        assert f"batch 1 of {count} in {file}" in told and ("left out" in told) == bool(says) and says in told
        assert str(run(*words, "--batch", "4").exception) == (
            f"--batch 4: {file} makes {count} batches of up to 3,584 tokens, numbered from 1{says}"
        )


@pytest.mark.parametrize("command", ["compare", "simulate", "plan"])
def test_the_cap_that_a_batch_was_cut_by_holds_for_its_plan(tmp_path: Path, command: str) -> None:
    """``dp`` keeps every document whole on one rank; the third batch is one document that is longer than a rank may
    keep.
    """
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["20k"] * 4 + ["60k", "20k", "20k"]))
    words = [command, "--lengths", str(file), "--ranks", "2"]
    words += ["--strategies" if command == "compare" else "--strategy", "dp"]
    assert "dp refused" not in (first := run(*words)).output and first.exit_code == 0
    refused = run(*words, "--batch", "3")
    said = f"{refused.output} {refused.exception}"
    assert "keeps 61440 tokens on rank 0, over max_tokens_per_rank=32768" in said
    assert command == "simulate" or "7/8 of 2 ranks x 32,768, which this one document exceeds" in refused.output
    free = run(*words[:2], "60k", *words[3:])
    assert free.exit_code == 0 and "refused" not in free.output, (
        "a batch on the command line has no cap that nobody gave"
    )


def test_the_time_by_which_auto_chose_is_that_of_the_simulated_step(tmp_path: Path) -> None:
    """The text of a plan, its HTML report, and ``flexcp simulate`` give the same time for the same step."""
    words = [
        "--lengths",
        "9000,800,31",
        "--cluster",
        "h100:1x8",
        "--tp",
        "2",
        "--model",
        "llama3-8b",
        "--sync",
        "allreduce",
    ]
    says = "(times of 32 layers with vocabulary, gradient sync (allreduce) and all-reduces of tp 2)"
    page = tmp_path / "plan.html"
    step = json.loads(run("simulate", *words, "--json").stdout)["step_ms"]
    told = run("plan", *words, "--html", str(page)).output
    assert f": {step:.3f} ms a step simulated" in told and says in told, told
    text = page.read_text()
    assert says in text and "simulated step" in text and f"simulated {step:.3f} ms on rank" in text
    assert "predicted for all layers, closed form" in text and in_a_sentence(off_words(CostModel())) in text
    assert says not in run("plan", *words, "--strategy", "zigzag").output


def test_without_a_model_times_are_of_layers_alone(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    told = run("plan", "--lengths", "9000,800,31", "--ranks", "4", "--html", str(page)).output
    assert "(times of 1 layer, without vocabulary, gradient sync and all-reduces of tensor parallelism)" in told
    assert "simulated time of all layers" in page.read_text() and "simulated step" not in page.read_text()


def test_one_statement_of_the_error() -> None:
    text = run("compare", *SMALL, "--strategies", "auto,zigzag,dp,ring").output
    assert text.count(off_words(CostModel())) == 1 and "stated error" not in text
    assert not re.findall(r"[\d.]+ ?%", text.split("bars:")[1]), "no other percentage to hold against it"


def test_heads_alone_are_attention_alone_and_kv_heads_follow() -> None:
    text = run("compare", "--lengths", "900,31", "--ranks", "2", "--heads", "12", "--strategies", "zigzag").output
    assert "attention alone" in text and "12 / 12 heads of 128" in text


def test_a_calibrated_cost_changes_times_and_names_its_error(tmp_path: Path) -> None:
    slow = Calibration(
        CostModel("mine", forward_efficiency=56),
        "a machine",
        {"intra_mbps": 1000},
        {"kernels": Errors(9, 0.031, 0.08, 0.1)},
    )
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(slow.to_json()))
    before, after = (
        json.loads(run("simulate", *SMALL, "--strategy", "zigzag", "--json", *more).stdout)
        for more in ([], ["--cost", str(path)])
    )
    assert after["forward_ms"] > 5 * before["forward_ms"] and after["held_out"]["kernels"]["median"] == 0.031
    text = run("compare", *SMALL, "--strategies", "dp,zigzag", "--cost", str(path)).output
    assert "cost model mine, median error held out: kernels 3.1% (90th percentile 8.0%, 9 shapes)" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", *SMALL, "--strategies", "zigzak"], "did you mean 'zigzag'"),
        (["compare", *SMALL, "--model", "lama3-8b"], "did you mean 'llama3-8b'"),
        (["compare", *SMALL, "--sync", "ddp"], "--sync is fsdp, allreduce, none; got 'ddp'"),
        (["compare", *SMALL, "--overlap", "2"], "--overlap is a share between 0 and 1; got 2"),
        (["simulate", *SMALL, "--cost", "/nowhere.json"], "cannot read a cost model from /nowhere.json"),
        (["simulate", *SMALL, "--strategy", "ulysses:3"], "refused"),
        (["compare", *SMALL, "--strategies", "ulysses:3"], "ulysses:3 refused: "),
        (["compare", *SMALL, "--strategies", "ulysses:3,zigzag:3", "--json"], "; zigzag:3 refused: "),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, ValueError) and said in str(result.exception)


def test_one_refusal_among_others_is_told_below_the_table() -> None:
    result = run("compare", *SMALL, "--strategies", "ulysses:3,zigzag")
    assert result.exit_code == 0 and "ulysses:3 refused: " in result.output and "x static: against" in result.output


def test_plans_take_a_cost_model(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(Calibration(CostModel("mine", forward_efficiency=5), "", {"gflops": 7}).to_json()))
    words = ["plan", "--lengths", "900,31", "--ranks", "2", "--heads", "4", "--strategy", "zigzag", "--json"]
    before, after = (json.loads(run(*words, *more).stdout)["hash"] for more in ([], ["--cost", str(path)]))
    assert before != after


def test_files_that_are_no_cost_model(tmp_path: Path) -> None:
    for content, said in [("{", "not JSON, or cut off"), ("[]", "is no cost model"), ('{"format": "x"}', "got 'x'")]:
        path = tmp_path / "bad.json"
        path.write_text(content)
        result = run("simulate", *SMALL, "--cost", str(path))
        assert isinstance(result.exception, ValueError) and said in str(result.exception), result.output


@pytest.mark.parametrize("command", ["simulate", "compare", "plan"])
def test_tensor_parallelism_divides_ranks_and_heads(command: str) -> None:
    words = ["--lengths", "9000,800,31", "--heads", "32", "--kv-heads", "8", "--head-dim", "64"]
    words += ["--strategies" if command == "compare" else "--strategy", "zigzag"]
    divided = run(command, *words, "--cluster", "h100:4x8", "--tp", "8")
    assert divided.exit_code == 0, divided.output
    says = "h100:4x8 under tp 8: 4 context-parallel ranks, 1 a node, each with 4 query and 1 KV heads"
    assert says in divided.output
    alike = ["--lengths", "9000,800,31", "--heads", "4", "--kv-heads", "1", "--head-dim", "64", *words[-2:]]
    by_hand = run(command, *alike, "--cluster", "h100:4x1")
    if command == "plan":  # the same placement; only the hash differs, which includes the cost of whole layers
        lines = divided.stdout.splitlines()
        assert lines[1:] == by_hand.stdout.splitlines()[1:] and "h100:4x1" in lines[0]
    else:
        rows = [text.split("MFU")[1].split("bars")[0] for text in (divided.output, by_hand.output)]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("command", ["simulate", "compare", "plan", "verify", "advise"])
def test_errors_about_ranks_say_how_few_other_parallelisms_leave(tmp_path: Path, command: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("400000\n")
    lengths = [str(file)] if command == "advise" else ["--lengths", str(file)]
    words = [command, *lengths, "--cluster", "h100:8x8", "--model", "llama3-8b", "--max-tokens-per-rank", "32k"]
    says = "(64 GPUs / tp 8 = 8 context-parallel ranks)"
    assert says in str(run(*words, "--tp", "8").exception)
    assert "(64 GPUs / tp 4 / pp 2 = 8 context-parallel ranks)" in str(run(*words, "--tp", "4", "--pp", "2").exception)
    words[-1] = "1k"
    alone = str(run(*words).exception)
    assert "64 ranks" in alone and "GPUs /" not in alone


def test_plans_and_simulations_have_the_dtype_of_the_file(tmp_path: Path) -> None:
    """In float32 ``plan`` and ``simulate`` count twice the bytes, and the title of ``compare`` names the dtype."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 512, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 100, "num_key_value_heads": 4, **sizes}
    found = {}
    for dtype in ("bfloat16", "float32"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
        words = ["--lengths", "900,31", "--ranks", "2", "--model", str(tmp_path), "--strategy", "zigzag", "--json"]
        found[dtype] = [json.loads(run(command, *words).stdout)["forward_bytes"] for command in ("plan", "simulate")]
        assert found[dtype][0] == found[dtype][1]
        title = run("compare", *words[:6], "--strategies", "zigzag").output
        assert ("4 / 4 heads of 64 in float32;" in title) == (dtype == "float32")
    assert found["float32"] == [2 * bytes for bytes in found["bfloat16"]]
    given = json.loads(run("plan", *words, "--dtype", "bfloat16").stdout)
    assert given["forward_bytes"] == found["bfloat16"][0]


def test_a_degree_that_ranks_do_not_have_says_how_few_there_are() -> None:
    words = ["simulate", "--lengths", "900,31", "--cluster", "h100:8x8", "--strategy", "zigzag:16", "--tp", "8"]
    assert str(run(*words).exception).endswith("(64 GPUs / tp 8 = 8 context-parallel ranks)")


def test_stages_and_experts_are_divided_or_refused() -> None:
    words = ["simulate", "--lengths", "32x512", "--cluster", "h100:4x8", "--strategy", "dp", "--sync", "none"]
    whole, stage = (
        json.loads(run(*words, "--model", "llama3-8b", *more, "--json").stdout) for more in ([], ["--pp", "2"])
    )
    assert (
        "h100:4x8 under pp 2: 16 context-parallel ranks, 8 a node" in stage["setting"] and "bubbles" in stage["setting"]
    )
    # A stage has half the layers and twice the tokens a rank; the projection to the vocabulary is not divided.
    assert 1 < stage["step"]["other_ms"] / whole["step"]["other_ms"] < 1.1
    experts = run(*words, "--model", "qwen3-30b-a3b", "--ep", "8")
    assert "experts use the same ranks, and their exchange of tokens is left out" in experts.output
    for more, says in (
        (["--heads", "8", "--ep", "2"], "--ep 2 divides the experts of a whole model; give --model, or drop --ep"),
        (["--model", "qwen3-30b-a3b", "--ep", "64"], "that hold the same layers; use one of [1, 2, 4, 8, 16, 32]"),
        (["--model", "llama3-8b", "--tp", "5"], "tp=5 does not divide"),
    ):
        assert says in str(run(*words, *more).exception)


def test_bars_say_of_which_mask_they_are(tmp_path: Path) -> None:
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size": 96,
        "num_hidden_layers": 2,
    }
    sizes |= {"intermediate_size": 192, "vocab_size": 80, "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", **sizes}))
    words = ["simulate", "--lengths", "300,200", "--ranks", "2", "--strategy", "dp", "--model", str(tmp_path)]
    assert "one layer of the mask 'full', the first of 2 (# computes, . waits)" in run(*words).output
    assert "the first of" not in run("simulate", *SMALL, "--strategy", "zigzag").output
