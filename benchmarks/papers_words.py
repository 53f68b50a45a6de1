"""Texts of the page of the three papers: how settings differ from the papers', and why numbers do.
Numbers in the texts are computed from the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from papers_dcp import ALL, GROUPS
from papers_dhp import A_RANK, ANY, CASES, JOINED
from papers_fcp import FASTER, LENGTHS, OVER_RIVALS, OVERLAP
from papers_reshuffle import order
from papers_rows import SAME, Row, percent, span
from simulated import STATIC
from vision_models import MODELS

LEGEND = (
    "- *Their planner here*: the paper's planner, simulated with flexcp's executor. *As above*: the same batches and "
    "planners were judged in an earlier row. -: not judged.",
    "- *Over static*: the time of the best fixed method (data parallelism, rings, gathers, Ulysses, heads x ring, "
    "degrees that are powers of two, documents dealt by tokens or by load) over `auto`'s: *of each batch* the best for "
    "that batch, *one fixed* the best for all batches of the row.",
    "- *Batches*: the number of drawn batches in a row. *Counted in plans*: bytes or work of the plan; nothing is "
    "timed. `usp:2,8`: groups of 16 ranks, heads over 2 and a ring of 8; `ulysses:d`, `zigzag:d`, `ring:d`: over d "
    "ranks.",
    "- Lengths: *lognormal16k* and *bimodal* (means of 16K, and of 16K and 64K tokens, FCP's two sets), *libra256k* "
    "(mixture with Libra's published percentiles, up to 256K), *video* (clips of 2K to 128K tokens, our choice), "
    "*web* (web documents in MagiAttention's bins), *unbalanced* (one document with half of all tokens among "
    "documents of `web`, our interpretation of DHP's extremely unbalanced batches), *equal*.",
)


FEATURES = A_RANK * max(model.language.model.hidden for model in MODELS.values()) * 2 / 1e6
"""Megabytes of a rank's tokens between a vision encoder and a language model, in bfloat16."""
PUBLISHED_WORK = 0.034
"""FCP's largest published imbalance of work."""
DEEP = 4
"""How many times Qwen3-VL's encoder hands over its features: at its end and after three of its layers."""

