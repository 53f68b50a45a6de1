"""Check: execute a plan symbolically, forward and backward, and raise if it breaks an invariant.

Tokens are cut into *atoms*: the largest ranges of one owner's tokens that no region, piece or run divides. Atoms make
the check exact and keep its arrays small. For every rank, head range and atom, the state of a pass is the stage in
which the atom arrived and, for outputs, a sum of random 64-bit labels, one per contributing rank. A result is complete
and counts nothing twice exactly when its sum is the sum over all contributors (up to a probability of 2**-64).

This file shares only the tables with the scheduler. It also does not use :mod:`flexcp.plan.slots`, from which the other
modules learn in which slot work runs, so that it can find a mistake made there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexcp import masks
from flexcp.arrays.intervals import spread
from flexcp.batch import LayerMask
from flexcp.masks import K0, K1, Q0, Q1
from flexcp.plan.placement import Placement, Regions
from flexcp.plan.plan import Plan
from flexcp.plan.program import Program, Transfers
from flexcp.shape import QUERY_SIDED, Kind

Ints = NDArray[np.int64]
NEVER = 1 << 30
MOST_CELLS = 1 << 22
"""The most cells (rows x keys x heads) of a document that are counted in one array."""


class PlanError(ValueError):
    """A plan that would hang, or compute something wrongly, twice or not at all."""


def check_plan(plan: Plan) -> None:
    """Raise :class:`PlanError` unless every token is kept once, every pair computed once, every result reduced once.

    Pairs are the allowed (query, key) pairs of each head. The plan is executed symbolically, forward and backward.
    """
    placement = plan.placement
    _check_runs(placement)
    _require(
        len(placement.batch.masks) == len(placement.regions) == len(plan.programs),
        "there must be one program and one set of regions per mask",
    )
    for number, programs in enumerate(plan.programs):
        _check_work(plan, number)
        for backward, program in enumerate(programs):
            where = f"mask {placement.batch.masks[number].name!r}, {'backward' if backward else 'forward'}"
            _SymbolicPass(plan, number, program, where, programs[0]).run(bool(backward))


def _require(condition: bool | np.bool_, message: str) -> None:
    """Raise a :class:`PlanError` with the message unless the condition holds."""
    if not condition:
        raise PlanError(message)


def _check_runs(placement: Placement) -> None:
    """Raise :class:`PlanError` unless the runs cover the stream exactly once and are listed rank by rank."""
    runs = placement.runs
    _require(
        len(runs) == 0 or (runs.rank.min() >= 0 and runs.rank.max() < placement.ranks), "a run's rank does not exist"
    )
    _require(bool(np.all(runs.start < runs.stop)), "a run is empty")
    kept = placement.kept
    edges = np.concatenate([[0], kept.stop])
    _require(bool(np.all(edges[:-1] == kept.start)), "a token is kept by no rank or by two")
    _require(int(edges[-1]) == placement.stream, f"runs end at {int(edges[-1])}, the stream at {placement.stream}")
    _require(bool(np.all(np.diff(runs.rank) >= 0)), "runs are not listed rank by rank")


def _check_work(plan: Plan, number: int) -> None:
    """Raise :class:`PlanError` unless every (query, key, head) that mask ``number`` allows lies in one region."""
    batch, mask, regions = plan.batch, plan.batch.masks[number], plan.placement.regions[number]
    _require(bool(np.all((regions.rank >= 0) & (regions.rank < plan.ranks))), "a region's rank does not exist")
    _require(bool(np.all((regions.h0 >= 0) & (regions.h1 <= plan.shape.heads))), "a region's heads do not exist")
    order = np.argsort(regions.document, kind="stable")
    first = np.searchsorted(regions.document[order], np.arange(batch.documents + 1))
    for document in range(batch.documents):
        mine = regions.take(order[first[document] : first[document + 1]])
        _check_document(mask, document, int(batch.lengths[document]), plan.shape.heads, mine)


def _check_document(mask: LayerMask, document: int, length: int, head_count: int, regions: Regions) -> None:
    """Raise :class:`PlanError` unless the regions of a document compute every allowed (query, key, head) exactly once.

    ``length`` is the document's and ``head_count`` the number of query heads. The edges of the regions cut the document
    into cells. The cells are counted for a band of rows at a time, to limit memory.
    """
    rows = _edges(regions.q0, regions.q1, length)
    keys = _edges(regions.k0, regions.k1, length)
    heads = _edges(regions.h0, regions.h1, head_count)
    spans = np.stack(
        [
            np.searchsorted(edge, x)
            for edge, pair in ((rows, "q"), (keys, "k"), (heads, "h"))
            for x in (getattr(regions, pair + "0"), getattr(regions, pair + "1"))
        ]
    )
    width, deep = len(keys) - 1, len(heads) - 1
    band = max(1, MOST_CELLS // (width * deep))
    for top in range(0, len(rows) - 1, band):
        count = np.zeros((min(band, len(rows) - 1 - top), width, deep), np.int32)
        meets = (spans[0] < top + band) & (spans[1] > top)
        for q0, q1, k0, k1, h0, h1 in spans[:, meets].T.tolist():
            count[max(q0 - top, 0) : q1 - top, k0:k1, h0:h1] += 1
        # Neighbouring cells that are not computed exactly once are looked up in the mask together: in most of them it
        # allows nothing.
        border = np.diff(np.any(count != 1, axis=2).astype(np.int8), axis=1, prepend=0, append=0)
        (row, first), last = np.nonzero(border == 1), np.nonzero(border == -1)[1]
        asked = np.full(len(row), document), rows[top + row], rows[top + row + 1], keys[first], keys[last]
        allowed = mask.cuts(*asked)[0]
        if len(allowed):
            i, cells = int(row[allowed[0]]), range(first[allowed[0]], last[allowed[0]])
            slices = mask.slices[mask.first[document] : mask.first[document + 1]]
            q0, q1 = rows[top + i], rows[top + i + 1]
            j = next(j for j in cells if masks.area(masks.cut(slices, q0, q1, keys[j], keys[j + 1])).sum())
            raise PlanError(
                f"document {document}, rows {q0}..{q1}, keys {keys[j]}..{keys[j + 1]} are computed "
                f"{count[i, j].tolist()} times in the head ranges that begin at {heads[:-1].tolist()}"
            )


def _kept_keys(forward: Program) -> Transfers:
    """Return the key pieces of the forward, each one stage earlier: kept keys are there that early in the backward."""
    keys = forward.transfers.take(forward.transfers.kind == Kind.KV)
    return replace(keys, stage=keys.stage - 1)


def _edges(low: Ints, high: Ints, size: int) -> Ints:
    """Return all ends of ranges in 0..size, with 0 and ``size``, in ascending order and each once."""
    return np.unique(np.concatenate([low, high, [0, size]]))


@dataclass
class _Side:
    """The state of the queries or of the keys in a pass: arrays over [rank, head range, atom].

    An atom is a range of one owner's tokens that nothing in the plan divides. Head ranges lie between neighbouring
    ``borders``, so that no piece divides one. ``arrived`` is the stage in which an atom arrived, ``read`` and
    ``forwarded`` whether the rank computes with it or passes it on, ``complete`` the last slot that computes its
    result, ``labels`` the labels of the results that a rank holds, and ``sent`` whether it sent them. ``home`` are the
    labels that the owner has received and ``expected`` those that it must receive in the end, both over [head range,
    atom].
    """

    borders: Ints
    arrived: Ints
    read: NDArray[np.bool_]
    forwarded: NDArray[np.bool_]
    complete: Ints
    labels: NDArray[np.uint64]
    home: NDArray[np.uint64]
    expected: NDArray[np.uint64]
    sent: NDArray[np.bool_]

    def reorder(self, atoms: Ints) -> None:
        """Reorder the atoms of the arrays that :meth:`_SymbolicPass._compute` uses."""
        self.arrived, self.complete = self.arrived[:, :, atoms], self.complete[:, :, atoms]
        self.read = self.read[:, :, atoms]


class _SymbolicPass:
    """One pass (a mask in one direction), executed symbolically; messages of errors begin with ``where``.

    ``number`` is that of the mask, and ``forward`` its forward program, from which keys may be kept.
    """

    def __init__(self, plan: Plan, number: int, program: Program, where: str, forward: Program) -> None:
        self.plan, self.program, self.where = plan, program, where
        # A piece sent in a stage must be there in the slot that posts the stage: at least one slot before the stage.
        self.posted = [stage - max(int(ahead), 1) for stage, ahead in enumerate(program.execution.ahead)]
        self.pieces = program.transfers
        if program.keys_kept:
            self.pieces = Transfers.join([program.transfers, _kept_keys(forward)])
        self.placement = plan.placement
        self.regions = self.placement.regions[number]
        index, self.slices = plan.batch.masks[number].cuts(
            self.regions.document, self.regions.q0, self.regions.q1, self.regions.k0, self.regions.k1
        )
        self.region = index
        self._require_cells()
        self._make_atoms()
        self.sides = [self._side(True), self._side(False)]

    def _make_atoms(self) -> None:
        """Cut the tokens into atoms (ranges that nothing in the plan divides), sorted by owner and kept order.

        Kept order is the order of an owner's tokens in the stream. ``edge`` of an atom is owner x width + its first
        token in that order.
        """
        placement, t = self.placement, self.pieces
        self.width = placement.stream + 1
        begin = self.plan.batch.starts[self.regions.document[self.region]]
        ends = np.concatenate([begin + self.slices[:, c] for c in (Q0, Q1, K0, K1)] + [placement.kept.start])
        ends = np.unique(np.clip(ends, 0, placement.stream))
        starts, stops = ends, np.concatenate([ends[1:], [placement.stream]])
        _, owner, a, _ = placement.owned_parts(starts, stops)
        cuts = [owner * self.width + a, t.owner * self.width + t.start, t.owner * self.width + t.stop]
        everyone = np.arange(placement.ranks) * self.width
        edge = np.unique(np.concatenate([*cuts, everyone, everyone + placement.tokens]))
        real = edge % self.width < placement.tokens[edge // self.width]
        self.edge = edge[real]
        self.owner = self.edge // self.width

    def _atoms(self, owner: int, start: int, stop: int) -> slice:
        """Return the range of atoms of the tokens ``start..stop`` (exclusive) of an owner, in kept order."""
        low, high = np.searchsorted(self.edge, [owner * self.width + start, owner * self.width + stop])
        return slice(int(low), int(high))

    def _stream_order(self) -> tuple[Ints, Ints]:
        """Return the atoms in stream order, and the stream token at which each of them begins."""
        kept = self.placement.kept
        at_home = kept.rank * self.width + kept.local
        low, high = (np.searchsorted(self.edge, at) for at in (at_home, at_home + kept.stop - kept.start))
        run, within = spread(high - low)
        atoms = low[run] + within
        return atoms, kept.start[run] + self.edge[atoms] - at_home[run]

    def _side(self, queries: bool) -> _Side:
        """Return the state of the query side or of the key side before the pass."""
        shape, regions = self.plan.shape, self.regions
        h0, h1 = (regions.h0, regions.h1) if queries else shape.kv_range(regions.h0, regions.h1)
        t = self.pieces
        mine = np.isin(t.kind, QUERY_SIDED) == queries
        count = shape.heads if queries else shape.kv_heads
        borders = np.unique(np.concatenate([h0, h1, t.h0[mine], t.h1[mine], [0, count]]))
        size = (self.plan.ranks, len(borders) - 1, len(self.edge))
        arrived = np.full(size, NEVER, np.int64)
        if not self.placement.assemble_own:
            arrived[self.owner, :, np.arange(len(self.edge))] = self.program.own_stage
        zeros = np.zeros(size, bool)
        return _Side(
            borders,
            arrived,
            zeros,
            zeros.copy(),
            np.full(size, -1, np.int64),
            np.zeros(size, np.uint64),
            np.zeros(size[1:], np.uint64),
            np.zeros(size[1:], np.uint64),
            zeros.copy(),
        )

    def run(self, backward: bool) -> None:
        """Execute the pass: inputs arrive, work is done, outputs go home.

        Raise :class:`PlanError` if an invariant breaks.
        """
        t = self.program.transfers
        self._require(
            0 <= self.program.own_stage < self.program.stages, "own tokens enter in a stage that does not exist"
        )
        self._require_home_when_held()
        allowed = (Kind.Q, Kind.KV, Kind.DO, Kind.DQ, Kind.DKV) if backward else (Kind.Q, Kind.KV, Kind.O)
        self._require(np.isin(t.kind, allowed).all(), "a kind of piece that does not belong to this direction")
        self._require((t.stage >= 1).all() and (t.stage < self.program.stages).all(), "a stage that does not exist")
        problem = self.program.execution.problem(self.program.stages)
        self._require(problem is None, str(problem))
        self._require_kept_keys(backward)
        self._receive([Kind.Q, Kind.KV])
        self._require_whole_relays()
        if backward:
            self._require(sorted(self._rows(Kind.Q)) == sorted(self._rows(Kind.DO)), "do does not travel with its q")
        self._compute()
        queries, keys = self.sides
        outputs = [(queries, Kind.Q, Kind.DQ), (keys, Kind.KV, Kind.DKV)] if backward else [(queries, Kind.Q, Kind.O)]
        for side, arrived_as, kind in outputs:
            self._require_known_pieces(kind, arrived_as)
            self._return(side, kind)
        if self.placement.traffic.kind == "needed":
            for side in self.sides:
                held = side.arrived < NEVER
                held[self.owner, :, np.arange(len(self.edge))] = False
                self._require(not (held & ~side.read & ~side.forwarded).any(), "a piece is received and never used")

    def _require_home_when_held(self) -> None:
        """Raise :class:`PlanError` if work is held back whose results another rank waits for.

        Only work of a rank on its own rows and own keys may be held, and only if these results do not travel. There
        must be one share per rank, from 0 to 1000 per mille, or none.
        """
        held = self.program.held
        self._require(len(held) in (0, self.plan.ranks), "there must be one share of held work per rank, or none")
        self._require(
            all(0 <= share <= 1000 for share in held), "a share of held work is not between 0 and 1000 per mille"
        )
        stay = self.placement.traffic.kind == "needed" and not self.placement.assemble_own
        self._require(stay or not any(held), "held work has results that other ranks wait for")

    def _require_cells(self) -> None:
        """Raise :class:`PlanError` if a transfer names a rank, token or head that does not exist, or has no tokens."""
        t, ranks = self.program.transfers, self.plan.ranks
        for name in ("source", "target", "owner"):
            column = getattr(t, name)
            self._require(((column >= 0) & (column < ranks)).all(), f"a transfer's {name} does not exist")
        self._require((t.start >= 0).all() and (t.start < t.stop).all(), "a piece has no tokens")
        self._require(
            (t.stop <= self.placement.tokens[t.owner]).all(), "a piece has tokens that its owner does not keep"
        )
        heads = np.where(np.isin(t.kind, QUERY_SIDED), self.plan.shape.heads, self.plan.shape.kv_heads)
        self._require(((t.h0 >= 0) & (t.h0 < t.h1) & (t.h1 <= heads)).all(), "a transfer's heads do not exist")
        self._require(np.isin(t.partial, (0, 1)).all(), "a transfer is neither partial nor final")

    def _require_whole_relays(self) -> None:
        """Raise :class:`PlanError` if a rank forwards an input that did not arrive there as exactly this piece."""
        for kind in (Kind.Q, Kind.KV):
            rows = self._rows(kind)
            known = {r[2:] for r in rows}
            for _, source, _, owner, *piece in rows:
                known_here = source == owner or (source, owner, *piece) in known
                self._require(known_here, f"rank {source} forwards a piece of rank {owner} that never arrived as such")

    def _require_known_pieces(self, kind: Kind, arrived_as: Kind) -> None:
        """Raise :class:`PlanError` if an output passes through a rank that has no such piece.

        ``kind`` is the kind of the output. A rank has a piece if it received it as an input of kind ``arrived_as`` or
        keeps its tokens.
        """
        known = {r[2:] for r in self._rows(arrived_as)}
        for _, source, target, owner, *piece in self._rows(kind):
            for rank in (source, target):
                missing = (rank, owner, *piece) not in known
                at_home = rank == owner and (rank == target or not self.placement.assemble_own)
                self._require(not missing or at_home, f"rank {rank} passes on {kind.name} of a piece it never received")

    def _require_kept_keys(self, backward: bool) -> None:
        """Raise :class:`PlanError` if a program keeps keys wrongly.

        Keys must not be kept for a forward, travel although they are kept, or have to be assembled first.
        """
        if self.program.keys_kept:
            self._require(backward, "a forward has no keys that were kept")
            self._require(not (self.program.transfers.kind == Kind.KV).any(), "keys travel that every rank has kept")
            self._require(not self.placement.assemble_own, "keys that have to be assembled cannot be kept")

    def _rows(self, kind: Kind) -> list[tuple[int, ...]]:
        """Return (stage, source, target, owner, start, stop, h0, h1) of the pieces of one kind."""
        t = self.pieces
        return [tuple(r) for r in t.take(t.kind == kind).matrix()[[0, 1, 2, 4, 5, 6, 7, 8]].T.tolist()]

    def _receive(self, kinds: list[Kind]) -> None:
        """Let the inputs arrive, stage by stage.

        Raise :class:`PlanError` if one is forwarded too early or received twice.
        """
        for kind in kinds:
            side = self.sides[0 if kind in QUERY_SIDED else 1]
            rows = sorted(self._rows(kind))
            for stage in sorted({r[0] for r in rows}):
                now = [r for r in rows if r[0] == stage]
                for _, source, _, owner, start, stop, h0, h1 in now:
                    heads, atoms = self._heads(side, h0, h1), self._atoms(owner, start, stop)
                    if source != owner:
                        self._require(
                            (side.arrived[source, heads, atoms] <= self.posted[stage]).all(),
                            f"rank {source} forwards in stage {stage} what it has not received before",
                        )
                        side.forwarded[source, heads, atoms] = True
                for _, _, target, owner, start, stop, h0, h1 in now:
                    heads, atoms = self._heads(side, h0, h1), self._atoms(owner, start, stop)
                    self._require(
                        (side.arrived[target, heads, atoms] == NEVER).all(),
                        f"rank {target} receives a piece of rank {owner} in stage {stage} that it already has",
                    )
                    side.arrived[target, heads, atoms] = stage

    def _compute(self) -> None:
        """Do all work, each in the first slot in which its rows and keys are there, and label its results.

        ``complete`` becomes the last slot in which a rank works on an atom.
        """
        shape, regions = self.plan.shape, self.regions
        labels = np.random.default_rng(0).integers(1, 1 << 63, self.plan.ranks).astype(np.uint64)
        begin = self.plan.batch.starts[regions.document[self.region]]
        # The rows of a slice are a range of the stream, and so are its keys: in stream order their atoms are a range.
        atoms, position = self._stream_order()
        for side in self.sides:
            side.reorder(atoms)
        parts = [
            [np.searchsorted(position, begin + self.slices[:, column]).tolist() for column in columns]
            for columns in ((Q0, Q1), (K0, K1))
        ]
        heads = ((regions.h0, regions.h1), shape.kv_range(regions.h0, regions.h1))
        spans = [
            [np.searchsorted(side.borders, column).tolist() for column in pair]
            for side, pair in zip(self.sides, heads, strict=True)
        ]
        for i, region in enumerate(self.region.tolist()):
            rank = int(regions.rank[region])
            spots = [
                (side, (rank, slice(h0[region], h1[region]), slice(low[i], high[i])))
                for side, (low, high), (h0, h1) in zip(self.sides, parts, spans, strict=True)
            ]
            slowest = [int(side.arrived[at].max()) for side, at in spots]
            self._require(max(slowest) < NEVER, f"rank {rank} computes with tokens it never receives")
            for (side, at), others in zip(spots, slowest[::-1], strict=True):
                np.maximum(side.complete[at], np.maximum(side.arrived[at], others), out=side.complete[at])
                side.read[at] = True
        for side in self.sides:
            side.reorder(np.argsort(atoms))
            side.labels[:] = np.where(side.read, labels[:, None, None], np.uint64(0))
            side.expected[:] = side.labels.sum(axis=0, dtype=np.uint64)
            if not self.placement.assemble_own:
                # A rank's results for its own tokens do not travel.
                every = np.arange(len(self.edge))
                side.home[:] = side.labels[self.owner, :, every].T
                side.labels[self.owner, :, every] = 0

    def _return(self, side: _Side, kind: Kind) -> None:
        """Send the outputs of one kind home, stage by stage.

        Raise :class:`PlanError` unless each arrives complete and once.
        """
        t = self.program.transfers
        rows = t.take(t.kind == kind).matrix().T.tolist()
        for stage in sorted({r[0] for r in rows}):
            carried = []
            for _, source, target, _, owner, start, stop, h0, h1, partial in (r for r in rows if r[0] == stage):
                heads, atoms = self._heads(side, h0, h1), self._atoms(owner, start, stop)
                self._require(
                    (side.complete[source, heads, atoms] < self.posted[stage]).all(),
                    f"rank {source} sends {kind.name} in stage {stage} before it is computed",
                )
                self._require(
                    (side.arrived[source, heads, atoms] < NEVER).all()
                    and (target == owner or (side.arrived[target, heads, atoms] < NEVER).all()),
                    f"{kind.name} passes through a rank that has no rows for it",
                )
                self._require(
                    not side.sent[source, heads, atoms].any(), f"rank {source} sends the same {kind.name} twice"
                )
                side.sent[source, heads, atoms] = True
                value = side.labels[source, heads, atoms].copy()
                self._require(
                    bool(partial) or (value == side.expected[heads, atoms]).all(),
                    f"rank {source} sends {kind.name} as final although others contribute",
                )
                side.labels[source, heads, atoms] = 0
                carried.append((target, owner, heads, atoms, value))
            for target, owner, heads, atoms, value in carried:
                if target == owner:
                    side.home[heads, atoms] += value
                else:
                    side.labels[target, heads, atoms] += value
                    # A result that arrives in this stage may leave in the stage that slot ``stage`` posts, as if it had
                    # been computed in slot ``stage - 1``.
                    whole = side.complete[target, heads, atoms]
                    side.complete[target, heads, atoms] = np.maximum(whole, stage - 1)
        self._require((side.home == side.expected).all(), f"{kind.name} does not come home whole and once")
        self._require(not side.labels.any(), f"{kind.name} is left behind on a rank that does not keep the tokens")

    @staticmethod
    def _heads(side: _Side, h0: int, h1: int) -> slice:
        """Return the head ranges of a side that make up the heads ``h0..h1``."""
        low, high = np.searchsorted(side.borders, [h0, h1])
        return slice(int(low), int(high))

    def _require(self, condition: bool | np.bool_, message: str) -> None:
        """Raise a :class:`PlanError` that names the mask and direction unless the condition holds."""
        _require(condition, f"{self.where}: {message}")
