"""Tests of ``flexcp train``: flexcp's GPT and a Hugging Face configuration learn from drawn lengths and from text, and
wrong input is refused before anything trains.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoConfig
from typer.testing import CliRunner

from flexcp.cli.main import app, run
from flexcp.measure.ranks import RankPool
from flexcp.train.documents import Documents, shrunk_lengths
from flexcp.train.loop import StepReport, TrainConfig, train
from flexcp.train.model_setup import refuse_long_documents, refuse_too_large
from flexcp.train.report import Table, line
from lib.model_runs import make_config

SMALL = {"tokens": 256, "steps": 4}


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "book.txt"
    file.write_text("\n\n".join("never odd or even, " * (1 + n % 5) for n in range(40)))
    return str(file)


WRONG = {
    "--model": ("nothing/config.json", "unknown model 'nothing/config.json': there is no such file"),
    "--data": ("lngtail", "lngtail"),
    "--tokens": ("0", "at least 1 token"),
    "--steps": ("0", "at least 1 step"),
    "--dtype": ("float8", "float8"),
    "--ranks": ("0", "at least 1 rank"),
    "--strategy": ("zigzga", "did you mean 'zigzag'?"),
    "--cluster": ("h10", "did you mean"),
}


def test_a_wrong_argument_is_refused_before_torch_is_loaded() -> None:
    script = (
        "import sys\nfrom flexcp.cli.main import _code\n"
        f"for name, (value, _) in {WRONG!r}.items():\n"
        "    sys.argv = ['flexcp', 'train', name, value]\n    assert _code() == 2\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line_said, (_, words) in zip(done.stderr.splitlines(), WRONG.values(), strict=True):
        assert words in line_said


def test_our_gpt_learns_the_same_on_any_number_of_ranks(pool: RankPool, text: str) -> None:
    runs = {
        ranks: pool.run(train, TrainConfig(data=text, strategy="zigzag", **SMALL), ranks=ranks)[0] for ranks in (1, 2)
    }
    losses = [[r.loss for r in reports] for reports in runs.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.2
    assert runs[1][0].bytes == 0 < runs[2][0].bytes
    for report in runs[2]:
        assert report.tokens == 256
        assert report.predicted_ms > 0
        assert report.measured_ms > 0
        assert report.compute_imbalance >= 1
        assert set(report.as_json()) >= {"loss", "tokens_per_second", "bytes", "predicted_ms", "measured_ms"}


def test_a_hugging_face_configuration_trains(pool: RankPool, tmp_path: Path) -> None:
    make_config("gemma2", vocab_size=256).save_pretrained(tmp_path)
    shown: list[StepReport] = []
    config = TrainConfig(model=str(tmp_path), strategy="zigzag", layout="contiguous", **SMALL)
    reports = pool.run(train, config, ranks=2, on_item=shown.append)[0]
    assert [r.loss for r in shown] == [r.loss for r in reports]
    assert reports[-1].loss < reports[0].loss


def test_experts_train_in_float64(pool: RankPool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 256} | sizes | experts
        )
    )
    config = TrainConfig(str(tmp_path), "web", 40, 2, dtype="float64")
    alone, shared = (pool.run(train, config, ranks=ranks)[0] for ranks in (1, 2))
    assert [a.loss for a in alone] == pytest.approx([b.loss for b in shared], rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({"model_type": "of_tomorrow"}, [], "Transformers makes no causal language model of it"),
        ({"model_type": "t5"}, [], "Transformers makes no causal language model of it"),
        ({"num_key_value_heads": 3}, [], "heads must be a multiple of kv_heads"),
        ({"hidden_size": "wide"}, [], "Transformers makes no causal language model of it"),
        ({"intermediate_size": 10**9}, [], "too large to train here"),
        ({}, ["--strategy", "ulysses:3"], "ulysses"),
    ],
)
def test_a_wrong_model_or_strategy_is_one_line_before_ranks_start(
    changed: dict[str, Any],
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(RankPool, "__init__", start)
    make_config("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    monkeypatch.setattr(sys, "argv", ["flexcp", "train", "--model", str(file), "--steps", "1", *options])
    with pytest.raises(SystemExit) as end:
        run()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, ""), err
    assert err.startswith("flexcp: ") and err.count("\n") == 1 and words in err, err


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "a document of 300 tokens, but n_positions of the model is 128"),
        ("opt", "a document of 300 tokens, but max_position_embeddings of the model is 128"),
        ("llama", "ranks were started"),
    ],
)
def test_documents_beyond_learned_positions_are_one_line_before_ranks_start(
    family: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with RoPE (here llama) has no table of positions, so it may train on longer documents."""

    def start(*_: object) -> None:
        raise ValueError("ranks were started")

    monkeypatch.setattr(RankPool, "__init__", start)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 64}
    dropout = {"attn_pdrop": 0.0} if family == "gpt2" else {}
    AutoConfig.for_model(family, **sizes, **dropout, max_position_embeddings=128).save_pretrained(tmp_path)
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n20\n8\n300\n")
    options = ["--model", str(tmp_path), "--data", f"@{lengths}", "--tokens", "428", "--steps", "1", "--ranks", "2"]
    monkeypatch.setattr(sys, "argv", ["flexcp", "train", *options])
    with pytest.raises(SystemExit) as end:
        run()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, ""), err
    assert words in err.splitlines()[-1] and err.splitlines()[-1].startswith("flexcp: "), err
    assert len(err.splitlines()) == 1 or family == "llama", "the table has no heading where no rank starts"