LIMITS = (
    "*All three*",
    "",
    "- `auto` is judged by the simulator that it chooses with. For the papers' planners that simulator chose only "
    "sizes of blocks and, for `dcp`, a tolerance.",
    "- Most rows have one to three drawn batches, and none a spread. Differences of a few per cent may be those of the "
    "batches.",
    "- Planning times are CPU time. Those under a second are the least of seven runs, longer ones single runs; they "
    "vary from run to run by more than the 5 % within which *same* is judged for them too.",
    "- In rows of whole steps `auto` and fixed methods may keep any number of tokens on a rank, while `dhp` is bound "
    "by a memory and `dcp` by a tolerance.",
    "- [Published figures](published.md) simulates some of the same cells with other links, kernels and batches. Its "
    "numbers differ from those here, and neither confirms the other.",
    "- Not every figure and table has a row. Our notes on the papers have no table of DCP's, and their numbers of FCP "
    "and DHP come without those of the figures. Bars and curves without printed numbers were not read.",
    "",
    "*DCP*",
    "",
    "- The paper's figures 12 and 13 are from 4 nodes x 4 A100 with one 100 Gb/s card, and of LongDataCollections. The "
    "rows here are of the artifact's machine, 4 x 8 A100; its plots of LongAlign are in no figure (*artifact only*). "
    "[Published figures](published.md) has two cells on the paper's machine, the lines of `a100-one-card:4x4` with "
    "`dcp`.",
    "- `auto` has one plan of a batch for both directions. For `dcp` the block size, and for the baseline the method, "
    "are chosen for each direction by the simulator.",
    "- Where *over static* is below 1, `auto` is slower than the best fixed method.",
    "- In figures 12 and 13 `auto` and the degrees of *over static* are chosen as if every rank had half a card to "
    "itself, while the simulation lets two ranks share one; heads x ring has one or two head splits.",
    "- Figures 12, 13 and the dry runs do not ask for equal tokens on all ranks.",
    "- End to end the optimiser, the collectives of tensor parallelism and the host's time are left out. A rank there "
    "has all 32 query and 8 KV heads, where a GPU under tensor parallelism has 8 and 2: `auto`, `dcp` and *over "
    "static* may split heads further than that machine can, Megatron-LM's method does not. Links inside a node "
    "and copies are those of one GPU.",
    "- Bytes of figures 16, 18 and 19 are judged between nodes. The rows also have all bytes, of which `auto` moves "
    "more than `dcp`.",
    "- Figure 17 times our writing of DCP's planner, not its code, which takes seconds. It is partitioned by "
    "Mt-KaHyPar with its deterministic preset, one thread and one seed, where DCP's code has KaHyPar and Mt-KaHyPar: "
    "another partitioner or seed gives other bytes, balance and planning times.",
    "- The abstract's ranges beside figures 12b and 13 are of the paper's machine and of LongDataCollections. They do "
    "not cover LongAlign, whose rows, in no figure of the paper, are a third of the comparisons of time.",
    "- The degree of a fixed method is preselected by the closed form, of which the nearest are simulated, here and in "
    "FCP's rows: a better one may be missed, and *over static* be slightly too large.",
    "- Figures 16, 18 and 19: two batches instead of 200, and DCP's separate tolerance for memory, which its code also "
    "sweeps, has no counterpart in one weight. `auto` looks for the least time, not for few bytes.",
    "- Figures 1 and 21 are profiles of a run, and our notes do not say what they count as waiting. By the artifact's "
    "count, in which the loss is 20, the second is 21, and 22 in the arXiv version; the artifact does not make it. "
    "Waiting is judged twice: of all ranks, where a rank that is done early waits for the slowest, and of the slowest "
    "rank alone. A share is of the planner's own step, so a slow step makes the same wait a smaller share.",
    "",
    "*FCP*",
    "",
    "- Our notes do not name its GPUs. H20-like ones with 200 Gb/s each are our assumption.",
    "- *Speed* rows leave out its strongest rival, MagiAttention, so ratios over its rivals are larger than over all "
    "four. Rings as a trainer would configure them, and any fixed method, are stronger baselines, over which `fcp` may "
    "be below 1. Fixed methods have no limit of memory except in *over rings*.",
    "- Our notes do not say whether 1.13 to 2.21 is over the best rival or over each. The rows are over the best.",
    "- Outside the ablation's first two rungs ports never crowd, so FCP's rounds gain nothing in any row about time, "
    "and `auto`, rings and rivals pay nothing for sending without them.",
    "- FCP's pipeline, block by block with three buffers, is replaced by flexcp's stages, at most nine, in all rows of "
    "time and in the rung *pipeline*.",
    "- *Speed*, *MFU* and *scaling* rows place tokens freely, so that nobody pays for a reshuffle there, which FCP's "
    "full system has. The last rung of the ablation shows how much of `fcp`'s and of `auto`'s MFU an unhidden one "
    "costs.",
    "- Planning times of `fcp` include its rounds in both directions, those of `auto` no rounds.",
    "- Attention rows do not ask for equal tokens on all ranks: methods that deal whole documents, and `auto`, may "
    "keep more on some, `fcp` at most an eighth over the mean.",
    "- The box has 4 ranks, kernels replaced by waits, and FCP's blocks of 1,024 tokens. Its order says nothing about "
    "128 GPUs.",
    "",
    "*DHP*",
    "",
    "- The second version of the preprint names public code (ivanniu/FCP). We could not read it: `dhp` is made from "
    "the paper alone.",
    "- `dhp` puts groups that fit into a node inside one where the order of the groups allows it; our notes do not say "
    "where DHP puts them.",
    "- `dhp` chooses memory and degrees with its closed form, whose coefficients are not fitted to the simulator that "
    "judges it and which errs by more than the published one (*cost model*): its plans are probably worse than with "
    "fitted coefficients, and `auto`'s lead larger.",
    "- DeepSpeed's Ulysses has degrees here that divide the query heads, with 28 heads no more than 4 among the powers "
    "of two. Public DeepSpeed can also split heads unevenly; that is not simulated, so ratios over DeepSpeed with 28 "
    "heads are probably too large.",
    "- The model and data behind the first version's 1.02 and 1.16 are not known. They stand beside all three cases.",
    "- *Video* rows: spans of the language model see both ways, as the paper's cost model assumes. Published Qwen-VL "
    "language models are causal.",
    "- *Video* rows: Megatron-LM, DeepSpeed and *any fixed* use one method for the vision encoder and the language "
    "model, as users do, while `dhp` and `auto` plan each by itself; the fourth row has the best fixed method of each "
    "part. *Any fixed* deals documents by tokens; the fourth row and the last columns also by load.",
    "- *Video* rows: moving features from the encoder to the language model is counted for none. It happens once a "
    f"step, on average with at most {FEATURES:.0f} MB a rank in each direction, and with Qwen3-VL, which also hands "
    f"over features of three encoder layers, up to {DEEP * FEATURES:.0f} MB.",
    "- *Scaling*: in three cases documents grow with the devices, because longer ones fit into a batch. Only "
    "*joined* has the same documents on all devices: batches drawn for the fewest, which more take several at a time.",
)
"""What a reader of the papers would object to."""


