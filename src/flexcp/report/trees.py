"""The trees of a plan's batch: segments by depth and sequence, in the colours of the ranks that keep them.

A segment is a bar from the depth of its first token to that of its last, as high as the sequences through it: the lanes
of the segments that its subtree ends in. So a prompt is one tall bar, and what it is read by is what stands to its
right. Trees of very many segments are not drawn; beside others the caption counts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexcp.arrays.intervals import overlaps
from flexcp.masks import Tree
from flexcp.plan.plan import Plan
from flexcp.report.markup import choice, figure, folded, table

MOST_SEGMENTS = 4_000
"""Segments of all trees that a page draws: the largest trees first."""
MOST_ROWS = 500


def drawn_trees(plan: Plan) -> dict[int, Tree]:
    """The trees that are drawn, by document, the ones of most tokens first."""
    found: dict[int, Tree] = {}
    room = MOST_SEGMENTS
    for document in sorted(plan.batch.branches, key=lambda d: (-int(plan.batch.lengths[d]), d)):
        tree = next(tree for tree in plan.batch.branches[document] if tree is not None)
        if len(tree.parents) <= room:
            found[document] = tree
            room -= len(tree.parents)
    return found


def tree_data(plan: Plan) -> list[dict[str, Any]]:
    """For each tree its segments as columns, and the parts that ranks keep of them:
    (segment, rank, first and last token inside it).
    """
    runs = plan.placement.runs
    order = np.argsort(runs.start, kind="stable")
    rank, start, stop = (column[order] for column in (runs.rank, runs.start, runs.stop))
    found = []
    for document, tree in drawn_trees(plan).items():
        begin = int(plan.batch.starts[document]) + tree.starts
        segment, run = overlaps(begin, begin + tree.lengths, start, stop)
        lanes = _lanes(tree)
        found.append(
            {
                "document": document,
                "depth": tree.above.tolist(),
                "tokens": tree.lengths.tolist(),
                "parent": tree.parents.tolist(),
                "lane": lanes[0].tolist(),
                "lanes": lanes[1].tolist(),
                "sequences": np.subtract(*tree.sequences_through()[::-1]).tolist(),
                "kept": {
                    "segment": segment.tolist(),
                    "rank": rank[run].tolist(),
                    "first": np.maximum(start[run] - begin[segment], 0).tolist(),
                    "last": np.minimum(stop[run] - begin[segment], tree.lengths[segment]).tolist(),
                },
            }
        )
    return found


def _lanes(tree: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Of each segment the first of its lanes and how many: one for each segment without children in its subtree."""
    leaf = np.ones(len(tree.parents), np.int64)
    leaf[tree.parents[tree.parents >= 0]] = 0
    before = np.concatenate([[0], np.cumsum(leaf)])
    return before[:-1], before[tree.after] - before[:-1]


def tree_figure(plan: Plan, number: int) -> str:
    """The picture, and its segments as a table."""
    trees = drawn_trees(plan)
    document, first = next(iter(trees.items()))
    saved = sum(int(tree.sequence_lengths.sum()) - tree.tokens for tree in trees.values())
    says = (
        f"{len(trees)} tree{'s' if len(trees) > 1 else ''}; document {document} has {len(first.parents):,} segments "
        f"and {len(first.ends):,} sequences of up to {int(first.sequence_lengths.max()):,} tokens. As separate "
        f"sequences there would be {saved:,} tokens more."
    )
    left_out = len(plan.batch.branches) - len(trees)
    caption = (
        "Depth to the right, sequences down: each segment is as high as the sequences that share it, in the colour of "
        "the rank that keeps it." + (f" Not drawn, for their many segments: {left_out} more." if left_out else "")
    )
    rows = [
        [
            document,
            segment,
            int(tree.parents[segment]),
            int(tree.above[segment]),
            int(tree.lengths[segment]),
            int(through),
        ]
        for document, tree in trees.items()
        for segment, through in enumerate(np.subtract(*tree.sequences_through()[::-1]).tolist())
    ]
    headers = ["document", "segment", "parent", "depth", "tokens", "sequences"]
    shown = f"The first {min(len(rows), MOST_ROWS):,} of {len(rows):,} segments"
    behind = folded("As a table", table(headers, rows[:MOST_ROWS], shown))
    tools = choice(
        "tree", "Document", [(i, f"{d} ({tree.tokens:,} tokens)") for i, (d, tree) in enumerate(trees.items())]
    )
    return figure("tree", number, title="Trees", says=says, caption=caption, behind=behind, tools=tools)
