"""Texts of the page of the three papers: how settings differ from the papers', and why numbers do.
Numbers in them are of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from papers_dcp import ALL, GROUPS
from papers_dhp import CASES
from papers_rows import SAME, Row, span

LEGEND = (
    "- *Their planner here*: the paper's planner, run by flexcp's executor on the simulator. *As above*: the same "
    "batches and planners were judged in an earlier row. -: nothing to compare.",
    "- *Over static*: the time of the best fixed method (data parallelism, rings, gathers, Ulysses, heads x ring, of "
    "any degree, documents dealt by tokens or by load) over `auto`'s: *of each batch* the best for that batch, *one "
    "fixed* the best for all batches of the row.",
    "- *Batches*: how many drawn batches a row is of. *Counted in plans*: bytes or work of the plan, nothing is timed. "
    "`usp:2,8`: groups of 16 ranks, heads over 2 and a ring of 8; `ulysses:d`, `zigzag:d`, `ring:d`: over d ranks.",
    "- Lengths: *lognormal16k* and *bimodal* (means of 16K, and of 16K and 64K tokens, FCP's two sets), *libra256k* "
    "(mixture with Libra's published percentiles, up to 256K), *video* (clips of 2K to 128K tokens, our choice), *web* "
    "(web documents in MagiAttention's bins), *unbalanced* (one document with half of all tokens beside `web`, our "
    "reading of DHP's extremely unbalanced batches), *equal*.",
)


def intro() -> str:
    """What the page is, and what it cannot say."""
    return (
        "Figures and tables of the three papers: what they published, what their planner reaches here and what `auto` "
        "does. Times are the event simulator's with the analytic cost model ([errors](errors.md)). A published number "
        "was measured on other machines and stands beside for orientation. Their planners run on flexcp's executor, so "
        "a row compares plans. **`auto` chooses among plans by the very simulator that judges them here, and the "
        "papers' planners do not: its lead is an upper bound**, and smaller than the simulator's own errors in many "
        "rows. `auto` looks for the least time and may move more bytes or take longer to plan for it. *Same* is "
        f"within {SAME:.0%}. A comparison is judged once, in its first row. [The papers](../papers.md) says where each "
        "mechanism is."
    )


def dcp(rows: Sequence[Row]) -> list[str]:
    """DCP's: settings, then why."""
    micro = [row.base_off for row in rows if row.part == ALL and row.base_off is not None]
    of_dcp = [
        (1 + row.base_off) * row.theirs / row.planner
        for row in rows
        if row.part == ALL and row.base_off is not None and row.planner and not isinstance(row.theirs, str)
    ]
    groups = [row.planner for row in rows if row.figure == "12a" and row.part == GROUPS and row.planner is not None]
    steps = [1 + row.base_off for row in rows if row.figure == "14" and row.base_off is not None]
    return [
        "Figures as its artifact numbers them; the arXiv version counts one more from 12 on. `dcp` cuts its hypergraph "
        "from nothing. Settings are read from its public code (benchmarks/papers_dcp.py): baselines have one degree "
        "for the run, by the longest document of the data set; DCP has the best of its block sizes, but its second "
        "node tolerance, 1.6, is not tried; end to end a batch has as many tokens as its longest document may have, "
        "and Megatron-LM context parallelism over all 16 ranks. Tensor parallelism of 4 is one rank four times as "
        "fast, its collectives left out. Lengths are drawn like its data sets', not from them.",
        "Published ratios of 12a are of the milliseconds in its artifact's reference figures (4 x 8 A100), where DCP "
        "loses on long LongAlign documents: 0.69 and 0.87 lie outside the 1.19 to 2.45 of its abstract, which is of 4 "
        "x 4 A100 with one card a node. (*Range*): the abstract's range over all cells of the kind; bars of 12b, 13, "
        "15 and of two masks of 14 were not read. Figures 1 and 21 are here of one length and one batch.",
        "**Why ratios are not the published ones.** Over all 32 ranks the fastest baseline of 12a is off its published "
        f"time by {span(micro, '{:+.0%}'.format)}: one flat ring is bound by the network here and takes the same at "
        "every scale, while the published times fall with the scale. LoongTrain's double ring, which uses all cards of "
        f"a node at once, is such a flat ring here. `dcp` itself takes {span(of_dcp)} of its published time, least on "
        "short documents: its instructions, buffers and transfers are not simulated, and nobody here measured them. So "
        "most ratios are too large from both sides. That two ranks share a 100 Gb/s card, and 262,144 as a second "
        "reading of LongAlign's longest document, were chosen with published times in sight. Where that document is "
        "64K (*LongAlign in groups*), baselines run in groups of 8 and 16 ranks, far below the published times, and "
        f"`dcp` reaches {span(groups)} in 12a; its one weight for tokens and work leaves a rank two to three times the "
        "mean of work.",
        f"End to end Megatron-LM's steps take {span(steps)} of the published seconds here: tensor parallelism's "
        "collectives, the optimiser and the host's own time are left out. Waits of Megatron-LM are larger here than "
        "the published 27.7 to 44.6 %: our network model, not theirs, decides that, and gains at 131,072 tokens are "
        "too large with it.",
    ]


