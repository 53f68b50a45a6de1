"""Megatron-Core's GPT under its DDP, schedule and optimizer, where ranks share every batch of documents.

    torchrun --nproc-per-node 2 examples/megatron_pretrain.py

Every rank reads all documents of a step, and keeps the tokens that the plan gives it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

import flexcp
import made_text
from flexcp.frameworks import megatron as flex
from megatron_on_cpu import megatron_world


def documents(batches: int, seed: int) -> Iterator[list[Tensor]]:
    """Eight documents a batch."""
    words = made_text.tokenizer()
    for number in range(batches):
        texts = made_text.prompts(8, seed=seed + number)["prompt"]
        yield [torch.tensor(words(text)["input_ids"]) for text in texts]


def mean_loss(iterator: Iterator[Any], model: Any, forward_only: bool = False) -> float:
    """The loss of the next batch, whose gradients are summed up unless it is only run forward."""
    reports = get_forward_backward_func()(
        forward_step_func=flex.forward_step,
        data_iterator=iterator,
        model=model,
        num_microbatches=1,
        seq_length=128,
        micro_batch_size=8,
        forward_only=forward_only,
    )
    total = reports[0]["lm loss"]
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(total[0] / total[1])


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with megatron_world():
        return train(options.steps)


def train(steps: int) -> list[dict[str, float]]:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    torch.manual_seed(0)
    spec = flex.planned_spec(get_gpt_layer_local_spec())
    inner = GPTModel(config, spec, vocab_size=64, max_sequence_length=128, position_embedding_type="rope")
    planner = flex.planner(config, flexcp.cluster("cpu", ranks_per_node=dist.get_world_size()))
    training = flex.data_iterator(documents(steps, seed=0), planner, config)
    held_out = flex.data_iterator(documents(1, seed=1000), planner, config)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), flex.adapt(inner))
    # Megatron clips gradients on GPUs only.
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)

    logs = []
    for number in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = mean_loss(training, model)
        _, norm, _ = optimizer.step()
        logs.append({"loss": loss, "grad_norm": norm})
        if dist.get_rank() == 0:
            print(f"step {number} loss {loss:.6f} gradient norm {norm:.6f}")
    model.eval()
    logs.append({"eval_loss": mean_loss(held_out, model, forward_only=True)})
    if dist.get_rank() == 0:
        print(f"evaluation loss {logs[-1]['eval_loss']:.6f}")
    return logs


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
