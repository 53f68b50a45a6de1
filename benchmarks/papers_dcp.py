"""DCP's figures (arXiv 2510.10620), numbered as its artifact numbers them, with `dcp` itself and with ``auto``.

Baselines have the degrees its public code chooses: data parallelism first, the largest power of two that is not above tokens / longest
document, then the better of a zig-zag ring and of two head groups times a ring over the ranks that are left (micro-benchmark: also a plain
ring and an all-gather). Everything else is as in ``dcp.py`` of this folder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import dcp as setting
import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.clusters import cluster
from flexcp.compare.compare import planned
from flexcp.masks import Mask
from flexcp.models.find import find_model
from flexcp.planners.published.dcp import placed_within
from flexcp.planners.request import Request
from flexcp.schedule.transfers import make_plan
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Training
from papers_rows import MEASURED, SIMULATED, Row, absent
from simulated import Experiment, mean, scaled_lengths, simulations

PLANNER = "dcp:1024"
NAMES = {"longalign": "LongAlign", "longtail": "LongDataCollections"}
RANGES = {"causal": "1.19 to 2.45", "sparse": "2.15 to 3.77"}
END_TO_END = {"causal": "0.94 to 1.16", "sparse": "1.00 to 1.46"}
BLOCKS = (512, 1024, 2048, 4096)
TOLERANCES = (0.05, 0.1, 0.2, 0.4, 0.8)
NO_NUMBERS = "curve, no numbers in its text"


def degrees(lengths: Sequence[int], tokens: int, ranks: int) -> int:
    """The context-parallel degree that DCP's code gives its baselines."""
    data = min(ranks, 1 << ((tokens // max(lengths)).bit_length() - 1))
    return max(1, ranks // data)


def baselines(lengths: Sequence[int], ranks: int, every: bool) -> list[str]:
    """Its static methods in that degree."""
    degree = degrees(lengths, sum(lengths), ranks)
    names = [f"zigzag:{degree}"] + ([f"usp:2,{degree // 2}"] if degree > 1 else [])
    return names + ([f"ring:{degree}", f"allgather:{degree}"] if every else [])


def micro(seeds: int, scales: Sequence[float], masks: Sequence[str]) -> list[Row]:
    """Figures 12 and 13: attention of one layer, each direction, speed-up over the best baseline."""
    rows = []
    for mask in masks:
        for name, published in setting.PUBLISHED.items():
            for scale in scales:
                ratios: dict[tuple[str, bool], list[float]] = {}
                for seed in range(seeds):
                    lengths = scaled_lengths(name, setting.TOKENS, scale, seed)
                    static = baselines(lengths, 32, every=True)
                    asked = [PLANNER, "auto", *static]
                    found = simulations(setting.MICRO.compare(lengths, asked, setting.MASKS[mask]), asked)
                    for way in (False, True):
                        least = min(found[each].pass_ns(way) for each in static if each in found)
                        for each in (PLANNER, "auto"):
                            ratios.setdefault((each, way), []).append(least / found[each].pass_ns(way))
                for way in (False, True):
                    figure = f"{13 if mask != 'causal' else 12}{'ab'[way] if mask == 'causal' else ''}"
                    known: float | str = RANGES["causal" if mask == "causal" else "sparse"]
                    if mask == "causal" and not way:
                        of_static, of_dcp = published[setting.SCALES.index(scale)]
                        known = of_static / of_dcp
                    words = f"{mask}, {NAMES[name]} x {scale:g}, {('forward', 'backward')[way]}: over the best baseline"
                    rows.append(
                        Row(figure, words, known, mean(ratios[PLANNER, way]), mean(ratios["auto", way]), SIMULATED)
                    )
    return rows


def end_to_end(
    seeds: int, masks: Sequence[str] = ("causal", "lambda", "causal blockwise", "shared question")
) -> list[Row]:
    """Figures 14 and 15: iterations of an 8B model, speed-up over Megatron with the degrees its code chooses."""
    a100 = cluster("a100", 8, 2)
    speed = setting.TENSOR_PARALLEL
    machine = replace(a100, gflops=speed * a100.gflops, inter_mbps=speed * a100.inter_mbps)
    preset = find_model("gpt-8b")
    where = Experiment(machine, preset.shape, rules=Rules(), training=Training(preset, "allreduce"))
    rows = []
    for number, name in enumerate(NAMES):
        for mask in masks:
            for at, cap in enumerate(setting.CAPS):
                ratios: dict[str, list[float]] = {PLANNER: [], "auto": []}
                for seed in range(seeds):
                    lengths = setting.capped(name, cap, seed)
                    static = baselines(lengths, 16, every=False)
                    found = where.compare(lengths, [PLANNER, "auto", *static], setting.MASKS[mask])
                    ns = {row.name: row.ns for row in found.rows if row.simulation is not None}
                    least = min(ns[each] for each in static if each in ns)
                    for each, values in ratios.items():
                        values.append(least / ns[each])
                known: float | str = END_TO_END["causal" if mask == "causal" else "sparse"]
                if name == "longalign" and mask in setting.MEGATRON:
                    megatron, dcp = setting.MEGATRON[mask][at]
                    known = megatron / dcp
                words = f"{mask}, {NAMES[name]} up to {cap:,}: step over Megatron's"
                rows.append(Row(str(14 + number), words, known, mean(ratios[PLANNER]), mean(ratios["auto"]), SIMULATED))
    return rows


def dry_runs(blocks: Sequence[int] = BLOCKS, tolerances: Sequence[float] = TOLERANCES) -> list[Row]:
    """Figures 16 to 19: what planning alone shows: bytes and seconds by block size, bytes by sparsity and by tolerance."""
    rows: list[Row] = []
    lengths = scaled_lengths("longtail", setting.TOKENS, 1.0, 0)
    auto = planned(_request(lengths, setting.MASKS["causal"], ""), "auto")[1]
    for mask in ("causal", "lambda"):
        asked = _request(lengths, setting.MASKS[mask], "")
        begin = time.process_time()
        megabytes = _megabytes(planned(asked, "auto")[1])
        seconds = time.process_time() - begin
        for block in blocks:
            begin = time.process_time()
            plan = planned(asked, f"dcp:{block}")[1]
            took = time.process_time() - begin
            words = f"{mask}, blocks of {block}"
            rows.append(
                Row(
                    "16",
                    f"{words}: MB forward",
                    NO_NUMBERS,
                    _megabytes(plan),
                    megabytes,
                    "from plans",
                    False,
                    "{:.0f}".format,
                )
            )
            rows.append(
                Row(
                    "17",
                    f"{words}: planning s",
                    NO_NUMBERS,
                    took,
                    seconds,
                    f"{MEASURED}, one core",
                    False,
                    "{:.2f}".format,
                )
            )
    for mask in setting.MASKS:
        asked = _request(lengths, setting.MASKS[mask], "")
        pairs = int(asked.batch.masks[0].rows_area(*_everything(asked)).sum())
        causal = sum(n * (n + 1) // 2 for n in lengths)
        found = [_megabytes(planned(asked, each)[1]) for each in (PLANNER, "auto")]
        rows.append(
            Row(
                "18",
                f"{mask}, {pairs / causal:.0%} of causal pairs: MB forward",
                NO_NUMBERS,
                *found,
                "from plans",
                False,
                "{:.0f}".format,
            )
        )
    for tolerance in tolerances:
        asked = _request(lengths, setting.MASKS["causal"], "1024")
        plan = make_plan(
            placed_within(asked, 4 * tolerance, tolerance), asked.shape, asked.cluster, asked.cost, PLANNER
        )
        words = (
            f"causal, tolerance {tolerance:g} (nodes {4 * tolerance:g}), work max / mean {imbalance(plan.work()):.2f}"
        )
        words += f" (auto {imbalance(auto.work()):.2f})"
        rows.append(
            Row(
                "19",
                f"{words}: MB forward",
                NO_NUMBERS,
                _megabytes(plan),
                _megabytes(auto),
                "from plans",
                False,
                "{:.0f}".format,
            )
        )
    return rows


def rest() -> list[Row]:
    """What cannot be repeated by planning and simulating."""
    return [
        absent("1 to 11", "motivation and design", "no results", "see [the papers](../papers.md)"),
        absent(
            "20",
            "loss curves with and without DCP",
            "the same",
            "measured on CPU ranks: [training](training.md), [models](models.md)",
        ),
    ]


def _request(lengths: Sequence[int], mask: Mask, argument: str) -> Request:
    return replace(setting.MICRO.request(lengths, mask), argument=argument)


def _everything(request: Request) -> tuple[object, ...]:
    batch = request.batch
    documents = batch.document_of(batch.starts[:-1])
    return documents, documents * 0, batch.lengths


def _megabytes(plan: flexcp.Plan) -> float:
    return float(plan.bytes().sum()) / 1e6


def rows(quick: bool) -> list[Row]:
    """All of DCP's."""
    seeds, scales = 1 if quick else 3, setting.SCALES
    sparse = ("lambda", "shared question", "causal blockwise")
    first = micro(seeds, scales, ("causal",)) + micro(1, (1.0,) if quick else scales, sparse)
    return [
        *first,
        *end_to_end(1, ("causal", "lambda") if quick else tuple(setting.MASKS)),
        *dry_runs(),
        *rest(),
    ]
