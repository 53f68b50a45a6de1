"""Code to copy: the lines that turn flexcp on in each framework, with the user's own numbers filled in.

A planner made by these lines plans what was simulated: it has the same heads, cluster, training step, cost model and
cap of tokens per rank, and its batches have the same masks with the same layers. Where a framework already knows some
of these, its own ``planner`` function reads them from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from flexcp.clusters import Cluster
from flexcp.data.lengths import batch_tokens
from flexcp.masks import Mask, named_mask, public_name
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training

PLANNER = """import flexcp
{calibration}
planner = flexcp.Planner(
    heads={heads}, kv_heads={kv_heads}, head_dim={head_dim}{sizes}, strategy="{strategy}", max_tokens_per_rank={cap},
    cluster={cluster},
    training={training}{cost},
)
"""
SWAP = (
    PLANNER
    + """
step = flexcp.bind(planner(lengths, {masks}, layout="contiguous"), mesh["cp"])   # every batch: lengths of its documents
out = flexcp.attention(q, k, v, step{which})                # every layer; with scale=, softcap=, sinks= of your model
loss = step.loss(logits, labels, gradients="averaged")     # under DDP; "summed" where they are summed
"""
)
LOADER = (
    PLANNER
    + """
# budget: {why_budget}
with flexcp.data.Loader(dataset, planner, budget={budget}, {masks}, group=mesh["cp"]) as loader:
    for batch in loader:                            # batch.tokens, .labels and .positions are this rank's rows
        out = flexcp.attention(q, k, v, batch.step{which})    # every layer; with scale=, softcap=, sinks= of your model
        loss = batch.step.loss(logits, batch.labels, gradients="averaged")  # under DDP; "summed" where they are summed
