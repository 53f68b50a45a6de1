"""Rollouts: the micro-batches of a reinforcement-learning step, run by all ranks together.

Results come back in the caller's order.

    for part in shared_rollouts(rollouts, planner, masks=huggingface.masks(model.config)):    # ids of each of this rank
        log_probs = part.log_probs(model(**part.inputs).logits[0])
        old, advantage = part.of(old_log_probs), part.of(advantages)          # what the caller has of each rollout
        loss = -(torch.exp(log_probs - old) * advantage).sum() / tokens_of_the_step
        loss.backward()

Trainers of this kind (verl, slime, prime-rl) give every rank its own rollouts, cut them into micro-batches by a cap on
tokens, and use one fixed degree of context parallelism, chosen for the longest. Here the rollouts of all ranks form one
pool: ``planner.micro_batches`` cuts it, each micro-batch has its own plan, and every rank takes part in all of them.
Results of a token go back to the rank that owns its rollout, so rewards, advantages and old log-probabilities stay
where they are, and the loss is that of data parallelism. Gradients travel the opposite way, and are averaged or summed
over ranks as before.

A rank may have no rollout in a micro-batch. Its tensors are then empty, and it must still run the backward of a loss
that is a sum over them.
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
    """One micro-batch: this rank's ``rows`` of it, and which of this rank's own rollouts are part of it."""

    rollouts: list[int]
    """The numbers of this rank's rollouts in the micro-batch, in the order of its stream."""
    lengths: list[int]
    """The tokens of each rollout in ``rollouts``."""
    rows: Rows

    @property
    def inputs(self) -> dict[str, Any]:
        """Keywords for a Hugging Face model's forward of this rank's rows."""
        rows = self.rows
        return {
            "input_ids": rows.tokens[None],
            "position_ids": rows.positions[None],
            "step": rows.step,
            "use_cache": False,
        }

    def of(self, values: Sequence[Tensor]) -> Tensor:
        """Return the values of those of this rank's rollouts that are in this micro-batch, end to end.

        ``values`` has a tensor with one entry per token for each of this rank's rollouts. Raise ValueError if a tensor
        has another length.
        """
        found = [values[number] for number in self.rollouts]
        for number, value, length in zip(self.rollouts, found, self.lengths, strict=True):
            if len(value) != length:
                raise ValueError(
                    f"rollout {number} has {length} tokens, but {len(value)} values were given of it: "
                    "give one for each token"
                )
        return torch.cat(found) if found else values[0][:0] if values else torch.zeros(0)

    def returned(self, values: Tensor) -> Tensor:
        """Return values of this rank's rows, ``[rows, ...]``, as values of this rank's own rollouts end to end.

        The values of a rollout's tokens come from the ranks that computed them. Differentiable; every rank calls it.
        """
        return self.rows.step.losses.report(self.rows.returned(values))

    def log_probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each token of this rank's rollouts in the micro-batch, end to end.

        Each is given the tokens before it; the first token of a rollout has 0. ``logits`` are those of this rank's
        rows, ``[rows, vocabulary]``, and are divided by ``temperature``. One number per row is sent.
        """
        labels = self.rows.labels
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        scores = torch.log_softmax(wide / temperature, -1)
        found = scores.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels == IGNORE, 0)
        # The value at the last token of a rollout is 0; shifted by one it becomes that of the next rollout's first
        # token.
        return torch.roll(self.returned(found), 1)


def shared_rollouts(
    rollouts: Sequence[Tensor], planner: Planner, group: dist.ProcessGroup | None = None, **options: Any
) -> Iterator[RolloutPart]:
    """Yield the micro-batches of the rollouts of all ranks; a single one if the planner has no cap.

    A cap is the planner's ``max_tokens_per_rank`` or ``max_memory_per_rank``. ``rollouts`` are this rank's, at least
    one, each as token ids ``[tokens]``; ``options`` go to the planner's call. Every rank of ``group``, all by default,
    must call this and run every forward and backward.
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
