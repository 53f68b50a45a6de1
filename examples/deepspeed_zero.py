"""DeepSpeed: a small GPT whose attention runs under a flexcp plan, under ZeRO.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 3

An attention-only swap: tokens stay where the user has them (``layout="contiguous"``), so the data, labels, RoPE and all
other layers are as they were. ZeRO shards parameters and gradients over all ranks and averages gradients, so the loss
(this rank's sum / the batch's tokens) is multiplied by the number of ranks. Each step prints the loss of the batch
beside that of one process without DeepSpeed and flexcp.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.train.gpt import Gpt, GptConfig
from flexcp.train.update import total_loss

CONFIG = GptConfig(vocabulary=64, layers=2, heads=4, kv_heads=2, head_dim=16)
LENGTHS = [70, 3, 41, 1, 25]


def batch(number: int) -> Tensor:
    """The step's stream of tokens, the same on every rank."""
    return torch.randint(16, (sum(LENGTHS),), generator=torch.Generator().manual_seed(number))


def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(CONFIG)


def optimizer_of(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-6)  # type: ignore[arg-type]


def alone(steps: int) -> list[float]:
    """The same training on one process with torch's attention."""
    gpt = model()
    optimizer, losses = optimizer_of(gpt.parameters()), []
    positions = torch.cat([torch.arange(n) for n in LENGTHS])

    def attend(*qkv: Tensor) -> Tensor:
        documents = zip(*(x.split(LENGTHS) for x in qkv), strict=True)
        heads = [[x.transpose(0, 1)[None] for x in parts] for parts in documents]
        outs = [torch.nn.functional.scaled_dot_product_attention(*h, is_causal=True, enable_gqa=True)[0] for h in heads]
        return torch.cat([out.transpose(0, 1) for out in outs])

    for number in range(steps):
        tokens = batch(number)
        labels = torch.cat([torch.cat([d[1:], torch.tensor([-100])]) for d in tokens.split(LENGTHS)])
        loss = torch.nn.functional.cross_entropy(gpt(tokens, positions, attend), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--local_rank", type=int, default=0)
    given = arguments.parse_args()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(dist_backend=backend)
    gpt = model()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": given.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1 unless told not to; the run alone does not
    }
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer_of(gpt.parameters()), config=settings)
    ranks = dist.get_world_size()
    where = flexcp.cluster("cpu" if backend == "gloo" else "h100", 1, ranks)
    planner = flexcp.Planner(CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim, dtype="float32", cluster=where)
    expected = alone(given.steps)
    for number in range(given.steps):
        step = flexcp.bind(planner(LENGTHS, layout="contiguous"), dist.group.WORLD)
        tokens = batch(number)
        local, labels = (x.to(engine.device) for x in (step.shard(tokens), step.labels(tokens)))

        def attend(q: Tensor, k: Tensor, v: Tensor, step: flexcp.Step = step) -> Tensor:
            return flexcp.attention(q, k, v, step)  # type: ignore[return-value]

        loss = step.loss(engine(local, step.positions.to(engine.device), attend), labels, gradients="averaged")
        engine.backward(loss)
        engine.step()
        total = total_loss(loss, dist.group.WORLD) / ranks
        error = abs(total - expected[number]) / expected[number]
        if dist.get_rank() == 0:
            print(f"step {number}: loss {total:.6f}, one process {expected[number]:.6f}, error {error:.1e}")
        if error > 1e-5 and number < 10:
            raise SystemExit(f"the loss of step {number} is off by {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
