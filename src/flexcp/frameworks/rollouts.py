"""Rollouts: micro-batches of a reinforcement-learning step, run by all ranks together, results in the caller's order.

    for part in shared_rollouts(rollouts, planner, masks=huggingface.masks(model.config)):    # ids of each of this rank
        log_probs = part.log_probs(model(**part.inputs).logits[0])
        old, advantage = part.of(old_log_probs), part.of(advantages)          # what the caller has of each rollout
        loss = -(torch.exp(log_probs - old) * advantage).sum() / tokens_of_the_step
        loss.backward()

Trainers of this kind (verl, slime, prime-rl) give every rank rollouts of its own, cut them into micro-batches by a cap
on tokens, and fix one degree of context parallelism for the longest. Here the rollouts of all ranks are one pool:
``planner.micro_batches`` cuts it, each micro-batch has a plan of its own, and every rank takes part in all of them, as
many on every rank. What was computed of a token goes back to the rank whose rollout it is, so rewards, advantages and
old log-probabilities stay where they are, and the loss is that of data parallelism. Its gradient travels the other way:
averaging or summing gradients over ranks is what it was.

A rank may have no rollout in a micro-batch. Its tensors are then empty, and a sum over them is a loss whose backward it
must run as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.bind import bind
from flexcp.frameworks.shared_batch import IGNORE, Rows, gathered, next_in_document, rows_of
from flexcp.planner import Planner


@dataclass(frozen=True)
class RolloutPart:
    """A micro-batch: this rank's rows of it, and which of this rank's rollouts are in it."""

    rollouts: list[int]
    """Numbers of this rank's rollouts in the micro-batch, in order; those of other ranks are not among them."""
    lengths: list[int]
    """Their tokens."""
    rows: Rows

    @property
    def inputs(self) -> dict[str, Any]:
        """Keywords of a Hugging Face model's forward for this rank's rows."""
        rows = self.rows
        return {
            "input_ids": rows.tokens[None],
            "position_ids": rows.positions[None],
            "step": rows.step,
            "use_cache": False,
        }

    def of(self, values: Sequence[Tensor]) -> Tensor:
        """What the caller has of each rollout, a tensor of its tokens, of those in this micro-batch end to end."""
        found = [values[number] for number in self.rollouts]
        for number, value, length in zip(self.rollouts, found, self.lengths, strict=True):
            if len(value) != length:
                raise ValueError(
                    f"rollout {number} has {length} tokens, but {len(value)} values were given of it: "
                    "give one for each token"
                )
        return torch.cat(found) if found else values[0][:0] if values else torch.zeros(0)

    def returned(self, values: Tensor) -> Tensor:
        """Values of this rank's rows, ``[rows, ...]``, as values of this rank's rollouts end to end.

        Differentiable; every rank calls it.
        """
        return self.rows.step.losses.say(self.rows.returned(values))

    def log_probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """The log-probability of each token of this rank's rollouts, end to end, after those before it;
        0 for the first of each.

        ``logits`` are of this rank's rows, ``[rows, vocabulary]``; one number of each row travels.
        """
        labels = self.rows.labels
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        scores = torch.log_softmax(wide / temperature, -1)
        found = scores.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels == IGNORE, 0)
        # What stands at the last token of a rollout is 0: moved on by one it is that of the next rollout's first.
        return torch.roll(self.returned(found), 1)


def shared_rollouts(
    rollouts: Sequence[Tensor], planner: Planner, group: dist.ProcessGroup | None = None, **options: Any
) -> Iterator[RolloutPart]:
    """The micro-batches of the rollouts of all ranks, one after another;
    one of all of them where the planner has no cap.

    ``rollouts`` are this rank's, token ids ``[tokens]`` of each, at least one; ``options`` go to the planner's call.
    Every rank of ``group``, all by default, calls it and runs every forward and backward.
    """
    if not rollouts:
        raise ValueError("a rank needs at least one rollout: deal them so that none has nothing")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    mine = torch.tensor([len(rollout) for rollout in rollouts], device=rollouts[0].device)
    counts, ids = gathered([mine, torch.cat(list(rollouts))], group)
    lengths = torch.cat(counts).tolist()
    documents = torch.cat(ids).split(lengths)
    first = list(accumulate((len(part) for part in counts), initial=0))
    capped = planner.max_tokens_per_rank is not None or planner.max_memory_per_rank is not None
    parts = (
        planner.micro_batches(lengths, **options)
        if capped
        else [(list(range(len(lengths))), planner(lengths, **options))]
    )
    for numbers, plan in parts:
        step = bind(plan, group)
        stream = torch.cat([documents[number] for number in numbers])
        held = [[n for n in numbers if start <= n < stop] for start, stop in pairwise(first)]
        ends = accumulate((sum(lengths[n] for n in part) for part in held), initial=0)
        rows = rows_of(step, stream, next_in_document(stream, [lengths[n] for n in numbers]))
        loaded = tuple(range(start, stop) for start, stop in pairwise(ends))
        own = held[step.rank]
        yield RolloutPart(
            [n - first[step.rank] for n in own],
            [lengths[n] for n in own],
            Rows(step, rows.tokens, rows.positions, rows.labels, loaded),
        )
