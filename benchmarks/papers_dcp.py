"""DCP's figures (arXiv 2510.10620), with `dcp` itself and with ``auto``. Figures are numbered as in its artifact
(the arXiv version counts one more from 12 on). Setting and published numbers are in ``dcp.py`` of this folder;
the following is read from its public code.

*Micro-benchmark*: the data parallel degree is the largest power of two not above 131,072 / the longest document of the
whole data set, after scaling and without documents over 131,072; it is the same for all batches. LongDataCollections
has such long documents at every scale, so its baselines run over all 32 ranks. LongAlign is described as up to 64K,
which gives 8, 16, 32 and 32. A single longer document would make it 32 everywhere, and its published times (a ring
takes 27 ms at scale 0.5) are not those of rings inside nodes, so both are shown. Causal baselines are ring, zig-zag,
and two head groups x rings (LoongTrain, TransformerEngine); for sparse masks there is only TransformerEngine. Times of
each method are averaged over all batches and the best setting is taken: for DCP, blocks of 1,024, 2,048 and 4,096
tokens.

*End to end*: a batch has as many tokens as the longest document may have, 16,384 to 131,072 on 64 GPUs. So there is no
data parallelism, and Megatron-LM has context parallelism over all 16 ranks, two head groups x a ring of 8. DCP's blocks
are 512 or 1,024 tokens for the shortest, 2,048 or 4,096 for the longest and 1,024 for the others, each with a node
tolerance of 0.4 and of 1.6, as in its code.

*Dry runs* (figures 16 to 19): 8 nodes x 8 GPUs with tensor parallelism of 4, so 8 x 2 ranks with a quarter of the
heads; batches of 65,536 tokens; bytes between nodes. Its code plans 200 batches of a data set, here there are two, and
only the first is timed. Figure 18 sweeps the window, the answers and the local blocks of the masks, figure 19 the
tolerance over nodes. Megatron-LM's line is the keys and values of all tokens, sent to the seven other nodes.

*Foldings*: `dcp` folds tokens and work into one weight in two ways and keeps the better balanced partition. Times and
bytes are those of this partition. Planning is timed with one folding, that of DCP's code, as DCP plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import dcp as setting
import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.masks import Mask
from flexcp.models.find import find_model
from flexcp.planners.published.dcp import NODE_TOLERANCE, RANK_TOLERANCE, TOKEN_SHARES, placed_within
from flexcp.planners.request import Request
from flexcp.schedule.transfers import make_plan
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import Simulation
from papers_rows import BYTES, COUNTED, PLANNING, SIMULATED, WAITING, Row, absent, percent, whole
from papers_runs import Planned, Runs, asked, backward_ns, forward_ns, least_of_few, step_ns, timing
from simulated import Experiment, cut_lengths, mean, scaled_lengths

DEFAULT = 1024
"""The block size of DCP's code where it tries no others."""
PLANNER = f"dcp:{DEFAULT}"
BLOCKS = (1024, 2048, 4096)
NAMES = {"longalign": "LongAlign", "longtail": "LongDataCollections"}
RANKS = 32
LONGEST = {"longalign": (65_536, 262_144), "longtail": (262_144,)}
"""The longest document of the data set before scaling, as described and as the published times suggest."""
RANGES = {"causal": "1.19 to 2.45 (range)", "sparse": "2.15 to 3.77 (range)"}
END_TO_END = {"causal": "0.94 to 1.16 (range)", "sparse": "1.00 to 1.46 (range)"}
"""Ranges over all cells of a kind, from its abstract; single bars were not read from the figures."""
MEGATRON = "usp:2,8"
NODE_FACTORS = (1, 2, 4, 8, 16)
"""The tolerances over nodes of figure 19, in tolerances over ranks; its default is 4."""
LOOSE = 1.6
"""The second tolerance over nodes that its code tries end to end."""
DCPS_FOLDING = TOKEN_SHARES[-1:]
ALL, GROUPS = "over all 32 ranks", "in groups"
"""The two assumptions about LongAlign's longest document; for LongDataCollections there is only the first."""
ARTIFACT = "LongAlign, artifact only, "
"""The artifact has these plots too, but the paper's figures 12 and 13 are of LongDataCollections."""
FEED_FORWARD = 14_336
"""The inner width of its 8B model's plain feed-forward, two matrices."""
DRY_BLOCKS = (512, 1024, 2048, 4096)
DRY_TOKENS = 65_536
DRY = replace(setting.MICRO, cluster=cluster("a100", 8, 2))
"""Dry runs plan for 8 nodes x 8 GPUs with tensor parallelism of 4: two ranks a node, with a quarter of the heads."""
CROSSING = "MB between nodes, forward"
KEYS = DRY.shape.kv_heads * (DRY.shape.head_dim + DRY.shape.v_head_dim) * 2
"""Bytes of the keys and values of a token, in bfloat16."""
CURVE = f"curves, not read; Megatron-LM's line at {DRY_TOKENS * (DRY.cluster.nodes - 1) * KEYS / 1e6:.0f}"
SPARSITY = {
    "lambda": {f"window {n:,}": flexcp.masks.lambda_(window=n) for n in (512, 1024, 2048, 4096, 8192)},
    "shared question": {f"answers {n}": flexcp.masks.shared_question(n) for n in (1, 2, 4, 8, 16)},
    "causal blockwise": {f"local blocks {n}": flexcp.masks.causal_blockwise(local=n) for n in (1, 2, 4, 8, 16)},
}
"""The masks of figure 18."""


