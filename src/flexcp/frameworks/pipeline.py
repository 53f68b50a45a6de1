"""Pipelines of torch.distributed.pipelining: one plan for each micro-batch, which every stage uses for it.

The ranks of a stage are a pool, and every stage binds the same plans to its own pool. No plan is sent: all ranks plan
the same, so the number of a micro-batch identifies its step on every stage. The number goes through the schedule as a
tensor like any other input, and the list of steps as a keyword that the schedule copies to every micro-batch.
:class:`PlannedStage` looks the step up by its number.

torch's pipelines allocate for one shape, so all micro-batches must keep the same number of tokens on every rank: plan
them with ``tokens="equal"`` and ``pad_to`` the most that any of them needs (with ``planner.micro_batches``: the cap).
Megatron's pipelines allow changing shapes (:mod:`flexcp.frameworks.megatron`).

    parts    = planner.micro_batches(lengths, tokens="equal", pad_to=cap)
    batches  = PlannedMicroBatches(parts, group)
    stage    = PipelineStage(PlannedStage(part_of_model), ...)
    schedule = Schedule1F1B(stage, len(batches), loss_fn=batches.loss(documents), scale_grads=False)
    schedule.step(batches.shard(documents), **batches.keywords())                             # the first stage
    schedule.step(target=batches.labels(documents), **batches.keywords())                     # the last one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexcp.executor.bind import bind
from flexcp.executor.losses.averaging import Gradients, share_factor
from flexcp.executor.step import Step
from flexcp.plan.plan import Plan
from flexcp.plan.positions import refuse_branches

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IGNORE = -100


class PlannedMicroBatches:
    """The micro-batches of a global batch, bound to the ranks of this pipeline stage.

    ``parts`` has for each micro-batch the numbers of its documents and its plan, as ``planner.micro_batches`` returns
    them; every rank of every stage passes the same. ``group`` is the ranks of this stage. Raise ValueError unless all
    ranks keep the same number of tokens in all micro-batches.
    """

    def __init__(
        self, parts: Sequence[tuple[Sequence[int], Plan]], group: dist.ProcessGroup | DeviceMesh | None = None
    ) -> None:
        if not parts:
            raise ValueError("a pipeline needs at least 1 micro-batch")
        counts = sorted({int(n) for _, plan in parts for n in plan.placement.tokens})
        if len(counts) > 1:
            raise ValueError(
                f"torch's pipelines take one shape, but the micro-batches keep {counts} tokens on ranks; plan them all "
                f"with tokens='equal', pad_to={counts[-1]} or more"
            )
        self.documents = [list(documents) for documents, _ in parts]
        self.steps = [bind(plan, group) for _, plan in parts]
        for step in self.steps:
            step.losses.settled = True  # the last stage computes the loss, see :meth:`loss`
            step.asked_for_rows = True  # :meth:`shard` reads them on the first stage

    def __len__(self) -> int:
        return len(self.steps)

    def keywords(self) -> dict[str, Any]:
        """Return keywords for ``schedule.step``, by which :class:`PlannedStage` finds the step of each micro-batch."""
        return {"number": torch.arange(len(self)), "steps": self.steps}

    def shard(self, documents: Sequence[Tensor]) -> Tensor:
        """Return this rank's rows of the global batch's documents, ``[micro-batches, local tokens, ...]``.

        ``documents`` has a tensor with a row for each token, for every document of the global batch.
        """
        return self._stacked(documents, lambda step, stream: step.shard(stream))

    def labels(self, documents: Sequence[Tensor], ignore: int = IGNORE) -> Tensor:
        """Return the next-token labels of :meth:`shard`'s rows, ``[micro-batches, local tokens]``.

        ``ignore`` marks pads and the last tokens of documents.
        """
        return self._stacked(documents, lambda step, stream: step.labels(stream, ignore))

    def loss(
        self, documents: Sequence[Tensor], ignore: int = IGNORE, gradients: Gradients = "summed"
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the schedule's ``loss_fn``: this rank's sum for a micro-batch / the labels of the global batch.

        ``documents`` are those that :meth:`labels` was given; the divisor counts their next tokens that are not
        ``ignore``. Make the schedule with ``scale_grads=False`` and sum losses over micro-batches. Sum gradients over
        the ranks of the stage, or pass ``gradients="averaged"`` if they are averaged (see ``step.loss``). Raise
        NotImplementedError for documents that branch.
        """
        for step in self.steps:
            refuse_branches(step.plan.batch, "this loss knows")
        valid = max(1, sum(int((d[1:] != ignore).sum()) for d in documents))
        factor = share_factor(gradients, self.steps[0].cp_size)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            for step in self.steps:
                step.losses.check_reduction(gradients)
            flat = logits.flatten(0, -2)
            wide = flat.float() if flat.dtype.itemsize < 4 else flat
            total = nn.functional.cross_entropy(wide, labels.flatten(), ignore_index=ignore, reduction="sum")
            return total * factor / valid

        return loss

    def _stacked(self, documents: Sequence[Tensor], local: Callable[[Step, Tensor], Tensor]) -> Tensor:
        parts = zip(self.documents, self.steps, strict=True)
        return torch.stack([local(step, torch.cat([documents[d] for d in chosen])) for chosen, step in parts])


class PlannedStage(nn.Module):
    """A part of a model that is called with the ``step`` of its micro-batch.

    Its forward takes the keywords of :meth:`PlannedMicroBatches.keywords`.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor, number: Tensor, steps: Sequence[Step], **more: Any) -> Any:
        return self.inner(*inputs, step=steps[int(number)], **more)
