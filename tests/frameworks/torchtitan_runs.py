"""Functions that run on ranks in the test of the torchtitan adapter; light to import (see parallel_runs.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH = 64
STEPS = 12
SAVED = 2
"""A run with checkpoints saves every so many steps; after the first checkpoint ten steps are left."""
WINDOW = 12


@dataclass(frozen=True)
class Case:
    """How torchtitan's trainer trains: with its own attention or with flexcp's (``ours``)."""

    ours: bool
    model: str = "llama3"
    """The other value is "gpt_oss": layers with and without a window, a sink in each head, and experts."""
    recompute: str = "none"
    steps: int = STEPS
    checkpoints: bool = False
    """Whether the run saves checkpoints, and resumes from a checkpoint in the same folder."""


def batch(rank: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return two rows of packed documents: ids, positions that restart in each document, and shifted labels."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(2000, (2, LENGTH), generator=generator)
    positions, labels = torch.empty_like(ids), torch.full_like(ids, -100)
    for row in range(2):
        cuts = [0, *sorted((1 + torch.randperm(LENGTH - 1, generator=generator)[: 2 + rank]).tolist()), LENGTH]
        for a, b in pairwise(cuts):
            positions[row, a:b] = torch.arange(b - a)
            labels[row, a : b - 1] = ids[row, a + 1 : b]
    return {"input": ids, "positions": positions}, labels


def trained(group: dist.ProcessGroup, folder: str, case: Case) -> dict[str, Any]:
    """Run torchtitan's trainer on this CPU rank for a few steps, with its own attention or flexcp's."""
    from torchtitan_on_cpu import cpu_ranks

    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    with cpu_ranks():
        return _trained(folder, case)


def model_with_a_window() -> Any:
    """Return two layers of Llama 3's debug model, the first with a window."""
    import dataclasses

    from torchtitan.models import llama3

    found = llama3.model_registry("debugmodel", attn_backend="varlen")
    first, second = found.model.layers[:2]
    inner = dataclasses.replace(first.attention.inner_attention, window_size=(WINDOW - 1, 0))
    attention = dataclasses.replace(first.attention, inner_attention=inner)
    found.model.layers = [dataclasses.replace(first, attention=attention), second]
    return found


def small_gpt_oss() -> Any:
    """Return two layers of the gpt-oss debug model with narrow experts. The window of the first layer is made shorter
    than documents; the second has none.
    """
    import dataclasses

    from torchtitan.models import gpt_oss

    found = gpt_oss.model_registry("debugmodel", attn_backend="varlen")
    first, second = found.model.layers = found.model.layers[:2]
    assert (first.attention.sliding_window_size, second.attention.sliding_window_size) == (128, None)
    first.attention.sliding_window_size = WINDOW
    first.attention.inner_attention = dataclasses.replace(first.attention.inner_attention, window_size=(WINDOW - 1, 0))
    for layer in (first, second):
        layer.moe.routed_experts.inner_experts.hidden_dim = 64
    return found


def _trained(folder: str, case: Case) -> dict[str, Any]:
    import dataclasses

    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.tools import utils

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, dp_rank: int, **others: Any) -> None:
            self.rank, self.given = dp_rank, 0

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while self.given <= STEPS:
                self.given += 1
                yield batch(self.rank, self.given)

        def state_dict(self) -> dict[str, Any]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.given = state["given"]

    class Tokens(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **others: Any) -> None:
            pass

        def encode(self, *text: Any, **others: Any) -> list[int]:
            return []

        def decode(self, *ids: Any, **others: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 2048

    if case.model == "gpt_oss":
        config = gpt_oss_debugmodel()
        config.model_spec = small_gpt_oss()
    else:
        config = llama3_debugmodel()
        config.model_spec = model_with_a_window()
    config.dataloader, config.tokenizer = Loader.Config(), Tokens.Config()
    config.dump_folder = folder
    config.training = dataclasses.replace(
        config.training,
        local_batch_size=2,
        seq_len=LENGTH,
        steps=case.steps,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.validator.enable = False
    config.checkpoint = dataclasses.replace(
        config.checkpoint, enable=case.checkpoints, interval=SAVED, last_save_model_only=False
    )
    config.activation_checkpoint = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[
        case.recompute
    ]
    config.parallelism.spmd_backend = "partial_dtensor"
    if not case.ours:
        config.override.imports = ["torchtitan_on_cpu.dense"]
    else:
        from flexcp.frameworks import torchtitan

        config = torchtitan.turn_on(config)
    trainer = config.build()
    logged: list[dict[str, Any]] = []
    trainer.metrics_processor.logger.log = lambda entry, step: logged.append(entry | {"step": step})
    layers = list(trainer.model_parts[0].layers.values())
    sinks = [layer.attention.sinks for layer in layers if hasattr(layer.attention, "sinks")]
    before = [sink.full_tensor().clone() for sink in sinks]
    # torchtitan's experts compute in bfloat16 in a model of any precision; the patch keeps them in the model's dtype.
    with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        trainer.train()
    return {
        "logged": logged,
        "calls": trainer._step.calls if case.ours else 0,
        "layers": len(layers),
        "device": utils.device_type,
        "sinks": [sink.full_tensor().detach() for sink in sinks],
        "sinks moved": [bool((a != b.full_tensor()).all()) for a, b in zip(before, sinks, strict=True)],
    }