def intro() -> str:
    """Return the introduction: what the page shows, and its limits."""
    return (
        "Figures of the three papers: the published values, and what their planner and `auto` reach here. "
        "Times are from the event simulator with the analytic cost model ([errors](errors.md)). Published numbers "
        "were measured on other machines and are shown for orientation. Their planners run on flexcp's executor, so "
        "a row compares plans. **`auto` chooses among plans with the same simulator that judges them here, and the "
        "papers' planners do not: its lead is probably too large**, and in many rows smaller than the simulator's own "
        "errors. `auto` looks for the least time and may move more bytes or plan for longer to reach it. *Same* is "
        f"within {SAME:.0%}. A comparison is judged once, in its first row. [The papers](../papers.md) says where "
        "each mechanism is."
    )


def dcp(rows: Sequence[Row]) -> list[str]:
    """Return the texts on DCP: settings, then reasons for differences."""
    known = [row for row in rows if row.part.endswith(ALL) and row.base_off is not None]
    micro = [row.base_off for row in known if row.base_off is not None]
    of_dcp = [
        (1 + row.base_off) * row.theirs / row.planner
        for row in known
        if row.base_off is not None and row.planner and not isinstance(row.theirs, str)
    ]
    both = sum(base > 0 and took < 1 for base, took in zip(micro, of_dcp, strict=True))
    in_groups = [row for row in rows if row.figure == "12a" and row.part.endswith(GROUPS)]
    groups = [row.planner for row in in_groups if row.planner is not None]
    uneven = [row.aside for row in in_groups if row.aside is not None]
    return [
        "Figures are numbered as in its artifact; the arXiv version counts one more from 12 on. `dcp` partitions its "
        "hypergraph from scratch. Settings are read from its public code (benchmarks/papers_dcp.py): baselines have "
        "one degree for the run, chosen by the longest document of the data set; DCP has the best of its block "
        "sizes, and end to end of its two tolerances over nodes, 0.4 and 1.6; end to end a batch has as many tokens as "
        "its longest document may have, and Megatron-LM has context parallelism over all 16 ranks. Tensor parallelism "
        "of 4 is represented by one rank four times as fast, without its collectives. Lengths are drawn from "
        "distributions like those of its data sets, not from the data sets.",
        "Published ratios of 12a are computed from the milliseconds in its artifact's reference figures, where DCP "
        "loses on long LongAlign documents: 0.69 and 0.87 lie outside the 1.19 to 2.45 of its abstract. (*Range*): the "
        "abstract's range over all cells of the kind; the bars of 12b, 13, 15 and of two masks of 14 were not read. "
        "Figures 1 and 21 have one length here. Figures 16 to 19 are its dry runs: plans for 8 x 2 ranks, 65,536 "
        "tokens a batch, bytes between nodes. Figures 16 and 17 judge its default block size alone. Figure 17 times "
        "one folding of tokens and work into one weight, that of DCP's code.",
        f"`dcp` tries two foldings and keeps the better balanced one. {_foldings(rows)}{_chosen(rows)}",
        "**Why ratios are not the published ones.** Over all 32 ranks the fastest baseline of 12a differs from its "
        f"published time by {span(micro, '{:+.0%}'.format)}: one flat ring is bound by the network here and takes the "
        "same time at every scale, while the published times fall with the scale. LoongTrain's double ring, which "
        f"uses all cards of a node at once, is such a flat ring here. `dcp` itself takes {span(of_dcp)} of its "
        "published time, least on short documents: its instructions, buffers and transfers are not simulated, and we "
        f"have not measured them. In {both} of {len(micro)} cells the baseline is too slow and `dcp` too fast, so the "
        "ratio is too large from both sides. Two choices were made with knowledge of the published times: that two "
        "ranks share a 100 Gb/s card, and 262,144 as a second assumption for LongAlign's longest document. If that "
        "document has 64K tokens (*in groups*), baselines run in smaller groups, far below the published times, and "
        f"`dcp` reaches {span(groups)} in 12a; its single weight for tokens and work leaves one rank with "
        f"{span(uneven, '{:.1f}'.format)} times the mean work there.",
        _sparse(rows),
        _steps(rows),
    ]


