"""Workloads of the kernel benchmark: a mask over one stream of tokens, for our kernels and for FlexAttention.

Our kernels get it as slices, FlexAttention as a ``mask_mod``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flexcp import masks
from flexcp.masks import Mask
from flexcp.masks.tree import tree_of_mask

Ints = NDArray[np.int64]
MaskMod = Callable[[Any, Any, Any, Any], Any]
WINDOW, SINK, BLOCK, LOCAL, ANSWERS, QUESTION = 4096, 64, 256, 2, 4, 0.2
SEED = 0
"""Of everything that is drawn, so that a workload of one name and length is always the same."""

NAMES = ("causal", "full", "window", "lambda", "question", "blockwise", "docs16", "docs64")
TREES = ("tree-rollouts16", "tree-rollouts64", "tree-pair", "tree-agent")
"""Trees: prompts with 16 or 64 rollouts, a prompt with two answers, and an agent's run that branches at turns.

The prompt has a quarter of the tokens with 16 rollouts, and a half otherwise.
"""
TREE_BATCHES = ("trees-rollouts16", "trees-rollouts64", "trees-pairs", "trees-agents")
"""Batches of many trees with segments of random lengths (see :data:`SEGMENTS`), as post-training makes them."""
SEGMENTS = {"trees-rollouts16": (16, 512, 512), "trees-rollouts64": (64, 512, 256), "trees-pairs": (2, 512, 256)}
"""For batches of rollouts: rollouts of a prompt, and the mean tokens of a prompt and of a rollout.

Lengths are drawn from log-normal distributions whose logarithms have a standard deviation of 0.5.
"""
TURNS, TURN, RUN = 6, 128, 12
"""For agents' runs: about the depth of a tree, the mean tokens of a turn, and the segments of a tree, its task
included.
"""


@dataclass(frozen=True)
class Workload:
    """Documents of ``lengths`` tokens in one stream, each with the mask ``mask``."""

    name: str
    lengths: tuple[int, ...]
    mask: Mask

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def slices(self) -> Ints:
        """Return the slices (rectangles cut by a band of diagonals) of the whole stream, in stream coordinates."""
        starts = np.cumsum((0, *self.lengths[:-1]))
        parts = [masks.shift(self.mask.slices(n), s, s) for n, s in zip(self.lengths, starts.tolist(), strict=True)]
        return np.concatenate(parts)

    def pairs(self) -> int:
        """Return the number of (query, key) pairs that attend."""
        return int(masks.area(self.slices()).sum())


def workload(name: str, tokens: int) -> Workload:
    """Return the workload of a name: one of ``NAMES``, ``TREES`` and ``TREE_BATCHES``, or ``docsN``.

    ``docsN`` is N causal documents cut at random places. Raise ValueError for another name, or for more documents than
    tokens.
    """
    named = {
        "causal": masks.causal(),
        "full": masks.full(),
        "window": masks.window(WINDOW - 1, 0),
        "lambda": masks.lambda_(SINK, WINDOW),
        "question": masks.shared_question(ANSWERS, QUESTION),
        "blockwise": masks.causal_blockwise(BLOCK, LOCAL),
    }
    if name in named:
        return Workload(name, (tokens,), named[name])
    if name in TREES:
        return Workload(name, (tokens,), _tree(name, tokens))
    if name in TREE_BATCHES:
        return Workload(name, (tokens,), _trees(name, tokens))
    if not name.startswith("docs") or not name[4:].isdigit() or not 1 <= int(name[4:]) <= tokens:
        raise ValueError(
            f"unknown workload {name!r}; known are {', '.join(NAMES + TREES + TREE_BATCHES)}, and docsN for any number "
            "of documents N"
        )
    cuts = np.random.default_rng(SEED).choice(np.arange(1, tokens), int(name[4:]) - 1, replace=False)
    lengths = np.diff(np.concatenate([[0], np.sort(cuts), [tokens]]))
    return Workload(name, tuple(int(n) for n in lengths), masks.causal())


def _tree(name: str, tokens: int) -> Mask:
    """Return the mask of a tree of this name with ``tokens`` tokens."""
    if name == "tree-agent":
        rng = np.random.default_rng(SEED)
        borders = np.unique([0, *rng.integers(1, max(2, tokens), 128), tokens])
        return masks.tree(random_parents(rng, len(borders) - 1, 16), np.diff(borders).tolist())
    prompt, answers = {"tree-rollouts16": (tokens // 4, 16), "tree-rollouts64": (tokens // 2, 64)}.get(
        name, (tokens // 2, 2)
    )
    cuts = np.linspace(prompt, tokens, answers + 1).astype(np.int64)
    return masks.tree([-1] + [0] * answers, [prompt, *np.diff(cuts).tolist()])


def _trees(name: str, tokens: int) -> Mask:
    """Return the mask of many trees, one after the other; the last one ends where ``tokens`` tokens are reached."""
    rng = np.random.default_rng(SEED)
    parents: list[int] = []
    lengths: list[int] = []
    while sum(lengths) < tokens:
        root = len(parents)
        shape, means = _segments(name, rng)
        parents += [-1 if parent < 0 else root + parent for parent in shape]
        lengths += [max(1, round(mean * float(rng.lognormal(-0.125, 0.5)))) for mean in means]
    ends = np.minimum(np.cumsum(lengths), tokens)
    return masks.tree(parents, np.diff(ends, prepend=0).tolist())


def _segments(name: str, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Return the parent of each segment of a new tree, -1 for its root, and the segments' mean tokens."""
    if name != "trees-agents":
        rollouts, prompt, rollout = SEGMENTS[name]
        return [-1] + [0] * rollouts, [prompt] + [rollout] * rollouts
    return random_parents(rng, RUN, TURNS), [4 * TURN] + [TURN] * (RUN - 1)


