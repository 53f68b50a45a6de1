"""Trust ranks: a function on ranks of either kind, NCCL ranks that share one GPU or gloo ranks on the CPU, and what the
parts of ``benchmarks/trust_gpu.py`` are told.
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


@dataclass(frozen=True)
class Setting:
    """The device, until when a part may begin something new (``time.monotonic``), and whether sizes are a sample's."""

    device: str
    until: float
    small: bool
    seed: int = 0

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self.until - time.monotonic()

    @property
    def dtype(self) -> str:
        """bfloat16 on a GPU; CPU kernels are slow in it."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def cluster(self, ranks: int) -> Cluster:
        """One node of so many."""
        return cluster("h200" if self.device == "cuda" else "cpu", 1, ranks)


def on_ranks(
    setting: Setting, ranks: int, function: Callable[..., Any], *arguments: Any, patience: float | None = None
) -> list[Any]:
    """``function(group, *arguments)`` on so many ranks; their answers. Nobody waits longer than ``patience``, or the
    part's time.
    """
    limit = max(5.0, min(patience or setting.left, setting.left))
    if setting.device == "cuda":
        from lib.nccl_ranks import on_nccl_ranks

        return on_nccl_ranks(ranks, _with_the_group, function, arguments, patience=limit)
    with RankPool(ranks, timeout=limit) as pool:
        return pool.run(function, *arguments)


def attempted(setting: Setting, what: str, ranks: int, run: Callable[[], Row], least: float = 15.0) -> Row:
    """The row of one case. One that fails, or for which less than ``least`` seconds are left, is a row too."""
    begin = {"what": what, "ranks": ranks}
    if setting.left < least:
        return begin | {"ok": False, "why": f"not run: {setting.left:.0f} s were left"}
    try:
        return begin | run()
    except Exception as error:  # whatever it is, the other cases are worth running
        return begin | {"ok": False, "why": f"{type(error).__name__}: {error}"[-800:]}
    finally:
        if setting.device == "cuda":
            torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Wait for the device, if it is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def _with_the_group(groups: dict[int, Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(groups[max(groups)], *arguments)
