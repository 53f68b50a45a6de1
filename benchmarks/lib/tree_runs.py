"""Tree runs: random batches of trees and plain documents through a tiny model,
as trees on ranks and as independent sequences on one process.

The single process uses neither trees nor flexcp: it walks from each end to the root, runs one sequence per forward with
plain dense attention, and sums losses position by position. Losses of both normalisations, with advantages and masks,
log-probabilities of every position, and the gradient of every parameter are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.clusters import cluster
from flexcp.executor.bind import bind
from flexcp.masks import Mask
from flexcp.plan.plan import Plan
from flexcp.train.update import sum_gradients, total_loss
from lib.model_runs import DENSE, VOCABULARY, Run, _no_mask, dense_attention, make_config, make_model

Ints = np.ndarray


@dataclass(frozen=True)
class TreeSizes:
    """Limits of a random tree."""

    depth: int = 4
    fan_out: int = 4
    segment: int = 6
    segments: int = 12
    """The most segments of a tree."""
    documents: int = 3


@dataclass(frozen=True)
class TreeBatch:
    """Documents (parents, lengths and ends; a plain one has a single segment), the token ids of the stream,
    and an advantage and a mask for every sequence.
    """

    family: str
    documents: tuple[tuple[list[int], list[int], list[int]], ...]
    tokens: Tensor
    advantages: Tensor
    masks: list[Tensor]

    @property
    def lengths(self) -> list[int]:
        return [sum(lengths) for _, lengths, _ in self.documents]

    def mask(self) -> list[Mask]:
        return [
            flexcp.causal() if len(parents) == 1 and ends == [0] else flexcp.tree(parents, lengths, ends)
            for parents, lengths, ends in self.documents
        ]

    def paths(self) -> list[list[int]]:
        """Return the stream tokens of every sequence, by walking from its end to the root."""
        found, start = [], 0
        for parents, lengths, ends in self.documents:
            borders = np.cumsum([start, *lengths])
            for end in ends:
                path: list[int] = []
                while end != -1:
                    path = [*range(int(borders[end]), int(borders[end + 1])), *path]
                    end = parents[end]
                found.append(path)
            start += sum(lengths)
        return found


def random_batch(seed: int, sizes: TreeSizes, family: str = "llama") -> TreeBatch:
    """Draw trees and plain documents; some sequences are the beginning of others or occur twice."""
    rng = np.random.default_rng(seed)
    documents = []
    for number in range(int(rng.integers(1, sizes.documents + 1))):
        if number and rng.random() < 0.3:
            documents.append(([-1], [int(rng.integers(1, 4 * sizes.segment))], [0]))
        else:
            documents.append(_random_tree(rng, sizes))
    total = sum(sum(lengths) for _, lengths, _ in documents)
    batch = TreeBatch(
        family, tuple(documents), torch.from_numpy(rng.integers(0, VOCABULARY, total)), torch.zeros(0), []
    )
    paths = batch.paths()
    masks = [torch.from_numpy(rng.integers(0, 2, len(path))) for path in paths]
    return TreeBatch(family, batch.documents, batch.tokens, torch.from_numpy(rng.normal(size=len(paths))), masks)


def _random_tree(rng: np.random.Generator, sizes: TreeSizes) -> tuple[list[int], list[int], list[int]]:
    parents: list[int] = []
    path: list[int] = []
    root = 0
    children: dict[int, int] = {}
    for segment in range(int(rng.integers(1, sizes.segments + 1))):
        path = path[: int(rng.integers(0, len(path) + 1)) if rng.random() < 0.4 else len(path)]
        while path and (len(path) >= sizes.depth or children.get(path[-1], 0) >= sizes.fan_out):
            path.pop()
        if segment and not path and rng.random() < 0.8:  # mostly one root
            path = [root] if children.get(root, 0) < sizes.fan_out else []
        parent = path[-1] if path else -1
        root = segment if parent == -1 else root
        children[parent] = children.get(parent, 0) + 1
        parents.append(parent)
        path.append(segment)
    lengths = [int(rng.integers(1, sizes.segment + 1)) for _ in parents]
    if rng.random() < 0.3:
        lengths[int(rng.integers(0, len(lengths)))] = 0
    lengths[0] = max(lengths[0], 1)
    ends = sorted(set(range(len(parents))) - set(parents))
    if rng.random() < 0.4:
        ends += rng.integers(0, len(parents), 2).tolist()
    return parents, lengths, ends


@dataclass(frozen=True)
class TreeResult:
    """Losses, log-probabilities by sequence (0 for the first token), gradients,
    and whether the sent bytes are those of the plan.
    """

    losses: list[float]
    log_probs: list[Tensor]
    gradients: dict[str, Tensor]
    bytes_as_planned: bool = True


def independent_sequences(batch: TreeBatch) -> TreeResult:
    """Run one sequence per forward, in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(DENSE, dense_attention)
    AttentionMaskInterface.register(DENSE, _no_mask)
    model = make_model(Run(batch.family), DENSE)
    found = []
    for path in batch.paths():
        ids = batch.tokens[path]
        if len(ids) < 2:
            found.append(torch.zeros(len(ids), dtype=torch.float64))
            continue
        logits = model(ids[None], use_cache=False).logits[0]
        picked = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
        found.append(torch.cat([picked.new_zeros(1), picked]))
    positions = sum(max(0, len(x) - 1) for x in found)
    mean = -sum(x.sum() for x in found) / max(1, positions)
    counts = [int((mask[1:] != 0).sum()) for mask in batch.masks]
    weighed = [-(x * mask).sum() * a for x, mask, a in zip(found, batch.masks, batch.advantages, strict=True)]
    by_token = sum(weighed) / max(1, sum(counts))
    having = max(1, sum(n > 0 for n in counts))
    by_sequence = sum(x / max(1, n) for x, n in zip(weighed, counts, strict=True)) / having
    losses = [torch.as_tensor(x, dtype=torch.float64) for x in (mean, by_token, by_sequence)]
    total = sum(losses)
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return TreeResult([float(x.detach()) for x in losses], [x.detach() for x in found], gradients)


