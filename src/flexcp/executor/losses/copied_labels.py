"""Copied labels: detect labels that are the tokens themselves, which teach a model to repeat its input.

``step.loss`` does not shift labels, and shapes cannot show whether they were shifted. But a step sees streams of
integers: those that it shards, and the token ids that the loader or a framework adapter reports. If the labels equal
the model's ids wherever they count, they were not shifted. (Inputs that were corrupted on purpose differ from their
labels where these count.)

Reported ids are certain. Streams that were only sharded are judged by two rules. A stream that was sharded twice with
the same values was once the ids and once the labels, unless it holds the next tokens of another sharded stream, or
negative numbers, which cannot be ids. A stream that is the only one ever sharded must have been the model's input,
unless this rank could have taken its input without the step. If it was not the input after all, then the input is not
the plan's rows, which is a mistake too, so that warning names both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexcp.batch import Batch
from flexcp.executor.local_rows import next_tokens

WARNING = (
    "the labels of this loss are the tokens themselves: step.loss shifts nothing, so the model learns to repeat its "
    "input. Labels are the next tokens inside each document: use step.labels(tokens), or shift labels before you shard "
    "them"
)
INPUT_FROM_ELSEWHERE = (
    ". Nothing else was sharded by this step: if these labels were shifted before, the model's input is not the "
    "plan's rows. Take the input by step.shard too, or plan with layout='contiguous' if every rank cuts its own part "
    "of the stream"
)
NONE = -1


@dataclass(frozen=True, eq=False)
class Sharded:
    """A stream of integers that was sharded, and this rank's rows of it."""

    stream: Tensor
    rows: Tensor


class SeenTokens:
    """The streams that a step has seen before its first loss; :meth:`copied` checks them once and releases them."""

    def __init__(self) -> None:
        self.done = False
        self._ids: Tensor | None = None
        self._sharded: list[Sharded] = []
        self._others = False

    def given(self, ids: Tensor) -> None:
        """Note the token ids that the model gets on this rank."""
        if not self.done:
            self._ids = ids

    def sharded(self, stream: Tensor, rows: Tensor) -> None:
        """Note a stream that was sharded, and this rank's rows of it."""
        if self.done:
            return
        if stream.dim() == 1 and not stream.is_floating_point() and not stream.is_complex():
            self._sharded.append(Sharded(stream, rows))
        else:
            self._others = True

    def indexed(self) -> None:
        """Note that the user asked for ``step.indices``, and may have taken rows of a stream by them."""
        self._others = True

    def copied(self, labels: Tensor, ignore: int, batch: Batch, own_cut: bool) -> str | None:
        """Return the warning to give if labels are the tokens themselves, else None. ``own_cut`` says that this rank
        could have cut its input from the stream without the step.
        """
        ids, sharded, others = self._ids, self._sharded, self._others
        self.done, self._ids, self._sharded = True, None, []
        counted = (labels != ignore).cpu()
        kept = labels.cpu().long()[counted]
        if len(kept) < 2 or bool((kept == kept[0]).all()):
            return None

        def equal(rows: Tensor) -> bool:
            return len(rows) == len(labels) and bool((rows.cpu().long()[counted] == kept).all())

        if ids is not None:
            return WARNING if equal(ids) else None
        same = [seen for seen in sharded if equal(seen.rows) and not bool((seen.stream.long() < 0).any())]
        rest = [seen for seen in sharded if not equal(seen.rows)]
        if len(same) > 1:
            shifted = any(_follows(same[0].stream.cpu().long(), seen.stream.cpu().long(), batch) for seen in rest)
            return None if shifted else WARNING
        alone = len(same) == 1 and not rest and not others and not own_cut
        return WARNING + INPUT_FROM_ELSEWHERE if alone else None


def _follows(labels: Tensor, tokens: Tensor, batch: Batch) -> bool:
    """Return whether ``labels`` holds the next tokens of the stream ``tokens``."""
    wanted = next_tokens(tokens, batch, NONE)
    return bool(((labels == wanted) | (wanted == NONE)).all())
