"""Proves the plan's file format: loading a saved file gives the same plan, and a file that is damaged, cut off, of
another version or malicious is refused.

``make fuzz-plans`` runs over 100,000 mutated files; a sample of that run is executed here in a separate process, under
the same supervision.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexcp
from flexcp.arrays.packed_columns import Reader, packed
from flexcp.data.lengths import parse_lengths
from flexcp.masks import Mask
from flexcp.plan import file as wire
from flexcp.plan.file import PlanFormatError, load_plan, save_plan, version_1_hash
from flexcp.plan.plan import Plan
from test_planner import golden_plans

FUZZER = Path(__file__).parents[2] / "benchmarks" / "fuzz_plans.py"


def small(**options: Any) -> Plan:
    planner = flexcp.Planner(8, 2, 64, cluster=flexcp.cluster("h100", 2, 2), strategy="zigzag")
    return planner([300, 7, 1, 90], **options)


def resealed(
    data: bytes, facts: Callable[[Any], None] | None = None, body: Callable[[bytes], bytes] | None = None
) -> bytes:
    """Return the file with its facts or body changed, and valid sizes and checksum."""
    inside = zlib.decompress(data[wire._PREFIX.size :])
    size = struct.unpack_from("<Q", inside)[0]
    if facts is not None:
        values = json.loads(inside[8 : 8 + size])
        facts(values)
        text = json.dumps(values).encode()
        inside = struct.pack("<Q", len(text)) + text + inside[8 + size :]
    if body is not None:
        inside = body(inside)
    deflated = zlib.compress(inside)
    head = wire._PREFIX.pack(wire.MAGIC, wire.VERSION, wire._PREFIX.size + len(deflated), len(inside), bytes(16))
    return wire._sealed(head, deflated)


def test_every_kind_of_plan_comes_back() -> None:
    for name, plan in golden_plans().items():
        data = save_plan(plan)
        found = load_plan(data)
        assert found == plan and found.hash == plan.hash, name
        assert found.placement.note == plan.placement.note
        assert [m.name for m in found.batch.masks] == [m.name for m in plan.batch.masks]
        for mine, theirs in zip(found.batch.masks, plan.batch.masks, strict=True):
            assert np.array_equal(mine.slices, theirs.slices) and np.array_equal(mine.first, theirs.first)
        for mine_table, their_table in zip(found.tables(), plan.tables(), strict=True):
            assert np.array_equal(mine_table.matrix(), their_table.matrix())
        assert save_plan(found) == data
        found.check()


@pytest.mark.parametrize(
    "mask",
    [
        flexcp.full(),
        flexcp.window(None, 3),
        flexcp.masks.lambda_(4, 8),
        flexcp.masks.shared_question(3, 0.3),
        flexcp.masks.causal_blockwise(16, 1),
        flexcp.masks.chunked(16),
        flexcp.masks.prefix(7),
        [
            flexcp.masks.modality([(1, 3)], self_only=True),
            flexcp.causal(),
            flexcp.masks.modality([]),
            flexcp.masks.prefix(5),
        ],
        [flexcp.tree([-1, 0, 1, 0, -1], [100, 0, 50, 50, 100], ends=[3, 2, 0, 3]), *[flexcp.causal()] * 3],
        [flexcp.tree([-1, 0, 0], [100, 50, 150], left=7), *[flexcp.window(7)] * 3],
        [
            flexcp.masks.shared_question([100, 100], 100),
            flexcp.masks.from_key_ranges([[(0, 1)]] * 7),
            *[flexcp.causal()] * 2,
        ],
    ],
)
def test_every_mask_comes_back(mask: Any) -> None:
    plan = small(mask=mask)
    assert load_plan(save_plan(plan)) == plan


def test_a_file_of_version_1_means_what_was_done_then() -> None:
    plan = load_plan((Path(__file__).parent / "version_1.flexcp").read_bytes())
    assert (
        version_1_hash(plan) == "48bd504fad17fba4668bf3ca9908617f" != plan.hash
    )  # as it was printed when the file was written
    masks = {"window": (flexcp.window(100, 0), 3), "full": (flexcp.causal(), 1)}
    planner = flexcp.Planner(8, 4, 64, cluster=flexcp.cluster("h200", 2, 2), strategy="blocks", keep_kv=10**9)
    again = planner([3000, 700, 41, 1, 260], masks=masks)
    # Today's planner cuts stages differently; which rank keeps and computes what is the same.
    assert (plan.batch.lengths == again.batch.lengths).all() and again.cost == plan.cost
    assert (plan.placement.runs.matrix() == again.placement.runs.matrix()).all()
    for program in (p for pair in plan.programs for p in pair):
        how = program.execution
        assert not how.rounds_per_call.any() and (how.ahead == 1).all() and not how.margin.any()
    plan.check()
    assert load_plan(save_plan(plan)) == plan != again


def test_too_many_stages_of_version_1_are_named() -> None:
    with pytest.raises(ValueError, match="a program has 300000 stages; it has 1 to 262144"):
        wire._as_before(300_000, None)  # type: ignore[arg-type]


def test_a_file_of_version_2_is_the_plan_it_was() -> None:
    data = (Path(__file__).parent / "version_2.flexcp").read_bytes()
    plan = load_plan(data)
    assert plan.hash == "1ced00331bff6269d0670e667a802a5f"  # as it was printed when the file was written
    plan.check()
    again = save_plan(plan)
    assert load_plan(again) == plan and again[8] == 4 and data[8] == 2


def test_a_file_of_version_3_is_the_plan_it_was() -> None:
    data = (Path(__file__).parent / "version_3.flexcp").read_bytes()
    plan = load_plan(data)
    assert plan.hash == "44566aefb59cd41b50479dc85abfdca0"  # as it was printed when the file was written
    assert data[8] == 3 and plan.layout_given, "which it did not say, and is not doubted"


@pytest.mark.parametrize("layout", ["contiguous", "free"])
def test_whether_a_layout_was_given_comes_back_and_is_not_in_the_hash(layout: str) -> None:
    planner = flexcp.Planner(8, 4, 64, cluster=flexcp.cluster("h200", 1, 2), strategy="allgather")
    plan = planner([3000, 700], layout=layout)
    assert plan == planner([3000, 700], layout="free"), "an all-gather keeps contiguous parts by itself"
    assert plan.layout_given == load_plan(save_plan(plan)).layout_given == (layout != "free")


@pytest.mark.parametrize("given", ["a.plan", Path("a.plan"), None, 10**10], ids=str)
def test_what_is_no_bytes_is_refused(given: Any) -> None:
    """A path ended in "string argument without an encoding", and a number made as many zeros."""
    with pytest.raises(PlanFormatError, match=r"load_plan takes the bytes of a file, .*read_bytes\(\); got "):
        load_plan(given)


def test_a_tree_of_version_2_is_refused() -> None:
    """Version 2 had no trees, so a file of version 2 with a tree was not written by flexcp."""
    plan = small(mask=[flexcp.tree([-1, 0, 0], [100, 100, 100]), *[flexcp.causal()] * 3])
    data = save_plan(plan)
    head = wire._PREFIX.pack(wire.MAGIC, 2, *wire._PREFIX.unpack_from(data)[2:])
    with pytest.raises(PlanFormatError):
        load_plan(wire._sealed(head, data[wire._PREFIX.size :]))


def test_a_tree_comes_back_with_its_sequences() -> None:
    tree = flexcp.tree([-1, 0, 1, 0, -1], [100, 0, 50, 50, 100], ends=[3, 2, 0, 3])
    plan = small(mask=[tree, *[flexcp.causal()] * 3])
    again = load_plan(save_plan(plan))
    assert again.batch.masks[0].rules[0] == tree and again.hash == plan.hash
    others = [
        flexcp.tree([-1, 0, 1, 0, -1], [100, 0, 50, 50, 100]),
        flexcp.tree([-1, 0, 1, 0, -1], [100, 0, 50, 50, 100], left=299),
    ]
    assert len({plan.hash, *(small(mask=[other, *[flexcp.causal()] * 3]).hash for other in others)}) == 3


def test_execution_adds_at_most_a_quarter_to_a_file() -> None:
    for name, plan in golden_plans().items():
        data = save_plan(plan)
        inside = zlib.decompress(data[wire._PREFIX.size :])
        size = struct.unpack_from("<Q", inside)[0]
        facts = json.loads(inside[8 : 8 + size])
        facts["cost"] = {"format": facts["cost"]["format"], **plan.cost.version_1()}
        ways = b"".join(packed([getattr(t, n) for n in t.names()]) for t in plan.tables()[len(plan.moving_tables()) :])
        text = json.dumps(facts, separators=(",", ":")).encode()
        before = struct.pack("<Q", len(text)) + text + inside[8 + size :].removesuffix(ways)
        assert len(before) < len(inside) and len(data) <= 1.25 * (wire._PREFIX.size + len(zlib.compress(before, 6))), (
            name
        )


def test_files_are_small() -> None:
    planner = flexcp.Planner(32, 8, 128, cluster=flexcp.cluster("h100", 8, 8), strategy="groups")
    plan = planner(parse_lengths("web:1048576:0"))
    tables = sum(8 * len(t) * len(t.names()) for t in plan.tables())
    assert len(save_plan(plan)) < tables / 10


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    data = save_plan(small())
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(PlanFormatError):
            load_plan(bytes(damaged))
        with pytest.raises(PlanFormatError):
            load_plan(data[:at])
    with pytest.raises(PlanFormatError, match=rf"should have {len(data)} bytes but has {len(data) + 1}"):
        load_plan(data + b"\0")


def test_messages_say_what_is_wrong() -> None:
    data = save_plan(small())
    for broken, message in (
        (b"", "does not begin as one"),
        (b"PK\x03\x04" + data, "does not begin as one"),
        (data[:5], "cut off after 5 bytes"),
        (data[:8] + struct.pack("<I", 7) + data[12:], r"format version 7, and this flexcp reads versions 1 to 4"),
        (data[:-1], "copy it again"),
        (data[:-1] + bytes([data[-1] ^ 1]), "checksum is wrong"),
    ):
        with pytest.raises(PlanFormatError, match=message):
            load_plan(broken)
    assert issubclass(PlanFormatError, ValueError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["shape"].update(heads=0), "heads must be an integer from 1 to 65,536; got 0"),
        (
            lambda f: f["shape"].update(head_dim=10**12),
            "head_dim must be an integer from 1 to 65,536; got 1000000000000",
        ),
        (lambda f: f["shape"].update(colour="red"), "colour"),
        (lambda f: f["cluster"].update(nodes=1 << 40), "more than 16384 ranks"),
        (lambda f: f["cost"].update(format="x"), "no cost model"),
        (lambda f: f["cost"].update(kernel_ns=-1), "kernel_ns"),
        (lambda f: f.update(pads=-1), "-1 pads"),
        (lambda f: f.pop("masks"), "no 'masks'"),
        (lambda f: f.update(hash="0" * 32), "was saved as '000000000000'"),
        (lambda f: f.update(strategy="dp"), "has hash"),
        (lambda f: f["traffic"].update(kind="x" * 9), "no traffic is called"),
        (lambda f: f["traffic"].update(groups=[[[99]]]), "a group's rank does not exist"),
        (lambda f: f["rules"].__setitem__(0, ["__import__", ["os"], None]), "no mask is called"),
        (lambda f: f["rules"].__setitem__(0, ["window", [-1, 0], None]), "window left must be 0 or more"),
        (lambda f: f["rules"].__setitem__(0, ["shared-question", [1 << 40, 0.5], None]), "at most 16384 answers"),
        (lambda f: f["programs"][0][0].__setitem__(1, 300_000), "a program has 300000 stages; it has 1 to 262144"),
        (lambda f: f["programs"][0][0].__setitem__(1, 0), "a program has 0 stages; it has 1 to 262144"),
        (lambda f: f["programs"][0][0].__setitem__(0, 9), "own tokens enter in stage 9 of"),
        (lambda f: f["programs"][0][0].__setitem__(1, 10**30), "is too large"),
        (lambda f: f["programs"].pop(), "0 pairs of programs for 1 masks"),
    ],
)
def test_facts_are_not_believed(change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        load_plan(resealed(save_plan(small()), facts=change))


def forged(plan: Plan, table: int, column: str, value: int) -> bytes:
    """A plan with one wrong number, saved with a right hash and checksum."""
    tables = plan.tables()
    cells = getattr(tables[table], column).copy()
    cells[0] = value
    tables[table] = replace(tables[table], **{column: cells})
    transfers, ways = tables[2:4], tables[4:6]
    placement = replace(plan.placement, runs=tables[0], regions=(tables[1],))
    (forward, backward) = plan.programs[0]
    pair = zip((forward, backward), transfers, ways, strict=True)
    programs = (tuple(replace(program, transfers=t, execution=way) for program, t, way in pair),)
    return save_plan(replace(plan, placement=placement, programs=programs))


@pytest.mark.parametrize(
    ("table", "column", "value", "message"),
    [
        (0, "rank", 4, "a run's rank does not exist"),
        (0, "start", 3, "do not cover the stream once"),
        (1, "document", 4, "a region's document does not exist"),
        (1, "q1", 10_000, "rows do not exist"),
        (1, "h1", 9, "heads do not exist"),
        (2, "source", -1, "a transfer's source does not exist"),
        (2, "stop", 1 << 40, "a piece's tokens do not exist"),
        (3, "kind", 6, "a transfer's kind does not exist"),
        (3, "stage", 0, "a transfer's stage does not exist"),
        (4, "margin", -1, "margin is below 0"),
        (4, "rounds_per_call", 1 << 40, "a margin or a number of rounds per call is above"),
        (5, "ahead", -1, "ahead is below 0"),
    ],
)
def test_every_number_of_a_table_names_something_that_exists(table: int, column: str, value: int, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        load_plan(forged(small(), table, column, value))


def peak(data: bytes) -> int:
    """Return the peak memory while a file is being refused."""
    tracemalloc.start()
    try:
        with pytest.raises(PlanFormatError):
            load_plan(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_only_plans_are_saved() -> None:
    with pytest.raises(ValueError, match=r"save_plan takes a plan, .*; got None"):
        save_plan(None)  # type: ignore[arg-type]


def test_what_would_blow_up_is_refused_before_it_is_made() -> None:
    data = save_plan(small())
    huge = struct.pack("<Q", 1 << 40) + struct.pack("<Bq", 0, 1)  # a column of 2**40 ones in 17 bytes
    bomb = resealed(data, body=lambda inside: inside + bytes(1 << 25))
    tables = resealed(data, body=lambda inside: inside[: 8 + struct.unpack_from("<Q", inside)[0]] + huge)
    deep = resealed(data, body=lambda inside: struct.pack("<Q", 100_000) + b"[" * 100_000)
    lists = resealed(data, body=lambda inside: struct.pack("<Q", 3 << 23) + b"[]," * (1 << 23))
    for hostile in (bomb, tables, deep, lists):
        assert peak(hostile) < 16 << 20


def test_slices_that_would_take_minutes_to_compare_are_refused() -> None:
    rows = tuple((0, 20_000, i, i + 1, -(1 << 40), 1 << 40) for i in range(20_000))
    plan = small(mask=[flexcp.causal()] * 4)
    mask = replace(plan.batch.masks[0], rules=(Mask("slices", (), 20_000, rows),))
    batch = replace(plan.batch, masks=(mask,))
    with pytest.raises(ValueError, match="too large for a file"):
        save_plan(replace(plan, placement=replace(plan.placement, batch=batch)))


def test_a_plan_that_needs_more_memory_than_its_bytes_grant_is_saved_with_filler() -> None:
    planner = flexcp.Planner(8, 2, 64, cluster=flexcp.cluster("h100", 1, 1), strategy="dp")
    plan = planner([2] * 40_000, flexcp.masks.shared_question(1, 0.5))
    data = save_plan(plan)
    assert len(data) > 4 * len(zlib.compress(zlib.decompressobj().decompress(data[wire._PREFIX.size :])))
    assert load_plan(data) == plan


def test_columns_of_any_numbers_come_back() -> None:
    rng = np.random.default_rng(0)
    for low, high in ((0, 1), (0, 256), (-3, 70_000), (-(1 << 62), 1 << 62)):
        for rows in (0, 1, 2, 1000):
            block = [rng.integers(low, high, rows), np.sort(rng.integers(low, high, rows)), np.arange(rows) * 1000]
            reader = Reader(packed(block), 1 << 20)
            for found, column in zip(reader.block(3), block, strict=True):
                assert np.array_equal(found, column)
            reader.end()


def test_a_sample_of_mutated_files() -> None:
    result = subprocess.run(
        [sys.executable, str(FUZZER), "--count", "500", "--seed", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["files"] == 500 and found["failures"] == 0
    assert found["refused"] > 375 and found["read"] > 12 and found["reasons"] > 40
