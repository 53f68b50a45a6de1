"""Proves the factor by which a rank's share of the loss is multiplied, and that the check whether DDP or FSDP2 averages
gradients does not need a particular release of torch.
"""

from __future__ import annotations

import sys

import pytest
from torch.nn.parallel import DistributedDataParallel

from flexcp.executor.losses.averaging import (
    reduction_of,
    running_average,
    running_fsdp_modules,
    share_factor,
    wrong_factor,
)


def test_shares_are_multiplied_where_gradients_are_averaged() -> None:
    assert share_factor("summed", 8) == 1
    assert share_factor("averaged", 8) == 8
    with pytest.raises(ValueError, match="'mean' is neither 'summed' nor 'averaged'"):
        share_factor("mean", 8)  # type: ignore[arg-type]


def test_the_message_says_how_much_is_missing() -> None:
    assert "gradients would be 1/4 of the batch's: say gradients='averaged'" in wrong_factor("DDP", "summed", 4)
    assert "gradients would be 4 times the batch's: say gradients='summed'" in wrong_factor("FSDP2", "averaged", 4)


def test_a_torch_that_does_not_say_which_module_runs_loses_only_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert running_average(None) is None
    monkeypatch.delattr(DistributedDataParallel, "_get_active_ddp_module")
    assert running_average(None) is None
    monkeypatch.delitem(sys.modules, "torch.distributed._composable_state", raising=False)
    assert running_fsdp_modules() == []
    assert reduction_of([lambda: None], None) == (None, None)
