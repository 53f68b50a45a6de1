"""Training steps of a 1.4B model on one prompt with 16 rollouts, as a tree and as packed sequences, on one GPU.

    python benchmarks/tree_steps.py                                # prompts of 1,024, 2,048, 4,096 and 8,192 tokens
    python benchmarks/tree_steps.py --prompts 2048 --rollouts 8

It needs a CUDA GPU. Both forms of a batch run on the same model under flexcp, in turns. The loss is the mean over the
tokens of all rollouts. *Promised* is the ratio of the tokens of both forms, which would be the speed-up if all work of
a step were done once for each token. Attention is not: rows of a rollout read the prompt in both forms. Edges, weights
and plans are made before the steps, as a loader would. Memory is the most that torch allocated during a step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flexcp
from flexcp.executor.losses.edges import Edges
from flexcp.frameworks import huggingface
from model_gpu import SIZES, VOCABULARY, Trainer

PROMPTS = (1_024, 2_048, 4_096, 8_192)
WARM_UP = 2
"""Steps of each form that are not timed."""


@dataclass(frozen=True)
class Form:
    """One form of a batch, ready for a step: the stream's token ids, the bound step, its edges and their weights."""

    tokens: Tensor
    step: flexcp.Step
    edges: Edges
    weights: Tensor


@dataclass(frozen=True)
class Measured:
    """Tokens, median milliseconds of a step, peak gigabytes and first loss of one form."""

    tokens: int
    ms: float
    gigabytes: float
    loss: float


def rollouts_of(prompt: int, rollouts: int, answer: int, seed: int = 0) -> list[list[int]]:
    """Return sequences of random ids that share their first ``prompt`` tokens and no other."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(VOCABULARY, (prompt,), generator=generator).tolist()
    answers = torch.randint(VOCABULARY, (rollouts, answer), generator=generator)
    answers[:, 0] = torch.arange(rollouts)  # so that rollouts part at once
    return [shared + row for row in answers.tolist()]


def form_of(trainer: Trainer, sequences: Sequence[list[int]], prompt: int, as_tree: bool) -> Form:
    """Return sequences as one tree or as packed documents, planned and bound."""
    config = trainer.model.config
    if as_tree:
        tree = flexcp.tree_of(sequences)
        tokens, lengths = torch.from_numpy(tree.tokens), [len(tree)]
        masks = huggingface.masks(config, [tree.mask])
    else:
        tokens, lengths = torch.tensor([i for each in sequences for i in each]), [len(each) for each in sequences]
        masks = huggingface.masks(config)
    step = flexcp.bind(trainer.planner(lengths, masks=masks))
    step.prepare("cuda")
    tokens = tokens.cuda()
    edges = step.edges(tokens)
    trained = [torch.arange(len(each)) >= prompt for each in sequences]
    return Form(tokens, step, edges, edges.weights(tokens=trained))


def loss_of(trainer: Trainer, form: Form) -> Tensor:
    """Return the mean over the tokens of all rollouts."""
    ids, positions = form.step.shard(form.tokens), form.step.tables.positions_on(form.tokens.device)
    logits = trainer.model(ids[None], position_ids=positions[None], step=form.step, use_cache=False).logits[0]
    return form.step.loss(logits, form.edges, weights=form.weights)


def one_step(trainer: Trainer, form: Form) -> tuple[float, float]:
    """Run one step; return its milliseconds and the most gigabytes that were allocated meanwhile."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin.record()
    loss_of(trainer, form).backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), torch.cuda.max_memory_allocated() / 1e9


def measured(trainer: Trainer, sequences: Sequence[list[int]], prompt: int, repeats: int) -> dict[str, Measured]:
    """Time both forms in turns, after their losses are taken on the same weights."""
    ways = {"separate": False, "tree": True}
    first = {name: form_of(trainer, sequences, prompt, as_tree) for name, as_tree in ways.items()}
    with torch.no_grad():
        losses = {name: float(loss_of(trainer, form)) for name, form in first.items()}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(WARM_UP + repeats):
        for name, as_tree in ways.items():
            found = one_step(trainer, form_of(trainer, sequences, prompt, as_tree))
            if number >= WARM_UP:
                runs[name].append(found)
    return {
        name: Measured(
            len(first[name].tokens), statistics.median(ms for ms, _ in each), max(gb for _, gb in each), losses[name]
        )
        for name, each in runs.items()
    }


def main() -> None:
    """Time all prompts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)))
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--answer", type=int, default=1_024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/tree_steps.py times steps on a CUDA GPU, and there is none here")
    trainer = Trainer(next(iter(SIZES)), huggingface.NAME)
    print(
        "| prompt | rollouts | tokens, separate | tree | promised | ms, separate | tree | faster | of promised "
        "| GB, separate | tree | loss, separate | tree |"
    )
    print("| --- " * 13 + "|")
    for prompt in map(int, options.prompts.split(",")):
        sequences = rollouts_of(prompt, options.rollouts, options.answer)
        found = measured(trainer, sequences, prompt, options.repeats)
        apart, tree = found["separate"], found["tree"]
        promised, faster = apart.tokens / tree.tokens, apart.ms / tree.ms
        print(
            f"| {prompt:,} | {options.rollouts} x {options.answer:,} | {apart.tokens:,} | {tree.tokens:,} "
            f"| {promised:.2f} | {apart.ms:.0f} | {tree.ms:.0f} | {faster:.2f} | {faster / promised:.2f} "
            f"| {apart.gigabytes:.1f} | {tree.gigabytes:.1f} | {apart.loss:.4f} | {tree.loss:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
