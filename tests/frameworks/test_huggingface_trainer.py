"""Proves the Trainer adapter: the Trainer's own run in data parallelism, and ours where ranks share every batch, have the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import one_process, trained, with_accelerate

from flexcp.frameworks.shared_batch import lengths_of, next_in_document
from flexcp.measure.ranks import RankError, RankPool


@pytest.fixture(scope="module")
def theirs(two: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two.run(trained, str(tmp_path_factory.mktemp("theirs")), "padded", False)[0]


@pytest.mark.parametrize("collator", ["flat", "padded"])
def test_the_trainer_trains_as_without_flexcp(
    two: RankPool, theirs: dict[str, Any], tmp_path: Path, collator: str
) -> None:
    for ours in two.run(trained, str(tmp_path), collator, True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-5)
        for name, weight in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][name], weight, atol=1e-6, rtol=1e-4)
    assert theirs["losses"][0] != theirs["losses"][1]


def test_a_trainer_whose_model_ignores_the_step_stops(two: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"never used it"):
        two.run(trained, str(tmp_path), "flat", True, True)


def test_accelerate_with_a_loop_of_ones_own(two: RankPool) -> None:
    right = one_process()
    for losses in two.run(with_accelerate):
        assert losses == pytest.approx(right, rel=1e-6), "Transformers takes its loss in float32"


def test_documents_are_read_from_positions() -> None:
    assert lengths_of(torch.tensor([[0, 1, 2, 0, 0, 1]])) == [3, 1, 2]
    assert lengths_of(torch.tensor([[5, 6, 0], [0, 1, 2]])) == [2, 1, 3]
    assert next_in_document(torch.tensor([1, 2, 3, 4]), [3, 1]).tolist() == [2, 3, -100, -100]
