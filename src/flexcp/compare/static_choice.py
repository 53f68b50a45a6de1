"""The static method that a user would configure: one method and degree for all batches of a run.

The best static method *of a batch* is another one in every batch, which no training run has. What a run can have is the
best single one, chosen once: documents are cut into batches in the order they come, some batches spread over the data
are looked at, and every static method, in the one degree that serves all of them best by the closed form, is simulated
on each. The least total wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexcp.batch import MaskLike, make_batch
from flexcp.compare.compare import STATIC, STATIC_BY_LOAD, compare_batches
from flexcp.data.lengths import batch_tokens, cut_batches
from flexcp.masks import causal
from flexcp.planner import Planner
from flexcp.planners.request import Request
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import layers_alone

BATCHES = 4
DEALINGS = {"tokens": STATIC, "load": STATIC_BY_LOAD}
"""The static methods, by how they deal documents to groups."""


@dataclass(frozen=True)
class StaticChoice:
    """``strategy`` is the fastest over the ``batches`` that were looked at,
    ``times_ns`` the simulated totals of all that could run.
    """

    strategy: str
    dealing: str
    batches: int
    times_ns: Mapping[str, int]

    @property
    def words(self) -> str:
        """What a speed-up over it is over."""
        return f"{self.strategy}, the best static method fixed for the run, documents dealt by {self.dealing}"


def choose_static(
    lengths: Sequence[int],
    *,
    max_tokens_per_rank: int,
    mask: MaskLike | None = None,
    masks: Mapping[str, tuple[MaskLike, int]] | None = None,
    dealing: str = "tokens",
    batches: int = BATCHES,
    **planner: Any,
) -> StaticChoice:
    """The best single static method and degree for a run over documents of these lengths:
    what speed-ups of a run should be over.

    ``lengths`` are those of a data set in the order they come; a batch has as many tokens as leave the ranks room, and
    ``batches`` of them, spread over the data, are simulated: all layers forward and backward, or the step of
    ``training=`` where that is given; a last batch that is less than half full is left out. ``dealing`` is how
    documents go to the groups of a method, by ``"tokens"`` as in Megatron-Core, DeepSpeed and torchtitan, or by
    ``"load"`` as in WLB-LLM. ``planner`` are arguments of :class:`flexcp.Planner`: ``heads``, ``kv_heads``,
    ``head_dim``, ``cluster``, ``model``, and so on.

    >>> from flexcp.clusters import cluster
    >>> choose_static([4096] * 64, max_tokens_per_rank=8192, heads=8, kv_heads=2, cluster=cluster("h100:1x4")).strategy
    'dp'
    """
    if "strategy" in planner:
        raise ValueError(f"choose_static chooses the strategy; drop strategy={planner['strategy']!r}")
    if not isinstance(batches, int) or batches < 1:
        raise ValueError(f"batches is how many batches to look at, at least 1; got {batches!r}")
    asked = Planner(**planner, max_tokens_per_rank=max_tokens_per_rank)
    ranks = asked.cluster.ranks
    if max(lengths, default=0) > max_tokens_per_rank * ranks:
        raise ValueError(
            f"a document of {max(lengths):,} tokens is more than {ranks} ranks keep with "
            f"max_tokens_per_rank={max_tokens_per_rank}; raise the cap, use more ranks, or cut the document"
        )
    rule = causal() if mask is None and masks is None else mask
    cut = spread_over(cut_batches(lengths, batch_tokens(max_tokens_per_rank, ranks)), batches)
    fixed = (asked.shape, asked.cluster, asked.cost)
    training = asked.training or layers_alone(asked.cost, asked.shape)
    requests = [
        Request(make_batch(one, rule, masks), *fixed, max_tokens_per_rank=max_tokens_per_rank, training=training)
        for one in cut
    ]
    return fixed_static(requests, dealing)


def fixed_static(
    requests: Sequence[Request],
    dealing: str = "tokens",
    rules: Rules = Rules(),  # noqa: B008 - immutable
) -> StaticChoice:
    """The static method, in one degree, of the least simulated time over all requests."""
    if dealing not in DEALINGS:
        raise ValueError(f"dealing is how documents go to groups, {' or '.join(map(repr, DEALINGS))}; got {dealing!r}")
    rows = compare_batches(requests, DEALINGS[dealing], rules)
    times = {name: sum(row.ns for row in found) for name, found in rows.items()}
    if not times:
        raise ValueError(
            f"no static method takes all {len(requests)} batches on {requests[0].cluster} with max_tokens_per_rank="
            f"{requests[0].max_tokens_per_rank}; raise the cap, or use more ranks"
        )
    return StaticChoice(first_of_fastest(times), dealing, len(requests), times)


def first_of_fastest(times_ns: Mapping[str, int]) -> str:
    """The name of the least time; of nearly equal ones the first."""
    best = next(iter(times_ns))
    for name, ns in times_ns.items():
        if ns * 1000 < times_ns[best] * 999:
            best = name
    return best


def spread_over(passes: list[list[int]], number: int) -> list[list[int]]:
    """Some passes, evenly spread over all."""
    take = min(number, len(passes))
    return [passes[i * len(passes) // take] for i in range(take)]
