"""TRL's DPOTrainer on pairs of answers, with a reference model, where ranks share every batch.

    torchrun --nproc-per-node 2 examples/trl_dpo.py

Its logs are what the trainer prints.
"""

from __future__ import annotations

import argparse
import os

from trl import DPOConfig, DPOTrainer

import flexcp
import made_text
from flexcp.frameworks.huggingface_trainer import FlexcpTrainer


class FlexcpTrl(FlexcpTrainer, DPOTrainer):
    pass


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))

    arguments = DPOConfig(
        "build/trl_dpo",
        max_steps=options.steps,
        per_device_train_batch_size=4 // ranks,
        per_device_eval_batch_size=4 // ranks,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = FlexcpTrl(
        made_text.model(),
        made_text.model(),
        arguments,
        train_dataset=made_text.pairs(200),
        eval_dataset=made_text.pairs(16, seed=1),
        processing_class=made_text.tokenizer(),
        cluster=flexcp.cluster("cpu", ranks_per_node=ranks),
    )
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
