"""Functions that run on ranks in the test of elastic restarts; light to import (see parallel_runs.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from example_runs import loaded
from loss_warning import refusing_the_loss_warning


def trained(group: dist.ProcessGroup, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Run the steps of the example on these ranks, from the newest checkpoint in ``folder`` if there is one."""
    with refusing_the_loss_warning():
        return [step._asdict() for step in loaded("elastic_restart").train(group, folder, steps)]


def first_logits(group: dist.ProcessGroup, weights: str) -> torch.Tensor:
    """Return logits of the example's sharded model with the weights of a Hugging Face checkpoint."""
    import flexcp
    from flexcp.frameworks import huggingface

    run = loaded("elastic_restart").made(group, weights)
    planner = huggingface.planner(
        run.model.config, flexcp.cluster("cpu", 1, group.size()), "float32", strategy="blocks"
    )
    step = flexcp.bind(planner([len(stream())], masks=huggingface.masks(run.model.config)), group)
    with torch.no_grad():
        local = run.model(**huggingface.inputs(stream(), step)).logits[0][: step.local_tokens]
    return step.gather(local)


def stream() -> torch.Tensor:
    return torch.randint(256, (40,), generator=torch.Generator().manual_seed(0))
