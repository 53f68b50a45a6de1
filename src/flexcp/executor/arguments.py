"""Arguments: check what users pass to attention, to a step or to ``bind``, before it is used.

A wrong argument raises an error of one line that names the argument, says what it is for and what was given. ``place``
is everywhere the name of the public function that was called, for that message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.io.setting_checks import MOST_SECONDS, is_seconds

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def named_kind(x: object) -> str:
    """Describe a value in a few words for a message.

    A tensor is described by its shape, None, a bool, a number or a string by its repr, other objects by their type.
    """
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    return repr(x) if x is None or isinstance(x, bool | int | float | str) else f"a {type(x).__name__}"


def check_rows(x: object, place: str) -> None:
    """Raise ValueError unless ``x`` is a tensor with at least one dimension, its rows; ``place`` names the caller."""
    if not isinstance(x, Tensor) or not x.dim():
        way = "; make it one with torch.tensor" if isinstance(x, list | tuple) else ""
        raise ValueError(f"{place} takes a tensor with a row for each token; got {named_kind(x)}{way}")


def single(name: str, shape: Sequence[int], rows: int) -> str | None:
    """Return the expression that removes a superfluous dimension of size 1 from the tensor ``name``.

    A shape ``(1, rows, ...)`` gives ``"name[0]"``, a shape ``(rows, 1)`` gives ``"name[:, 0]"``, and any other shape
    None.
    """
    if tuple(shape[:2]) == (1, rows):
        return f"{name}[0]"
    return f"{name}[:, 0]" if tuple(shape) == (rows, 1) else None


def check_stream(x: object, name: str, place: str, tokens: int, local: int) -> None:
    """Raise ValueError unless ``x`` is a tensor with a row for each of the batch's ``tokens`` tokens.

    ``name`` is the argument and ``place`` the function that was called. ``local`` is how many rows this rank has: a
    tensor of that many rows was probably sharded already, and the message says so.
    """
    if not isinstance(x, Tensor) or not x.dim():
        way = f"; pass {_as_stream(name, x)}" if isinstance(x, list | tuple) and x else ""
        raise ValueError(
            f"{place} takes {name} as a tensor with a row for each token of the batch; got {named_kind(x)}{way}"
        )
    if len(x) != tokens:
        way = "pass those of the whole batch, its documents end to end"
        if instead := single(name, x.shape, tokens):
            way = f"pass {instead}"
        elif len(x) == local:
            way = f"they are as many as this rank's rows: {way}, not yet sharded"
        raise ValueError(f"{place}: {name} has shape {tuple(x.shape)}, but the plan's batch has {tokens} tokens; {way}")


def _as_stream(name: str, x: Sequence[object]) -> str:
    """Return the expression that makes one tensor of all tokens out of ``x``, a list of numbers or a list of documents.

    ``name`` is what the expression calls the list.
    """
    if isinstance(x[0], Tensor) and x[0].dim():
        return f"the documents end to end, torch.cat({name})"
    if isinstance(x[0], list | tuple):
        return f"the documents end to end, torch.tensor([token for document in {name} for token in document])"
    return f"torch.tensor({name})"


def check_ids(x: object, name: str, place: str, tokens: int, local: int) -> None:
    """Raise ValueError unless ``x`` is a tensor of one integer for each of the batch's ``tokens`` tokens.

    ``name``, ``place`` and ``local`` are those of :func:`check_stream`.
    """
    check_stream(x, name, place, tokens, local)
    assert isinstance(x, Tensor)
    if x.dim() != 1:
        instead = single(name, x.shape, tokens)
        raise ValueError(
            f"{place}: {name} has shape {tuple(x.shape)}, but holds one number for each of the batch's {tokens} "
            f"tokens, ({tokens},)" + (f"; pass {instead}" if instead else "; pass one of its columns")
        )
    check_whole_numbers(x, name, place)


def check_whole_numbers(x: Tensor, name: str, place: str) -> None:
    """Raise ValueError if the tensor ``x`` holds floats, complex numbers or bools, which cannot be token ids."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{place}: {name} are {x.dtype}, and token ids are whole numbers; pass {name}.long()")


def refuse_unsigned(labels: Tensor, place: str) -> None:
    """Raise ValueError for labels of an unsigned dtype, which cannot hold -100, the mark of tokens without a label."""
    if labels.dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        raise ValueError(
            f"{place}: labels are {labels.dtype}, which holds no negative mark such as -100 for tokens without a "
            "label; make labels from tokens.long() before you mark them"
        )


