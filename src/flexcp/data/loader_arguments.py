"""Loader arguments: check the planner, dataset and masks given to a Loader before anything is read.

Error messages name the wrong argument and what to pass instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flexcp.data.reading.document_masks import Masks
from flexcp.executor.arguments import named_kind
from flexcp.masks import Mask, causal, public_name


def check_planner(planner: Any) -> None:
    """Raise ValueError if ``planner`` cannot be called, for example because dataset and planner were exchanged."""
    if not callable(planner):
        raise ValueError(
            f"Loader(dataset, planner, ...) takes the planner second: flexcp.Planner(...); got {named_kind(planner)}"
        )


def check_dataset(dataset: Any) -> None:
    """Raise ValueError if ``dataset`` is no collection of samples, but for example a text or a mapping of columns."""
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "Loader(dataset, planner, ...) takes the dataset first, samples to be read by number or one after the "
            f"other; got {named_kind(dataset)}"
        )
    if isinstance(dataset, str):
        raise ValueError(f"a dataset holds samples of token ids, and {dataset!r} is a text; read and tokenize it first")
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise ValueError(
            f"dataset is a mapping with the keys {sorted(map(str, dataset))[:8]}, and samples are read by their "
            "number: pass a list of samples, such as [{'input_ids': ids} for ids in columns['input_ids']], or "
            "datasets.Dataset.from_dict(columns)"
        )


def check_telemetry(telemetry: Any) -> None:
    """Raise ValueError unless ``telemetry`` is None or watches steps."""
    watches = all(hasattr(telemetry, name) for name in ("planning", "binding"))
    if telemetry is not None and (isinstance(telemetry, type) or not watches):
        raise ValueError(f"telemetry= is flexcp.Telemetry(...), or None; got {named_kind(telemetry)}")


def masks_of(mask: Any, masks: Any, mask_fn: Any, spans: Any) -> Masks:
    """Return how documents get their masks, from the Loader's arguments ``mask``, ``masks``, ``mask_fn`` and ``spans``.

    Raise ValueError if more than one is given, except ``mask_fn`` with ``spans`` (``mask_fn`` then makes the masks), or
    if one has a wrong type.
    """
    given = [n for n, v in (("mask", mask), ("masks", masks), ("mask_fn", mask_fn), ("spans", spans)) if v is not None]
    if len(given) > 1 and given != ["mask_fn", "spans"]:
        raise ValueError(
            f"give one of mask, masks, Samples(mask_fn=...) and Samples(spans=...); got {' and '.join(given)}"
        )
    if mask_fn is not None:
        if not callable(mask_fn):
            raise ValueError(f"mask_fn= is a function of a sample that returns its mask; got {named_kind(mask_fn)}")
        return Masks(function=mask_fn)
    if isinstance(spans, str):
        return Masks(spans_field=spans)
    if spans is not None:
        if not hasattr(spans, "__getitem__"):
            raise ValueError(
                f"spans= is the name of a field, or a list with the spans of each document; got {named_kind(spans)}"
            )
        return Masks(spans_by_number=spans)
    if masks is not None:
        _check_masks(masks)
        return Masks(named=masks)
    if mask is None or isinstance(mask, Mask):
        return Masks(one=mask or causal())
    if not _may_be_masks(mask):
        raise ValueError(f"mask= is a mask for all documents, or a list of one for each; {_instead('mask=', mask)}")
    return Masks(by_number=mask)


def _check_masks(masks: Any) -> None:
    """Raise ValueError unless ``masks`` is a mapping of names to (mask or list of masks, number of layers)."""
    wanted = "masks= is {'name': (mask, layers)}, with how many layers use each mask"
    if not isinstance(masks, Mapping):
        raise ValueError(f"{wanted}; got {named_kind(masks)}")
    if not masks:
        raise ValueError(f"{wanted}; got none")
    for name, value in masks.items():
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ValueError(f"{wanted}; got {value!r} for {name!r}: write {name!r}: (flexcp.causal(), 2) for 2 layers")
        mask, layers = value
        if not isinstance(layers, int | np.integer) or isinstance(layers, bool) or layers < 1:
            raise ValueError(f"{wanted}; got {layers!r} layers for {name!r}: pass a whole number of 1 or more")
        if not isinstance(mask, Mask) and not _may_be_masks(mask):
            raise ValueError(f"{wanted}; {_instead(f'{name!r}: (', mask, f', {layers})')}")


def _may_be_masks(given: Any) -> bool:
    """Return whether ``given`` may be a list of masks; each mask is checked later, together with its document."""
    return hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, str | Mapping)


def _instead(before: str, given: Any, after: str = "") -> str:
    """Return the end of an error message for a value that is no mask: what it is, and what to write instead.

    ``before`` and ``after`` are the code to show before and after the mask, such as ``mask=``.
    """
    if isinstance(given, int):
        return (
            f"got {given!r}: for a window of {given} keys before each token write {before}flexcp.window({given}){after}"
        )
    if callable(given):
        called = getattr(given, "__name__", "causal")
        return (
            f"got the function {called}: call it, {before}{public_name(given)}(...){after}, "
            "or pass a function of the sample as samples=flexcp.data.Samples(mask_fn=...)"
        )
    return f"got {given!r}: write {before}flexcp.causal(){after}, or another of flexcp's masks"
