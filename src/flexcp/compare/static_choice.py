"""The choice of one static method and degree for all batches of a run, as a user would configure it.

The best static method *of a batch* differs from batch to batch, but a training run can use only one. It is chosen once:
documents are cut into batches in the order they come, and some batches spread over the data are taken. Every static
method gets the one degree that is best for these batches (by the closed form, and by simulation among degrees that are
nearly as good), and is simulated on each. The method with the least total time is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexcp.batch import MaskLike, checked_lengths, make_batch
from flexcp.compare.compare import STATIC, STATIC_BY_LOAD, compare_batches
from flexcp.data.lengths import batch_tokens, cut_batches
from flexcp.io.setting_checks import check_whole
from flexcp.masks import causal
from flexcp.planner import Planner
from flexcp.planners.request import Request
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import layers_alone

BATCHES = 4
"""How many batches are simulated by default."""
DEALINGS = {"tokens": STATIC, "load": STATIC_BY_LOAD}
"""The static methods, by the way they deal documents to groups."""


@dataclass(frozen=True)
class StaticChoice:
    """The fastest static method over some batches.

    ``strategy`` is its name with its degree, ``dealing`` how documents go to its groups, ``batches`` how many were
    simulated, and ``times_ns`` the simulated total nanoseconds of all methods that could run.
    """

    strategy: str
    dealing: str
    batches: int
    times_ns: Mapping[str, int]

    @property
    def words(self) -> str:
        """Description of the chosen method as a baseline of speed-ups."""
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
    """Choose the best single static method and degree for a run, as a baseline for its speed-ups.

    ``lengths`` are the document lengths of a data set in order. They are cut into batches that leave ranks some room,
    and ``batches`` of them, spread over the data, are simulated: all layers forward and backward, or the step that
    ``training=`` describes. A last batch that is less than half full is left out. ``dealing`` is how documents go to
    the groups of a method: by ``"tokens"`` as in Megatron-Core, DeepSpeed and torchtitan, or by ``"load"`` as in
    WLB-LLM. ``planner`` are arguments of :class:`flexcp.Planner`: ``heads``, ``kv_heads``, ``head_dim``, ``cluster``,
    ``model``, and so on. Raise ValueError if a document is longer than all ranks together keep, or no static method
    fits.

    >>> from flexcp.clusters import cluster
    >>> choose_static([4096] * 64, max_tokens_per_rank=8192, heads=8, kv_heads=2, cluster=cluster("h100:1x4")).strategy
    'dp'
    """
    if "strategy" in planner:
        raise ValueError(f"choose_static chooses the strategy; drop strategy={planner['strategy']!r}")
    check_whole("batches", batches, "how many batches to look at, at least 1", 1)
    check_whole("max_tokens_per_rank", max_tokens_per_rank, "how many tokens a rank keeps at most, at least 1", 1)
    lengths = checked_lengths(lengths).tolist()
    asked = Planner(**planner, max_tokens_per_rank=max_tokens_per_rank)
    ranks = asked.cluster.ranks
    if max(lengths) > max_tokens_per_rank * ranks:
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
    rules: Rules = Rules(),
) -> StaticChoice:
    """Return the static method, with one degree, that has the least simulated time over all requests.

    ``dealing`` is how documents go to its groups, ``"tokens"`` or ``"load"``. Raise ValueError if no static method
    accepts all requests.
    """
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
    """Return the name with the least time, or an earlier one that takes no more than a thousandth longer."""
    best = next(iter(times_ns))
    for name, ns in times_ns.items():
        if ns * 1000 < times_ns[best] * 999:
            best = name
    return best


def spread_over(passes: list[list[int]], number: int) -> list[list[int]]:
    """Return at most ``number`` of the passes (lists of documents), evenly spread over all."""
    take = min(number, len(passes))
    return [passes[i * len(passes) // take] for i in range(take)]
