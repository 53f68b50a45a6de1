"""Tests that each rank counts only its share of the load-balancing loss of experts, which Transformers adds to a
model's loss, and that a model with multi-latent attention runs on ranks with the head sizes that its own code uses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig

import flexcp
from flexcp.executor.losses.averaging import Gradients
from flexcp.frameworks import huggingface
from flexcp.measure.ranks import RankPool

LENGTHS = [20, 1, 9, 4]
TOKENS = torch.randint(64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def experts(coefficient: float = 1.0) -> Any:
    """Return a small Mixtral that adds its router loss with this factor."""
    torch.manual_seed(0)
    config = MixtralConfig(
        **SIZES,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def latent() -> Any:
    """Return a small DeepSeek-V3, whose queries and keys are wider than its values."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


def bound(model: Any, group: dist.ProcessGroup, strategy: str = "blocks") -> flexcp.Step:
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, 2), strategy=strategy)
    return flexcp.bind(planner(LENGTHS, masks=huggingface.masks(model.config)), group)


def on_ranks(group: dist.ProcessGroup, gradients: Gradients, coefficient: float) -> tuple[float, float, int, Tensor]:
    """Return the loss and the router loss of this rank, its number of rows, and the gradient of a router."""
    model = experts(coefficient)
    huggingface.turn_on(model)
    step = bound(model, group, "dp")  # ranks hold different numbers of rows
    found = model(**huggingface.inputs(TOKENS, step, gradients=gradients))
    found.loss.backward()
    router = model.model.layers[0].mlp.gate.weight.grad
    return float(found.loss), float(found.aux_loss), step.local_tokens, router


@pytest.mark.parametrize("gradients", ["summed", "averaged"])
def test_the_router_loss_is_the_mean_over_all_rows(two: RankPool, gradients: Gradients) -> None:
    """Both reductions give the same loss and gradient, and the router loss counts once, not once for each rank."""
    without = two.run(on_ranks, gradients, 0.0)
    found = two.run(on_ranks, gradients, 3.0)
    factor = 2 if gradients == "averaged" else 1
    assert sum(rows for _, _, rows, _ in found) == sum(LENGTHS) and len({rows for _, _, rows, _ in found}) == 2
    added = sum(loss - plain for (loss, *_), (plain, *_) in zip(found, without, strict=True)) / factor
    mean = sum(router * rows for _, router, rows, _ in found) / sum(LENGTHS)
    assert mean > 0.5
    assert added == pytest.approx(3.0 * mean, rel=1e-5)
    summed = two.run(on_ranks, "summed", 3.0)
    grads = [sum(grad for *_, grad in run) for run in (found, summed)]
    torch.testing.assert_close(grads[0] / factor, grads[1])


def _not_turned_on(group: dist.ProcessGroup) -> None:
    model = experts()
    huggingface.register()
    model.config._attn_implementation = huggingface.NAME
    model(**huggingface.inputs(TOKENS, bound(model, group)))


def test_a_router_loss_that_nothing_would_share_is_refused(two: RankPool) -> None:
    with pytest.raises(Exception, match=r"output_router_logits.* on each of 2 ranks.*turn_on"):
        two.run(_not_turned_on)


def test_a_tuple_is_shared_too(two: RankPool) -> None:
    for loss, router, rows, shared in two.run(_tuple):
        assert shared == pytest.approx(loss + (rows / sum(LENGTHS) - 1) * router)


def _tuple(group: dist.ProcessGroup) -> tuple[float, float, int, float]:
    """Return the loss that the model alone would give on this rank, the router loss, rows, and the tuple's loss."""
    model = experts()
    huggingface.turn_on(model)
    step = bound(model, group)
    given = huggingface.inputs(TOKENS, step)
    labels = given["shift_labels"][0]
    shared, router, logits = model(**given, return_dict=False)[:3]
    plain = torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum") / (sum(LENGTHS) - len(LENGTHS))
    return float(plain + router), float(router), step.local_tokens, float(shared)


def _latent_rows(group: dist.ProcessGroup) -> Tensor:
    model = latent()
    huggingface.turn_on(model)
    step = bound(model, group)
    with torch.no_grad():
        local = model(**huggingface.inputs(TOKENS, step)).logits[0]
    return step.gather(local)


def test_multi_latent_attention_runs_with_its_own_sizes(two: RankPool) -> None:
    alone = latent()
    with torch.no_grad():
        wanted = torch.cat([alone(part[None], use_cache=False).logits[0] for part in TOKENS.split(LENGTHS)])
    shape = huggingface.planner(alone, flexcp.cluster("cpu", 1, 2)).shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim) == (4, 4, 24, 12)
    for found in two.run(_latent_rows):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_sizes_beside_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got head_dim=24 besides.*flexcp\.Planner\("):
        huggingface.planner(latent().config, flexcp.cluster("cpu", 1, 2), head_dim=24)
