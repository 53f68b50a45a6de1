"""Hugging Face Trainer and Accelerate: batches of all ranks, planned and sharded before each forward.

    trainer = FlexcpTrainer(model, args, train_dataset=..., data_collator=..., planner=planner)
    trainer.train()

The Trainer goes on as in data parallelism: its sampler gives every rank its own documents, DDP or FSDP averages gradients, and the loss is
scaled as it scales any (``num_items_in_batch`` over all devices). In between, :func:`prepared` makes the ranks' documents one batch. A
collator may pad (``attention_mask``), flatten or pack (``position_ids`` that start anew, or documents numbered in the mask); all become a
stream without padding. With Accelerate and a loop of one's own the same function is all there is:
``loss = model(**prepared(batch, planner, gradients="averaged")).loss``, since Accelerate averages gradients.

Trainers built on the Trainer may evaluate without its preparation (TRL's SFTTrainer does, under ``class T(FlexcpTrainer, SFTTrainer)``), so
the loss prepares a batch that is not, and tells them its labels over all ranks: they would divide by this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from flexcp.executor.averaging import Gradients
from flexcp.executor.local_rows import refuse_shifted
from flexcp.executor.step import Step
from flexcp.frameworks import not_used
from flexcp.frameworks.huggingface import keywords_of, masks, turn_on
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


def of_the_batch(found: Any, step: Step) -> Any:
    """An evaluated loss as the whole batch's on every rank: the Trainer weighs what ranks return by documents."""
    loss = found[0] if isinstance(found, tuple) else found
    mean = step.collectives.summed("evaluation", loss.detach()) / step.cp_size
    return (mean, *found[1:]) if isinstance(found, tuple) else mean


def prepared(
    batch: Mapping[str, Any],
    planner: Planner,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    gradients: Gradients = "summed",
    **options: Any,
) -> dict[str, Any]:
    """Keywords of the model's forward for this rank, from the batch its collator made.

    ``group`` is all ranks by default. ``gradients`` says what happens to gradients over them, as in :func:`flexcp.Step.loss`: with
    ``"summed"`` ``model(**prepared).loss`` is this rank's sum / the valid labels of all ranks, with ``"averaged"`` (DDP, Accelerate) as
    many times that as there are ranks. ``options`` go to the planner's call (``masks=``, ``tokens=``).
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
    return keywords_of(rows, valid.clamp(min=1), gradients)


def _stream(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, list[int]]:
    """A collator's batch without padding: tokens end to end, shifted labels, documents."""
    ids = batch["input_ids"]
    labels = batch.get("labels", ids)
    mask = batch.get("attention_mask")
    if mask is not None and (mask.shape != ids.shape or bool((mask < 0).any())):
        raise NotImplementedError(
            f"attention_mask of shape {tuple(mask.shape)} is not a padding mask of {tuple(ids.shape)} tokens: 0 for padding, 1 for "
            "tokens, or the number of each token's document"
        )
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    said = _documents(batch, keep)
    name, lengths = next(iter(said.items()), ("rows", []))
    for other, found in said.items():
        if found != lengths:
            raise ValueError(
                f"{other} says that documents have {found} tokens, {name} says {lengths}; give one of them, or both alike"
            )
    if not said:
        _refuse_holes(keep)
        lengths = [n for n in keep.sum(1).tolist() if n]
    tokens, kept = ids[keep], labels[keep]
    refuse_shifted(tokens, kept, next_in_document(tokens, lengths), IGNORE, "flexcp")
    return tokens, next_in_document(kept, lengths), lengths


def _documents(batch: Mapping[str, Any], keep: Tensor) -> dict[str, list[int]]:
    """The lengths of documents without padding, as each part of a batch that knows of them has them."""
    said = {}
    mask, positions, numbers, borders = (
        batch.get(name) for name in ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q")
    )
    if positions is not None:
        rows = _kept(positions, keep)
        if not bool(keep.all()) and any(bool(((row.diff() != 1) & (row[1:] != 0)).any()) for row in rows):
            raise ValueError(
                "position_ids of a padded batch jump inside a row without starting anew at 0, so nothing says where documents end"
            )
        said["position_ids"] = [n for row in rows for n in lengths_of(row[None])]
    if mask is not None and bool((mask > 1).any()):
        said["attention_mask"] = _numbered(mask, keep)
    if numbers is not None:
        said["seq_idx"] = _numbered(numbers, keep)
    if borders is not None:
        said["cu_seq_lens_q"] = [n for n in borders.diff().tolist() if n]
    return said