def check_int(name: str, x: object) -> None:
    """Raise ValueError unless ``x``, given as the keyword ``name``, is an int (and not a bool)."""
    if not isinstance(x, int) or isinstance(x, bool):
        raise ValueError(f"{name}= is a whole number; got {named_kind(x)}")


def check_number(name: str, x: object) -> None:
    """Raise ValueError unless ``x``, given as the keyword ``name``, is an int, a float or a bool."""
    if not isinstance(x, int | float):
        raise ValueError(f"{name}= is a number; got {named_kind(x)}")


def check_held(name: str, x: float | int, dtype: torch.dtype, place: str) -> None:
    """Raise ValueError for a number that tensors of ``dtype`` cannot hold: torch would change it, or fail in its words.

    ``name`` is the keyword under which ``place`` takes it. Rounding to a floating-point dtype is allowed.
    """
    if dtype.is_complex:
        return
    if dtype.is_floating_point:
        held, kind = x != x or abs(x) == float("inf") or abs(x) <= torch.finfo(dtype).max, "a number in its range"
    elif dtype == torch.bool:
        held, kind = x in (0, 1), "True or False"
    else:
        limits = torch.iinfo(dtype)
        held, kind = limits.min <= x <= limits.max and x == x // 1, f"a whole number, {limits.min} to {limits.max}"
    if not held:
        raise ValueError(
            f"{place}: {name}={x} does not fit rows of {dtype}, which hold {kind}; pass such a number, or rows of "
            "another dtype"
        )


def check_tensors(given: Mapping[str, object], sinks: object = None) -> None:
    """Raise ValueError unless the tensors ``given``, by name, have two or more dimensions, and a last one above 0.

    ``sinks`` must be a tensor or None.
    """
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-1] == 0:
            raise ValueError(f"{name} is a tensor of this rank's rows, [tokens, ..., size]; got {named_kind(x)}")
    if sinks is not None and not isinstance(sinks, Tensor):
        raise ValueError(f"sinks is a tensor of one number per query head, or None; got {named_kind(sinks)}")


KEYWORDS_OF_OTHERS = {
    "is_causal": "the mask is the plan's, planner(lengths, flexcp.causal())",
    "causal": "the mask is the plan's, planner(lengths, flexcp.causal())",
    "attn_mask": "the mask is the plan's, planner(lengths, mask), with flexcp.window, prefix, from_mask_mod, ...",
    "window_size": "the window is the plan's, planner(lengths, flexcp.window(left, right))",
    "cu_seqlens_q": "documents are the plan's, planner(lengths)",
    "cu_seqlens": "documents are the plan's, planner(lengths)",
    "dropout_p": "it is dropout=, and 0 alone is supported",
    "softmax_scale": "it is scale=",
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
}
"""Keywords of PyTorch's and FlashAttention's functions, and how flexcp expresses the same."""


def refuse_keywords(given: Mapping[str, object]) -> None:
    """Raise TypeError for the first of the keywords ``given``, none of which attention takes, as Python does.

    For a keyword of PyTorch's or FlashAttention's functions, the message names flexcp's equivalent. Without keywords
    nothing happens.
    """
    for name in given:
        way = f": {KEYWORDS_OF_OTHERS[name]}" if name in KEYWORDS_OF_OTHERS else ""
        raise TypeError(f"attention() got an unexpected keyword argument {name!r}{way}")


def check_running(kernel: object, deterministic: object, sm_margin: object, return_lse: object = False) -> None:
    """Raise ValueError if ``kernel``, ``deterministic``, ``sm_margin`` or ``return_lse`` has a wrong type.

    Also raise if ``sm_margin``, how many multiprocessors a kernel leaves free, is below 0.
    """
    if kernel is not None and not isinstance(kernel, str):
        raise ValueError(f"kernel= is the name of a kernel, or None to let flexcp choose; got {named_kind(kernel)}")
    for name, x in (("deterministic", deterministic), ("return_lse", return_lse)):
        if not isinstance(x, bool):
            raise ValueError(f"{name}= is True or False; got {named_kind(x)}")
    if sm_margin is not None:
        check_int("sm_margin", sm_margin)
    if isinstance(sm_margin, int) and sm_margin < 0:
        raise ValueError(f"sm_margin= is how many multiprocessors to leave free, 0 or more; got {sm_margin}")


