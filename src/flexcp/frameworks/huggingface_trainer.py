"""Hugging Face Trainer and Accelerate: batches of all ranks, planned and sharded before each forward.

    trainer = FlexcpTrainer(model, args, train_dataset=..., data_collator=..., planner=planner)
    trainer.train()

The Trainer goes on as in data parallelism: its sampler gives every rank its own documents, DDP or FSDP averages gradients, and the loss is
scaled as it scales any (``num_items_in_batch`` over all devices). In between, :func:`prepared` makes the ranks' documents one batch. A
collator may pad (``attention_mask``) or flatten (``position_ids`` that start anew); both become a stream without padding. With Accelerate
and a loop of one's own the same function is all there is: ``loss = model(**prepared(batch, planner)).loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from flexcp.frameworks import not_used
from flexcp.frameworks.huggingface import masks, turn_on
from flexcp.frameworks.shared_batch import IGNORE, lengths_of, next_in_document, share
from flexcp.planner import Planner

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BORDERS = {
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
}
KNOWN = {"input_ids", "labels"} | BORDERS


def prepared(
    batch: Mapping[str, Any], planner: Planner, group: dist.ProcessGroup | DeviceMesh | None = None, **options: Any
) -> dict[str, Any]:
    """Keywords of the model's forward for this rank, from the batch its collator made.

    ``group`` is all ranks by default. ``options`` go to the planner's call (``masks=``, ``tokens=``). ``model(**prepared).loss`` is this
    rank's sum / the valid labels of all ranks.
    """
    unknown = set(batch) - KNOWN
    if unknown:
        raise NotImplementedError(
            f"the batch holds {', '.join(sorted(unknown))}, which flexcp would not know how to shard"
        )
    tokens, labels, lengths = _stream(batch)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    rows = share(tokens, labels, lengths, planner, group, **options)
    valid = (rows.labels != IGNORE).sum()
    dist.all_reduce(valid, group=group if isinstance(group, dist.ProcessGroup) else group.get_group())
    return {
        "input_ids": rows.tokens[None],
        "position_ids": rows.positions[None],
        "labels": rows.labels[None],
        "shift_labels": rows.labels[None],
        "num_items_in_batch": valid.clamp(min=1),
        "step": rows.step,
        "use_cache": False,
    }


def _stream(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, list[int]]:
    """A collator's batch without padding: tokens end to end, shifted labels, documents."""
    ids = batch["input_ids"]
    labels = batch.get("labels", ids)
    keep = batch.get("attention_mask")
    if keep is not None and not bool(keep.all()):
        keep = keep.bool()
        lengths = [int(n) for n in keep.sum(1).tolist() if n]
    else:
        keep = torch.ones_like(ids, dtype=torch.bool)
        positions = batch.get("position_ids")
        lengths = [ids.shape[1]] * ids.shape[0] if positions is None else lengths_of(positions.expand_as(ids))
    borders = batch.get("cu_seq_lens_q")
    if borders is not None and [n for n in borders.diff().tolist() if n] != lengths:
        raise ValueError(
            f"cu_seq_lens_q {borders.tolist()} disagrees with the documents {lengths}; give position_ids that start anew"
        )
    return ids[keep], next_in_document(labels[keep], lengths), lengths


class FlexcpTrainer(Trainer):
    """A Trainer whose ranks share every batch. ``planner`` plans for as many ranks as the Trainer has; ``options`` go to its call."""

    def __init__(
        self, model: Any, *arguments: Any, planner: Planner, options: Mapping[str, Any] | None = None, **keywords: Any
    ) -> None:
        turn_on(model)
        self._planner = planner
        self._options = {"masks": masks(model.config), **(options or {})}
        super().__init__(model, *arguments, **keywords)
        if self.accelerator.num_processes != planner.cluster.ranks:
            raise ValueError(
                f"the planner plans for {planner.cluster.ranks} ranks, but the Trainer runs on {self.accelerator.num_processes}"
            )

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """The Trainer's own place for sharding a batch, called before every forward of training and evaluation."""
        return nullcontext, prepared(self._prepare_inputs(inputs), self._planner, **self._options)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        """The Trainer's loss, by a model that used the step."""
        step = inputs["step"]
        before = step.calls
        loss = super().compute_loss(model, inputs, *arguments, **keywords)
        if step.calls == before:
            raise RuntimeError(not_used(step))
        return loss