def _kept(values: Tensor, keep: Tensor) -> list[Tensor]:
    """The values of each row's tokens, without padding; rows of padding alone are left out."""
    pairs = zip(values.expand_as(keep), keep, strict=True)
    return [row[kept] for row, kept in pairs if bool(kept.any())]


def _numbered(numbers: Tensor, keep: Tensor) -> list[int]:
    """Lengths of the stretches of each row's tokens that have one number."""
    return [n for row in _kept(numbers, keep) for n in row.unique_consecutive(return_counts=True)[1].tolist()]


def _refuse_holes(keep: Tensor) -> None:
    """Raise for padding between a row's tokens, which may be the border of two documents or not."""
    begins = keep.int().diff(dim=1, prepend=keep.new_zeros(len(keep), 1).int()) == 1
    if bool((begins.sum(1) > 1).any()):
        raise ValueError(
            "attention_mask has padding between a row's tokens, and nothing says whether documents end there; give position_ids that "
            "start anew with every document"
        )


class FlexcpTrainer(Trainer):
    """A Trainer whose ranks share every batch. ``planner`` plans for as many ranks as the Trainer has; ``options`` go to its call."""

    def __init__(
        self, model: Any, *arguments: Any, planner: Planner, options: Mapping[str, Any] | None = None, **keywords: Any
    ) -> None:
        turn_on(model)
        self._planner = planner
        self._options = {"masks": masks(model.config), **(options or {})}
        super().__init__(model, *arguments, **keywords)
        self._refuse()
        if self.accelerator.num_processes != planner.cluster.ranks:
            raise ValueError(
                f"the planner plans for {planner.cluster.ranks} ranks, but the Trainer runs on {self.accelerator.num_processes}: make it "
                f"with cluster=flexcp.cluster('h100', nodes=..., ranks_per_node=...) of {self.accelerator.num_processes} ranks, or start "
                f"{planner.cluster.ranks} processes"
            )

    def _refuse(self) -> None:
        """Raise for what would make other losses of a batch that ranks share."""
        ranks = self.accelerator.num_processes
        if ranks > 1 and not self.args.average_tokens_across_devices:
            raise ValueError(
                "ranks that share a batch divide by the labels of all of them: set average_tokens_across_devices=True"
            )
        if ranks > 1 and not self.model_accepts_loss_kwargs:
            raise NotImplementedError(
                f"{type(self.model).__name__} takes no num_items_in_batch, so the Trainer would average shares of one loss"
            )
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise NotImplementedError(
                "label_smoothing_factor and compute_loss_func shift labels that flexcp already shifted inside documents; drop them, or "
                "write a loop of your own with huggingface_trainer.prepared"
            )

    def _prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        found = prepared(self._prepare_inputs(inputs), self._planner, **self._options)
        del found["gradients"]  # the Trainer scales losses itself, for gradients that are averaged
        return found | {"num_items_in_batch": found["num_items_in_batch"].count}

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """The Trainer's own place for sharding a batch, called before every forward of training and evaluation."""
        return nullcontext, self._prepared(inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **keywords: Any,
    ) -> Any:
        """The Trainer's loss, by a model that used the step, of a batch that was prepared, here or before."""
        inputs = inputs if "step" in inputs else self._prepared(inputs)
        step, valid = inputs["step"], inputs["num_items_in_batch"]
        before = step.calls
        number = valid if num_items_in_batch is None else num_items_in_batch
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=number, **keywords)
        if step.calls == before:
            raise RuntimeError(not_used(step))
        step.losses.say(loss[0] if isinstance(loss, tuple) else loss)
        return loss if torch.is_grad_enabled() else of_the_batch(loss, step)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *arguments: Any, **keywords: Any
    ) -> Any:  # fmt: skip
        """The Trainer's, of losses alone."""
        alone = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not alone:
            raise NotImplementedError(
                "predict and compute_metrics want logits row by row, but a rank's logits are its tokens of a batch that all ranks share; "
                "evaluate with prediction_loss_only=True and without compute_metrics, or predict with transformers' own Trainer"
            )
        return super().evaluation_loop(dataloader, description, prediction_loss_only, *arguments, **keywords)
