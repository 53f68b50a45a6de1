"""DHP's figures (flexible groups, arXiv 2602.21788), with `dhp` itself and with ``auto``: whole steps with FSDP on
devices like an Ascend 910B, a language model and a multimodal one, 8 to 64 devices with 8,192 tokens each.

The paper compares with Megatron-LM, whose context parallelism is a ring, and with DeepSpeed, whose is Ulysses, each
with one degree for the run. Here these are zig-zag rings and ``ulysses`` with the best degree for all batches together,
documents dealt by tokens, and data parallelism outside. Ulysses can have any degree that divides the query heads, so up
to 32 for 32 heads; 28 heads allow 2 and 4 among the powers of two. ``usp``, heads and a ring, is in neither, but is
mostly the strongest fixed method, so a third row has it, gathers of keys, and documents dealt by load.
``qwen2.5-vl-7b`` in these rows is its language model alone with a causal mask; :func:`video` has models with their
encoders and spans that see both ways, on 16 devices, and a fourth row over the best fixed method of each part, because
planners plan encoder and language model apart.
*Unbalanced* batches have one document with half of all tokens among short ones, our interpretation of the paper's
extremely unbalanced batches, whose lengths are not published.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.planners.published.dhp import dhp, predicted_ns
from flexcp.planners.request import Request
from flexcp.planners.static.dealing import BY_LOAD
from flexcp.simulator.step_parts import layers_alone
from flexcp.simulator.training import simulate
from papers_rows import COUNTED, PLANNING, SIMULATED, Row, absent, percent, whole
from papers_runs import OverStatic, Runs, asked, least_of_few, step_ns, timing
from simulated import cut_lengths, mean, step_of
from vision_models import MODELS, each_part_ns, video_batch

UNBALANCED = "unbalanced"
AVERAGE = "up to 1.46 on average"
PUBLISHED = {"libra256k": AVERAGE, "video": AVERAGE, UNBALANCED: "up to 2.24"}
FIRST_VERSION = {8: "1.02", 64: "1.16"}
"""Throughput over Megatron-LM's by devices, from the first version of the preprint;
its model and data are not known here.
"""
CASES = (("llama3-8b", "libra256k"), ("qwen2.5-vl-7b", "video"), ("llama3-8b", UNBALANCED))
ALONE = {"qwen2.5-vl-7b": "qwen2.5-vl-7b (language model alone, causal)"}
RANKS = (8, 16, 32, 64)
A_RANK = 8192
SOLVER = ((16, 128), (32, 256), (64, 512))
PLANNERS = ("dhp", "auto")
ANY = "any fixed"
JOINED = "libra256k joined from batches"


def lengths_of(name: str, tokens: int, seed: int) -> list[int]:
    """Return a batch of this many tokens."""
    if name == UNBALANCED:
        return [tokens // 2, *draw_lengths("web", tokens - tokens // 2, seed)]
    return draw_lengths(name, tokens, seed)


def fixed_methods(ranks: int) -> dict[str, list[str]]:
    """Return the methods that a user would configure for a run, by framework;
    a degree that does not divide the heads is refused in planning.
    """
    degrees = [d for d in (2, 4, 8, 16, 32, 64) if d <= ranks]
    rings, ulysses = ["dp", *(f"zigzag:{d}" for d in degrees)], ["dp", *(f"ulysses:{d}" for d in degrees)]
    grids = [f"usp:{u},{d // u}" for d in degrees for u in degrees if u < d]
    return {"Megatron-LM": rings, "DeepSpeed": ulysses, ANY: [*rings, *ulysses[1:], *grids]}


def speed_ups(runs: Runs, seeds: int, counts: Sequence[int]) -> list[Row]:
    """Make the rows of whole steps over fixed methods, and of tokens a second of a device."""
    rows, scaling = [], []
    for model, name in CASES:
        for ranks in counts:
            where = step_of(find_model(model), cluster("ascend910b", ranks // 8, 8))
            batches = [lengths_of(name, A_RANK * ranks, seed) for seed in range(seeds)]
            totals = {each: runs.least(where, batches, [each], step_ns)[1] for each in PLANNERS}
            methods_here = with_gathers(ranks)
            methods_here[ANY] += runs.searched(where, batches)  # documents dealt by load too
            static = runs.over_static(where, batches, "auto", step_ns, also=methods_here[ANY])
            case = f"{ALONE.get(model, model)}, {name}, {ranks} devices"
            for whose, methods in methods_here.items():
                best, least = runs.least(where, batches, methods, step_ns)
                over = [least / totals[each] for each in PLANNERS]
                rows.append(
                    Row(
                        "throughput",
                        f"{case}: step over {best} ({whose})",
                        _published(name, whose, ranks),
                        *over,
                        SIMULATED,
                        static=static,
                        comparison=case,
                        part=f"over {whose}",
                        batches=seeds,
                        chose=runs.chosen(where, batches) if whose == ANY else (),
                    )
                )
            rates = [1e9 * A_RANK * seeds / totals[each] for each in PLANNERS]
            words = f"{case}: tokens a second a device"
            scaling.append(_scaling(words, rates, name, seeds))
    return [*rows, *scaling]


def _published(name: str, whose: str, ranks: int) -> str:
    if whose == ANY:
        return "not compared"
    first = (
        f"; first version, model and data not known, {FIRST_VERSION[ranks]}"
        if whose == "Megatron-LM" and ranks in FIRST_VERSION
        else ""
    )
    return PUBLISHED[name] + first


def same_documents(runs: Runs, seeds: int, counts: Sequence[int]) -> list[Row]:
    """Make the rows of tokens a second with the same documents on all devices: batches drawn for the fewest devices,
    which more devices take several at a time.
    """
    fewest, rows = min(counts), []
    drawn = batches_of("libra256k", A_RANK * fewest, seeds * max(counts) // fewest)
    least: list[float] = []
    for ranks in counts:
        where = step_of(find_model("llama3-8b"), cluster("ascend910b", ranks // 8, 8))
        batches = joined(drawn, ranks // fewest)
        totals = [runs.least(where, batches, [each], step_ns)[1] for each in PLANNERS]
        rates = [1e9 * A_RANK * len(batches) / total for total in totals]
        least = least or rates
        kept = [rate / first for rate, first in zip(rates, least, strict=True)]
        name = f"{JOINED} of {fewest} devices"
        words = f"llama3-8b, {name}, {ranks} devices: tokens a second a device, {kept[0]:.0%} (`auto` "
        words += f"{kept[1]:.0%}) of those on {fewest}"
        rows.append(_scaling(words, rates, name, len(batches)))
    return rows


def batches_of(name: str, tokens: int, count: int) -> list[list[int]]:
    """Return batches of this many tokens, with documents cut at a batch's length."""
    return [cut_lengths(draw_lengths(name, tokens, seed), tokens) for seed in range(count)]


