"""Hooks around the forward of a Hugging Face model that check how it uses its step.

They detect unused steps, wrongly divided losses and missing positions. :func:`check_forwards` is for models turned on
by :mod:`flexcp.frameworks.huggingface`, :func:`check_use` for models whose keywords other code checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexcp.executor.losses.averaging import Gradients, share_factor
from flexcp.executor.step import Step
from flexcp.executor.step_mistakes import may_look_at
from flexcp.frameworks import fsdp, not_used
from flexcp.frameworks.huggingface_attention import NAME, not_passed_on, refuse_counted
from flexcp.frameworks.huggingface_layers import other_layers
from flexcp.frameworks.router_loss import with_shared_router_loss
from flexcp.frameworks.shared_batch import IGNORE, lengths_of
from flexcp.masks import full

_CALLS = "_flexcp_calls"
_ROW = "_flexcp_row"


def check_forwards(model: nn.Module) -> None:
    """Check every forward of ``model`` that is given a step, from now on, and fill in keywords that the step knows.

    Wrong keywords raise, and so does what :func:`check_use` detects. Further calls with the same model do nothing.
    """
    if _refuse_wrong_use in model._forward_pre_hooks.values():
        return
    model.register_forward_pre_hook(_refuse_wrong_use, with_kwargs=True)
    model.register_forward_pre_hook(_with_a_row, with_kwargs=True)
    model.register_forward_pre_hook(_with_count, with_kwargs=True)
    model.register_forward_pre_hook(_with_positions, with_kwargs=True)
    model.register_forward_pre_hook(_with_borders, with_kwargs=True)
    check_use(model)


def check_use(model: nn.Module) -> None:
    """Raise from now on whenever ``model`` is given a step that no attention inside it uses (RuntimeError).

    Also raise ValueError if the gradients of its loss would be wrong, because FSDP2 or DDP reduces them otherwise than
    ``gradients=`` says. A load-balancing loss of experts is replaced by this rank's share.
    """
    model.register_forward_pre_hook(_note_calls, with_kwargs=True)
    model.register_forward_hook(_check_calls, with_kwargs=True)


class ValidLabels:
    """The number that a model's loss is divided by, made by ``huggingface.inputs`` as ``num_items_in_batch``.

    Dividing by it raises RuntimeError if no attention ran under the step, and ValueError if gradients would be wrong. A
    model that was not turned on accepts a step among its keywords and drops it; its loss is the first place where that
    can be detected. A model that was turned on gets the plain number, and is checked after its forward.

    For users this is the number of the batch's valid labels on all ranks, by which losses of several batches are
    weighted: it prints, compares and computes like that integer, and pickles as it. Only a tensor is divided by another
    number: under ``gradients="averaged"`` by that number / the number of ranks. A batch without a valid label counts 0,
    and its loss, a sum of nothing, is divided by 1. ``here`` is the number of labels on this rank, if known.
    """

    def __init__(self, valid: int | Tensor, step: Step, gradients: Gradients, here: Tensor | None = None) -> None:
        self.valid, self.step, self.gradients, self.here = valid, step, gradients, here
        factor = share_factor(gradients, step.cp_size)
        divisor = valid.clamp(min=1) if isinstance(valid, Tensor) else max(1, valid)
        self.count = divisor if factor == 1 else divisor / factor

    def __rtruediv__(self, total: Any) -> Any:
        if not isinstance(total, Tensor):
            return total / int(self)
        if not self.step.calls:
            raise RuntimeError(not_used(self.step))
        if total.requires_grad:
            self.step.losses.check_reduction(self.gradients)
        return self.step.losses.report(total / self.count)

    def __int__(self) -> int:
        return int(self.valid)

    def __float__(self) -> float:
        return float(self.valid)

    def __mul__(self, other: Any) -> Any:
        return int(self) * _plain(other)

    def __add__(self, other: Any) -> Any:
        return int(self) + _plain(other)

    def __sub__(self, other: Any) -> Any:
        return int(self) - _plain(other)

    def __rsub__(self, other: Any) -> Any:
        return other - int(self)

    def __truediv__(self, other: Any) -> Any:
        return int(self) / _plain(other)

    __rmul__, __radd__ = __mul__, __add__

    def item(self) -> int:
        """Return the number of valid labels on all ranks."""
        return int(self)

    def __eq__(self, other: object) -> Any:
        return int(self) == _plain(other)

    def __lt__(self, other: Any) -> Any:
        return int(self) < _plain(other)

    def __le__(self, other: Any) -> Any:
        return int(self) <= _plain(other)

    def __gt__(self, other: Any) -> Any:
        return int(self) > _plain(other)

    def __ge__(self, other: Any) -> Any:
        return int(self) >= _plain(other)

    def __bool__(self) -> bool:
        return bool(int(self))

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return str(int(self))

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        # The step belongs to this process, so what another process gets is the plain number.
        return int, (int(self),)

    def __copy__(self) -> ValidLabels:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ValidLabels:
        return self


def _plain(number: Any) -> Any:
    """Return the integer of :class:`ValidLabels`, and anything else as it is."""
    return int(number) if isinstance(number, ValidLabels) else number


def _refuse_wrong_use(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raise for inputs, labels or a mask with which a model would train wrongly under a step; a forward pre-hook.

    ValueError: 1-D ids, labels that the model would shift over this rank's rows or divide wrongly, and a full mask,
    which shows a causal model what it predicts. NotImplementedError: documents that branch, in a model whose layers
    read tokens in order.
    """
    step = keywords.get("step")
    if not isinstance(step, Step) or torch.compiler.is_compiling():
        return
    ids = arguments[0] if arguments else keywords.get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 1:
        raise ValueError(f"input_ids has shape {tuple(ids.shape)}, but a model takes [1, tokens]: pass input_ids[None]")
    if isinstance(ids, Tensor) and len(ids) == 1:
        step.seen.given(ids[0])
    if step.plan.batch.branches:
        _refuse_hybrid(module, step)
    if keywords.get("labels") is not None and keywords.get("shift_labels") is None:
        raise ValueError(
            "labels beside a step would be shifted over this rank's rows, across documents, and averaged over this "
            "rank alone: take the keywords of flexcp.frameworks.huggingface.inputs(tokens, step, labels), or leave "
            "labels out and call step.loss(logits[0], step.labels(tokens)): labels are next tokens, which step.labels "
            "shifts inside documents"
        )
    if keywords.get("labels") is not None:
        with step.collectives.checking("the model's forward"):
            _refuse_other_labels(keywords["labels"], keywords["shift_labels"], keywords.get("num_items_in_batch"), step)
    if keywords.get("labels") is not None and keywords.get("gradients") is not None:
        _refuse_other_count(keywords.get("num_items_in_batch"), step, keywords["gradients"])
    elif keywords.get("labels") is not None and "gradients" not in keywords:
        _refuse_unsaid_gradients(keywords.get("num_items_in_batch"), step)
    if any(full() in mask.rules for mask in step.plan.batch.masks) and any(
        getattr(part, "is_causal", False) is True for part in module.modules()
    ):
        raise ValueError(
            f"{type(module).__name__} is causal, but this plan's mask is full: every token would see the one it "
            "predicts; plan with masks=flexcp.frameworks.huggingface.masks(model.config)"
        )


