"""Find labels that are the input tokens, which teach a model to repeat its input, and labels that were shifted twice.

``step.loss`` does not shift labels, and their shape does not show whether the user did. So at its first loss a step
compares the labels with the token ids that it has seen. If they are equal in every row whose label is not ``ignore``,
the labels were not shifted. (Masked-token training gives no warning: its inputs differ from the labels in these rows.
Fewer than two labels, or labels that are all the same, are not judged.)

If the loader or a framework adapter reported the token ids that the model gets, the labels are compared with those
alone. Otherwise autograd's graph of the logits may show the ids that the model's embeddings looked up
(:mod:`flexcp.executor.losses.loss_graph`): the step warns if those of one embedding equal the labels. The graph does
not show the ids of every model. Besides, the step knows the tensors that the user passed to ``step.shard``, but not
which of them is the model's input. It also warns in two cases:

- Two sharded streams of integers equal the labels in these rows, and one of them has no negative number: that one was
  the input, the other the labels. There is no warning if it holds the next tokens of a third sharded stream: then it
  was shifted labels.
- The only tensor that was sharded equals the labels, and has no negative number, so it was probably the input too. If
  it was not, the model's input was taken without the step and may not be the rows that the plan gives to this rank.
  That is a mistake too, so this warning names both. There is no warning if the user read ``step.indices``, or if, on
  several ranks, the plan's rows are those that a user would cut by hand (the plan was made for a given layout, or the
  rows are contiguous).

``step.labels`` shifts what it is given, so it must not be given labels that are the next tokens already. These are
found if each is the token after the one that this rank was given or sharded at its place, and if no given or sharded
stream equals them. It is no mistake if the tokens themselves were given to ``step.labels`` too: then labels of the
token after the next are wanted, for a second head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.batch import Batch
from flexcp.executor.local_rows import next_tokens

WARNING = (
    "the labels of this loss are the tokens themselves: step.loss shifts nothing, so the model learns to repeat its "
    "input. Labels are the next tokens inside each document: use step.labels(tokens), or shift labels before you shard "
    "them"
)
INPUT_FROM_ELSEWHERE = (
    ". Nothing else was sharded by this step: if these labels were shifted before, the model's input may not be the "
    "plan's rows. Take the input by step.shard too, or plan with layout='contiguous' if every rank cuts its own part "
    "of the stream"
)
SHIFTED_TWICE = (
    "labels are already shifted: each is the token after its own, and step.labels would shift them again; give "
    "step.labels the tokens, or take these labels by step.shard(labels, pad=-100). If labels of the token after the "
    "next are wanted, take step.roll(step.labels(tokens), -1, fill=-100)"
)
NONE = -1
"""The label of the last token of a document, where :func:`_follows` shifts a stream."""
FEWEST = 8
"""The fewest tokens by which labels are judged to be shifted; fewer may agree by chance."""
MOST = 16
"""The most streams of each kind (sharded, labelled) that are kept.

A step may be used for many batches without a ``step.loss``. With this many labelled streams, none is judged.
"""


@dataclass(frozen=True, eq=False)
class Sharded:
    """A stream of integers that was given to ``step.shard``, and this rank's rows of it."""

    stream: Tensor
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Labelled:
    """A stream that was given to ``step.labels``, and the id in it that marks tokens without a label."""

    stream: Tensor
    ignore: int