def joined(batches: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the batches with each ``count`` consecutive ones joined into one."""
    return [[n for part in batches[at : at + count] for n in part] for at in range(0, len(batches), count)]


def _scaling(words: str, rates: Sequence[float], part: str, seeds: int) -> Row:
    """Return a row of tokens a second a device: ``rates`` of the published planner and of ``auto``."""
    planner, auto = rates
    return Row(
        "scaling", words, "near-linear", planner, auto, SIMULATED, show=whole, aspect=None, part=part, batches=seeds
    )


def with_gathers(ranks: int) -> dict[str, list[str]]:
    """Return :func:`fixed_methods` with gathers of keys among those of no framework."""
    found = fixed_methods(ranks)
    gathers = [each.replace("zigzag", "allgather") for each in found["Megatron-LM"] if each.startswith("zigzag")]
    return found | {ANY: [*found[ANY], *gathers]}


Parts = dict[str, list[tuple[int | None, int | None]]]
"""Nanoseconds of the encoder and the language model in every batch by method, None where it refuses."""


def video(seeds: int, ranks: int, names: Sequence[str] = tuple(MODELS)) -> list[Row]:
    """Make the rows of a video case with encoders and the vision mask (spans that see both ways): over fixed methods
    that both parts share, and over the best fixed method of each part.
    """
    rows, where, fixed = [], cluster("ascend910b", ranks // 8, 8), with_gathers(ranks)
    static_names = [*fixed[ANY], *(each + BY_LOAD for each in fixed[ANY])]
    for name in names:
        model, case = MODELS[name], f"{name} with its encoder, video, {ranks} devices"
        batches = [video_batch(A_RANK * ranks, seed, model.window) for seed in range(seeds)]
        parts = {
            each: [each_part_ns(model, batch, where, each) for batch in batches]
            for each in dict.fromkeys([*PLANNERS, *static_names])
        }
        ran = _whole_steps(parts)
        shared = [ran[each] for each in static_names if each in ran]
        static = _over_static(shared, ran["auto"])
        how: dict[str, Any] = {"comparison": case, "batches": seeds}
        for whose, methods in fixed.items():
            base = min((each for each in methods if each in ran), key=lambda each: sum(ran[each]))
            over = [sum(ran[base]) / sum(ran[each]) for each in PLANNERS]
            theirs = "up to 1.36 (first version)" if whose != ANY else "not compared"
            words = f"{case}: step over {base} ({whose})"
            rows.append(Row("video", words, theirs, *over, SIMULATED, static=static, part=f"over {whose}", **how))
        rows.append(_over_each_part(case, parts, ran, static_names, how))
    return rows


def _over_each_part(
    case: str, parts: Parts, ran: Mapping[str, Sequence[int]], static_names: Sequence[str], how: dict[str, Any]
) -> Row:
    """Make the row over the fixed method that is best for the encoder and the one that is best for the language model,
    each with documents dealt by tokens or by load.
    """
    base, best = [], []
    for part in range(2):
        times = {
            each: [ns for batch in parts[each] if (ns := batch[part]) is not None]
            for each in static_names
            if all(batch[part] is not None for batch in parts[each])
        }
        base.append(min(times, key=lambda each: sum(times[each])))
        best.append((times[base[-1]], [min(of_batch) for of_batch in zip(*times.values(), strict=True)]))
    one, each_batch = ([sum(both) for both in zip(*steps, strict=True)] for steps in zip(*best, strict=True))
    over = [sum(one) / sum(ran[each]) for each in PLANNERS]
    static = OverStatic(*(mean(a / b for a, b in zip(steps, ran["auto"], strict=True)) for steps in (each_batch, one)))
    words = f"{case}: step over {base[0]} in the encoder and {base[1]} in the language model"
    return Row("video", words, "not compared", *over, SIMULATED, static=static, part="over one fixed a part", **how)


def _over_static(shared: Sequence[Sequence[int]], auto: Sequence[int]) -> OverStatic:
    """Return ``auto``'s speed-ups over fixed methods that both parts share, from the times of each in every batch."""
    best = [min(of_batch) for of_batch in zip(*shared, strict=True)]
    one = min(shared, key=sum)
    return OverStatic(*(mean(a / b for a, b in zip(steps, auto, strict=True)) for steps in (best, one)))


def _whole_steps(parts: Parts) -> dict[str, list[int]]:
    """Return the nanoseconds of encoder and language model together in every batch,
    for methods that accept both parts of all batches.
    """
    found = {each: [a + b for a, b in of if a is not None and b is not None] for each, of in parts.items()}
    return {each: steps for each, steps in found.items() if len(steps) == len(parts[each])}


def solver(runs: Runs, cases: Sequence[tuple[int, int]] = SOLVER) -> list[Row]:
    """Make the rows of planning milliseconds: packing and dynamic program, with one memory and with the several
    that are tried without a cap, and the whole plan.
    """
    rows = []
    for ranks, documents in cases:
        where = step_of(find_model("llama3-8b"), cluster("ascend910b", ranks // 8, 8))
        lengths = draw_lengths("libra256k", documents * 16_384, 0)[:documents]
        request = asked(where, lengths)
        alone = [_placing_ms(replace(request, argument=each)) for each in (str(2 * -(-sum(lengths) // ranks)), "")]
        plans = [runs.timed(where, lengths, each) for each in PLANNERS]
        took = [1000 * one.seconds for one in plans]
        words, how = f"{ranks} devices, {documents} sequences", (timing(*plans), False, whole)
        told, tried = (
            f"{words}: ms, groups and degrees with {memory}" for memory in ("one memory", "up to six memories")
        )
        rows.append(Row("solver", told, "20 to 86", alone[0], None, *how, part="one memory"))
        rows.append(Row("solver", tried, "20 to 86", alone[1], None, *how, part="up to six memories"))
        plan = f"{words}: ms of the whole plan, up to six memories"
        rows.append(Row("solver", plan, "300 to 900", *took, *how, aspect=PLANNING, part="whole plan"))
    return rows


def _placing_ms(request: Request) -> float:
    def seconds() -> float:
        begin = time.process_time()
        dhp(request)
        return time.process_time() - begin

    return 1000 * least_of_few(seconds(), seconds).seconds


def cost_model(runs: Runs, counts: Sequence[int], seeds: int) -> list[Row]:
    """Make the rows of errors of its cost model for the slowest group, against events of the same plan:
    the layers of a step, without vocabulary and sync.
    """
    rows = []
    for model, name in CASES:
        for ranks in counts:
            where = step_of(find_model(model), cluster("ascend910b", ranks // 8, 8))
            off = []
            for seed in range(seeds):
                lengths = lengths_of(name, A_RANK * ranks, seed)
                found = runs.plan(where, lengths, "dhp")
                assert found is not None
                step = simulate(found.plan, training=layers_alone(found.plan.cost, found.plan.shape)).step
                assert step is not None
                off.append(abs(predicted_ns(asked(where, lengths)) / step.total_ns - 1))
            words = (
                f"{ALONE.get(model, model)}, {name}, {ranks} devices: error of `dhp`'s own prediction against events"
            )
            rows.append(Row("cost model", words, "4 to 8 %", mean(off), None, SIMULATED, False, percent, batches=seeds))
    return rows


def degrees(runs: Runs) -> list[Row]:
    """Make the row of the case study: the degrees in one step."""
    where = step_of(find_model("qwen2.5-vl-7b"), cluster("ascend910b", 4, 8))
    found = runs.plan(where, draw_lengths("video", A_RANK * 32, 0), "dhp")
    assert found is not None
    sizes = ", ".join(str(len(grid)) for grid in found.plan.placement.traffic.groups)
    words = f"degrees in one step of 32 devices; `dhp` on `video`: {sizes}"
    return [absent("case study", words, "8, 6, 4, 2, 1 and 4, 3, 2", COUNTED)]


def rest() -> list[Row]:
    """Make the rows of figures that cannot be repeated here."""
    return [
        absent("models", "InternVL", "among its models", "no such model here: encoders that merge after whole images"),
    ]


def rows(quick: bool, runs: Runs) -> list[Row]:
    """Make all rows of DHP."""
    counts, seeds = ((8, 64), 1) if quick else (RANKS, 2)
    return [
        *speed_ups(runs, seeds, counts),
        *same_documents(runs, seeds, counts),
        *video(seeds, 16, ("Qwen2.5-VL 7B",) if quick else tuple(MODELS)),
        *solver(runs),
        *cost_model(runs, counts, seeds),
        *degrees(runs),
        *rest(),
    ]