def _refuse_hybrid(module: nn.Module, step: Step) -> None:
    """Raise NotImplementedError for a model with layers that read tokens in order, such as state space layers.

    It is called for batches with documents that branch: along the stream, the state of such layers would pass from one
    branch into the next.
    """
    what = other_layers(module)
    if not what:
        return
    document = next(iter(step.plan.batch.branches))
    raise NotImplementedError(
        f"{type(module).__name__} has {what}, which read tokens in the order of the stream, and document {document} "
        "branches: their state would go from one branch into the next. Train such a model on the sequences as "
        "documents of their own"
    )


def _refuse_other_labels(labels: Any, shifted: Any, count: Any, step: Step) -> None:
    """Raise ValueError if the labels that the loss reads, ``shifted``, are not what the user means.

    ``labels`` and ``shifted`` are the forward's ``labels`` and ``shift_labels``, which ``inputs`` makes the same
    tensor. They must be equal, and hold as many valid labels as ``count`` was made for. If the loader marks tokens
    without a label by another number than -100, they must not hold that number. Nothing is checked if the host may not
    read the tensors.
    """
    if not isinstance(labels, Tensor) or not isinstance(shifted, Tensor) or not may_look_at(step, shifted):
        return
    same = labels.data_ptr() == shifted.data_ptr() and labels.shape == shifted.shape
    if not same and not torch.equal(labels.to(shifted.device), shifted):
        raise ValueError(
            "labels are not those in shift_labels, which alone the loss reads beside a step: give labels of your own, "
            "the stream's, each beside its own token, to flexcp.frameworks.huggingface.inputs(tokens, step, labels), "
            "which shifts and counts them"
        )
    if step.ignore != IGNORE and bool((shifted == step.ignore).any()):
        raise ValueError(
            f"shift_labels holds {step.ignore}, with which this step's loader marks tokens without a label "
            f"(Samples(ignore={step.ignore})), but Transformers' loss ignores only {IGNORE} and would train on them: "
            f"make the loader without ignore=, or pass labels.masked_fill(labels == {step.ignore}, {IGNORE})"
        )
    counted = int((shifted != IGNORE).sum())
    if isinstance(count, ValidLabels) and count.here is not None and int(count.here) != counted:
        raise ValueError(
            f"shift_labels has {counted} labels that count on this rank, but num_items_in_batch was made for "
            f"{int(count.here)} here: give labels of your own to "
            "flexcp.frameworks.huggingface.inputs(tokens, step, labels), which counts them"
        )


