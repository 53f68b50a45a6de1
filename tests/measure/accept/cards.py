"""Cards (host, device and versions of a rank) of made-up ranks, for tests of ``flexcp accept``."""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.measure.accept.rank_cards import RankCard


def made_cards(hosts: Sequence[str], **fields: str) -> list[RankCard]:
    """Return the card of one rank on each of these hosts; the cards differ in rank, host and process alone."""
    usual = {"device": "cpu", "gpu": "", "gpu_id": "", "flexcp": "1.0", "source": "abc", "python": "3.11.7"}
    usual |= {"torch": "2.13.0", "nccl": ""} | fields
    return [RankCard(rank=rank, host=host, process=100 + rank, **usual) for rank, host in enumerate(hosts)]
