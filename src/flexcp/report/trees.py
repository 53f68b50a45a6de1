"""Pictures of the trees in a plan's batch: segments by depth and sequence, in the colours of the ranks that keep them.

A tree is a document whose sequences share prefixes; a segment is a stretch of tokens without a branch. A segment is a
bar from the depth of its first token to that of its last. Its height is the number of leaves below it, one lane each. A
prompt is therefore one tall bar, and the segments that attend to it stand to its right. Trees with too many segments
are not drawn; the caption counts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexcp.arrays.intervals import overlaps
from flexcp.masks import Tree
from flexcp.plan.plan import Plan
from flexcp.report.markup import choice, figure, folded, table

MOST_SEGMENTS = 4_000
"""The most segments that a page draws, of all trees together; trees with the most tokens come first."""
MOST_ROWS = 500
"""The most segments in the table below the picture."""


def drawn_trees(plan: Plan) -> dict[int, Tree]:
    """Return the trees that are drawn, by document, those with the most tokens first."""
    found: dict[int, Tree] = {}
    room = MOST_SEGMENTS
    for document in sorted(plan.batch.branches, key=lambda d: (-int(plan.batch.lengths[d]), d)):
        tree = next(tree for tree in plan.batch.branches[document] if tree is not None)
        if len(tree.parents) <= room:
            found[document] = tree
            room -= len(tree.parents)
    return found


def tree_data(plan: Plan) -> list[dict[str, Any]]:
    """Return for each drawn tree its segments as columns, and which parts of them ranks keep.

    The columns of ``kept`` are segment, rank, and the first token and the last token + 1 of the part inside the
    segment.
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
    """Return each segment's first lane and its number of lanes, one lane for each leaf of its subtree."""
    leaf = np.ones(len(tree.parents), np.int64)
    leaf[tree.parents[tree.parents >= 0]] = 0
    before = np.concatenate([[0], np.cumsum(leaf)])
    return before[:-1], before[tree.after] - before[:-1]


def tree_figure(plan: Plan, number: int) -> str:
    """Return the picture of the drawn trees, with their segments as a table."""
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
