"""Training documents: learnable phrases with lengths from a distribution or a file, or the paragraphs of a text file.

The tokens of a text are its bytes. Step ``n`` of a run has the same documents on every rank, independent of the steps
before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flexcp.data.lengths import draw_lengths, parse_lengths
from flexcp.io.sizes import count_of

BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")
"""The blank lines between two documents of a text file, and the end of the line before them."""


@dataclass(frozen=True)
class Documents:
    """The documents of a run: ``tokens`` tokens a step with ids below ``vocabulary``.

    ``source`` is the name of a distribution, ``@file`` with lengths, or a text file; ValueError is raised if it is none
    of them or holds nothing to train on. ``shrink`` divides the lengths of a distribution made for long contexts, so
    that its shape fits a small batch. The lengths of an ``@file`` are used as they are, step after step, and from the
    beginning again at its end; a document that does not fit into the rest of a step is cut, and its other part becomes
    a document of the next step. Of a text, the last document of a step is cut and its rest is left out. The tokens of a
    text are its bytes; ValueError is raised if the vocabulary lacks one of them.
    """

    source: str
    tokens: int
    vocabulary: int
    shrink: int = 16

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a step needs at least 1 token; got {self.tokens}")
        if self.source.startswith("@"):
            parse_lengths(self.source)
        elif not Path(self.source).is_file():
            draw_lengths(self.source, 1)
        elif not self.paragraphs:
            raise ValueError(f"{self.source} holds no text to train on")
        elif (largest := max(map(max, self.paragraphs))) >= self.vocabulary:
            raise ValueError(
                f"{self.source} is trained on byte by byte and holds the byte {largest}, but the model's vocabulary "
                f"has only {self.vocabulary} ids; take a model with a vocab_size of at least {largest + 1}"
            )

    @cached_property
    def paragraphs(self) -> list[bytes]:
        """The documents of a text file, separated by blank lines, which may hold spaces and end as on Windows."""
        return [part for part in BLANK_LINES.split(Path(self.source).read_bytes()) if part.strip()]

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths in an ``@file`` of document lengths."""
        return parse_lengths(self.source)

    def cut(self, steps: int) -> str | None:
        """Return a sentence on documents that are cut at the ends of steps in a run of ``steps`` steps, or None.

        For a text file it is always the same sentence, and None for a distribution, whose lengths add up to a step.
        """
        if not self.source.startswith("@"):
            if not Path(self.source).is_file():
                return None
            return f"a step ends after {self.tokens} tokens; the rest of its last document is left out"
        ends = np.cumsum(self.lengths)
        inside = np.arange(1, steps + 1) * self.tokens % ends[-1]
        cut = inside[(inside > 0) & ~np.isin(inside, ends)]
        if not len(cut):
            return None
        found = len(np.unique(np.searchsorted(ends, cut, side="right")))
        longest = max(self.lengths)
        way_out = (
            f"--tokens of at least the longest, {longest}, cuts fewer"
            if self.tokens < longest
            else f"none is longer than a step ({longest} tokens at most), and more --tokens cut a smaller share of them"
        )
        return (
            f"{len(cut)} of {count_of(steps, 'step')} {'ends' if len(cut) == 1 else 'end'} inside a document, which is "
            f"cut there, each part a document of its own ({found} of the file's {count_of(len(ends), 'document')}); "
            f"{way_out}"
        )

    def repeats(self, steps: int) -> str | None:
        """Return a sentence on how often a run of ``steps`` steps reads a file of document lengths;
        None if it reads no document twice.
        """
        if not self.source.startswith("@") or steps * self.tokens <= sum(self.lengths):
            return None
        return (
            f"{count_of(steps, 'step')} of {count_of(self.tokens, 'token')} read the file's "
            f"{count_of(len(self.lengths), 'document')} ({count_of(sum(self.lengths), 'token')}) "
            f"{steps * self.tokens / sum(self.lengths):.1f} times"
        )

    def step(self, number: int) -> list[Tensor]:
        """Return the token ids of each document of step ``number``."""
        if self.source.startswith("@"):
            taken = self._taken(number)
            return list(phrases(number, taken, self.vocabulary).split(taken))
        if Path(self.source).is_file():
            return self._text(number)
        lengths = shrunk_lengths(self.source, self.tokens, number, self.shrink)
        return list(phrases(number, lengths, self.vocabulary).split(lengths))

    def _taken(self, number: int) -> list[int]:
        """Return the lengths of the documents of step ``number``, for an ``@file`` of lengths.

        The documents of the file are laid end to end and repeated, and each step takes the next ``tokens`` tokens.
        """
        ends = np.cumsum(self.lengths)
        begin = number * self.tokens
        cuts, at = [0], begin // int(ends[-1]) * int(ends[-1])
        while at < begin + self.tokens:
            inside = ends + (at - begin)
            cuts += inside[(inside > 0) & (inside < self.tokens)].tolist()
            at += int(ends[-1])
        return [b - a for a, b in pairwise([*cuts, self.tokens])]

    def _text(self, number: int) -> list[Tensor]:
        """Return paragraphs in an order drawn for this step; the last one is cut where the batch is full."""
        order = torch.randperm(len(self.paragraphs), generator=torch.Generator().manual_seed(number)).tolist()
        found: list[Tensor] = []
        left = self.tokens
        while left:
            for at in order:
                ids = torch.tensor(list(self.paragraphs[at][:left]))
                found.append(ids)
                left -= len(ids)
                if not left:
                    break
        return found


def shrunk_lengths(name: str, tokens: int, seed: int, shrink: int) -> list[int]:
    """Draw lengths from a distribution, divide them by ``shrink``, and adjust them to add up to exactly ``tokens``.

    There are at most as many documents as tokens.
    """
    lengths = [max(1, n // shrink) for n in draw_lengths(name, tokens * shrink, seed)][:tokens]
    lengths[0] += max(0, tokens - sum(lengths))
    while sum(lengths) > tokens:
        lengths[lengths.index(max(lengths))] -= min(max(lengths) - 1, sum(lengths) - tokens)
    return lengths


def phrases(seed: int, lengths: list[int], vocabulary: int) -> Tensor:
    """Return a stream of learnable documents with these lengths, end to end.

    Each document repeats its own random phrase, with a few tokens replaced at random.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for n in lengths:
        size = int(torch.randint(3, 12, (1,), generator=generator))
        phrase = torch.randint(max(1, vocabulary // 8), (size,), generator=generator)
        text = phrase.repeat(-(-n // size))[:n]
        noise = torch.rand(n, generator=generator) < 0.02
        parts.append(torch.where(noise, torch.randint(vocabulary, (n,), generator=generator), text))
    return torch.cat(parts)
