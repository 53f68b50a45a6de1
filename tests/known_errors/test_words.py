"""Tests of what commands say about the error of simulated times: the recorded entry that applies to a cost model, with
its numbers and its source, or that no error has been measured.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flexcp.calibration import Errors
from flexcp.cost import CostModel
from flexcp.known_errors import entries, words
from flexcp.known_errors.entries import KnownError
from flexcp.known_errors.words import applicable, error_data, error_words, off_words, sure_words

STATED = KnownError("published, stated", Errors(44, 0.18, 0.676, 0.9), "2026-01-02")
STEPS = KnownError("steps, box", Errors(48, 0.023, 0.08, 0.1), "2026-01-03", "2 cores, idle", 30, 29)
FITTED = CostModel("calibrated")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "known.json"
    path.write_text("{}")
    monkeypatch.setattr(words, "known_errors", lambda: entries.known_errors(path))
    return path


def write(path: Path, *found: KnownError) -> None:
    path.write_text(json.dumps({each.key: each.to_json() for each in found}))


def test_the_analytic_model_is_judged_by_published_figures_and_a_fitted_one_by_steps(file: Path) -> None:
    write(file, STEPS, STATED)
    assert applicable(CostModel()) == STATED and applicable(replace(CostModel(), token_bytes=1)) == STATED
    assert applicable(FITTED) == STEPS
    assert "44 published figures of stated settings come out off by 18 % in the median, 68 % at the 90th" in off_words(
        CostModel()
    )
    assert "48 measured steps of CPU ranks come out off by 2 % in the median" in off_words(FITTED)
    assert off_words(FITTED).endswith("(docs/results/errors.md)")
    data = error_data(CostModel())
    assert data is not None and (data["median"], data["source"], data["date"]) == (0.18, words.PAGE, "2026-01-02")


def test_what_has_not_been_run_is_not_stated(file: Path) -> None:
    write(file, STATED)
    assert (
        applicable(FITTED) is None and error_data(FITTED) is None and sure_words(CostModel()) == off_words(CostModel())
    )
    assert (
        off_words(FITTED)
        == f"how far off times simulated with a fitted cost model are has not been measured ({words.PAGE})"
    )


def test_what_a_calibration_held_out_stands_beside_it(file: Path) -> None:
    write(file, STEPS)
    said = error_words(FITTED, {"kernels": Errors(3, 0.1, 0.2, 0.3)})
    assert said.startswith(
        "cost model calibrated, median error held out: kernels 10.0% (90th percentile 20.0%, 3 shapes); simulated, 48 "
    )


def test_ratios_say_whether_the_order_was_right(file: Path) -> None:
    write(file, KnownError("ratios, stated", Errors(28, 0.24, 2.87, 7.53), "2026-01-02", pairs=28, right=26))
    found = (
        "of 28 pairs of published figures that are 10 % apart or more 26 come out in the published order, "
        "their ratios off by 24 % in"
    )
    assert found in sure_words(CostModel()) and sure_words(CostModel()).count(words.PAGE) == 1


def test_the_file_of_the_package_holds_known_rows_only() -> None:
    assert set(json.loads(entries.FILE.read_text())) == set(entries.known_errors()) <= set(entries.ROWS)
