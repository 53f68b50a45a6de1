"""Speeds of the links that a plan may use, inside nodes and across them, and whether they are fast enough.

Ranks exchange messages in pairs, all pairs of a level at the same time and both ways, as a plan's transfers do, so
shared links are measured while they are shared. Inside a node every rank meets every other rank, in rounds like those
of a tournament. Across nodes a rank meets the ranks with its own place in other nodes. At most :data:`MOST_ROUNDS`
rounds are run, enough for every rank to take part. Messages grow until one takes :data:`LONG_NS`, but at least
:data:`ALWAYS` sizes are measured. The time of a pair is that of its slower end in the fastest repeat.

The usual speed of a level is the median over ranks of each rank's fastest link. (A median over links would be wrong:
with few hosts, one slow host makes most links slow.) A link is too slow below half of the usual speed, or below half of
the cluster's stated speed for its level. In a rehearsal only the first rule counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from flexcp.clusters import Cluster
from flexcp.measure.accept.checks import Check
from flexcp.measure.accept.rank_cards import MOST_NAMED, RankCard, rank_words
from flexcp.measure.calibrate.links import LinkTimes, exchange_samples

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""The message sizes in bytes that are measured, from the smallest on."""
ALWAYS = 4
"""The number of sizes that are measured however long they take.

With fewer, no slope could be fitted with one held out.
"""
LONG_NS = 1e8
"""Larger messages are not measured once one takes this many nanoseconds."""
MOST_ROUNDS = 8
REPEATS = 5
LEAST_SHARE = 0.5
"""The least share of its level's usual speed, or of the cluster's stated speed, that a link must reach."""


@dataclass(frozen=True)
class PairLink:
    """Two ranks that exchanged messages, and the nanoseconds for each message size of ``SIZES``, as far as measured.

    ``across`` says that they are on different nodes.
    """

    a: int
    b: int
    across: bool
    ns: tuple[float, ...]

    @property
    def mbps(self) -> float:
        """Megabytes a second each way, from the largest and the smallest message.

        It is the difference of their sizes over the difference of their times.
        """
        more = max(1.0, self.ns[-1] - self.ns[0])
        return 1000 * (SIZES[len(self.ns) - 1] - SIZES[0]) / more

    @property
    def latency_ns(self) -> float:
        """The nanoseconds of the smallest message beyond the time of its bytes."""
        return max(0.0, self.ns[0] - 1000 * SIZES[0] / self.mbps)


def level_words(across: bool) -> str:
    """Return the name of a level: inside or across nodes."""
    return "across nodes" if across else "inside nodes"


def measure_level(group: dist.ProcessGroup, cluster: Cluster, across: bool, device: str) -> list[PairLink]:
    """Measure the links of a level, inside or across nodes; collective, with the same result on all ranks.

    The result is empty if the cluster has no such links.
    """
    rank, found = dist.get_rank(group), []
    for pairs in _pairings(cluster, across):
        partner = next((b if rank == a else a for a, b in pairs if rank in (a, b)), None)
        times: list[list[float]] = []
        for number, size in enumerate(SIZES):
            peers = [] if partner is None else [(partner, partner)]
            mine = exchange_samples(group, peers, size, device, REPEATS)
            everyone: list[Any] = [None] * cluster.ranks
            dist.all_gather_object(everyone, mine, group=group)
            times.append([min(map(max, everyone[a], everyone[b])) for a, b in pairs])
            if number + 1 >= ALWAYS and max(times[-1]) >= LONG_NS:
                break
        found += [PairLink(a, b, across, ns) for (a, b), ns in zip(pairs, zip(*times, strict=True), strict=True)]
    return found


