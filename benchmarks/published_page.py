"""Tables of published and simulated figures, and the page of results that ``published.py`` writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date

from flexcp.calibration import Errors
from flexcp.known_errors.entries import KnownError
from lib.published_judging import APART, MISS, Pair, Result, Spread, pairs, spread
from lib.record_errors import record_errors
from published_parameters import show
from simulated import table

SAME_FIGURES = "the same figures with the papers' own planners, not counted"
KINDS: tuple[tuple[str, Callable[[Result], bool]], ...] = (
    ("source states its setting", lambda r: r.figure.stated),
    ("the same, nothing stands in for it", lambda r: r.figure.stated and not r.figure.assumed),
    ("source leaves something open", lambda r: not r.figure.stated),
    ("all", lambda r: True),
)


def figures_table(results: Sequence[Result]) -> list[str]:
    """Return a table with a row for every figure."""
    heads = [
        "line",
        "system",
        "cluster",
        "lengths",
        "method",
        "direction",
        "published",
        "simulated",
        "off by",
        "setting",
    ]
    later = {each.figure.again for each in results}
    return table(heads, [_row(each, each.line in later) for each in results])


def _row(each: Result, first_run: bool) -> list[str]:
    figure = each.figure
    scaled = f" x {figure.scale:g}" if figure.scale != 1 else ""
    rules = "".join(f", {name} {str(value).lower()}" for name, value in figure.rules)
    rules += ", merges" if figure.executor is not None else ""
    cells = [
        str(each.line),
        figure.system,
        figure.cluster,
        _lengths(each) + scaled,
        (each.method or " or ".join(figure.method)) + rules,
    ]
    cells += [figure.direction, f"{figure.value:g} {figure.unit}"]
    cells += ["refused", ""] if each.simulated is None else [f"{each.simulated:.3g}", f"{each.error:+.0%}"]
    setting = "assumed" if not figure.stated else "stated, stand-in" if figure.assumed else "stated"
    if figure.again is not None:
        return [*cells, f"{setting}; line {figure.again} again, not counted"]
    return [*cells, f"{setting}; first run" if first_run else setting]


def _lengths(each: Result) -> str:
    lengths = each.figure.lengths
    if isinstance(lengths, str):
        return lengths
    return f"{len(lengths)} batches" if len(lengths) > 1 else ", ".join(str(n) for n in lengths[0])


def summary(results: Sequence[Result]) -> list[str]:
    """Return tables of errors, and of order and ratios of pairs, by what the sources state and by source."""
    counted = counted_once(results)
    rows = [_errors(words, [r for r in counted if wanted(r)]) for words, wanted in KINDS]
    systems = sorted({_who(r) for r in counted})
    rows += [_errors(who, [r for r in counted if _who(r) == who]) for who in systems]
    again = [r for r in results if r.figure.again is not None]
    if again:
        first = {r.figure.again for r in again}
        rows.append(_errors("figures simulated again below, as first entered", [r for r in counted if r.line in first]))
        rows.append(_errors(SAME_FIGURES, again))
    lines = table(["figures", "simulated", "median error", "90th percentile", "worst"], rows)
    found = pairs(counted)
    rows = []
    for words, wanted in KINDS:
        some = [p for p in found if wanted(p.first) and wanted(p.second)]
        rows.append([words, str(len(some)), _right(some), *_cells(spread(p.error for p in some))])
    heads = [f"pairs of one setting, published {APART - 1:.0%} apart or more", "pairs", "order right"]
    return [*lines, *table([*heads, "median error of the ratio", "90th percentile", "worst"], rows)]


def counted_once(results: Sequence[Result]) -> list[Result]:
    """Return every published value once, by the line that was entered first."""
    return [r for r in results if r.figure.again is None]


def _who(each: Result) -> str:
    """Return the first words of the source."""
    return each.figure.source.split(",")[0].split(" (")[0].removeprefix("https://github.com/").removesuffix(" README")


def _errors(words: str, some: Sequence[Result]) -> list[str]:
    ran = [r for r in some if r.simulated is not None]
    return [words, f"{len(ran)} of {len(some)}", *_cells(spread(r.error for r in ran))]


def _cells(found: Spread | None) -> list[str]:
    return ["", "", ""] if found is None else [f"{x:.0%}" for x in (found.median, found.p90, found.worst)]


def _right(some: Sequence[Pair]) -> str:
    right = sum(p.is_right for p in some)
    return f"{right} ({right / len(some):.0%})" if some else ""


def record(results: Sequence[Result]) -> None:
    """Record the errors that flexcp prints."""
    today, found = date.today().isoformat(), []
    results = counted_once(results)
    for name, words in (("stated", KINDS[0][0]), ("all", KINDS[-1][0])):
        wanted = dict(KINDS)[words]
        figures = spread(r.error for r in results if wanted(r) and r.simulated is not None)
        some = [p for p in pairs(results) if wanted(p.first) and wanted(p.second)]
        ratios = spread(p.error for p in some)
        if figures is not None:
            found.append(KnownError(f"published, {name}", _rounded(figures), today))
        if ratios is not None:
            right = sum(p.is_right for p in some)
            found.append(KnownError(f"ratios, {name}", _rounded(ratios), today, pairs=len(some), right=right))
    record_errors(found)


def _rounded(found: Spread) -> Errors:
    return Errors(found.count, *(round(x, 5) for x in (found.median, found.p90, found.worst)))


def misses(results: Sequence[Result]) -> list[str]:
    """Return a table of every figure that is off by more than ``MISS`` or was refused, with its reason."""
    rows = []
    later = {each.figure.again: each.line for each in results if each.figure.again is not None}
    for each in results:
        if each.is_miss:
            off = "refused" if each.simulated is None else f"{each.error:+.0%}"
            reason = each.refused or each.figure.reason or "not known"
            again = f"; first run, again in line {later[each.line]}" if each.line in later else ""
            rows.append([str(each.line), each.figure.system, off, reason + again])
    return table(["line", "system", "off by", "reason"], rows) if rows else ["None.", ""]


def ratios_by_source(results: Sequence[Result]) -> list[str]:
    """Return a table of the ratios of every source with pairs, and the reason if one is off by more than ``MISS``."""
    rows = []
    found = pairs(counted_once(results))
    for who in sorted({_who(p.first) for p in found}):
        some = [p for p in found if _who(p.first) == who]
        missed = sum(abs(p.error) > MISS for p in some)
        why = RATIOS_MISS.get(who, "not known") if missed else ""
        middle = spread(p.error for p in some)
        assert middle is not None
        rows.append([who, str(len(some)), _right(some), f"{middle.median:.0%}", str(missed), why])
    heads = ["source", "pairs", "order right", "median error of the ratio", f"off by more than {MISS:.0%}", "why"]
    return table(heads, rows) if rows else ["None.", ""]


def assumptions(results: Sequence[Result]) -> list[str]:
    """Return a table of assumptions, each once for all lines that share it."""
    lines: dict[str, list[int]] = {}
    for each in results:
        if each.figure.assumed:
            lines.setdefault(each.figure.assumed, []).append(each.line)
    return table(["lines", "assumed, or standing in"], [[_ranges(numbers), words] for words, numbers in lines.items()])


def _ranges(numbers: Sequence[int]) -> str:
    """Write 3, 4, 5, 9 as '3 to 5, 9'."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts)


