"""Proves the text picture of a plan: every cell that ``print(plan)`` shows is right, on plans small enough to draw by
hand.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.io.sizes import size
from flexcp.plan.plan import Plan
from flexcp.plan.text import picture


def plan_for(lengths: list[int], ranks: int, mask: flexcp.Mask | None = None, **options: Any) -> Plan:
    call = {name: options.pop(name) for name in ("layout", "tokens", "pad_to", "masks") if name in options}
    where = options.pop("cluster", None) or flexcp.cluster("h100", 1, ranks)
    options.setdefault("strategy", "blocks")
    return flexcp.Planner(2, 2, 8, cluster=where, **options)(lengths, mask, **call)


def after(text: str, label: str) -> str:
    """Return the rest of the line that begins with a label."""
    return next(line for line in text.splitlines() if line.startswith(label))[len(label) :]


def matrix(text: str) -> list[str]:
    """Return the cells of the attention matrix, one string for each row."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "rows down, keys right" in line) + 1
    return ["".join(line.split()) for line in lines[first : lines.index("", first)]]


def test_strip_shows_owners_and_where_documents_begin() -> None:
    text = picture(plan_for([4, 1, 7], 3, strategy="allgather", layout="contiguous"))
    assert after(text, "documents  ") == "|   ||      "
    assert after(text, "kept by    ") == "000011112222"


def test_strip_of_a_long_stream_marks_cells_of_many() -> None:
    text = picture(plan_for([64] * 4, 2, strategy="zigzag"))
    assert after(text, "documents  ").rstrip() == "|" + (" " * 15 + "|") * 3
    assert after(text, "kept by    ") == "0000111111110000" * 4
    crowded = picture(plan_for([1] * 256, 2, layout=[list(range(0, 256, 2)), list(range(1, 256, 2))]))
    assert after(crowded, "documents  ") == ":" * 64
    assert after(crowded, "kept by    ") == "*" * 64 + "   (* for several ranks)"


def test_strip_shows_pads_and_the_title_counts_them() -> None:
    text = picture(plan_for([5], 2, strategy="ring", tokens="equal", pad_to=4))
    assert "5 tokens and 3 pads" in text.splitlines()[0]
    assert after(text, "kept by    ") == "00111001"
    assert re.search(r"^all +8 ", text, re.MULTILINE)


def test_matrix_shows_who_computes_what_of_a_causal_document() -> None:
    text = picture(plan_for([6, 2], 2, strategy="ring"))
    assert "document 0 (6 tokens)" in text
    assert matrix(text) == ["0.....", "00....", "000...", "1111..", "11111.", "111111"]


def test_matrix_shows_the_mask_of_a_window() -> None:
    assert matrix(picture(plan_for([5], 1, flexcp.window(1, 1)))) == ["00...", "000..", ".000.", "..000", "...00"]


def test_matrix_of_a_long_document_has_24_rows() -> None:
    even = picture(plan_for([4800], 2, flexcp.full(), strategy="ring"))
    assert matrix(even) == ["0" * 24] * 12 + ["1" * 24] * 12 and "several" not in even
    mixed = picture(plan_for([4800], 5, flexcp.full(), strategy="ring"))
    assert matrix(mixed)[4] == "*" * 24, "a row that two ranks compute"
    assert "by who computes them (* for several ranks):" in mixed


def test_matrix_of_split_heads_shows_the_first_head() -> None:
    assert matrix(picture(plan_for([4], 2, flexcp.full(), strategy="ulysses"))) == ["0000"] * 4


def test_title_names_the_plan_and_its_masks() -> None:
    plan = plan_for([30, 4], 4, flexcp.window(7, 0), strategy="zigzag:2", cluster=flexcp.cluster("a100", 2, 2))
    title = picture(plan).splitlines()[0]
    for words in (plan.hash[:12], "zigzag:2", "a100:2x2", "2 documents", "34 tokens", "window of 8 keys"):
        assert words in title
    assert "pads" not in title
    both = plan_for([30, 4], 2, masks={"long": (flexcp.full(), 1), "short": ([flexcp.causal(), flexcp.full()], 3)})
    assert "long: full" in picture(both).splitlines()[0]
    assert "short: one per document" in picture(both).splitlines()[0]


