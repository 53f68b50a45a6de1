"""Runs the examples of trainers: on the ranks of a pool, or their plain twins in this process; light to import (see parallel_runs.py)."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from example_runs import EXAMPLES, loaded
from loss_warning import refusing_the_loss_warning
from trainer_runs import reset_accelerate

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def logged(group: dist.ProcessGroup | None, name: str, arguments: list[str]) -> list[dict[str, Any]]:
    """The log of a trainer's example: on all ranks of this world, or alone where there is none."""
    place: dict[str, str] = {}
    if group is not None:
        rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
        place = dict(zip(PLACE, (rank, ranks, rank, "127.0.0.1", "29555"), strict=True))
    with (
        patch.dict(os.environ, place),
        patch.object(sys, "argv", [name, *arguments]),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        refusing_the_loss_warning(),
    ):
        reset_accelerate()
        found: list[dict[str, Any]] = loaded(name).main()
    return found
