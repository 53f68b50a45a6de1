"""Transformers' Trainer on documents of other lengths, laid end to end, where ranks share every batch.

    torchrun --nproc-per-node 2 examples/trainer.py

Its logs are what the trainer prints.
"""

from __future__ import annotations

import argparse
import os

from transformers import DataCollatorWithFlattening, TrainingArguments

import flexcp
import made_text
from flexcp.frameworks.huggingface_trainer import FlexcpTrainer


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))

    arguments = TrainingArguments(
        "build/trainer",
        max_steps=options.steps,
        per_device_train_batch_size=8 // ranks,
        per_device_eval_batch_size=8 // ranks,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        prediction_loss_only=True,
        disable_tqdm=True,
    )
    trainer = FlexcpTrainer(
        made_text.model(),
        arguments,
        train_dataset=[made_text.tokenizer()(text) for text in made_text.prompts(400)["prompt"]],
        eval_dataset=[made_text.tokenizer()(text) for text in made_text.prompts(32, seed=1)["prompt"]],
        data_collator=DataCollatorWithFlattening(),
        cluster=flexcp.cluster("cpu", ranks_per_node=ranks),
    )
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