def _sparse(rows: Sequence[Row]) -> str:
    """Return the text on figure 13, whose ratios are furthest from the published ones."""
    found = [row.planner for row in rows if row.figure == "13" and row.planner is not None]
    return (
        f"Figure 13 is further off: `dcp` reaches {span(found)} where 2.15 to 3.77 are published. The ring takes about "
        "the same time under every mask here, and `dcp`, whose launches and copies are not simulated, a small part of "
        "it under sparse masks."
    )


def _foldings(rows: Sequence[Row]) -> str:
    """Say how the bytes of the folding that is kept compare with those in the folding of DCP's code."""
    pairs = [(row.planner, row.aside) for row in rows if row.figure == "16" and row.planner is not None and row.aside]
    fewer = sum(planner < own for planner, own in pairs)
    told = f"In {fewer} of {len(pairs)} rows of figure 16 its plans send fewer bytes between nodes than in the folding "
    return told + "of DCP's code alone" + (": DCP is judged kindly." if 2 * fewer > len(pairs) else ".")


def _steps(rows: Sequence[Row]) -> str:
    """Return the text on DCP end to end."""
    here = [row for row in rows if row.figure in ("14", "15")]
    seconds = [1 + row.base_off for row in here if row.base_off is not None]
    sync = [row.aside for row in here if row.aside is not None]
    waits = [row.aside for row in rows if row.figure == "1, 21" and row.aside is not None]
    gains: dict[str, list[float]] = {}
    for row in here:
        if row.planner is not None and not isinstance(row.theirs, str):
            gains.setdefault(row.cell.partition(" up to ")[2].partition(":")[0], []).append(row.planner / row.theirs)
    large = [f"{cap} ({span(off)})" for cap, off in gains.items() if max(off) > 1 + SAME]
    told = (
        f"End to end Megatron-LM's steps take {span(seconds)} of the published seconds here. The sum of gradients, "
        f"which nothing hides, is {span(sync, '{:.0%}'.format)} of its steps; it is the same for all planners and "
        f"makes their gains smaller. Megatron-LM waits {span(waits, '{:.0%}'.format)} of its steps here, published "
        "27.7 to 44.6 %: partly because our network model differs from their network, partly because the time "
        "that is left out makes steps shorter."
    )
    return f"{told} `dcp`'s gains over the published ones are too large at {' and '.join(large)}." if large else told


def _chosen(rows: Sequence[Row]) -> str:
    """Say how often ``auto`` chose a static method, and which."""
    names = [name.partition(":")[0].partition("@")[0] for row in rows for name in row.chose]
    static = Counter(name for name in names if name in STATIC)
    if not static:
        return f" `auto` chose a static method in none of {len(names)} batches." if names else ""
    kinds = ", ".join(f"`{name}` {count}" for name, count in static.most_common())
    return (
        f" In {static.total()} of {len(names)} batches of the rows about time `auto` chose a static method ({kinds}); "
        "there its plan is not dynamic."
    )


