"""Attention beside a transfer, for slots of real plans: measured on one GPU, and predicted by the simulator's rule.

    python benchmarks/beside_gpu.py --make slots.pkl                   on any machine: the fullest slot of some plans
    python benchmarks/beside_gpu.py --slots slots.pkl --write x.json   on a GPU: measure at every margin
    python benchmarks/beside_gpu.py --judge x.json                     on any machine: measured over simulated

For every plan the slot and rank are taken in which work and transfer are largest together. They run as in the executor:
the work lists one after the other, and before them, on a stream of high priority, a copy. The copy takes as long as the
cost model says of the plan's transfer, and has as many blocks as such a transfer
(:mod:`flexcp.measure.kernels.margin`). Work and copy are also measured alone. From these two times and the cost model's
row of contention, the rule has to predict how long both take together, with the plan's margin.
"""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np

PLANS = (
    ("web", 8, "zigzag"),
    ("libra256k", 32, "auto"),
    ("web", 32, "blocks"),
    ("web", 32, "ring"),
    ("libra256k", 8, "blocks"),
    ("longalign", 32, "groups"),
)
TOKENS_PER_RANK = 8192
MARGINS = (0, 4, 8, 16, 24)


def main() -> None:
    """Make slots, measure them, or judge measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--slots", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--judge", type=Path)
    asked = parser.parse_args()
    if asked.make:
        asked.make.write_bytes(pickle.dumps(full_slots()))
    elif asked.slots:
        # The file was written by --make, by the same user, so unpickling it is safe.
        asked.write.write_text(json.dumps([measured(slot) for slot in pickle.loads(asked.slots.read_bytes())]))
    else:
        print(table(json.loads(asked.judge.read_text())))


def full_slots() -> list[dict[str, Any]]:
    """Return the fullest slot of each plan, forward and backward."""
    import flexcp
    from flexcp.data.lengths import draw_lengths
    from flexcp.executor.run.rank_program import rank_program
    from flexcp.measure.kernels.lists import program_lists
    from flexcp.plan.rounds import find_messages
    from flexcp.schedule.execution import transfers_ns

    found = []
    for data, ranks, strategy in PLANS:
        where = flexcp.cluster("h100", max(1, ranks // 8), 8)
        planner = flexcp.Planner(32, 8, 128, cluster=where, strategy=strategy)
        plan = planner(draw_lengths(data, TOKENS_PER_RANK * ranks, 0))
        for backward, program in enumerate(plan.programs[0]):
            carried = transfers_ns(program, find_messages(program, plan.shape, plan.cluster), plan.cluster, plan.cost)
            messages, stages, levels = find_messages(program, plan.shape, plan.cluster)
            inside = np.zeros(carried.shape, bool)
            for end in (messages.source, messages.target):
                inside[
                    end[levels[messages.exchange] == 0], stages[messages.exchange][levels[messages.exchange] == 0]
                ] = True
            best: tuple[int, Any] = (0, None)
            for rank in range(0, ranks, max(1, ranks // 8)):
                slots = rank_program(plan, rank, 0, bool(backward)).slots
                for at in range(len(slots) - 1):
                    pairs = sum(int(flexcp.masks.area(w.slices).sum()) * (w.h1 - w.h0) for w in slots[at].work)
                    work = int(
                        plan.cost.attention_ns(np.full(ranks, pairs), plan.shape, plan.cluster, bool(backward))[rank]
                    )
                    if (both := min(work, int(carried[rank, at + 1]))) > best[0]:
                        best = both, (rank, at)
            if best[1] is None:
                continue
            rank, at = best[1]
            lists = program_lists(rank_program(plan, rank, 0, bool(backward)), bool(backward))[at]
            found.append(
                {
                    "plan": f"{data}, {ranks} ranks, {plan.strategy}",
                    "backward": bool(backward),
                    "rank": rank,
                    "slot": at,
                    "margin": int(program.execution.margin[at]),
                    "where": "inside" if inside[rank, at + 1] else "across",
                    "transfer ns": int(carried[rank, at + 1]),
                    "lists": lists,
                }
            )
    return found


def measured(slot: dict[str, Any]) -> dict[str, Any]:
    """Time a slot's work and transfer, alone and together, at every margin."""
    from functools import partial

    import torch

    from flexcp.executor.kernels import Settings
    from flexcp.measure.kernels import margin
    from flexcp.measure.kernels.lists import RankLists

    device = torch.device("cuda", torch.cuda.current_device())
    beside = torch.cuda.Stream(priority=-1)
    source = torch.ones(1 << 30, dtype=torch.int8, device=device).view(torch.float32)
    target = torch.empty_like(source)
    ready = RankLists("cute", slot["lists"], slot["backward"])
    channels = margin.CHANNELS[slot["where"]]

    def copy(size: int) -> None:
        margin.copy_by_blocks(source[:size], target[:size], channels, 1)

    all_of_it = margin.in_turns([(None, partial(copy, len(source)))], beside)[0][1]
    size = min(len(source), max(1, round(slot["transfer ns"] / 1e6 / all_of_it * len(source))))
    works = [partial(ready.launch, Settings(128**-0.5, sm_margin=left)) for left in MARGINS]
    pairs = [(work, other) for work in works for other in (None, partial(copy, size))]
    (_, copied), *times = margin.in_turns([(None, partial(copy, size)), *pairs], beside)
    rows = [
        {"margin": left, "work alone ms": alone[0], "work ms": both[0], "copy ms": both[1]}
        for left, alone, both in zip(MARGINS, times[::2], times[1::2], strict=True)
    ]
    return {**{k: v for k, v in slot.items() if k != "lists"}, "copy alone ms": copied, "rows": rows}


def table(slots: list[dict[str, Any]]) -> str:
    """Return a table of measured over simulated times, with the margin that today's cost model chooses for the slot."""
    from flexcp.cost import CostModel

    lines = [
        "| plan | pass | transfer | margin | work alone, ms | work, measured | simulated | transfer alone, ms | "
        "measured | simulated |",
        "| " + "--- | " * 9 + "--- |",
    ]
    for slot in slots:
        rows = {row["margin"]: row for row in slot["rows"]}
        work, copied = (round(x * 1e6) for x in (rows[0]["work alone ms"], slot["copy alone ms"]))
        times = [
            (together_ns(work, copied, row, slot["backward"]), row)
            for row in CostModel().rows_beside(slot["where"] == "across")
        ]
        # The same order as in plans: what is done first, then what slows work least.
        said, row = min(times, key=lambda each: (max(each[0]), each[0][0]))
        got = rows[row.margin]
        lines.append(
            f"| {slot['plan']} | {'backward' if slot['backward'] else 'forward'} | {slot['where']} | {row.margin} | "
            f"{work / 1e6:.3f} | {got['work ms']:.3f} | {said[0] / 1e6:.3f} ({got['work ms'] * 1e6 / said[0]:.2f}) | "
            f"{copied / 1e6:.3f} | {got['copy ms']:.3f} | {said[1] / 1e6:.3f} ({got['copy ms'] * 1e6 / said[1]:.2f}) |"
        )
    return "\n".join(lines)


def together_ns(work: int, transfer: int, row: Any, backward: bool) -> tuple[float, float]:
    """Return when work and a transfer that begin together are done, by the simulator's rule: (work, transfer)."""
    slow, alone = row.compute(backward)
    linked, computed = transfer * 1000 / row.link, work * slow / 1000
    if linked >= computed:
        return computed, linked
    return linked + (work - linked * 1000 / slow) * alone / 1000, linked


if __name__ == "__main__":
    main()
