"""Cards of made-up ranks."""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.measure.accept.rank_cards import RankCard


def made_cards(hosts: Sequence[str], **fields: str) -> list[RankCard]:
    """A rank on each of these hosts, alike but for its number."""
    usual = {"device": "cpu", "gpu": "", "gpu_id": "", "flexcp": "1.0", "source": "abc", "python": "3.11.7"}
    usual |= {"torch": "2.13.0", "nccl": ""} | fields
    return [RankCard(rank=rank, host=host, process=100 + rank, **usual) for rank, host in enumerate(hosts)]
