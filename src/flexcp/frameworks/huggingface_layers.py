"""What the configuration of a Hugging Face model says about its layers, where flexcp would train them wrongly.

Such layers use the rows of a rank as if they were whole documents in order: layers that mix tokens otherwise than by
attention (convolutions, state space layers, linear attention), and rotary embeddings that choose their frequencies by
the longest position among the rows they get.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from flexcp.executor.step import Step
from flexcp.models.families import REFUSED, STATE

CHUNKED = "chunked_attention"
"""The name in configurations for layers whose queries see only keys of their own chunk of tokens."""
SLIDING = "sliding_attention"
"""The name in configurations for layers with a window."""
PLANNED = frozenset({"full_attention", SLIDING, CHUNKED})
"""Kinds of layers in ``layer_types`` whose masks flexcp plans."""
_KNOWN = PLANNED | {"attention", "moe", "mlp", "dense", "sparse"}
"""The same, with their older name and kinds of layers in which no token sees another."""
_HANDLED = "_flexcp_other_layers_handled"


def other_layers(part: nn.Module) -> str:
    """Return in words which layers of a model mix tokens otherwise than by attention; "" if there are none.

    ``part`` is the model, or one of its layers that has the configuration. Where the configuration lists the kinds of
    its layers, they decide, because some families with state space layers have models without.
    """
    config: Any = getattr(part, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds:
        odd = sorted(set(kinds) - _KNOWN)
        return f"layers of kind {', '.join(odd)}" if odd else ""
    stateful = any(getattr(each, "_is_stateful", False) for each in part.modules())
    return "layers with a state" if stateful or REFUSED.get(getattr(config, "model_type", "")) == STATE else ""


def refuse_unless_handled(model: nn.Module, other_layers: str) -> None:
    """Raise NotImplementedError for a model with layers that mix tokens otherwise than by attention.

    With ``other_layers`` "handled", note in all parts of the model that its user adapted them; later calls with
    "refused" then accept it too. Other values raise ValueError.
    """
    if other_layers not in ("refused", "handled"):
        raise ValueError(f"other_layers is 'refused' or 'handled'; got {other_layers!r}")
    for part in model.modules() if other_layers == "handled" else ():
        setattr(part, _HANDLED, True)
    refuse_other_layers(model)


def refuse_other_layers(part: nn.Module) -> None:
    """Raise NotImplementedError for layers that mix tokens otherwise than by attention, if nobody adapted them.

    ``part`` is a model or one of its attention layers.
    """
    found = "" if getattr(part, _HANDLED, False) else other_layers(part)
    if found:
        raise NotImplementedError(
            f"{type(part).__name__}: this model has {found}, which would mix the tokens of a rank as they lie, "
            "but under a plan these are neither whole documents nor in order. Run those layers on step.relayout(x) and "
            "bring their rows back by step.restore(y) (docs/frameworks.md#hybrid-models); then call turn_on(model, "
            "other_layers='handled')"
        )


def refuse_growing_rope(config: Any, step: Step) -> None:
    """Raise NotImplementedError if ranks would choose different frequencies of rotary embeddings.

    With ``rope_type`` "dynamic" or "longrope", Transformers chooses them by the longest position that it sees, here
    that of this rank's rows. All ranks choose the same ones only for documents up to the model's original length.
    """
    if step.cp_size == 1:
        return
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = str(rope.get("rope_type", ""))
        if "dynamic" in kind:
            name, limit = "max_position_embeddings", getattr(config, "max_position_embeddings", None)
        elif kind == "longrope":
            name, limit = "original_max_position_embeddings", rope.get("original_max_position_embeddings")
        else:
            continue
        longest = int(step.plan.batch.lengths.max(initial=0))
        if longest > (limit or 0):
            raise NotImplementedError(
                f"rope_type {kind!r} of {getattr(config, 'model_type', 'this model')} chooses its frequencies by the "
                f"longest position that a rank sees, and a document of this plan has {longest} tokens, more than "
                f"{name}={limit}: the {step.cp_size} ranks would use different frequencies. Plan documents of at most "
                f"{name} tokens, or choose a rope_type whose frequencies are fixed, such as 'yarn' or 'linear'"
            )


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each set of parameters of rotary embeddings; a configuration has one, or one for each kind of layers."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    for inner in parameters.values():
        yield from _ropes(inner)
