"""File: save a plan as bytes, and load a plan from bytes.

    magic (8)  version (4)  length of the file (8)  length of the body (8)  checksum of all the rest (16)
    body, deflated

    body: length of the facts (8), facts as JSON (:mod:`flexcp.plan.fields`), then blocks of integer columns
    (``packed_columns.py``): document lengths, the rules that the documents of each mask use, explicit slices and
    trees, and the tables of the plan in the order of ``Plan.tables()``

Loading runs no code from the file: it reads JSON and numbers and calls public constructors. A file may be hostile. The
checksum finds accidental damage; the other checks defend against files that were made on purpose:

- Lengths are checked before they are used.
- Tables and slices may take at most ``ROOM`` bytes of memory plus ``PER_BYTE`` bytes for each byte of the file. A plan
  that needs more is saved with filler bytes.
- Shape, cluster, cost model and masks pass through the checks of their constructors.
- Every number of a table must name a rank, token, head or stage that exists.
- The hash of the plan must be the hash in the file.

Whether the plan computes the right result is not checked here; ``plan.check()`` finds that out.

The content of a file version never changes: another layout is another version, and a reader refuses versions it does
not know. Version 1 had no execution tables, and its hash did not cover them; such plans are executed as
:func:`flexcp.plan.execution.one_call_ahead` says. Version 2 had no trees, and version 3 did not say whether the user
gave the layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flexcp import masks as m
from flexcp.arrays.packed_columns import Reader, packed
from flexcp.arrays.tables import Table
from flexcp.batch import Batch, make_batch
from flexcp.io.plain_values import MAX_NUMBER, integer, items, refuse_constant, shown, small_integer
from flexcp.masks import Mask
from flexcp.masks.mask import TREE
from flexcp.plan.execution import Execution, one_call_ahead
from flexcp.plan.fields import MAX_RANKS, different_rules, read_facts, saved_facts, version_1_header
from flexcp.plan.placement import Placement, Regions, Runs
from flexcp.plan.plan import Plan, digest
from flexcp.plan.program import Program, Transfers
from flexcp.shape import QUERY_SIDED, Kind, Shape

Ints = NDArray[np.int64]
SomeTable = TypeVar("SomeTable", bound=Table)

MAGIC = b"\x8fflexcp\n"
VERSION, OLDEST = 4, 1
_PREFIX = struct.Struct("<8sIQQ16s")

ROOM = 4 << 20
PER_BYTE = 64
FACTS_ROOM = 1 << 18
FACTS_PER_BYTE = 4
MAX_STAGES = 1 << 18
MAX_COMPARISONS = 1 << 26
PART_BYTES, SLICE_BYTES, TREE_BYTES = 1024, 256, 512
"""Estimated bytes of memory while slices are made, for each of three things.

