"""Lines to copy: what turning flexcp on takes in each framework, with the user's own numbers filled in."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from flexcp.clusters import Cluster
from flexcp.pieces import Shape

PLANNER = """import flexcp

planner = flexcp.Planner(heads={heads}, kv_heads={kv_heads}, head_dim={head_dim}, strategy="{strategy}",
                         max_tokens_per_rank={cap}, cluster=flexcp.cluster("{cluster}", nodes={nodes}, ranks_per_node={each}))
"""
SWAP = (
    PLANNER
    + """
step = flexcp.bind(planner(lengths, flexcp.causal(), layout="contiguous"), mesh["cp"])   # every batch: lengths of its documents
out = flexcp.attention(q, k, v, step)                                                    # every layer, instead of your attention
loss = step.loss(logits, labels, gradients="averaged")                                   # under DDP; "summed" where gradients are summed
"""
)
LOADER = (
    PLANNER
    + """
with flexcp.data.Loader(dataset, planner, budget={budget}, group=mesh["cp"]) as loader:
    for batch in loader:                            # batch.tokens, .labels and .positions are this rank's rows
        out = flexcp.attention(q, k, v, batch.step)    # every layer, instead of your attention
        loss = batch.step.loss(logits, batch.labels, gradients="averaged")    # under DDP; "summed" where gradients are summed
"""
)
HUGGINGFACE = """import flexcp
from flexcp.frameworks import huggingface

huggingface.turn_on(model)                          # once
planner = huggingface.planner(model, flexcp.cluster("{cluster}", nodes={nodes}, ranks_per_node={each}), strategy="{strategy}")
step = flexcp.bind(planner(lengths, masks=huggingface.masks(model.config){layout}), mesh["cp"])
loss = model(**huggingface.inputs(tokens, step, gradients="averaged")).loss    # under DDP; "summed" where gradients are summed
"""
TRAINER = """import flexcp
from flexcp.frameworks import huggingface
from flexcp.frameworks.huggingface_trainer import FlexcpTrainer

planner = huggingface.planner(model, flexcp.cluster("{cluster}", nodes={nodes}, ranks_per_node={each}), strategy="{strategy}")
trainer = FlexcpTrainer(model, args, train_dataset=dataset, data_collator=collator, planner=planner)
trainer.train()
"""
FSDP = """from torch.distributed.fsdp import fully_shard
from flexcp.frameworks import fsdp

for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
fsdp.sum_gradients(model)                           # for gradients="summed": ranks hold shares of one loss
"""
TORCHTITAN = """import flexcp
from flexcp.frameworks import torchtitan

config = torchtitan.turn_on(config, cluster=flexcp.cluster("{cluster}", nodes={nodes}, ranks_per_node={each}))
config.build().train()
"""
MEGATRON = """import flexcp
from flexcp.frameworks import megatron as flex

spec = flex.planned_spec(spec)                      # of GPT layers; TransformerConfig(calculate_per_token_loss=True)
model = flex.adapt(GPTModel(config, spec, ...))
planner = flex.planner(config, flexcp.cluster("{cluster}", nodes={nodes}, ranks_per_node={each} // tp))
iterator = flex.data_iterator(batches, planner, config, device="cuda")
forward_backward(forward_step_func=flex.forward_step, data_iterator=iterator, model=model, ...)
"""
FRAMEWORKS = {
    "pytorch": ("PyTorch, your own loop", LOADER),
    "huggingface": ("Hugging Face Transformers", HUGGINGFACE),
    "trainer": ("Hugging Face Trainer", TRAINER),
    "fsdp": ("FSDP2, beside any of the others", FSDP),
    "torchtitan": ("torchtitan", TORCHTITAN),
    "megatron": ("Megatron-Core", MEGATRON),
}


@dataclass(frozen=True)
class Lines:
    """What the lines are filled in with; ``swap`` keeps tokens where a contiguous split has them."""

    shape: Shape
    cluster: Cluster
    strategy: str
    max_tokens_per_rank: int
    budget: int
    swap: bool


def code_lines(framework: str, lines: Lines) -> tuple[str, str]:
    """(title, code) of one framework."""
    if framework not in FRAMEWORKS:
        close = difflib.get_close_matches(framework, FRAMEWORKS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown framework {framework!r}: {hint}known ones are {', '.join(FRAMEWORKS)}")
    title, text = FRAMEWORKS[framework]
    if framework == "pytorch" and lines.swap:
        text = SWAP
    return title, text.format(
        heads=lines.shape.heads,
        kv_heads=lines.shape.kv_heads,
        head_dim=lines.shape.head_dim,
        strategy=lines.strategy,
        cap=lines.max_tokens_per_rank,
        budget=lines.budget,
        cluster=lines.cluster.name,
        nodes=lines.cluster.nodes,
        each=lines.cluster.ranks_per_node,
        layout=', layout="contiguous"' if lines.swap else "",
    )
