"""Functions that run on ranks in tests of the Trainer adapter; light to import (see parallel_runs.py)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from example_runs import EXAMPLES
from loss_warning import refusing_the_loss_warning
from torch import Tensor

import flexcp
from lib.model_runs import Run, make_model

DOCUMENTS = 24
RATE = 1e-2


def documents() -> list[Tensor]:
    """Return documents of 1 to 23 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + 7 * i % 23 for i in range(DOCUMENTS)]
    return [torch.randint(64, (n,), generator=generator) for n in lengths]


@dataclass(frozen=True)
class Case:
    """How a model is trained: by flexcp's Trainer (``ours``) or the stock one, with which collator and settings."""

    collator: str = "padded"
    ours: bool = True
    kind: str = "plain"
    """The base class of the Trainer: "plain" for the stock Trainer, "own loss" for one with another loss."""
    more: dict[str, Any] = field(default_factory=dict)
    """More training arguments."""
    ignoring: bool = False
    predicting: bool = False
    resume: bool = False


def trained(group: dist.ProcessGroup, folder: str, case: Case) -> dict[str, Any]:
    """Train two optimizer steps (by default) of two micro-batches of three documents a rank, and evaluate."""
    from transformers import Trainer, TrainingArguments

    from flexcp.frameworks import huggingface

    ranks = dist.get_world_size()
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(ranks), LOCAL_RANK=str(dist.get_rank()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    reset_accelerate()
    model = make_model(Run("gemma2", dtype="float32"), "eager")
    data = [{"input_ids": d, "labels": d} if case.collator == "flat" else {"input_ids": d} for d in documents()]
    settings = {
        "use_cpu": True,
        "max_steps": 2,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "data_seed": 0,
        "disable_tqdm": True,
        "prediction_loss_only": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    more = dict(case.more)
    if "parallelism_config" in more:
        from accelerate.parallelism_config import ParallelismConfig

        more["parallelism_config"] = ParallelismConfig(**more["parallelism_config"])
    arguments = TrainingArguments(folder, **(settings | more))
    if arguments.fsdp:
        take_ranks_for_devices()
    given = {"train_dataset": data, "eval_dataset": data[:12], "data_collator": collators()[case.collator]}
    if case.ours:
        planner = huggingface.planner(model, flexcp.cluster("cpu", 1, ranks), strategy="blocks")
        trainer = trainer_class(case.kind)(model, arguments, **given, planner=planner)
    else:
        trainer = (own_loss(Trainer) if case.kind == "own loss" else Trainer)(model, arguments, **given)
    if case.ignoring:
        model.set_attn_implementation("eager")
    with refusing_the_loss_warning():
        trainer.train(resume_from_checkpoint=case.resume)
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "wrapped": type(trainer.model_wrapped).__name__,
        "weights": whole_weights(model),
        "eval": None if case.collator == "unlabelled" else trainer.evaluate()["eval_loss"],
        "predictions": predicted(trainer, data[:12]) if case.predicting else None,
    }


def evaluated(group: dist.ProcessGroup | None, folder: str, kind: str, collator: str, count: int, batch: int) -> float:
    """Return the evaluation loss of ``count`` documents in batches of ``batch`` over all ranks.

    With ``group`` None it is the loss of the stock trainer on one process. ``kind`` is "plain", "smoothing", "metrics"
    (the logits are returned too) or "sft" (TRL's SFTTrainer).
    """
    from transformers import Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    from flexcp.frameworks.huggingface_trainer import FlexcpTrainer

    ranks = 1 if group is None else dist.get_world_size()
    if group is not None:
        os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(ranks), LOCAL_RANK=str(dist.get_rank()))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    reset_accelerate()
    model = make_model(Run("llama", dtype="float32"), "eager")
    data: Any = [{"input_ids": d.tolist(), "labels": d.tolist()} for d in documents()[1 : count + 1]]
    settings: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "per_device_eval_batch_size": batch // ranks,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "prediction_loss_only": kind != "metrics",
        "label_smoothing_factor": 0.1 if kind == "smoothing" else 0.0,
    }
    given: dict[str, Any] = {"data_collator": collators()[collator]}
    base: Any = Trainer
    if kind == "sft":
        from datasets import Dataset

        with patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
            import made_text
        base, given["processing_class"] = SFTTrainer, made_text.tokenizer()
        data = Dataset.from_list(data)
        arguments = SFTConfig(folder, dataset_kwargs={"skip_prepare_dataset": True}, **settings)
    else:
        arguments = TrainingArguments(folder, **settings)
    if group is not None:
        base = type("Ours", (FlexcpTrainer, base), {})
        given["cluster"] = flexcp.cluster("cpu", 1, ranks)
    trainer = base(model, arguments, train_dataset=data, eval_dataset=data, **given)
    return float(trainer.evaluate()["eval_loss"])


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Return the model's weights, gathered if FSDP2 has sharded them."""
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name: weight.detach().clone() for name, weight in whole.items()}


