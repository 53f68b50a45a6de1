"""torchtitan's trainer on rows of packed documents: the script before flexcp.

    torchrun --nproc-per-node 1 examples/torchtitan_pretrain_plain.py

Two layers of its Llama 3 debug model under FSDP2. Every rank loads its part of a step's rows.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchtitan_on_cpu  # before torchtitan, which chooses its device while it is imported

# isort: split
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn

import made_text


class Words(BaseTokenizer):
    """A tokenizer of whole words."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()
        self.words = made_text.tokenizer()

    def encode(self, text: str) -> list[int]:
        return [*self.words(text)["input_ids"], self.words.eos_token_id]

    def decode(self, ids: list[int]) -> str:
        return self.words.decode(ids)

    def get_vocab_size(self) -> int:
        return len(self.words)


class Rows(BaseDataLoader):
    """Rows of documents laid end to end; the last of a row is cut."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        tokenizer: Words,
        seq_len: int,
        local_batch_size: int,
        **others: Any,
    ) -> None:
        self.rank, self.ranks, self.words = dp_rank, dp_world_size, tokenizer
        self.length, self.rows, self.given = seq_len, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = (self.given * self.ranks + self.rank) * self.rows
            rows = torch.stack([self.row(number) for number in range(first, first + self.rows)])
            self.given += 1
            yield {"input": rows[:, 0], "positions": rows[:, 1]}, rows[:, 2]

    def row(self, number: int) -> Tensor:
        """Ids, positions that begin anew with every document, and labels."""
        draw, found = random.Random(number), []
        while sum(part.shape[1] for part in found) < self.length:
            ids = torch.tensor(self.words.encode(made_text.sentence(draw)))
            found.append(torch.stack([ids[:-1], torch.arange(len(ids) - 1), ids[1:]]))
        return torch.cat(found, 1)[:, : self.length]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Log(BaseLogger):
    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        names = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm", "tokens": "n_tokens_seen"}
        self.entries.append({ours: float(metrics[theirs]) for ours, theirs in names.items()})
        if dist.get_rank() == 0:
            print(f"step {step} loss {self.entries[-1]['loss']:.6f}")


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])

    config = llama3_debugmodel_varlen_attn()
    model, words = config.model_spec.model, len(made_text.tokenizer())
    model.layers, model.vocab_size = model.layers[:2], words
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = words
    config.loss.loss_fn.global_vocab_size = words
    config.tokenizer, config.dataloader = Words.Config(), Rows.Config()
    config.dump_folder = "build/torchtitan_pretrain"
    config.training = TrainingConfig(
        local_batch_size=4 // ranks,
        seq_len=128,
        steps=options.steps,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.override.imports = ["torchtitan_on_cpu.dense"]
    with torchtitan_on_cpu.cpu_ranks():
        trainer = config.build()
        torchtitan_on_cpu.draw_weights(trainer)
        trainer.metrics_processor.logger = log = Log()
        trainer.train()
        trainer.close()
    return log.entries


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
