"""Sequences of a batch: which token follows which, and which sequences contain each token, as NumPy arrays.

A plain document is one sequence, and a tree has one sequence for each of its ends. Sequences are numbered document by
document. Every token but the first of a sequence follows exactly one token. So an *edge* (a token and one of its next
tokens) is identified by the next token. ``by_end`` lists the sequences so that those which contain the same token are
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexcp.arrays.intervals import offsets, spread
from flexcp.batch import Batch, Ints
from flexcp.masks import Tree
from flexcp.plan.positions import agreed_tree, token_positions


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a batch: plain documents, and the paths through trees.

    For stream token t, ``predecessors[t]`` is the token it follows (-1: none), ``depths[t]`` its place in every
    sequence that contains it, from 0, and ``by_end[first[t] : first[t] + count[t]]`` are the sequences that contain it.
    """

    predecessors: Ints
    depths: Ints
    first: Ints
    count: Ints
    by_end: Ints
    lengths: Ints
    """The number of tokens of each sequence."""
    documents: Ints
    """The document of each sequence."""
    starts: Ints
    """The first stream token of the document of each sequence."""
    trees: dict[int, tuple[int, Tree]]
    """For each sequence of a tree: the segment it ends in, and the tree."""

    def __len__(self) -> int:
        return len(self.lengths)

    def path(self, sequence: int) -> Ints:
        """Return the stream tokens of a sequence, from its first to its last."""
        if sequence not in self.trees:
            return np.arange(self.lengths[sequence]) + int(self.starts[sequence])
        end, tree = self.trees[sequence]
        return tree.path(end) + int(self.starts[sequence])

    @cached_property
    def places(self) -> Ints:
        """The start of each sequence if all sequences are laid end to end; the last entry is their total length."""
        return offsets(self.lengths)

    def pairs(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Return (index in ``tokens``, sequence) for every listed token and every sequence that contains it."""
        index, within = spread(self.count[tokens])
        return index, self.by_end[self.first[tokens][index] + within]

    def sums(self, tokens: Ints, values: np.ndarray) -> np.ndarray:
        """Return, for each listed token, the sum of ``values[sequence]`` over the sequences that contain it."""
        running = np.concatenate([[0.0], np.cumsum(values[self.by_end], dtype=np.float64)])
        return np.asarray(running[self.first[tokens] + self.count[tokens]] - running[self.first[tokens]])


def batch_sequences(batch: Batch) -> Sequences:
    """Return the sequences of a batch; raise ValueError if its masks disagree about them."""
    found = {document: agreed_tree(batch, document) for document in batch.trees}
    trees = {document: tree for document, tree in found.items() if tree is not None}
    counts = np.ones(batch.documents, np.int64)
    for document, tree in trees.items():
        counts[document] = len(tree.ends)
    numbers = offsets(counts)
    predecessors = np.arange(-1, batch.tokens - 1)
    predecessors[batch.starts[:-1]] = -1
    first, count = np.repeat(numbers[:-1], batch.lengths), np.ones(batch.tokens, np.int64)
    by_end = np.arange(numbers[-1])
    lengths = np.repeat(batch.lengths, counts)
    of_trees: dict[int, tuple[int, Tree]] = {}
    for document, tree in trees.items():
        start, number = int(batch.starts[document]), int(numbers[document])
        inside, mine = slice(start, start + tree.tokens), slice(number, number + len(tree.ends))
        before = tree.predecessors()
        predecessors[inside] = np.where(before < 0, -1, before + start)
        begin, stop = tree.sequences_through()
        first[inside] = number + np.repeat(begin, tree.lengths)
        count[inside] = np.repeat(stop - begin, tree.lengths)
        by_end[mine] = number + tree.by_end
        lengths[mine] = tree.sequence_lengths
        of_trees |= {number + at: (end, tree) for at, end in enumerate(tree.ends.tolist())}
    depths = token_positions(batch, np.arange(batch.tokens))
    documents = np.repeat(np.arange(batch.documents), counts)
    starts = batch.starts[documents]
    return Sequences(predecessors, depths, first, count, by_end, lengths, documents, starts, of_trees)


def saved_tokens(batch: Batch) -> int:
    """Return how many tokens the trees of a batch save: the tokens of all their sequences minus those of the trees."""
    found = (next(tree for tree in by_mask if tree is not None) for by_mask in batch.trees.values())
    return sum(max(0, int(tree.sequence_lengths.sum()) - tree.tokens) for tree in found)
