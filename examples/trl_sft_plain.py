"""TRL's SFTTrainer on packed conversations, with a loss of what the assistant says: the script before flexcp.

    python examples/trl_sft_plain.py

Its logs are what the trainer prints.
"""

from __future__ import annotations

import argparse
import os

from trl import SFTConfig, SFTTrainer

import made_text


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))

    arguments = SFTConfig(
        "build/trl_sft",
        max_steps=options.steps,
        per_device_train_batch_size=4 // ranks,
        per_device_eval_batch_size=4 // ranks,
        packing=True,
        eval_packing=True,
        max_length=128,
        assistant_only_loss=True,
        learning_rate=1e-3,
        logging_steps=1,
        gradient_accumulation_steps=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        made_text.model(),
        arguments,
        train_dataset=made_text.chats(900),
        eval_dataset=made_text.chats(60, seed=1),
        processing_class=made_text.tokenizer(),
    )
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
