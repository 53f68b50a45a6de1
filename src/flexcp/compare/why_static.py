"""Why the advice is to stay static: a clause that follows from the times that were simulated.

What a plan takes beyond perfectly divided compute has four parts, which add up: compute of its slowest rank beyond the
mean of all ranks (*uneven*), *waiting* for other ranks and their transfers, exposed gradient *sync*, and work that
perfectly divided compute does not have (*overhead*: row tiles that multiply where documents are cut, compute slowed by
transfers beside it, collectives of tensor parallelism). The clause gives those of the static method and of the best
plan, and the way out is the one for the largest part that the best plan still has.
"""

from __future__ import annotations

from flexcp.compare.advice import Advice, Answer

SMALL_SHARE = 0.05
"""Attention under this share of the step leaves nothing to gain."""

WAY_OUT = {
    "uneven": (
        "more tokens a pass, or a larger --max-tokens-per-rank, would leave more room to divide these documents evenly"
    ),
    "waiting": "faster links or more tokens a pass would help",
    "sync": "more tokens a pass would hide more of the gradient sync",
    "overhead": "no plan that was looked at takes that away",
}
"""What would help against the largest part of what a plan loses."""


def why_static(advice: Advice) -> str:
    """Why nothing is to be gained beyond the cost model's error, as far as can be told; to be read behind "because"."""
    static, bound = advice.static, max(advice.bound_ns, 1)
    if advice.question.cluster.ranks == 1:
        return "there is one rank, so nothing has to be divided"
    equal = len(advice.lengths) > 1 and len(set(advice.lengths)) == 1
    if equal and static.compute_imbalance <= 1 + advice.margin and static.share("wait") <= advice.margin:
        return (
            f"all documents have {advice.lengths[0]:,} tokens, so equal shares of documents are equal work: "
            f"{static.name} gives no rank more than {100 * (static.compute_imbalance - 1):.1f} % over the mean"
        )
    times = static.total_ns / bound
    if times <= 1 + advice.margin:
        longer = f"{100 * max(0.0, times - 1):.0f} % longer"
        return f"{static.name} takes only {longer} on these documents than all compute divided perfectly over the ranks"
    attention = static.share("attention") + static.share("wait")
    if attention < SMALL_SHARE:
        return (
            f"attention, waiting included, is {100 * attention:.1f} % of the step; other layers take "
            f"{100 * static.share('linear'):.0f} % and exposed gradient sync {100 * static.share('sync'):.0f} %"
        )
    best = min((a for a in (static, advice.swap, advice.free) if a is not None), key=lambda a: a.total_ns)
    how = f"{static.name} takes {times:.1f} times as long as perfectly divided compute, "
    if best is static:
        how += f"and no plan is faster: of its pass {_words(advice, static)}"
    else:
        how += (
            f"and the best plan, {best.name}, {best.total_ns / bound:.1f} times: of {static.name}'s pass "
            f"{_words(advice, static)}; of {best.name}'s {_words(advice, best)}"
        )
    parts = losses(best, advice.bound_ns)
    return f"{how}; {WAY_OUT[max(parts, key=parts.__getitem__)]}"


def losses(answer: Answer, bound_ns: int) -> dict[str, float]:
    """What an answer takes beyond perfectly divided compute, as shares of its time.

    They add up to all of it, unless the slowest rank computes less than the mean and waits for the others: then waiting
    and sync, which are those of the answer wherever it is shown, are more.
    """
    waiting, sync = answer.share("wait"), answer.share("sync")
    computed = max(0.0, 1 - bound_ns / max(answer.total_ns, 1) - waiting - sync)
    uneven = min(max(0.0, answer.uneven), computed)
    return {"uneven": uneven, "waiting": waiting, "sync": sync, "overhead": computed - uneven}


def _words(advice: Advice, answer: Answer) -> str:
    lost = {part: f"{100 * share:.0f} %" for part, share in losses(answer, advice.bound_ns).items()}
    more = "collectives of tensor parallelism and other work" if advice.question.tp > 1 else "work"
    return (
        f"{lost['uneven']} is compute of the slowest rank beyond the mean ({answer.busiest_words} "
        f"{answer.compute_imbalance:.2f} times the mean's attention), {lost['waiting']} waiting for others, "
        f"{lost['sync']} gradient sync and {lost['overhead']} {more} that perfectly divided compute does not have"
    )
