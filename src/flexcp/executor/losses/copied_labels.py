"""Copied labels: labels that are the tokens themselves, which teach a model to repeat what it is given.

``step.loss`` shifts nothing, and no shape shows that labels were not shifted. But a step has seen streams of integers
go by: those it was asked to shard, and the ids of models whose adapters say so. Labels that equal the model's ids
wherever they count are a mistake. Inputs that were corrupted on purpose differ from their labels where these count.

Ids that an adapter or the loader told are known to be ids. Of streams that were only sharded it is guessed: one that
was sharded twice with the same values was once ids and once labels, unless it holds the successors of another stream,
or numbers below 0, which are no ids; and one that is all that was ever sharded must have been the model's input, unless
this rank could have taken its input otherwise. Where it was not, the input is not the plan's rows, which is as wrong,
so that warning names both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexcp.batch import Batch
from flexcp.executor.local_rows import next_tokens

WARNING = (
    "the labels of this loss are the tokens themselves: step.loss shifts nothing, so the model learns to repeat what "
    "it is given. Labels are each token's successor in its document: take step.labels(tokens), or shard labels that "
    "were shifted before"
)
INPUT_FROM_ELSEWHERE = (
    ". Nothing else was sharded by this step: where these labels were shifted before, the model's input is not the "
    "plan's rows. Take it by step.shard too, or plan with layout='contiguous' where every rank keeps the part of the "
    "stream that it cut itself"
)
NONE = -1


@dataclass(frozen=True, eq=False)
class Sharded:
    """A stream of integers and this rank's rows of it."""

    stream: Tensor
    rows: Tensor


class SeenTokens:
    """What a step has seen of its tokens until the first loss; :meth:`copied` looks at it once and lets go of it."""

    def __init__(self) -> None:
        self.done = False
        self._ids: Tensor | None = None
        self._sharded: list[Sharded] = []
        self._others = False

    def given(self, ids: Tensor) -> None:
        """Note this rank's ids, as a model got them."""
        if not self.done:
            self._ids = ids

    def sharded(self, stream: Tensor, rows: Tensor) -> None:
        """Note what was sharded."""
        if self.done:
            return
        if stream.dim() == 1 and not stream.is_floating_point() and not stream.is_complex():
            self._sharded.append(Sharded(stream, rows))
        else:
            self._others = True

    def indexed(self) -> None:
        """Note that rows may have been taken by their numbers."""
        self._others = True

    def copied(self, labels: Tensor, ignore: int, batch: Batch, own_cut: bool) -> str | None:
        """What to warn of where labels are the tokens; ``own_cut``: this rank could have cut its input itself."""
        ids, sharded, others = self._ids, self._sharded, self._others
        self.done, self._ids, self._sharded = True, None, []
        counted = (labels != ignore).cpu()
        kept = labels.cpu()[counted]
        if len(kept) < 2 or bool((kept == kept[0]).all()):
            return None

        def equal(rows: Tensor) -> bool:
            return len(rows) == len(labels) and bool((rows.cpu()[counted] == kept).all())

        if ids is not None:
            return WARNING if equal(ids) else None
        same = [seen for seen in sharded if equal(seen.rows) and not bool((seen.stream < 0).any())]
        rest = [seen for seen in sharded if not equal(seen.rows)]
        if len(same) > 1:
            shifted = any(_follows(same[0].stream.cpu(), seen.stream.cpu(), batch) for seen in rest)
            return None if shifted else WARNING
        alone = len(same) == 1 and not rest and not others and not own_cut
        return WARNING + INPUT_FROM_ELSEWHERE if alone else None


def _follows(labels: Tensor, tokens: Tensor, batch: Batch) -> bool:
    """Whether one stream holds the other's successors."""
    wanted = next_tokens(tokens, batch, NONE)
    return bool(((labels == wanted) | (wanted == NONE)).all())