def _refuse_other_count(count: Any, step: Step, gradients: Gradients) -> None:
    """Raise ValueError if ``count`` is not the divisor that flexcp made with the labels, although it has to be.

    It has to be if it is missing, or if gradients are averaged over several ranks, because flexcp's divisor then
    contains their number.
    """
    if isinstance(count, ValidLabels) or (count is not None and share_factor(gradients, step.cp_size) == 1):
        return
    raise ValueError(
        f"num_items_in_batch={count} is not what flexcp made with these labels, which under gradients={gradients!r} "
        f"also holds the {step.cp_size} ranks: leave it as it is. To accumulate gradients, multiply each loss by the "
        "labels of its batch / those of all batches"
    )


def _refuse_unsaid_gradients(count: Any, step: Step) -> None:
    """Raise ValueError if the loss is divided by the user's own ``count`` and nothing says how gradients are reduced.

    The rank's sum / the labels of all ranks is right if gradients are summed over ranks, and too small by their number
    if DDP or FSDP2 averages them. A caller that scales the loss itself, as the Trainer does, passes ``gradients=None``,
    and this is not called.
    """
    if count is None or isinstance(count, ValidLabels) or step.cp_size == 1 or not torch.is_grad_enabled():
        return
    raise ValueError(
        f"num_items_in_batch={count} beside a step on {step.cp_size} ranks does not say how gradients are reduced: "
        "take the keywords of flexcp.frameworks.huggingface.inputs(tokens, step, labels, gradients='averaged') (DDP, "
        "and FSDP2 without sum_gradients) or gradients='summed', or pass gradients='summed' beside your own count, "
        "which is then that of all ranks"
    )