def fcp(rows: Sequence[Row]) -> list[str]:
    """FCP's."""
    speed = [row.planner for row in rows if row.figure == "speed" and row.planner is not None]
    last = [
        row.planner for row in rows if row.figure == "ablation" and row.part == "reshuffle" and row.planner is not None
    ]
    fourth = [
        row.planner for row in rows if row.figure == "ablation" and row.theirs == 0.70 and row.planner is not None
    ]
    return [
        "By subject. `fcp:4096` has its blocks, bin-packing, rounds and coalescing. How far a rank may be over the "
        "mean of tokens, and that long documents are cut into equal blocks, were chosen with its published imbalance "
        "in sight: agreement there is no evidence. GPUs are H20-like, our assumption, with a kernel at 0.80 of peak, "
        "derived from its published figures; other machines are not repeated. *Efficiency against one GPU*: the time "
        "of the same documents, whole, on one such GPU, over the number of GPUs times the time here. *Imbalance* is "
        "(max - mean) / max over ranks. In the ablation `auto` runs under the same rules.",
        f"**Why ratios are higher** (`fcp` {span(speed)}, published 1.13 to 2.21): MagiAttention, its strongest rival, "
        "is left out, because its dealing simulates within 10 % of its [published rates](published.md) at 16 and 32 "
        "GPUs, not at 64. Of the others `wlb` (WLB-LLM) gathers all keys over all ranks, and `hdp` (ByteScale) sends "
        "keys to every rank that reads them, without the relays inside a node that `auto` has. Equal documents have "
        "131,072 tokens because a ring then comes nearest to the published one.",
        f"**The last rung is not reproduced**: the published step gains, from 0.70 to 0.75; here MFU is {span(fourth)} "
        f"before it and {span(last)} after. "
        "Here rungs 1 to 4 place tokens freely and pay nothing at the *door*, where queries, keys and outputs are "
        "moved between the model's order of tokens and attention's; the fifth keeps them in contiguous order and pays "
        "the door unhidden, while FCP hides it behind local work.",
    ]


def dhp(rows: Sequence[Row]) -> list[str]:
    """DHP's."""
    gains = []
    for whose, who in (
        ("Megatron-LM", "Megatron-LM's rings"),
        ("DeepSpeed", "DeepSpeed's Ulysses"),
        ("any fixed", "the best fixed method"),
    ):
        parts = [f"{_gain(rows, name, whose)} on {name}" for _, name in CASES]
        gains.append(f"over {who} {', '.join(parts)}")
    return [
        "By subject. `dhp` has its packing and its dynamic program. Devices are like an Ascend 910B, 8,192 tokens "
        "each. The paper compares with Megatron-LM (rings) and DeepSpeed (Ulysses), whose degrees it does not give in "
        "full: here each in the best degree for all batches. Ulysses has up to as many ranks as query heads; 28 heads "
        "allow only 2 and 4 of the powers of two. `qwen2.5-vl-7b` in *throughput* and *scaling* is the language model "
        "alone, causal; models with their encoders are in *video*, on 16 devices only. *First version*: of the "
        "preprint; later ones have other numbers.",
        f"**Why gains are not the published ones.** `dhp` reaches here, from 8 to 64 devices: {'; '.join(gains)}. "
        "Ulysses of 28 heads ends at 4 ranks, too few for a long document: there it gains most. `usp`, heads and a "
        "ring, which the paper does not compare with, is mostly the strongest fixed method: a head group moves fewer "
        "bytes across nodes, and short documents packed beside a long one inherit its degree under `dhp`. A fixed "
        "degree is chosen here with all batches known and without a limit of memory; a real one must hold the longest "
        "document of the data set. Its batches and their lengths are not published. Tokens a second fall with more "
        "devices also because longer documents then fit a batch, whose work grows with their square.",
        "*Solver*: without a cap `dhp` solves for up to six memories and takes the fastest; the published 20 to 86 ms "
        "are of its solver on their CPU. *Cost model*: its closed form for the slowest group against events of the "
        "same plan; the published error is against measured time, which is not here.",
    ]


def _gain(rows: Sequence[Row], name: str, whose: str) -> str:
    some = [
        row for row in rows if row.figure == "throughput" and row.part == f"over {whose}" and f", {name}, " in row.cell
    ]
    return span([row.planner for row in some if row.planner is not None])
