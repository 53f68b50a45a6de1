"""Loss graph: what autograd's graph of logits or of a loss shows about the ids and labels that they were computed from.

An embedding keeps the ids that were looked up, and a cross entropy its labels, for their backward. So the graph of the
logits shows the ids that the model got, and the graph of a loss shows how many labels it counts. Nothing is computed or
unpacked here. Compiled code, frozen embeddings, checkpointed parts and graphs that were freed show nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

# These names are internal to torch; if a release changes them, only the checks that use this file are lost.
EMBEDDING = "EmbeddingBackward"
CROSS_ENTROPY = "NllLoss"
MOST_NODES = 100_000
"""The most nodes of a model's graph that are searched for embeddings."""
NEAR_NODES = 256
"""The most nodes of a loss's graph that are searched for its cross entropy, which is near the end of the graph."""


def embedded_ids(logits: Tensor) -> list[Tensor]:
    """Return the ids of all embeddings that ``logits`` were computed from, each as a 1-D tensor."""
    found = [_saved(node, "indices") for node in _nodes(logits, EMBEDDING, MOST_NODES)]
    return [ids.flatten() for ids in found if ids is not None]


def cross_entropy_labels(total: Tensor) -> list[tuple[Tensor, int]]:
    """Return the labels of each cross entropy that ``total`` was computed from, and the id in them that is ignored.

    The list is empty if the labels of any of them are not known.
    """
    found = []
    for node in _nodes(total, CROSS_ENTROPY, NEAR_NODES):
        labels, ignored = _saved(node, "target"), getattr(node, "_saved_ignore_index", None)
        if labels is None or ignored is None:
            return []
        found.append((labels, _signed(int(ignored))))
    return found


def _nodes(x: Tensor, kind: str, most: int) -> Iterator[Any]:
    """Yield the nodes whose name begins with ``kind`` from the graph of ``x``, those near its end first.

    The graph before such a node is not searched, and not more than ``most`` nodes are.
    """
    waiting = deque([x.grad_fn] if x.grad_fn is not None else [])
    seen = set(waiting)
    while waiting and len(seen) <= most:
        node = waiting.popleft()
        if type(node).__name__.startswith(kind):
            yield node
            continue
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)


def _saved(node: Any, name: str) -> Tensor | None:
    """Return a tensor that a node keeps for its backward, or None if it has none or keeps it in another form."""
    # The raw value is not unpacked: that would run a checkpointed forward again.
    found = getattr(getattr(node, f"_raw_saved_{name}", None), "data", None)
    return found if type(found) is Tensor else None


def _signed(number: int) -> int:
    """Return a 64-bit integer with its sign; torch shows negative ones without."""
    return number - 2**64 if number >= 2**63 else number
