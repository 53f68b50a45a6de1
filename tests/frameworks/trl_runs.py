"""Run the examples for trainers on the ranks of a pool, or their twins without flexcp in this process; light to import
(see parallel_runs.py).
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from example_runs import EXAMPLES, loaded
from loss_warning import refusing_the_loss_warning
from trainer_runs import reset_accelerate

PLACE = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
)
"""Environment variables that torchrun sets."""


def place_of_rank() -> dict[str, str]:
    """Return the environment variables that torchrun would set for this rank."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    return dict(zip(PLACE, (rank, ranks, rank, "127.0.0.1", "29555", "tests", ranks, "0"), strict=True))


def logged(group: dist.ProcessGroup | None, name: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Run an example for a trainer, on all ranks or (with ``group`` None) in one process, and return its log."""
    place: dict[str, str] = {}
    if group is not None:
        place = place_of_rank()
    with (
        patch.dict(os.environ, place),
        patch.object(sys, "argv", [name, *arguments]),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        refusing_the_loss_warning(),
    ):
        reset_accelerate()
        found: list[dict[str, Any]] = loaded(name).main()
    return found


def generated(group: dist.ProcessGroup, folder: str, ours: bool) -> list[dict[str, Any]]:
    """Run two steps of GRPO with rollouts that the model generates itself, in data parallelism or (``ours``) shared by
    ranks, and return the log.
    """
    import torch
    from trl import GRPOConfig, GRPOTrainer

    import flexcp
    from flexcp.frameworks.huggingface_trainer import FlexcpTrainer

    rank, ranks = str(dist.get_rank()), dist.get_world_size()
    with (
        patch.dict(os.environ, place_of_rank()),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        refusing_the_loss_warning(),
    ):
        import made_text

        reset_accelerate()
        arguments = GRPOConfig(
            folder,
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=8,
            beta=0.1,
            logging_steps=1,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        model = made_text.model()
        if rank == "0":
            model.save_pretrained(folder)  # the reference model is loaded from there
        dist.barrier()
        model.config._name_or_path = folder
        data = {"train_dataset": made_text.prompts(16), "processing_class": made_text.tokenizer()}
        if ours:
            kind: Any = type("Ours", (FlexcpTrainer, GRPOTrainer), {})
            data["cluster"] = flexcp.cluster("cpu", ranks_per_node=ranks)
        else:
            kind = GRPOTrainer
        trainer = kind(
            model,
            lambda completions, **others: [float(len(set(text.split()))) for text in completions],
            arguments,
            **data,
        )
        torch.manual_seed(int(rank))
        trainer.train()
    found: list[dict[str, Any]] = trainer.state.log_history
    return found
