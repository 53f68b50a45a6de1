"""Model runs: a tiny model of each Hugging Face family, trained on one process and on several ranks,
to compare all numbers.

The single process uses no part of flexcp: one document per forward, plain dense attention in the model's dtype,
gradients by autograd. Its attention is a registered function of its own, because the families' eager attention computes
the softmax in float32 in any dtype. For the same reason norms compute in float64 if the model does: a float32 rounding
inside would hide the differences.

Both sides see the same documents from the same weights and take the same AdamW steps; gradients are summed over ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexcp.clusters import cluster
from flexcp.executor.bind import bind
from flexcp.plan.plan import Plan
from flexcp.train.update import sum_gradients, total_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 64
WINDOW = 7
DENSE = "flexcp_measure_dense"
LIMITS = {"float64": (1e-9, 1e-9), "float32": (1e-5, 1e-4)}
"""The allowed relative errors of the loss and of any parameter's gradient."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "attention_dropout": 0.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}
"""For each family its configuration class, and its special features:
windows, window and full layers with softcap, sinks.
"""
STRATEGIES = ("zigzag", "groups", "blocks", "auto")
LAYOUTS = ("free", "contiguous")
RANKS = (2, 3, 4)
"""The settings that families are trained with: all by ``make models``, some in CI.
``groups`` places tokens itself and accepts no layout.
"""


@dataclass(frozen=True)
class Run:
    """What to train, how, and on how many ranks."""

    family: str
    strategy: str = "blocks"
    layout: str = "free"
    ranks: int = 2
    dtype: str = "float64"
    steps: int = 2
    packed: bool = True
    """Whether a step has several documents, some of length 1; otherwise one."""
    learning_rate: float = 3e-3
    """At 1e-2 the loss of gemma2 rises and roundings grow tenfold every few steps:
    1e-15 in a gradient becomes 2e-8 after 50 steps.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the planner's call."""

    def lengths(self, step: int) -> list[int]:
        """Return the document lengths of a step, which differ from step to step."""
        if not self.packed:
            return [23 + 5 * (step % 3)]
        draw = np.random.default_rng(step)
        return [int(n) for n in draw.integers(1, 24, size=3)] + [1, 1 + step % 2]

    def tokens(self, step: int) -> Tensor:
        """Return the token ids of a step's stream."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(VOCABULARY, (sum(self.lengths(step)),), generator=generator)


@dataclass(frozen=True)
class Trained:
    """Losses of all steps, the gradients of the first and the last step, and a digest of the last weights."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    digest: str


def make_config(family: str, **sizes: Any) -> Any:
    """Return a family's configuration, tiny by default."""
    import transformers

    name, special = FAMILIES[family]
    return getattr(transformers, name)(**(SIZES | special | sizes))


def make_model(run: Run, attention: str) -> PreTrainedModel:
    """Return the family's tiny model, with the same weights every time."""
    import transformers

    config = make_config(run.family)
    torch.manual_seed(0)
    dtype = getattr(torch, run.dtype)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager", dtype=dtype
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("sinks"):
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(dtype) * 0.1)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _exact_norm(module)
    return model


def _exact_norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a family's norm without its cast to float32."""
    shift = 1.0 if "Gemma" in type(module).__name__ else 0.0
    epsilon = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)  # type: ignore[arg-type]

    def forward(x: Tensor) -> Tensor:
        weight: Tensor = module.weight + shift  # type: ignore[operator, assignment]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight

    return forward


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one document in the plainest way: ``[1, H, S, D]`` in, ``[1, S, H, D]`` out."""
    share, size = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    logits = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    back = torch.arange(size)[:, None] - torch.arange(size)
    seen = (back >= 0) & (back < (sliding_window or size))
    logits = logits.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        sink = s_aux[None, :, None, None].expand(1, -1, size, 1)
        logits = torch.cat([logits, sink], -1)
    weights = torch.softmax(logits, -1)[..., :size]
    return (weights @ value).transpose(1, 2), None


def train_alone(run: Run) -> Trained:
    """Train in this process alone."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(DENSE, dense_attention)
    AttentionMaskInterface.register(DENSE, _no_mask)
    model = make_model(run, DENSE)

    def loss_of(number: int) -> Tensor:
        lengths, tokens = run.lengths(number), run.tokens(number)
        total = torch.zeros((), dtype=getattr(torch, run.dtype))
        for document in tokens.split(lengths):
            logits = model(document[None], use_cache=False).logits[0]
            total = total + nn.functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
        return total / (len(tokens) - len(lengths))

    return _trained(run, model, loss_of, None)


def make_plan(run: Run, config: Any, number: int) -> Plan:
    """Return the plan of a step."""
    from flexcp.frameworks import huggingface

    planner = huggingface.planner(config, cluster("cpu", 1, run.ranks), run.dtype, strategy=run.strategy)
    return planner(run.lengths(number), masks=huggingface.masks(config), layout=run.layout, **run.options)


def train_on_ranks(group: dist.ProcessGroup, run: Run) -> Trained:
    """Train this rank's share."""
    from flexcp.frameworks import huggingface

    huggingface.register()
    model = make_model(run, huggingface.NAME)
    huggingface.turn_on(model)

    def loss_of(number: int) -> Tensor:
        step = bind(make_plan(run, model.config, number), group)
        tokens = run.tokens(number)
        found = model(**huggingface.inputs(tokens, step))
        # Transformers computes its own loss in float32.
        plain: Tensor = found.loss
        return plain if run.dtype == "float32" else step.loss(found.logits[0][: step.local_tokens], step.labels(tokens))

    return _trained(run, model, loss_of, group)


def _trained(
    run: Run, model: PreTrainedModel, loss_of: Callable[[int], Tensor], group: dist.ProcessGroup | None
) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, eps=1e-3)
    losses, gradients = [], []
    for number in range(run.steps):
        optimizer.zero_grad()
        loss = loss_of(number)
        loss.backward()
        sum_gradients(model.parameters(), group)
        losses.append(total_loss(loss, group))
        if number in (0, run.steps - 1):
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return Trained(losses, gradients, hashlib.sha256(weights).hexdigest())


@dataclass(frozen=True)
class Difference:
    """The difference of two runs: relative in the loss, and the largest norm(a - b) / norm(b)
    of any parameter's gradient.
    """

    loss: float
    gradient: float


def difference(found: Trained, right: Trained) -> Difference:
    """Compare all losses and the kept gradients. A gradient near zero is compared with the largest one."""
    worst = 0.0
    for mine, theirs in zip(found.gradients, right.gradients, strict=True):
        floor = 1e-3 * max(float(x.norm()) for x in theirs.values())
        for name, expected in theirs.items():
            worst = max(worst, float((mine[name] - expected).norm()) / max(float(expected.norm()), floor))
    losses = zip(found.losses, right.losses, strict=True)
    return Difference(max(abs(a - b) / abs(b) for a, b in losses), worst)


def _no_mask(**others: Any) -> None:
    """Make no mask: dense attention makes its own."""
