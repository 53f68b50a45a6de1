"""Token machine: executes a plan token by token and head by head on integers, to check that attention is right.

Every key token has a random 64-bit number, and every query token one for each head. A rank's result for a row is the
sum of the numbers of the keys it saw, and for a key the sum over the rows that saw it, both modulo 2**64. Results
travel and are added as the plan's transfers say. At the end each row must be home with the sum over exactly its allowed
keys, and each key with the sum over its rows: a pair that is left out, computed twice or returned twice changes the
sum. The machine also tracks in which slot each number arrives, so that nothing is used, forwarded or sent too early.

Arrays are dense over [rank, token, head]. The code shares nothing with the scheduler, the executor,
:mod:`flexcp.plan.check` or :mod:`flexcp.plan.slots`: its only inputs are the tables of the plan and the pairs that
masks allow by definition.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.plan import Plan
from flexcp.plan.program import Program

Ints = NDArray[np.int64]
Words64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
NEVER = 1 << 40
Q, KV, OUT, DO, DQ, DKV = range(6)


class Wrong(Exception):  # noqa: N818 - a finding, not an accident
    """Raised when a check of the fuzzer finds a wrong plan, execution, loader or report; the case then fails."""


def require(condition: bool | np.bool_, message: str) -> None:
    """Raise :class:`Wrong` unless the condition holds."""
    if not condition:
        raise Wrong(message)


def execute(plan: Plan, allowed: list[list[Bools]]) -> None:
    """Execute all passes of a plan and raise :class:`Wrong` on an error.

    ``allowed[mask][document]`` are the allowed pairs, as boolean matrices ``[query, key]``.
    """
    owner = owners(plan)
    for mask, dense in enumerate(allowed):
        work = computed_once(plan, mask, dense)
        require(plan.work(mask).tolist() == work.tolist(), f"plan.work says {plan.work(mask)}, counted {work}")
        for backward in (False, True):
            where = f"mask {mask}, {'backward' if backward else 'forward'}"
            _Pass(plan, mask, backward, owner, dense, where).run()
            counted = _bytes(plan, plan.programs[mask][backward])
            require((plan.bytes(backward, mask) == counted).all(), f"{where}: plan.bytes is not what transfers carry")


def owners(plan: Plan) -> Ints:
    """Return the rank that keeps each token of the stream, pads included; raise :class:`Wrong` unless each has one."""
    owner = np.full(plan.batch.tokens + plan.placement.pads, -1, np.int64)
    for rank, start, stop in plan.placement.runs.matrix().T.tolist():
        require(0 <= rank < plan.ranks and 0 <= start < stop <= len(owner), f"run {(rank, start, stop)} is impossible")
        require((owner[start:stop] == -1).all(), f"tokens {start}..{stop} are kept twice")
        owner[start:stop] = rank
    require((owner >= 0).all(), "a token is kept by no rank")
    return owner


def computed_once(plan: Plan, mask: int, dense: list[Bools]) -> Ints:
    """Check that every allowed pair of every head is in exactly one region; return the pairs x heads of each rank.

    ``dense[document]`` are the allowed pairs. Raises :class:`Wrong`.
    """
    times = [np.zeros((plan.shape.heads, *pairs.shape), np.int16) for pairs in dense]
    work = np.zeros(plan.ranks, np.int64)
    for rank, d, q0, q1, k0, k1, h0, h1 in plan.placement.regions[mask].matrix().T.tolist():
        times[d][h0:h1, q0:q1, k0:k1] += 1
        work[rank] += (h1 - h0) * np.count_nonzero(dense[d][q0:q1, k0:k1])
    for d, (count, pairs) in enumerate(zip(times, dense, strict=True)):
        wrong = np.argwhere((count != 1) & pairs)
        if len(wrong):
            head, q, k = wrong[0].tolist()
            raise Wrong(
                f"mask {mask}, document {d}: pair ({q}, {k}) of head {head} is computed {count[head, q, k]} times"
            )
    return work


def _bytes(plan: Plan, program: Program) -> Ints:
    """Return the bytes ``[source, target]`` of the transfers, computed from the table of bytes in the manual."""
    shape = plan.shape
    e = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[shape.dtype]
    wide = 8 if shape.dtype == "float64" else 4
    d, dv = shape.head_dim, shape.v_head_dim
    kv = d + dv if shape.latent is None else shape.latent
    final = {Q: e * d, KV: e * kv, OUT: e * dv + wide, DO: e * dv + 2 * wide, DQ: e * d, DKV: e * kv}
    partial = final | {OUT: wide * dv + wide, DQ: wide * d, DKV: wide * kv}
    found = np.zeros((plan.ranks, plan.ranks), np.int64)
    for _, source, target, kind, _, start, stop, h0, h1, part in program.transfers.matrix().T.tolist():
        if source != target:
            found[source, target] += (stop - start) * (h1 - h0) * (partial if part else final)[kind]
    return found


class _Pass:
    """One pass on all ranks: one direction of one mask; ``where`` names it in errors."""

    def __init__(self, plan: Plan, mask: int, backward: bool, owner: Ints, dense: list[Bools], where: str) -> None:
        self.plan, self.mask, self.backward, self.dense, self.where = plan, mask, backward, dense, where
        self.program = plan.programs[mask][backward]
        self.ahead = self.program.execution.ahead.tolist()
        self.rows = self.program.transfers.matrix().T.tolist()
        self.owner = owner
        self.kept = [np.flatnonzero(owner == rank) for rank in range(plan.ranks)]
        self.share = plan.shape.heads // plan.shape.kv_heads
        draw = np.random.default_rng(7)
        self.key_words = draw.integers(1, 1 << 63, len(owner)).astype(np.uint64)
        self.row_words = draw.integers(1, 1 << 63, (len(owner), plan.shape.heads)).astype(np.uint64)

    def run(self) -> None:
        """Execute the pass: inputs arrive, work is done, results go home."""
        heads, kv_heads = self.plan.shape.heads, self.plan.shape.kv_heads
        q, kv = self._arrivals(Q, heads), self._arrivals(KV, kv_heads)
        if self.backward:
            self._require(bool((q == self._arrivals(DO, heads)).all()), "do does not arrive with its q")
        row_words, row_slot, key_words, key_slot = self._work(q, kv)
        self._home(DQ if self.backward else OUT, row_words, row_slot, self._expected_rows())
        if self.backward:
            self._home(DKV, key_words, key_slot, self._expected_keys())

    def _leaves(self, stage: int) -> tuple[int, int]:
        """Return the last slot whose arrivals, and the last slot whose work, a message of this stage can carry.

        A stage that is posted ``ahead`` slots early is posted after that slot's wait and before its work. With ``ahead
        = 0`` it is posted at the very beginning of its own slot.
        """
        ahead = self.ahead[stage]
        return (stage - ahead, stage - ahead - 1) if ahead else (stage - 1, stage - 1)

    def _arrivals(self, kind: int, heads: int) -> Ints:
        """Return as ``[rank, token, head]`` the first slot in which an input of this kind can be used.

        It is ``NEVER`` on ranks that never have the input.
        """
        found = np.full((self.plan.ranks, len(self.owner), heads), NEVER, np.int64)
        if not self.plan.placement.assemble_own:
            found[self.owner, np.arange(len(self.owner))] = self.program.own_stage
        rows = sorted(row for row in self.rows if row[3] == kind)
        early = 0
        if kind == KV and self.program.keys_kept:
            self._require(not rows, "keys travel that ranks have kept")
            self._require(self.backward, "a forward has kept keys")
            rows = sorted(r for r in self.plan.programs[self.mask][0].transfers.matrix().T.tolist() if r[3] == KV)
            early = 1
        for stage, source, target, _, owner, start, stop, h0, h1, _ in rows:
            self._require(early == 1 or 1 <= stage < self.program.stages, f"stage {stage} does not exist")
            tokens = self.kept[owner][start:stop]
            self._require(len(tokens) == stop - start > 0 and 0 <= h0 < h1 <= heads, "a piece that does not exist")
            if source != owner and not early:
                latest = self._leaves(stage)[0]
                there = found[source, tokens, h0:h1]
                self._require(
                    bool((there <= latest).all()), f"rank {source} forwards in stage {stage} what is not there"
                )
            twice = found[target, tokens, h0:h1] != NEVER
            self._require(not twice.any(), f"rank {target} receives in stage {stage} what it has")
            found[target, tokens, h0:h1] = stage - early
        return found

    def _work(self, q: Ints, kv: Ints) -> tuple[Words64, Ints, Words64, Ints]:
        """Return what ranks compute: (numbers of rows, slots of rows, numbers of keys, slots of keys).

        A slot is the one in which the number is complete, -1 where nothing is computed. ``q`` and ``kv`` are the
        arrivals.
        """
        row_words, row_slot = np.zeros(q.shape, np.uint64), np.full(q.shape, -1, np.int64)
        key_words, key_slot = np.zeros(kv.shape, np.uint64), np.full(kv.shape, -1, np.int64)
        starts = self.plan.batch.starts
        for rank, d, q0, q1, k0, k1, h0, h1 in self.plan.placement.regions[self.mask].matrix().T.tolist():
            pairs, begin = self.dense[d][q0:q1, k0:k1], int(starts[d])
            rows, keys = slice(begin + q0, begin + q1), slice(begin + k0, begin + k1)
            if not pairs.any():
                continue
            for head in range(h0, h1):
                g = head // self.share
                slot = np.maximum(q[rank, rows, head][:, None], kv[rank, keys, g][None, :])
                self._require(bool((slot[pairs] < NEVER).all()), f"rank {rank} computes with tokens it never receives")
                slot = np.where(pairs, slot, -1)
                row_slot[rank, rows, head] = np.maximum(row_slot[rank, rows, head], slot.max(axis=1))
                key_slot[rank, keys, g] = np.maximum(key_slot[rank, keys, g], slot.max(axis=0))
                row_words[rank, rows, head] += (pairs * self.key_words[keys]).sum(axis=1, dtype=np.uint64)
                key_words[rank, keys, g] += (pairs * self.row_words[rows, head, None]).sum(axis=0, dtype=np.uint64)
        return row_words, row_slot, key_words, key_slot

    def _home(self, kind: int, words: Words64, slot: Ints, expected: Words64) -> None:
        """Let results travel; at the end every result must be complete on its owner, and none left on another rank.

        ``words`` are the ranks' numbers and ``slot`` the slots in which they are complete; ``expected`` are the right
        sums.
        """
        tokens_of_all = np.arange(len(self.owner))
        came = np.full(slot.shape, -1, np.int64)
        home = np.zeros_like(expected)
        if not self.plan.placement.assemble_own:
            home += words[self.owner, tokens_of_all]
            words[self.owner, tokens_of_all] = 0
        rows = sorted(row for row in self.rows if row[3] == kind)
        for stage in sorted({row[0] for row in rows}):
            carried = []
            last_came, last_done = self._leaves(stage)
            for _, source, target, _, owner, start, stop, h0, h1, partial in (r for r in rows if r[0] == stage):
                tokens = self.kept[owner][start:stop]
                at = (source, tokens, slice(h0, h1))
                name = ("q", "kv", "o", "do", "dq", "dkv")[kind]
                self._require(
                    bool((slot[at] <= last_done).all() and (came[at] <= last_came).all()),
                    f"rank {source} sends {name} in stage {stage} before it has it",
                )
                value = words[at].copy()
                self._require(
                    bool(partial) or bool((value == expected[tokens, h0:h1]).all()),
                    f"rank {source} sends {name} as final although it is not",
                )
                words[at] = 0
                carried.append((target, owner, tokens, slice(h0, h1), value))
            for target, owner, tokens, heads, value in carried:
                if target == owner:
                    home[tokens, heads] += value
                else:
                    words[target, tokens, heads] += value
                    came[target, tokens, heads] = stage
        self._require(not words.any(), "results are left behind on a rank that does not keep the tokens")
        wrong = np.argwhere(home != expected)
        self._require(len(wrong) == 0, f"result {wrong[:1].tolist()} (token, head) is not whole, or counted twice")

    def _expected_rows(self) -> Words64:
        found = np.zeros((len(self.owner), self.plan.shape.heads), np.uint64)
        for pairs, begin in zip(self.dense, self.plan.batch.starts.tolist(), strict=False):
            keys = self.key_words[begin : begin + len(pairs)]
            found[begin : begin + len(pairs)] = (pairs * keys).sum(axis=1, dtype=np.uint64)[:, None]
        return found

    def _expected_keys(self) -> Words64:
        kv_heads = self.plan.shape.kv_heads
        found = np.zeros((len(self.owner), kv_heads), np.uint64)
        for pairs, begin in zip(self.dense, self.plan.batch.starts.tolist(), strict=False):
            rows = self.row_words[begin : begin + len(pairs)]
            of_group = rows.reshape(len(pairs), kv_heads, self.share).sum(axis=2, dtype=np.uint64)
            for g in range(kv_heads):
                seen = (pairs * of_group[:, g, None]).sum(axis=0, dtype=np.uint64)
                found[begin : begin + len(pairs), g] = seen
        return found

    def _require(self, condition: bool, message: str) -> None:
        require(condition, f"{self.where}: {message}")
