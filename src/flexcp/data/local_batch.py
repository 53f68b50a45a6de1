"""LocalBatch: the part of a batch that one rank gets, as tensors with a row for each token that the rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.arrays.intervals import spread
from flexcp.data.documents import BatchSpec, Document
from flexcp.data.reading.document_masks import times_predicted, tree_in
from flexcp.data.reading.row_sharing import Segments
from flexcp.data.reading.samples import LABELS, TOKENS
from flexcp.executor.kernels import uploaded
from flexcp.executor.losses.averaging import CountOfAllRanks
from flexcp.executor.losses.edges import Edges
from flexcp.executor.step import Step

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """One rank's part of a global batch or, with micro-batches, of one micro-batch, which is then meant by "the batch".

    ``tokens``, ``labels`` (shifted, ``ignore`` at the ends of documents), ``positions`` (from 0 in each document) and
    the per-token ``fields`` have a row for each token this rank keeps, in the step's local order. ``documents`` is the
    number of each row's document in the batch, -1 for a pad. ``valid`` is the loss normaliser: the number of labels
    that are not ``ignore`` in the whole batch, over all ranks (at least 1). A loss is ``local sum / valid``, and
    gradients are summed over ranks. ``step.loss`` and ``step.share`` do this division themselves: give them this rank's
    labels or their count, not ``valid``.

    A batch with a tree has ``edges`` (pairs of a token and a next token) instead of labels, for
    ``step.loss(logits, batch.edges)`` and ``step.log_probs``, and in trees ``valid`` counts a label once for every
    sequence that it is part of. In other batches ``edges`` is None.
    """

    step: Step
    tokens: Tensor
    row_labels: Tensor
    """The labels, one per row; read them as :attr:`labels`, which raises if the batch has a tree."""
    positions: Tensor
    documents: Tensor
    fields: dict[str, Tensor]
    values: dict[int, dict[str, Any]]
    """The per-document fields of the documents that this rank keeps tokens of, by document number in the batch."""
    samples: Ints
    """The sample of each document of the batch: its index in the dataset, or its count in a stream."""
    valid: CountOfAllRanks
    number: int
    """The number of the step in its epoch, from 0."""
    epoch: int
    micro_batch: int = 0
    micro_batches: int = 1
    """Which micro-batch of the step this is, from 0, and how many there are, the same on every rank."""
    weight: float = 1.0
    """The micro-batch's share of the step's labels (1 if the step has none); multiply its ``step.loss`` by this."""
    edges: Edges | None = None

    @property
    def labels(self) -> Tensor:
        """The label of each row, by default its next token; raises NotImplementedError if the batch has a tree."""
        if self.edges is not None:
            raise NotImplementedError(
                "this batch has a tree, in which a token may have several next tokens, and labels hold one a row: take "
                "batch.edges, with batch.step.loss(logits, batch.edges) or batch.step.log_probs(logits, batch.edges)"
            )
        return self.row_labels


def local_batch(
    step: Step,
    spec: BatchSpec,
    kept: Segments,
    columns: Mapping[str, Tensor],
    values: dict[int, dict[str, Any]],
    valid: int,
    epoch: int,
    device: torch.device | str | None,
    ignore: int,
) -> LocalBatch:
    """Make this rank's batch from its columns and values, with the tensors on ``device`` (None: where they are).

    ``kept`` are the tokens that the rank keeps, ``values`` the per-document fields by document number, and ``valid``
    the labels that count on all ranks. The step is told the label to ``ignore`` and the token ids.
    """
    of_rows = np.full(step.local_tokens, -1, np.int64)
    segment, within = spread(kept.rows)
    of_rows[kept.at[segment] + within] = kept.document[segment]
    documents = torch.from_numpy(of_rows)

    def there(x: Tensor) -> Tensor:
        return x if device is None else x.to(device, non_blocking=True)

    tokens, labels = there(columns[TOKENS]), there(columns[LABELS])
    step.ignore = ignore
    step.seen.given(tokens)
    step.asked_for_rows = True  # the loader brings the rows, so the step need not warn that nothing asked for them
    return LocalBatch(
        step,
        tokens,
        labels,
        there(step.positions),
        there(documents),
        {name: there(column) for name, column in columns.items() if name not in (TOKENS, LABELS)},
        values,
        np.array([d.number for d in spec.documents], np.int64),
        CountOfAllRanks(valid),
        spec.step,
        epoch,
        edges=_edges(step, labels, ignore) if step.plan.batch.trees else None,
    )


def own_labels(kept: Segments, labels: Tensor, documents: Sequence[Document], ignore: int) -> int:
    """Return how many of this rank's labels count in a loss, those of a tree once for every sequence through them.

    ``kept`` are the tokens that the rank keeps of the batch's ``documents``, and ``labels`` those of its local rows.
    """
    times = np.ones(len(labels), np.int64)
    for at, document, first, rows in zip(
        *(x.tolist() for x in (kept.at, kept.document, kept.first, kept.rows)), strict=True
    ):
        tree = tree_in(documents[document].mask, documents[document].length)
        if tree is not None:
            times[at : at + rows] = times_predicted(tree)[first : first + rows]
    return int(times[(labels != ignore).numpy()].sum())


def _edges(step: Step, labels: Tensor, ignore: int) -> Edges:
    """Return the edges of a batch with a tree: the pairs of a token and a next token, with the label of the next token.

    In trees, labels are in the rows of their own tokens; in plain documents they are one row earlier, so they are
    shifted back first. All ranks call this together.
    """
    batch = step.plan.batch
    stream = step.gather(labels)
    aligned = stream.roll(1)
    aligned[uploaded(batch.starts[:-1], stream.device)] = ignore
    for document in batch.trees:
        inside = slice(int(batch.starts[document]), int(batch.starts[document + 1]))
        aligned[inside] = stream[inside]
    return step.edges(aligned, ignore)
