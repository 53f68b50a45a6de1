"""LocalBatch: what a rank gets of a batch, as tensors in the local order of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.arrays.intervals import spread
from flexcp.data.documents import BatchSpec
from flexcp.data.row_sharing import Segments
from flexcp.data.samples import LABELS, TOKENS
from flexcp.executor.kernels import uploaded
from flexcp.executor.losses.averaging import CountOfAllRanks
from flexcp.executor.losses.edges import Edges
from flexcp.executor.step import Step

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """One rank's part of a global batch.

    ``tokens``, ``labels`` (shifted, ``ignore`` at the ends of documents), ``positions`` (from 0 in each document) and
    the per-token ``fields`` have a row for each token this rank keeps, in the step's local order. ``documents`` is the
    batch's document each row belongs to, -1 for a pad. ``valid`` is the loss normaliser: labels of the whole batch, on
    all ranks together, that count (at least 1). A loss is ``local sum / valid``, and gradients are summed over ranks;
    ``step.loss`` and ``step.share`` divide themselves and want this rank's labels or their count, not ``valid``.

    A batch with a tree has ``edges`` in the place of labels, for ``step.loss(logits, batch.edges)`` and
    ``step.log_probs``, and ``valid`` counts positions of sequences. Without one ``edges`` is None.
    """

    step: Step
    tokens: Tensor
    row_labels: Tensor
    """:attr:`labels`, where the batch has no tree."""
    positions: Tensor
    documents: Tensor
    fields: dict[str, Tensor]
    values: dict[int, dict[str, Any]]
    """Per-document fields of the documents this rank keeps tokens of, by their number in the batch."""
    samples: Ints
    """Which sample of the dataset each document of the batch is: its index, or its count in a stream."""
    valid: CountOfAllRanks
    number: int
    """Steps of this epoch before this one."""
    epoch: int
    micro_batch: int = 0
    micro_batches: int = 1
    """Which part of its step this is, and of how many: as many on every rank."""
    weight: float = 1.0
    """The share of the step's labels that are in this part: what a loss of its own, such as ``step.loss``,
    counts in the step's.
    """
    edges: Edges | None = None

    @property
    def labels(self) -> Tensor:
        """Next tokens of the rows; refused where the batch has a tree."""
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
    """The tensors of a step, on ``device``."""
    of_rows = np.full(step.local_tokens, -1, np.int64)
    segment, within = spread(kept.rows)
    of_rows[kept.at[segment] + within] = kept.document[segment]
    documents = torch.from_numpy(of_rows)

    def there(x: Tensor) -> Tensor:
        return x if device is None else x.to(device, non_blocking=True)

    tokens, labels = there(columns[TOKENS]), there(columns[LABELS])
    step.seen.given(tokens)
    step.asked_for_rows = True  # by the loader, which brings the rows
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


def _edges(step: Step, labels: Tensor, ignore: int) -> Edges:
    """The edges of a batch in which labels stand beside their own tokens in trees,
    and one row earlier in plain documents.
    """
    batch = step.plan.batch
    stream = step.gather(labels)
    aligned = stream.roll(1)
    aligned[uploaded(batch.starts[:-1], stream.device)] = ignore
    for document in batch.trees:
        inside = slice(int(batch.starts[document]), int(batch.starts[document + 1]))
        aligned[inside] = stream[inside]
    return step.edges(aligned, ignore)