def _made(size: int, node_tolerance: float, token_shares: Sequence[int], request: Request) -> flexcp.Plan:
    """Return DCP's plan with blocks of ``size`` tokens, this tolerance over nodes and these foldings."""
    request = replace(request, argument=str(size))
    placement = placed_within(request, node_tolerance, RANK_TOLERANCE, token_shares)
    return make_plan(placement, request.shape, request.cluster, request.cost, f"dcp:{size}")


def loose(size: int) -> str:
    """Return the name of DCP's plan with the second tolerance over nodes."""
    return f"dcp:{size} with nodes within {LOOSE:g}"


MAKERS: dict[str, Callable[[Request], flexcp.Plan]] = {
    loose(size): partial(_made, size, LOOSE, TOKEN_SHARES) for size in DRY_BLOCKS
}
"""DCP's plans that no strategy's name asks for."""


def degree(longest: int, scale: float) -> int:
    """Return the number of ranks in a baseline's group, as its code computes it."""
    kept = min(setting.TOKENS, round(longest * scale))
    data = 1 << ((setting.TOKENS // kept).bit_length() - 1)
    return max(1, RANKS // data)


def baselines(ranks: int, causal: bool) -> list[str]:
    """Return its static methods over groups of this many ranks; for sparse masks only TransformerEngine's."""
    heads = f"usp:2,{ranks // 2}" if ranks > 2 else f"ulysses:{ranks}"
    return [f"ring:{ranks}", f"zigzag:{ranks}", heads] if causal else [heads]


def micro(runs: Runs, seeds: int, scales: Sequence[float], masks: Sequence[str]) -> list[Row]:
    """Make the rows of figures 12 and 13: attention of one layer, each direction, speed-up over the best baseline,
    times averaged over batches. ``aside`` is the largest work of a rank over the mean in `dcp`'s plans.
    """
    rows = []
    for mask in masks:
        rule = setting.MASKS[mask]
        for name, published in setting.PUBLISHED.items():
            for scale in scales:
                batches = [scaled_lengths(name, setting.TOKENS, scale, seed) for seed in range(seeds)]
                groups = sorted({degree(longest, scale) for longest in LONGEST[name]})
                chosen = runs.chosen(setting.MICRO, batches, rule)
                for way, ns in ((False, forward_ns), (True, backward_ns)):
                    planner, dcp = runs.least(setting.MICRO, batches, [f"dcp:{block}" for block in BLOCKS], ns, rule)
                    uneven = mean(
                        imbalance(runs.run(setting.MICRO, lengths, planner, rule).plan.work()) for lengths in batches
                    )
                    auto = runs.least(setting.MICRO, batches, ["auto"], ns, rule)[1]
                    also = [each for ranks in groups for each in baselines(ranks, mask == "causal")]
                    static = runs.over_static(setting.MICRO, batches, "auto", ns, rule, also)
                    for ranks in groups:
                        best, least = runs.least(setting.MICRO, batches, baselines(ranks, mask == "causal"), ns, rule)
                        figure = f"12{'ab'[way]}" if mask == "causal" else "13"
                        known: float | str = RANGES["causal" if mask == "causal" else "sparse"]
                        took, off = least / seeds / 1e6, None
                        ms = f"{took:.1f} ms"
                        if mask == "causal" and not way:
                            of_static, of_dcp = published[setting.SCALES.index(scale)]
                            known, ms, off = of_static / of_dcp, f"{ms}, published {of_static}", took / of_static - 1
                        data = NAMES[name] + " (artifact only)" * (name == "longalign")
                        cell = f"{mask}, {data} x {scale:g}, {('forward', 'backward')[way]}"
                        rows.append(
                            Row(
                                figure,
                                f"{cell}: over {best} ({ms})",
                                known,
                                least / dcp,
                                least / auto,
                                SIMULATED,
                                static=static,
                                comparison=cell,
                                part=ARTIFACT * (name == "longalign") + (ALL if ranks == RANKS else GROUPS),
                                batches=seeds,
                                chose=() if way or ranks != groups[0] else chosen,
                                base_off=off,
                                aside=uneven,
                            )
                        )
    return rows


def machine() -> Experiment:
    """Return whole steps of its 8B model on 64 A100, with four GPUs as one rank.

    Nothing hides the sum of gradients: its launch template has Megatron-LM's overlap commented out. Its feed-forward is
    described as a gated one (three matrices) of the same FLOPs.
    """
    a100, speed, preset = cluster("a100", 8, 2), setting.TENSOR_PARALLEL, find_model("gpt-8b")
    preset = replace(preset, model=replace(preset.model, feed_forward=round(FEED_FORWARD * 2 / 3)))
    fast = replace(a100, gflops=speed * a100.gflops, inter_mbps=speed * a100.inter_mbps)
    return Experiment(fast, preset.shape, rules=Rules(), training=Training(preset, "allreduce", overlap_permille=0))


def blocks_of(cap: int) -> list[str]:
    """Return the block sizes that its code tries end to end, each with both tolerances over nodes."""
    sizes = (2048, 4096) if cap > 65_536 else (512, 1024) if cap <= 16_384 else (1024,)
    return [name for size in sizes for name in (f"dcp:{size}", loose(size))]


def capped(name: str, cap: int, seed: int) -> list[int]:
    """Return a batch of ``cap`` tokens in which no document is longer."""
    return cut_lengths(draw_lengths(name, cap, seed), cap)


def end_to_end(runs: Runs, seeds: int, masks: Sequence[str], caps: Sequence[int] = setting.CAPS) -> list[Row]:
    """Make the rows of figures 14 and 15 (iterations of an 8B model, speed-up over Megatron-LM) and, for the longest
    documents, of figures 1 and 21 (the share of a step spent waiting). ``aside`` of the former is the share of
    Megatron-LM's steps in which gradients are summed.
    """
    where, rows = machine(), []
    waits: list[Row] = []
    for number, name in enumerate(NAMES):
        for mask in masks:
            rule = setting.MASKS[mask]
            for cap in caps:
                batches = [capped(name, cap, seed) for seed in range(seeds)]
                dcp, least = runs.least(where, batches, blocks_of(cap), step_ns, rule)
                auto = runs.least(where, batches, ["auto"], step_ns, rule)[1]
                megatron = runs.least(where, batches, [MEGATRON], step_ns, rule)[1]
                known: float | str = END_TO_END["causal" if mask == "causal" else "sparse"]
                seconds, off = megatron / seeds / 1e9, None
                beside = f"{seconds:.2f} s"
                if name == "longalign" and mask in setting.MEGATRON:
                    of_megatron, of_dcp = setting.MEGATRON[mask][setting.CAPS.index(cap)]
                    known, beside = of_megatron / of_dcp, f"{beside}, published {of_megatron}"
                    off = seconds / of_megatron - 1
                static = runs.over_static(where, batches, "auto", step_ns, rule, [MEGATRON])
                words = f"{mask}, {NAMES[name]} up to {cap:,}: step over Megatron's {MEGATRON} ({beside})"
                over = (megatron / least, megatron / auto)
                steps = [runs.run(where, lengths, MEGATRON, rule).step for lengths in batches]
                sync = sum(step.sync_ns for step in steps if step is not None) / megatron
                more: dict[str, Any] = {"batches": seeds, "base_off": off, "aside": sync}
                more["chose"] = runs.chosen(where, batches, rule)
                rows.append(Row(str(14 + number), words, known, *over, SIMULATED, static=static, **more))
                if cap == caps[-1]:
                    waits += _waits(runs, where, batches, mask, NAMES[name], dcp)
    return [*rows, *waits]


def _waits(
    runs: Runs, where: Experiment, batches: Sequence[Sequence[int]], mask: str, data: str, dcp: str
) -> list[Row]:
    """Make the rows of the share of a step spent waiting: of all ranks, and of the slowest rank alone. ``aside`` is the
    share of Megatron-LM's.
    """
    theirs = "Megatron 27.7 to 44.6 %; DCP less under sparse masks, overlap worse under causal"
    case, rows = f"{mask}, {data}, {sum(batches[0]):,} tokens: share of a step", []
    for part, what, share in (
        ("mean of ranks", "in which a rank waits for messages or for slower ranks", waiting_share),
        ("slowest rank", "in which the slowest rank waits for messages", slowest_share),
    ):
        ours = {
            name: mean(share(runs.run(where, lengths, name, setting.MASKS[mask])) for lengths in batches)
            for name in (MEGATRON, dcp, "auto")
        }
        words = f"{case} {what}; Megatron's here {ours[MEGATRON]:.1%}"
        found, how = (ours[dcp], ours["auto"]), (SIMULATED, False, percent)
        more: dict[str, Any] = {"part": part, "batches": len(batches), "aside": ours[MEGATRON]}
        rows.append(Row("1, 21", words, theirs, *found, *how, aspect=WAITING, **more))
    return rows


def waiting_share(simulation: Simulation) -> float:
    """Return the share of a step in which a rank waits inside it or is done before the slowest, mean over ranks."""
    step = simulation.step
    assert step is not None
    idle = step.ranks[1] + step.total_ns - step.ranks.sum(axis=0)
    return float(idle.mean()) / step.total_ns


def slowest_share(simulation: Simulation) -> float:
    """Return the share of a step in which its slowest rank waits."""
    step = simulation.step
    assert step is not None
    return step.wait_ns / step.total_ns


def dry_runs(
    runs: Runs, seeds: int, blocks: Sequence[int] = DRY_BLOCKS, names: Sequence[str] = tuple(NAMES)
) -> list[Row]:
    """Make the rows of figures 16 to 19, which need only planning: bytes between nodes and seconds by block size, bytes
    by sparsity and by tolerance over nodes.
    """
    rows: list[Row] = []
    for name in names:
        batches = [capped(name, DRY_TOKENS, seed) for seed in range(seeds)]
        for mask in setting.MASKS:
            rows += _by_block(runs, batches, mask, NAMES[name], blocks)
        rows += _by_sparsity(runs, batches, NAMES[name])
        rows += _by_tolerance(runs, batches, NAMES[name])
    return rows


def _by_block(runs: Runs, batches: Sequence[Sequence[int]], mask: str, data: str, blocks: Sequence[int]) -> list[Row]:
    """Make the rows of figures 16 and 17. ``aside`` of figure 16 is the bytes in the folding of DCP's code alone.

    Only the default block size of DCP is judged: the other sizes compare with the same plans of ``auto``.
    """
    rule, rows = setting.MASKS[mask], []
    auto = [_plan(runs, lengths, "auto", rule) for lengths in batches]
    of_auto = runs.timed(DRY, batches[0], "auto", rule)
    for block in blocks:
        dcp = [_plan(runs, lengths, f"dcp:{block}", rule) for lengths in batches]
        own = [_in_one_folding(lengths, rule, block) for lengths in batches]
        folded, judged = _crossing([one.plan for one in own]), block == DEFAULT
        words = f"{mask}, {data}, blocks of {block}"
        beside = f" (in the folding of DCP's code alone {folded:.0f})"
        rows.append(_moved("16", f"{words}: {CROSSING}{beside}", dcp, auto, f"{rule}, {data}" * judged, aside=folded))
        again = partial(_in_one_folding, batches[0], rule, block)
        took = least_of_few(own[0].seconds, lambda again=again: again().seconds)
        both = runs.plan(DRY, batches[0], f"dcp:{block}", rule)
        assert both is not None
        seconds = (took.seconds, of_auto.seconds)
        folded_too = f"{words}: planning s, one folding (both {both.seconds:.2f})"
        how, aspect = timing(took, of_auto), PLANNING if judged else None
        rows.append(Row("17", folded_too, "under 10", *seconds, how, False, aspect=aspect))
    return rows


def _by_sparsity(runs: Runs, batches: Sequence[Sequence[int]], data: str) -> list[Row]:
    """Make the rows of figure 18: the masks of its code with several windows, answers and local blocks."""
    rows = []
    for mask, rules in SPARSITY.items():
        for setting_, rule in rules.items():
            share = sum(_pairs(one, rule) for one in batches) / sum(_pairs(one, flexcp.causal()) for one in batches)
            plans = [[_plan(runs, lengths, name, rule) for lengths in batches] for name in (PLANNER, "auto")]
            words = f"{mask}, {setting_}, {data}, {share:.0%} of causal pairs: {CROSSING}"
            rows.append(_moved("18", words, *plans, f"{rule}, {data}", mask))
    return rows


def _by_tolerance(runs: Runs, batches: Sequence[Sequence[int]], data: str) -> list[Row]:
    """Make the rows of figure 19: causal, the tolerance over nodes as multiples of the tolerance over ranks."""
    rows, auto = [], [_plan(runs, lengths, "auto", flexcp.causal()) for lengths in batches]
    for factor in NODE_FACTORS:
        plans = []
        for lengths in batches:
            request = asked(DRY, lengths)
            plans.append(_made(DEFAULT, factor * RANK_TOLERANCE, TOKEN_SHARES, request))
        work = [mean(imbalance(plan.work()) for plan in each) for each in (plans, auto)]
        words = f"causal, {data}, tolerance over nodes {factor * RANK_TOLERANCE:g}, work max / mean {work[0]:.2f} "
        words += f"(`auto` {work[1]:.2f}): {CROSSING}"
        # Every factor compares with the same plans of auto: only the default one, that of figure 16, is judged.
        judged = factor * RANK_TOLERANCE == NODE_TOLERANCE
        rows.append(_moved("19", words, plans, auto, f"{flexcp.causal()}, {data}" * judged, aside=work[0]))
    return rows


def _in_one_folding(lengths: Sequence[int], mask: Mask, block: int) -> Planned:
    """Return the plan, and the CPU seconds of planning, in the folding of DCP's code alone."""
    request = asked(DRY, lengths, mask)
    begin = time.process_time()
    plan = _made(block, NODE_TOLERANCE, DCPS_FOLDING, request)
    return Planned(plan, time.process_time() - begin)


def _moved(
    figure: str,
    words: str,
    dcp: Sequence[flexcp.Plan],
    auto: Sequence[flexcp.Plan],
    comparison: str = "",
    part: str = "",
    aside: float | None = None,
) -> Row:
    """Make a row of the bytes between nodes of a planner's plans and of ``auto``'s, with all bytes in words. Without a
    ``comparison`` it is not judged.
    """
    every = [mean(float(plan.bytes().sum()) / 1e6 for plan in plans) for plans in (dcp, auto)]
    words += f"; all bytes {every[0]:.0f}, `auto` {every[1]:.0f}"
    found, how = (_crossing(dcp), _crossing(auto)), (COUNTED, False, whole)
    more: dict[str, Any] = {"comparison": comparison, "part": part, "batches": len(dcp), "aside": aside}
    return Row(figure, words, CURVE, *found, *how, aspect=BYTES if comparison else None, **more)


def rest() -> list[Row]:
    """Make the rows of figures that planning and simulating cannot repeat."""
    return [
        absent("2", "lengths of both data sets", "histograms", "lengths here are drawn like them"),
        absent("3 to 11", "design", "no results", "see [the papers](../papers.md)"),
        absent(
            "20",
            "loss curves with and without DCP",
            "the same",
            "not with `dcp`: flexcp's own plans, measured on one H200 and on NCCL ranks that share it "
            "([training](training.md)) and on CPU ranks in float64 ([models](models.md))",
        ),
    ]


def _plan(runs: Runs, lengths: Sequence[int], name: str, mask: Mask) -> flexcp.Plan:
    found = runs.plan(DRY, lengths, name, mask)
    assert found is not None
    return found.plan


def _pairs(lengths: Sequence[int], mask: Mask) -> int:
    batch = asked(DRY, lengths, mask).batch
    documents = batch.document_of(batch.starts[:-1])
    return int(batch.masks[0].rows_area(documents, documents * 0, batch.lengths).sum())


def _crossing(plans: Sequence[flexcp.Plan]) -> float:
    """Return the megabytes that cross between nodes forward, mean over plans."""
    return mean(plan.inter_node_bytes() / 1e6 for plan in plans)


def rows(quick: bool, runs: Runs) -> list[Row]:
    """Make all rows of DCP."""
    sparse = tuple(mask for mask in setting.MASKS if mask != "causal")
    if quick:
        return [
            *micro(runs, 1, (0.5, 4.0), ("causal",)),
            *micro(runs, 1, (1.0,), ("lambda",)),
            *end_to_end(runs, 1, ("causal", "lambda"), (16_384, 131_072)),
            *dry_runs(runs, 1, (DEFAULT,), ("longtail",)),
            *rest(),
        ]
    return [
        *micro(runs, 3, setting.SCALES, ("causal",)),
        *micro(runs, 2, setting.SCALES, sparse),
        *end_to_end(runs, 2, tuple(setting.MASKS)),
        *dry_runs(runs, 2),
        *rest(),
    ]
