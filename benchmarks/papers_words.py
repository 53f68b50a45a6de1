"""Texts of the page of the three papers: how settings differ from the papers', and why numbers do.
Numbers in the texts are computed from the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from papers_dcp import ALL, GROUPS
from papers_dhp import ANY, CASES
from papers_fcp import OVER_RIVALS
from papers_reshuffle import order
from papers_rows import SAME, Row, span

LEGEND = (
    "- *Their planner here*: the paper's planner, simulated with flexcp's executor. *As above*: the same batches and "
    "planners were judged in an earlier row. -: not judged.",
    "- *Over static*: the time of the best fixed method (data parallelism, rings, gathers, Ulysses, heads x ring, of "
    "any degree, documents dealt by tokens or by load) over `auto`'s: *of each batch* the best for that batch, *one "
    "fixed* the best for all batches of the row.",
    "- *Batches*: the number of drawn batches in a row. *Counted in plans*: bytes or work of the plan; nothing is "
    "timed. `usp:2,8`: groups of 16 ranks, heads over 2 and a ring of 8; `ulysses:d`, `zigzag:d`, `ring:d`: over d "
    "ranks.",
    "- Lengths: *lognormal16k* and *bimodal* (means of 16K, and of 16K and 64K tokens, FCP's two sets), *libra256k* "
    "(mixture with Libra's published percentiles, up to 256K), *video* (clips of 2K to 128K tokens, our choice), "
    "*web* (web documents in MagiAttention's bins), *unbalanced* (one document with half of all tokens among "
    "documents of `web`, our interpretation of DHP's extremely unbalanced batches), *equal*.",
)


LIMITS = (
    "- A row has one to three drawn batches and no spread: differences of a few per cent may be those of the batches.",
    "- FCP and DHP: rows are ordered by subject and have no figure numbers, because our notes on the two papers have "
    "their numbers without those of the figures; bars and curves without printed numbers were not read.",
    "- FCP's *speed* rows leave out its strongest rival, MagiAttention, so ratios over its rivals are larger than over "
    "all four. Rows over rings as a trainer would configure them, and over any fixed method, have stronger baselines, "
    "over which `fcp` may be below 1. Fixed methods have no limit of memory except in *over rings*.",
    "- Attention rows ask for equal tokens on all ranks, and methods that deal whole documents reach that with padding "
    "that costs nothing here; `fcp` may be an eighth over the mean.",
    "- The box has 4 ranks and FCP's blocks are of 1,024 tokens there; its order says nothing about 128 GPUs.",
    "- DHP's video rows: Megatron-LM, DeepSpeed and *any fixed* use one method for the vision encoder and the language "
    "model, as users do, while `dhp` and `auto` plan each by itself; the fourth row has the best fixed method of each "
    "part. Moving features from the encoder to the language model is counted for none of them: once a step, at "
    "most 67 MB a rank in each direction on average. *Any fixed* deals documents by tokens, as Megatron-LM and "
    "DeepSpeed do; the fourth row and the last columns also by load.",
    "- DHP's near-linear scaling: in three cases documents grow with the devices, because longer ones fit into a "
    "batch; only *libra256k cut* has the same documents on all devices.",
    "- DCP: times and bytes of `dcp` are those of the better balanced of two foldings of tokens and work into one "
    "weight, which may move more bytes than the folding of DCP's code (beside it in figure 16); its block size, and "
    "end to end its tolerance over nodes, are the ones that the simulator finds fastest. Forward and backward of the "
    "same plans are judged separately in figures 12 and 13. Where *over static* is below 1, as in forward rows of "
    "figure 13, `auto` is slower than the best fixed method.",
    "- Figures 1 and 21 of DCP are profiles of a run, and what they count as waiting is not defined in our notes. Here "
    "waiting is judged twice: of all ranks, where a rank that is done early waits for the slowest, and of the slowest "
    "rank alone. A share is of the planner's own step, so a slow step makes the same wait a smaller share.",
)
"""What a reader of the papers would object to."""


def intro() -> str:
    """Return the introduction: what the page shows, and its limits."""
    return (
        "Figures and tables of the three papers: the published values, and what their planner and `auto` reach here. "
        "Times are from the event simulator with the analytic cost model ([errors](errors.md)). Published numbers "
        "were measured on other machines and are shown for orientation. Their planners run on flexcp's executor, so "
        "a row compares plans. **`auto` chooses among plans with the same simulator that judges them here, and the "
        "papers' planners do not: its lead is an upper bound**, and in many rows smaller than the simulator's own "
        "errors. `auto` looks for the least time and may move more bytes or plan for longer to reach it. *Same* is "
        f"within {SAME:.0%}. A comparison is judged once, in its first row. [The papers](../papers.md) says where "
        "each mechanism is."
    )


def dcp(rows: Sequence[Row]) -> list[str]:
    """Return the texts on DCP: settings, then reasons for differences."""
    micro = [row.base_off for row in rows if row.part == ALL and row.base_off is not None]
    of_dcp = [
        (1 + row.base_off) * row.theirs / row.planner
        for row in rows
        if row.part == ALL and row.base_off is not None and row.planner and not isinstance(row.theirs, str)
    ]
    groups = [row.planner for row in rows if row.figure == "12a" and row.part == GROUPS and row.planner is not None]
    steps = [1 + row.base_off for row in rows if row.figure == "14" and row.base_off is not None]
    return [
        "Figures are numbered as in its artifact; the arXiv version counts one more from 12 on. `dcp` partitions its "
        "hypergraph from scratch. Settings are read from its public code (benchmarks/papers_dcp.py): baselines have "
        "one degree for the run, chosen by the longest document of the data set; DCP has the best of its block "
        "sizes, and end to end of its two tolerances over nodes, 0.4 and 1.6; end to end a batch has as many tokens as "
        "its longest document may have, and Megatron-LM has context parallelism over all 16 ranks. Tensor parallelism "
        "of 4 is represented by one rank four times as fast, without its collectives. Lengths are drawn from "
        "distributions like those of its data sets, not from the data sets.",
        "Published ratios of 12a are computed from the milliseconds in its artifact's reference figures (4 x 8 "
        "A100), where DCP loses on long LongAlign documents: 0.69 and 0.87 lie outside the 1.19 to 2.45 of its "
        "abstract, which are for 4 x 4 A100 with one card a node. (*Range*): the abstract's range over all cells of "
        "the kind; the bars of 12b, 13, 15 and of two masks of 14 were not read. Figures 1 and 21 have one length "
        "here. Figure 17 times one folding, that of DCP's code.",
        "**Why ratios are not the published ones.** Over all 32 ranks the fastest baseline of 12a differs from its "
        f"published time by {span(micro, '{:+.0%}'.format)}: one flat ring is bound by the network here and takes the "
        "same time at every scale, while the published times fall with the scale. LoongTrain's double ring, which "
        f"uses all cards of a node at once, is such a flat ring here. `dcp` itself takes {span(of_dcp)} of its "
        "published time, least on short documents: its instructions, buffers and transfers are not simulated, and we "
        "have not measured them. So most ratios are too large from both sides. Two choices were made with knowledge "
        "of the published times: that two ranks share a 100 Gb/s card, and 262,144 as a second assumption for "
        "LongAlign's longest document. If that document has 64K tokens (*LongAlign in groups*), baselines run in "
        f"groups of 8 and 16 ranks, far below the published times, and `dcp` reaches {span(groups)} in 12a; its "
        "single weight for tokens and work leaves one rank with two to three times the mean work.",
        f"End to end Megatron-LM's steps take {span(steps)} of the published seconds here: tensor parallelism's "
        "collectives, the optimiser and the host's own time are left out. Megatron-LM waits longer here than the "
        "published 27.7 to 44.6 %, because our network model differs from their network, and gains at 131,072 tokens "
        "are too large for the same reason.",
    ]


def fcp(rows: Sequence[Row]) -> list[str]:
    """Return the texts on FCP."""
    speed = [row.planner for row in rows if row.part == OVER_RIVALS and row.planner is not None]
    fixed = [row.planner for row in rows if row.part == "over any fixed" and row.planner is not None]
    last = [
        row.planner for row in rows if row.figure == "ablation" and row.part == "reshuffle" and row.planner is not None
    ]
    fourth = [
        row.planner for row in rows if row.figure == "ablation" and row.theirs == 0.70 and row.planner is not None
    ]
    texts = [
        "Rows are ordered by subject. `fcp:4096` has its blocks, bin-packing, rounds and coalescing. How far a rank "
        "may exceed the mean of tokens, and the cutting of long documents into equal blocks, were chosen with "
        "knowledge of its published imbalance: agreement there is no evidence. GPUs are H20-like, our assumption, "
        "with a kernel at 0.80 of peak, derived from its published figures; other machines are not repeated. "
        "*Efficiency against one GPU*: the time of the same documents, whole, on one such GPU, over the number of "
        "GPUs times the time here. *Imbalance* is (max - mean) / max over ranks. In the ablation `auto` runs under "
        "the same rules; its rungs are not judged.",
        f"**Why ratios are not the published ones** (`fcp` {span(speed)}, published 1.13 to 2.21): MagiAttention, "
        "its strongest rival, is left out, because its dealing simulates within 10 % of its [published "
        "rates](published.md) at 16 and 32 GPUs, but not at 64. Among the others, `wlb` (WLB-LLM) gathers all keys "
        "over all ranks (a gather in smaller groups is among the fixed methods), and `hdp` (ByteScale) sends keys to "
        "every rank that reads them, without the relays inside a node that `auto` has. "
        f"Over the best fixed method, which the paper does not have, `fcp` reaches {span(fixed)}. "
        "Equal documents have 131,072 tokens because a ring then comes nearest to the published one.",
        "**The last rung is not reproduced**: the published step gains, from 0.70 to 0.75; here MFU is "
        f"{span(fourth)} before it and {span(last)} after. Here rungs 1 to 4 place tokens freely and need no "
        "reshuffle, the move of queries, keys and outputs between the model's order of tokens and attention's. The "
        "fifth keeps tokens in contiguous order and pays for the reshuffle without hiding it, while FCP hides it "
        "behind local work.",
    ]
    boxed = order(rows)
    return [*texts, boxed] if boxed else texts


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
        "Rows are ordered by subject. `dhp` has its packing and its dynamic program. Devices are like an Ascend "
        "910B, with 8,192 tokens each. The paper compares with Megatron-LM (rings) and DeepSpeed (Ulysses), whose "
        "degrees it does not state in full: here each has the best degree for all batches. Ulysses can use as many "
        "ranks as there are query heads; 28 heads allow only 2 and 4 among the powers of two. `qwen2.5-vl-7b` in "
        "*throughput* and *scaling* is the language model alone, causal; models with their encoders are in *video*, "
        "on 16 devices only. *First version*: of the preprint; later ones have other numbers.",
        f"**Why gains are not the published ones.** `dhp` reaches here, from 8 to 64 devices: {'; '.join(gains)}. "
        "Ulysses with 28 heads ends at 4 ranks, too few for a long document; over it the gain is largest. `usp`, "
        f"heads and a ring, which the paper does not compare with, is the strongest fixed method in {_usp(rows)} "
        "cases: a head group moves fewer bytes across nodes, while under `dhp` short documents that are packed with a "
        "long one inherit its degree. A fixed degree is chosen here with all batches known and without a limit of "
        "memory; a real one must hold the longest document of the data set. Its batches and their lengths are not "
        "published. Tokens a second fall with more devices also because longer documents then fit into a batch, and "
        "their work grows with the square of their length; with documents cut at the batch of 8 devices a device keeps "
        f"{_kept(rows)} of its tokens a second on the most devices.",
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
    same = [row for row in rows if row.part.startswith("libra256k cut")]
    shares = [
        last / first
        for first, last in ((same[0].planner, same[-1].planner), (same[0].auto, same[-1].auto))
        if first is not None and last is not None
    ]
    return f"{shares[0]:.0%} (`auto` {shares[1]:.0%})"
