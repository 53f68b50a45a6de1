"""Megatron-Core's GPT under its DDP, schedule and optimizer, on padded documents: the script before flexcp.

    torchrun --nproc-per-node 1 examples/megatron_pretrain_plain.py

Every data-parallel rank pads its part of a step's documents to the longest of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
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
from torch.nn.utils.rnn import pad_sequence

import made_text
from megatron_on_cpu import megatron_world


def documents(batches: int, seed: int) -> Iterator[list[Tensor]]:
    """Eight documents a batch."""
    words = made_text.tokenizer()
    for number in range(batches):
        texts = made_text.prompts(8, seed=seed + number)["prompt"]
        yield [torch.tensor(words(text)["input_ids"]) for text in texts]


def padded(batches: Iterator[list[Tensor]]) -> Iterator[dict[str, Tensor]]:
    """This rank's part of every batch."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for batch in batches:
        mine = batch[rank::ranks]
        ids = pad_sequence(mine, batch_first=True)
        kept = pad_sequence([torch.ones(len(document) - 1) for document in mine], batch_first=True)
        positions = torch.arange(kept.shape[1]).expand_as(kept)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": kept, "position_ids": positions}


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(token_loss, batch["loss_mask"])


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses * loss_mask).sum(), loss_mask.sum()
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}


def mean_loss(iterator: Iterator[Any], model: Any, forward_only: bool = False) -> float:
    """The loss of the next batch, whose gradients are summed up unless it is only run forward."""
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
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
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec()
    inner = GPTModel(config, spec, vocab_size=64, max_sequence_length=128, position_embedding_type="rope")
    training = padded(documents(steps, seed=0))
    held_out = padded(documents(1, seed=1000))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), inner)
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
