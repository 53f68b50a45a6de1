"""Trust, ranks: what all parts of ``benchmarks/trust_gpu.py`` share.

A part is given a :class:`Setting`. It runs functions on ranks, which are NCCL ranks that share one GPU or gloo ranks on
the CPU, and makes a row of each case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexcp.clusters import Cluster, cluster
from flexcp.measure.ranks import RankPool

Row = dict[str, Any]
"""One row of a part's table, by column."""


@dataclass(frozen=True)
class Setting:
    """What a part is told: the device, until when (``time.monotonic``) it may begin something new, and whether to use
    small sizes.
    """

    device: str
    until: float
    small: bool
    seed: int = 0

    @property
    def left(self) -> float:
        """The seconds that are left for this part."""
        return self.until - time.monotonic()

    @property
    def dtype(self) -> str:
        """The dtype to use: bfloat16 on a GPU, and float32 on a CPU, whose kernels are slow in bfloat16."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def cluster(self, ranks: int) -> Cluster:
        """Return a cluster of one node with this many ranks."""
        return cluster("h200" if self.device == "cuda" else "cpu", 1, ranks)


def on_ranks(
    setting: Setting, ranks: int, function: Callable[..., Any], *arguments: Any, patience: float | None = None
) -> list[Any]:
    """Run ``function(group, *arguments)`` on this many ranks and return their answers.

    Ranks wait at most ``patience`` seconds, and at most for the time that the part has left.
    """
    limit = max(5.0, min(patience or setting.left, setting.left))
    if setting.device == "cuda":
        from lib.nccl_ranks import on_nccl_ranks

        return on_nccl_ranks(ranks, _with_the_group, function, arguments, patience=limit)
    with RankPool(ranks, timeout=limit) as pool:
        return pool.run(function, *arguments)


def attempted(setting: Setting, what: str, ranks: int, run: Callable[[], Row], least: float = 15.0) -> Row:
    """Return the row of one case; a case that fails, or that has less than ``least`` seconds left, is a row as well."""
    begin = {"what": what, "ranks": ranks}
    if setting.left < least:
        return begin | {"ok": False, "why": f"not run: {setting.left:.0f} s were left"}
    try:
        return begin | run()
    except Exception as error:  # any failure: the other cases should still run
        return begin | {"ok": False, "why": f"{type(error).__name__}: {error}"[-800:]}
    finally:
        if setting.device == "cuda":
            torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Wait for the GPU, if the device is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def _with_the_group(groups: dict[int, Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a function with the group of all ranks."""
    return function(groups[max(groups)], *arguments)
