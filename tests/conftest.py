"""Shared fixtures: one pool of real ranks for the whole test session, because starting processes is what takes time.

Random examples are the same in every run, so that a green checkout stays green; ``make properties`` looks for new ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings

from flexcp.measure.ranks import RankPool

settings.register_profile("same", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("same")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks on gloo; ``pool.run(function, ..., ranks=n)`` runs on the first n."""
    with RankPool(8) as ranks:
        # Groups of all sizes are made now. Made later, one hung once: torch names groups by how many a rank has made, and tests make
        # groups of their own on some ranks. Which tests ran before must not matter.
        for count in range(1, ranks.size):
            ranks.run(dist.get_world_size, ranks=count)
        yield ranks
