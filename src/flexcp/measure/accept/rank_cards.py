"""Rank cards: a description of each rank, gathered through the store before any process group is made.

A card tells where a rank runs, on which device, and the versions of everything that plans and results depend on. No
collective is needed, so cards are available even if the ranks cannot make a group, and a rank that never starts can be
named.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from flexcp.executor.exchange.hosts import this_host
from flexcp.version import __version__

ASK_EVERY_SECONDS = 0.1
MOST_NAMED = 8


@dataclass(frozen=True)
class RankCard:
    """A rank's host, process, device and versions; ``source`` is a hash of flexcp's own code.

    ``device`` is cpu or cuda; on CPUs ``gpu``, ``gpu_id`` and ``nccl`` are empty.
    """

    rank: int
    host: str
    process: int
    device: str
    gpu: str
    gpu_id: str
    flexcp: str
    source: str
    python: str
    torch: str
    nccl: str

    @property
    def name(self) -> str:
        return f"rank {self.rank} on host {self.host}"


def own_card(rank: int, device: str) -> RankCard:
    """Return the card of this process, which computes on ``device`` (cpu or cuda)."""
    gpu, gpu_id, nccl = "", "", ""
    if device == "cuda":
        found = torch.cuda.get_device_properties()
        gpu, gpu_id = found.name, str(getattr(found, "uuid", torch.cuda.current_device()))
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return RankCard(
        rank,
        this_host(),
        os.getpid(),
        device,
        gpu,
        gpu_id,
        __version__,
        source_hash(Path(__file__).parents[2]),
        platform.python_version(),
        torch.__version__,
        nccl,
    )


def source_hash(folder: Path) -> str:
    """Return twelve hexadecimal digits that depend on every Python file below the folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def roll_call(store: Store, card: RankCard, ranks: int, seconds: float) -> list[RankCard]:
    """Publish this rank's card in the store and return the cards of all ranks, in rank order.

    Raise RuntimeError with the missing ranks after ``seconds``.
    """
    store.set(_key(card.rank), json.dumps(asdict(card)))
    deadline = time.monotonic() + seconds
    while not store.check([_key(rank) for rank in range(ranks)]):
        if time.monotonic() > deadline:
            missing = [rank for rank in range(ranks) if not store.check([_key(rank)])]
            raise RuntimeError(f"{rank_words(missing)} of {ranks} did not come within {seconds:g} s")
        time.sleep(ASK_EVERY_SECONDS)
    return [RankCard(**json.loads(store.get(_key(rank)))) for rank in range(ranks)]


def rank_words(ranks: Sequence[int]) -> str:
    """Return rank numbers in words, only the first eight if there are more: ``rank 3``, ``ranks 0, 1, 5``."""
    named = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"


def _key(rank: int) -> str:
    return f"card/{rank}"
