"""DHP's figures (flexible groups, arXiv 2602.21788) with `dhp` itself and with ``auto``: whole steps with FSDP on devices like an
Ascend 910B, a language model and a multimodal one, 8 to 64 devices with 8,192 tokens each.

The paper compares with Megatron-LM, whose context parallelism is a ring, and with DeepSpeed, whose is Ulysses, each in one degree for the
run: here zig-zag rings and ``ulysses`` (no more ranks than KV heads) in the best degree for all batches together, documents dealt by
tokens, with data parallelism outside. ``usp``, heads and a ring, is in neither, and mostly the strongest fixed method: a third row has it.
*Unbalanced* batches have one document with half of all tokens beside short ones, our reading of the paper's extremely unbalanced batches,
whose lengths are not published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.planners.strategies import find_strategy
from papers_rows import FROM_PLANS, MEASURED, SIMULATED, Row, absent, whole
from papers_runs import OverStatic, Runs, asked, step_ns
from simulated import mean, step_of
from vision_models import MODELS, part_ns, video_batch

UNBALANCED = "unbalanced"
PUBLISHED = {"libra256k": "1.46 on average", "video": "1.46 on average", UNBALANCED: "up to 2.24"}
CASES = (("llama3-8b", "libra256k"), ("qwen2.5-vl-7b", "video"), ("llama3-8b", UNBALANCED))
RANKS = (8, 16, 32, 64)
A_RANK = 8192
SOLVER = ((16, 128), (32, 256), (64, 512))
PLANNERS = ("dhp", "auto")


def lengths_of(name: str, tokens: int, seed: int) -> list[int]:
    """A batch of so many tokens."""
    if name == UNBALANCED:
        return [tokens // 2, *draw_lengths("web", tokens - tokens // 2, seed)]
    return draw_lengths(name, tokens, seed)


def fixed_methods(ranks: int) -> dict[str, list[str]]:
    """What one would configure for a run, by whose it is."""
    degrees = [d for d in (2, 4, 8, 16, 32, 64) if d <= ranks]
    rings, ulysses = ["dp", *(f"zigzag:{d}" for d in degrees)], ["dp", *(f"ulysses:{d}" for d in degrees if d <= 8)]
    grids = [f"usp:{u},{d // u}" for d in degrees for u in (2, 4, 8) if u < d]
    return {"Megatron-LM": rings, "DeepSpeed": ulysses, "any fixed": [*rings, *ulysses[1:], *grids]}


def speed_ups(runs: Runs, seeds: int, counts: Sequence[int]) -> list[Row]:
    """Whole steps over fixed methods, and tokens a second against the fewest devices."""
    rows, scaling = [], []
    for model, name in CASES:
        first: dict[str, float] = {}
        for ranks in counts:
            where = step_of(find_model(model), cluster("ascend910b", ranks // 8, 8))
            batches = [lengths_of(name, A_RANK * ranks, seed) for seed in range(seeds)]
            totals = {each: runs.least(where, batches, [each], step_ns)[1] for each in PLANNERS}
            methods_here = fixed_methods(ranks)
            static = runs.over_static(where, batches, "auto", step_ns, also=methods_here["any fixed"])
            over: dict[str, list[float]] = {}
            for whose, methods in methods_here.items():
                best, least = runs.least(where, batches, methods, step_ns)
                over[whose] = [least / totals[each] for each in PLANNERS]
                theirs = PUBLISHED[name] if whose != "any fixed" else "not compared"
                words = f"{model}, {name}, {ranks} devices: step over {best} ({whose})"
                rows.append(Row("throughput", words, theirs, *over[whose], SIMULATED, static=static))
            rates = {each: 1 / totals[each] for each in PLANNERS}
            first = first or rates
            words = f"{model}, {name}, {ranks} devices: tokens a second a device, against {counts[0]} devices"
            kept = [rates[each] / first[each] for each in PLANNERS]
            scaling.append(Row("scaling", words, "near-linear", *kept, SIMULATED))
            words = f"{model}, {name}, {ranks} devices: throughput against Megatron-LM's"
            scaling.append(Row("scaling", words, "1.02 at 8 to 1.16 at 64 (v1)", *over["Megatron-LM"], SIMULATED))
    return [*rows, *scaling]


def video(seeds: int, ranks: int, names: Sequence[str] = tuple(MODELS)) -> list[Row]:
    """A video case with encoders and the vision mask, spans that see both ways: both parts under one method."""
    rows, where = [], cluster("ascend910b", ranks // 8, 8)
    for name in names:
        model = MODELS[name]
        batches = [video_batch(A_RANK * ranks, seed, model.window) for seed in range(seeds)]
        fixed = fixed_methods(ranks)
        steps = {
            each: [part_ns(model, batch, where, each) for batch in batches]
            for each in dict.fromkeys([*PLANNERS, *fixed["any fixed"]])
        }
        ran = {each: [sum(one) for one in found if one] for each, found in steps.items() if None not in found}
        one = min((each for each in fixed["any fixed"] if each in ran), key=lambda each: sum(ran[each]))
        best = [min(ran[each][b] for each in fixed["any fixed"] if each in ran) for b in range(seeds)]
        static = OverStatic(
            *(mean(a / b for a, b in zip(times, ran["auto"], strict=True)) for times in (best, ran[one]))
        )
        for whose, methods in fixed.items():
            base = min((each for each in methods if each in ran), key=lambda each: sum(ran[each]))
            over = [sum(ran[base]) / sum(ran[each]) for each in PLANNERS]
            words = f"{name} with its encoder, video, {ranks} devices: step over {base} ({whose})"
            theirs = "up to 1.36 (v1)" if whose != "any fixed" else "not compared"
            rows.append(Row("video", words, theirs, *over, SIMULATED, static=static))
    return rows


def solver(runs: Runs, cases: Sequence[tuple[int, int]] = SOLVER) -> list[Row]:
    """Milliseconds of packing and of the dynamic program, and of the whole plan."""
    rows = []
    for ranks, documents in cases:
        where = step_of(find_model("llama3-8b"), cluster("ascend910b", ranks // 8, 8))
        lengths = draw_lengths("libra256k", documents * 16_384, 0)[:documents]
        place, argument = find_strategy("dhp")
        assert not argument
        begin = time.process_time()
        place(asked(where, lengths))
        alone = 1000 * (time.process_time() - begin)
        plans = [runs.plan(where, lengths, each) for each in PLANNERS]
        took = [1000 * one.seconds for one in plans if one is not None]
        words, how = f"{ranks} devices, {documents} sequences", f"{MEASURED}, one core"
        rows.append(Row("solver", f"{words}: ms, groups and degrees alone", "20 to 86", alone, None, how, False, whole))
        rows.append(Row("solver", f"{words}: ms of the whole plan", "300 to 900", *took, how, False, whole))
    return rows


def degrees(runs: Runs) -> list[Row]:
    """The case study: which degrees one step has."""
    where = step_of(find_model("qwen2.5-vl-7b"), cluster("ascend910b", 4, 8))
    found = runs.plan(where, draw_lengths("video", A_RANK * 32, 0), "dhp")
    assert found is not None
    sizes = ", ".join(str(len(grid)) for grid in found.plan.placement.traffic.groups)
    words = f"degrees in one step of 32 devices; `dhp` on `video`: {sizes}"
    return [absent("case study", words, "8, 6, 4, 2, 1 and 4, 3, 2", FROM_PLANS)]


def rest() -> list[Row]:
    """What is on other pages."""
    return [
        absent("cost model", "error of predicted time", "4 to 8 %", "[errors](errors.md)"),
        absent("models", "InternVL", "among its models", "no such model here: encoders that merge after whole images"),
    ]


def rows(quick: bool, runs: Runs) -> list[Row]:
    """All of DHP's."""
    counts = (8, 64) if quick else RANKS
    return [
        *speed_ups(runs, 1 if quick else 2, counts),
        *video(1 if quick else 2, 16, ("Qwen2.5-VL 7B",) if quick else tuple(MODELS)),
        *solver(runs),
        *degrees(runs),
        *rest(),
    ]
