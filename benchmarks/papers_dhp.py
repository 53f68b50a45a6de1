"""DHP's figures (flexible groups, arXiv 2602.21788) with `dhp` itself and with ``auto``, in the setting of ``flexible_groups.py``.

Fixed methods are what Megatron-LM and DeepSpeed offer: zig-zag rings, ``ulysses`` and ``usp`` in every degree that suits, and ``dp``; the
best of them over all batches together is the baseline, documents dealt by tokens. *Unbalanced* batches have one document with half of all
tokens beside short ones, our reading of the paper's extremely unbalanced batches, whose lengths are not published.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import flexible_groups as setting
from flexcp.clusters import cluster
from flexcp.compare.compare import planned
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from papers_rows import MEASURED, SIMULATED, Row, absent
from simulated import step_of

UNBALANCED = "unbalanced"
PUBLISHED = {"libra256k": "1.46 on average", "video": "1.46 on average", UNBALANCED: "up to 2.24"}
CASES = (*setting.CASES, ("llama3-8b", UNBALANCED))
SOLVER = ((16, 128), (32, 256), (64, 512))


def _lengths(name: str, tokens: int, seed: int) -> list[int]:
    if name == UNBALANCED:
        return [tokens // 2, *draw_lengths("web", tokens - tokens // 2, seed)]
    return draw_lengths(name, tokens, seed)


def fixed_methods(ranks: int) -> list[str]:
    """What one would configure for a run."""
    degrees = [d for d in (2, 4, 8, 16, 32, 64) if d <= ranks]
    grids = [f"usp:{u},{d // u}" for d in degrees for u in (2, 4, 8) if u < d]
    return ["dp", *(f"zigzag:{d}" for d in degrees), *(f"ulysses:{d}" for d in degrees if d <= 8), *grids]


def speed_ups(seeds: int, counts: Sequence[int]) -> list[Row]:
    """Whole steps over the best fixed method, and tokens a second a device against the fewest devices."""
    rows = []
    first: dict[tuple[str, str], float] = {}
    scaling = []
    for model, name in CASES:
        for ranks in counts:
            where = step_of(find_model(model), cluster("ascend910b", ranks // 8, 8))
            fixed, totals = fixed_methods(ranks), defaultdict(int)
            refused = set()
            for seed in range(seeds):
                lengths = _lengths(name, setting.A_RANK * ranks, seed)
                for row in where.compare(lengths, ["dhp", "auto", *fixed], search=False).rows:
                    if row.simulation is None:
                        refused.add(row.name)
                    else:
                        totals[row.name] += row.ns
            best = min((each for each in fixed if each not in refused), key=lambda each: totals[each])
            over = [totals[best] / totals[each] for each in ("dhp", "auto")]
            words = f"{model}, {name}, {ranks} devices: step over {best}"
            rows.append(Row("throughput", words, PUBLISHED[name], *over, SIMULATED))
            rates = [1 / totals[each] for each in ("dhp", "auto")]
            for each, rate in zip(("dhp", "auto"), rates, strict=True):
                first.setdefault((f"{model} {name}", each), rate)
            kept = [rate / first[f"{model} {name}", each] for each, rate in zip(("dhp", "auto"), rates, strict=True)]
            words = f"{model}, {name}, {ranks} devices: tokens a second a device, against {counts[0]} devices"
            scaling.append(Row("scaling", words, "near-linear", *kept, SIMULATED))
    return [*rows, *scaling]


def solver(cases: Sequence[tuple[int, int]] = SOLVER) -> list[Row]:
    """Milliseconds of planning."""
    rows = []
    for ranks, documents in cases:
        where = step_of(find_model("llama3-8b"), cluster("ascend910b", ranks // 8, 8))
        lengths = draw_lengths("libra256k", documents * 16_384, 0)[:documents]
        took = []
        for each in ("dhp", "auto"):
            request = where.request(lengths)
            begin = time.process_time()
            planned(request, each)
            took.append((time.process_time() - begin) * 1000)
        words = f"{ranks} devices, {len(lengths)} sequences: ms of planning, schedule included"
        rows.append(
            Row(
                "solver",
                words,
                "20 to 86 ms, 0.3 to 0.9 s in all",
                *took,
                f"{MEASURED}, one core",
                False,
                "{:.0f}".format,
            )
        )
    return rows


def degrees() -> list[Row]:
    """The case study: which degrees one step has."""
    where = step_of(find_model("qwen2.5-vl-7b"), cluster("ascend910b", 4, 8))
    plan = planned(where.request(draw_lengths("video", setting.A_RANK * 32, 0)), "dhp")[1]
    found = ", ".join(str(len(grid)) for grid in plan.placement.traffic.groups)
    return [
        absent(
            "case study",
            f"degrees in one step of 32 devices; `dhp` on `video`: {found}",
            "8, 6, 4, 2, 1 and 4, 3, 2",
            "from plans",
        )
    ]


def rest() -> list[Row]:
    """What is on other pages."""
    return [
        absent("cost model", "error of predicted time", "4 to 8 %", "[errors](errors.md)"),
        absent(
            "video",
            "with its encoder and vision mask",
            "up to 1.36 (abstract of v1)",
            "[vision-language batches](multimodal.md), with `blocks`",
        ),
    ]


def rows(quick: bool) -> list[Row]:
    """All of DHP's."""
    counts = (8, 64) if quick else setting.RANKS
    return [*speed_ups(1 if quick else 2, counts), *solver(), *degrees(), *rest()]
