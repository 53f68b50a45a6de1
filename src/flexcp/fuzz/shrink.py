"""Shrinking: make a failing case smaller, one simplification at a time, as long as the same check fails.

Simplifications are tried from the largest step to the smallest: fewer documents, shorter ones, one mask, a simpler
mask, fewer ranks, fewer heads, fewer options. A mask that fits only one length becomes causal when its document is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flexcp.fuzz.cases import Case, Layer, Run
from flexcp.fuzz.judge import Outcome

OF_ONE_LENGTH = ("slices", "key-ranges", "tree", "modality", "shared-question")
DEFAULTS: dict[str, Any] = {"head_dim": 8, "v_head_dim": 8, "dtype": "float64"}


def shrunk(
    case: Case, outcome: Outcome, again: Callable[[Case], Outcome], more: Callable[[], bool]
) -> tuple[Case, Outcome]:
    """Return the smallest failing case found, and its outcome.

    ``outcome`` is that of ``case``, ``again`` judges a case, and ``more`` tells whether there is time left.
    """
    found = True
    while found:
        found = False
        for simpler in simplifications(case):
            if not more():
                return case, outcome
            judged = again(simpler)
            if judged.verdict == "failed" and judged.check == outcome.check:
                case, outcome, found = simpler, judged, True
                break
    return case, outcome


def simplifications(case: Case) -> Iterator[Case]:
    """Yield smaller cases than this one, each with one simplification."""
    count = len(case.lengths)
    if count > 1:
        yield from (_documents(case, range(count // 2)), _documents(case, range(count // 2, count)))
        yield from (_documents(case, [d for d in range(count) if d != gone]) for gone in range(count))
    if len(case.layers) > 1:
        yield from (replace(case, layers=[layer]) for layer in case.layers)
    for document, length in enumerate(case.lengths):
        for shorter in sorted({1, length // 2, length - 1}):
            if 1 <= shorter < length:
                yield _cut(case, document, shorter)
    yield from _simpler_masks(case)
    yield from _fewer_ranks(case)
    for name, value in DEFAULTS.items():
        if case.attention.get(name) != value:
            yield replace(case, attention={**case.attention, name: value})
    for heads in ((1, 1), (2, 1), (2, 2)):
        if heads[0] * heads[1] < case.attention["heads"] * case.attention["kv_heads"]:
            yield replace(case, attention={**case.attention, "heads": heads[0], "kv_heads": heads[1]})
    for name in case.planner:
        if name != "strategy":
            yield replace(case, planner={k: v for k, v in case.planner.items() if k != name}, micro_batches=False)
    yield from (replace(case, call={k: v for k, v in case.call.items() if k != name}) for name in case.call)
    if case.run != Run(seed=case.run.seed):
        yield replace(case, run=Run(seed=case.run.seed))


def _documents(case: Case, keep: Any) -> Case:
    chosen = list(keep)
    layers = [replace(x, words=[x.words[d] for d in chosen]) if x.each else x for x in case.layers]
    return _free(replace(case, lengths=[case.lengths[d] for d in chosen], layers=layers))


def _cut(case: Case, document: int, length: int) -> Case:
    lengths = [length if d == document else n for d, n in enumerate(case.lengths)]
    layers = []
    for layer in case.layers:
        words = layer.words
        if layer.each and words[document][0] in OF_ONE_LENGTH:
            words = [["causal"] if d == document else w for d, w in enumerate(words)]
        layers.append(replace(layer, words=words))
    return _free(replace(case, lengths=lengths, layers=layers))


def _free(case: Case) -> Case:
    """Return the case without an index map, which would not fit a changed stream or number of ranks."""
    if isinstance(case.call.get("layout"), list):
        return replace(case, call={k: v for k, v in case.call.items() if k != "layout"})
    return case


def _simpler_masks(case: Case) -> Iterator[Case]:
    for number, layer in enumerate(case.layers):
        if layer.layers > 1:
            yield _with_layer(case, number, replace(layer, layers=1))
        if layer.each:
            yield _with_layer(case, number, replace(layer, words=["causal"], each=False))
            for document, words in enumerate(layer.words):
                if words != ["causal"]:
                    simpler = [["causal"] if d == document else w for d, w in enumerate(layer.words)]
                    yield _with_layer(case, number, replace(layer, words=simpler))
        elif layer.words != ["causal"]:
            yield _with_layer(case, number, replace(layer, words=["causal"]))


def _with_layer(case: Case, number: int, layer: Layer) -> Case:
    return replace(case, layers=[layer if n == number else x for n, x in enumerate(case.layers)])


def _fewer_ranks(case: Case) -> Iterator[Case]:
    nodes, each = case.machine["nodes"], case.machine["ranks_per_node"]
    for shape in ((1, 1), (1, 2), (1, nodes * each), (nodes, each - 1), (nodes - 1, each)):
        if min(shape) >= 1 and (shape[0] * shape[1], shape[0]) < (nodes * each, nodes):
            machine = {"name": case.machine["name"], "nodes": shape[0], "ranks_per_node": shape[1]}
            yield _free(replace(case, machine=machine))
    if "speeds" in case.machine:
        yield replace(case, machine={k: v for k, v in case.machine.items() if k != "speeds"})
