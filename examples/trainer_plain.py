"""Transformers' Trainer on documents of other lengths, laid end to end: the script before flexcp.

    python examples/trainer_plain.py

Its logs are what the trainer prints.
"""

from __future__ import annotations

import argparse
import os

from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import made_text


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
    trainer = Trainer(
        made_text.model(),
        arguments,
        train_dataset=[made_text.tokenizer()(text) for text in made_text.prompts(400)["prompt"]],
        eval_dataset=[made_text.tokenizer()(text) for text in made_text.prompts(32, seed=1)["prompt"]],
        data_collator=DataCollatorWithFlattening(),
    )
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
