"""Memory: what attention needs on a rank, from the plan alone, before anything is allocated.

A pass (one direction of one layer) works in one buffer, the *arena*. Its *tenants* are what exists only during the
pass: what arrives on shelves, the results that accumulate there, and the messages of each stage. A tenant's life is
counted in half slots, because a slot first takes in what arrived (half ``2 s``) and then posts the next stage and
computes (half ``2 s + 1``):

    inputs of a shelf    from the slot they arrive in until the last work on them, or until they are passed on
    results on a shelf   from then until they are sent home; on an entry, until the last reader's have come in and left
                         with its own
    received messages    from the slot that posts them, one before their stage's or earlier, until they are taken in
    sent messages        one slot longer: a stage's sends have left when the next stage's arrivals have been waited for

Work needs its rows and its keys: keys are read until the rank's last queries are there, queries until its last keys
are. Tenants whose lives do not meet share bytes: the largest is placed first, each at the lowest offset that is free
for its whole life. Sizes are multiples of 128 bytes, so every tensor begins where kernels and copies want it.

The executor lays its buffer out by :func:`arena_layout`, so the arena is exactly as large as :func:`plan_memory` says.
Outside it are the rank's own tensors: those that autograd keeps for the backward (received keys among them where the
plan keeps those), the results of a pass before they are returned, and what passes through a backward: the output's
gradient and the first gradient that is rounded while the sums are still there. LSE and delta of own rows count 8 bytes
a number, what a CPU uses; a GPU uses 4. Index maps and work lists are estimated, :data:`TABLE_BYTES` a row.

Kernels differ where a rank needs nobody: some write dq once and rounded, others add it up in float32. Without a
kernel's name the larger is counted. Not counted: the tiles of CPU kernels, and what the communication library takes for
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import united
from flexcp.masks import Q0, Q1, trim
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.plan.slots import pass_inputs, work_slot
from flexcp.shape import FIELDS, QUERY_SIDED, Field, Kind, Shape

Ints = NDArray[np.int64]
QUERIES, KEYS = 0, 1
ALIGNMENT = 128
"""Tenants, their tensors and messages begin at multiples of this: what vector loads and copy engines may ask for."""
STATISTICS_BYTES = 8
"""LSE and delta of own rows, and an LSE while it accumulates."""
SCRATCH_BYTES = 4096
"""A kernel's scratch beyond its two numbers per row and head."""
TABLE_BYTES = 16
"""Index maps and work lists, for each row of a shelf and mask: tiles of both directions, and where a row that moves
lies.
"""
WRITES_DQ_ONCE = ("triton", "hopper")
"""Kernels that write the dq of a rank that needs nobody in the model's dtype, with no sum of float32 beside it."""


@dataclass(frozen=True)
class Memory:
    """Bytes of attention on one rank.

    ``forward`` and ``backward`` are the arena of one layer, the larger over masks; one arena serves all layers.
    ``saved`` is what autograd keeps of one layer for its backward: q, k, v, output and LSE. ``kept_keys`` is what the
    plan keeps of received keys, all layers together. ``results`` is the most a pass holds of own results before they
    are returned, with copies of tokens whose local order is not the stream's; ``gradients`` what passes through a
    backward beside them: the output's gradient, and the one that is being rounded. ``scratch`` is what a GPU kernel
    takes beside, ``tables`` an estimate of index maps and work lists.
    """

    rank: int
    layers: int
    forward: int
    backward: int
    saved: int
    kept_keys: int
    results: int
    gradients: int
    scratch: int
    tables: int

    @property
    def arena(self) -> int:
        """The one buffer of all layers, masks and directions."""
        return max(self.forward, self.backward)

    @property
    def total(self) -> int:
        """All layers of a model that recomputes nothing."""
        return self.arena + self.layers * self.saved + self.kept_keys + self.in_a_pass

    @property
    def in_a_pass(self) -> int:
        """What is there during a pass only, outside the arena, and the tables of all of them."""
        return self.results + self.gradients + self.scratch + self.tables


@dataclass(frozen=True)
class Layout:
    """Where the tenants of one rank's pass lie in its arena.

    ``offsets`` of ``("inputs", side, stage, h0, h1)`` and ``("results", ...)`` of a received shelf, of
    ``("sends", stage)`` and ``("receives", stage)``. Keys that are kept for the backward lie elsewhere.
    """

    size: int
    offsets: dict[tuple[str | int, ...], int]


