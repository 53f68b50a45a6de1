"""Memory: compute from a plan how many bytes attention needs on a rank, before anything is allocated.

A pass (one direction of one layer) works in one buffer, the *arena*. Its *tenants* are the tensors that exist only
during the pass: inputs that arrive on shelves, results that accumulate there, and the messages of each stage. The
lifetime of a tenant is counted in half slots, because a slot first takes in what arrived (half ``2 s``) and then posts
the next stage and computes (half ``2 s + 1``):

    inputs of a shelf    from the slot they arrive in until the last work on them, or until they are passed on
    results on a shelf   from the same slot until they are sent home; an entry, which adds up results of other ranks
                         of its node, keeps them until it sends the sum
    received messages    from the slot that posts them (one slot before their stage or earlier) until they are taken in
    sent messages        one half slot longer: the sends of a stage are known to have left once the rank has waited for
                         the arrivals of the next stage

Work needs both rows and keys. So keys are read until the last queries of the rank have arrived, and queries until its
last keys have arrived. Tenants with disjoint lifetimes share bytes: tenants are placed from the largest to the
smallest, each at the lowest offset that is free during its whole lifetime. Sizes are multiples of 128 bytes, so that
every tensor is aligned for kernels and copies.

The executor lays out its buffer with :func:`arena_layout`, so the arena is exactly as large as :func:`plan_memory`
says. Outside the arena are the rank's own tensors: those that autograd keeps for the backward (including received keys,
if the plan keeps them), the results of a pass before they are returned, and the gradients that exist during a backward:
that of the output, and the first one that is rounded while the sums still exist, or all three if some arrive complete
and are written in the model's dtype beside the sums. LSE and delta of own rows count 8
bytes per number, as on a CPU; a GPU uses 4. Index maps and work lists are estimated as :data:`TABLE_BYTES` per row, and
:data:`MOVE_BYTES` per row that arrives.

On a rank without transfers kernels differ: some write dq once, in the model's dtype, others add it up in float32.
Without the name of a kernel, the larger of the two is counted. Not counted are the tiles of CPU kernels and the memory
of the communication library.
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
"""Tenants, their tensors and messages begin at multiples of this many bytes, for vector loads and copy engines."""
STATISTICS_BYTES = 8
"""Bytes of an LSE or a delta of own rows, and of an LSE while it accumulates."""
SCRATCH_BYTES = 4096
"""Bytes of a kernel's scratch memory, besides two numbers per row and head."""
TABLE_BYTES = 16
"""Estimated bytes of index maps and work lists per row of a shelf (a buffer of tokens) and per mask.

They are for the tiles of both directions, and the place of a row.
"""
MOVE_BYTES = 32
"""Estimated bytes per row that arrives, and per mask, of the tables by which a GPU moves rows.

Measured on plans of 32 ranks for two distributions of lengths (web, longalign) with 32 / 8 and 8 / 1 heads under three
strategies: at most 81 bytes a row, 27 on average. Batches of few tokens a rank have shorter runs and more bytes a row:
up to 212 were seen.
"""
WRITES_DQ_ONCE = ("triton", "hopper")
"""Kernels that write dq of a rank without transfers directly in the model's dtype, without a sum in float32."""