"""
)
HUGGINGFACE = """import flexcp
from flexcp.frameworks import huggingface
{calibration}
huggingface.turn_on(model)                          # once
planner = huggingface.planner(
    model, {cluster}, strategy="{strategy}"{tp}, max_tokens_per_rank={cap},
    training={training}{cost},
)
step = flexcp.bind(planner(lengths, masks=huggingface.masks(model.config){layout}), mesh["cp"])
loss = model(**huggingface.inputs(tokens, step, gradients="averaged")).loss  # under DDP; "summed" where they are summed
"""
TRAINER = """import flexcp
from flexcp.frameworks import huggingface
from flexcp.frameworks.huggingface_trainer import FlexcpTrainer
{calibration}
planner = huggingface.planner(
    model, {cluster}, strategy="{strategy}"{tp}, max_tokens_per_rank={cap},
    training={training}{cost},
)
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
{calibration}
config = torchtitan.turn_on(config, cluster={cluster})
config.build().train()
"""
MEGATRON = """import flexcp
from flexcp.frameworks import megatron as flex
{calibration}
spec = flex.planned_spec(spec)                      # of GPT layers; TransformerConfig(calculate_per_token_loss=True)
model = flex.adapt(GPTModel(config, spec, ...))
planner = flex.planner(config, {pool_cluster}, max_tokens_per_rank={cap}{cost})
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
    """The numbers that are filled into the lines; ``swap`` keeps tokens where a contiguous split has them.

    ``training`` is the step that was simulated, ``cluster`` the ranks left to context parallelism after tensor
    parallelism, ``cost_file`` the calibration that was used, if any. ``masks`` maps the name of a mask to (mask, number
    of layers).

    ``step_tokens`` are the tokens of a training step, which takes ``micro_batches`` passes; ``longest`` is the length
    of the longest document, which has to fit into a batch.
    """

    training: Training
    cluster: Cluster
    strategy: str
    max_tokens_per_rank: int
    step_tokens: int
    micro_batches: int
    masks: Mapping[str, tuple[Mask, int]]
    swap: bool
    longest: int = 1
    cost_file: Path | None = None

    @property
    def shape(self) -> Shape:
        """The attention shape of one rank."""
        return self.training.model.shape

    @property
    def tp(self) -> int:
        """Number of ranks over which tensor parallelism divides the heads."""
        return self.training.tp

    @property
    def budget(self) -> int:
        """Tokens of one batch: those of a step divided by its passes, but at least those of the longest document."""
        return max(-(-self.step_tokens // self.micro_batches), self.longest)

    @property
    def why_budget(self) -> str:
        """Comment for the code that says how :attr:`budget` was found."""
        ranks, room = self.cluster.ranks, batch_tokens(self.max_tokens_per_rank, self.cluster.ranks)
        if self.budget == self.longest:
            return "tokens of a batch, those of your longest document"
        if self.budget == room:
            all_ranks = f"{ranks} ranks x {self.max_tokens_per_rank:,}"
            return f"tokens of a batch, 7/8 of {all_ranks} so that ranks may keep different counts"
        if self.micro_batches > 1:
            return f"tokens of a batch; {self.micro_batches} batches make a step of {self.step_tokens:,}"
        return f"tokens of a batch: the step you asked for, under the {room:,} that leave {ranks} ranks room to differ"


def check_framework(framework: str) -> None:
    """Raise ValueError for a framework without lines, and suggest the nearest known name."""
    if framework not in FRAMEWORKS:
        close = difflib.get_close_matches(framework, FRAMEWORKS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown framework {framework!r}: {hint}known ones are {', '.join(FRAMEWORKS)}, or all")


def code_lines(framework: str, lines: Lines) -> tuple[str, str]:
    """Return the title and the code of one framework; raise ValueError if it is unknown."""
    check_framework(framework)
    title, text = FRAMEWORKS[framework]
    if framework == "pytorch" and lines.swap:
        text = SWAP
    # Without --tp a Megatron user still has a tensor-parallel size to divide by. With it, the cluster is already
    # divided.
    each = lines.cluster.ranks_per_node
    pool = each if lines.tp > 1 else f"{each} // tp"
    calibrated = lines.cost_file is not None
    return title, text.format(
        heads=lines.shape.heads,
        kv_heads=lines.shape.kv_heads,
        head_dim=lines.shape.head_dim,
        sizes=_sizes(lines.shape),
        strategy=lines.strategy,
        cap=lines.max_tokens_per_rank,
        training=_training(lines.training),
        calibration=_calibration(lines.cost_file),
        cost=", cost=calibration.cost" if calibrated else "",
        budget=lines.budget,
        why_budget=lines.why_budget,
        masks=_masks(lines.masks),
        which="" if len(lines.masks) == 1 else ", mask=name_of_the_layers_mask",
        cluster=_cluster(lines, each),
        pool_cluster=_cluster(lines, pool),
        tp=f", tp={lines.tp}" if lines.tp > 1 else "",
        layout=', layout="contiguous"' if lines.swap else "",
    )


def _cluster(lines: Lines, ranks_per_node: int | str) -> str:
    """Return the call that makes the cluster, with measured speeds if a calibration is used."""
    made = f'flexcp.cluster("{lines.cluster.name}", nodes={lines.cluster.nodes}, ranks_per_node={ranks_per_node})'
    return made if lines.cost_file is None else f"calibration.on({made})"


def _calibration(file: Path | None) -> str:
    """Return the lines that read the calibration file of ``--cost``, or nothing without a file."""
    if file is None:
        return ""
    return (
        "from pathlib import Path\nfrom flexcp.calibration import read_calibration\n\n"
        f"calibration = read_calibration(Path({str(file)!r}))"
    )


def _training(training: Training) -> str:
    """Return the call that makes the training step: model of one rank, gradient sync, and tensor-parallel size."""
    preset = training.model
    model = ", ".join(f"{field.name}={getattr(preset.model, field.name)!r}" for field in fields(preset.model))
    sizes = ", ".join(repr(size) for size in astuple(preset.shape))
    experts = f", experts={preset.experts}" if preset.experts > 1 else ""
    tied = ", tied=True" if preset.tied else ""
    whole = (
        f"flexcp.Preset(flexcp.Model({model}), flexcp.Shape({sizes}), vocabulary={preset.vocabulary}{experts}{tied})"
    )
    overlap = f", overlap_permille={training.overlap_permille}" if training.overlap_permille != 1000 else ""
    return (
        f'flexcp.Training({whole}, sync="{training.sync}"{overlap}{f", tp={training.tp}" if training.tp > 1 else ""})'
    )


def _sizes(shape: Shape) -> str:
    """Return planner arguments for those sizes of a shape that differ from the defaults."""
    usual = {"v_head_dim": shape.head_dim, "dtype": "bfloat16", "latent": None}
    return "".join(f", {name}={getattr(shape, name)!r}" for name in usual if getattr(shape, name) != usual[name])


def _masks(masks: Mapping[str, tuple[Mask, int]]) -> str:
    """Return the keyword argument that gives a planner or a loader these masks, each with its number of layers."""
    inside = ", ".join(f'"{name}": ({_call(mask)}, {layers})' for name, (mask, layers) in masks.items())
    return f"masks={{{inside}}}"


def _call(mask: Mask) -> str:
    """Return the Python call that makes a named mask, such as ``flexcp.window(1023, 0)``."""
    kind = named_mask(mask.name)
    return f"{public_name(kind.make)}({', '.join(map(repr, kind.arguments(mask.params)))})"
