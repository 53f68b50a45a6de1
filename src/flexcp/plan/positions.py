"""Positions: the position of each token in its document, and errors for documents that branch.

In a document that is one sequence, the position of a token is its place in the document. In a document that branches
(:mod:`flexcp.masks.branches`), the position of a token is its depth, and all masks of the batch must give the same
depths. The last token before a branch has several successors, so code that assumes one label per token has to refuse
such documents; it does so with the functions of this module.
"""

from __future__ import annotations

import numpy as np

from flexcp.batch import Batch, Ints
from flexcp.masks import Mask, Tree


def token_positions(batch: Batch, tokens: Ints) -> Ints:
    """Return the position in its document of each of ``tokens``, which are numbers in the stream.

    In a document that branches, the position is the depth in the tree. Raise ValueError if masks of the batch give a
    document different depths.
    """
    if not batch.branches:
        return tokens - batch.starts[batch.document_of(tokens)]
    places = np.arange(batch.tokens) - np.repeat(batch.starts[:-1], batch.lengths)
    for document, by_mask in batch.branches.items():
        inside = slice(batch.starts[document], batch.starts[document + 1])
        first, *others = (places[inside] if tree is None else tree.depths() for tree in dict.fromkeys(by_mask))
        if any(not np.array_equal(first, other) for other in others):
            raise _disagreeing(batch, document, "the positions of its tokens, because they branch at different places")
        places[inside] = first
    return places[tokens]


def agreed_tree(batch: Batch, document: int) -> Tree | None:
    """Return the tree that a document is under all masks, or None if it is one sequence.

    Raise ValueError if the masks disagree.
    """
    by_mask = list(dict.fromkeys(batch.trees.get(document, ())))
    found = next((tree for tree in by_mask if tree is not None), None)
    if found is None:
        return None
    for tree in by_mask:
        if not found.same_as(tree) if tree is not None else not found.is_one_sequence:
            raise _disagreeing(batch, document, "its sequences")
    return found


def _disagreeing(batch: Batch, document: int, about: str) -> ValueError:
    """Return the error for a document whose masks disagree; ``about`` says what they disagree about."""
    named = ", ".join(f"{mask.name!r} ({mask.rule(document)})" for mask in batch.masks)
    return ValueError(
        f"document {document} has the masks {named}, which disagree about {about}; give all layers masks of one tree "
        "(flexcp.tree(parents, lengths, left=...) for window layers), or the model positions of your own"
    )


def refuse_branches(batch: Batch, what: str) -> None:
    """Raise NotImplementedError if a document branches, because ``what`` takes only one successor of a token."""
    for document, by_mask in batch.branches.items():
        rule = next(m.rule(document) for m, depth in zip(batch.masks, by_mask, strict=True) if depth is not None)
        raise several_successors(document, rule, what)


def refuse_order(batch: Batch, what: str) -> None:
    """Raise NotImplementedError if a document branches, because ``what`` is for layers that read in stream order."""
    for document in batch.branches:
        raise NotImplementedError(
            f"document {document} branches, and {what} is for layers that read tokens in the order of the stream: "
            "their state would go from one branch into the next. "
            "Train such a model on the sequences as documents of their own"
        )


def several_successors(document: int, mask: Mask, what: str) -> NotImplementedError:
    """Return the error for a document that branches where ``what`` takes only one successor of a token."""
    return NotImplementedError(
        f"document {document} branches under its mask {mask}: its tokens may have several next tokens, and {what} one "
        "next token a row; take step.edges(tokens), every token with each of its next tokens, and step.loss(logits, "
        "edges) or step.log_probs(logits, edges)"
    )