@dataclass(frozen=True)
class Memory:
    """Bytes of memory that attention needs on one rank.

    ``forward`` and ``backward`` are the size of the arena, the buffer that a pass works in, in each direction, for the
    mask that needs most; one arena serves all layers. ``saved`` is what autograd keeps of one layer for its backward:
    q, k, v, output and LSE. ``kept_keys`` are the received keys and values that the plan keeps for the backward, of all
    layers together. ``results`` is the most that a pass holds of the rank's own results before it returns them; if the
    rank's tokens are not in stream order, this includes reordered copies. ``gradients`` are the gradient of the output
    and the gradient that is being rounded, during a backward. ``scratch`` is the scratch memory of a GPU kernel, and
    ``tables`` an estimate of index maps and work lists. ``layers`` is the number of layers, not bytes.
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
        """The bytes of the buffer that all layers, masks and directions use in turn."""
        return max(self.forward, self.backward)

    @property
    def total(self) -> int:
        """The bytes of all layers together, in a model without activation recomputation."""
        return self.arena + self.layers * self.saved + self.kept_keys + self.in_a_pass

    @property
    def in_a_pass(self) -> int:
        """The bytes outside the arena that exist only during a pass, and the index maps and work lists."""
        return self.results + self.gradients + self.scratch + self.tables


@dataclass(frozen=True)
class Layout:
    """Where the buffers of a pass (tenants) lie in the arena of a rank, which has ``size`` bytes.

    ``offsets`` maps the name of a tenant to its first byte. Names are ``("inputs", side, stage, h0, h1)`` and
    ``("results", side, stage, h0, h1)`` for tokens that arrived in a stage for heads ``h0..h1`` (a shelf), and
    ``("sends", stage)`` and ``("receives", stage)`` for messages; ``side`` is ``QUERIES`` or ``KEYS``. Keys that are
    kept for the backward are not in the arena.
    """

    size: int
    offsets: dict[tuple[str | int, ...], int]


def plan_memory(plan: Plan, rank: int, kernel: str | None = None) -> Memory:
    """Return the memory that attention needs on ``rank`` with a kernel; by default with the one that needs most.

    ``kernel`` is its name, as in ``step.kernels``. Raise ValueError if the plan has no such rank.
    """
    if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or not 0 <= rank < plan.ranks:
        raise ValueError(f"rank {rank!r} does not exist: the plan has ranks 0..{plan.ranks - 1}")
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
    laid = any(_receives_whole_gradients(plan, rank, mask) for mask in numbers)
    gradients = tokens * _passing_gradients(shape, in_order, once, laid)
    arriving = sum(_arriving_rows(plan, rank, mask) for mask in numbers)
    tables = TABLE_BYTES * (len(numbers) * tokens + arriving) + MOVE_BYTES * arriving
    saved = tokens * _saved(shape)
    return Memory(rank, layers, forward, backward, saved, kept, results, gradients, scratch, tables)


def arena_layout(plan: Plan, rank: int, mask: int, backward: bool) -> Layout:
    """Return where every buffer lies in the arena of ``rank`` in one pass: mask number ``mask``, one direction."""
    tenants = [*_shelf_tenants(plan, rank, mask, backward), *_message_tenants(plan, rank, mask, backward)]
    offsets, size = first_fit([(t.size, t.first, t.last) for t in tenants])
    return Layout(size, {t.key: offset for t, offset in zip(tenants, offsets, strict=True)})


def first_fit(tenants: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Place tenants (bytes, first, last) so that no two share a byte at one time; return (offsets, total bytes).

    A tenant exists from time ``first`` to time ``last``, inclusive.
    """
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
    """Return the size rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned_starts(sizes: list[int]) -> list[int]:
    """Return the aligned offsets of tensors of these sizes in bytes laid side by side, and the end of the last one.

    The result has one more entry than ``sizes``.
    """
    return [0, *accumulate(aligned(size) for size in sizes)]


def shelf_fields(side: int, backward: bool, results: bool) -> list[Field]:
    """Return the tensors of a shelf (a buffer of tokens that arrived together): its inputs, or its results.

    ``side`` is ``QUERIES`` or ``KEYS``. Keys have no results in the forward.
    """
    if results:
        kinds: tuple[Kind, ...] = (
            ((Kind.DKV,) if backward else ()) if side == KEYS else (Kind.DQ if backward else Kind.O,)
        )
    else:
        kinds = (Kind.KV,) if side == KEYS else (Kind.Q, Kind.DO) if backward else (Kind.Q,)
    return [field for kind in kinds for field in FIELDS[kind]]


def field_sizes(side: int, backward: bool, results: bool, amount: int, shape: Shape) -> list[int]:
    """Return the bytes of each tensor of :func:`shelf_fields` on a shelf of ``amount`` rows x heads."""
    found = []
    for field in shelf_fields(side, backward, results):
        each = shape.accumulator_bytes if results or field.precise else shape.element_bytes
        if results and field.name == "lse":
            each = STATISTICS_BYTES
        found.append(amount * field.numbers(shape) * each)
    return found


def kept_starts(amounts: list[int], shape: Shape) -> list[int]:
    """Return where each shelf's keys and values begin in the memory kept for a backward, and where the last end.

    ``amounts`` are the rows x heads of the shelves; offsets are in bytes.
    """
    return aligned_starts([aligned_starts(field_sizes(KEYS, False, False, a, shape))[-1] for a in amounts])


@dataclass(frozen=True)
class _Tenant:
    """A buffer in the arena: ``size`` bytes that are in use from half slot ``first`` to half slot ``last``, inclusive.

    Half slot ``2 s`` is when slot s takes in what arrived, ``2 s + 1`` when it posts messages and computes. ``key`` is
    the name of the buffer in :class:`Layout`.
    """

    key: tuple[str | int, ...]
    size: int
    first: int
    last: int


def _shelf_tenants(plan: Plan, rank: int, mask: int, backward: bool) -> Iterator[_Tenant]:
    """Yield a tenant for the inputs and one for the results of each shelf that a rank receives in a pass.

    A shelf is what arrives in one stage for the same heads, of queries or of keys. Keys that are kept for the backward
    are left out, and keys have no results in the forward.
    """
    program, inputs = plan.programs[mask][backward], pass_inputs(plan, mask, backward)
    arriving = inputs.take(inputs.target == rank)
    if len(arriving) == 0:
        return
    side = _side(arriving)
    shelves, shelf = _groups(np.stack([side, arriving.stage, arriving.h0, arriving.h1]))
    rows = np.bincount(shelf, arriving.stop - arriving.start).astype(np.int64)
    holds_queries, stage = shelves[0] == QUERIES, shelves[1]
    # The last work on a shelf is its work with the last shelf of the other side, or with own tokens (own_stage).
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
    """Yield (whether results are read, transfers, half slots) for the transfers that read from shelves of a rank.

    The half slot is when each transfer reads: ``2 s`` is when slot s takes in what arrived, ``2 s + 1`` when it posts
    and computes. Results that arrive to be added need no entry: the sum leaves later, which is an entry.
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
    """Return, for each of ``pieces``, the row of ``arriving`` that brought it to the rank."""

    def keys(t: Transfers) -> Ints:
        return np.stack([_side(t), t.owner, t.start, t.stop, t.h0, t.h1])

    _, label = _groups(np.concatenate([keys(arriving), keys(pieces)], axis=1))
    row = np.zeros(int(label.max()) + 1, np.int64)
    row[label[: len(arriving)]] = np.arange(len(arriving))
    return row[label[len(arriving) :]]


