"""Checks rounds for the tests of rounds and of whole plans, by counts from the transfers."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from flexcp.clusters import Cluster
from flexcp.plan.program import Program
from flexcp.plan.rounds import Rounds
from flexcp.shape import Shape


def judge(rounds: Rounds, program: Program, shape: Shape, machine: Cluster) -> None:
    """Check all invariants of rounds, from the transfers alone."""
    messages: Counter[tuple[int, int, int, int]] = Counter()
    t, size = program.transfers, program.transfers.bytes(shape).tolist()
    for stage, source, target, n in zip(t.stage.tolist(), t.source.tolist(), t.target.tolist(), size, strict=True):
        if source != target and n:
            across = machine.node_of(source) != machine.node_of(target)
            messages[stage, int(across), source, target] += n
    ex = rounds.exchanges
    levels = list(zip(ex.stage.tolist(), ex.across.tolist(), strict=True))
    assert levels == sorted({m[:2] for m in messages})
    parts: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    sending: Counter[tuple[int, int]] = Counter()
    receiving: Counter[tuple[int, int]] = Counter()
    busy: set[tuple[Any, ...]] = set()
    largest: Counter[tuple[int, int]] = Counter()
    for e, number, source, target, start, stop in rounds.chunks.matrix().T.tolist():
        assert 0 <= start < stop and stop - start <= ex.chunk_bytes[e]
        parts[*levels[e], source, target].append((start, stop))
        assert ("send", e, number, source) not in busy, "a rank sends to two peers in a round"
        assert ("receive", e, number, target) not in busy, "a rank receives from two peers in a round"
        busy |= {("send", e, number, source), ("receive", e, number, target)}
        sending[e, source] += 1
        receiving[e, target] += 1
        largest[e, number] = max(largest[e, number], stop - start)
    assert parts.keys() == messages.keys()
    for message, cuts in parts.items():
        edges = [0] + [edge for cut in sorted(cuts) for edge in cut] + [messages[message]]
        assert edges[::2] == edges[1::2], f"bytes of message {message} are missing or twice in {sorted(cuts)}"
    for e in range(len(ex)):
        degree = max(n for count in (sending, receiving) for (at, _), n in count.items() if at == e)
        assert ex.rounds[e] == degree and {number for at, number in largest if at == e} == set(range(degree))
        ports: Counter[tuple[int, int]] = Counter()
        for (*level, source, target), n in messages.items():
            if tuple(level) == levels[e]:
                ports[0, source] += n
                ports[1, target] += n
        sizes = [largest[e, number] for number in range(degree)]
        assert sizes == sorted(sizes, reverse=True)
        assert (ex.port[e], ex.spent[e]) == (max(ports.values()), sum(sizes))
        assert ex.efficiency[e] >= 1
