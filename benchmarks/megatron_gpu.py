"""Megatron-Core on a GPU under a plan: 50 steps on 4 NCCL ranks that share it, against stock Megatron on one rank.

    python benchmarks/megatron_gpu.py --write megatron.json      # one GPU, megatron-core, a few minutes

The model is a small GPT in bfloat16 with float32 master weights and optimizer, on long-tailed documents. The reference
is stock Megatron with its own attention, one document a micro-batch, on one rank. The allowed difference of losses is
measured, not chosen: the reference is repeated as it is (it is not bitwise reproducible), with its micro-batches in the
opposite order, with pads behind every document, and with its softmax in float32 as ours is; only roundings differ. CP4,
CP2 x TP2 and CP2 x PP2 must begin with the same loss to 1e-4, and over all steps differ from the reference by no more,
at most and on average, than two reference runs differ from each other. All runs go at once, on their own ranks.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

import flexcp
from flexcp.data.lengths import draw_lengths
from lib.nccl_ranks import on_nccl_ranks

STEPS, TOKENS, VOCABULARY, LAYERS = 50, 4096, 512, 4
CASES = {
    "CP4": {"context_parallel_size": 4},
    "CP2 x TP2": {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
    "CP2 x PP2": {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
MICRO_BATCHES = 2
FIRST_STEP = 1e-4
PATIENCE = 1500.0
Weights = dict[str, Any]


def documents(step: int) -> list[torch.Tensor]:
    """Return learnable documents: each repeats its own phrase."""
    generator = torch.Generator().manual_seed(step)
    lengths = [max(2, n // 16) for n in draw_lengths("longtail", TOKENS * 16, seed=step)]
    phrases = [torch.randint(VOCABULARY // 8, (7 + i % 5,), generator=generator) for i in range(len(lengths))]
    return [p.repeat(-(-n // len(p)))[:n] for n, p in zip(lengths, phrases, strict=True)]


def config_of(**more: Any) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=512,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=1536,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        moe_token_dispatcher_type="alltoall",
        **more,
    )


def model_of(config: Any, spec: Any, **more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    model = GPTModel(config, spec, VOCABULARY, max_sequence_length=8192, position_embedding_type="rope", **more)
    return model.cuda().bfloat16()  # Megatron's own norm is made in float32 and would not accept bfloat16


class Masters:
    """AdamW on float32 copies of the parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.copies = [p.detach().float().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-3, eps=1e-6)

    def step(self) -> None:
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = parameter.main_grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                parameter.copy_(copy)


def trained(
    wrapped: Any, masters: Masters, forward_step: Any, batches: Any, count: Any, more: dict[str, Any]
) -> list[float]:
    """Return the losses of all steps, on the last stage; ``batches(step)`` returns the data iterator,
    ``count(step)`` the number of its micro-batches.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    losses = []
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=wrapped,
            num_microbatches=count(step),
            micro_batch_size=1,
            **more,
        )
        masters.step()
        if reports:
            total = sum(r["lm loss"] for r in reports)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            losses.append(float(total[0] / total[1]))
    return losses


def whole_model(**more: Any) -> Any:
    """Return stock Megatron's model on one rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    parallel_state.initialize_model_parallel()
    return model_of(config_of(**more), get_gpt_layer_local_spec())


def first_weights(groups: Any) -> Weights:
    """Return the weights that every run begins with."""
    return {n: p.detach().float().cpu().numpy() for n, p in whole_model().named_parameters()}


def alone(groups: Any, backwards: bool = False, pads: int = 0, float32_softmax: bool = False) -> list[float]:
    """Return the losses of stock Megatron on one rank, one document a micro-batch."""
    from functools import partial

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from flexcp.frameworks.megatron import token_loss

    model = whole_model(attention_softmax_in_fp32=float32_softmax)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, model)

    def forward_step(iterator: Any, model: Any) -> Any:
        document = torch.nn.functional.pad(next(iterator).cuda(), (0, pads))
        positions = torch.arange(len(document) - 1, device="cuda")[None]
        losses = model(document[None, :-1], positions, None, labels=document[None, 1:])
        return losses, partial(token_loss, (positions[0] < len(document) - 1 - pads).float())

    def batches(step: int) -> Any:
        return iter(documents(step)[::-1] if backwards else documents(step))

    masters, more = Masters(model), {"seq_length": TOKENS}
    return trained(wrapped, masters, forward_step, batches, lambda step: len(documents(step)), more)