@pytest.mark.parametrize(("heads", "name"), [((8, 4), "usp:4,2"), ((4, 2), "usp:2,4")])
def test_usp_without_degrees_is_named_by_those_it_chose(heads: tuple[int, int], name: str) -> None:
    """With half of the heads, as under tensor parallelism of 2, ``usp`` chooses other degrees."""
    where = flexcp.cluster("h100", 2, 4)
    plan = flexcp.Planner(*heads, 64, cluster=where, strategy="usp")([900, 40])
    asked = flexcp.Planner(*heads, 64, cluster=where, strategy=name)([900, 40])
    assert plan.strategy == plan.label == name and f" {name} on h100:2x4" in picture(plan)
    assert (plan.placement.runs.matrix() == asked.placement.runs.matrix()).all() and (
        plan.bytes() == asked.bytes()
    ).all()


@pytest.mark.parametrize("strategy", ["blocks", "ring", "dp", "usp"])
def test_table_has_the_plans_numbers_of_every_rank(strategy: str) -> None:
    plan = plan_for([900, 40, 3], 4, strategy=strategy, cluster=flexcp.cluster("h100", 2, 2))
    lines = picture(plan).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("rank ")) + 1
    forward, backward, work = plan.bytes(), plan.bytes(backward=True), plan.work()
    for rank in range(4):
        cells = lines[first + rank].split()
        assert cells[:3] == [str(rank), str(rank), str(plan.placement.tokens[rank])]
        assert float(cells[3]) == pytest.approx(work[rank] / work.mean(), abs=6e-4)
        moved = [forward[rank].sum(), forward[:, rank].sum(), backward[rank].sum(), backward[:, rank].sum()]
        assert cells[4:] == " ".join(size(n) for n in [*moved, plan.memory(rank).total]).split()
    total = lines[first + 4]
    for words in (
        "all        943",
        f"compute {imbalance(work):.3f}, tokens {imbalance(plan.placement.tokens):.3f}",
        f"forward {size(forward.sum())} ({size(plan.inter_node_bytes())} between nodes)",
        f"backward {size(backward.sum())}",
    ):
        assert words in total


def test_table_of_many_ranks_leaves_out_the_middle() -> None:
    text = picture(plan_for([500], 70, cluster=flexcp.cluster("h100", 7, 10)))
    assert "... 38 more ..." in text
    shown = [int(m[1]) for m in re.finditer(r"^\w +(\d+) +\d+ +\d\.\d{3}", text, re.MULTILINE)]
    assert shown == [*range(16), *range(54, 70)]
    every = picture(plan_for([500], 32, cluster=flexcp.cluster("h100", 4, 8)))
    assert "more ..." not in every


def test_a_plan_without_work_still_has_a_picture() -> None:
    text = picture(plan_for([3, 1], 2, [flexcp.from_slices(3, []), flexcp.from_slices(1, [])]))
    assert matrix(text) == ["..."] * 3
    assert "compute 1.000" in text


def test_print_shows_the_picture() -> None:
    plan = plan_for([40, 3], 2, strategy="blocks")
    assert str(plan) == picture(plan)
    assert repr(plan) == f"<Plan blocks {plan.hash[:12]}: 43 tokens on 2 ranks>"


def test_a_log_line_with_a_plan_is_one_line() -> None:
    plan = plan_for([40, 3], 2, strategy="auto")
    assert f"{plan}" == repr(plan) == f"<Plan auto: {plan.strategy} {plan.hash[:12]}: 43 tokens on 2 ranks>"
    assert f"{plan:>80}" == repr(plan).rjust(80)
    assert picture(plan).startswith(f"plan {plan.hash[:12]}: auto: {plan.strategy} on ")


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (1_250_000, "1.2 MB"), (3.5e9, "3.5 GB"), (2e12, "2000.0 GB")],
)
def test_sizes_for_people(count: float, expected: str) -> None:
    assert size(count) == expected


def test_bytes_are_those_of_the_first_mask_where_there_are_several() -> None:
    masks = {"full": (flexcp.causal(), 1), "near": (flexcp.window(3), 2)}
    assert str(plan_for([16, 8], 2, masks=masks)).endswith("bytes are of one layer of the mask 'full', the first of 2")
    assert "the first of" not in str(plan_for([16, 8], 2))
