"""Branches: find the tree that a document is under its mask.

Only the mask decides which token follows which, so a plan that is read from a file gives the same trees. Two kinds of
mask make a document a tree: a tree mask, by its segments, and a shared question, whose question is the root and whose
answers are its children. A shared question is recognized by its name, or by the slices that
:func:`flexcp.masks.shared_question` makes of answer lengths, in any order. A mask that hides parts of a document from
each other without a shared question makes no tree: layers that attend inside chunks have such masks, and their
documents are one sequence.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from flexcp.masks.mask import EXPLICIT, TREE, Mask
from flexcp.masks.named import question_and_answer
from flexcp.masks.slices import HI, K0, K1, LO, Q0, Q1, UNBOUNDED, Ints, is_empty, trim
from flexcp.masks.tree import ROOT, Tree, tree_of_mask

MAY_BRANCH = (TREE, "shared-question", EXPLICIT)
"""Names of masks under which a document may be a tree."""


def tree_under(mask: Mask, length: int) -> Tree | None:
    """Return the tree that a document of ``length`` tokens is under ``mask``, or None if the mask makes no tree."""
    if mask.name == TREE:
        return tree_of_mask(mask) if length == mask.length else None
    borders = _answers(mask, length)
    if borders is None or np.count_nonzero(np.diff(borders)) < 2:
        return None
    lengths = np.diff(borders, prepend=0)
    answers = np.flatnonzero(lengths[1:]) + 1  # an answer without tokens is no sequence
    parents = np.concatenate([[ROOT], np.zeros(len(answers), np.int64)])
    return Tree(parents, lengths[[0, *answers]], np.arange(1, len(answers) + 1))


def depths(mask: Mask, length: int) -> Ints | None:
    """Return the depth of each token of a document, or None if the document is one sequence.

    In a document that is one sequence, the depth of a token is its place in the document.
    """
    found = tree_under(mask, length)
    return None if found is None or found.is_one_sequence else found.depths()


def _answers(mask: Mask, length: int) -> Ints | None:
    """Return the first token of each answer and the document's end, or None if the mask is no shared question."""
    if mask.name == "shared-question":
        question, each = (int(x[0]) for x in question_and_answer(mask, np.array([length], np.int64)))
        answers = int(mask.params[0]) if each else 1  # type: ignore[arg-type]
        return np.array([*(question + each * i for i in range(answers)), length])
    if mask.name != EXPLICIT or length != mask.length:
        return None
    if mask.table[:1] == ((0, length, 0, 0, -UNBOUNDED, 0),):  # the question has no tokens, so its slice is empty
        ends = [0, *(row[Q1] for row in mask.table[1:])]
        squares = [(a, b, a, b, -UNBOUNDED, 0) for a, b in pairwise(ends)]
        return np.array(ends) if [*mask.table[1:]] == squares and ends[-1] == length else None
    rows = trim(np.array(mask.table, np.int64).reshape(-1, 6))
    rows = rows[~is_empty(rows)]
    rows = rows[np.argsort(rows[:, K0], kind="stable")]
    causal = (rows[:, Q0] == rows[:, K0]) & (rows[:, HI] == 0) & (rows[:, LO] <= rows[:, K0] - (rows[:, Q1] - 1))
    borders = np.array([0, *rows[:, K1]])
    if not len(rows) or not causal.all() or borders[-1] != length or np.any(rows[:, K0] != borders[:-1]):
        return None
    asked = rows[0, Q1] == length and np.array_equal(rows[1:, Q1], rows[1:, K1])
    return borders[1:] if asked else None
