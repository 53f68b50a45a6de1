"""TRL's GRPOTrainer: rollouts of a prompt are scored, and the policy is moved towards the better ones:
the script before flexcp.

    python examples/trl_grpo_plain.py

Rollouts are made up here, the same on any number of ranks. Without ``rollout_func`` the trainer generates them.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

from trl import GRPOConfig, GRPOTrainer

import made_text


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Two answers to every prompt, which stands in the list twice; of other lengths than their prompts."""
    words = trainer.processing_class
    answers = [made_text.sentence(random.Random(f"{prompt} {i % 2}")) for i, prompt in enumerate(prompts)]
    return {"prompt_ids": words(prompts)["input_ids"], "completion_ids": words(answers)["input_ids"], "logprobs": None}


def reward(completions: list[str], **others: Any) -> list[float]:
    """Many even words are good."""
    return [float(sum(word in made_text.WORDS[::2] for word in text.split())) for text in completions]


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))

    arguments = GRPOConfig(
        "build/trl_grpo",
        max_steps=options.steps,
        per_device_train_batch_size=8 // ranks,
        num_generations=2,
        max_completion_length=128,
        num_iterations=2,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        made_text.model(),
        reward,
        args=arguments,
        train_dataset=made_text.prompts(100),
        processing_class=made_text.tokenizer(),
        rollout_func=rollouts,
    )
    trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
