"""Shared fixtures: one pool of real ranks for the whole test session, because starting processes is what takes time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexcp.measure.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks on gloo; ``pool.run(function, ..., ranks=n)`` runs on the first n."""
    with RankPool(8) as ranks:
        yield ranks
