"""Sequences of a batch: which tokens follow which, and which sequences each token is part of. Integers; no tensor.

A plain document is one sequence, and a tree has one for each of its ends; they are numbered document by document. Every
token but the first of a path follows exactly one token, so an *edge*, a token and one of its next tokens, is named by
the next token. The sequences through a token are neighbours in ``by_end``.
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
    """Of each stream token the token it follows (-1: none), its depth, and its sequences:
    ``by_end[first : first + count]``.
    """

    predecessors: Ints
    depths: Ints
    first: Ints
    count: Ints
    by_end: Ints
    lengths: Ints
    """Tokens of each sequence."""
    documents: Ints
    """The document of each sequence."""
    starts: Ints
    """The first token of that document."""
    trees: dict[int, tuple[int, Tree]]
    """Of each sequence in a tree its end and that tree."""

    def __len__(self) -> int:
        return len(self.lengths)

    def path(self, sequence: int) -> Ints:
        """The stream tokens of a sequence."""
        if sequence not in self.trees:
            return np.arange(self.lengths[sequence]) + int(self.starts[sequence])
        end, tree = self.trees[sequence]
        return tree.path(end) + int(self.starts[sequence])

    @cached_property
    def places(self) -> Ints:
        """Where each sequence begins when all of them are laid end to end, with their total at the end."""
        return offsets(self.lengths)

    def pairs(self, tokens: Ints) -> tuple[Ints, Ints]:
        """(place in ``tokens``, sequence) for every sequence of every listed token."""
        index, within = spread(self.count[tokens])
        return index, self.by_end[self.first[tokens][index] + within]

    def sums(self, tokens: Ints, values: np.ndarray) -> np.ndarray:
        """For each listed token the sum of ``values`` (one for each sequence) over its sequences."""
        running = np.concatenate([[0.0], np.cumsum(values[self.by_end], dtype=np.float64)])
        return np.asarray(running[self.first[tokens] + self.count[tokens]] - running[self.first[tokens]])


def batch_sequences(batch: Batch) -> Sequences:
    """The sequences of a batch. Masks that disagree about them are refused."""
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
    """Tokens that the batch's trees do without: those of their sequences, less their own."""
    found = (next(tree for tree in by_mask if tree is not None) for by_mask in batch.trees.values())
    return sum(max(0, int(tree.sequence_lengths.sum()) - tree.tokens) for tree in found)
