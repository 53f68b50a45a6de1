"""Trees of token ids: sequences that begin alike, as one document that holds what they share once.

Sequences are sorted, so that those with a common beginning are neighbours, and the trie is made of how much neighbours
share. Segments come in the order of the sequences that reach them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flexcp.masks.mask import Mask, token_count
from flexcp.masks.slices import Ints
from flexcp.masks.tree import ROOT, Tree, tree, tree_of_mask


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Sequences as one document: ``mask`` for the planner, ``tokens`` in the place of the sequences laid end to end.

    Sequence s of the tree is the s-th one given: ``paths[s][p]`` is the tree token at its position p, so
    ``tokens[paths[s]]`` is the sequence itself. ``saved`` is how many tokens the tree does without.
    """

    mask: Mask
    tokens: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def tree(self) -> Tree:
        return tree_of_mask(self.mask)

    @cached_property
    def paths(self) -> list[Ints]:
        """The tree token of every position, sequence by sequence."""
        known = {segment: self.tree.path(segment) for segment in set(self.tree.ends.tolist())}
        return [known[segment] for segment in self.tree.ends.tolist()]

    @property
    def saved(self) -> int:
        """Tokens of the sequences that the tree does without."""
        return int(self.tree.sequence_lengths.sum()) - len(self)


def tree_of(sequences: Sequence[Any], least_shared: int = 1, left: int | None = None) -> TokenTree:
    """The tree of sequences of token ids (lists, arrays or tensors), which holds their common beginnings once.

    Where fewer than ``least_shared`` tokens would be shared between two branching points they are repeated instead:
    every branch is work for planners and kernels. Equal sequences are one path, and still count as several. ``left`` is
    that of :func:`flexcp.tree`.
    """
    least = token_count(least_shared)
    if least < 1:
        raise ValueError(f"least_shared is the fewest tokens worth a branch, 1 or more; got {least_shared}")
    given = [_ids(s, number) for number, s in enumerate(sequences)]
    if not given:
        raise ValueError("no sequences; a tree has at least one")
    root = _trie(given)
    segments = _Segments()
    for child in root.children:
        _add_segments(child, ROOT, 0, least, given, segments)
    ends = np.empty(len(given), np.int64)
    for sequence, segment in segments.ends:
        ends[sequence] = segment
    mask = tree(segments.parents, [len(part) for part in segments.tokens], ends.tolist(), left)
    return TokenTree(mask, np.concatenate(segments.tokens))


@dataclass
class _Node:
    """A place where sequences branch or end: its depth, the sequences that end there, one that passes,
    and the first of all below.
    """

    depth: int
    passing: int
    ending: list[int] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    first: int = 0


@dataclass
class _Segments:
    parents: list[int] = field(default_factory=list)
    tokens: list[Ints] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(sequence, segment) for each sequence."""

    def add(self, parent: int, tokens: Ints) -> int:
        self.parents.append(parent)
        self.tokens.append(tokens)
        return len(self.parents) - 1


def _ids(sequence: Any, number: int) -> Ints:
    try:
        found = np.asarray(sequence)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"sequence {number} is no list of token ids ({error})") from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(
            f"sequence {number} is no list of token ids: it is {found.dtype} of shape {list(found.shape)}, and ids are "
            "whole numbers in one dimension"
        )
    if not found.size:
        raise ValueError(f"sequence {number} has no tokens; leave it out")
    return found.astype(np.int64)


def _trie(given: list[Ints]) -> _Node:
    """The root of the trie, at depth 0; its children and theirs in the order in which sequences reach them."""
    # As bytes, first byte first and from 0 on, ids compare as fast as memory; beginnings come before what they begin.
    keys = [(ids.astype(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").tobytes() for ids in given]
    order = sorted(range(len(given)), key=lambda s: keys[s])
    root = _Node(0, order[0])
    path = [root]
    before: Ints | None = None
    for sequence in order:
        ids = given[sequence]
        shared = 0 if before is None else _shared(before, ids)
        last: _Node | None = None
        while path[-1].depth > shared:
            last = path.pop()
        if path[-1].depth < shared:  # the sequences part inside an edge
            assert last is not None
            between = _Node(shared, sequence, children=[last])
            path[-1].children[-1] = between
            path.append(between)
        if len(ids) > path[-1].depth:
            end = _Node(len(ids), sequence)
            path[-1].children.append(end)
            path.append(end)
        path[-1].ending.append(sequence)
        before = ids
    _in_order(root)
    return root


def _shared(a: Ints, b: Ints) -> int:
    """Tokens that two sequences begin with alike."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def _in_order(root: _Node) -> None:
    """Sort children by the first sequence that reaches them."""
    nodes = [root]
    for node in nodes:
        nodes += node.children
    for node in reversed(nodes):
        node.ending.sort()
        node.children.sort(key=lambda child: child.first)
        reached = [*node.ending[:1], *(child.first for child in node.children[:1])]
        node.first = min(reached)


def _add_segments(top: _Node, parent: int, depth: int, least: int, given: list[Ints], to: _Segments) -> None:
    """The segments of a subtree in depth-first order; tokens from ``depth`` on are not in any segment yet."""
    waiting = [(top, parent, depth)]
    while waiting:
        node, parent, depth = waiting.pop()
        tokens = given[node.passing][depth : node.depth]
        below = parent
        if not node.children or len(tokens) >= least:
            below, depth = to.add(parent, tokens), node.depth
            to.ends += [(sequence, below) for sequence in node.ending]
        elif node.ending:  # what is too short to be shared is repeated here, too
            alone = to.add(parent, tokens)
            to.ends += [(sequence, alone) for sequence in node.ending]
        waiting += [(child, below, depth) for child in reversed(node.children)]
