"""Shared forwards: every rank calls a model with its own documents, and all ranks together run the documents of all.

    shared = share_forward(model, planner, masks=huggingface.masks(model.config))
    out = model(input_ids=..., attention_mask=..., labels=...)      # on every rank, with documents of its own

Some losses are no mean over tokens (preferences, policies, label smoothing). They need the results of whole pairs,
rollouts or rows on the rank that loaded them. So everything that the model returns for a token travels back to the rank
that loaded the token and is put in the token's place, and gradients travel the opposite way. The caller's code, its
loss and its reduction of gradients stay those of data parallelism: the result is the gradient of the sum of all ranks'
losses, however rows were placed.

The size of what travels is up to the model's output: a few numbers per token for a head that returns log-probabilities
(TRL's fused LM head), the whole vocabulary if the caller asks for logits. A loss that the model itself computes from
``labels`` is computed where the rows are: this rank's share of the batch's mean, for averaged gradients.

``model.generate`` runs on each rank alone, with the model's original attention.

A deep copy of the model (a reference policy, an average of weights) has a shared forward too, which runs the copy's
own weights: the functions that stand in the place of ``forward`` and ``generate`` are the same, so they go by the model
that they are called on.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexcp.executor.step import Step
from flexcp.frameworks import not_used
from flexcp.frameworks.collated import KNOWN, Collated, read_batch
from flexcp.frameworks.huggingface import turn_on
from flexcp.frameworks.huggingface_attention import NAME
from flexcp.frameworks.shared_batch import IGNORE, Rows, share
from flexcp.plan.plan import Plan
from flexcp.planner import Planner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PASSED_ON = {"fused_lm_head", "num_items_in_batch", "output_router_logits", "return_dict", "use_cache"}
"""Keywords that mean the same for any rows, and are passed on to the model; ``use_cache`` is always passed as False."""


class LastPlan:
    """A planner that keeps its last plan, for several models that see the same documents.

    Such models are a policy and its reference. ``options`` go to the planner's call.
    """

    def __init__(self, planner: Planner, options: Mapping[str, Any]) -> None:
        self.planner, self.options = planner, options
        self.lengths: list[int] = []
        self.plan: Plan | None = None

    def __call__(self, lengths: list[int]) -> Plan:
        """Return the plan for documents of these lengths; the last one if they are the same."""
        if self.plan is None or lengths != self.lengths:
            self.plan, self.lengths = self.planner(lengths, **self.options), lengths
        return self.plan


class SharedForward:
    """The shared forward of a model, made by :func:`share_forward`.

    ``planner`` plans each batch, and ``group`` is the ranks that share it (None: all).
    """

    def __init__(self, model: PreTrainedModel, planner: LastPlan, group: dist.ProcessGroup | None) -> None:
        self.planner, self.group = planner, group
        self.own_attention = model.config._attn_implementation
        self.own_forward = model.forward
        self.names = list(inspect.signature(model.forward).parameters)
        self.watch: Callable[[Step], None] | None = None
        """Called with the step of every forward, if set."""
        self.paused: WeakSet[nn.Module] = WeakSet()
        """The model and copies of it that run alone at the moment."""

    @contextmanager
    def pause(self, model: PreTrainedModel) -> Iterator[None]:
        """Use the own forward and attention of ``model`` inside the ``with`` block, on each rank alone.

        ``model`` is the one that was shared, or a copy of it. If its own attention was flexcp's already, it is
        ``"sdpa"`` there.
        """
        if model in self.paused:
            yield
            return
        self.paused.add(model)
        model.set_attn_implementation("sdpa" if self.own_attention == NAME else self.own_attention)
        try:
            yield
        finally:
            model.set_attn_implementation(NAME)
            self.paused.discard(model)

    def run(self, keywords: Mapping[str, Any], own_forward: Callable[..., Any]) -> Any:
        """Return the model's output for this rank's documents, computed by all ranks together.

        ``keywords`` are those of the model's forward, and ``own_forward`` is that forward; every rank must call this.
        Raise RuntimeError if the model did not use the step.
        """
        _refuse_keywords(keywords)
        batch = read_batch({name: value for name, value in keywords.items() if name in KNOWN})
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        rows = share(batch.tokens, batch.labels, batch.lengths, self.planner, group, labelled=batch.labelled)
        given = {name: value for name, value in keywords.items() if name in PASSED_ON}
        given |= {
            "input_ids": rows.tokens[None],
            "position_ids": rows.positions[None],
            "step": rows.step,
            "use_cache": False,
        }
        labelled = keywords.get("labels") is not None
        if labelled:
            given |= {"labels": rows.labels[None], "shift_labels": rows.labels[None]}
        if labelled and given.get("num_items_in_batch") is None and not keywords.get("fused_lm_head"):
            given["num_items_in_batch"] = _share_count(rows, group)
        if self.watch is not None:
            self.watch(rows.step)
        output = own_forward(**given)
        if not rows.step.calls:
            raise RuntimeError(not_used(rows.step))
        return _returned(output, rows, batch, keywords)


def share_forward(
    model: PreTrainedModel, planner: Planner | LastPlan, group: dist.ProcessGroup | None = None, **options: Any
) -> SharedForward:
    """Let every rank call ``model`` with its own documents, and run the documents of all ranks together.

    The ranks are those of ``group``, by default all. The model's ``forward`` and ``generate`` are replaced. ``model``
    is turned on by :func:`flexcp.frameworks.huggingface.turn_on`; wrap it in DDP or FSDP2 afterwards. ``options`` go to
    the planner's call (``masks=``, ``tokens=``); with a :class:`LastPlan`, which several models that see the same
    documents can share, they are not used. A forward that is called with a step uses that step.
    """
    given = planner if isinstance(planner, LastPlan) else LastPlan(planner, options)
    shared = SharedForward(model, given, group)
    turn_on(model)

    @functools.wraps(model.forward)
    def forward(self: PreTrainedModel, *arguments: Any, **keywords: Any) -> Any:
        own_forward = _method_of(self, shared.own_forward, model)
        if self in shared.paused or keywords.get("step") is not None:
            return own_forward(*arguments, **keywords)
        return shared.run(dict(zip(shared.names, arguments, strict=False)) | keywords, own_forward)

    own_generate = model.generate

    @functools.wraps(own_generate)
    def generate(self: PreTrainedModel, *arguments: Any, **keywords: Any) -> Any:
        with shared.pause(self):
            return _method_of(self, own_generate, model)(*arguments, **keywords)

    model.forward = _bound(forward, model, model.forward)
    model.generate = _bound(generate, model, own_generate)
    return shared


def _method_of(owner: nn.Module, method: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """Return a method of ``model`` as that of ``owner``, which is the model itself or a copy of it.

    ``copy.deepcopy`` binds the functions in the place of ``forward`` and ``generate`` to the copy, but not the methods
    that they hold: those would run the weights of the model that was copied. Raise RuntimeError for a copy if what
    stands in the place of the method is bound to no model.
    """
    if owner is model:
        return method
    if getattr(method, "__self__", None) is not model:
        raise RuntimeError(
            f"this {type(owner).__name__} is a copy of a model whose forwards are shared, and {method!r} would run the "
            "weights of that model: make the copy first, and share each of them with share_forward"
        )
    return types.MethodType(method.__func__, owner)  # type: ignore[attr-defined]  # __self__ says that it is bound


def _bound(function: Callable[..., Any], model: nn.Module, replaced: Callable[..., Any]) -> types.MethodType:
    """Return ``function`` as a method of ``model``, with the signature of the method that it replaces.

    The Trainer drops the columns of a dataset that are not among the parameters of ``model.forward``. Without a
    signature of its own, a wrapper of a bound method would lose the first one, ``input_ids``, in the place of ``self``.
    """
    given = inspect.signature(replaced)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    vars(function)["__signature__"] = given.replace(parameters=[own, *given.parameters.values()])
    return types.MethodType(function, model)


def _refuse_keywords(keywords: Mapping[str, Any]) -> None:
    unknown = {
        name
        for name, value in keywords.items()
        if name not in KNOWN | PASSED_ON and value is not None and value is not False
    }
    if unknown:
        raise NotImplementedError(
            f"the model is called with {', '.join(sorted(unknown))}, which flexcp would not know how to share over "
            f"ranks; it knows {', '.join(sorted(KNOWN | PASSED_ON))}"
        )
    if keywords.get("input_ids") is None:
        raise NotImplementedError(
            "the model is called without input_ids, by which ranks tell each other their documents"
        )


def _share_count(rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """Return the number by which a rank's sum is divided to be its share of the batch's mean, for averaged gradients.

    It is the valid labels of all ranks / the number of ranks.
    """
    valid = (rows.labels != IGNORE).sum()
    dist.all_reduce(valid, group=group)
    return valid.clamp(min=1) / rows.step.cp_size


def _returned(output: Any, rows: Rows, batch: Collated, keywords: Mapping[str, Any]) -> Any:
    """Return the output with all per-token values in the places of the caller's tokens.

    ``rows`` are those that the model ran, ``batch`` is what the caller passed. Raise NotImplementedError for an output
    that is not one of Transformers' own, such as a tuple.
    """
    if not isinstance(output, dict):
        raise NotImplementedError(
            f"the model returned a {type(output).__name__}, not one of Transformers' outputs: leave return_dict out"
        )
    row = (1, len(rows.tokens))
    of_tokens = {
        name: value
        for name, value in output.items()
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == row
    }
    narrow = [name for name, value in of_tokens.items() if value.dim() == 2]
    found = {name: rows.returned(value[0]) for name, value in of_tokens.items() if name not in narrow}
    if narrow:
        # All single numbers of a token travel in one exchange; the widest dtype also holds booleans exactly.
        values = [of_tokens[name][0] for name in narrow]
        wide = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        moved = rows.returned(torch.stack([value.to(wide) for value in values], 1))
        found |= {name: moved[:, i].to(of_tokens[name].dtype) for i, name in enumerate(narrow)}
    fused = bool(keywords.get("fused_lm_head"))
    for name, value in found.items():
        back = batch.put_back(value)
        # A head that returns a number for each label has none for the last column, whose label is beyond the row.
        output[name] = rows.step.losses.report(back[:, :-1] if fused else back)
    if fused and output.get("log_probs") is not None:
        number = keywords.get("num_items_in_batch")
        count = (batch.labels != IGNORE).sum().clamp(min=1) if number is None else number
        output["loss"] = -output["log_probs"].sum() / count
    return output