def _values(rows: Sequence[Row], figure: str, part: str, name: str = "") -> list[float]:
    """Return the values of the paper's planner, or of a rival, in rows of a figure's part whose words begin so."""
    return [
        row.planner
        for row in rows
        if row.figure == figure and row.part == part and row.cell.startswith(name) and row.planner is not None
    ]


def fcp(rows: Sequence[Row]) -> list[str]:
    """Return the texts on FCP."""
    speed, fixed = _values(rows, "speed", OVER_RIVALS), _values(rows, "speed", "over any fixed")
    faster = [_values(rows, "speed", f"{part}, {FASTER}") for part in (OVER_RIVALS, "over any fixed")]
    last = _values(rows, "ablation", "reshuffle")
    fourth = [
        row.planner for row in rows if row.figure == "ablation" and row.theirs == 0.70 and row.planner is not None
    ]
    texts = [
        "Rows are ordered by subject. `fcp` has its blocks, bin-packing, rounds and coalescing. Where attention is "
        "timed over baselines or against one GPU it has the fastest of four block sizes, 2,048, 4,096, 6,144 and "
        "8,192; elsewhere 4,096, the paper's. Kernels run at 0.80 of an H20's peak, derived from its published 0.75 of "
        "peak at 93 % efficiency. *Efficiency against one GPU*: the time of the same documents, whole, on one such "
        "GPU, over the number of GPUs times the time here. *Imbalance* is (max - mean) / max over ranks. In the "
        f"ablation `auto` runs under the same rules; its rungs are not judged.{_chosen(rows)}",
        f"**Why ratios are not the published ones** (`fcp` {span(speed)}, published 1.13 to 2.21): MagiAttention, "
        "its strongest rival, is left out, because its dealing simulates within 10 % of its [published "
        "rates](published.md) at 16 and 32 GPUs, but not at 64. Among the others, `wlb` (WLB-LLM) gathers all keys "
        "over all ranks (a gather in smaller groups is among the fixed methods), and `hdp` (ByteScale) sends keys to "
        "every rank that reads them, without the relays inside a node that `auto` has. "
        f"Over the best fixed method, which the paper does not have, `fcp` reaches {span(fixed)}.{_ring(rows)}",
        f"**GPUs.** The published {OVERLAP:g} GB/s that hide a block's keys mean, by the rule inferred from its text, "
        f"GPUs of several times an H20's peak (row *overlap*). On {FASTER} GPUs `fcp` reaches {span(faster[0])} over "
        f"its rivals and {span(faster[1])} over the best fixed method.",
        f"**Imbalance.** {_imbalance(rows)}",
        "**The last rung is not reproduced**: the published step gains, from 0.70 to 0.75; here MFU is "
        f"{span(fourth)} before it and {span(last)} after. The fourth rung's agreement is no evidence: the kernel's "
        "rate is derived from the fifth's. Here rungs 1 to 4 place tokens freely and need no reshuffle, the move of "
        "queries, keys and outputs between the model's order of tokens and attention's. The fifth keeps tokens in "
        "contiguous order and pays for the reshuffle without hiding it, while FCP hides it behind local work.",
    ]
    boxed = order(rows)
    return [*texts, boxed] if boxed else texts


def _imbalance(rows: Sequence[Row]) -> str:
    """Return the text on imbalance: by lengths, against the published ranges."""

    def by_lengths(part: str) -> str:
        return ", ".join(f"{span(_values(rows, 'imbalance', part, name), percent)} on {name}" for name in LENGTHS)

    above = [name for name in LENGTHS if min(_values(rows, "imbalance", "work", name)) > PUBLISHED_WORK]
    beyond = f", above it in every cell of {' and '.join(above)}" if above else ""
    return (
        "How far a rank may exceed the mean of tokens, and the cutting of long documents into equal blocks, were "
        f"chosen with knowledge of the published 1.7 to {PUBLISHED_WORK:.1%} of work, so agreement is no evidence: "
        f"`fcp` has {by_lengths('work')}{beyond}. ByteScale's dealing has {by_lengths('work, ByteScale')} "
        f"(published 48 to 75 %), and MagiAttention's bytes {by_lengths('bytes received, MagiAttention')} "
        "(published 14 to 19 %)."
    )