def tree_plan(batch: TreeBatch, strategy: str, ranks: int) -> Plan:
    """Return the plan of a batch as trees. It is made once, because ``hypergraph`` may find another plan each time."""
    from flexcp.frameworks import huggingface

    config = make_config(batch.family)
    planner = huggingface.planner(config, cluster("cpu", 1, ranks), "float64", strategy=strategy)
    return planner(batch.lengths, masks=huggingface.masks(config, batch.mask()))


def tree_on_ranks(group: dist.ProcessGroup, batch: TreeBatch, plan: Plan, planted: str = "") -> TreeResult:
    """Run this rank's share of the batch as trees; ``planted`` puts a mistake into positions, edges or weights."""
    from flexcp.frameworks import huggingface

    huggingface.register()
    model = make_model(Run(batch.family), huggingface.NAME)
    huggingface.turn_on(model)
    step = bind(plan, group)
    given: dict[str, Any] = huggingface.inputs(batch.tokens, step)
    if "labels" in given:  # no document branches
        given = {name: given[name] for name in ("input_ids", "position_ids", "step", "use_cache")}
    if planted == "positions":
        given["position_ids"] = given["position_ids"] + (step.indices >= batch.tokens.numel() // 2)
    logits = model(**given).logits[0]
    tokens = batch.tokens.roll(1) if planted == "edges" else batch.tokens
    edges = step.edges(tokens)
    advantages = batch.advantages.flip(0) if planted == "weights" else batch.advantages
    losses = [step.loss(logits, edges)]
    for per in ("token", "sequence"):
        losses.append(step.loss(logits, edges, weights=edges.weights(advantages, batch.masks, per=per)))
    values = step.gather_sequences(step.log_probs(logits, edges).detach(), edges)
    torch.stack(losses).sum().backward()
    sum_gradients(model.parameters(), group)
    layers = [mask.layers for mask in plan.batch.masks]
    wanted = sum(n * plan.bytes(mask=m)[step.rank] for m, n in enumerate(layers))
    wanted_back = sum(n * plan.bytes(backward=True, mask=m)[step.rank] for m, n in enumerate(layers))
    same = step.sent_bytes["forward"] == wanted.tolist() and step.sent_bytes["backward"] == wanted_back.tolist()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return TreeResult([total_loss(x, group) for x in losses], values, gradients, same)


def worst_error(found: TreeResult, right: TreeResult) -> dict[str, float]:
    """Return the largest errors of losses, log-probabilities and gradients, each relative to the largest value or 1."""
    losses = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found.losses, right.losses, strict=True))
    values = max((_off(a, b) for a, b in zip(found.log_probs, right.log_probs, strict=True)), default=0.0)
    gradients = max(_off(found.gradients[name], expected) for name, expected in right.gradients.items())
    return {"loss": losses, "log_probs": values, "gradients": gradients}


def _off(found: Tensor, right: Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    return float((found - right).abs().max()) / max(1.0, float(right.abs().max())) if right.numel() else 0.0