def link_times_of(group: dist.ProcessGroup, links: Sequence[PairLink], device: str) -> LinkTimes:
    """Return the links in the form that calibration takes, with the cost of one more message; collective.

    The times of each size are medians over the links. The cost of one more message comes from sending the smallest
    message to several ranks at once.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    distances = range(1, min(ranks, MOST_ROUNDS + 1))
    peers = [((rank + d) % ranks, (rank - d) % ranks) for d in distances]
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, exchange_samples(group, peers, SIZES[0], device, REPEATS), group=group)
    sizes = min(len(link.ns) for link in links)
    ns = tuple(statistics.median(link.ns[i] for link in links) for i in range(sizes))
    return LinkTimes(SIZES[:sizes], ns, len(peers), min(map(max, zip(*everyone, strict=True))))


def _pairings(cluster: Cluster, across: bool) -> Iterator[list[tuple[int, int]]]:
    """Yield for each round the pairs of ranks that exchange at the same time."""
    each = cluster.ranks_per_node
    if across:
        for pairs in tournament(cluster.nodes):
            yield [(a * each + place, b * each + place) for a, b in pairs for place in range(each)]
    else:
        for pairs in tournament(each):
            yield [(node * each + a, node * each + b) for node in range(cluster.nodes) for a, b in pairs]


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which every player meets one other, at most MOST_ROUNDS of them.

    With an odd number of players one pauses in each round.
    """
    size = players + players % 2
    rounds = []
    for turn in range(min(size - 1, MOST_ROUNDS)):
        # The circle method: the last player keeps its place, and the others rotate around it.
        pairs = [(turn, size - 1)] + [((turn - i) % (size - 1), (turn + i) % (size - 1)) for i in range(1, size // 2)]
        rounds.append(sorted((min(p), max(p)) for p in pairs if max(p) < players))
    return [pairs for pairs in rounds if pairs]


def usual_mbps(level: Sequence[PairLink]) -> float:
    """Return the speed of a level's undisturbed links in MB/s: the median over ranks of each rank's fastest link."""
    fastest: dict[int, float] = {}
    for link in level:
        for rank in (link.a, link.b):
            fastest[rank] = max(fastest.get(rank, 0.0), link.mbps)
    return statistics.median(fastest.values())


def links_check(links: Sequence[PairLink], cluster: Cluster, cards: Sequence[RankCard], rehearsal: bool) -> Check:
    """Check whether every link reaches half of its level's usual speed and half of the cluster's stated speed.

    In a ``rehearsal`` only the usual speed counts. ``cards`` name the hosts in failures.
    """
    failures: list[str] = []
    words = []
    for across in (False, True):
        level = [link for link in links if link.across == across]
        if not level:
            continue
        usual, stated = usual_mbps(level), cluster.inter_mbps if across else cluster.intra_mbps
        words.append(f"{usual:,.0f} MB/s {level_words(across)}")
        if not rehearsal and usual < LEAST_SHARE * stated:
            failures.append(
                f"links {level_words(across)} carry {usual:,.0f} MB/s ({len(level)} pairs of ranks), less than half of "
                f"the {stated:,} of cluster {cluster}; see that the fast network is used (NCCL_DEBUG=INFO says which), "
                "or plan with what there is: --write-cost FILE keeps it for cost="
            )
            continue
        least = LEAST_SHARE * (usual if rehearsal else max(usual, stated))
        slow = [link for link in level if link.mbps < least]
        failures += _slow_lines(slow, level, usual, cluster, cards)
    return Check("links", ", ".join(words) if words else "one rank: none", tuple(failures))


def _slow_lines(
    slow: Sequence[PairLink], level: Sequence[PairLink], usual: float, cluster: Cluster, cards: Sequence[RankCard]
) -> list[str]:
    """Return a line for each rank or node with only slow links, and for each other slow pair.

    ``slow`` are the slow ones of the links ``level``, and ``usual`` is the usual speed of the level in MB/s. Of the
    other pairs at most eight are named.
    """
    lines, rest = [], list(slow)
    across = level[0].across
    places = range(cluster.nodes if across else cluster.ranks)

    def touches(link: PairLink, place: int) -> bool:
        return place in ((cluster.node_of(link.a), cluster.node_of(link.b)) if across else (link.a, link.b))

    for place in places:
        own = [link for link in level if touches(link, place)]
        if len(own) > 1 and all(link in rest for link in own):
            mbps = statistics.median(link.mbps for link in own)
            host = cards[place * cluster.ranks_per_node if across else place].host
            who = f"node {place} (host {host})" if across else f"rank {place} on host {host}"
            lines.append(
                f"all {len(own)} links of {who} {level_words(across)} are slow: {mbps:,.0f} MB/s, usual are "
                f"{usual:,.0f}; look at its "
                f"{'network card, cable and switch port' if across else 'GPU and its links (nvidia-smi nvlink -s)'}, "
                "or leave that host out"
            )
            rest = [link for link in rest if link not in own]
    for link in rest[:MOST_NAMED]:
        lines.append(
            f"the link {level_words(across)} of {cards[link.a].name} and {cards[link.b].name} carries {link.mbps:,.0f} "
            f"MB/s, usual are {usual:,.0f}; look at what lies between them"
        )
    if len(rest) > MOST_NAMED:
        others = sorted({rank for link in rest[MOST_NAMED:] for rank in (link.a, link.b)})
        lines.append(f"{len(rest) - MOST_NAMED} more links {level_words(across)} are as slow, of {rank_words(others)}")
    return lines
