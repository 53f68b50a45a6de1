"""What runs on the ranks in tests of the Trainer adapter; light to import (see parallel_runs.py)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.measure.model_runs import Run, make_model

DOCUMENTS = 24
RATE = 1e-2


def documents() -> list[Tensor]:
    """A dataset with lengths from 1 up."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + 7 * i % 23 for i in range(DOCUMENTS)]
    return [torch.randint(64, (n,), generator=generator) for n in lengths]


def trained(group: dist.ProcessGroup, folder: str, collator: str, ours: bool, ignoring: bool = False) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches of three documents a rank, then an evaluation; by our Trainer or theirs."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    from flexcp.frameworks import huggingface
    from flexcp.frameworks.huggingface_trainer import FlexcpTrainer

    ranks = dist.get_world_size()
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(ranks), LOCAL_RANK=str(dist.get_rank()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    model = make_model(Run("gemma2", dtype="float32"), "eager")
    data = [{"input_ids": d, "labels": d} if collator == "flat" else {"input_ids": d} for d in documents()]
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=2, per_device_train_batch_size=3, per_device_eval_batch_size=3,
        gradient_accumulation_steps=2, optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0,
        logging_steps=1, report_to=[], save_strategy="no", data_seed=0, prediction_loss_only=True, disable_tqdm=True,
        remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    planner = huggingface.planner(model.config, flexcp.cluster("cpu", 1, ranks), "float32", strategy="blocks")
    collate = DataCollatorWithFlattening() if collator == "flat" else Padding()
    given = {"train_dataset": data, "eval_dataset": data[:12], "data_collator": collate}
    trainer = FlexcpTrainer(model, arguments, **given, planner=planner) if ours else Trainer(model, arguments, **given)
    if ignoring:
        model.set_attn_implementation("eager")
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "eval": trainer.evaluate()["eval_loss"], "weights": weights}


class Padding:
    """The collator most people use: rows as long as the longest, with an attention mask."""

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        from torch.nn.utils.rnn import pad_sequence

        ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        keep = pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": keep, "labels": torch.where(keep == 1, ids, -100)}


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
        loss = model(**prepared(batch, planner)).loss
        accelerator.backward(loss * ranks)  # DDP averages gradients
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach())))
    return losses


def one_process() -> list[float]:
    """The loop of :func:`with_accelerate` on one process, document by document."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from flexcp.measure.model_runs import DENSE, dense_attention

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
