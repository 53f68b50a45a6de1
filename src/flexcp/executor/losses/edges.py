"""Edges: the pairs (token, next token) of a batch of trees, and their weights in a loss over sequences.

A token before a branching point has several next tokens, and a token may be shared by many sequences. So losses and
log-probabilities of trees are computed for *edges*: an edge is a (token, next token) pair, belongs to the rank that
keeps the token, and is used by one or more sequences. A sum over independent sequences equals a sum over edges in which
each edge has the sum of its sequences' weights.

    edges  = step.edges(tokens)
    loss   = step.loss(logits, edges)              # the mean over all positions of all sequences
    loss   = step.loss(logits, edges, weights=edges.weights(advantages, masks, per="sequence"))
    values = step.log_probs(logits, edges)         # a value for each edge
    edge, sequence, position = edges.pairs()       # values[edge] is the value of (sequence, position)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.executor.arguments import named_kind, single
from flexcp.executor.exchange.collectives import Collectives
from flexcp.executor.kernels import uploaded
from flexcp.executor.local_rows import all_gathered
from flexcp.executor.losses.log_probs import log_probs
from flexcp.executor.run.rank_rows import local_stream
from flexcp.plan.placement import Placement
from flexcp.plan.sequences import Sequences

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Per = Literal["token", "sequence", "sum"]


@dataclass(frozen=True, eq=False)
class Edges:
    """This rank's edges, in the order of its rows; made by ``step.edges``.

    An edge is a token with one of its next tokens. For each edge, ``rows`` is the local row of its token, ``parents``
    and ``children`` are the stream numbers of token and next token, ``labels`` is the id of the next token, and
    ``counts`` is how many sequences use the edge (0 if the id is ``ignore``). ``sequences`` is the number of sequences
    in the batch and ``lengths`` their token counts, ordered by document and, in a tree, by its leaves.
    """

    rows: Tensor
    parents: Tensor
    children: Tensor
    labels: Tensor
    counts: Tensor
    of_batch: Sequences
    counted: NDArray[np.bool_]
    """For each stream token, whether it is the next token of another and its id is not ``ignore``."""
    here: Ints
    """``children`` as an array on the CPU."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sequences(self) -> int:
        return len(self.of_batch)

    @property
    def lengths(self) -> Ints:
        return self.of_batch.lengths

    @property
    def documents(self) -> Ints:
        """The number of the document of each sequence."""
        return self.of_batch.documents

    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (edge, sequence, position) for every sequence that uses an edge of this rank.

        Three tensors of equal length: the number of the edge, the number of the sequence, and the position of the
        edge's next token in that sequence, from 0. All ranks together have every position of every sequence exactly
        once, except first positions and those whose id is ``ignore``.
        """
        edge, sequence = self._pairs
        position = self.of_batch.depths[self.here[edge]]
        return self._on_device(edge), self._on_device(sequence), self._on_device(position)

    def weights(
        self, sequences: Sequence[float] | Tensor | None = None, tokens: Sequence[Any] | None = None, per: Per = "token"
    ) -> Tensor:
        """Return the weight of each edge of this rank in a loss over sequences, float64.

        It is the sum of the weights of the sequences that use the edge, divided as ``per`` says. ``sequences`` has a
        weight for each sequence, such as its advantage; by default 1. ``tokens`` has for each sequence an array with a
        weight for each token, such as a mask; it applies to the prediction of that token, so the first weight has no
        effect. Both describe the whole batch and are the same on every rank. A position counts if its id is not
        ``ignore`` and its token weight is not 0. ``per="token"`` divides by the number of positions that count in the
        batch, ``"sequence"`` by the number in each sequence and by the number of sequences that have any, ``"sum"``
        does not divide.
        """
        if per not in ("token", "sequence", "sum"):
            raise ValueError(f"per={per!r} is none of 'token', 'sequence' and 'sum': say what the sum is divided by")
        of_sequences = self._checked_sequences(sequences)
        flat = None if tokens is None else self._checked_tokens(tokens)
        if per != "sum":
            of_sequences = of_sequences / self._divisors(flat, per)
        if flat is None:
            found = self.of_batch.sums(self.here, of_sequences) * self.counted[self.here]
        else:
            edge, sequence = self._pairs
            values = (
                of_sequences[sequence] * flat[self.of_batch.places[sequence] + self.of_batch.depths[self.here[edge]]]
            )
            found = np.bincount(edge, values, minlength=len(self))
        return self._on_device(found)

    @cached_property
    def _pairs(self) -> tuple[Ints, Ints]:
        """(edge, sequence) for every sequence that uses an edge of this rank, without edges whose id is ``ignore``."""
        counted = np.flatnonzero(self.counted[self.here])
        edge, sequence = self.of_batch.pairs(self.here[counted])
        return counted[edge], sequence

    @cached_property
    def _flat(self) -> Ints:
        """The stream tokens of all sequences, end to end."""
        return np.concatenate([self.of_batch.path(sequence) for sequence in range(self.sequences)])

    def _divisors(self, flat: Floats | None, per: Per) -> Floats:
        """Return, for each sequence, the number by which its weights are divided, at least 1.

        ``flat`` has the token weights of all sequences end to end, or is None for weights of 1.
        """
        counts = self.counted[self._flat] if flat is None else self.counted[self._flat] & (flat != 0)
        if per == "token":
            return np.full(self.sequences, float(max(1, int(counts.sum()))))
        running = np.concatenate([[0], np.cumsum(counts)])
        each = running[self.of_batch.places[1:]] - running[self.of_batch.places[:-1]]
        having = float(max(1, int(np.count_nonzero(each))))
        return np.asarray(np.maximum(each, 1) * having)

    def _checked_sequences(self, given: Sequence[float] | Tensor | None) -> Floats:
        """Return the weights of all sequences, 1 by default; raise ValueError unless there is one for each sequence."""
        if given is None:
            return np.ones(self.sequences)
        found = _numbers(given, "weights of sequences")
        if found.shape != (self.sequences,):
            raise ValueError(
                f"{list(found.shape)} weights for the {self.sequences} sequences of this batch; give one for each"
            )
        return found

    def _checked_tokens(self, given: Sequence[Any]) -> Floats:
        """Return the token weights of all sequences end to end; raise ValueError unless there is one for each token."""
        if len(given) != self.sequences:
            raise ValueError(
                f"weights of tokens for {len(given)} sequences, but this batch has {self.sequences}; "
                "give an array for each"
            )
        parts = [_numbers(x, f"the weights of sequence {number}") for number, x in enumerate(given)]
        for number, part in enumerate(parts):
            if part.shape != (self.lengths[number],):
                raise ValueError(
                    f"sequence {number} has {self.lengths[number]} tokens, but its weights have shape "
                    f"{list(part.shape)}; give one for each"
                )
        return np.concatenate(parts)

    def _on_device(self, x: NDArray[Any]) -> Tensor:
        """Return an array as a tensor on the device of the edges."""
        return uploaded(x, self.rows.device)


def edges_of(sequences: Sequences, row_tokens: Ints, tokens: Tensor, ignore: int) -> Edges:
    """Return the edges of one rank.

    ``row_tokens`` has the stream token of each of its rows, -1 for a pad. ``tokens`` are the ids of the whole stream,
    and next tokens with the id ``ignore`` do not count.
    """
    kept = row_tokens >= 0
    rows = np.full(len(sequences.predecessors) + 1, -1)
    rows[row_tokens[kept]] = np.flatnonzero(kept)
    children = np.flatnonzero(rows[sequences.predecessors] >= 0)  # a predecessor of -1 reads the last entry, also -1
    children = children[np.argsort(rows[sequences.predecessors[children]], kind="stable")]
    parents = sequences.predecessors[children]
    counted = (tokens.detach().cpu().numpy() != ignore) & (sequences.predecessors >= 0)

    def upload(x: NDArray[Any]) -> Tensor:
        return uploaded(x, tokens.device)

    on_device = upload(children)
    return Edges(
        upload(rows[parents]),
        upload(parents),
        on_device,
        tokens[on_device].to(torch.int64),
        upload(sequences.count[children] * counted[children]),
        sequences,
        counted,
        children,
    )


def edge_log_probs(logits: Tensor, edges: Edges) -> Tensor:
    """Return the log-probability of each edge's next token, in float32 or wider; 0 for edges that do not count.

    Edges do not count if their next token is ``ignore``. On a CPU, an id outside of the vocabulary raises ValueError.
    """
    counts = edges.counts > 0
    labels = torch.where(counts, edges.labels, 0).to(logits.device)
    if (
        logits.device.type == "cpu"
        and len(labels)
        and not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]
    ):
        at = int(((labels < 0) | (labels >= logits.shape[1])).nonzero()[0])
        raise ValueError(
            f"token {int(edges.children[at])} of the stream has the id {int(labels[at])}, outside of the vocabulary "
            f"0..{logits.shape[1] - 1}; if it marks tokens without a label, make the edges "
            "by step.edges(tokens, ignore=...)"
        )
    found = log_probs(logits, edges.rows.to(logits.device), labels)
    return torch.where(counts.to(logits.device), found, 0)


def weighed_loss(values: Tensor, edges: Edges, weights: Tensor | None) -> Tensor:
    """Return minus the weighted sum of log-probabilities ``values``, one for each edge.

    By default the weights are those of a mean over positions, ``edges.weights()``. An edge of weight 0 adds nothing,
    even if its value is infinite. Raise ValueError unless there is one weight for each edge.
    """
    if weights is None:
        weights = edges.weights()
    if not isinstance(weights, Tensor) or weights.shape != values.shape:
        raise ValueError(
            f"weights are a tensor of one number for each of this rank's {len(edges)} edges; got {named_kind(weights)}"
        )
    weights = weights.to(values.device, values.dtype)
    return -torch.where(weights == 0, 0, values * weights).sum()


def check_edge_logits(logits: Tensor, tokens: int, place: str) -> None:
    """Raise ValueError unless logits are floats ``[tokens, vocabulary]``; ``place`` names the caller.

    A rank without tokens may pass one row, because some models cannot run on none.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        instead = single("logits", logits.shape, tokens) if isinstance(logits, Tensor) and logits.dim() == 3 else None
        way = f"; pass {instead}" if instead else ""
        got = tuple(logits.shape) if isinstance(logits, Tensor) else named_kind(logits)
        raise ValueError(f"{place} takes the logits of this rank's rows, ({tokens}, vocabulary); got {got}{way}")
    if len(logits) != tokens and (tokens or len(logits) > 1):
        raise ValueError(
            f"{place} got logits of {len(logits)} rows, but this rank keeps {tokens} tokens; run the model on "
            "step.shard(tokens)"
        )


