"""Trees of token ids: turn sequences with common beginnings into one document that holds each beginning once.

Sequences are sorted, so that those with a common beginning are neighbours; how many tokens neighbours share gives a
trie. Segments of the tree are in the order of the first sequence that contains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flexcp.masks.mask import Mask, token_count
from flexcp.masks.slices import Ints
from flexcp.masks.tree import ROOT, Tree, tree, tree_of_mask


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Sequences merged into one document: ``tokens`` are its token ids, ``mask`` is its mask for the planner.

    Sequence s of the tree is the s-th sequence given to :func:`flexcp.tree_of`. ``paths[s][p]`` is the index in
    ``tokens`` of its p-th token, so ``tokens[paths[s]]`` is the sequence itself.
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
        """For each sequence, the index in ``tokens`` of each of its tokens."""
        known = {segment: self.tree.path(segment) for segment in set(self.tree.ends.tolist())}
        return [known[segment] for segment in self.tree.ends.tolist()]

    @property
    def saved(self) -> int:
        """How many fewer tokens the tree has than the sequences together."""
        return int(self.tree.sequence_lengths.sum()) - len(self)


def tree_of(sequences: Sequence[Any], least_shared: int = 1, left: int | None = None) -> TokenTree:
    """Merge sequences of token ids (lists, arrays or tensors) into a tree that holds their common beginnings once.

    Between two branching points, fewer than ``least_shared`` common tokens are repeated instead of shared, because
    every branch costs planners and kernels work. Equal sequences share one path and remain several sequences. ``left``
    is how many tokens before it on its path a token sees, None for all, as in :func:`flexcp.tree`.
    """
    least = token_count(least_shared)
    if least < 1:
        raise ValueError(f"least_shared is the fewest tokens worth a branch, 1 or more; got {least_shared}")
    if not isinstance(sequences, Iterable):
        raise ValueError(f"sequences is a list of lists of token ids; got {sequences!r}")
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
    """A node of the trie: a place where sequences branch or end.

    ``depth`` is the number of tokens from the root, ``passing`` a sequence that passes through the node, ``ending`` the
    sequences that end there, and ``first`` the lowest number of a sequence that reaches the node.
    """

    depth: int
    passing: int
    ending: list[int] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    first: int = 0


@dataclass
class _Segments:
    """The segments of the tree as they are found: parent and tokens of each, and where sequences end."""

    parents: list[int] = field(default_factory=list)
    tokens: list[Ints] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(sequence, segment) for each sequence."""

    def add(self, parent: int, tokens: Ints) -> int:
        """Add a segment and return its number."""
        self.parents.append(parent)
        self.tokens.append(tokens)
        return len(self.parents) - 1


def _ids(sequence: Any, number: int) -> Ints:
    """Return the token ids of sequence ``number`` as an array; raise ValueError if it is empty or no list of ids."""
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
    """Return the root of the trie of the sequences; children are sorted by the first sequence that reaches them."""
    # Ids become big-endian bytes without sign, which compare fast in the order of the ids. A sequence that is the
    # beginning of another one sorts before it.
    keys = [(ids.astype(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").tobytes() for ids in given]
    order = sorted(range(len(given)), key=lambda s: keys[s])
    root = _Node(0, order[0])
    path = [root]
    before: Ints | None = None
    for sequence in order:
        ids = given[sequence]
        shared = 0 if before is None else common_beginning(before, ids)
        last: _Node | None = None
        while path[-1].depth > shared:
            last = path.pop()
        if path[-1].depth < shared:  # the sequences branch between two nodes: insert a node there
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


def common_beginning(a: Ints, b: Ints) -> int:
    """Return how many tokens two sequences have in common at their beginnings."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def _in_order(root: _Node) -> None:
    """Sort the children of every node by the first sequence that reaches them, and set ``first`` of every node."""
    nodes = [root]
    for node in nodes:
        nodes += node.children
    for node in reversed(nodes):
        node.ending.sort()
        node.children.sort(key=lambda child: child.first)
        reached = [*node.ending[:1], *(child.first for child in node.children[:1])]
        node.first = min(reached)


def _add_segments(top: _Node, parent: int, depth: int, least: int, given: list[Ints], to: _Segments) -> None:
    """Append the segments of the subtree of ``top`` to ``to``, in depth-first order.

    ``parent`` is the segment above the subtree, and ``depth`` the tokens of the path that are in segments already.
    ``given`` are the sequences, and fewer than ``least`` common tokens are repeated for each child.
    """
    waiting = [(top, parent, depth)]
    while waiting:
        node, parent, depth = waiting.pop()
        tokens = given[node.passing][depth : node.depth]
        below = parent
        if not node.children or len(tokens) >= least:
            below, depth = to.add(parent, tokens), node.depth
            to.ends += [(sequence, below) for sequence in node.ending]
        elif node.ending:  # too few tokens to be shared: repeat them for the sequences that end here
            alone = to.add(parent, tokens)
            to.ends += [(sequence, alone) for sequence in node.ending]
        waiting += [(child, below, depth) for child in reversed(node.children)]