LEARNABLE = {
    "softcap": "pass softcap=float(softcap), a number that is not trained",
    "scale": "multiply q by it and pass scale=1.0, and its gradient is that of the product",
}
"""The way out for a number of attention that is to be trained."""


def check_call(q: Tensor, others: dict[str, Tensor | None], scale: float | None, softcap: float | None) -> None:
    """Raise ValueError for tensors that are not on q's device, sinks of a wrong shape, and a wrong scale or softcap.

    ``others`` are the other tensors of the call by name, ``"sinks"`` among them if the call has sinks. ``scale`` and
    ``softcap`` must be None or a finite number above 0; one that is to be trained raises NotImplementedError.
    """
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; put them on one device")
    sinks = others.get("sinks")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks holds one number per query head, shape ({q.shape[1]},); got {tuple(sinks.shape)}")
    for name, number in (("softcap", softcap), ("scale", scale)):
        several = isinstance(number, Tensor) and (number.numel() != 1 or number.is_complex())
        if isinstance(number, Tensor) and number.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} is a tensor that requires a gradient, and attention has none for it; {LEARNABLE[name]}"
            )
        if number is not None and (several or not isinstance(number, SupportsFloat)):
            raise ValueError(f"{name} is a number or None; got {named_kind(number)}")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap must be above 0 and finite, or None for none; got {softcap}")
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale must be above 0 and finite, or None for head_dim ** -0.5; got {scale}")


def refuse_meta(device: torch.device) -> None:
    """Raise NotImplementedError for the meta device."""
    if device.type == "meta":
        raise NotImplementedError(
            "the tensors are on the meta device and have no values to attend to; move model and inputs to a CPU or a "
            "GPU (shapes alone are traced by torch.compile, FakeTensorMode and FlopCounterMode)"
        )


def attention_scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of the logits: ``scale``, or ``head_dim ** -0.5`` if it is None."""
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def is_mean(x: Tensor) -> bool:
    """Return whether the last operation that made ``x`` was a mean.

    That is ``mean()`` over all elements, or a torch loss with ``reduction="mean"``.
    """
    # These names are internal to torch; if a release changes them, only this check is lost.
    return type(x.grad_fn).__name__ == "MeanBackward0" or getattr(x.grad_fn, "_saved_reduction", None) == 1


def device_of(given: torch.device | str) -> torch.device:
    """Return the torch device that a user named; raise ValueError if it is none."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"a device is torch.device(...) or its name, such as 'cuda:0'; got {given!r}") from error


def process_group(group: dist.ProcessGroup | DeviceMesh, place: str) -> dist.ProcessGroup:
    """Return the process group that a user passed to ``place``, as a group or as one axis of a DeviceMesh.

    Raise ValueError for anything else, for a mesh with several axes, and on a rank that is not in the group.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    given: object = group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{place} was given a group that this rank, {dist.get_rank()}, is not in: dist.new_group returns a "
            "placeholder on such ranks. Only the group's own ranks may call this"
        )
    if not hasattr(group, "get_group"):
        raise ValueError(f"{place} takes a ProcessGroup or a 1-D DeviceMesh axis such as mesh['cp']; got {group!r}")
    if group.ndim != 1:
        axes = " and ".join(repr(name) for name in group.mesh_dim_names or ()) or "no names"
        raise ValueError(
            f"{place} takes one axis of a DeviceMesh, that of the ranks which share a batch, such as mesh['cp']; got "
            f"all {group.ndim} axes of a mesh ({axes})"
        )
    return group.get_group()


def ranks_of_run() -> int:
    """Return the number of ranks of the default process group, 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def time_limit(timeout: timedelta | float) -> timedelta:
    """Return a time limit given in seconds or as a timedelta.

    Raise ValueError if it is not above 0 or is above :data:`MOST_SECONDS`.
    """
    if isinstance(timeout, timedelta) and timedelta(0) < timeout <= timedelta(seconds=MOST_SECONDS):
        return timeout
    if isinstance(timeout, timedelta) or not is_seconds(timeout):
        raise ValueError(f"timeout= is a timedelta or seconds, above 0 and at most {MOST_SECONDS:,}; got {timeout!r}")
    return timedelta(seconds=float(timeout))
