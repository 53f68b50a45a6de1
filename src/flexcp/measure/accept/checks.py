"""Checks of a cluster: a name, what was found, and a line for each failure with the value and the way out.

This file has the checks that need only the ranks' cards: whether all ranks run the same versions, and whether the
cluster's nodes are the hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flexcp.clusters import Cluster
from flexcp.executor.exchange.hosts import shared_host, split_node
from flexcp.measure.accept.rank_cards import RankCard, rank_words

VERSIONS = ("flexcp", "source", "python", "torch", "nccl", "device")
"""Fields of a rank's card that must be the same on all ranks."""


@dataclass(frozen=True)
class Check:
    """The result of one check: ``value`` is what was found in a few words, ``failures`` has one line for each failure.

    ``missing`` is the reason if the check could not run.
    """

    name: str
    value: str
    failures: tuple[str, ...] = ()
    missing: str = ""

    @property
    def passed(self) -> bool:
        return not self.failures and not self.missing

    @property
    def verdict(self) -> str:
        return "not run" if self.missing else "passed" if self.passed else "FAILED"


def versions_check(cards: Sequence[RankCard]) -> Check:
    """Check whether all ranks run the same versions, and the same code of flexcp."""
    failures = []
    for field in VERSIONS:
        values = [str(getattr(card, field)) for card in cards]
        (usual, _), *others = Counter(values).most_common()
        for value, _ in others:
            odd = [card for card in cards if getattr(card, field) == value]
            if field == "source" and any(card.flexcp != _usual(cards, "flexcp") for card in odd):
                continue  # the other version has been reported already
            failures.append(f"{_who(odd)} {_difference(field, value, usual, len(odd) > 1)}")
    first = cards[0]
    words = f"flexcp {first.flexcp}, torch {first.torch}, Python {first.python}"
    words += f", NCCL {first.nccl}" if first.nccl else ""
    return Check("versions", words if not failures else "ranks differ", tuple(failures))


def hosts_check(cards: Sequence[RankCard], cluster: Cluster, rehearsal: bool) -> Check:
    """Check whether the cluster's nodes are the hosts, and every rank has its own GPU.

    In a ``rehearsal`` nodes may share a host, and ranks a GPU.
    """
    hosts = [card.host for card in cards]
    found = [split_node(cluster, hosts)]
    if not rehearsal:
        shared = shared_host(cluster, hosts)
        found.append(shared and f"{shared}; or rehearse several nodes on one machine with --rehearsal")
        found.append(_shared_gpu(cards))
    names = list(dict.fromkeys(hosts))
    words = f"{len(names)} hosts" if len(names) > 1 else f"one host, {names[0]}"
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.ranks_per_node}"
    return Check("hosts", f"{words}, for {nodes}", tuple(line for line in found if line))


def _shared_gpu(cards: Sequence[RankCard]) -> str | None:
    """Return a line about the first two ranks that share a GPU, or None."""
    first: dict[tuple[str, str], RankCard] = {}
    for card in cards:
        if card.device != "cuda":
            continue
        other = first.setdefault((card.host, card.gpu_id), card)
        if other is not card:
            return (
                f"ranks {other.rank} and {card.rank} share a GPU of host {card.host} ({card.gpu}); start no more ranks "
                "on a host than it has GPUs (--nproc-per-node), or rehearse with --rehearsal"
            )
    return None


def _usual(cards: Sequence[RankCard], field: str) -> str:
    return str(Counter(str(getattr(card, field)) for card in cards).most_common(1)[0][0])


def _who(cards: Sequence[RankCard]) -> str:
    if len(cards) == 1:
        return cards[0].name
    hosts = list(dict.fromkeys(card.host for card in cards))
    return f"{rank_words([card.rank for card in cards])} on host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}"


def _difference(field: str, value: str, usual: str, several: bool) -> str:
    """Return the end of a failure: which version or device these ranks have, which the others, and what to do."""
    run, compute = ("run", "compute") if several else ("runs", "computes")
    if field == "source":
        return f"{run} other code of the same flexcp version ({value}, others {usual}); install the same on every host"
    if field == "device":
        way = "run on hosts of one kind, and look at nvidia-smi where a GPU is not seen"
        return f"{compute} on {value}, others on {usual}; {way}"
    name = {"python": "Python", "nccl": "NCCL"}.get(field, field)
    return f"{run} {name} {value or 'of no version'}, others {usual or 'of no version'}; install the same on every host"