def plan_memory(plan: Plan, rank: int, kernel: str | None = None) -> Memory:
    """What ``rank`` needs, with this kernel; without a name, with any."""
    if not 0 <= rank < plan.ranks:
        raise ValueError(f"rank {rank} does not exist: the plan has ranks 0..{plan.ranks - 1}")
    numbers = range(len(plan.programs))
    forward, backward = (max(arena_layout(plan, rank, mask, way).size for mask in numbers) for way in (False, True))
    layers = sum(mask.layers for mask in plan.batch.masks)
    kept = sum(plan.batch.masks[mask].layers * _kept_keys(plan, rank, mask) for mask in numbers)
    tokens, shape = int(plan.placement.tokens[rank]), plan.shape
    rows = max(_most_rows(plan, rank, mask) for mask in numbers)
    scratch = 8 * rows + SCRATCH_BYTES if rows else 0
    once = kernel in WRITES_DQ_ONCE and all(_needs_nobody(plan, rank, mask) for mask in numbers)
    in_order = _in_stream_order(plan.placement, rank)
    results = tokens * _results(shape, in_order, once)
    gradients = tokens * _passing_gradients(shape, in_order, once)
    tables = TABLE_BYTES * sum(tokens + _arriving_rows(plan, rank, mask) for mask in numbers)
    saved = tokens * _saved(shape)
    return Memory(rank, layers, forward, backward, saved, kept, results, gradients, scratch, tables)


def arena_layout(plan: Plan, rank: int, mask: int, backward: bool) -> Layout:
    """The arena of one pass: who lies where."""
    tenants = [*_shelf_tenants(plan, rank, mask, backward), *_message_tenants(plan, rank, mask, backward)]
    offsets, size = first_fit([(t.size, t.first, t.last) for t in tenants])
    return Layout(size, {t.key: offset for t, offset in zip(tenants, offsets, strict=True)})