def page(results: Sequence[Result]) -> str:
    """Return the page of results."""
    lines = [
        "# Published figures, simulated",
        "",
        f"**Simulated**, by `make published` on {date.today().isoformat()}: {len(counted_once(results))} published "
        "figures (benchmarks/published.jsonl), each planned with the strategy that represents its method and run by "
        "the event simulator. Link speeds are NCCL's in public tables, and kernels have rates measured on one GPU; "
        "nothing is fitted to a figure that is counted. Figures and parameters were committed before the script "
        "first ran; settings of MagiAttention, DCP, FCP, DHP and Libra had been simulated earlier, by [their own "
        "scripts](experiments.md). `python benchmarks/published.py FILE` does the same with your own figures; the "
        "format is described at the top of benchmarks/lib/published_figures.py.",
        "",
        "A source *states its setting* if it names the GPU, the nodes, the network between them if there are "
        "several, heads, lengths or their distribution, mask and method. Something *stands in* if the setting is "
        "stated, but its data is not available here. Misses stay in every median.",
        "",
        "## How far off",
        "",
        *summary(results),
        *CHANGED,
        "## Every figure",
        "",
        *figures_table(results),
        f"## Figures off by more than {MISS:.0%}",
        "",
        *misses(results),
        "## Ratios of every source",
        "",
        *ratios_by_source(results),
        "## What was assumed",
        "",
        *assumptions(results),
        "## Parameters",
        "",
        "Sources are in benchmarks/published_parameters.py. Efficiencies (forward / backward) are per mille of the "
        "GPU's bf16 peak.",
        "",
        *(f"- {line}" for line in show()),
        "",
        MERGES,
        "",
        "Not entered are: striped attention (ring-flash-attention), which no strategy here represents; NeMo's FLOPs, "
        "whose formula is not stated; and a public table whose H100 rows repeat its 4090 rows.",
        "",
    ]
    return "\n".join(lines)