def _ring(rows: Sequence[Row]) -> str:
    """Return the text on the length of equal documents."""
    rings = [
        f"{row.aside:.1%} of one GPU ({known})"
        for row in rows
        for ranks, known in ((256, "256 GPUs, published 27.3 %"), (16, "16 GPUs, published 69.6 %"))
        if row.figure == "scaling" and row.aside is not None and row.cell.startswith(f"equal, {ranks} GPUs")
    ]
    if not rings:
        return ""
    return (
        " Equal documents have 131,072 tokens because a ring over 256 GPUs then comes nearest to the published one; at "
        f"16 GPUs it does not. It reaches {' and '.join(rings)}."
    )


def dhp(rows: Sequence[Row]) -> list[str]:
    """Return the texts on DHP."""
    gains = []
    for whose, who in (
        ("Megatron-LM", "Megatron-LM's rings"),
        ("DeepSpeed", "DeepSpeed's Ulysses"),
        (ANY, "the best fixed method"),
    ):
        parts = [f"{_gain(rows, name, whose)} on {name}" for _, name in CASES]
        gains.append(f"over {who} {', '.join(parts)}")
    return [
        "Rows are ordered by subject. `dhp` has the paper's packing and its dynamic program. Devices are like an "
        "Ascend 910B, with 8,192 tokens each. The paper compares with Megatron-LM (rings) and DeepSpeed (Ulysses), "
        "whose degrees it does not state in full: here each has the best degree for all batches. Ulysses can use as "
        "many ranks as there are query heads; 28 heads allow only 2 and 4 among the powers of two. `qwen2.5-vl-7b` in "
        "*throughput* and *scaling* is the language model alone, causal; models with their encoders are in *video*, "
        "on 16 devices only. *First version*: of the preprint; later ones have other numbers."
        f"{_chosen(rows)}",
        f"**Why gains are not the published ones.** `dhp` reaches here, from 8 to 64 devices: {'; '.join(gains)}. "
        "Ulysses with 28 heads ends at 4 ranks here, too few for a long document; over it the gain is largest. `usp`, "
        f"heads and a ring, which the paper does not compare with, is the strongest fixed method in {_usp(rows)} "
        "cases: a head group moves fewer bytes across nodes, while under `dhp` short documents that are packed with a "
        "long one inherit its degree. A fixed degree is chosen here with all batches known and without a limit of "
        "memory; a real one must hold the longest document of the data set. Its batches and their lengths are not "
        "published. Tokens a second fall with more devices also because longer documents then fit into a batch, and "
        "their work grows with the square of their length; with batches joined from those of the fewest devices a "
        f"device keeps {_kept(rows)} of its tokens a second on the most devices.",
        "*Solver*: without a cap `dhp` solves for up to six memories and takes the fastest; the published 20 to 86 "
        "ms are those of its solver on their CPU. *Cost model*: its closed form for the slowest group against "
        "simulated events of the same plan; the published error is against measured time, which is not available "
        "here.",
    ]


def _gain(rows: Sequence[Row], name: str, whose: str) -> str:
    some = [
        row for row in rows if row.figure == "throughput" and row.part == f"over {whose}" and f", {name}, " in row.cell
    ]
    return span([row.planner for row in some if row.planner is not None])


def _usp(rows: Sequence[Row]) -> str:
    """Return in how many cases the best of all fixed methods is heads and a ring."""
    best = [row.cell.partition(": step over ")[2] for row in rows if row.part == f"over {ANY}"]
    return f"{sum(name.startswith('usp:') for name in best)} of {len(best)}"


def _kept(rows: Sequence[Row]) -> str:
    """Return the share of tokens a second a device that `dhp` and ``auto`` keep with the same documents."""
    same = [row for row in rows if row.part.startswith(JOINED)]
    shares = [
        last / first
        for first, last in ((same[0].planner, same[-1].planner), (same[0].auto, same[-1].auto))
        if first is not None and last is not None
    ]
    return f"{shares[0]:.0%} (`auto` {shares[1]:.0%})"
