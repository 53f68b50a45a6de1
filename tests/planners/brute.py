"""Counts what a plan must move and compute one token, head and pair at a time, with dense arrays instead of intervals
and without a scheduler.

Work, and what each rank receives and returns under ``needed`` traffic (only what is read moves), follow from which rank
keeps and which rank computes what. The static methods' own traffic follows from token counts and groups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.masks import Mask
from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def dense_masks(plan: Plan, mask: int) -> list[Bools]:
    """Return each document's allowed pairs as a dense matrix, by the definition of its mask."""
    rules = plan.batch.masks[mask].rules
    return [_dense(rules[0] if len(rules) == 1 else rules[d], int(n)) for d, n in enumerate(plan.batch.lengths)]


def _dense(rule: Mask, n: int) -> Bools:
    q, k = np.arange(n)[:, None], np.arange(n)[None, :]
    if rule.name == "full":
        return np.ones((n, n), bool)
    if rule.name == "causal":
        return k <= q
    if rule.name == "prefix":
        return (k < rule.params[0]) | (k <= q)
    return rule.dense(n)


def owners(plan: Plan) -> Ints:
    """Return the rank that keeps each token of the stream, pads included; every token must have exactly one."""
    owner = np.full(plan.placement.stream, -1)
    runs = plan.placement.runs
    for rank, start, stop in zip(runs.rank, runs.start, runs.stop, strict=True):
        assert (owner[start:stop] == -1).all()
        owner[start:stop] = rank
    assert (owner >= 0).all()
    return owner


def work_of_ranks(plan: Plan, mask: int) -> Ints:
    """Return pairs x query heads of each rank; every pair of every head must be computed exactly once."""
    dense = dense_masks(plan, mask)
    times = [np.zeros((plan.shape.heads, *each.shape), np.int64) for each in dense]
    work = np.zeros(plan.ranks, np.int64)
    for rank, d, q0, q1, k0, k1, h0, h1 in plan.placement.regions[mask].matrix().T.tolist():
        times[d][h0:h1, q0:q1, k0:k1] += 1
        work[rank] += (h1 - h0) * np.count_nonzero(dense[d][q0:q1, k0:k1])
    for count, allowed in zip(times, dense, strict=True):
        assert (count[:, allowed] == 1).all()
    return work


def static_bytes(plan: Plan, backward: bool) -> Ints:
    """Return the ``[source, target]`` bytes of one layer under a static method's own traffic."""
    moved = {"gather": _gathered, "ring": _passed_round}[plan.placement.traffic.kind](plan, backward)
    np.fill_diagonal(moved, 0)
    return moved


class _Each:
    """Bytes of one token and head for each kind of message, by the design's table; pairs are (final, partial)."""

    def __init__(self, plan: Plan) -> None:
        shape = plan.shape
        e = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[shape.dtype]
        wide = 8 if shape.dtype == "float64" else 4
        d, dv = shape.head_dim, shape.v_head_dim
        self.q, self.kv, self.do = e * d, e * (d + dv), e * dv + 2 * wide
        self.o = e * dv + wide, wide * dv + wide
        self.dq = e * d, wide * d
        self.dkv = e * (d + dv), wide * (d + dv)


class Needed:
    """``needed`` traffic of one layer if every piece went straight from its owner to its reader and back.

    ``there`` and ``back`` are ``[source, target]`` bytes; ``least`` is what must cross between nodes when keys enter
    every node once, and their gradients leave it once.
    """

    def __init__(self, plan: Plan, backward: bool, mask: int) -> None:
        shape, owner, each = plan.shape, owners(plan), _Each(plan)
        rows = np.zeros((plan.ranks, plan.placement.stream, shape.heads), bool)
        keys = np.zeros((plan.ranks, plan.placement.stream, shape.kv_heads), bool)
        dense, share = dense_masks(plan, mask), shape.heads // shape.kv_heads
        for rank, d, q0, q1, k0, k1, h0, h1 in plan.placement.regions[mask].matrix().T.tolist():
            part, begin = dense[d][q0:q1, k0:k1], int(plan.batch.starts[d])
            for h in range(h0, h1):
                rows[rank, begin + q0 : begin + q1, h] |= part.any(axis=1)
                keys[rank, begin + k0 : begin + k1, h // share] |= part.any(axis=0)
        self.there, self.back = np.zeros((2, plan.ranks, plan.ranks), np.int64)
        self.least = 0
        for used, there, back, once in (
            (rows, each.q + each.do * backward, each.dq if backward else each.o, False),
            (keys, each.kv, each.dkv if backward else (0, 0), True),
        ):
            partial = used.sum(axis=0) > 1
            entered = set()
            for rank, token, head in np.argwhere(used).tolist():
                home, node = int(owner[token]), plan.cluster.node_of(rank)
                if rank == home:
                    continue
                result = back[int(partial[token, head])]
                self.there[home, rank] += there
                self.back[rank, home] += result
                if plan.cluster.node_of(home) != node and not (once and (token, head, node) in entered):
                    entered.add((token, head, node))
                    self.least += there + result


def _gathered(plan: Plan, backward: bool) -> Ints:
    """Send all keys of a group to all of its ranks; each rank returns its part of their gradients."""
    each, kept, moved = _Each(plan), plan.placement.tokens, np.zeros((plan.ranks, plan.ranks), np.int64)
    for grid in plan.placement.traffic.groups:
        members = [rank for row in grid for rank in row]
        for a in members:
            for b in members:
                moved[a, b] += kept[a] * plan.shape.kv_heads * each.kv
                moved[b, a] += kept[a] * plan.shape.kv_heads * each.dkv[1] * backward
    return moved


def _passed_round(plan: Plan, backward: bool) -> Ints:
    """Exchange heads inside each ring position; then keys pass from position to position, and gradients follow to their
    owners.
    """
    shape, each, kept = plan.shape, _Each(plan), plan.placement.tokens
    moved = np.zeros((plan.ranks, plan.ranks), np.int64)
    for grid in plan.placement.traffic.groups:
        positions, split = len(grid), len(grid[0])
        heads, kv_heads = shape.heads // split, max(1, shape.kv_heads // split)
        shared = int(split > shape.kv_heads)
        at = [sum(int(kept[r]) for r in row) for row in grid]
        for p, row in enumerate(grid):
            for owner in row:
                for worker in row:
                    there = heads * (each.q + each.do * backward) + kv_heads * each.kv
                    back = heads * each.dq[0] + kv_heads * each.dkv[shared] if backward else heads * each.o[0]
                    if split > 1:
                        moved[owner, worker] += kept[owner] * there
                        moved[worker, owner] += kept[owner] * back
            if positions > 1:
                after = (p + 1) % positions
                for rank, target in zip(row, grid[after], strict=True):
                    moved[rank, target] += (sum(at) - at[after]) * kv_heads * each.kv
                    moved[rank, target] += (sum(at) - at[p]) * kv_heads * each.dkv[1] * backward
    return moved