RATIOS_MISS = {
    "DCP": (
        "the artifact runs its baselines in groups, as many as the largest power of two not above 131,072 // longest "
        "document, with documents dealt to them greedily by tokens and rounded up to twice a group's ranks; its "
        "files do not state the longest document, so here all 32 ranks are one group. For LoongTrain it takes the "
        "best window of a double ring, for DCP the best block of 1,024, 2,048 and 4,096 tokens, and it drops batches "
        "that are less than 75 % full; here LoongTrain is one flat ring and every batch has 131,072 tokens. "
        "LoongTrain comes out too slow, plain rings and DCP too fast, and a ratio has both errors"
    ),
    "FCP": (
        "the length of its equal documents is not stated, and a ring depends on it; the lower rungs of the ablation "
        "are simulated too fast, so every step up is too small"
    ),
    "MagiAttention blog": (
        "the network between nodes is not stated; Megatron's hybrid is too fast at 16 GPUs and MagiAttention at 64"
    ),
    "zhuzilin/ring-flash-attention": (
        "zigzag over several documents is still too fast: the time that Python needs to issue the next kernel after "
        "each wait of the host is not published and not simulated"
    ),
}
"""Why ratios of a source miss, by the first words of the source."""

MERGES = (
    "*Merges*: figures with this mark are of ring-flash-attention, whose code sends keys from where they are and "
    "accumulates in float32 outside its kernels: after every step it reads the block's output in bfloat16 and reads "
    "and writes the accumulated one (10 bytes a number, and the LSEs), and in the backward the same for dq, dk and "
    "dv; a zigzag of several documents gathers halves by a mask and puts them back, and the host waits at each use "
    "of the mask. The count, step by step, is in benchmarks/published_merges.py; bytes move at the speed of copies, "
    "and a kernel or a wait costs the start of a kernel. LoongTrain is built on that code; its flat ring is bound by "
    "the network here, and its merges are not counted."
)

CHANGED = (
    "In the first run `minheap:2048` represented MagiAttention, with every key sent straight from its owner: off by "
    "-1 %, -35 %, -39 % and -21 % at 8, 16, 32 and 64 GPUs. Its charts are of its native group collectives, which "
    "cross to a node once, so `minheap:2048,relay` replaced it. Packing and merging were first priced as in our "
    "executor (median error 17 % if the setting is stated, Ulysses -20 % and MagiAttention -24 % at 8 GPUs). Other "
    "systems clear, merge and round in other ways outside their kernels, so for them only the copies of messages are "
    "now counted, in all figures alike. Ratios of stated settings were then off by 20 % in the median, and most of "
    "those near it had ring-flash-attention's zigzag on one side; the work of that library between its kernels is "
    "now priced from its code, in all its rings alike ([parameters](#parameters)). Its merge is assumed to be fused, "
    "because it is a scripted function; without fusion it would read and write 38 bytes a number, which gives 14 % "
    "for figures and 9 % for ratios of stated settings. These choices were made with knowledge of the figures.",
    "",
    "In the first run flexcp's own strategies represented three papers: `hypergraph` DCP, `minheap:4096` FCP and "
    "`groups` DHP; and Megatron-LM's degrees in DCP's end-to-end figures were treated as not stated. Those lines are "
    "marked *first run* and stay counted. flexcp now has the papers' planners, `dcp`, `fcp` and `dhp`, and DCP's "
    "public code gives Megatron-LM's degrees (`usp:2,8`) and batches (as many tokens as the longest document may "
    "have): the last lines simulate the same published values with them. They are not counted, because a published "
    "value counts once, by the line that was entered first; this was decided before they were simulated.",
    "",
)