def random_parents(rng: np.random.Generator, segments: int, depth: int) -> list[int]:
    """Return the parent of each segment of a random tree in depth-first order, -1 for its root.

    Half of the segments go on where the last one ended, up to ``depth`` segments on a path; half begin at any segment
    of its path.
    """
    parents, path = [-1], [0]
    for segment in range(1, segments):
        path = path[: int(rng.integers(1, len(path) + 1))] if rng.random() < 0.5 else path[: depth - 1]
        parents.append(path[-1])
        path.append(segment)
    return parents


def mask_mod(work: Workload, device: torch.device) -> MaskMod | None:
    """Return the workload's mask for FlexAttention; None means that every pair attends."""
    n = work.tokens
    if work.name == "full":
        return None
    if work.name == "causal":
        return lambda b, h, q, k: q >= k
    if work.name == "window":
        return lambda b, h, q, k: (q >= k) & (q - k < WINDOW)
    if work.name == "lambda":
        return lambda b, h, q, k: (q >= k) & ((q - k < WINDOW) | (k < SINK))
    if work.name == "blockwise":
        last = (n - 1) // BLOCK * BLOCK
        return lambda b, h, q, k: (q >= k) & ((k < BLOCK) | (q >= last) | (q - k <= LOCAL * BLOCK))
    if work.name == "question":
        question = int(QUESTION * n)
        part = (torch.arange(n) - question).div((n - question) // ANSWERS, rounding_mode="floor")
        ids = part.clamp(-1, ANSWERS - 1).to(device)
        return lambda b, h, q, k: (q >= k) & ((ids[k] < 0) | (ids[q] == ids[k]))
    if work.name in TREES + TREE_BATCHES:  # a key is seen by all rows from its own to the end of its segment's subtree
        tree = tree_of_mask(work.mask)
        ends = np.append(tree.starts, tree.tokens)[tree.after]
        until = torch.from_numpy(np.repeat(ends, tree.lengths)).to(device)
        return lambda b, h, q, k: (q >= k) & (q < until[k])
    ids = torch.repeat_interleave(torch.arange(len(work.lengths)), torch.tensor(work.lengths)).to(device)
    return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])
