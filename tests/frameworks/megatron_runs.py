"""Functions that run on ranks in tests of the Megatron-Core adapter, on CPUs by examples/megatron_on_cpu.py.

A tiny GPT is trained in two ways from the same weights: *alone*, by stock Megatron with its own attention, document by
document on one rank; and *planned*, under TP x PP x (DP x CP). Without TransformerEngine Megatron lacks two parts,
which are defined here: a layer norm for sequence parallelism, and a core attention for multi-latent attention (used in
the run alone).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp

VOCABULARY, LAYERS, HIDDEN, HEADS, GROUPS = 64, 2, 32, 4, 2
STEPS = 5
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A run: its parallel sizes, how it is planned, and further fields of the config."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    strategy: str = "auto"
    tokens: str = "equal"
    pad_to: int = 1
    micro_batches: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    rope: str = "rope"


def documents(step: int) -> list[Tensor]:
    """Return token ids of a step's documents: one longer than a rank's share, several short ones, one of one token."""
    generator = torch.Generator().manual_seed(step)
    lengths = [37 + step, 1, 12, 5, 20 - step, 3, 9, 2]
    return [torch.randint(VOCABULARY // 4, (n,), generator=generator) for n in lengths]


def config_of(case: Case, alone: bool = False, **more: Any) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if case.config.get("multi_latent_attention") else TransformerConfig
    sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "num_layers": LAYERS, "hidden_size": HIDDEN}
    parallel = {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "sequence_parallel": case.tp > 1,
        "pipeline_dtype": torch.float32,
        "variable_seq_lengths": case.pp > 1 and case.pad_to == 1,
        "moe_token_dispatcher_type": "alltoall",  # Megatron requires it for lengths that vary, also without experts
    }
    return kind(
        **sizes | ({} if alone else parallel) | case.config | more,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )


class Norm(torch.nn.LayerNorm):
    """A layer norm whose gradients Megatron sums over sequence-parallel ranks. Megatron's own layer norm for CPUs
    refuses sequence parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentAttention(torch.nn.Module):
    """Causal attention of one document, ``[tokens, 1, heads, size]``; values may have another size than keys."""

    def __init__(self, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        n = len(query)
        logits = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("bhqk,kbhv->qbhv", torch.softmax(logits, -1), value).flatten(2)


def block_spec(case: Case) -> Any:
    """Return the spec of Megatron's layers that need torch alone, with the :class:`Norm` of this file."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = case.config
    latent = config.get("multi_latent_attention", False)
    layer = get_gpt_layer_local_spec(num_experts=config.get("num_moe_experts"), multi_latent_attention=latent)
    if latent:
        layer.submodules.self_attention.submodules.core_attention = LatentAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([layer] * (LAYERS // case.pp), Norm)


def gpt(config: Any, spec: Any, rope: str, **more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(0)
    return GPTModel(config, spec, VOCABULARY, max_sequence_length=64, position_embedding_type=rope, **more)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)


def alone(group: dist.ProcessGroup, case: Case, steps: int) -> tuple[list[float], Arrays, Arrays] | None:
    """Train stock Megatron on rank 0, one document at a time; return losses, first gradients and initial weights."""
    from megatron_on_cpu import megatron_world

    with megatron_world():
        if dist.get_rank() > 0:
            return None
        model = gpt(config_of(case, alone=True), block_spec(Case(config=case.config)), case.rope)
        weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
        optimizer, losses, gradients = optimizer_of(model), [], {}
        for step in range(steps):
            given = [d for d in documents(step) if len(d) > 1]
            labelled = sum(len(d) - 1 for d in given)
            total = 0.0
            for document in given:
                tokens, labels = document[None, :-1], document[None, 1:]
                positions = torch.arange(tokens.shape[1])[None]
                loss = model(tokens, positions, None, labels=labels).sum() / labelled
                loss.backward()
                total += float(loss.detach())
            losses.append(total)
            gradients = gradients or {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        return losses, gradients, weights


def planned(group: dist.ProcessGroup, case: Case, steps: int, weights: Arrays) -> tuple[list[float], Arrays, Share]:
    """Train under plans; return the losses (on the last stage), this rank's gradients of the first step by their names
    in the whole model, and this rank's :class:`Share` of the work.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from flexcp.frameworks import megatron as flex
    from megatron_on_cpu import megatron_world

    with megatron_world(case.tp, case.pp, case.cp, case.ep) as state:
        config = config_of(case)
        ends = {"pre_process": state.is_pipeline_first_stage(), "post_process": state.is_pipeline_last_stage()}
        model = flex.adapt(gpt(config, flex.planned_spec(block_spec(case)), case.rope, **ends))
        names = full_names(model, state)
        load(model, names, weights, state)
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = optimizer_of(model)
        pool = state.get_data_parallel_group(with_context_parallel=True)
        planner = flex.planner(config, flexcp.cluster("cpu", 1, pool.size()), strategy=case.strategy)
        losses, gradients, given = [], {}, []
        for step in range(steps):
            wrapped.zero_grad_buffer()
            batches = [documents(step)[i :: case.micro_batches] for i in range(case.micro_batches)]
            iterator = flex.data_iterator(batches, planner, config, tokens=case.tokens, pad_to=case.pad_to)
            reports = get_forward_backward_func()(
                forward_step_func=flex.forward_step,
                data_iterator=Noting(iterator, given),
                model=wrapped,
                num_microbatches=case.micro_batches,
                seq_length=case.pad_to * case.cp,
                micro_batch_size=1,
            )
            if reports:
                total = sum(r["lm loss"] for r in reports)
                dist.all_reduce(total, group=pool)
                losses.append(float(total[0] / total[1]))
            found = {names[n]: p.main_grad.numpy().copy() for n, p in model.named_parameters()}
            gradients = gradients or found
            for p in model.parameters():
                p.grad = p.main_grad
            optimizer.step()
            optimizer.zero_grad()  # Megatron would add what is left in .grad to main_grad
        layers = len(model.decoder.layers)
        moved = [b.step.sent_bytes["forward"] for b in given]
        wanted = [b.step.plan.bytes()[b.step.rank] * layers for b in given]
        return (
            losses,
            gradients,
            Share([b.tokens.shape[1] for b in given], np.array(moved), np.array(wanted), shards(model, names, state)),
        )


@dataclass(frozen=True)
class Share:
    """A rank's share of the work: tokens of each micro-batch, bytes that it sent in forwards, bytes of the plans, and
    how tensor parallelism cuts its parameters.
    """

    counts: list[int]
    sent: np.ndarray
    planned: np.ndarray
    cuts: dict[str, tuple[int, int, int]]


class Noting:
    """A data iterator that appends every batch it yields to a list."""

    def __init__(self, inner: Any, given: list[Any]) -> None:
        self.inner, self.given = inner, given

    def __next__(self) -> Any:
        self.given.append(next(self.inner))
        return self.given[-1]


def check(results: list[tuple[list[float], Arrays, Share]], stock: tuple[list[float], Arrays, Arrays]) -> None:
    """Check that the losses of the last stage and the gradients of all parameters on all ranks are those of stock
    Megatron, and that the bytes sent are those of the plans.
    """
    losses, gradients, _ = stock
    assert any(found for found, _, _ in results)
    for found, _, share in results:
        if found:
            np.testing.assert_allclose(found, losses[: len(found)], rtol=1e-5)
        np.testing.assert_array_equal(share.sent, share.planned)
    for _, found, share in results:
        for name, gradient in found.items():
            wanted = part_of(gradients[name], share.cuts.get(name))
            np.testing.assert_allclose(gradient, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0, err_msg=name)
    assert {name for _, found, _ in results for name in found} == set(gradients)


def full_names(model: torch.nn.Module, state: Any) -> dict[str, str]:
    """Return names of parameters as in the whole model, where layers and experts are numbered over all ranks."""
    found = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + state.get_pipeline_model_parallel_rank() * len(model.decoder.layers))
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            local = len(model.decoder.layers[0].mlp.experts.local_experts)
            parts[at] = str(int(parts[at]) + state.get_expert_model_parallel_rank() * local)
        found[name] = ".".join(parts)
    return found


def shards(model: torch.nn.Module, names: dict[str, str], state: Any) -> dict[str, tuple[int, int, int]]:
    """Return (dimension that tensor parallelism cuts, this rank's part, number of parts) of cut parameters."""
    rank, size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    cut = {names[n]: getattr(p, "partition_dim", -1) for n, p in model.named_parameters()}
    return {n: (dim, rank, size) for n, dim in cut.items() if dim is not None and dim >= 0}


def part_of(full: np.ndarray, shard: tuple[int, int, int] | None) -> np.ndarray:
    """Return this rank's part of a parameter of the whole model."""
    return full if shard is None else np.split(full, shard[2], shard[0])[shard[1]]


def load(model: torch.nn.Module, names: dict[str, str], weights: Arrays, state: Any) -> None:
    cut = shards(model, names, state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = names[name]
            parameter.copy_(torch.from_numpy(part_of(weights[full], cut.get(full))))
