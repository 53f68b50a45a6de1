"""What runs on the ranks in tests of the Trainer adapter; light to import (see parallel_runs.py)."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from loss_warning import refusing_the_loss_warning
from torch import Tensor

import flexcp
from lib.model_runs import Run, make_model

DOCUMENTS = 24
RATE = 1e-2


def documents() -> list[Tensor]:
    """A dataset with lengths from 1 up."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + 7 * i % 23 for i in range(DOCUMENTS)]
    return [torch.randint(64, (n,), generator=generator) for n in lengths]


def trained(
    group: dist.ProcessGroup,
    folder: str,
    collator: str,
    ours: bool,
    ignoring: bool = False,
    kind: str = "plain",
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches of three documents a rank, then an evaluation; by our Trainer or theirs.

    ``kind`` says on which Trainer ours is built: the plain one or one that evaluates as TRL does. ``more`` are training arguments.
    """
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    from flexcp.frameworks import huggingface

    ranks = dist.get_world_size()
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(ranks), LOCAL_RANK=str(dist.get_rank()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    model = make_model(Run("gemma2", dtype="float32"), "eager")
    data = [{"input_ids": d, "labels": d} if collator == "flat" else {"input_ids": d} for d in documents()]
    settings = {
        "use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "logging_steps": 1, "report_to": [], "save_strategy": "no", "data_seed": 0, "disable_tqdm": True,
        "prediction_loss_only": True, "remove_unused_columns": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    arguments = TrainingArguments(folder, **(settings | (more or {})))
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, ranks), strategy="blocks")
    collate = {"flat": DataCollatorWithFlattening(), "padded": Padding(), "unlabelled": Padding(labels=False)}[collator]
    given = {"train_dataset": data, "eval_dataset": data[:12], "data_collator": collate}
    trainer = (
        trainer_class(kind)(model, arguments, **given, planner=planner) if ours else Trainer(model, arguments, **given)
    )
    if ignoring:
        model.set_attn_implementation("eager")
    with refusing_the_loss_warning():
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    evaluated = None if collator == "unlabelled" else trainer.evaluate()["eval_loss"]
    refused = ""
    if ours:
        trainer.args.prediction_loss_only = False
        try:
            trainer.predict(data[:12])
        except NotImplementedError as error:
            refused = str(error)
    return {"losses": losses, "eval": evaluated, "weights": weights, "refused": refused}


def trainer_class(kind: str) -> Any:
    """Our Trainer, on the plain one or on one like TRL's."""
    from transformers import Trainer

    from flexcp.frameworks.huggingface_trainer import FlexcpTrainer

    class LikeTrl(Trainer):
        """As TRL's SFTTrainer: evaluation takes the loss of a batch as it came, divided by this rank's labels when nobody counts them."""

        def compute_loss(
            self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            inputs["use_cache"] = False
            outputs = model(**inputs)
            labels = inputs["shift_labels"]
            total = torch.nn.functional.cross_entropy(outputs.logits[0].float(), labels[0], reduction="sum")
            loss = total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
            if self.args.average_tokens_across_devices and num_items_in_batch is not None:
                loss = loss * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

        def prediction_step(
            self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
        ) -> tuple[Any, None, None]:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                return self.compute_loss(model, inputs, return_outputs=False), None, None

    class Both(FlexcpTrainer, LikeTrl):
        pass

    return Both if kind == "like TRL" else FlexcpTrainer


class Padding:
    """The collator most people use: rows as long as the longest, with an attention mask; with labels or without."""

    def __init__(self, labels: bool = True) -> None:
        self.labels = labels

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        from torch.nn.utils.rnn import pad_sequence

        ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        keep = pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
        found = {"input_ids": ids, "attention_mask": keep}
        return found | {"labels": torch.where(keep == 1, ids, -100)} if self.labels else found


def with_accelerate(group: dist.ProcessGroup) -> list[float]:
    """A loop of one's own: Accelerate prepares model and optimizer, flexcp the batch."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from flexcp.frameworks import huggingface
    from flexcp.frameworks.huggingface_trainer import prepared

    ranks, rank = dist.get_world_size(), dist.get_rank()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    AcceleratorState._reset_state(
        True
    )  # these ranks ran a Trainer before, whose accumulation Accelerate would remember
    GradientState._reset_state()
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
    """The loop of :func:`with_accelerate` on one process, document by document."""
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
    """What a rank returns of an evaluation in which the ranks' shares, times their number, are 1 and 4."""
    from flexcp.executor.exchange.collectives import Collectives
    from flexcp.frameworks.huggingface_trainer import of_the_batch

    step: Any = SimpleNamespace(collectives=Collectives(group, timedelta(seconds=60)), cp_size=2)
    loss, rest = of_the_batch((torch.tensor((1.0, 4.0)[dist.get_rank(group)]), "outputs"), step)
    assert rest == "outputs"
    return float(loss)
