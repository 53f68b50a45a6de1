"""Loader agreement: all ranks of a group made the same loader and stand at the same place of it, or all of them raise.

A loader deals the samples of one dataset to the ranks itself, so it wants the whole dataset on every rank, in the same
order. What a loop for data parallelism does instead (a seed for each rank, a shard of the data for each, a
``DistributedSampler``) would leave samples out and give others twice without an error: each rank reads its share of an
order that it alone has. So ranks tell each other, once an iteration, what decides about the order and the batches.
Shards of equal size look the same here, as nothing is read for the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DistributedSampler

from flexcp.data.row_sharing import Peers


def check_same(mine: Mapping[str, Any], peers: Peers) -> None:
    """Raise ValueError on every rank where what the ranks say by name is not the same."""
    told = peers.all_gather(dict(mine))
    for name in mine:
        for rank, theirs in enumerate(told):
            if theirs[name] != told[0][name]:
                raise ValueError(
                    f"{name} is {told[0][name]!r} on rank 0 of this loader's group and {theirs[name]!r} on rank "
                    f"{rank}: the loader deals samples to ranks itself, so give every rank the whole dataset, the same "
                    "arguments and the same state"
                )


def sampler_share(dataset: Any) -> tuple[int, int] | None:
    """(rank, ranks) that a torch DataLoader's DistributedSampler reads the share of, if it has one."""
    for sampler in (
        getattr(dataset, "sampler", None),
        getattr(getattr(dataset, "batch_sampler", None), "sampler", None),
    ):
        if isinstance(sampler, DistributedSampler):
            return sampler.rank, sampler.num_replicas
    return None
