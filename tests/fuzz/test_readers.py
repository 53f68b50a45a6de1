"""Proves that changed files of every kind are read, or refused in one line that names them.
``make fuzz-readers`` tries 50,000.
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
