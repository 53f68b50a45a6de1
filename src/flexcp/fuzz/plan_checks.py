"""The checks of every plan; each raises :class:`~flexcp.fuzz.token_machine.Wrong`, or what the plan raises."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from flexcp.fuzz.cases import Case
from flexcp.fuzz.mask_words import Words, allowed
from flexcp.fuzz.token_machine import execute, owners, require
from flexcp.plan.file import load_plan, save_plan
from flexcp.plan.plan import Plan
from flexcp.simulator.training import simulate

Bools = NDArray[np.bool_]
ROUNDING = 2
"""Nanoseconds by which integer divisions may shorten a simulated pass of a layer."""


def check_slices(plan: Plan, words: list[list[Words]]) -> list[list[Bools]]:
    """Check that slices cover exactly the pairs that masks allow, each once, and return those pairs.

    ``words[mask][document]`` are the masks as plain values. The result is ``[mask][document]`` boolean matrices
    ``[query, key]``.
    """
    found = []
    for mask, of_mask in zip(plan.batch.masks, words, strict=True):
        dense = []
        for d, (one, length) in enumerate(zip(of_mask, plan.batch.lengths.tolist(), strict=True)):
            pairs, count = allowed(one, length), np.zeros((length, length), np.int64)
            for q0, q1, k0, k1, lo, hi in mask.slices[mask.first[d] : mask.first[d + 1]].tolist():
                q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None, :]
                count[q0:q1, k0:k1] += (k - q >= lo) & (k - q <= hi)
            require(
                bool((count == pairs).all()), f"the slices of {one} are not its pairs in a document of {length} tokens"
            )
            dense.append(pairs)
        found.append(dense)
    return found


def check_promises(plan: Plan, case: Case) -> None:
    """Check what the case's options promise: caps, equal token counts, fixed layouts and the number of peers.

    Also checks that the plan's peers are those of its transfers.
    """
    owner = owners(plan)
    counts = np.bincount(owner, minlength=plan.ranks)
    require(plan.placement.tokens.tolist() == counts.tolist(), "placement.tokens is not what ranks keep")
    if case.call.get("tokens") == "equal":
        require(len(set(counts.tolist())) == 1, f"tokens='equal' gave {counts.tolist()}")
        require(counts[0] % (case.call.get("pad_to") or 1) == 0, f"{counts[0]} tokens are no multiple of pad_to")
    else:
        require(plan.placement.pads == 0, "pads without tokens='equal'")
    cap = case.planner.get("max_tokens_per_rank")
    require(cap is None or int(counts.max()) <= cap, f"{counts.max()} tokens on a rank, over the cap of {cap}")
    bytes_cap = case.planner.get("max_memory_per_rank")
    for rank in range(plan.ranks if bytes_cap is not None else 1):
        needed = plan.memory(rank).total
        require(needed >= 0, f"rank {rank} needs {needed} bytes")
        require(bytes_cap is None or needed <= bytes_cap, f"{needed} bytes on a rank, over the cap of {bytes_cap}")
    layout = case.call.get("layout")
    if layout is not None:
        _check_layout(owner, layout, plan.ranks)
    peers: list[set[int]] = [set() for _ in range(plan.ranks)]
    for program in (program for pair in plan.programs for program in pair):
        t = program.transfers
        for a, b in zip(t.source.tolist(), t.target.tolist(), strict=True):
            if a != b:
                peers[a].add(b)
                peers[b].add(a)
    require(
        [sorted(p) for p in peers] == [plan.peers(r) for r in range(plan.ranks)],
        "plan.peers differs from the ranks in its transfers",
    )
    most = case.planner.get("max_peers")
    require(most is None or max(map(len, peers)) <= most, "a rank has more peers than max_peers")


def _check_layout(owner: np.ndarray, layout: str | list[list[int]], ranks: int) -> None:
    stream = np.arange(len(owner))
    if layout == "contiguous":
        parts = np.array_split(stream, ranks)
    elif layout == "zigzag":
        halves = np.array_split(stream, 2 * ranks)
        parts = [np.concatenate([halves[i], halves[-1 - i]]) for i in range(ranks)]
    else:
        parts = [np.sort(np.array(one, np.int64)) for one in layout]
    for rank, part in enumerate(parts):
        require(
            np.array_equal(np.flatnonzero(owner == rank), part), f"rank {rank} does not keep its part of the layout"
        )


def check_simulation(plan: Plan) -> None:
    """Check that simulated times are consistent, finite and not below the lower bounds for any placement."""
    found = simulate(plan)
    layers = sum(mask.layers for mask in plan.batch.masks)
    for backward in (False, True):
        for pair in found.passes:
            one = pair[backward]
            require(bool((one.done >= 0).all()), f"simulated times below 0: {one.done}")
            require(bool((one.compute_ns + one.wait_ns <= one.done).all()), "a rank's parts are longer than its pass")
        bounds, ns = found.bounds(backward), found.pass_ns(backward)
        floor = max(bounds.compute, bounds.link, bounds.granularity)
        require(
            ns >= floor - ROUNDING * layers,
            f"{'backward' if backward else 'forward'} simulated in {ns} ns, below its bound of {floor} ({bounds})",
        )
        require(
            math.isfinite(found.mfu(backward)) and found.mfu(backward) >= 0, "mfu is not a finite number of at least 0"
        )
    require(found.attention_ns >= found.exposed_ns >= 0, "more exposed time than time")


def check_file(plan: Plan) -> None:
    """Check that a plan's file gives the same plan, and saving that gives the same file."""
    data = save_plan(plan)
    read = load_plan(data)
    require(read.hash == plan.hash, f"a plan {plan.hash} is read from its file as {read.hash}")
    require(save_plan(read) == data, "a plan's file changes when it is saved again")


def check_tokens(plan: Plan, dense: list[list[Bools]]) -> None:
    """Execute the plan token by token; ``dense[mask][document]`` are the allowed pairs."""
    execute(plan, dense)
