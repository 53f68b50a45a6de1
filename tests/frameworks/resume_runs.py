"""Runs under TRL and Lightning that are resumed in the middle of an epoch: with flexcp on the ranks of a pool, or
without it in this process.

An epoch of the shuffled data lasts a few steps, so the ten steps after a resume also cross into the next epoch, which
has another order. Light to import (see parallel_runs.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from example_runs import EXAMPLES, loaded
from loss_warning import refusing_the_loss_warning
from trainer_runs import reset_accelerate
from trl_runs import place_of_rank

SAVED = 11
"""The step whose checkpoint a run resumes from."""
STEPS = 21
ACCUMULATED = 2
"""Micro-batches of a step under TRL."""


@dataclass(frozen=True)
class Found:
    """The losses and evaluation losses that a run logged, and the number of steps of an epoch."""

    losses: list[float]
    evaluated: list[float]
    epoch: int


def found(entries: list[dict[str, Any]], epoch: int) -> Found:
    """Return the losses among the log entries of a trainer."""
    losses, evaluated = ([entry[name] for entry in entries if name in entry] for name in ("loss", "eval_loss"))
    return Found(losses, evaluated, epoch)


@contextmanager
def in_the_place_of_an_example(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Set up what an example has when it is started as a script: torchrun's environment variables if there are ranks,
    and the folder of examples on ``sys.path``.
    """
    with (
        patch.dict(os.environ, {} if group is None else place_of_rank()),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        refusing_the_loss_warning(),
    ):
        reset_accelerate()
        yield


def sft(group: dist.ProcessGroup | None, folder: str, resume: bool) -> Found:
    """Train packed conversations: with the trainer of flexcp's TRL example on ranks, or TRL's SFTTrainer without."""
    with in_the_place_of_an_example(group):
        from transformers import TrainerCallback
        from trl import SFTConfig, SFTTrainer

        import flexcp
        import made_text

        ranks = 1 if group is None else dist.get_world_size(group)
        arguments = SFTConfig(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=4 // ranks,
            per_device_eval_batch_size=4 // ranks,
            packing=True,
            eval_packing=True,
            max_length=128,
            assistant_only_loss=True,
            learning_rate=1e-3,
            logging_steps=1,
            gradient_accumulation_steps=ACCUMULATED,
            dataloader_drop_last=True,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="steps",
            save_steps=SAVED,
            eval_strategy="steps",
            eval_steps=SAVED,
        )
        ours: dict[str, Any] = {} if group is None else {"cluster": flexcp.cluster("cpu", ranks_per_node=ranks)}
        trainer: Any = (SFTTrainer if group is None else loaded("trl_sft").FlexcpTrl)(
            made_text.model(),
            arguments,
            train_dataset=made_text.chats(220),
            eval_dataset=made_text.chats(60, seed=1),
            processing_class=made_text.tokenizer(),
            **ours,
        )

        class Seen(TrainerCallback):  # type: ignore[misc]  # Transformers' types are Any here
            """Collects what this run logs; the history of a resumed run begins with that of the earlier run."""

            def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **others: Any) -> None:
                entries.append(logs)

        entries: list[dict[str, Any]] = []
        trainer.add_callback(Seen())
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
        return found(entries, len(trainer.get_train_dataloader()) // ACCUMULATED)


def lightning(group: dist.ProcessGroup | None, folder: str, resume: bool) -> Found:
    """Train the module of flexcp's Lightning example on ranks, or of its twin without flexcp in this process, with
    checkpoints and a data loader that has a state.
    """
    with in_the_place_of_an_example(group):
        from lightning.pytorch import Trainer
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.strategies import ModelParallelStrategy
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
        from transformers import DataCollatorWithFlattening

        import made_text

        ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        words = made_text.tokenizer()
        documents = [words(text) for text in made_text.prompts(64)["prompt"]]
        held_out = [words(text) for text in made_text.prompts(32, seed=1)["prompt"]]

        def loader(data: list[Any], shuffle: bool) -> StatefulDataLoader[Any]:
            # Lightning starts iterating before it tells samplers the epoch; by then a sampler without a state has
            # drawn the order of the first epoch.
            dealt = StatefulDistributedSampler(data, ranks, rank, shuffle)
            return StatefulDataLoader(data, 8 // ranks, sampler=dealt, collate_fn=DataCollatorWithFlattening())

        sharded = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        saving: Any = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=sharded if ranks > 1 else "auto",
            max_steps=STEPS,
            logger=False,
            use_distributed_sampler=False,
            callbacks=[saving],
            val_check_interval=STEPS,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = loaded("lightning_fsdp2_plain" if group is None else "lightning_fsdp2").Module()
        kept = Path(folder) / f"step={SAVED}.ckpt"
        trainer.fit(module, loader(documents, True), loader(held_out, False), ckpt_path=kept if resume else None)
        return found(module.logged, trainer.num_training_batches)
