"""FSDP2: summed gradients, as flexcp's loss needs them.

Ranks that share a batch hold shares of one loss (local sum / valid tokens of all ranks). Their gradients have to be
summed, but FSDP2 averages by default. The usual set-up shards parameters over all ranks, context parallel or not:

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.sum_gradients(model)

Without the last line, pass ``gradients="averaged"`` to ``step.loss`` or ``huggingface.inputs``, which has the same
effect.

Where several groups of ranks (replicas) train on batches of their own, steps are bound to a group, and the model is
sharded over all: ``fsdp.sum_gradients(model, replicas=2)`` sums over the ranks of a batch and averages over replicas.

With micro-batches, pass to each ``step.loss`` its share of the whole batch's tokens, and run the same number of
forwards and backwards on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from flexcp.executor.arguments import check_int
from flexcp.executor.losses.averaging import Replicas, fsdp_reduction
from flexcp.executor.step import Step


def sum_gradients(model: nn.Module, replicas: int | None = None) -> None:
    """Let every FSDP2 module of ``model`` sum gradients over ranks instead of averaging them.

    ``replicas`` is how many groups of ranks train on batches of their own, among the ranks that the model is sharded
    over. Gradients are divided by it: they are summed over the ranks of a batch, and averaged over replicas. Give 1 if
    your loss is divided by the replicas, or by the labels of all of them. By default there is one replica, and a
    backward that is summed over more ranks than those of its step gives a warning; so does a number of replicas that is
    neither 1 nor that of the step's. Raise ValueError if nothing in ``model`` is sharded, or if ``replicas`` does not
    divide the ranks.

    Call it once, after the last ``fully_shard`` and before the first forward. Losses take it into account; a loss that
    was made before with ``gradients="averaged"`` raises ValueError in its backward. Compute the loss with ``step.loss``
    or ``step.share``. A mean over this rank's rows alone would make gradients too large by the number of ranks, and
    flexcp cannot detect that.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not found:
        raise ValueError(f"no module of {type(model).__name__} is sharded: call fully_shard first, then sum_gradients")
    if replicas is not None:
        _check_replicas(found, replicas)
    for module in found:
        module.set_gradient_divide_factor(1.0 if replicas is None else Replicas(replicas))
        module.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo supports no other, and NCCL copies less


def _check_replicas(modules: Sequence[FSDPModule], replicas: int) -> None:
    """Raise ValueError unless ``replicas`` is an integer above 0 that divides the ranks of each sharded module."""
    check_int("replicas", replicas)
    for module in modules:
        # The attribute is private; a release without it only loses the check.
        for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):
            ranks = group.mesh_info.mesh.size()
            if replicas < 1 or ranks % replicas:
                raise ValueError(
                    f"replicas={replicas} does not divide the {ranks} ranks that the model is sharded over: give the "
                    "number of groups of ranks that train on batches of their own"
                )


def note_reduction(model: nn.Module, step: Step) -> None:
    """Tell ``step`` whether FSDP2 averages or sums the gradients of ``model`` over the ranks of the step.

    Only parameters that ``model`` itself shards are looked at, not those of FSDP2 modules inside it. A model that is
    not sharded changes nothing.
    """
    if step.group is None or not isinstance(model, FSDPModule):
        return
    # The attribute is private; a release without it only loses the check.
    averaged, summed = fsdp_reduction(getattr(model._get_fsdp_state(), "_fsdp_param_groups", ()), step.group)
    seen = step.losses
    seen.averaged_by, seen.summed_by = averaged or seen.averaged_by, summed or seen.summed_by
