"""Tests that randomly changed files of every kind are either read, or refused in one line that names the file.
``make fuzz-readers`` tries 50,000 files.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from flexcp.data.loader import Loader
from flexcp.fuzz.readers import fuzz_readers, readers


def test_good_files_are_read(tmp_path: Path) -> None:
    for reader in readers(tmp_path):
        path = tmp_path / f"good{reader.suffix}"
        path.write_bytes(reader.good)
        reader.read(path)


def test_changed_files_are_read_or_refused(tmp_path: Path) -> None:
    read, refused = Counter[str](), Counter[str]()
    for kind, was_read, problem in fuzz_readers(960, 0, tmp_path):
        assert problem is None, f"{problem.kind}: {problem.message}\n{problem.content[:500]!r}"
        (read if was_read else refused)[kind] += 1
    assert len(refused) == 12 and len(read) >= 8


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("trees", "[4, 2, 3]", f"[4, {10**4000}, 3]"),
        ("trees", "[-1, 0, 0]", f"[{10**4000}, 0, 0]"),
        ("trees", '"ends": [1, 2]', f'"ends": [1, {10**4000}]'),
        ("dump", '"plan": "', '"plan": "\\ud800'),
        ("fuzz case", '"seed"', f'"{"x" * 3000}"'),
        ("documents", '"input_ids"', f'"{"x" * 3000}"'),
        ("documents", "9}", f"{'9' * 3000}.5}}"),
        ("lengths as JSON", '"length"', f'"{"x" * 3000}"'),
    ],
)
def test_what_the_fuzzer_found_is_refused_in_a_short_line(kind: str, old: str, new: str, tmp_path: Path) -> None:
    (reader,) = (one for one in readers(tmp_path) if one.kind == kind)
    path, good = tmp_path / f"changed{reader.suffix}", reader.good.decode()
    assert old in good
    path.write_text(good.replace(old, new, 1))
    with pytest.raises(ValueError, match=path.name) as refusal:
        reader.read(path)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": None},
        {"place": -1},
        {"step": "x"},
        {"source": ...},
        {"seed": ...},
        {"speeds": 3},
        {"speeds": [[0, 0, [0]]]},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: dict[str, object], loader: Loader) -> None:
    state = loader.state_dict()
    damaged = {k: v for k, v in (state | change).items() if v is not ...}
    with pytest.raises(ValueError, match=r"damaged|format"):
        loader.load_state_dict(damaged)
    assert loader.state_dict() == state


@pytest.fixture
def loader() -> Loader:
    from flexcp.fuzz.readers import _loader

    return _loader()
