"""Step mistakes: what a step notices about rows, labels and counts that are not what its plan expects.

Tensors do not show which tokens their rows belong to, so most of these are found by their numbers. What is certain
raises an error; what only seems so gives a warning. The host reads values on a CPU, and on a device only in the first
step of a group, because it has to wait for them there.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from flexcp.executor.losses.averaging import CountOfAllRanks, counted_rows, wrong_count
from flexcp.executor.losses.copied_labels import SHIFTED_TWICE
from flexcp.executor.losses.edges import predictions
from flexcp.executor.losses.loss_graph import cross_entropy_labels, embedded_ids
from flexcp.executor.run.rank_rows import local_stream
from flexcp.executor.step_handles import given_another, run_instead
from flexcp.plan.user_layouts import user_layout

if TYPE_CHECKING:
    from flexcp.executor.step import Step


def may_look_at(step: Step, x: Tensor) -> bool:
    """Return whether the host may read ``x``: always on a CPU, and on a device only in the first step of a group.

    On a device the host has to wait for the value.
    """
    return x.device.type == "cpu" or step.collectives.step == 1


def check_count(step: Step, count: Tensor | float) -> None:
    """Raise ValueError for a count that cannot be this rank's own.

    That is a negative or infinite one, a :class:`CountOfAllRanks`, or one above this rank's rows (in trees, above the
    positions predicted from them). With one rank only the first is looked for, and tensors that the host may not read
    are not checked.
    """
    is_at_hand = not isinstance(count, Tensor) or count.device.type == "cpu"
    if is_at_hand and not 0 <= float(count) < float("inf"):
        raise ValueError(
            f"step.share got the count {float(count):g}, and divides by the sum of all ranks' counts, 0 or more each: "
            "pass (labels != -100).sum(), or the sum of weights that are not negative"
        )
    if step.plan.ranks == 1 or (isinstance(count, Tensor) and not may_look_at(step, count)):
        return
    rows = int((step.tables.tokens >= 0).sum())
    if step.plan.batch.trees:  # a token counts once for each sequence that follows it
        rows = predictions(step.sequences, step.tables.tokens.numpy())
    if isinstance(count, CountOfAllRanks) or float(count) > max(1, rows):
        pads = step.local_tokens - int((step.tables.tokens >= 0).sum())
        raise ValueError(wrong_count(float(count), rows, step.plan.ranks, pads))


def warn_of_counted_rows(step: Step, total: Tensor, count: Tensor | float) -> None:
    """Warn if ``count`` is the number of rows of the cross entropy in ``total``, and some of them have no label."""
    labels = cross_entropy_labels(total)
    if not labels or not all(may_look_at(step, x) for x in (total, *(x for x, _ in labels))):
        return
    rows = sum(x.numel() for x, _ in labels)
    if float(count) not in (rows, int((step.tables.tokens >= 0).sum())):
        return
    valid = sum(int((x != ignore).sum()) for x, ignore in labels)
    if valid < float(count) and rows == step.local_tokens:
        warnings.warn(counted_rows(float(count), valid), stacklevel=3)


def warn_of_copied_labels(step: Step, labels: Tensor, ignore: int, logits: Tensor) -> None:
    """Warn if labels are the tokens themselves; only the first labels that the host may read are checked."""
    if step.seen.done or not may_look_at(step, labels):
        return
    own_cut = step.plan.ranks > 1 and _cut_by_hand_fits(step)

    def embedded() -> list[Tensor]:
        return [ids for ids in embedded_ids(logits) if may_look_at(step, ids)]

    found = step.seen.copied(labels, ignore, step.plan.batch, own_cut, embedded)
    if found is not None:
        warnings.warn(found, stacklevel=3)


def refuse_labels_shifted_twice(step: Step) -> None:
    """Raise ValueError if ``step.labels`` was given next tokens of the ids that this step has seen."""
    with step.collectives.checking("step.labels"):
        if step.seen.shifted_twice(step.tables.tokens.numpy(), step.plan.batch, lambda x: may_look_at(step, x)):
            raise ValueError(SHIFTED_TWICE)


def check_attended(step: Step, without_attention: bool) -> None:
    """Raise RuntimeError if this step's attention never ran, unless ``without_attention`` is True."""
    if not step.calls and not without_attention:
        other = run_instead(step)
        if other is not None:
            raise RuntimeError(
                f"a loss is asked of {step!r}, but its attention never ran. {given_another(other)}. Or pass "
                "without_attention=True if the logits come from elsewhere"
            )
        raise RuntimeError(
            f"a loss is asked of {step!r}, but its attention never ran: the model's layers still use their own. "
            "Turn flexcp on (docs/frameworks.md), or pass without_attention=True if the logits come from elsewhere"
        )


def warn_of_rows_nobody_asked_for(step: Step) -> None:
    """Warn if the user seems to have cut rows without the step and forgotten ``layout=``.

    Such rows would fit in number, but would not be the plan's. A tensor does not show which rows it holds. Labels
    at the ends of documents do not show it either, because some train on next tokens across documents. But rows of
    a plan that places tokens freely can only come from the step, so it suffices to know whether they were taken
    from it: by ``shard``, ``indices`` or ``restore``, or by the loader or a framework. ``positions`` and ``labels``
    do not count, because users who cut rows themselves take those from the step too. There is no warning if a
    layout was given, if the plan's rows are the contiguous part that everyone would cut, or if the number of rows
    does not fit a cut into equal parts. It is not an error, because rows may follow the plan although the step was
    not asked: on a later pipeline stage, or if they are random numbers.
    """
    if step.plan.ranks == 1 or step.asked_for_rows or _cut_by_hand_fits(step):
        return
    counts, tokens, ranks = step.plan.placement.tokens, step.plan.batch.tokens, step.plan.ranks
    if step.local_tokens in (tokens // ranks, -(-tokens // ranks)) or bool((counts == counts[0]).all()):
        warnings.warn(
            f"the plan gives rank {step.rank} tokens that are not part {step.rank} of {ranks} equal parts of the "
            "stream, and nothing has asked this step which: take them by step.shard(stream), and their positions "
            "from step.positions; or plan with layout='contiguous' if every rank cuts its own part of the stream "
            "('zigzag' or index arrays for other cuts). If the rows are the plan's after all, read step.indices "
            "once before attention to end this warning",
            stacklevel=2,
        )


def _cut_by_hand_fits(step: Step) -> bool:
    """Return whether rows that a user cuts without the step are the plan's.

    They are if the plan was made for the user's layout, or if this rank's rows are its contiguous part of the
    stream.
    """
    if step.plan.layout_given:
        return True
    maps = user_layout("contiguous", step.plan.batch.tokens, step.plan.ranks)
    return maps is not None and np.array_equal(local_stream(step.plan.placement, step.rank), maps[step.rank])