def predictions(sequences: Sequences, row_tokens: Ints) -> int:
    """Return how many positions of sequences are predicted from the rows of a rank.

    A token that several sequences share predicts the next position of each of them. ``row_tokens`` has the stream token
    of each row, -1 for a pad.
    """
    kept = np.zeros(len(sequences.predecessors) + 1, bool)
    kept[row_tokens[row_tokens >= 0]] = True
    return int(sequences.count[kept[sequences.predecessors]].sum())


def gathered(values: Tensor, edges: Edges, placement: Placement, collectives: Collectives) -> list[Tensor]:
    """Gather the values of all ranks' edges, and return for each sequence of the batch a tensor of one value per token.

    The result is the same on every rank. The first token of a sequence has 0. ``values`` has one number for each of
    this rank's ``edges``.
    """
    sequences = edges.of_batch
    owner, row = np.empty(placement.stream, np.int64), np.empty(placement.stream, np.int64)
    for rank in range(placement.ranks):
        kept = local_stream(placement, rank)
        owner[kept], row[kept] = rank, np.arange(len(kept))
    children = np.flatnonzero(sequences.predecessors >= 0)
    parents = sequences.predecessors[children]
    order = children[np.lexsort((row[parents], owner[parents]))]
    counts = np.bincount(owner[parents], minlength=placement.ranks).tolist()
    everyone = all_gathered(values, counts, collectives, "step.gather_sequences")
    stream = everyone.new_zeros(len(sequences.predecessors)).index_copy(0, uploaded(order, values.device), everyone)
    return [stream[uploaded(sequences.path(number), values.device)] for number in range(len(sequences))]


def _numbers(given: Any, what: str) -> Floats:
    """Return weights as a float64 array; raise ValueError if they are not numbers. ``what`` names them in the error."""
    try:
        found = (
            given.detach().cpu().to(torch.float64).numpy()
            if isinstance(given, Tensor)
            else np.asarray(given, np.float64)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} are numbers; got {given!r} ({error})") from None
    return found
