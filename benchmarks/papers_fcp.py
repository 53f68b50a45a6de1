"""FCP's figures (arXiv 2605.08524), with `fcp` itself and with ``auto``, in the setting of ``block_fcp.py``: H20-like
GPUs, 64 / 8 heads, 32K tokens a GPU.

There is no ratio over its fourth rival, MagiAttention: its dealing does not simulate within 10 % of its published rates
at all of 16, 32 and 64 GPUs (``magi.py`` of this folder). It is the strongest of the four, so a ratio over the best of
the others is larger than one over all. The published ring is over all GPUs and its order of tokens is not stated, so
both a ring of contiguous parts and a zig-zag ring are among the rivals. Two baselines that the paper does not have are
stronger: zig-zag rings of any size that holds a document of 512K tokens, with data parallelism outside, as a trainer
would be configured; and the best fixed method of any kind.

Where attention is timed over baselines or against one GPU, `fcp` has the fastest of blocks of 2,048, 4,096, 6,144 and
8,192 tokens, as `dcp` has its fastest size; bytes, balance, the ablation and planning are those of 4,096, the paper's
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import block_fcp as setting
from flexcp.arrays.totals import imbalance
from flexcp.clusters import cluster
from flexcp.compare.compare import planned
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.plan.plan import Plan
from flexcp.plan.user_layouts import user_layout
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import Simulation, simulate
from papers_reshuffle import HIDDEN, measured_in_the_box
from papers_rows import BALANCE, BYTES, COUNTED, PLANNING, SIMULATED, Row, absent, percent
from papers_runs import Runs, asked, attention_ns, timing
from simulated import Experiment, mean

PLANNER = "fcp:4096"
LENGTHS = ("lognormal16k", "bimodal")
RIVALS = ("hdp", "wlb")
HOLDING = 16
"""The GPUs of the smallest ring that keeps the longest document, 512K tokens, with 32K tokens a GPU."""
MAGI = "minheap:2048,relay"
"""MagiAttention's dealing; only its plans are used."""
EQUAL = 131_072
"""The length of equal documents, which is not published; with this length a ring comes nearest to the published one."""
OVER_FOUR, BARS, ELSEWHERE = "1.13 to 2.21 over four", "bars, not read", "not compared"
OVER_RIVALS = "over its rivals"
SIZES = (1024, 2048, 4096, 6144, 8192)
TRIED = (2048, 4096, 6144, 8192)
"""The block sizes of which `fcp` has the fastest where it is timed."""
OVERLAP = 22.0
"""The published bandwidth, in GB/s, at which a block of 4,096 tokens hides its own keys."""
FASTER = "H100-like"
RESHUFFLE = 0.75


def _where(ranks: int, rules: Rules = Rules()) -> Experiment:
    return Experiment(setting.machine(ranks), setting.SHAPE, setting.COST, rules)


