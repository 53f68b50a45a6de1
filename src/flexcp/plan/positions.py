"""Positions: where tokens stand in their documents, and who may ask for a token's successor.

In a document that is one sequence a token's position is its place. In one that branches (:mod:`flexcp.masks.branches`) it is the token's
depth, which every mask of the batch must then mean; and its last token before the branches has several successors, so everything that
knows one label a token refuses the document by name.
"""

from __future__ import annotations

import numpy as np

from flexcp.batch import Batch, Ints
from flexcp.masks import Mask


def token_positions(batch: Batch, tokens: Ints) -> Ints:
    """The position of each stream token in its document."""
    documents = batch.document_of(tokens)
    places = tokens - batch.starts[documents]
    for document, by_mask in batch.branches.items():
        first, *others = (np.arange(batch.lengths[document]) if d is None else d for d in by_mask)
        if any(not np.array_equal(first, other) for other in others):
            named = ", ".join(f"{mask.name!r} ({mask.rule(document)})" for mask in batch.masks)
            raise ValueError(
                f"document {document} has the masks {named}, which disagree about the positions of its tokens: some branch and some do "
                "not, or elsewhere; give the model positions of your own"
            )
        inside = documents == document
        places[inside] = first[places[inside]]
    return places


def refuse_branches(batch: Batch, what: str) -> None:
    """Raise for a batch with a document that branches: ``what`` knows one successor of a token."""
    for document, by_mask in batch.branches.items():
        rule = next(m.rule(document) for m, depth in zip(batch.masks, by_mask, strict=True) if depth is not None)
        raise several_successors(document, rule, what)


def several_successors(document: int, mask: Mask, what: str) -> NotImplementedError:
    """The refusal of a document that branches."""
    return NotImplementedError(
        f"document {document} branches under its mask {mask}: its question is followed by every answer, and {what} one next token a row; "
        "make labels of your own and compute the loss from the logits of step.shard(tokens) at step.positions, which are right"
    )
