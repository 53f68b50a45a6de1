"""A LightningModule with a Hugging Face model under FSDP2, on documents of other lengths laid end to end:
the script before flexcp.

    python examples/lightning_fsdp2_plain.py

On one process there is nothing to shard, and Lightning's plain strategy runs it.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorWithFlattening

import made_text

RANKS = int(os.environ.get("WORLD_SIZE", 1))


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = made_text.model()
        self.logged: list[dict[str, float]] = []

    def configure_model(self) -> None:
        if RANKS > 1:
            for layer in (*self.model.model.layers, self.model):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        mean = self.all_gather(loss.detach()).mean()
        self.logged.append({"loss": float(mean)})
        self.print(f"step {len(self.logged)} loss {float(mean):.6f}")
        return loss

    def validation_step(self, batch: dict[str, Any]) -> None:
        loss = self.model(**batch, use_cache=False).loss
        self.log("eval_loss", loss, batch_size=1, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.logged.append({"eval_loss": float(self.trainer.callback_metrics["eval_loss"])})
        self.print(f"evaluation loss {self.logged[-1]['eval_loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def loader(texts: list[str]) -> DataLoader[Any]:
    words = made_text.tokenizer()
    documents = [words(text) for text in texts]
    dealt = DistributedSampler(documents, RANKS, int(os.environ.get("RANK", 0)), shuffle=False)
    return DataLoader(documents, 8 // RANKS, sampler=dealt, collate_fn=DataCollatorWithFlattening())


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    training, held_out = loader(made_text.prompts(200)["prompt"]), loader(made_text.prompts(32, seed=1)["prompt"])
    sharded = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=sharded if RANKS > 1 else "auto",
        max_steps=options.steps,
        logger=False,
        use_distributed_sampler=False,
        val_check_interval=options.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, training, held_out)
    return module.logged


if __name__ == "__main__":
    main()
