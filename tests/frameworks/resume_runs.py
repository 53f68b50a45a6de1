"""Runs under TRL, Lightning and Megatron-Core that are resumed in the middle of an epoch: with flexcp on the ranks of a
pool, or (not Megatron's) without it in this process.

An epoch of the shuffled data lasts a few steps, so the ten steps after a resume also cross into the next epoch, which
has another order. Light to import (see parallel_runs.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from example_runs import EXAMPLES, loaded
from loss_warning import refusing_the_loss_warning
from torch import Tensor
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


def arguments_of_trl(ranks: int) -> dict[str, Any]:
    """Return the arguments that the runs under TRL have in common; a checkpoint is saved after step ``SAVED``."""
    return {
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "gradient_accumulation_steps": ACCUMULATED,
        "dataloader_drop_last": True,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "per_device_train_batch_size": 4 // ranks,
    }


def evaluated(ranks: int) -> dict[str, Any]:
    """Return the arguments of a run under TRL that is evaluated whenever it is saved."""
    return {"eval_strategy": "steps", "eval_steps": SAVED, "per_device_eval_batch_size": 4 // ranks}


def sharing(group: dist.ProcessGroup | None) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks, and what flexcp's trainer is given in addition to TRL's (nothing without ranks)."""
    import flexcp

    if group is None:
        return 1, {}
    ranks = dist.get_world_size(group)
    return ranks, {"cluster": flexcp.cluster("cpu", ranks_per_node=ranks)}


def trained(trainer: Any, folder: str, resume: bool) -> Found:
    """Train to the end, from the first step or from the checkpoint in ``folder``, and return what this run logs."""
    from transformers import TrainerCallback

    class Seen(TrainerCallback):  # type: ignore[misc]  # Transformers' types are Any here
        """Collects what this run logs; the history of a resumed run begins with that of the earlier run."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **others: Any) -> None:
            entries.append(logs)

    entries: list[dict[str, Any]] = []
    trainer.add_callback(Seen())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    return found(entries, len(trainer.get_train_dataloader()) // ACCUMULATED)


def sft(group: dist.ProcessGroup | None, folder: str, resume: bool) -> Found:
    """Train packed conversations: with the trainer of flexcp's TRL example on ranks, or TRL's SFTTrainer without."""
    with in_the_place_of_an_example(group):
        from trl import SFTConfig, SFTTrainer

        import made_text

        ranks, ours = sharing(group)
        packed = {"packing": True, "eval_packing": True, "max_length": 128, "assistant_only_loss": True}
        trainer: Any = (SFTTrainer if group is None else loaded("trl_sft").FlexcpTrl)(
            made_text.model(),
            SFTConfig(folder, **arguments_of_trl(ranks), **evaluated(ranks), **packed),
            train_dataset=made_text.chats(220),
            eval_dataset=made_text.chats(60, seed=1),
            processing_class=made_text.tokenizer(),
            **ours,
        )
        return trained(trainer, folder, resume)


def dpo(group: dist.ProcessGroup | None, folder: str, resume: bool) -> Found:
    """Train pairs of answers beside a reference model that a resumed run makes anew: with the trainer of flexcp's
    example on ranks, or TRL's DPOTrainer without.
    """
    with in_the_place_of_an_example(group):
        from trl import DPOConfig, DPOTrainer

        import made_text

        ranks, ours = sharing(group)
        trainer: Any = (DPOTrainer if group is None else loaded("trl_dpo").FlexcpTrl)(
            made_text.model(),
            made_text.model(),
            DPOConfig(folder, **arguments_of_trl(ranks), **evaluated(ranks)),
            train_dataset=made_text.pairs(64),
            eval_dataset=made_text.pairs(16, seed=1),
            processing_class=made_text.tokenizer(),
            **ours,
        )
        return trained(trainer, folder, resume)


def grpo(group: dist.ProcessGroup | None, folder: str, resume: bool, sampled: bool = False) -> Found:
    """Train on scored rollouts: with the trainer of flexcp's example on ranks, or TRL's GRPOTrainer without.

    Rollouts are those of the example, or (``sampled``) what the model generates, which depends on its weights and on
    the state of each rank's random numbers. They are made for every step, and then TRL's loss has the same value for
    all weights; ``beta`` adds the distance from a reference model, which has not. The checkpoint is in the first
    epoch, because TRL takes the order of the first epoch for any epoch that it resumes in.
    """
    with in_the_place_of_an_example(group):
        from trl import GRPOConfig, GRPOTrainer

        import made_text

        ranks, ours = sharing(group)
        example = loaded("trl_grpo_plain" if group is None else "trl_grpo")
        model, reference = made_text.model(), f"{folder}/reference"
        if group is None or dist.get_rank(group) == 0:
            model.save_pretrained(reference)
        if group is not None:
            dist.barrier(group)
        model.config._name_or_path = reference  # TRL loads the reference model from there
        rollouts = {"num_generations": 2, "max_completion_length": 8 if sampled else 128, "beta": 0.1}
        trainer: Any = (GRPOTrainer if group is None else example.FlexcpTrl)(
            model,
            example.reward,
            args=GRPOConfig(folder, **arguments_of_trl(ranks), **rollouts),
            train_dataset=made_text.prompts(56),
            processing_class=made_text.tokenizer(),
            rollout_func=None if sampled else example.rollouts,
            **ours,
        )
        return trained(trainer, folder, resume)


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


DOCUMENTS, BATCH = 64, 8
"""Documents of an epoch and of a step under Megatron-Core."""


def batches(consumed: int) -> Iterator[list[Tensor]]:
    """Yield the documents of each step after the first ``consumed`` ones, in another order in every epoch."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (DOCUMENTS,), generator=draw).tolist()
    documents = [torch.randint(16, (length,), generator=draw) for length in lengths]
    while True:
        epoch, begun = divmod(consumed, DOCUMENTS)
        order = torch.randperm(DOCUMENTS, generator=torch.Generator().manual_seed(epoch)).tolist()
        for at in range(begun, DOCUMENTS, BATCH):
            yield [documents[number] for number in order[at : at + BATCH]]
        consumed = (epoch + 1) * DOCUMENTS


