"""Advice on trees: what they save in tokens, attention and simulated time.

They are compared with the same sequences as separate documents. Both forms are dealt into passes of the same size and
planned by ``auto``. Some passes of each are simulated, and their time is scaled by tokens to all of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from flexcp.batch import make_batch
from flexcp.compare.advice import MOST_PASSES, Answer, Question, answers_of, deal, fastest, request_of
from flexcp.compare.epoch_memory import epoch_memory
from flexcp.compare.static_choice import spread_over
from flexcp.io.json_files import json_line
from flexcp.io.sizes import size
from flexcp.masks import Mask, area, causal, tree, tree_under, window_of, windowed
from flexcp.planners.request import Request


@dataclass(frozen=True)
class Side:
    """The data in one form, as trees or as separate sequences.

    ``pairs`` are the (query, key) pairs of a causal layer, of one head; ``passes`` is how many passes the data makes,
    and ``total_ns`` their simulated time; ``strategy`` names what ``auto`` chose; ``max_rank_memory_bytes`` is what
    attention needs on the worst rank in any of the passes that were planned for it
    (:mod:`flexcp.compare.epoch_memory`).
    """

    documents: int
    tokens: int
    pairs: int
    passes: int
    total_ns: int
    strategy: str
    max_rank_memory_bytes: int


@dataclass(frozen=True)
class TreeAdvice:
    """The data as trees and as separate sequences, side by side."""

    trees: Side
    separate: Side

    @property
    def saved(self) -> int:
        """Number of tokens that trees save."""
        return self.separate.tokens - self.trees.tokens

    @property
    def gain(self) -> float:
        """How many times as fast as separate sequences the trees are, simulated."""
        return self.separate.total_ns / self.trees.total_ns

    def words(self) -> list[str]:
        """Return the advice as sentences for a terminal."""
        a, b = self.trees, self.separate
        return [
            f"{a.documents:,} trees hold {b.documents:,} sequences: {a.tokens:,} tokens in the place of {b.tokens:,}, "
            f"{100 * self.saved / b.tokens:.0f} % saved, and {100 * (1 - a.pairs / b.pairs):.0f} % of the attention.",
            f"Simulated, with auto on both sides: {a.total_ns / 1e6:,.1f} ms in {a.passes} passes as trees "
            f"({a.strategy}), {b.total_ns / 1e6:,.1f} ms in {b.passes} as documents of their own ({b.strategy}): "
            f"{self.gain:.2f} times the speed.",
            f"Attention needs at most {size(a.max_rank_memory_bytes)} on a rank as trees, "
            f"{size(b.max_rank_memory_bytes)} as documents of their own: one arena, and what all layers keep for their "
            "backward without recomputation.",
        ]


def read_trees(path: Path) -> list[Mask] | None:
    """Read trees from a file of JSON lines with ``parents``, ``lengths`` and optionally ``ends``.

    The three are arguments of :func:`flexcp.tree`. Return None if the file is not of that kind, judged by its suffix
    and first line. Raise ValueError for a line that is no tree.
    """
    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.is_file():
        return None
    lines = path.read_bytes().decode("utf-8-sig", errors="replace").splitlines()
    records = [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not records or not all(f'"{name}"' in records[0][1] for name in ("parents", "lengths")):
        return None
    found = []
    for place, line in records:
        record = json_line(line, place, checked=True)
        if not isinstance(record, dict) or not {"parents", "lengths"} <= record.keys():
            raise ValueError(f"{place} is no tree: it holds {line[:60]}, not 'parents' and 'lengths'")
        try:
            found.append(tree(record["parents"], record["lengths"], record.get("ends")))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return found


def advise_trees(question: Question, trees: Sequence[Mask], tell: Callable[[str], None] = lambda _: None) -> TreeAdvice:
    """Simulate the trees and the same sequences as separate documents; ``tell`` receives progress messages.

    Raise ValueError if no strategy fits one of the two.
    """
    sequences = []
    for mask in trees:
        found = tree_under(mask, mask.length or 0)
        assert found is not None
        sequences += [int(n) for n in found.sequence_lengths if n]
    return TreeAdvice(_side(question, list(trees), tell), _side(question, sequences, tell))


def _side(question: Question, documents: Sequence[Mask | int], tell: Callable[[str], None]) -> Side:
    """Simulate one form of the data; ``documents`` are trees, or lengths of plain documents."""
    lengths = [d if isinstance(d, int) else int(d.length or 0) for d in documents]
    rules = [causal() if isinstance(d, int) else d for d in documents]
    cut = deal(lengths, question)
    first = np.cumsum([0, *map(len, cut)]).tolist()
    passes = [list(range(a, b)) for a, b in pairwise(first)]
    looked_at = spread_over(passes, MOST_PASSES)

    def request(members: list[int]) -> Request:
        chosen = [rules[d] for d in members]
        masks = {name: (_in_layer(chosen, mask), layers) for name, (mask, layers) in question.masks.items()}
        return request_of(question, make_batch([lengths[d] for d in members], masks=masks))

    answer: Answer | None = fastest(answers_of(question, [request(members) for members in looked_at], ("auto",), tell))
    if answer is None:
        raise ValueError(
            f"no strategy fits these documents on {question.cluster}; raise --max-tokens-per-rank or use more ranks"
        )
    pairs = sum(int(area(rule.slices(n)).sum()) for rule, n in zip(rules, lengths, strict=True))
    total = answer.total_ns * sum(lengths) // sum(lengths[d] for members in looked_at for d in members)
    names = ", ".join(dict.fromkeys(plan.strategy for plan in answer.plans))
    longest = [max(lengths[d] for d in members) for members in passes]
    memory = epoch_memory("auto", "auto", longest, lambda number: request(passes[number]), tell)
    return Side(len(documents), sum(lengths), pairs, len(cut), total, names, memory.bytes)


def _in_layer(rules: Sequence[Mask], layer: Mask) -> list[Mask]:
    """Return the documents' masks in a layer whose own mask is causal or a window; raise ValueError for another.

    Trees are restricted to the layer's window.
    """
    left = window_of(layer)
    if left is None and layer != causal():
        raise ValueError(f"trees have causal masks and windows, and the mask {layer} is neither; leave --mask out")
    return [rule if left is None else layer if rule == causal() else windowed(rule, left) for rule in rules]
