"""Text: a plan as a heading, as a line for logs, and as a picture.

The picture shows which rank keeps and computes what, with the work and bytes of each rank. Ranks are shown as one
character of :data:`DIGITS`; ``MANY`` stands for several ranks and ``.`` for none.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.totals import imbalance
from flexcp.io.sizes import count_of, size
from flexcp.io.terminal_text import visible
from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
WIDTH = 64
MANY = "*"


def label(plan: Plan) -> str:
    """Return the strategy for headings: ``blocks``, or ``auto: blocks`` if ``auto`` chose it."""
    return f"auto: {plan.strategy}" if plan.requested == "auto" else plan.strategy


def one_line(plan: Plan) -> str:
    """Return the plan as one line for logs, which ``repr(plan)`` and f-strings show."""
    return f"<Plan {label(plan)} {plan.hash[:12]}: {plan.batch.tokens} tokens on {plan.ranks} ranks>"


def explanation(plan: Plan) -> str:
    """Return one line about the strategy: what ``auto`` chose, over what and by how much, or the planner's note.

    Without a note it says that the strategy was asked for.
    """
    if not plan.placement.note:
        return f"{plan.requested}, as asked"
    if plan.requested == "auto":
        return f"auto took {plan.placement.note}"
    return f"{plan.requested}: {plan.placement.note}"


def picture(plan: Plan) -> str:
    """Return what ``print(plan)`` shows.

    It is a strip of the stream by the ranks that keep it, the attention matrix of the longest document by the ranks
    that compute it, and a line per rank.
    """
    note = [visible(explanation(plan))] if plan.placement.note else []
    parts = [visible(_title(plan)), *note, "", *_strip(plan), "", *_rows(plan), "", *_table(plan)]
    return "\n".join(parts)


def _title(plan: Plan) -> str:
    """Return the first line of the picture: hash, strategy, cluster, documents, tokens, heads and masks."""
    batch = plan.batch
    masks = ", ".join(f"{m.name}: {m.rules[0] if len(m.rules) == 1 else 'one per document'}" for m in batch.masks)
    return (
        f"plan {plan.hash[:12]}: {plan.label} on {plan.cluster}; {count_of(batch.documents, 'document')}, "
        f"{count_of(batch.tokens, 'token')}{f' and {plan.placement.pads} pads' if plan.placement.pads else ''}; "
        f"{plan.shape.heads} / {plan.shape.kv_heads} heads of {plan.shape.head_dim}; {masks}"
    )


def _letter(ranks: Ints) -> str:
    """Return the character for a cell of the picture that these ranks keep or compute, ``*`` for several."""
    if len(ranks) == 0:
        return "."
    return MANY if (ranks != ranks[0]).any() else DIGITS[int(ranks[0]) % len(DIGITS)]


def _strip(plan: Plan) -> list[str]:
    """Return two lines over the stream from left to right: where documents begin, and which rank keeps the tokens."""
    kept, stream = plan.placement.kept, plan.placement.stream
    columns = min(WIDTH, stream)
    edges = np.arange(columns + 1) * stream // columns
    owners = [
        _letter(kept.rank[np.searchsorted(kept.stop, a, "right") : np.searchsorted(kept.start, b, "left")])
        for a, b in pairwise(edges)
    ]
    inside = np.diff(np.searchsorted(plan.batch.starts[:-1], edges))
    borders = ["|" if n == 1 else " " if n == 0 else ":" for n in inside]
    several = f"   ({MANY} for several ranks)" if MANY in owners else ""
    return ["documents  " + "".join(borders), "kept by    " + "".join(owners) + several]


def _rows(plan: Plan) -> list[str]:
    """Return the attention matrix of the longest document; a cell shows the rank that computes it.

    The matrix is that of the first mask and the first head.
    """
    document = int(np.argmax(plan.batch.lengths))
    length = int(plan.batch.lengths[document])
    cells = min(24, length)
    edges = np.arange(cells + 1) * length // cells
    regions = plan.placement.regions[0]
    regions = regions.take((regions.document == document) & (regions.h0 == 0))
    row, column = np.divmod(np.arange(cells * cells), cells)
    top, bottom, left, right = edges[row], edges[row + 1], edges[column], edges[column + 1]
    cell, region = np.nonzero(
        (regions.q0 < bottom[:, None])
        & (regions.q1 > top[:, None])
        & (regions.k0 < right[:, None])
        & (regions.k1 > left[:, None])
    )
    near = regions.take(region)
    index, _ = plan.batch.masks[0].cuts(
        near.document,
        np.maximum(near.q0, top[cell]),
        np.minimum(near.q1, bottom[cell]),
        np.maximum(near.k0, left[cell]),
        np.minimum(near.k1, right[cell]),
    )
    ranks = np.split(near.rank[index], np.searchsorted(cell[index], np.arange(1, cells * cells)))
    letters = np.array([_letter(found) for found in ranks]).reshape(cells, cells)
    split = bool((plan.placement.regions[0].h0 > 0).any())
    of_what = "who computes its first head" if split else "who computes them"
    several = f" ({MANY} for several ranks)" if (letters == MANY).any() else ""
    title = f"document {document} ({length} tokens), rows down, keys right, by {of_what}{several}:"
    return [title, *("   " + " ".join(line) for line in letters)]


def _table(plan: Plan) -> list[str]:
    """Return a line with tokens, work, bytes and memory for each rank (32 at most), and a line of totals.

    Work is that of all layers; bytes are those of one layer of the first mask.
    """
    work, tokens = plan.work_of_layers(), plan.placement.tokens
    forward, backward = plan.bytes(), plan.bytes(backward=True)
    mean = max(1.0, float(work.mean()))
    lines = ["rank    tokens   work/mean   sent fwd   received fwd   sent bwd   received bwd     memory"]
    shown = range(plan.ranks) if plan.ranks <= 32 else [*range(16), *range(plan.ranks - 16, plan.ranks)]
    last = -1
    for r in shown:
        if r != last + 1:
            lines.append(f"  ... {r - last - 1} more ...")
        last = r
        lines.append(
            f"{DIGITS[r % len(DIGITS)]} {r:>3} {int(tokens[r]):>8} {work[r] / mean:>11.3f} "
            f"{size(forward[r].sum()):>10} {size(forward[:, r].sum()):>14} {size(backward[r].sum()):>10} "
            f"{size(backward[:, r].sum()):>14} {size(plan.memory(r).total):>10}"
        )
    lines.append(
        f"all   {int(tokens.sum()):>8}   imbalance: compute {imbalance(work):.3f}, tokens {imbalance(tokens):.3f}; "
        f"forward {size(forward.sum())} ({size(plan.inter_node_bytes())} between nodes), backward "
        f"{size(backward.sum())}"
    )
    if len(plan.batch.masks) > 1:
        lines.append(
            f"      bytes are of one layer of the mask {plan.batch.masks[0].name!r}, the first of "
            f"{len(plan.batch.masks)}"
        )
    return lines