@contextmanager
def ranks_that_write_checkpoints() -> Iterator[None]:
    """Let Megatron write checkpoints from ranks of a pool, which are daemons and may therefore not start processes.

    Megatron forks processes to write files, and gets their results from a server process that it would start too.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with (
        patch.dict(multiprocessing.current_process()._config, daemon=False),  # type: ignore[attr-defined]
        patch.object(filesystem_async, "_results_queue", SimpleQueue()),
    ):
        yield


def megatron(group: dist.ProcessGroup, folder: str, resume: bool) -> Found:
    """Train a GPT under Megatron's DDP, schedule and optimizer with checkpoints of its ``dist_checkpointing``."""
    from megatron_runs import Case, block_spec, config_of, gpt

    with in_the_place_of_an_example(group), ranks_that_write_checkpoints():
        from megatron.core import dist_checkpointing
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        import flexcp
        from flexcp.frameworks import megatron as flex
        from megatron_on_cpu import megatron_world

        mean_loss = loaded("megatron_pretrain").mean_loss
        with megatron_world():
            config = config_of(Case())
            model = flex.adapt(gpt(config, flex.planned_spec(block_spec(Case())), "rope"))
            wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
            # Megatron clips gradients on GPUs only.
            settings = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0)
            optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)

            def state(loading: bool, consumed: int) -> dict[str, Any]:
                weights = model.sharded_state_dict()
                moments = optimizer.sharded_state_dict(weights, is_loading=loading)
                return {"model": weights, "optimizer": moments, "consumed": consumed}

            consumed = 0
            if resume:
                saved = dist_checkpointing.load(state(True, 0), folder)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                consumed = saved["consumed"]
            planner = flex.planner(config, flexcp.cluster("cpu", ranks_per_node=dist.get_world_size(group)))
            training = flex.data_iterator(batches(consumed), planner, config)
            losses = []
            while consumed < STEPS * BATCH:
                wrapped.zero_grad_buffer()
                optimizer.zero_grad()
                losses.append(mean_loss(training, wrapped))
                optimizer.step()
                consumed += BATCH
                if consumed == SAVED * BATCH and not resume:
                    dist_checkpointing.save(state(False, consumed), folder)
            return Found(losses, [], DOCUMENTS // BATCH)
