"""A plan as a section of a report: its batch, who keeps and computes what, where the time goes, and what moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flexcp.arrays.totals import imbalance
from flexcp.io.sizes import size
from flexcp.known_errors.words import in_a_sentence, off_words
from flexcp.plan.plan import Plan
from flexcp.plan.text import explanation
from flexcp.report.markup import choice, figure, folded, paragraphs, table, tiles
from flexcp.report.plan_data import drawn_documents, plan_data
from flexcp.report.plan_time import PlanTime
from flexcp.report.sections import KEYS, Section
from flexcp.report.timeline import Bar, timeline_data, timeline_figure
from flexcp.report.trees import tree_data, tree_figure
from flexcp.schedule.predict import predict

MOST_DOCUMENTS = 200
"""The most documents in a drop-down list or a table; the longest are taken."""
MOST_TRANSFERS = 500
"""The most pairs of ranks in the table of bytes; those with the most bytes are taken."""


def plan_section(
    plan: Plan, title: str | None = None, bars: Iterable[Bar] = (), timed: str = "", time: PlanTime | None = None
) -> Section:
    """Return a section that shows everything about a plan.

    ``bars`` are the bars of its timeline, which is left out without any, and ``timed`` is the caption of the timeline.
    ``time`` is where the time goes; by default all layers of the plan are simulated.
    """
    time = time or PlanTime.of_plan(plan)
    bound = time.perfect_ns(plan)
    data = {**plan_data(plan, time), "trees": tree_data(plan), "bound": bound, "timeline": timeline_data(bars)}

    def body(number: int) -> str:
        parts = [
            paragraphs([p for p in (time.says, explanation(plan) if plan.placement.note else "") if p]),
            _tiles(plan, time, bound),
            _legend(plan, number),
            _batch(plan, number),
            _kept(plan, number),
            tree_figure(plan, number) if data["trees"] else "",
            _matrix(plan, number),
            _traffic(plan, number),
            timeline_figure(number, data["timeline"], plan.ranks, timed) if data["timeline"]["labels"] else "",
            _balance(plan, number, time, bound),
        ]
        return "".join(parts)

    return Section(title or f"Plan: {plan.label} on {plan.cluster}", body, data)


def _tiles(plan: Plan, time: PlanTime, bound: int) -> str:
    forward, backward = int(plan.bytes().sum()), int(plan.bytes(backward=True).sum())
    return tiles(
        [
            ("documents", f"{plan.batch.documents:,}"),
            ("tokens", f"{plan.batch.tokens:,}" + (f" + {plan.placement.pads:,} pads" if plan.placement.pads else "")),
            ("ranks", f"{plan.cluster.nodes} x {plan.cluster.ranks_per_node}"),
            (f"simulated {time.what}", f"{time.total_ns / 1e6:,.2f} ms"),
            ("predicted for all layers, closed form", f"{_predicted_ns(plan) / 1e6:,.2f} ms"),
            ("over perfect compute", f"{time.total_ns / max(bound, 1):.3f} x"),
            ("compute, max / mean", f"{imbalance(plan.work_of_layers()):.3f}"),
            ("tokens, max / mean", f"{imbalance(plan.placement.tokens):.3f}"),
            ("bytes, forward / backward", f"{size(forward)} / {size(backward)}"),
            ("between nodes, forward", size(plan.inter_node_bytes())),
            ("plan", plan.hash[:12]),
        ]
    )


def _predicted_ns(plan: Plan) -> int:
    """Return the time of all layers by the formula that planners use, without vocabulary and gradient sync."""
    return predict(plan.placement, plan.shape, plan.cluster, plan.cost).total_ns


def _legend(plan: Plan, number: int) -> str:
    each = plan.cluster.ranks_per_node
    nodes = []
    for node in range(plan.cluster.nodes):
        buttons = "".join(
            f'<button type="button" data-rank="{r}" aria-pressed="false" aria-label="Show only rank {r}">{r}</button>'
            for r in range(node * each, (node + 1) * each)
        )
        nodes.append(f'<div class="node"><span>node {node}</span>{buttons}</div>')
    label = 'role="group" aria-label="Ranks: pick one to see it alone"'
    return f'<div class="legend" data-section="{number}" {label}>{"".join(nodes)}</div>'


def _batch(plan: Plan, number: int) -> str:
    lengths = plan.batch.lengths
    areas = plan.batch.weighted_rows_area(np.arange(len(lengths), dtype=np.int64), np.zeros_like(lengths), lengths)
    order = np.argsort(-lengths, kind="stable")
    total_pairs, tokens = max(int(areas.sum()), 1), int(lengths.sum())
    tenth = order[: max(1, len(order) // 10)]
    says = (
        f"{len(lengths):,} documents of {int(lengths.min()):,} to {int(lengths.max()):,} tokens, median "
        f"{int(np.median(lengths)):,}. The longest tenth holds {100 * int(lengths[tenth].sum()) / tokens:.0f} % of the "
        f"tokens and {100 * int(areas[tenth].sum()) / total_pairs:.0f} % of the attention."
    )
    rows = [
        [int(d), int(lengths[d]), round(100 * int(lengths[d]) / tokens, 3), round(100 * int(areas[d]) / total_pairs, 3)]
        for d in order[:MOST_DOCUMENTS]
    ]
    caption = f"The {min(len(order), MOST_DOCUMENTS)} longest documents"
    behind = folded("As a table", table(["document", "tokens", "% of tokens", "% of attention"], rows, caption))
    return figure(
        "batch",
        number,
        title="The batch",
        says=says,
        caption=f"{says} Bars: tokens of each document, longest first, on a logarithmic scale.",
        behind=behind,
    )


def _kept(plan: Plan, number: int) -> str:
    tokens, runs = plan.placement.tokens, plan.placement.runs
    counts = np.bincount(runs.rank, minlength=plan.ranks)
    rows = [[r, r // plan.cluster.ranks_per_node, int(tokens[r]), int(counts[r])] for r in range(plan.ranks)]
    says = f"ranks keep {int(tokens.min()):,} to {int(tokens.max()):,} tokens in {len(runs):,} runs."
    caption = (
        "The stream from left to right: documents, the rank that keeps each part, and below a line for every rank."
    )
    if len(drawn_documents(plan)) < plan.batch.documents:
        caption += " Striped: short documents cut into too many parts to draw here."
    behind = folded("As a table", table(["rank", "node", "tokens", "runs"], rows, "Tokens and runs of every rank"))
    return figure("kept", number, title="Who keeps what", says=says, caption=caption, behind=behind)


def _matrix(plan: Plan, number: int) -> str:
    drawn = drawn_documents(plan)
    lengths = plan.batch.lengths
    longest = drawn[np.argsort(-lengths[drawn], kind="stable")][:MOST_DOCUMENTS]
    documents: list[tuple[Any, str]] = [(int(d), f"{int(d)} ({int(lengths[d]):,} tokens)") for d in longest]
    if len(documents) > 1:
        documents.append((-1, "all, along the diagonal"))
    tools = choice("document", "Document", documents) + _masks(plan) + choice("head", "Query head from", [(0, "0")])
    work = plan.work()
    mean = max(float(work.mean()), 1.0)
    rows: list[list[str | int | float]] = [
        [r, int(work[r]), round(float(work[r]) / mean, 3), int(np.count_nonzero(plan.placement.regions[0].rank == r))]
        for r in range(plan.ranks)
    ]
    says = f"compute of ranks is {float(work.min()) / mean:.3f} to {float(work.max()) / mean:.3f} of the mean."
    caption = (
        "Rows (queries) down, keys right: each part in the colour and with the number of the rank that computes it. "
        "Grey is masked."
    )
    behind = folded(
        "As a table",
        table(["rank", "pairs x query heads", "of the mean", "regions"], rows, "Attention of every rank, first mask"),
    )
    return figure(
        "matrix", number, title="Who computes what", says=says, caption=caption, behind=behind, tools=tools, half=True
    )


def _masks(plan: Plan) -> str:
    if len(plan.batch.masks) == 1:
        return ""
    return choice("mask", "Mask", [(i, f"{m.name} ({m.layers} layers)") for i, m in enumerate(plan.batch.masks)])


def _balance(plan: Plan, number: int, time: PlanTime, bound: int) -> str:
    rows = [
        [
            r,
            round(int(time.rank_ns[r]) / 1e6, 3),
            round(int(time.attention_ns[r]) / 1e6, 3),
            round(int(time.exposed_ns[r]) / 1e6, 3),
            round(int(time.linear_ns[r]) / 1e6, 3),
        ]
        for r in range(plan.ranks)
    ]
    layers = sum(m.layers for m in plan.batch.masks)
    says = (
        f"simulated {time}; perfectly divided compute alone would take {bound / 1e6:.3f} ms. The closed form, by which "
        f"planners compare placements, predicts {_predicted_ns(plan) / 1e6:.3f} ms for all layers."
    )
    caption = (
        f"Simulated time of every rank, forward and backward of {layers} layer{'s' if layers > 1 else ''}. Dashed: all "
        f"compute divided perfectly. {in_a_sentence(off_words(plan.cost))}"
    )
    headers = ["rank", "ms", "attention ms", "waiting ms", "rest ms"]
    behind = KEYS + folded("As a table", table(headers, rows, "Simulated time of every rank"))
    return figure("balance", number, title="Where the time goes", says=says, caption=caption, behind=behind, zoom=False)


def _traffic(plan: Plan, number: int) -> str:
    rows: list[list[str | int | float]] = []
    for backward in (False, True):
        matrix = plan.bytes(backward)
        source, target = np.nonzero(matrix)
        rows += [
            ["backward" if backward else "forward", int(s), int(t), int(matrix[s, t])]
            for s, t in zip(source, target, strict=True)
        ]
    rows.sort(key=lambda row: -int(row[3]))
    forward = plan.bytes()
    says = (
        f"one layer moves {size(forward.sum())} forward and {size(plan.bytes(True).sum())} backward; "
        f"{size(plan.inter_node_bytes())} of the forward cross nodes."
    )
    tools = choice("direction", "Direction", [(0, "forward"), (1, "backward")]) + _masks(plan)
    caption = "Senders down, receivers right; the darker, the more bytes. Lines part nodes."
    shown = f"The {min(len(rows), MOST_TRANSFERS)} largest of {len(rows):,} pairs of ranks, first mask"
    behind = folded("As a table", table(["direction", "from", "to", "bytes"], rows[:MOST_TRANSFERS], shown))
    return figure(
        "traffic",
        number,
        title="Bytes between ranks",
        says=says,
        caption=caption,
        behind=behind,
        tools=tools,
        half=True,
    )
