"""Layer masks: find out which of a plan's masks a layer uses.

An attention call names its mask, or gives its window as model configurations do: the number of keys that a query sees,
itself included, or 0 for a layer without a window. A window must belong to one of the plan's masks; otherwise the call
raises ValueError, because another mask would silently train another model. For the same reason a call that gives
neither is allowed only if the plan has one mask.
"""

from __future__ import annotations

from flexcp.batch import Batch, LayerMask
from flexcp.masks import NO_LIMIT, Mask, causal
from flexcp.masks import window as window_mask
from flexcp.masks import window_of_tree as _left_of_tree
from flexcp.masks.mask import TREE


class MissingMaskError(ValueError):
    """No mask of the plan has the name or the window of a layer; ``what`` is the message without its way out."""

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(f"{what}; {way_out}")
        self.what = what


def mask_number(batch: Batch, name: str | None, window: int | None) -> int:
    """Return the index in ``batch.masks`` of the mask with this name or window; without either, of the only mask.

    ``window`` is the number of keys that a query sees, itself included, or 0 for a layer without a window. Raise
    ValueError if no mask, or more than one, is meant, or if both name and window are given.
    """
    if window is None:
        if name is None and len(batch.masks) > 1:
            raise ValueError(
                f"this plan has several masks, {_listed(batch)}: say which one a layer uses by "
                f"mask={batch.masks[0].name!r} and so on, or by window=..., the keys a query sees"
            )
        if name is not None and all(name != mask.name for mask in batch.masks):
            one = len(batch.masks) == 1
            raise MissingMaskError(
                f"no mask named {name!r} in this plan, which has {'one, ' if one else ''}{_listed(batch)}",
                "leave mask= out" if one else "name one of them",
            )
        return batch.masks.index(batch.mask(name))
    if name is not None:
        raise ValueError(f"a layer's mask is given by its name or its window; got mask={name!r} and window={window}")
    found = [mask for mask in batch.masks if _has_window(mask, window, batch)]
    if not found:
        raise _missing(batch, window)
    if len(found) > 1:
        raise ValueError(
            f"{_called(window)} could be {' or '.join(repr(m.name) for m in found)} of this plan; say which by mask=..."
        )
    return batch.masks.index(found[0])


def checked_name(name: str | None) -> str | None:
    """Return ``name``, or raise ValueError if it is neither a string nor None.

    A call selects one of the plan's masks by name, and cannot pass a mask of its own.
    """
    if name is not None and not isinstance(name, str):
        raise ValueError(f"mask= is the name of one of the plan's masks, as masks={{...}} gave it; got {name!r}")
    return name


def checked_window(window: int | None) -> int | None:
    """Return a layer's window, limited to what an integer argument of a torch operator can hold.

    Configurations write huge numbers for "no limit". Raise ValueError unless the window is None or an int of at least
    0.
    """
    if window is not None and (not isinstance(window, int) or window < 0):
        raise ValueError(f"window= is how many keys a query sees, itself included, or 0 for all; got {window!r}")
    return None if window is None else min(window, NO_LIMIT + 1)


def _has_window(mask: LayerMask, window: int, batch: Batch) -> bool:
    """Return whether ``mask`` fits a layer with this window.

    Every document must have that window. A layer without a window (0) takes a mask if at least one document has a rule
    that hides no distant keys. A plan's only mask also fits if it is causal and no document is longer than the window.
    """
    if window == 0:
        return not all(_is_window(rule) for rule in mask.rules)
    if all(
        _left_of_tree(rule) == window - 1 if rule.name == TREE else rule == window_mask(window - 1)
        for rule in mask.rules
    ):
        return True
    # In documents no longer than the window, a causal mask is the same; accept it if it is the plan's only mask.
    return len(batch.masks) == 1 and int(batch.lengths.max()) <= window and all(r == causal() for r in mask.rules)


def _is_window(rule: Mask) -> bool:
    """Return whether the mask of a document hides distant keys, as windows, chunks and trees with a window do."""
    if rule.name == TREE:
        return _left_of_tree(rule) is not None
    return rule.name == "chunked" or (rule.name == "window" and rule != causal())


def _called(window: int) -> str:
    """Return a description of a layer with this window, for messages."""
    return f"a layer with a window of {window} keys" if window else "a layer without a window"


def _listed(batch: Batch) -> str:
    """Return the names and rules of the plan's masks, for messages."""
    return ", ".join(
        f"{mask.name!r} ({', '.join(str(rule) for rule in dict.fromkeys(mask.rules))})" for mask in batch.masks
    )


def _missing(batch: Batch, window: int) -> MissingMaskError:
    """Return the exception for a window that no mask of the plan has."""
    wanted = f"flexcp.window({window - 1})" if window else "flexcp.causal()"
    return MissingMaskError(
        f"{_called(window)} has no mask in this plan, which has {_listed(batch)}",
        "plan with masks={'full': (flexcp.causal(), layers), 'window': (flexcp.window(keys - 1), layers)}, here "
        f"{wanted}; a tree takes its window by flexcp.tree(..., left=keys - 1)",
    )
