"""Tests of the memory that ``flexcp advise`` prints: that of the worst rank over all passes, not only the simulated
ones. If there are too many passes to plan, those with the longest documents are planned. Refused passes are reported.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from flexcp.batch import make_batch
from flexcp.cli.main import app
from flexcp.clusters import cluster
from flexcp.compare import epoch_memory as module
from flexcp.compare.advice import Question, advise, deal, request_of
from flexcp.compare.epoch_memory import MOST_PASSES, EpochMemory, epoch_memory, passes_to_plan
from flexcp.cost import CostModel
from flexcp.io.sizes import size
from flexcp.models.find import find_model
from flexcp.planner import Planner
from flexcp.planners.request import Refused, Request

QUESTION = Question(find_model("llama3-8b"), cluster("h100:1x4"), None, CostModel(), 8192, 28_672, today="ring")
PASS = [9000, *[400] * 49]
EPOCH = [*PASS * 3, 28_000, *PASS * 3]
"""Seven passes, the fourth of one long document; only the first, the third and the fifth are simulated."""


def requested(number: int) -> Request:
    return request_of(QUESTION, make_batch(deal(EPOCH, QUESTION)[number], masks=QUESTION.masks))


def test_it_is_the_worst_rank_of_all_passes() -> None:
    found, passes = advise(QUESTION, EPOCH), deal(EPOCH, QUESTION)
    assert [28_000] in passes and found.longest_in == (0, 1), "a test of nothing: the long document was simulated"
    assert found.verdict != "static", "a test of another method"
    assert found.memory is not None and found.memory.planned == found.passes == len(passes) == 7
    planner = Planner(
        32, 8, 128, cluster=QUESTION.cluster, strategy="auto", max_tokens_per_rank=8192, training=QUESTION.training
    )
    layout = {"layout": "contiguous"} if found.verdict == "swap" else {}
    plans = [planner(lengths, masks=QUESTION.masks, **layout) for lengths in passes]
    totals = [[plan.memory(rank).total for rank in range(4)] for plan in plans]
    assert found.memory.bytes == max(map(max, totals)) == totals[found.memory.pass_number][found.memory.rank]
    assert found.memory.most_tokens == max(int(plan.placement.tokens.max()) for plan in plans)


def test_every_pass_and_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {3: [5, 9, 2], 4: [8, 1, 1]}

    def made(request: int, name: str, search: bool) -> tuple[str, object]:
        needed, tokens = needs.get(request, [1, 1, 1]), np.array([request, 1, 1])
        memory = lambda rank: SimpleNamespace(total=needed[rank])  # noqa: E731
        return name, SimpleNamespace(ranks=3, memory=memory, placement=SimpleNamespace(tokens=tokens))

    monkeypatch.setattr(module, "planned", made)
    found = epoch_memory("auto", "auto", [1] * 7, lambda number: number)  # type: ignore[arg-type, return-value]
    assert (found.bytes, found.rank, found.pass_number, found.most_tokens) == (9, 1, 3, 6)


def test_text_and_json_have_the_number_whatever_is_advised(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    for lengths, static, today in ((EPOCH, False, ["--today", "ring"]), ([512] * 112, True, [])):
        path.write_text("\n".join(map(str, lengths)))
        words = ["advise", str(path), "--cluster", "h100:1x4", "--max-tokens-per-rank", "8192", *today]
        found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        assert (found["verdict"] == "static") == static
        memory = found["memory"]
        assert memory["planned_passes"] == found["passes"] and memory["refused_passes"] == 0
        told = " ".join(CliRunner().invoke(app, words).stdout.split())
        assert f"an epoch of {found['passes']} passes: with {memory['strategy']} attention needs at most" in told
        assert f"{size(memory['max_rank_memory_bytes'])} on a rank (rank {memory['rank']} in pass" in told
        assert f"keeps {memory['most_tokens']:,} tokens" in told


def test_of_long_data_the_passes_with_the_longest_documents_are_planned() -> None:
    longest = [10] * 500
    for number in (3, 77, 499):
        longest[number] = 1000 + number
    numbers = passes_to_plan(longest)
    assert {3, 77, 499} <= set(numbers) and len(numbers) == len(set(numbers)) == MOST_PASSES
    assert max(b - a for a, b in pairwise(numbers)) < 100, "the others are spread over all"
    assert passes_to_plan(longest[:MOST_PASSES]) == list(range(MOST_PASSES))
    text = EpochMemory("auto", 2_500_000, 1, 7, 900, 500, MOST_PASSES).words()
    assert "over an epoch of 500 passes, of which 24 were planned, those with the longest documents among them" in text
    assert "at most 2.5 MB on a rank (rank 1 in pass 7)" in text


def test_refused_passes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = [max(lengths) for lengths in deal(EPOCH, QUESTION)]
    real = module.planned

    def refusing(request: Request, name: str, search: bool) -> object:
        if int(request.batch.lengths.max()) > 10_000:
            raise Refused("too long for a test")
        return real(request, name, search)

    monkeypatch.setattr(module, "planned", refusing)
    found = epoch_memory("auto", "auto", longest, requested)
    assert (found.refused, found.planned) == (1, len(longest)) and found.bytes > 0
    assert found.words().endswith("It refuses 1 of the planned passes: too long for a test.")
    alone = [number for number, length in enumerate(longest) if length > 10_000]
    with pytest.raises(Refused, match="too long for a test"):
        epoch_memory("auto", "auto", [28_000], lambda _: requested(alone[0]))
