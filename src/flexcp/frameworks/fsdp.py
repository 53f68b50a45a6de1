"""FSDP2: what flexcp's loss wants from it.

Ranks that share a batch hold shares of one loss (local sum / valid tokens of all ranks), so gradients are summed over
them, where FSDP2 would average. The usual set-up shards parameters over all ranks, context parallel or not:

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.sum_gradients(model)

Without the last line give ``step.loss`` or ``huggingface.inputs`` ``gradients="averaged"``, which comes to the same.

With micro-batches give ``step.loss`` of each its share of the whole batch's tokens, and every rank the same number of
forwards and backwards.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from flexcp.executor.losses.averaging import fsdp_reduction
from flexcp.executor.step import Step


def sum_gradients(model: nn.Module) -> None:
    """Let every FSDP2 module of ``model`` sum gradients over ranks instead of averaging them.

    Call it once, after ``fully_shard`` and before the first forward: a loss takes it into account, and a backward of a
    loss that was taken before raises. A loss is then taken by ``step.loss`` or ``step.share``: a mean over this rank's
    rows alone would give gradients as many times too large as there are ranks, and nothing can see it.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not found:
        raise ValueError(f"no module of {type(model).__name__} is sharded: call fully_shard first, then sum_gradients")
    for module in found:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo knows no other, NCCL copies less


def note_reduction(model: nn.Module, step: Step) -> None:
    """Let ``step`` know when ``model`` is sharded over ranks that share its batch,
    and whether it averages or sums their gradients.
    """
    if step.group is None or not isinstance(model, FSDPModule):
        return
    # Private, so a release without it only loses the check.
    averaged, summed = fsdp_reduction(getattr(model._get_fsdp_state(), "_fsdp_param_groups", ()), step.group)
    seen = step.losses
    seen.averaged_by, seen.summed_by = averaged or seen.averaged_by, summed or seen.summed_by
