"""Shared batch: the documents that every rank loaded for itself, as one batch of all ranks.

Frameworks load data in parallel: each rank draws its own documents. Token ids are small, so all ranks gather all of
them, plan the whole batch, and keep the rows that the plan gives them. The user's dataset, sampler and collator stay
the same, and all ranks share the work of a long document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.bind import DEFAULT_TIMEOUT, bind
from flexcp.executor.exchange.collectives import Collectives
from flexcp.executor.step import Step
from flexcp.plan.plan import Plan
from flexcp.plan.positions import refuse_branches

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IGNORE = -100
"""The label of tokens that are not to be predicted."""


@dataclass(frozen=True)
class Rows:
    """This rank's rows of a batch: token ids, positions and shifted labels, each ``[rows]``.

    They are never empty: a rank without tokens has one row that no other row sees.
    """

    step: Step
    tokens: Tensor
    positions: Tensor
    labels: Tensor
    loaded: tuple[range, ...] = ()
    """For each rank the range of stream tokens that it loaded, if ranks loaded their own documents."""

    def returned(self, values: Tensor) -> Tensor:
        """Return values of this rank's rows, ``[rows, ...]``, as values of the tokens that this rank loaded.

        They are in the order in which the rank loaded them. Differentiable. Every rank has to call it and to run its
        backward.
        """
        return self.step.relayout(values[: self.step.local_tokens], self.loaded)


def lengths_of(positions: Tensor) -> list[int]:
    """Return the document lengths in a ``[rows, tokens]`` tensor of positions, row after row.

    A document begins where a position is not its predecessor plus 1, and with each row.
    """
    found = []
    for row in positions.cpu():
        edges = [0, *((row.diff() != 1).nonzero().flatten() + 1).tolist(), len(row)]
        found += [b - a for a, b in pairwise(edges)]
    return found


def next_in_document(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the labels of a stream: each token's successor, and -100 at the end of each document.

    ``lengths`` are those of the documents.
    """
    labels = torch.roll(tokens, -1, 0)
    labels[torch.tensor(lengths, dtype=torch.int64).cumsum(0).to(tokens.device) - 1] = IGNORE
    return labels


def share(
    tokens: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    planner: Callable[..., Plan],
    group: dist.ProcessGroup | DeviceMesh,
    /,
    labelled: bool = True,
    **options: Any,
) -> Rows:
    """Return this rank's rows of the batch that all ranks of ``group`` loaded together.

    ``tokens`` and shifted ``labels`` are this rank's own documents end to end, ``[T]``, and ``lengths`` the tokens of
    each document. ``labelled`` tells whether this rank's labels are given, and not its own next tokens for want of
    labels. ``options`` go to the call of ``planner``, a :class:`flexcp.Planner` or a function with the same call. Every
    rank of the group calls this. Raise ValueError on all of them if some have labels and others have none.
    """
    process_group = group if isinstance(group, dist.ProcessGroup) else group.get_group()
    of_documents, marks = (torch.tensor(x, dtype=torch.int64, device=tokens.device) for x in (lengths, [int(labelled)]))
    *parts, marked = gathered([of_documents, tokens, labels, marks], process_group)
    _refuse_some_labels([bool(mark) for mark in marked], [len(part) > 0 for part in parts[0]])
    all_lengths, stream, all_labels = (torch.cat(part) for part in parts)
    step = bind(planner(all_lengths.tolist(), **options), process_group)
    ends = list(accumulate(len(part) for part in parts[1]))
    loaded = tuple(range(start, stop) for start, stop in pairwise([0, *ends]))
    return replace(rows_of(step, stream, all_labels), loaded=loaded)


def _refuse_some_labels(labelled: Sequence[bool], loaded: Sequence[bool]) -> None:
    """Raise ValueError if some ranks have labels and others have none.

    ``labelled`` and ``loaded`` tell for each rank whether it has labels and documents; ranks without documents do not
    count.
    """
    ranks = [[rank for rank, mark in enumerate(labelled) if loaded[rank] and mark is kind] for kind in (True, False)]
    if all(ranks):
        given, missing = ranks[0][0], ranks[1][0]
        raise ValueError(
            f"the batch of rank {given} has labels and that of rank {missing} has none, so rank {missing} would train "
            "on every next token, prompts included: give labels on all ranks (not shifted, -100 at tokens that are not "
            "to be predicted) or on none"
        )


def rows_of(step: Step, tokens: Tensor, labels: Tensor) -> Rows:
    """Return this rank's rows of a stream and its shifted labels; raise NotImplementedError if a document branches."""
    refuse_branches(step.plan.batch, "shifted labels know")
    if step.local_tokens == 0:
        return Rows(step, tokens.new_zeros(1), tokens.new_zeros(1), labels.new_full((1,), IGNORE))
    return Rows(step, step.shard(tokens), step.tables.positions_on(tokens.device), step.shard(labels, pad=IGNORE))


def gathered(tensors: list[Tensor], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Gather 1-D integer tensors from all ranks, with one exchange of sizes and one of the contents.

    The result has for each tensor a list with that tensor of every rank, int64. Ranks may have different lengths.
    """
    collectives = Collectives(group, DEFAULT_TIMEOUT)
    sizes = torch.tensor([len(x) for x in tensors], device=tensors[0].device)
    counts = [size.tolist() for size in collectives.gathered("the exchange of batch sizes", sizes)]
    mine = torch.cat([x.to(torch.int64) for x in tensors])
    padded = mine.new_zeros(max(sum(c) for c in counts))
    padded[: len(mine)] = mine
    everything = collectives.gathered("the exchange of documents", padded)
    split = [x[: sum(c)].split(c) for x, c in zip(everything, counts, strict=True)]
    return [list(part) for part in zip(*split, strict=True)]