def test_a_later_step_with_a_longer_document_is_found(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n28\n128\n")
    documents = Documents(f"@{lengths}", 128, 64)
    refuse_long_documents(documents, 1, ("n_positions", 100))
    refuse_long_documents(documents, 2, ("n_positions", 128))
    refuse_long_documents(documents, 2, None)
    with pytest.raises(ValueError, match=r"step 1 has a document of 128 tokens, but n_positions of the model is 127"):
        refuse_long_documents(documents, 2, ("n_positions", 127))


def test_a_configuration_that_memory_cannot_hold_is_refused() -> None:
    """Weights, gradients and two optimizer moments of 1,000 float32 parameters take 16,000 bytes on each rank."""
    refuse_too_large("config.json", 1000, 4, 2, 32_000)
    with pytest.raises(ValueError, match=r"config\.json is too large .* on 2 ranks, .* smaller model"):
        refuse_too_large("config.json", 1000, 4, 2, 31_999)


def test_documents_are_the_same_for_everybody_and_fill_the_step(text: str) -> None:
    for source in (text, "longtail", "web"):
        documents = Documents(source, 300, 256)
        assert [d.tolist() for d in documents.step(3)] == [d.tolist() for d in Documents(source, 300, 256).step(3)]
        assert sum(len(d) for d in documents.step(3)) == 300
        assert [d.tolist() for d in documents.step(3)] != [d.tolist() for d in documents.step(4)]
    assert bytes(Documents(text, 19, 256).step(0)[0].tolist()) == b"never odd or even, "
    assert sum(shrunk_lengths("longtail", 17, 1, 16)) == 17
    for tokens in (1, 2, 3, 5):  # so few that more documents may be drawn than there are tokens
        for seed in range(8):
            assert sum(shrunk_lengths("web", tokens, seed, 16)) == tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere.json"], r"unknown model 'nowhere.json'.*config.json"),
        (["--model", "meta-llama/Llama-3.1-8B"], r"nothing is downloaded.*config.json"),
        (["--model", "llama3-8b"], r"llama3-8b is too large.*8.0 billion.*config.json"),
        (["--model", "lama3-8b"], r"did you mean 'llama3-8b'"),
        (["--heads", "3", "--kv-heads", "2"], r"multiple of kv_heads"),
        (["--heads", "4", "--hidden", "100"], r"4 x 32 = 128; got --hidden 100"),
        (["--head-dim", "7"], r"must be even"),
        (["--data", "nowhere.txt"], r"no text file 'nowhere.txt'"),
        (["--data", "700,20"], r"700,20.*holds lengths.*@file.*text file.*distribution"),
        (["--data", "64x2048"], r"64x2048.*holds lengths.*@file"),
        (["--data", "web:4096:0"], r"--data web.*--tokens"),
        (["--data", "lontail"], r"did you mean 'longtail'"),
        (["--steps", "0"], r"at least 1 step"),
        (["--dtype", "int8"], r"got 'int8'"),
        (["--ranks", "0"], r"--ranks is at least 1 rank and at most 256 on one machine; got 0"),
        (["--cluster", "h100:2x8"], r"--cluster h100, and its ranks from --ranks"),
    ],
)
def test_mistakes_are_named_before_anything_trains(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["train", *arguments])
    assert isinstance(result.exception, ValueError)
    assert re.search(words, str(result.exception))


def test_a_text_whose_bytes_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("never odd")
    assert len(Documents(str(text), 9, 119).step(0)[0]) == 9, "v, byte 118, is the largest"
    with pytest.raises(ValueError, match=r"byte 118, but the model's vocabulary has only 118 ids; .* at least 119"):
        Documents(str(text), 9, 118)