def _message_tenants(plan: Plan, rank: int, mask: int, backward: bool) -> Iterator[_Tenant]:
    """Yield a tenant for the messages that a rank sends and one for those it receives, for each stage of a pass."""
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
            # A stage that is posted in its own slot (ahead 0) is posted before that slot waits, so the sends of the
            # stage before may not have left yet: count it as posted one slot earlier.
            posted = number - max(int(ahead[number]), 1)
            yield _Tenant((what, number), int(total), 2 * posted + 1, 2 * number + last)


def _groups(columns: Ints) -> tuple[Ints, Ints]:
    """Return the distinct columns in ascending order, and for each given column its index among them.

    This is ``np.unique(columns, axis=1, return_inverse=True)``, but faster.
    """
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    first = np.ones(len(order), bool)
    first[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    label = np.empty(len(order), np.int64)
    label[order] = np.cumsum(first) - 1
    return ordered[:, first], label


def _side(t: Transfers) -> Ints:
    """Return the side of each transfer, ``QUERIES`` or ``KEYS``."""
    return np.where(np.isin(t.kind, QUERY_SIDED), QUERIES, KEYS)


# --- a rank's own tensors ---------------------------------------------------------------------------------------------


def _kept_keys(plan: Plan, rank: int, mask: int) -> int:
    """Return the bytes of received keys and values that one layer keeps on a rank for its backward."""
    if not plan.programs[mask][1].keys_kept:
        return 0
    inputs = pass_inputs(plan, mask, False)
    mine = inputs.take((inputs.target == rank) & (inputs.kind == Kind.KV))
    _, shelf = _groups(np.stack([mine.stage, mine.h0, mine.h1]))
    amounts = np.bincount(shelf, (mine.stop - mine.start) * (mine.h1 - mine.h0))
    return kept_starts([int(amount) for amount in amounts], plan.shape)[-1]


def _saved(shape: Shape) -> int:
    """Return the bytes that autograd keeps of one token for the backward of one layer.

    These are q, k, v, output and LSE of all heads.
    """
    wide = shape.heads * (shape.head_dim + shape.v_head_dim) + shape.kv_heads * (shape.head_dim + shape.v_head_dim)
    return wide * shape.element_bytes + shape.heads * STATISTICS_BYTES


def _results(shape: Shape, in_order: bool, once: bool) -> int:
    """Return the bytes of one token's results before they are returned to the caller, in the direction that needs more.

    ``in_order`` says that the rank's tokens are in stream order, so that no reordered copies are needed; ``once`` says
    that dq is written once and never summed up.
    """
    e, acc, h, d, dv = shape.element_bytes, shape.accumulator_bytes, shape.heads, shape.head_dim, shape.v_head_dim
    out = h * dv * acc if e != acc and not once else 0  # else the output is returned from where it accumulated
    grads = (h * d * (not once) + shape.kv_heads * (d + dv)) * acc + h * STATISTICS_BYTES
    if not in_order:
        inputs = (h * d + shape.kv_heads * (d + dv)) * e
        out, grads = out + inputs, grads + inputs + h * dv * e + 2 * h * STATISTICS_BYTES
    return max(out, grads)


def _passing_gradients(shape: Shape, in_order: bool, once: bool, laid: bool) -> int:
    """Return the bytes of one token's gradient of the output, and of gradients rounded while their sums still exist.

    ``in_order`` and ``once`` are as in :func:`_results`. Reordered copies do not exist any more at that time, and they
    were larger. ``laid`` says that gradients may arrive complete: then all of them exist beside their sums.
    """
    e, h, d, dv = shape.element_bytes, shape.heads, shape.head_dim, shape.v_head_dim
    rounds = e != shape.accumulator_bytes
    if laid and rounds:
        return h * dv * e + (h * d + shape.kv_heads * (d + dv)) * e
    dq = h * d * e if once or (rounds and in_order) else 0
    return h * dv * e + dq + (shape.kv_heads * max(d, dv) * e if once and rounds else 0)


def _receives_whole_gradients(plan: Plan, rank: int, mask: int) -> bool:
    """Return whether gradients of a rank's own tokens arrive complete in the backward of a mask."""
    t = plan.programs[mask][1].transfers
    mine = (t.target == rank) & (t.owner == rank) & (t.partial == 0)
    return bool((mine & ((t.kind == Kind.DQ) | (t.kind == Kind.DKV))).any())


def _needs_nobody(plan: Plan, rank: int, mask: int) -> bool:
    """Return whether a rank neither sends nor receives anything under a mask, and every row of the batch sees a key."""
    if any(((p.transfers.source == rank) | (p.transfers.target == rank)).any() for p in plan.programs[mask]):
        return False
    return _all_rows_see(plan, mask)


def _all_rows_see(plan: Plan, mask: int) -> bool:
    """Return whether every row of the batch sees a key; a pad sees none."""
    batch, layer = plan.batch, plan.batch.masks[mask]
    slices = trim(layer.slices)
    document = np.repeat(np.arange(batch.documents), np.diff(layer.first))
    some = slices[:, Q0] < slices[:, Q1]
    _, start, stop = united(document[some], slices[some, Q0], slices[some, Q1])
    return plan.placement.pads == 0 and int((stop - start).sum()) == batch.tokens


def _arriving_rows(plan: Plan, rank: int, mask: int) -> int:
    """Return the number of rows (queries or keys) that a rank receives as inputs, forward and backward together."""
    inputs = [pass_inputs(plan, mask, backward) for backward in (False, True)]
    return int(sum((t.stop - t.start)[t.target == rank].sum() for t in inputs))


def _in_stream_order(placement: Placement, rank: int) -> bool:
    """Return whether the local order of a rank's tokens is their order in the stream."""
    start = placement.runs.start[placement.runs.rank == rank]
    return bool((np.diff(start) > 0).all())


def _most_rows(plan: Plan, rank: int, mask: int) -> int:
    """Return the rows x heads of the largest query shelf of the backward; the rank's own rows are a shelf too.

    A shelf is what arrives in one stage for the same heads.
    """
    inputs = pass_inputs(plan, mask, True)
    mine = inputs.take((inputs.target == rank) & (inputs.kind == Kind.Q))
    _, shelf = _groups(np.stack([mine.stage, mine.h0, mine.h1]))
    amounts = np.bincount(shelf, (mine.stop - mine.start) * (mine.h1 - mine.h0))
    return int(amounts.max(initial=plan.placement.tokens[rank] * plan.shape.heads))