class SeenTokens:
    """The streams of integers that a step has seen before its first loss.

    :meth:`copied` compares the labels of that loss with them, once, and releases them.
    """

    def __init__(self) -> None:
        self.done = False
        self._ids: Tensor | None = None
        self._sharded: list[Sharded] = []
        self._labelled: list[Labelled] = []
        self._others = False

    def given(self, ids: Tensor) -> None:
        """Note the token ids that the model gets on this rank, as the loader or a framework adapter reports them."""
        if not self.done:
            self._ids = ids

    def sharded(self, stream: Tensor, rows: Tensor) -> None:
        """Note a tensor that was given to ``step.shard``, and this rank's rows of it.

        Only 1-D tensors of integers are kept; of others it is known only that there were some.
        """
        if self.done:
            return
        whole = stream.dim() == 1 and not stream.is_floating_point() and not stream.is_complex()
        if whole and len(self._sharded) < MOST:
            self._sharded.append(Sharded(stream, rows))
        else:
            self._others = True

    def labelled(self, stream: Tensor, ignore: int) -> None:
        """Note a stream that was given to ``step.labels``, with its ``ignore``; only 1-D streams are kept."""
        if not self.done and stream.dim() == 1 and len(self._labelled) < MOST:
            self._labelled.append(Labelled(stream, ignore))

    def indexed(self) -> None:
        """Note that the user asked for ``step.indices``, and may have taken rows of a stream by them."""
        self._others = True

    def copied(
        self, labels: Tensor, ignore: int, batch: Batch, own_cut: bool, embedded: Callable[[], list[Tensor]]
    ) -> str | None:
        """Return the warning to give if this rank's labels are the tokens themselves, else None.

        Labels that are ``ignore`` do not count. ``own_cut`` says that rows which a user cuts without the step are the
        plan's. ``embedded`` finds the ids of the model's embeddings; it is called only if no ids were reported. The
        streams are released, so later calls find none.
        """
        ids, sharded, others = self._ids, self._sharded, self._others
        self.done, self._ids, self._sharded, self._labelled = True, None, [], []
        counted = (labels != ignore).cpu()
        kept = labels.cpu().long()[counted]
        if len(kept) < 2 or bool((kept == kept[0]).all()):
            return None

        def equal(rows: Tensor) -> bool:
            return len(rows) == len(labels) and bool((rows.cpu().long()[counted] == kept).all())

        if ids is not None:
            return WARNING if equal(ids) else None
        if any(equal(found) for found in embedded()):
            return WARNING
        same = [seen for seen in sharded if equal(seen.rows)]
        rest = [seen for seen in sharded if not equal(seen.rows)]
        may_be_ids = [seen for seen in same if not bool((seen.stream.long() < 0).any())]
        if not may_be_ids:
            return None
        if len(same) > 1:
            shifted = any(_follows(may_be_ids[0].stream.cpu().long(), seen.stream.cpu().long(), batch) for seen in rest)
            return None if shifted else WARNING
        alone = not rest and not others and not own_cut
        return WARNING + INPUT_FROM_ELSEWHERE if alone else None

    def shifted_twice(self, tokens: NDArray[np.int64], batch: Batch, may_look: Callable[[Tensor], bool]) -> bool:
        """Return whether ``step.labels`` was given next tokens of this rank's ids.

        ``tokens`` has the stream token of each local row, -1 for a pad. Tensors for which ``may_look`` is False are
        left out.
        """
        if not self._labelled or len(self._labelled) == MOST:
            return False
        inputs = [seen.rows for seen in self._sharded] if self._ids is None else [self._ids]
        rows = [x.cpu().long() for x in inputs if len(x) == len(tokens) and may_look(x)]
        given = [(x.stream.cpu().long(), x.ignore) for x in self._labelled if may_look(x.stream)]
        kept = np.flatnonzero(tokens >= 0)
        inside = np.flatnonzero((tokens > 0) & ~np.isin(tokens, batch.starts))

        def agree(labels: Tensor, ignore: int, x: Tensor, back: int, fewest: int) -> bool:
            """Return whether each row of ``x`` is the label that stands ``back`` tokens before it in the stream.

            Labels that are ``ignore`` are left out; at least ``fewest`` must remain.
            """
            at = torch.from_numpy(inside if back else kept)
            found = labels[torch.from_numpy(tokens)[at] - back]
            counts = found != ignore
            return int(counts.sum()) >= fewest and bool((x[at] == found)[counts].all())

        labelled = [x for x in rows if any(agree(*one, x, 0, 1) for one in given)]
        return any(
            agree(*one, x, 1, FEWEST) and not any(agree(*one, y, 0, 0) for y in rows)
            for one in given
            for x in rows
            if not any(x is y for y in labelled)
        )


def _follows(labels: Tensor, tokens: Tensor, batch: Batch) -> bool:
    """Return whether the stream ``labels`` holds the next token of each token of the stream ``tokens``.

    The last tokens of documents, which have no next token, are left out.
    """
    wanted = next_tokens(tokens, batch, NONE)
    return bool(((labels == wanted) | (wanted == NONE)).all())