def first_fit(tenants: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets of (size, first, last) such that no two share a byte at one time, and where the last one ends."""
    offsets = [0] * len(tenants)
    placed: list[tuple[int, int, int, int]] = []
    for i in sorted(range(len(tenants)), key=lambda i: (-tenants[i][0], tenants[i][1], i)):
        size, first, last = tenants[i]
        at = 0
        for start, stop in sorted((o, o + s) for o, s, a, b in placed if a <= last and first <= b):
            if at + size <= start:
                break
            at = max(at, stop)
        offsets[i] = at
        placed.append((at, size, first, last))
    return offsets, max((o + s for o, s, _, _ in placed), default=0)


def aligned(size: int) -> int:
    """The size rounded up to where the next may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned_starts(sizes: list[int]) -> list[int]:
    """Where things of these bytes begin when they lie side by side, and where the last one ends."""
    return [0, *accumulate(aligned(size) for size in sizes)]


def shelf_fields(side: int, backward: bool, results: bool) -> list[Field]:
    """The tensors that arrive on a shelf, or that are computed on it."""
    if results:
        kinds: tuple[Kind, ...] = (
            ((Kind.DKV,) if backward else ()) if side == KEYS else (Kind.DQ if backward else Kind.O,)
        )
    else:
        kinds = (Kind.KV,) if side == KEYS else (Kind.Q, Kind.DO) if backward else (Kind.Q,)
    return [field for kind in kinds for field in FIELDS[kind]]


def field_sizes(side: int, backward: bool, results: bool, amount: int, shape: Shape) -> list[int]:
    """Bytes of each of :func:`shelf_fields` on a shelf of ``amount`` rows x heads."""
    found = []
    for field in shelf_fields(side, backward, results):
        each = shape.accumulator_bytes if results or field.precise else shape.element_bytes
        if results and field.name == "lse":
            each = STATISTICS_BYTES
        found.append(amount * field.numbers(shape) * each)
    return found


def kept_starts(amounts: list[int], shape: Shape) -> list[int]:
    """Where the keys of shelves of so many rows x heads begin in the memory that is kept for a backward,
    and where the last end.
    """
    return aligned_starts([aligned_starts(field_sizes(KEYS, False, False, a, shape))[-1] for a in amounts])


@dataclass(frozen=True)
class _Tenant:
    """Bytes that exist from half slot ``first`` to ``last``, by the name they have in a layout."""

    key: tuple[str | int, ...]
    size: int
    first: int
    last: int


def _shelf_tenants(plan: Plan, rank: int, mask: int, backward: bool) -> Iterator[_Tenant]:
    program, inputs = plan.programs[mask][backward], pass_inputs(plan, mask, backward)
    arriving = inputs.take(inputs.target == rank)
    if len(arriving) == 0:
        return
    side = _side(arriving)
    shelves, shelf = _groups(np.stack([side, arriving.stage, arriving.h0, arriving.h1]))
    rows = np.bincount(shelf, arriving.stop - arriving.start).astype(np.int64)
    holds_queries, stage = shelves[0] == QUERIES, shelves[1]
    # The last work on a shelf is that with the last shelf of the other side; own tokens are there from their own stage
    # on.
    queries, keys = (int(stage[shelves[0] == s].max(initial=program.own_stage)) for s in (QUERIES, KEYS))
    work = 2 * work_slot(np.where(holds_queries, stage, queries), np.where(holds_queries, keys, stage)) + 1
    last = {False: work.copy(), True: work.copy()}
    for results, transfers, half in _uses(program.transfers, rank):
        if len(transfers):
            np.maximum.at(last[results], shelf[_found_in(arriving, transfers)], half)
    kept = plan.programs[mask][1].keys_kept
    for number, (of, at, h0, h1) in enumerate(shelves.T.tolist()):
        amount = int(rows[number]) * (h1 - h0)
        for results in (False, True):
            if kept and of == KEYS and not results:
                continue
            sizes = field_sizes(of, backward, results, amount, plan.shape)
            if sizes:
                size, until = aligned_starts(sizes)[-1], int(last[results][number])
                yield _Tenant(("results" if results else "inputs", of, at, h0, h1), size, 2 * at, until)


def _uses(t: Transfers, rank: int) -> Iterator[tuple[bool, Transfers, Ints]]:
    """Transfers that read what lies on this rank's shelves: whether results, which, and in which half slots.

    Results that come in to be added leave again later, so they need no line of their own.
    """
    output, others = t.is_output, t.owner != rank
    leaves = (t.source == rank) & (t.target != rank)
    moved = (t.source == rank) & (t.target == rank)
    for results, which, halves in (
        (False, ~output & others & leaves, 2 * t.stage - 1),
        (True, output & others & leaves, 2 * t.stage - 1),
        (True, output & moved, 2 * t.stage),
    ):
        yield results, t.take(which), halves[which]


def _found_in(arriving: Transfers, pieces: Transfers) -> Ints:
    """For each of ``pieces`` the row of ``arriving`` that brought it."""

    def keys(t: Transfers) -> Ints:
        return np.stack([_side(t), t.owner, t.start, t.stop, t.h0, t.h1])

    _, label = _groups(np.concatenate([keys(arriving), keys(pieces)], axis=1))
    row = np.zeros(int(label.max()) + 1, np.int64)
    row[label[: len(arriving)]] = np.arange(len(arriving))
    return row[label[len(arriving) :]]


def _message_tenants(plan: Plan, rank: int, mask: int, backward: bool) -> Iterator[_Tenant]:
    program = plan.programs[mask][backward]
    t, ahead = program.transfers, program.execution.ahead
    t = t.take(((t.source == rank) | (t.target == rank)) & (t.source != t.target))
    for what, mine, peer, last in (("sends", t.source, t.target, 1), ("receives", t.target, t.source, 0)):
        at = mine == rank
        stage, size = t.stage[at], t.bytes(plan.shape)[at]
        messages, message = np.unique(stage * plan.ranks + peer[at], return_inverse=True)
        sizes = -(-np.bincount(message.reshape(-1), size).astype(np.int64) // ALIGNMENT) * ALIGNMENT
        stages, of = np.unique(messages // plan.ranks, return_inverse=True)
        for number, total in zip(stages.tolist(), np.bincount(of.reshape(-1), sizes).tolist(), strict=True):
            # What is posted in its own slot is so before that slot waits: before the sends of the stage in front have
            # surely left.
            posted = number - max(int(ahead[number]), 1)
            yield _Tenant((what, number), int(total), 2 * posted + 1, 2 * number + last)


def _groups(columns: Ints) -> tuple[Ints, Ints]:
    """The different columns in ascending order, the first row leading,
    and which of them each is (faster than numpy's own).
    """
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    first = np.ones(len(order), bool)
    first[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    label = np.empty(len(order), np.int64)
    label[order] = np.cumsum(first) - 1
    return ordered[:, first], label


def _side(t: Transfers) -> Ints:
    return np.where(np.isin(t.kind, QUERY_SIDED), QUERIES, KEYS)


# --- a rank's own tensors ---------------------------------------------------------------------------------------------


def _kept_keys(plan: Plan, rank: int, mask: int) -> int:
    """Bytes of received keys that one layer keeps for its backward."""
    if not plan.programs[mask][1].keys_kept:
        return 0
    inputs = pass_inputs(plan, mask, False)
    mine = inputs.take((inputs.target == rank) & (inputs.kind == Kind.KV))
    _, shelf = _groups(np.stack([mine.stage, mine.h0, mine.h1]))
    amounts = np.bincount(shelf, (mine.stop - mine.start) * (mine.h1 - mine.h0))
    return kept_starts([int(amount) for amount in amounts], plan.shape)[-1]


def _saved(shape: Shape) -> int:
    """Bytes of a token's q, k, v, output and LSE."""
    wide = shape.heads * (shape.head_dim + shape.v_head_dim) + shape.kv_heads * (shape.head_dim + shape.v_head_dim)
    return wide * shape.element_bytes + shape.heads * STATISTICS_BYTES


def _results(shape: Shape, in_order: bool, once: bool) -> int:
    """Bytes of a token's results before they are returned, in the direction that holds more; ``once``: dq is never a
    sum.
    """
    e, acc, h, d, dv = shape.element_bytes, shape.accumulator_bytes, shape.heads, shape.head_dim, shape.v_head_dim
    out = h * dv * acc if e != acc and not once else 0  # else the output that is returned is where it accumulated
    grads = (h * d * (not once) + shape.kv_heads * (d + dv)) * acc + h * STATISTICS_BYTES
    if not in_order:
        inputs = (h * d + shape.kv_heads * (d + dv)) * e
        out, grads = out + inputs, grads + inputs + h * dv * e + 2 * h * STATISTICS_BYTES
    return max(out, grads)


def _passing_gradients(shape: Shape, in_order: bool, once: bool) -> int:
    """Bytes of a token's gradient of the output, and of what is rounded while sums are still there.

    Copies in stream order are gone by then, and were larger.
    """
    e, h, d, dv = shape.element_bytes, shape.heads, shape.head_dim, shape.v_head_dim
    rounds = e != shape.accumulator_bytes
    dq = h * d * e if once or (rounds and in_order) else 0
    return h * dv * e + dq + (shape.kv_heads * max(d, dv) * e if once and rounds else 0)


def _needs_nobody(plan: Plan, rank: int, mask: int) -> bool:
    """Whether a rank neither sends nor receives anything, and each of its rows sees a key."""
    if any(((p.transfers.source == rank) | (p.transfers.target == rank)).any() for p in plan.programs[mask]):
        return False
    return _all_rows_see(plan, mask)


def _all_rows_see(plan: Plan, mask: int) -> bool:
    """Whether every row of the batch sees a key; a pad does not."""
    batch, layer = plan.batch, plan.batch.masks[mask]
    slices = trim(layer.slices)
    document = np.repeat(np.arange(batch.documents), np.diff(layer.first))
    some = slices[:, Q0] < slices[:, Q1]
    _, start, stop = united(document[some], slices[some, Q0], slices[some, Q1])
    return plan.placement.pads == 0 and int((stop - start).sum()) == batch.tokens


def _arriving_rows(plan: Plan, rank: int, mask: int) -> int:
    inputs = [pass_inputs(plan, mask, backward) for backward in (False, True)]
    return int(sum((t.stop - t.start)[t.target == rank].sum() for t in inputs))


def _in_stream_order(placement: Placement, rank: int) -> bool:
    start = placement.runs.start[placement.runs.rank == rank]
    return bool((np.diff(start) > 0).all())


def _most_rows(plan: Plan, rank: int, mask: int) -> int:
    """Rows x heads of the largest query shelf of the backward."""
    inputs = pass_inputs(plan, mask, True)
    mine = inputs.take((inputs.target == rank) & (inputs.kind == Kind.Q))
    _, shelf = _groups(np.stack([mine.stage, mine.h0, mine.h1]))
    amounts = np.bincount(shelf, (mine.stop - mine.start) * (mine.h1 - mine.h0))
    return int(amounts.max(initial=plan.placement.tokens[rank] * plan.shape.heads))
