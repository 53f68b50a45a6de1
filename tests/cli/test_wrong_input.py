"""Tests that wrong input to any command gives one readable line and exit code 2: no traceback, nothing on stdout.

Commands and their options are read from the typer application, so a new command is tried with every mistake that its
options allow: a file that is missing, empty or holds words, text where a number belongs, an impossible cluster, and
typos, for which the nearest name is suggested.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from flexcp.cli.main import app, run

LENGTHS = {"lengths": "40,7"}
"""Valid values, by parameter name, without which a command would fail before it reaches the mistake under test."""


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def options_of(command: Any) -> dict[str, Any]:
    return {p.name: p for p in command.params if p.param_type_name == "option"}


def valid(command: Any, *without: str) -> list[str]:
    """Return the fewest arguments that a command needs, leaving out the parameters ``without``."""
    words: list[str] = []
    for p in command.params:
        if p.name in LENGTHS and p.name not in without:
            words += [p.opts[0], LENGTHS[p.name]] if p.param_type_name == "option" else [LENGTHS[p.name]]
    return words


def cases() -> Iterator[tuple[str, list[str], list[str]]]:
    for path, command in commands():
        options, name = options_of(command), " ".join(path)
        given = {p.name: p for p in command.params}
        if "lengths" in given:
            way = [given["lengths"].opts[0]] if given["lengths"].param_type_name == "option" else []
            rest = [*path, *valid(command, "lengths"), *way]
            yield f"{name}: missing file", [*rest, "@nowhere.txt"], ["nowhere.txt"]
            yield f"{name}: empty file", [*rest, "@empty"], ["empty"]
            yield f"{name}: file of words", [*rest, "@words"], ["'abc'"]
            yield f"{name}: text for numbers", [*rest, "hello"], ["hello"]
            yield f"{name}: a file's name without its sign", [*rest, "lenghts.txt"], ["file lenghts.txt does not exist"]
            yield f"{name}: a distribution alone", [*rest, "web"], ["web:131072:0"]
            yield f"{name}: typo of a distribution", [*rest, "wbe:1000:0"], ["did you mean 'web'?"]
            if "batch" in given:
                yield f"{name}: a batch of a list", [*rest, "40,7", "--batch", "1"], ["--batch 1 is for a file"]
                yield (
                    f"{name}: a batch too many",
                    [*rest, "@two", "--batch", "2"],
                    ["makes 1 batch of", "numbered from 1"],
                )
        if "max_tokens_per_rank" in options:
            words = [*path, *valid(command), "--max-tokens-per-rank", "32q"]
            yield f"{name}: a cap of words", words, ["--max-tokens-per-rank", "32768 or 32k"]
        if "file" in given:
            yield f"{name}: missing file", [*path, "nowhere.plan"], ["nowhere.plan"]
            yield f"{name}: empty file", [*path, "empty"], []
            yield f"{name}: file of words", [*path, "words"], []
        base = [*path, *valid(command)]
        if "cluster" in options:
            yield f"{name}: typo of a cluster", [*base, "--cluster", "h10"], ["h10", "did you mean"]
            if name != "train":
                yield f"{name}: impossible cluster", [*base, "--cluster", "h100:0x8"], ["nodes", "0"]
            if name != "train":
                yield f"{name}: a shape alone", [*base, "--cluster", "4x8"], ["write h100:4x8"]
            if name not in ("train", "accept"):  # torchrun gives their ranks
                yield f"{name}: ranks and a cluster", [*base, "--cluster", "h100", "--ranks", "4"], ["drop --cluster"]
                yield f"{name}: no ranks", [*base, "--ranks", "0"], ["at least 1"]
                yield f"{name}: ranks without end", [*base, "--ranks", "100000"], ["100,000 ranks"]
        if "strategy" in options:
            yield f"{name}: typo of a strategy", [*base, "--strategy", "blocsk"], ["did you mean 'blocks'?"]
        if "strategies" in options:
            yield f"{name}: typo among strategies", [*base, "--strategies", "blocsk"], ["did you mean 'blocks'?"]
        if "today" in options:
            yield f"{name}: typo of today's strategy", [*base, "--today", "zigzga:4"], ["did you mean 'zigzag'?"]
        if "framework" in options:
            yield f"{name}: typo of a framework", [*base, "--framework", "pytroch"], ["did you mean 'pytorch'?"]
        if "mask" in options:
            yield f"{name}: typo of a mask", [*base, "--mask", "casual"], ["did you mean 'causal'?"]
            yield f"{name}: absurd mask", [*base, "--mask", "shared-question:100000000,0.2"], ["at most 16384 answers"]
        if "model" in options:
            yield f"{name}: typo of a model", [*base, "--model", "lama3-8b"], ["did you mean 'llama3-8b'?"]
            yield (
                f"{name}: a model of the hub",
                [*base, "--model", "meta-llama/Llama-3.1-8B"],
                ["nothing is downloaded"],
            )
            yield f"{name}: a model that is no JSON", [*base, "--model", "words"], ["words: not JSON, or cut off"]
            yield f"{name}: a folder without a model", [*base, "--model", "."], ["config.json"]
            yield (
                f"{name}: a model without a type",
                [*base, "--model", "unnamed.json"],
                ["unnamed.json has no model_type"],
            )
            if name != "train":
                yield (
                    f"{name}: a model without heads",
                    [*base, "--model", "none.json"],
                    ["none.json has no num_attention_heads"],
                )
                yield f"{name}: a model and heads", [*base, "--model", "llama3-8b", "--heads", "8"], ["drop --heads"]
        for written in ("html", "write", "save", "events"):
            if written in options and name != "bench kernel":
                yield (
                    f"{name}: no folder for --{written}",
                    [*base, *["x"] * ("file" in given), f"--{written}", "no/x"],
                    ["no/x"],
                )
        if "cost" in options:
            yield f"{name}: missing cost file", [*base, "--cost", "nowhere.json"], ["nowhere.json"]
            yield f"{name}: empty cost file", [*base, "--cost", "empty"], ["empty"]
        for option in options.values():
            if isinstance(option.default, int | float) and not isinstance(option.default, bool):
                yield f"{name}: {option.opts[0]} of words", [*base, option.opts[0], "many"], [option.opts[0]]
                break
        long = next((o.opts[0] for o in options.values() if o.opts[0] not in ("--json", "--quiet")), "--quiet")
        yield f"{name}: typo of {long}", [*base, long[:-1] + "xx"], ["No such option"]
        others = sum(p.param_type_name == "argument" and p.name != "lengths" for p in command.params)
        yield f"{name}: a word too many", [*base, *["x"] * others, "surplus"], ["surplus"]


SINGLE = {
    "train: typo of a layout": (["train", "--layout", "zigzg"], ["'zigzg'", "zigzag"]),
    "train: a learning rate of nothing": (["train", "--learning-rate", "nan"], ["learning rate", "nan"]),
    "train: a learning rate beyond floats": (["train", "--learning-rate", "1e300"], ["learning rate", "at most 1e+06"]),
    "bench step: nodes of no rank": (
        ["bench", "step", "--lengths", "40,7", "--ranks-per-node", "0"],
        ["no whole number of nodes of 0"],
    ),
    "train: a preset": (["train", "--model", "llama3-8b"], ["too large", "config.json"]),
    "train: lengths as a text": (["train", "--data", "two"], ["--data @two"]),
    "train: a model and heads": (["train", "--model", "some.json", "--heads", "8"], ["drop --heads"]),
    **{
        f"{' '.join(words).partition(' --')[0]}: more ranks than can be started": (
            [*words, "--ranks", "1000000"],
            ["at most 256", "got 1,000,000"],
        )
        for words in (["calibrate"], ["demo"], ["train"], ["bench", "step", "--lengths", "40,7"])
    },
    "verify: more ranks than can be started": (["verify", "--lengths", "40,7", "--ranks", "300"], ["at most 256"]),
    "verify: a seed beyond 64 bits": (
        ["verify", "--lengths", "40,7", "--seed", "99999999999999999999"],
        ["--seed is a whole number of at most 9223372036854775807", "got 99999999999999999999"],
    ),
    "verify: a seed of a replay": (["verify", "@words", "--seed", "-9223372036854775808"], ["--seed", "got -922337"]),
    "fuzz: minutes without a number": (
        ["fuzz", "--minutes", "nan"],
        ["--minutes, --cases and --jobs are 0 or more", "nan"],
    ),
    "fuzz: more ranks than can be started": (["fuzz", "--most-ranks", "300"], ["at most 256"]),
    "advise: heads alone": (["advise", "40,7", "--heads", "8"], ["--layers"]),
    "advise: layers without heads": (["advise", "40,7", "--layers", "8"], ["--heads is missing"]),
    "plan: heads that do not divide the width": (
        ["plan", "--lengths", "40,7", "--heads", "30", "--hidden", "4096", "--layers", "2"],
        ["--heads 30 do not divide --hidden 4096", "--head-dim"],
    ),
    "advise: a tokenizer that is not there": (
        ["advise", "words.jsonl", "--tokenizer", "no.json"],
        ["no.json: there is no such file"],
    ),
    "plan: one file for plan and report": (
        ["plan", "--lengths", "40,7", "--save", "a.plan", "--html", "./a.plan"],
        ["--save and --html are the same file, a.plan"],
    ),
    "simulate: one file for events and report": (
        ["simulate", "--lengths", "40,7", "--events", "a.json", "--html", "a.json"],
        ["--events and --html are the same file, a.json"],
    ),
    "show: a report in place of the plan": (
        ["show", "two", "--html", "two"],
        ["FILE and --html are the same file, two"],
    ),
    "accept: one file for both results": (
        ["accept", "--write", "a.json", "--html", "a.json"],
        ["--write and --html are the same file, a.json"],
    ),
    "compare: no strategies": (["compare", "--lengths", "40,7", "--strategies", ","], ["','", "auto,zigzag:8"]),
    "compare: documents over the cap": (
        ["compare", "--lengths", "40,7", "--ranks", "2", "--max-tokens-per-rank", "10"],
        ["document 0 has 40 tokens"],
    ),
}
"""Mistakes that only one command allows."""
CASES = {name: (words, told) for name, words, told in cases()} | SINGLE


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "words").write_text("12\nabc\n")
    (tmp_path / "two").write_text("12\n7\n")
    (tmp_path / "none.json").write_text('{"model_type": "llama"}')
    (tmp_path / "unnamed.json").write_text('{"num_attention_heads": 4, "use_sliding_window": false}')
    (tmp_path / "some.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_exit_code_2(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, told = CASES[name]
    monkeypatch.setattr(sys, "argv", ["flexcp", *words])
    with pytest.raises(SystemExit) as end:
        run()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, ""), err
    assert err.startswith("flexcp: ") and err.count("\n") == 1, err
    assert len(err) < 400, err
    assert not [word for word in told if word not in err], err


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was found when all was measured. Root may write everywhere, so the answer of the system is replaced."""
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(sys, "argv", ["flexcp", "calibrate", "--write", "cost.json"])
    with pytest.raises(SystemExit) as end:
        run()
    told = f"flexcp: cannot write cost.json: {tmp_path} cannot be written by this user\n"
    assert (end.value.code, capsys.readouterr()) == (2, ("", told))


def test_every_command_is_tried() -> None:
    names = {" ".join(path) for path, _ in commands()}
    assert {"plan", "verify", "advise", "doctor", "warmup", "demo", "bench kernel"} <= names
    assert {name.split(":")[0] for name in CASES} == names


@pytest.mark.parametrize("words", [["pln"], ["advice"], ["bench", "kernle"]])
def test_a_typo_of_a_command_names_the_nearest(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flexcp", *words])
    with pytest.raises(SystemExit) as end:
        run()
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert err.startswith(f"flexcp: No such command '{words[-1]}'. Did you mean '")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", [" ".join(path) for path, _ in commands()])
def test_every_command_has_json_quiet_and_an_example(name: str) -> None:
    command = next(c for path, c in commands() if " ".join(path) == name)
    names = {o for p in command.params for o in p.opts}
    assert {"--json", "--quiet"} <= names
    assert re.search(r"Example: `[^`]*flexcp " + name, command.help or "")