def _with_a_row(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """On a rank without tokens, replace empty inputs by one row of zeros, because models cannot run on none.

    No other row sees it, and :func:`_without_the_row` removes it from the output.
    """
    step = keywords.get("step")
    if torch.compiler.is_compiling():
        return None
    setattr(module, _ROW, False)  # an earlier forward may have ended with an exception
    if not isinstance(step, Step) or step.local_tokens:
        return None
    made = [_one_row(x) for x in arguments], {name: _one_row(x) for name, x in keywords.items()}
    if all(a is b for a, b in zip(made[0], arguments, strict=True)) and all(
        x is keywords[n] for n, x in made[1].items()
    ):
        return None
    setattr(module, _ROW, True)
    return tuple(made[0]), made[1]


def _one_row(x: Any) -> Any:
    empty = isinstance(x, Tensor) and x.dim() > 1 and tuple(x.shape[:2]) == (1, 0)
    return x.new_zeros(1, 1, *x.shape[2:]) if empty else x


def _with_count(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Replace :class:`ValidLabels` in ``num_items_in_batch`` by its plain divisor."""
    found = keywords.get("num_items_in_batch")
    return (arguments, keywords | {"num_items_in_batch": found.count}) if isinstance(found, ValidLabels) else None


def _with_positions(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Fill in the step's positions if none are given, and raise ValueError for positions that only number rows.

    Also raise ValueError for a wrong number of rows, and under torch.compile for missing positions.
    """
    step = keywords.get("step")
    if not isinstance(step, Step):
        return None
    at, given = positions_given(module, arguments, keywords)
    if at is None:
        return None
    if torch.compiler.is_compiling():
        if given is None:
            raise ValueError("under torch.compile give the model position_ids: step.positions[None]")
        return None
    _refuse_other_rows(arguments, keywords, step)
    if given is not None:
        refuse_counted(given, step)
        return None
    # A rank without tokens gets a row that no other row sees.
    tensors = [x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    found = (
        step.tables.positions_on(device)[None]
        if step.local_tokens
        else step.tables.positions.new_zeros(1, 1, device=device)
    )
    if at < len(arguments):
        return (*arguments[:at], found, *arguments[at + 1 :]), keywords
    return arguments, keywords | {"position_ids": found}


def _with_borders(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Without a step, tell a model the borders of packed documents as ``cu_seq_lens_q``.

    Some models (Llama 4, Ministral 3, Persimmon, CTRL) do not pass positions, in which documents are told apart, on to
    their attention, which would run across documents; ``cu_seq_lens_q`` reaches it in all of them. Rows that are one
    document each need no borders.
    """
    turned_off = getattr(getattr(module, "config", None), "_attn_implementation", None) != NAME
    if turned_off or isinstance(keywords.get("step"), Step) or torch.compiler.is_compiling():
        return None
    _, given = positions_given(module, arguments, keywords)
    if not isinstance(given, Tensor) or given.dim() != 2 or keywords.get("cu_seq_lens_q") is not None:
        return None
    inputs = (*arguments[:1], keywords.get("input_ids"), keywords.get("inputs_embeds"))
    rows = next((len(x) for x in inputs if isinstance(x, Tensor)), len(given))
    lengths = lengths_of(given.expand(rows, -1))
    if len(lengths) == rows or not _takes_any_keyword(module):
        return None
    borders = torch.tensor([0, *lengths], device=given.device).cumsum(0)
    return arguments, keywords | {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}


def _takes_any_keyword(module: nn.Module) -> bool:
    """Return whether a model's forward has ``**kwargs``, by which keywords reach attention."""
    kinds = (parameter.kind for parameter in inspect.signature(module.forward).parameters.values())
    return inspect.Parameter.VAR_KEYWORD in kinds


def _refuse_other_rows(arguments: tuple[Any, ...], keywords: Mapping[str, Any], step: Step) -> None:
    """Raise ValueError if the number of ids or embeddings is not that of this rank's rows (1 if it has none)."""
    for name in ("input_ids", "inputs_embeds"):
        given = arguments[0] if arguments and name == "input_ids" else keywords.get(name)
        if isinstance(given, Tensor) and given.shape[1] != max(1, step.local_tokens):
            whole = " (the whole stream)" if given.shape[1] == step.plan.batch.tokens else ""
            with step.collectives.checking("the model's forward"):
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)}{whole}, but rank {step.rank} keeps {step.local_tokens} "
                    "tokens under this plan: pass step.shard(stream)[None], or all keywords by "
                    "flexcp.frameworks.huggingface.inputs(stream, step)"
                )


def positions_given(
    module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[int | None, Any]:
    """Return the index of ``position_ids`` among the parameters of a model's forward, and the value given for it.

    The index is None if forward has no such parameter, the value None if none is given.
    """
    names = list(inspect.signature(module.forward).parameters)
    if "position_ids" not in names:
        return None, keywords.get("position_ids")
    at = names.index("position_ids")
    return at, arguments[at] if at < len(arguments) else keywords.get("position_ids")


def _note_calls(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
    step = keywords.get("step")
    if isinstance(step, Step) and not torch.compiler.is_compiling():
        setattr(module, _CALLS, step.calls)


def _check_calls(module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> Any:
    step = keywords.get("step")
    if not isinstance(step, Step):
        return None
    if _loss_of(output, keywords) is not None:
        output = with_shared_router_loss(module, output, step, keywords.get("gradients") or "summed")
    loss = _loss_of(output, keywords)
    if torch.compiler.is_compiling():
        if loss is not None:
            step.losses.report(loss)
        return output
    if step.calls == getattr(module, _CALLS):
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME:
            passed = not_passed_on("their attention")
            raise RuntimeError(f"{step!r} was given to {type(module).__name__}, but {passed}")
        raise RuntimeError(not_used(step))
    fsdp.note_reduction(module, step)
    if loss is not None and loss.requires_grad and keywords.get("gradients") is not None:
        step.losses.check_reduction(keywords["gradients"])
    if loss is not None:
        step.losses.report(loss)
    return _without_the_row(module, output)


def _loss_of(output: Any, keywords: Mapping[str, Any]) -> Tensor | None:
    """Return the loss in a model's output (possibly a tuple), or None if it has none.

    Only a model that was given shifted labels and a divisor can have one.
    """
    if keywords.get("shift_labels") is None or keywords.get("num_items_in_batch") is None:
        return None
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _without_the_row(module: nn.Module, output: Any) -> Any:
    """Return the output without the row that :func:`_with_a_row` added, if it did.

    Gradients still flow through that row as zeros, so that all parameters have one.
    """
    if not getattr(module, _ROW, False):
        return output
    setattr(module, _ROW, False)
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            output[name] = output[name][:, :0]
    return output
