"""The reason for the advice to stay static, as a clause made from the simulated times.

The time of a plan beyond perfectly divided compute has four parts: compute of its slowest rank beyond the mean of all
ranks (*uneven*); *waiting* for other ranks and their transfers; exposed gradient *sync*; and *overhead*, work that
perfectly divided compute does not have (more row tiles where documents are cut, compute slowed by simultaneous
transfers, collectives of tensor parallelism). The clause lists these parts for the static method and for the best plan,
and ends with a remedy for the largest part of the best plan.
"""

from __future__ import annotations

from flexcp.compare.advice import Advice, Answer
from flexcp.io.decimals import beside

SMALL_SHARE = 0.05
"""If attention takes less than this share of the step (0 to 1), there is nothing to gain."""

WAY_OUT = {
    "uneven": (
        "more tokens a pass, or a larger --max-tokens-per-rank, would leave more room to divide these documents evenly"
    ),
    "waiting": "faster links or more tokens a pass would help",
    "sync": "more tokens a pass would hide more of the gradient sync",
    "overhead": "no plan that was looked at takes that away",
}
"""Remedies in words, by the largest part of a plan's lost time."""


def why_static(advice: Advice) -> str:
    """Return why no plan gains more than the cost model's error, as a clause to be read after "because"."""
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
        longer = f"{beside(100 * advice.margin, 100 * max(0.0, times - 1), 0)} % longer"
        return f"{static.name} takes only {longer} on these documents than all compute divided perfectly over the ranks"
    attention = static.share("attention") + static.share("wait")
    if attention < SMALL_SHARE:
        return (
            f"attention, waiting included, is {100 * attention:.1f} % of the step; the rest of each layer takes "
            f"{100 * static.share('linear'):.0f} % and exposed gradient sync {100 * static.share('sync'):.0f} %"
        )
    best = min((a for a in (static, advice.swap, advice.free) if a is not None), key=lambda a: a.total_ns)
    how = f"{static.name} takes {times:.2f} times as long as perfectly divided compute, "
    if best is static:
        how += f"and no plan is faster: of its pass {_words(advice, static)}"
    else:
        how += (
            f"and the best plan, {best.name}, {best.total_ns / bound:.2f} times: of {static.name}'s pass "
            f"{_words(advice, static)}; of {best.name}'s {_words(advice, best)}"
        )
    parts = losses(best, advice.bound_ns)
    return f"{how}; {WAY_OUT[max(parts, key=parts.__getitem__)]}"


def losses(answer: Answer, bound_ns: int) -> dict[str, float]:
    """Return the parts of an answer's time beyond perfectly divided compute, as shares of its whole time (0 to 1).

    ``bound_ns`` is the time of perfectly divided compute. The parts are ``uneven``, ``waiting``, ``sync`` and
    ``overhead``. They add up to the whole loss, except when the slowest rank computes less than the mean and waits for
    the others. Waiting and sync are then not reduced, so that they agree with what is shown elsewhere, and the sum is
    larger.
    """
    waiting, sync = answer.share("wait"), answer.share("sync")
    computed = max(0.0, 1 - bound_ns / max(answer.total_ns, 1) - waiting - sync)
    uneven = min(max(0.0, answer.uneven), computed)
    return {"uneven": uneven, "waiting": waiting, "sync": sync, "overhead": computed - uneven}


def _words(advice: Advice, answer: Answer) -> str:
    """Return the parts of an answer's lost time in words."""
    lost = {part: f"{100 * share:.0f} %" for part, share in losses(answer, advice.bound_ns).items()}
    more = "collectives of tensor parallelism and other work" if advice.question.tp > 1 else "work"
    return (
        f"{lost['uneven']} is compute of the slowest rank beyond the mean ({answer.busiest_words} "
        f"{answer.compute_imbalance:.2f} times the mean's attention), {lost['waiting']} waiting for others, "
        f"{lost['sync']} gradient sync and {lost['overhead']} {more} that perfectly divided compute does not have"
    )
