"""Loader agreement: check that all ranks of a group have the same loader at the same place, or raise on all ranks.

A loader distributes the samples of one dataset over the ranks itself, so every rank must have the whole dataset, in the
same order. Code written for data parallelism gives each rank its own seed, its own shard or a ``DistributedSampler``.
With a loader this would silently skip some samples and repeat others, because each rank would read its share of a
different order. So once per iteration, the ranks compare everything that decides the order and the batches. No sample
is read for this comparison, so shards of equal size are not detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DistributedSampler

from flexcp.data.reading.row_sharing import Peers


def check_same(mine: Mapping[str, Any], peers: Peers) -> None:
    """Raise ValueError on every rank unless all ranks have the same values in ``mine``; all ranks call this together.

    The keys of ``mine`` are names for the error message.
    """
    told = peers.all_gather(dict(mine), "the loader's comparison of arguments")
    for name in mine:
        for rank, theirs in enumerate(told):
            if theirs[name] != told[0][name]:
                raise ValueError(
                    f"{name} is {told[0][name]!r} on rank 0 of this loader's group and {theirs[name]!r} on rank "
                    f"{rank}: the loader deals samples to ranks itself, so give every rank the whole dataset, the same "
                    "arguments and the same state"
                )


def sampler_share(dataset: Any) -> tuple[int, int] | None:
    """Return (rank, ranks) of the DistributedSampler if ``dataset`` is a torch DataLoader with one, else None."""
    for sampler in (
        getattr(dataset, "sampler", None),
        getattr(getattr(dataset, "batch_sampler", None), "sampler", None),
    ):
        if isinstance(sampler, DistributedSampler):
            return sampler.rank, sampler.num_replicas
    return None
