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
PYTORCH = (
    PLANNER
    + """
plan = planner(lengths, flexcp.causal(){layout})          # lengths of this step's documents, the same list on every rank
step = flexcp.bind(plan, mesh["cp"])                      # a DeviceMesh axis or a process group

x = step.shard(tokens)                                    # this rank's rows of any [tokens, ...] tensor
out = flexcp.attention(q, k, v, step)                     # [local tokens, heads, head_dim], instead of your attention
"""
)
HUGGINGFACE = (
    PLANNER
    + """from flexcp.frameworks import huggingface

huggingface.turn_on(model)                                # once
plan = planner(lengths, masks=huggingface.masks(model.config){layout})
step = flexcp.bind(plan, mesh["cp"])
loss = model(**huggingface.inputs(tokens, step)).loss     # this rank's share; sum it over ranks
"""
)
TRAINER = (
    PLANNER
    + """from flexcp.frameworks.huggingface_trainer import FlexcpTrainer

trainer = FlexcpTrainer(model, args, train_dataset=dataset, data_collator=collator, planner=planner)
trainer.train()
"""
)
FSDP = """from torch.distributed.fsdp import fully_shard
from flexcp.frameworks import fsdp

for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
fsdp.sum_gradients(model)                                 # shares of one loss are summed, not averaged
"""
FRAMEWORKS = {
    "pytorch": ("PyTorch, your own loop", PYTORCH),
    "huggingface": ("Hugging Face Transformers", HUGGINGFACE),
    "trainer": ("Hugging Face Trainer", TRAINER),
    "fsdp": ("FSDP2, beside any of the others", FSDP),
}


@dataclass(frozen=True)
class Lines:
    """What the lines are filled in with; ``swap`` keeps tokens where a contiguous split has them."""

    shape: Shape
    cluster: Cluster
    strategy: str
    max_tokens_per_rank: int
    swap: bool


def code_lines(framework: str, lines: Lines) -> tuple[str, str]:
    """(title, code) of one framework."""
    if framework not in FRAMEWORKS:
        close = difflib.get_close_matches(framework, FRAMEWORKS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown framework {framework!r}: {hint}known ones are {', '.join(FRAMEWORKS)}")
    title, text = FRAMEWORKS[framework]
    return title, text.format(
        heads=lines.shape.heads,
        kv_heads=lines.shape.kv_heads,
        head_dim=lines.shape.head_dim,
        strategy=lines.strategy,
        cap=lines.max_tokens_per_rank,
        cluster=lines.cluster.name,
        nodes=lines.cluster.nodes,
        each=lines.cluster.ranks_per_node,
        layout=', layout="contiguous"' if lines.swap else "",
    )
