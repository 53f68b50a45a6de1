"""Proves the messages of latent attention: rows in two dtypes share one message and come back with the right values.

Attention over latents is tested in tests/frameworks/test_mla.py; ranks that stall or make different calls in
test_failures.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flexcp.executor.latent import LatentMessages, _calls
from flexcp.executor.latent_program import Stage, _blocks


class Echo:
    """An exchange that brings back what was sent."""

    def post(self, number: int, sends: Any, receives: Any) -> None:
        assert len(sends.memory) == len(receives.memory)
        receives.memory.copy_(sends.memory)

    def arrived(self, stage: int) -> None:
        pass


def test_partial_and_final_rows_of_a_peer_are_one_message() -> None:
    final, partial = np.array([4, 0, 2]), np.array([1, 3])
    blocks = _blocks({(2, False): [final], (2, True): [partial[:1], partial[1:]], (1, False): [final]})
    form = (5, torch.bfloat16, torch.float32)  # 3 x 5 bfloat16 end at an offset that is not aligned for float32
    (call,) = _calls(Stage(blocks, blocks), *form)
    assert call.sends == call.receives == ((1, 0, 3 * 5 * 2), (2, 0, 3 * 5 * 2 + 2 * 5 * 4))
    assert _calls(Stage(), *form) == ()
    arena = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    found = list(LatentMessages(Echo(), *form).exchanged(1, Stage(blocks, blocks), arena))  # type: ignore[arg-type]
    assert [rows.tolist() for rows, _ in found] == [final.tolist(), partial.tolist(), final.tolist()]
    for (rows, values), whole in zip(found, (False, True, False), strict=True):
        assert torch.equal(values, arena[rows] if whole else arena[rows].bfloat16().float())