def batches(name: str, ranks: int, seeds: int = 1) -> list[list[int]]:
    """Return batches of 32K tokens a GPU; equal documents are the same in every batch."""
    tokens = ranks * setting.A_GPU
    if name == "equal":
        return [[EQUAL] * (tokens // EQUAL)]
    return [draw_lengths(name, tokens, seed) for seed in range(seeds)]


def rivals(ranks: int) -> list[str]:
    """Return the paper's rivals but MagiAttention; rings are over all GPUs, as published."""
    return [*RIVALS, f"ring:{ranks}", f"zigzag:{ranks}"]


def _rings(ranks: int) -> list[str]:
    """Return the rings that are baselines of a row, for :meth:`Runs.over_static`."""
    return [f"ring:{ranks}", *rings(ranks)]


def rings(ranks: int) -> list[str]:
    """Return the zig-zag rings of powers of two that keep the longest document; groups are data parallel."""
    degrees = [HOLDING]
    while degrees[-1] * 2 <= ranks:
        degrees.append(degrees[-1] * 2)
    return [f"zigzag:{degree}" for degree in degrees if degree <= ranks] or [f"zigzag:{ranks}"]


def speed_ups(runs: Runs, counts: Sequence[int], seeds: int) -> list[Row]:
    """Make the rows of attention, both directions, over three baselines: the best of the paper's rivals, the best ring,
    and the best fixed method; of the MFU of each direction; and of balance and bytes.
    """
    rows = []
    for name in LENGTHS:
        for ranks in counts:
            where, drawn, case = _where(ranks), batches(name, ranks, seeds), f"{name}, {ranks} GPUs"
            rows += _over_baselines(runs, where, drawn, case, _comparison(name, ranks))
            planner = best_blocks(runs, where, drawn)
            for way, direction in ((False, "forward"), (True, "backward")):
                found = [mean(runs.run(where, each, p).mfu(way) for each in drawn) for p in (planner, "auto")]
                words, count = f"{case}: MFU {direction}", len(drawn)
                rows.append(Row("MFU", words, BARS, *found, SIMULATED, aspect=None, part=direction, batches=count))
            rows += _evenness(runs, where, drawn[0], case)
    return rows


def faster_gpus(runs: Runs, ranks: int, seeds: int) -> list[Row]:
    """Make the rows of attention on H100-like GPUs, whose rate is nearer to the one that its overlap rule implies."""
    where, rows = Experiment(cluster("h100", ranks // 8, 8), setting.SHAPE), []
    for name in LENGTHS:
        case = f"{name}, {ranks} {FASTER} GPUs"
        rows += _over_baselines(runs, where, batches(name, ranks, seeds), case, case, f", {FASTER}")
    return rows


def best_blocks(runs: Runs, where: Experiment, drawn: Sequence[Sequence[int]]) -> str:
    """Return `fcp` with the fastest of the block sizes that the paper finds about equally good."""
    return runs.least(where, drawn, [f"fcp:{size}" for size in TRIED], attention_ns)[0]


def _over_baselines(
    runs: Runs, where: Experiment, drawn: Sequence[Sequence[int]], case: str, comparison: str, machine: str = ""
) -> list[Row]:
    """Make the rows of attention, both directions, over rivals, rings and any fixed method."""
    ranks, rows, planner = where.cluster.ranks, [], best_blocks(runs, where, drawn)
    totals = [runs.least(where, drawn, [each], attention_ns)[1] for each in (planner, "auto")]
    also = _rings(ranks)
    static, chosen = runs.over_static(where, drawn, "auto", attention_ns, also=also), runs.chosen(where, drawn)
    for part, words, names, theirs in (
        (OVER_RIVALS, "the best of ring, zig-zag ring, ByteScale and WLB-LLM", rivals(ranks), OVER_FOUR),
        ("over rings", "the best zig-zag ring that holds 512K tokens", rings(ranks), ELSEWHERE),
        ("over any fixed", "the best fixed method", [*runs.searched(where, drawn), *also], ELSEWHERE),
    ):
        best, least = runs.least(where, drawn, names, attention_ns)
        rows.append(
            Row(
                "speed",
                f"{case}, `{planner}`: over {best}, {words}",
                theirs,
                *(least / total for total in totals),
                SIMULATED,
                static=static,
                comparison=comparison,
                part=part + machine,
                batches=len(drawn),
                chose=chosen if part == OVER_RIVALS else (),
            )
        )
    return rows


def _comparison(name: str, ranks: int) -> str:
    """Return the name of the comparison of `fcp` and ``auto`` in attention of both directions, for any baseline."""
    return f"attention, {name}, {ranks} GPUs"


def _evenness(runs: Runs, where: Experiment, lengths: Sequence[int], words: str) -> list[Row]:
    """Make the rows of (max - mean) / max of work and of bytes received forward, for `fcp`, ``auto`` and two rivals;
    and of all bytes, because ranks that receive equally many may receive more.
    """

    def plan_of(name: str) -> Plan:
        found = runs.plan(where, lengths, name)
        assert found is not None
        return found.plan

    def uneven(name: str) -> tuple[float, float]:
        plan = plan_of(name)
        return 1 - 1 / imbalance(plan.work()), 1 - 1 / imbalance(plan.bytes().sum(axis=0))

    ours = [uneven(each) for each in (PLANNER, "auto")]
    works, moves = zip(*ours, strict=True)
    rest, balance = (COUNTED, False, percent), {"aspect": BALANCE}
    bytescale, magi = uneven("hdp"), uneven(MAGI)
    gigabytes = [float(plan_of(each).bytes().sum()) / 1e9 for each in (PLANNER, "auto")]
    return [
        Row("bytes", f"{words}: GB received forward by all", ELSEWHERE, *gigabytes, COUNTED, False, aspect=BYTES),
        Row("imbalance", f"{words}: work", "1.7 to 3.4 %", *works, *rest, **balance, part="work"),
        Row("imbalance", f"{words}: bytes received", "not read", *moves, *rest, **balance, part="bytes received"),
        Row("imbalance", f"{words}: work, `hdp`", "48 to 75 %", bytescale[0], None, *rest, part="work, ByteScale"),
        Row("imbalance", f"{words}: work, `{MAGI}`", "0.1 %", magi[0], None, *rest, part="work, MagiAttention"),
        Row(
            "imbalance",
            f"{words}: bytes received, `{MAGI}`",
            "14 to 19 %",
            magi[1],
            None,
            *rest,
            part="bytes received, MagiAttention",
        ),
    ]


def efficiency(runs: Runs, counts: Sequence[int], seeds: int) -> list[Row]:
    """Make the rows of efficiency relative to one GPU with the same documents. ``aside`` is that of a zig-zag ring."""
    rows = []
    for name in ("equal", *LENGTHS):
        for ranks in counts:
            drawn, ring = batches(name, ranks, seeds), f"zigzag:{ranks}"
            where = _where(ranks)
            planner = best_blocks(runs, where, drawn)
            value = {
                each: mean(setting.efficiency(runs.run(where, lengths, each)) for lengths in drawn)
                for each in (planner, "auto", ring)
            }
            static = runs.over_static(where, drawn, "auto", attention_ns, also=_rings(ranks))
            known = f" (published {setting.RING[ranks]:.1%})" if ranks in setting.RING and name == "equal" else ""
            words = f"{name}, {ranks} GPUs, `{planner}`: efficiency against one GPU; "
            words += f"a zig-zag ring {value[ring]:.1%}{known}"
            theirs = "92.9 to 94.7 %" if name == "equal" else "not read"
            found, one = (value[planner], value["auto"]), _comparison(name, ranks)
            rows.append(
                Row(
                    "scaling",
                    words,
                    theirs,
                    *found,
                    SIMULATED,
                    show=percent,
                    static=static,
                    comparison=one,
                    part=name,
                    batches=len(drawn),
                    chose=runs.chosen(where, drawn) if name == "equal" else (),
                    aside=value[ring],
                )
            )
    return rows


def ladder(runs: Runs, ranks: int) -> list[Row]:
    """Make the rows of the ablation: forward MFU with one mechanism added after the other;
    the last in the model's own layout, reshuffled around attention. Rungs are not judged: they are the same plans under
    other rules, and :func:`speed_ups` judges the last of them.
    """
    rows = []
    for name in LENGTHS:
        lengths = batches(name, ranks)[0]
        steps: list[tuple[str, float, Rules]] = list(setting.ABLATION)
        for words, known, rules in steps:
            found = [runs.run(_where(ranks, rules), lengths, each).mfu(False) for each in (PLANNER, "auto")]
            rows.append(
                Row(
                    "ablation",
                    f"{name}, {ranks} GPUs, MFU forward: {words}",
                    known,
                    *found,
                    SIMULATED,
                    aspect=None,
                    part=words,
                )
            )
        free = [runs.run(_where(ranks), lengths, each) for each in (PLANNER, "auto")]
        kept = [_in_layout(lengths, ranks, each) for each in (PLANNER, "auto")]
        order = "tokens in contiguous order, reshuffled around attention; not reproduced"
        words = f"{name}, {ranks} GPUs, MFU forward: {order}"
        rungs = [one.mfu(False) for one in kept]
        rows.append(Row("ablation", words, RESHUFFLE, *rungs, SIMULATED, aspect=None, part="reshuffle"))
        more = [(two.pass_ns(False) - one.pass_ns(False)) / 1e6 for one, two in zip(free, kept, strict=True)]
        words = f"{name}, {ranks} GPUs: ms forward more than with tokens where the planner wants them"
        rows.append(Row("reshuffle", words, HIDDEN, *more, SIMULATED, False, aspect=None, part="simulated"))
    return rows


def _in_layout(lengths: Sequence[int], ranks: int, name: str) -> Simulation:
    where = _where(ranks)
    request = replace(asked(where, lengths), layout=user_layout("contiguous", sum(lengths), ranks))
    plan: Plan = planned(request, name, search=False)[1]
    return simulate(plan, rules=where.rules)


def blocks(runs: Runs, ranks: int) -> list[Row]:
    """Make the rows of block sizes; in the paper 2K to 6K are within 7 %."""
    lengths, where = batches("lognormal16k", ranks)[0], _where(ranks)
    ns = {f"fcp:{size}": runs.run(where, lengths, f"fcp:{size}").attention_ns for size in SIZES}
    best, auto = min(ns.values()), runs.run(where, lengths, "auto").attention_ns
    words = f"lognormal16k, {ranks} GPUs, {{}}: speed against the best block size's"
    theirs = "within 7 % from 2K to 6K"
    return [
        Row("block size", words.format(each), theirs, best / took, best / auto, SIMULATED, aspect=None)
        for each, took in ns.items()
    ]


def overlap() -> list[Row]:
    """Make the row of the bandwidth at which a block's keys travel as fast as the block computes:
    (KV heads / heads) x FLOP/s / tokens of a block.
    """
    shape, block, found = setting.SHAPE, 4096, {}
    implied = OVERLAP * block * shape.heads / shape.kv_heads / 1000
    for name, cost in (("h20", setting.COST), ("h100", CostModel())):
        flops = cluster(name).gflops * cost.forward_efficiency / 1000
        found[name] = shape.kv_heads / shape.heads * flops / block
    rule = f"GB/s that hide the keys of {block:,} tokens, by a rule inferred from its text"
    words = f"{rule}; {OVERLAP:g} means {implied:.0f} TFLOP/s, and an H20 peaks at {cluster('h20').gflops / 1000:.0f}; "
    words += f"{FASTER} {found['h100']:.1f}, H20-like"
    return [Row("overlap", words, OVERLAP, found["h20"], None, "computed from the cost model", False, "{:.1f}".format)]


def planning(runs: Runs, counts: Sequence[int]) -> list[Row]:
    """Make the rows of planning seconds, for bimodal, by which time all loops are compiled; those of `fcp` have its
    rounds.
    """
    rows = []
    for ranks in counts:
        found = [runs.timed(_where(ranks), batches("bimodal", ranks)[0], each) for each in (PLANNER, "auto")]
        took, how = [one.seconds for one in found], timing(*found)
        rows.append(Row("planning", f"bimodal, {ranks} GPUs, s", "seconds", *took, how, False, aspect=PLANNING))
    return rows


def rest() -> list[Row]:
    """Make the rows of figures that cannot be repeated here."""
    return [
        absent(
            "kernel efficiency",
            "MFU of one GPU by block size",
            "falls below 4K",
            "a GPU's own: [kernels](kernels.md) has an H200's",
        ),
        absent(
            "rival",
            "FCP over MagiAttention",
            "among 1.13 to 2.21",
            "no ratio until its dealing simulates within 10 % of its [published rates](published.md)",
        ),
        absent(
            "convergence",
            "loss with and without FCP",
            "the same",
            "not with `fcp`: flexcp's own plans, measured on one H200 and on NCCL ranks that share it "
            "([training](training.md))",
        ),
    ]


def rows(quick: bool, runs: Runs) -> list[Row]:
    """Make all rows of FCP."""
    counts, seeds = ((16, 128), 1) if quick else ((16, 32, 64, 128, 256), 2)
    return [
        *speed_ups(runs, counts, seeds),
        *faster_gpus(runs, 16 if quick else 64, seeds),
        *efficiency(runs, counts, seeds),
        *ladder(runs, 128),
        *measured_in_the_box(2 if quick else 5),
        *blocks(runs, 16 if quick else 64),
        *overlap(),
        *planning(runs, counts),
        *rest(),
    ]
