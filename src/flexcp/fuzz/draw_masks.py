"""Random masks: named ones, disjoint slices, ranges of keys, trees, and numbers larger than every document."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from typing import Any

from flexcp.fuzz.mask_words import Words

EXTREMES = (sys.maxsize, sys.maxsize - 1, 1 << 62, (1 << 62) - 1, 1 << 61, 1 << 40, 1 << 31, (1 << 30) - 1, 0, 1)
"""Numbers that are drawn in place of usual sizes."""
NAMED = ("full", "causal", "causal", "window", "lambda", "shared-question", "blockwise", "prefix")
OF_ONE_LENGTH = ("slices", "key-ranges", "tree", "modality", "shared-answers")


def named_mask(rng: random.Random, longest: int) -> Words:
    """Draw a mask for documents of any length, up to ``longest``, as mask words such as ``["window", 6, 0]``."""
    kind = rng.choice(NAMED)
    wide = max(2, min(longest, 64))

    def count(least: int = 0) -> int:
        return max(least, rng.choice(EXTREMES) if rng.random() < 0.08 else rng.randrange(least, wide + 1))

    numbers: dict[str, list[Any]] = {
        "full": [],
        "causal": [],
        "window": [None if rng.random() < 0.1 else count(), None if rng.random() < 0.1 else rng.choice((0, count()))],
        "lambda": [count(), count(1)],
        "shared-question": [rng.choice((1, 2, 3, 7, wide)), rng.choice((0.0, 0.2, 0.5, 1.0, rng.random()))],
        "blockwise": [count(1), count()],
        "prefix": [count()],
    }
    return [kind, *numbers[kind]]


def document_mask(rng: random.Random, length: int) -> Words:
    """Draw a mask for one document of ``length`` tokens, as mask words such as ``["window", 6, 0]``."""
    if rng.random() < 0.35:
        return named_mask(rng, length)
    kind = rng.choice(OF_ONE_LENGTH)
    if kind == "slices":
        return ["slices", length, _slices(rng, length)]
    if kind == "key-ranges":
        return ["key-ranges", _key_ranges(rng, length)]
    if kind == "tree":
        return _tree(rng, length)
    if kind == "modality":
        cuts = sorted(rng.sample(range(length + 1), min(length + 1, 2 * rng.randrange(4))))
        spans = [list(span) for span in zip(cuts[::2], cuts[1::2], strict=False)]
        return ["modality", spans, rng.random() < 0.5]
    cuts = sorted(rng.choices(range(length + 1), k=rng.randrange(1, 5)))
    sizes = [b - a for a, b in pairwise([*cuts, length])]
    return ["shared-question", sizes, cuts[0]]


def _slices(rng: random.Random, length: int) -> list[list[int | None]]:
    """Draw disjoint slices: cells of a random grid, some empty, each with its own band."""
    rows = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.randrange(4)))})
    keys = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.randrange(4)))})
    found: list[list[int | None]] = []
    for q0, q1 in pairwise(rows):
        for k0, k1 in pairwise(keys):
            if rng.random() < 0.3:
                continue
            lo, hi = sorted(rng.randrange(-length - 2, length + 3) for _ in range(2))
            if rng.random() < 0.15:
                lo, hi = rng.choice(((-sys.maxsize, hi), (lo, sys.maxsize), (-(1 << 62), 1 << 62), (lo, lo)))
            found.append([q0, q1, k0, k1, rng.choice((lo, lo, None)), rng.choice((hi, hi, None))])
    return found


def _key_ranges(rng: random.Random, length: int) -> list[list[list[int]]]:
    """Draw up to three ranges of keys for each query, which may overlap; neighbouring queries often have the same."""
    found: list[list[list[int]]] = []
    for _ in range(length):
        if found and rng.random() < 0.6:
            found.append(found[-1])
            continue
        ends = [sorted(rng.randrange(length + 1) for _ in range(2)) for _ in range(rng.randrange(4))]
        found.append(ends)
    return found


def _tree(rng: random.Random, length: int) -> Words:
    """Draw segments in depth-first order: a segment's parent is the previous segment, one of its ancestors, or none."""
    cuts = sorted(rng.choices(range(length + 1), k=rng.randrange(7)))
    lengths = [b - a for a, b in pairwise([0, *cuts, length])]
    parents, way = [-1], [0]
    for segment in range(1, len(lengths)):
        keep = rng.randrange(len(way) + 1) if rng.random() < 0.9 else 0
        way = way[:keep]
        parents.append(way[-1] if way else -1)
        way = [*way, segment]
    words: Words = ["tree", parents, lengths]
    if rng.random() < 0.3:
        words += [None, rng.choice((0, 1, 3, rng.randrange(length + 1), sys.maxsize))]
    return words
