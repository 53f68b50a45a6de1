"""Router loss: a rank's share of the load-balancing loss that Transformers adds to the loss of a model with experts.

With ``output_router_logits`` such a model adds ``router_aux_loss_coef`` times the load-balancing loss of its own rows.
That loss is a mean, not a share of one, so added up over ranks it would count once for each rank. Here each rank's
value is weighted by its part of the batch's tokens, so that the batch's loss has the mean over all rows of the ranks'
values. (It is not the load-balancing loss of the whole batch, which no rank could compute without the others.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flexcp.executor.losses.averaging import Gradients, share_factor
from flexcp.executor.step import Step

COEFFICIENT = "router_aux_loss_coef"


def with_shared_router_loss(module: nn.Module, output: Any, step: Step, gradients: Gradients) -> Any:
    """Return a model's output with this rank's share of the router loss in its loss, instead of the whole value.

    An output without a router loss is returned as it is, and so is any on a single rank. ``gradients`` says how
    gradients are reduced over ranks.
    """
    is_tuple = isinstance(output, tuple)
    router_loss = output[1] if is_tuple and len(output) > 1 else getattr(output, "aux_loss", None)
    if not isinstance(router_loss, Tensor) or router_loss.dim() or step.cp_size == 1:
        return output
    loss = output[0] if is_tuple else output.loss
    rows = int((step.tables.tokens >= 0).sum())
    share = share_factor(gradients, step.cp_size) * rows / step.plan.batch.tokens
    shared = loss + _coefficient(module) * (share - 1) * router_loss.to(loss.device)
    if is_tuple:
        return (shared, *output[1:])
    output["loss"] = shared
    return output


def refuse_whole_router_loss(module: nn.Module, step: Step) -> None:
    """Raise ValueError for a model on several ranks that adds a router loss, because nothing would weight it by rank.

    It is called for models that were not turned on by :func:`flexcp.frameworks.huggingface.turn_on`.
    """
    if step.cp_size > 1 and getattr(getattr(module, "config", None), "output_router_logits", False):
        raise ValueError(
            f"this model adds the load-balancing loss of its experts (output_router_logits) on each of {step.cp_size} "
            "ranks, and flexcp must weight it: call flexcp.frameworks.huggingface.turn_on(model) once, or set "
            "model.config.output_router_logits = False"
        )


def _coefficient(module: nn.Module) -> float:
    """Return the factor of a model's router loss; raise NotImplementedError if neither model nor config has it."""
    for holder in (module, getattr(module, "config", None)):
        found = getattr(holder, COEFFICIENT, None)
        if found is not None:
            return float(found)
    raise NotImplementedError(
        f"{type(module).__name__} returns a router loss, but neither it nor its config has {COEFFICIENT}, by which "
        "flexcp would weight it over ranks; pass output_router_logits=False and add a router loss of your own"
    )