``PART_BYTES`` for each slice of a rule that fits documents of any length, ``SLICE_BYTES`` for each slice of a document,
and ``TREE_BYTES`` for each segment or sequence of a tree.
"""


BROKEN = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    RecursionError,
    NotImplementedError,
    struct.error,
)
"""The exceptions that reading may raise for bytes that are no plan."""


class PlanFormatError(ValueError):
    """Raised for bytes that are no plan, or a plan that this version of flexcp cannot read."""


# --- writing ----------------------------------------------------------------------------------------------------------


def save_plan(plan: Plan) -> bytes:
    """Return the plan as bytes, from which :func:`load_plan` makes an equal plan.

    Raise ValueError if its number of ranks is not that of its cluster or is above 16,384, or if a mask has too many
    slices for a file.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"save_plan takes a plan, made by a planner from lengths: planner([...]); got {plan!r}")
    if plan.ranks != plan.cluster.ranks or plan.ranks > MAX_RANKS:
        raise ValueError(
            f"a plan of {plan.ranks} ranks on a cluster of {plan.cluster.ranks} cannot be saved; "
            f"the two numbers must be equal, and at most {MAX_RANKS}"
        )
    rules = different_rules(plan)
    number = {rule: i for i, rule in enumerate(rules)}
    blocks = [[plan.batch.lengths]]
    blocks += [[np.array([number[r] for r in mask.rules], np.int64)] for mask in plan.batch.masks]
    blocks += [block for rule in rules for block in _rule_blocks(rule)]
    blocks += [[getattr(table, name) for name in table.names()] for table in plan.tables()]
    facts = json.dumps(saved_facts(plan), separators=(",", ":")).encode()
    body = struct.pack("<Q", len(facts)) + facts + b"".join(packed(block) for block in blocks)
    each = [[number[r] for r in mask.rules] for mask in plan.batch.masks]
    needed = _slices_memory(rules, each, plan.batch.lengths)
    needed += sum(8 * len(block) * len(block[0]) for block in blocks) + sum(map(_rule_memory, rules))
    for rule in rules:
        _check_comparisons(rule.table)
    deflated = zlib.compress(body, 6)
    least = max(
        -(-(max(needed, len(body)) - ROOM) // PER_BYTE),
        -(-(len(facts) - FACTS_ROOM) // FACTS_PER_BYTE),
    )
    deflated += bytes(max(0, least - len(deflated)))
    total = _PREFIX.size + len(deflated)
    return _sealed(_PREFIX.pack(MAGIC, VERSION, total, len(body), bytes(16)), deflated)


def _sealed(prefix: bytes, deflated: bytes) -> bytes:
    """Return the bytes of the file, with the checksum in its place at the end of the prefix."""
    head = prefix[:-16]
    return head + _checksum(head, deflated) + deflated


def _checksum(head: bytes, deflated: bytes) -> bytes:
    """Return the checksum of the file, 16 bytes."""
    return hashlib.blake2b(head + deflated, digest_size=16).digest()


def _rule_blocks(rule: Mask) -> list[list[Ints]]:
    """Return the parts of a rule that a file stores as columns: explicit slices, or the segments and ends of a tree."""
    if rule.name == m.EXPLICIT:
        return [list(np.array(rule.table, np.int64).reshape(-1, 6).T)]
    if rule.name == TREE:
        parents, lengths, ends = (np.array(column, np.int64) for column in rule.params[:3])
        return [[parents, lengths], [ends]]
    return []


def _rule_memory(rule: Mask) -> int:
    """Return the estimated bytes of memory that making a rule from its columns takes."""
    return (TREE_BYTES if rule.name == TREE else PART_BYTES) * sum(len(block[0]) for block in _rule_blocks(rule))


def _slice_count(rule: Mask, longest: int) -> int:
    """Return the most slices that a document of at most ``longest`` tokens has under a rule."""
    return len(rule.table) if rule.name == m.EXPLICIT else m.named_mask(rule.name).most_slices(rule, longest)


def _slices_memory(rules: Sequence[Mask], chosen: Sequence[Sequence[int]], lengths: Ints) -> int:
    """Return the estimated bytes of memory that making the slices of all masks takes.

    ``chosen[mask]`` holds the index in ``rules`` of one rule for all documents, or of one rule per document.
    """
    counts = [_slice_count(rule, int(lengths.max(initial=1))) for rule in rules]
    slices = sum(sum(counts[i] for i in column) * (len(lengths) if len(column) == 1 else 1) for column in chosen)
    by_parts = sum(count for count, rule in zip(counts, rules, strict=True) if rule.length is None)
    return PART_BYTES * by_parts * len(chosen) + SLICE_BYTES * slices


def _check_comparisons(table: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if making a mask from these slices would take longer than some seconds.

    Making a mask compares every two slices whose rows overlap.
    """
    rows = np.array(table, np.int64).reshape(-1, 6)
    first = np.sort(rows[:, m.Q0])
    ends = np.searchsorted(first, np.sort(rows[:, m.Q1]), side="left")
    if int(np.maximum(ends - np.arange(len(rows)), 0).sum()) > MAX_COMPARISONS:
        raise ValueError(
            f"a mask of {len(rows)} slices that share rows is too large for a file; use a block-sparse kernel for it"
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def load_plan(data: bytes) -> Plan:
    """Return the plan that :func:`save_plan` wrote; raise :class:`PlanFormatError` for anything else."""
    if isinstance(data, str | os.PathLike | int) or data is None:  # bytes(10**10) would be as many zeros
        raise PlanFormatError(
            f"load_plan takes the bytes of a file, as from pathlib.Path(file).read_bytes(); got {shown(data)}"
        )
    deflated, size, version = _opened(bytes(data))
    room = ROOM + PER_BYTE * len(deflated)
    try:
        body = _inflated(deflated, size, room)
        facts_size = struct.unpack_from("<Q", body)[0]
        if facts_size > min(len(body) - 8, FACTS_ROOM + FACTS_PER_BYTE * len(deflated)):
            raise ValueError(f"{facts_size} bytes of facts are more than a file of this size may hold")
        # json.loads would guess the encoding of bytes and load a codec for it, so decode here.
        text = body[8 : 8 + facts_size].decode("utf-8")
        facts = read_facts(json.loads(text, parse_int=small_integer, parse_constant=refuse_constant), version)
        plan = _plan(facts, Reader(body[8 + facts_size :], room), version)
        promised, found = facts["hash"], plan.hash if version > 1 else version_1_hash(plan)
    except BROKEN as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise PlanFormatError(
            f"this is no valid flexcp plan: {what[:200]}; save it again with flexcp.save_plan"
        ) from error
    if found != promised:
        raise PlanFormatError(
            f"the plan in this file has hash {found[:12]}, but was saved as {str(promised)[:12]!r}; save it again"
        )
    return plan


def version_1_hash(plan: Plan) -> str:
    """Return the hash of a plan in format version 1, which covers placement and transfers but not their execution."""
    return digest(version_1_header(plan), plan.moving_tables())


def _opened(data: bytes) -> tuple[bytes, int, int]:
    """Check that a file is complete, undamaged and of a known version, or raise :class:`PlanFormatError`.

    Return (deflated body, size of the inflated body, version).
    """
    if len(data) < _PREFIX.size or not data.startswith(MAGIC):
        if data and MAGIC.startswith(data[: len(MAGIC)]):
            raise PlanFormatError(f"this flexcp plan is cut off after {len(data)} bytes; copy it again")
        raise PlanFormatError("this is no flexcp plan: it does not begin as one; make one with flexcp plan --save FILE")
    _, version, total, size, checksum = _PREFIX.unpack_from(data)
    if not OLDEST <= version <= VERSION:
        raise PlanFormatError(
            f"this flexcp plan has format version {version}, and this flexcp reads versions {OLDEST} to {VERSION}; "
            "save it again, or read it with the flexcp that wrote it"
        )
    if total != len(data):
        raise PlanFormatError(f"this flexcp plan should have {total} bytes but has {len(data)}; copy it again")
    deflated = data[_PREFIX.size :]
    if _checksum(data[: _PREFIX.size - 16], deflated) != checksum:
        raise PlanFormatError("this flexcp plan is damaged: its checksum is wrong; copy it again")
    return deflated, size, version


def _inflated(deflated: bytes, size: int, room: int) -> bytes:
    """Return the inflated body, or raise ValueError if it does not have ``size`` bytes or exceeds ``room`` bytes."""
    if size > room:
        raise ValueError(f"a body of {size} bytes is more than a file of {len(deflated)} may hold")
    machine = zlib.decompressobj()
    try:
        body = machine.decompress(deflated, size + 1)
    except zlib.error as error:
        raise ValueError(f"its body cannot be inflated ({error})") from None
    if len(body) != size or not machine.eof or machine.unused_data.strip(b"\0"):
        raise ValueError(f"its body does not have the {size} bytes that its header says")
    return body


def _plan(facts: Mapping[str, Any], reader: Reader, version: int) -> Plan:
    """Make the plan of the facts and columns of a file, or raise ValueError if they contradict each other."""
    shape, cluster = facts["shape"], facts["cluster"]
    batch = _batch(facts, reader, version)
    runs = _table(reader, Runs)
    regions: list[Regions] = []
    transfers: list[Transfers] = []
    if len(facts["programs"]) != len(batch.masks):
        raise ValueError(f"{len(facts['programs'])} pairs of programs for {len(batch.masks)} masks")
    for pair in facts["programs"]:
        if len(pair) != 2:
            raise ValueError(f"a mask has {len(pair)} programs; it must have two, a forward and a backward")
        regions.append(_table(reader, Regions))
        transfers += [_table(reader, Transfers) for _ in pair]
    entries = [entry for pair in facts["programs"] for entry in pair]
    ways = [_table(reader, Execution) if version > 1 else _as_before(entry[1], reader) for entry in entries]
    reader.end()
    made = [Program(t, *entry, execution=way) for t, entry, way in zip(transfers, entries, ways, strict=True)]
    programs = tuple(zip(made[::2], made[1::2], strict=True))
    placement = Placement(
        batch,
        cluster.ranks,
        facts["pads"],
        runs,
        tuple(regions),
        facts["traffic"],
        facts["assemble_own"],
        facts["note"],
    )
    _check_placement(placement, shape)
    for program in made:
        _check_program(program, placement, shape)
    return Plan(shape, cluster, facts["cost"], facts["strategy"], placement, programs, facts["layout_given"])


def _as_before(stages: int, reader: Reader) -> Execution:
    """Return the execution of a program of version 1, whose file has none.

    Raise ValueError if the number of stages is impossible.
    """
    if not 0 < stages <= MAX_STAGES:
        raise ValueError(f"a program has {stages} stages; it has 1 to {MAX_STAGES}")
    reader.spend(8 * len(Execution.names()) * stages, f"{stages} stages")
    return one_call_ahead(stages)


def _batch(facts: Mapping[str, Any], reader: Reader, version: int) -> Batch:
    """Read documents and masks and make the batch; raise ValueError if the slices exceed the reader's memory budget."""
    (lengths,) = reader.block(1)
    named = facts["masks"]
    numbers = [reader.block(1)[0] for _ in named]
    rules = [_rule(entry, reader, version) for entry in facts["rules"]]
    for (name, _), column in zip(named, numbers, strict=True):
        if len(column) == 0 or column.min() < 0 or column.max() >= len(rules):
            raise ValueError(f"mask {name[:40]!r} names a rule that the file does not have")
    reader.spend(_slices_memory(rules, numbers, lengths), "the memory of its slices")  # type: ignore[arg-type]
    chosen: dict[str, tuple[Mask | list[Mask], int]] = {}
    for (name, layers), column in zip(named, numbers, strict=True):
        chosen[name] = (rules[column[0]] if len(column) == 1 else [rules[i] for i in column], layers)
    return make_batch(lengths, masks=chosen)


def _rule(entry: Any, reader: Reader, version: int) -> Mask:
    """Read one mask rule of the file and make it with the public function for such masks, which checks it.

    ``entry`` is the rule's entry among the facts of the file, and ``reader`` reads its columns. ``version`` is the
    version of the file; trees exist from version 3 on. Raise ValueError if the rule is invalid, or if the function
    makes another mask of these values than the file holds.
    """
    name, params, length = items(entry, "a rule")
    if name == m.EXPLICIT:
        columns = reader.block(6)
        reader.spend(PART_BYTES * len(columns[0]), f"{len(columns[0])} slices")
        rows = np.stack(columns, axis=1).tolist()
        _check_comparisons(rows)
        found = m.from_slices(integer(length, "a mask's length"), rows)
        saved = Mask(m.EXPLICIT, (), length, tuple(tuple(row) for row in rows))
    elif name == TREE and version > 2:
        parents, lengths = reader.block(2)
        (ends,) = reader.block(1)
        reader.spend(TREE_BYTES * (len(parents) + len(ends)), f"{len(parents)} segments")
        (left,) = items(params, "a tree's window")
        found = m.tree(parents.tolist(), lengths.tolist(), ends.tolist(), integer(left, "a tree's window"))
        saved = Mask(TREE, (tuple(parents.tolist()), tuple(lengths.tolist()), tuple(ends.tolist()), left), length)
    else:
        kind = m.named_mask(name)
        values = tuple(tuple(p) if isinstance(p, list) else p for p in items(params, "a mask's numbers"))
        found = kind.make(*kind.arguments(values))
        saved = Mask(name, values, length)
    if found != saved:
        raise ValueError(f"mask {found} was saved as {saved}")
    return found


def _table(reader: Reader, kind: type[SomeTable]) -> SomeTable:
    """Read a table: one block with a column for each field of ``kind``."""
    return kind(*reader.block(len(kind.names())))


# --- every number names something that exists -------------------------------------------------------------------------


def _check_placement(placement: Placement, shape: Shape) -> None:
    """Raise ValueError unless all ranks, documents, rows, keys and heads exist and the runs cover the stream once."""
    runs, batch = placement.runs, placement.batch
    if placement.pads < 0 or placement.stream >= MAX_NUMBER >> 8:
        raise ValueError(f"{placement.pads} pads are not possible")
    if any(not 0 <= rank < placement.ranks for grid in placement.traffic.groups for row in grid for rank in row):
        raise ValueError("a group's rank does not exist")
    _inside("a run's rank", runs.rank, 0, placement.ranks)
    order = np.argsort(runs.start, kind="stable")
    edges = np.concatenate([[0], runs.stop[order]])
    if np.any(runs.start >= runs.stop) or np.any(edges[:-1] != runs.start[order]) or edges[-1] != placement.stream:
        raise ValueError("the runs do not cover the stream once")
    for regions in placement.regions:
        _inside("a region's rank", regions.rank, 0, placement.ranks)
        _inside("a region's document", regions.document, 0, batch.documents)
        ends = batch.lengths[regions.document]
        _ranges("rows", regions.q0, regions.q1, ends)
        _ranges("keys", regions.k0, regions.k1, ends)
        _ranges("heads", regions.h0, regions.h1, np.int64(shape.heads))


def _check_program(program: Program, placement: Placement, shape: Shape) -> None:
    """Raise ValueError unless all stages, ranks, tokens and heads of a program exist and its execution is possible."""
    t, ranks = program.transfers, placement.ranks
    if not 0 < program.stages <= MAX_STAGES:
        raise ValueError(f"a program has {program.stages} stages; it has 1 to {MAX_STAGES}")
    if not 0 <= program.own_stage < program.stages:
        raise ValueError(f"own tokens enter in stage {program.own_stage} of {program.stages}")
    if len(program.held) not in (0, ranks) or any(not 0 <= share <= 1000 for share in program.held):
        raise ValueError("held work must be a share of 0 to 1000 per mille for each rank, or empty")
    if (problem := program.execution.problem(program.stages)) is not None:
        raise ValueError(problem)
    if max(int(program.execution.margin.max()), int(program.execution.rounds_per_call.max())) > MAX_STAGES:
        raise ValueError(f"a margin or a number of rounds per call is above {MAX_STAGES}")
    _inside("a transfer's stage", t.stage, 1, program.stages)
    for name in ("source", "target", "owner"):
        _inside(f"a transfer's {name}", getattr(t, name), 0, ranks)
    _inside("a transfer's kind", t.kind, 0, len(Kind))
    _inside("a transfer's partial", t.partial, 0, 2)
    _ranges("a piece's tokens", t.start, t.stop, placement.tokens[t.owner])
    heads = np.where(np.isin(t.kind, QUERY_SIDED), shape.heads, shape.kv_heads)
    _ranges("a piece's heads", t.h0, t.h1, heads)


def _inside(what: str, column: Ints, low: int, high: int) -> None:
    """Raise ValueError unless ``low <= x < high`` for every number of the column; ``what`` names it in the error."""
    if len(column) and (column.min() < low or column.max() >= high):
        raise ValueError(f"{what} does not exist")


def _ranges(what: str, start: Ints, stop: Ints, end: Ints | np.int64) -> None:
    """Raise ValueError unless ``0 <= start <= stop <= end`` in every row; ``what`` names the ranges in the error."""
    if np.any((start < 0) | (start > stop) | (stop > end)):
        raise ValueError(f"{what} do not exist")