def predicted(trainer: Any, data: list[Any]) -> tuple[Tensor, float]:
    """Return the logits of all labelled tokens, which ``predict`` gathers on every rank in the rows of the collator,
    and the loss.
    """
    trainer.args.prediction_loss_only = False
    found = trainer.predict(data)
    logits, labels = torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids)
    return logits[:, :-1][labels[:, 1:] != -100], found.metrics["test_loss"]


def trainer_class(kind: str) -> Any:
    """Return flexcp's Trainer, based on the stock Trainer or on one with a loss of its own."""
    from transformers import Trainer

    from flexcp.frameworks.huggingface_trainer import FlexcpTrainer

    return type("Ours", (FlexcpTrainer, own_loss(Trainer)), {}) if kind == "own loss" else FlexcpTrainer


def own_loss(base: Any) -> Any:
    """Return a Trainer class whose loss weights rows by their number of labels and is no mean over tokens."""

    class OwnLoss(base):
        def compute_loss(
            self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")[:, 1:]
            outputs = model(**inputs)
            each = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].mT, labels, reduction="none")
            loss = (each.sum(1) / (labels != -100).sum(1).clamp(min=1).sqrt()).mean()
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


class Padding:
    """The usual collator: rows padded to the longest one, with an attention mask, and with or without labels."""

    def __init__(self, labels: bool = True, side: str = "right", of_pads: int = -100) -> None:
        self.labels, self.side, self.of_pads = labels, side, of_pads

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        from torch.nn.utils.rnn import pad_sequence

        each = [torch.as_tensor(row["input_ids"]) for row in rows]
        ids = pad_sequence(each, batch_first=True, padding_side=self.side)
        keep = pad_sequence([torch.ones_like(row) for row in each], batch_first=True, padding_side=self.side)
        found = {"input_ids": ids, "attention_mask": keep}
        return found | {"labels": torch.where(keep == 1, ids, self.of_pads)} if self.labels else found


def packed(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return one row of documents that only positions keep apart: their first tokens have labels."""
    each = [torch.as_tensor(row["input_ids"]) for row in rows]
    ids = torch.cat(each)[None]
    return {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(len(row)) for row in each])[None]}


def collators() -> dict[str, Any]:
    """Return the collators of runs by their names."""
    from transformers import DataCollatorWithFlattening

    return {
        "flat": DataCollatorWithFlattening(),
        "padded": Padding(),
        "unlabelled": Padding(labels=False),
        "left": Padding(side="left"),
        "labelled pads": Padding(of_pads=0),
        "packed": packed,
    }


def reset_accelerate() -> None:
    """Reset the global state that Accelerate keeps of earlier runs in this process."""
    from accelerate.state import AcceleratorState, GradientState

    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def take_ranks_for_devices() -> None:
    """Make Accelerate take CPU ranks for accelerators (XPUs): on CPUs it would silently leave FSDP out."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def with_accelerate(group: dist.ProcessGroup) -> list[float]:
    """Train in a user's own loop: Accelerate prepares model and optimizer, flexcp prepares the batch."""
    from accelerate import Accelerator

    from flexcp.frameworks import huggingface
    from flexcp.frameworks.huggingface_trainer import prepared

    ranks, rank = dist.get_world_size(), dist.get_rank()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    model = make_model(Run("llama"), "eager")
    huggingface.turn_on(model)
    planner = huggingface.planner(model.config, flexcp.cluster("cpu", 1, ranks), "float64")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    losses = []
    for number in range(2):
        mine = documents()[12 * number + rank : 12 * (number + 1) : ranks]
        batch = Padding()([{"input_ids": d} for d in mine])
        loss = model(**prepared(batch, planner, gradients="averaged")).loss
        with refusing_the_loss_warning():
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def one_process() -> list[float]:
    """Run the loop of :func:`with_accelerate` on one process, document by document."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from lib.model_runs import DENSE, dense_attention

    AttentionInterface.register(DENSE, dense_attention)
    AttentionMaskInterface.register(DENSE, lambda **others: None)
    model = make_model(Run("llama"), DENSE)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for number in range(2):
        batch = documents()[12 * number : 12 * (number + 1)]
        total = sum(
            torch.nn.functional.cross_entropy(model(d[None], use_cache=False).logits[0, :-1], d[1:], reduction="sum")
            for d in batch
        )
        loss = total / sum(len(d) - 1 for d in batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def evaluated_shares(group: dist.ProcessGroup) -> float:
    """Return this rank's evaluation loss when the shares of two ranks, each times the number of ranks, are 1 and 4."""
    from flexcp.executor.exchange.collectives import Collectives
    from flexcp.frameworks.huggingface_trainer import of_the_batch

    step: Any = SimpleNamespace(collectives=Collectives(group, timedelta(seconds=60)), cp_size=2)
    loss, rest = of_the_batch((torch.tensor((1.0, 4.0)[dist.get_rank(group)]), "outputs"), step)
    assert rest == "outputs"
    return float(loss)