def planned(groups: Any, sizes: dict[str, int], weights: Weights) -> list[float]:
    """Return the losses of the same model under TP x PP x (DP x CP)."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from flexcp.frameworks import megatron as flex

    tp, pp = sizes.get("tensor_model_parallel_size", 1), sizes.get("pipeline_model_parallel_size", 1)
    parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=sizes["context_parallel_size"])
    # Without TransformerEngine or Apex, Megatron's norm refuses sequence parallelism, so it is off.
    config = config_of(**sizes, variable_seq_lengths=pp > 1)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    spec = flex.planned_spec(get_gpt_layer_local_spec())
    model = flex.adapt(model_of(config, spec, pre_process=first, post_process=last))
    load(model, weights, tp, parallel_state)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    pool = parallel_state.get_data_parallel_group(with_context_parallel=True)
    planner = flex.planner(config, flexcp.cluster("h100", 1, pool.size()))

    def batches(step: int) -> Any:
        parts = [documents(step)[i::MICRO_BATCHES] for i in range(MICRO_BATCHES)]
        return flex.data_iterator(parts, planner, config, device="cuda")

    more = {"seq_length": TOKENS}
    return trained(wrapped, Masters(model), flex.forward_step, batches, lambda step: MICRO_BATCHES, more)


def load(model: Any, weights: Weights, tp: int, state: Any) -> None:
    """Load this rank's part of the whole model's weights."""
    offset = state.get_pipeline_model_parallel_rank() * len(model.decoder.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + offset)
            full = torch.from_numpy(weights[".".join(parts)])
            dim = getattr(parameter, "partition_dim", -1)
            cut = full.chunk(tp, dim)[state.get_tensor_model_parallel_rank()] if dim >= 0 else full
            parameter.copy_(cut)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--write", type=Path, help="a JSON file for all losses")
    arguments.add_argument(
        "--only", help="runs to make, by name, with semicolons between; judged with those of --earlier"
    )
    arguments.add_argument("--earlier", type=Path, help="the JSON file of an earlier call, for the runs not made now")
    given = arguments.parse_args()
    weights = on_nccl_ranks(1, first_weights, patience=PATIENCE)[0]
    runs: dict[str, tuple[Any, ...]] = {
        "alone": (1, alone),
        "alone, again": (1, alone),
        "alone, opposite order": (1, alone, True),
        "alone, padded": (1, alone, False, 64),
        "alone, softmax in float32": (1, alone, False, 0, True),
        **{name: (4, planned, sizes, weights) for name, sizes in CASES.items()},
    }
    found = json.loads(given.earlier.read_text()) if given.earlier else {}
    chosen = {name: run for name, run in runs.items() if not given.only or name in given.only.split(";")}
    with ThreadPoolExecutor(len(chosen)) as pool:
        answers = pool.map(lambda run: on_nccl_ranks(*run, patience=PATIENCE), chosen.values())
        found |= {name: next(r for r in reversed(ranks) if r) for name, ranks in zip(chosen, answers, strict=True)}

    repeats = [losses for name, losses in found.items() if name.startswith("alone")]
    noise = [max(abs(a - b) / a for a, b in combinations(step, 2)) for step in zip(*repeats, strict=True)]
    failed = []
    for name in CASES:
        errors = [abs(a - b) / a for a, b in zip(found["alone"], found[name], strict=True)]
        fine = errors[0] <= FIRST_STEP and max(errors) <= max(noise) and mean(errors) <= mean(noise)
        print(
            f"{name}: last loss {found[name][-1]:.4f} (alone {found['alone'][-1]:.4f}, first {found['alone'][0]:.4f}), "
            f"difference in the first step {errors[0]:.1e}, at most {max(errors):.1e} (runs alone {max(noise):.1e}), "
            f"on average {mean(errors):.1e} ({mean(noise):.1e})"
        )
        failed += [] if fine else [name]
    if given.write:
        given.write.write_text(json.dumps(found, indent=1))
    if failed:
        raise SystemExit(f"beyond the noise of the run alone: {', '.join(failed)}")


if __name__ == "__main__":
    main()