@pytest.mark.parametrize(("family", "field"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")])
def test_attention_dropout_is_refused_before_ranks_start(family: str, field: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": family, "vocab_size": 256, field: 0.1, **sizes}))
    result = CliRunner().invoke(app, ["train", "--model", str(file), "--ranks", "2", "--steps", "1"])
    assert isinstance(result.exception, ValueError)
    assert f"attention dropout is not supported; set {field} to 0 (it is 0.1)" in str(result.exception)


def test_a_file_of_lengths_is_not_read_as_text(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("40\n7\n4k\n")
    result = CliRunner().invoke(app, ["train", "--data", str(file)])
    assert isinstance(result.exception, ValueError)
    assert f"write --data @{file}" in str(result.exception)
    file.with_suffix(".csv").write_text("length\n40\n7\n")
    result = CliRunner().invoke(app, ["train", "--data", str(file.with_suffix(".csv"))])
    assert isinstance(result.exception, ValueError) and "holds numbers" in str(result.exception)
    documents = Documents(f"@{file}", 50, 256)
    assert [[len(d) for d in documents.step(n)] for n in (0, 1)] == [[40, 7, 3], [50]]
    assert [len(d) for d in documents.step(82)] == [43, 7], "tokens 4,100 to 4,150 of a file of 4,143"
    assert documents.cut(1) == (
        "1 of 1 step ends inside a document, which is cut there, each part a document of its own (1 of the file's 3 "
        "documents); --tokens of at least the longest, 4096, cuts fewer"
    )
    assert str(documents.cut(82)).startswith("82 of 82 steps end inside"), "all borders from 50 to 4,100 lie in one"
    assert "(1 of the file's 3 documents)" in str(documents.cut(82))
    assert "(2 of the file's 3 documents)" in str(documents.cut(83)), "token 4,150 is in the first again"
    for tokens in (4096, 4100):
        assert str(Documents(f"@{file}", tokens, 256).cut(1)).endswith(
            "; none is longer than a step (4096 tokens at most), and more --tokens cut a smaller share of them"
        )
    assert str(Documents(f"@{file}", 4095, 256).cut(1)).endswith("--tokens of at least the longest, 4096, cuts fewer")
    lines = tmp_path / "texts.jsonl"
    lines.write_text('{"text": "a"}\n')
    result = CliRunner().invoke(app, ["train", "--data", str(lines)])
    assert isinstance(result.exception, ValueError) and "holds JSON lines" in str(result.exception)


def test_blank_lines_part_documents_however_lines_end(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    for text in (b"one two\n\nthree\n", b"one two\r\n\r\nthree\r\n", b"one two\n \t\n\n\nthree"):
        file.write_bytes(text)
        assert [part.strip() for part in Documents(str(file), 8, 256).paragraphs] == [b"one two", b"three"]


def test_a_file_of_bytes_is_not_read_as_text(tmp_path: Path) -> None:
    file = tmp_path / "lengths.npy"
    np.save(file, np.arange(1, 100))
    result = CliRunner().invoke(app, ["train", "--data", str(file)])
    assert isinstance(result.exception, ValueError) and "is not a text file" in str(result.exception)


def test_a_wrong_model_is_refused_before_torch_is_loaded() -> None:
    script = (
        "import sys; from flexcp.cli.main import run; sys.argv = ['flexcp', 'train', '--model', 'qwen3-8b']\n"
        "try: run()\nexcept SystemExit as end: assert end.code == 2 and 'torch' not in sys.modules, end.code"
    )
    ran = subprocess.run([sys.executable, "-c", script], check=True, timeout=120, capture_output=True, text=True)
    assert ran.stderr.startswith("flexcp: unknown model 'qwen3-8b'") and "did you mean" not in ran.stderr


def test_a_gpt_of_other_sizes_trains() -> None:
    words = ["--ranks", "1", "--steps", "1", "--tokens", "64", "--heads", "2", "--head-dim", "8", "--layers", "1"]
    found = json.loads(CliRunner().invoke(app, ["train", *words, "--quiet", "--json"]).stdout)
    assert [r["tokens"] for r in found] == [64]


def test_the_command_prints_json_or_a_summary() -> None:
    arguments = ["train", "--ranks", "1", "--steps", "2", "--tokens", "64", "--quiet"]
    found: list[dict[str, Any]] = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [r["step"] for r in found] == [0, 1]
    assert "tokens/s" in CliRunner().invoke(app, arguments).stdout


def test_a_line_and_the_summary_say_what_was_measured() -> None:
    report = StepReport(3, 2.5, 7, 1000, 1.0, 50.0, 40.0, 2_000_000, 1.25, 1.0)
    assert report.tokens_per_second == 20_000
    for words in ("2.50000", "20,000", "50.0 ms", "40.0 ms", "1.25"):
        assert words in line(report)
    table = Table(None, TrainConfig())
    table.add(report)
    assert "1.25 x" in table.summary()


def test_documents_that_steps_end_in_are_told_of(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("10\n20\n30\n")

    def said(data: str, tokens: int) -> str:
        console = Console(file=io.StringIO(), width=200)
        Table(console, TrainConfig(data=data, tokens=tokens, steps=4)).close()
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    told = " ".join(said(f"@{file}", 20).split())
    assert "3 of 4 steps end inside" in told, "borders at 20, 40, 60 (an end) and 80, in the next round"
    assert "(2 of the file's 3 documents)" in told, "20 and 80 are in the same document"
    assert "4 steps of 20 tokens read the file's 3 documents (60 tokens) 1.3 times" in told
    assert "inside" not in said(f"@{file}", 30), "every step ends with a document"
    assert "2.0 times" in said(f"@{file}", 30), "a file that is read twice is told of where nothing is cut, too"
    assert "times" not in said(f"@{file}", 15), "4 steps of 15 tokens are the file, once"
    assert "cut" not in said("longtail", 64)
    text = tmp_path / "text.txt"
    text.write_text("never odd or even")
    assert "the rest of its last document is left out" in said(str(text), 64)
