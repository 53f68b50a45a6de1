"""Tests that every command option that takes a JSON file from users (``DOORS``) reads it, or refuses it in one line
that names the file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from flexcp.cli.main import run
from flexcp.io.json_files import read_json

DEEP = "[" * 100_000 + "]" * 100_000
CONTENTS = {
    "deep": (DEEP.encode(), "nested too deep"),
    "cut off": (b'{"format": ', "not JSON, or cut off"),
    "empty": (b"", "not JSON, or cut off"),
    "no text": (b'"\xff\xfe"', "not a text file"),
    "infinite": (b'{"number": 1e400}', "the number 1e400 is too large"),
    "infinity": (b'{"number": -Infinity}', "-Infinity is no number"),
    "not a number": (b'{"number": NaN}', "NaN is no number"),
    "long": (b'{"number": ' + b"9" * 5000 + b"}", "is too large"),
    "beyond 64 bits": (b'{"number": 9223372036854775808}', "the number 9223372036854775808 is too large"),
}
DOORS = {
    "mask": ["plan", "--lengths", "40", "--ranks", "2", "--mask", "@{}"],
    "cost": ["plan", "--lengths", "40", "--ranks", "2", "--cost", "{}"],
    "dump": ["verify", "@{}"],
}


def said(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command with wrong input, check that it prints one line with exit code 2, and return that line."""
    monkeypatch.setattr(sys, "argv", ["flexcp", *words])
    with pytest.raises(SystemExit) as end:
        run()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "", err
    assert err.startswith("flexcp: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("door", DOORS)
def test_every_door_names_the_file(
    door: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, complaint = CONTENTS[content]
    file = tmp_path / "given.json"
    file.write_bytes(data)
    err = said([word.format(file) for word in DOORS[door]], monkeypatch, capsys)
    assert str(file) in err and complaint in err


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_file_is_named_too(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "missing.json"):
        assert str(place) in said([word.format(place) for word in DOORS[door]], monkeypatch, capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_rights(tmp_path: Path) -> None:
    (tmp_path / "mine.json").touch(0)
    with pytest.raises(ValueError, match=r"cannot read a thing from .*mine.json: Permission denied"):
        read_json(tmp_path / "mine.json", "thing", "ask")


@pytest.mark.parametrize("line", [DEEP, "{", '{"text": ' + "9" * 5000 + "}"])
def test_a_line_of_documents_is_named(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "documents.jsonl"
    file.write_text(f'{{"tokens": [1, 2]}}\n{line}\n')
    err = said(["advise", str(file), "--cluster", "h100:1x8"], monkeypatch, capsys)
    assert f"{file}, line 2" in err


def test_what_a_line_holds_besides_is_not_looked_at(tmp_path: Path) -> None:
    from flexcp.data.document_lengths import document_lengths

    file = tmp_path / "documents.jsonl"
    file.write_text('{"input_ids": [1, 2, 3], "score": NaN, "id": 18446744073709551615}\n')
    assert document_lengths(str(file), None, None) == [3]


def test_numbers_that_are_none_in_a_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "flexcp-dump-1.json"
    for number in ("1.5", '"one"', "null", "true"):
        step = f'{{"number": {number}, "plan": "", "hash": "", "passes": [], "error": ""}}'
        head = '"format": "flexcp dump", "version": 1, "reason": "", "message": "", "global_rank": 0'
        file.write_text(f'{{{head}, "steps": [{step}]}}')
        err = said(["verify", f"@{file}"], monkeypatch, capsys)
        assert f"{file} is a damaged dump" in err and "is no whole number" in err


@pytest.mark.parametrize(
    "cost", [{"format": "flexcp-cost-1", "forward_efficiency": -1}, {"format": "flexcp-cost-1", "x": 1}]
)
def test_a_cost_model_of_wrong_values_is_named(
    cost: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost))
    assert str(file) in said([word.format(file) for word in DOORS["cost"]], monkeypatch, capsys)


def test_a_mask_file_of_wrong_slices_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mask.json"
    file.write_text('{"documents": [{"length": 40, "slices": [[0, 99, 0, 99, null, null]]}]}')
    assert str(file) in said([word.format(file) for word in DOORS["mask"]], monkeypatch, capsys)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"number": 3}')
    assert read_json(file, "cost model", "write one") == {"number": 3}
