"""Losses on trees: GRPO over rollouts, a preference pair (DPO), and agent runs that branch at every turn.

    torchrun --nproc-per-node 4 examples/tree_rollouts.py --task grpo      # or dpo, agent

Sequences that begin alike become one tree, whose shared tokens are computed once and spread over all ranks. The loss is
written for a list of log-probabilities, one tensor for each sequence, and does not know where they come from: rank 0
also takes it from separate sequences, one forward each, and prints both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import flexcp
from flexcp.frameworks import huggingface

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LogProbs = list[Tensor]
"""For each sequence the log-probability of each of its tokens; 0 for the first, which nothing predicts."""


class Rollouts(NamedTuple):
    """Groups of sequences that share a prompt, and of each sequence, in order,
    which tokens are trained on and what they earned.
    """

    groups: list[list[list[int]]]
    trained: list[Tensor]
    rewards: Tensor

    @property
    def sequences(self) -> list[list[int]]:
        return [sequence for group in self.groups for sequence in group]


def drawn(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(256, (count,), generator=generator).tolist()


def prompts_and_answers(prompts: int, answers: int, seed: int = 0) -> Rollouts:
    """Prompts with several answers each."""
    generator = torch.Generator().manual_seed(seed)
    groups, trained = [], []
    for _ in range(prompts):
        prompt = drawn(generator, 40)
        group = [prompt + drawn(generator, 5 + 3 * i) for i in range(answers)]
        trained += [torch.arange(len(sequence)) >= len(prompt) for sequence in group]
        groups.append(group)
    return Rollouts(groups, trained, torch.randn(prompts * answers, generator=generator, dtype=torch.float64))


def agent_runs(depth: int = 6, seed: int = 0) -> Rollouts:
    """One task, and two ways to go on after every turn of every other run."""
    generator = torch.Generator().manual_seed(seed)
    runs = [drawn(generator, 30)]
    for turn in range(depth):
        runs = [run + drawn(generator, 4 + turn) for i, run in enumerate(runs) for _ in range(1 + (i % 2 == 0))]
    trained = [torch.arange(len(run)) >= 30 for run in runs]
    return Rollouts([runs], trained, torch.randn(len(runs), generator=generator, dtype=torch.float64))


def grpo(found: LogProbs, batch: Rollouts) -> Tensor:
    """The clipped loss of GRPO: advantages inside each group, the mean of every sequence's mean."""
    advantages = torch.cat(
        [(r - r.mean()) / (r.std() + 1e-4) for r in batch.rewards.split([len(g) for g in batch.groups])]
    )
    each = []
    for log_probs, trained, advantage in zip(found, batch.trained, advantages, strict=True):
        old = log_probs.detach() - 0.3 * torch.sin(torch.arange(len(log_probs)))  # of the policy that made the rollouts
        ratio = torch.exp(log_probs - old)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        each.append(gain[trained].mean())
    return -torch.stack(each).mean()


def dpo(found: LogProbs, batch: Rollouts) -> Tensor:
    """The loss of DPO: the first sequence of each pair is preferred. The reference is what the model says now,
    shifted a little.
    """
    totals = torch.stack([log_probs[trained].sum() for log_probs, trained in zip(found, batch.trained, strict=True)])
    margin = totals - (totals.detach() - torch.linspace(-0.5, 0.5, len(totals), dtype=totals.dtype))
    return -torch.nn.functional.logsigmoid(0.1 * (margin[0::2] - margin[1::2])).mean()


def policy_gradient(found: LogProbs, batch: Rollouts) -> Tensor:
    """Every trained token of every run by what the run earned over the mean, divided by all of them."""
    advantages = batch.rewards - batch.rewards.mean()
    total = torch.stack([x[t].sum() * a for x, t, a in zip(found, batch.trained, advantages, strict=True)]).sum()
    return -total / sum(int(t.sum()) for t in batch.trained)


TASKS: dict[str, tuple[Callable[[], Rollouts], Callable[[LogProbs, Rollouts], Tensor]]] = {
    "grpo": (lambda: prompts_and_answers(3, 4), grpo),
    "dpo": (lambda: prompts_and_answers(3, 2), dpo),
    "agent": (agent_runs, policy_gradient),
}


def of_separate_sequences(model: PreTrainedModel, batch: Rollouts) -> LogProbs:
    """One forward a sequence, as without trees."""
    found = []
    for sequence in batch.sequences:
        ids = torch.tensor(sequence)
        logits = model(ids[None], use_cache=False).logits[0]
        picked = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
        found.append(torch.cat([picked.new_zeros(1), picked]))
    return found


def of_trees(model: PreTrainedModel, batch: Rollouts) -> tuple[LogProbs, int]:
    """(Log-probabilities of all sequences, tokens computed): every group is a tree, and all ranks share the work."""
    trees = [flexcp.tree_of(group) for group in batch.groups]
    tokens = torch.cat([torch.from_numpy(tree.tokens) for tree in trees])
    where = flexcp.cluster("cpu", ranks_per_node=dist.get_world_size())
    planner = huggingface.planner(model, where)
    plan = planner([len(tree) for tree in trees], masks=huggingface.masks(model.config, [tree.mask for tree in trees]))
    step = flexcp.bind(plan, dist.group.WORLD)
    logits = model(**huggingface.inputs(tokens, step)).logits[0]
    edges = step.edges(tokens)
    return step.gather_sequences(step.log_probs(logits, edges), edges), len(tokens)


def gradient_norm(model: PreTrainedModel) -> float:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return float(found.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="grpo")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float64)
    make, objective = TASKS[options.task]
    batch = make()

    if dist.get_rank() == 0:
        loss = objective(of_separate_sequences(model, batch), batch)
        loss.backward()
        tokens = sum(map(len, batch.sequences))
        print(
            f"separate sequences, 1 rank: {tokens} tokens, loss {loss.item():.9f}, gradient {gradient_norm(model):.9f}"
        )

    huggingface.turn_on(model)
    found, tokens = of_trees(model, batch)
    loss = objective(found, batch)  # the batch's on every rank, so gradients are averaged
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    norm = gradient_norm(model)
    if dist.get_rank() == 0:
        print(f"trees, {dist.get_world_size()} ranks: {tokens} tokens, loss {loss.item():.9f}, gradient {norm:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
