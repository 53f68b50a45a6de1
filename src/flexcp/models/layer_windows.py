"""Layer windows: find which layers of a ``config.json`` have a window, from its ``layer_types`` or from its family."""

from __future__ import annotations

from flexcp.models.config_fields import Fields
from flexcp.models.families import Family

KINDS = ("full_attention", "sliding_attention")
"""The values of ``layer_types`` that are read: causal layers, and layers with a window."""


def layer_windows(fields: Fields, family: Family, layers: int) -> tuple[tuple[int, int], ...]:
    """Return (keys, number of layers) of the layers with a window; empty if there are none.

    ``layers`` is the number of all layers. Raise ValueError if the file is unclear about windows or contradicts the
    family, and NotImplementedError for other kinds of layers.
    """
    keys = fields.count("sliding_window")
    if family.windows == "never":
        fields.agree("sliding_window", None, "no window")
    else:
        _check_window(fields, family, keys)
    kinds = fields.config.get("layer_types")
    if kinds is None:
        kinds = _unwritten(fields, family, layers, keys)
    _check_kinds(fields, kinds, layers)
    if not family.layer_types and kinds != (read := _unwritten(fields, family, layers, keys)):
        raise ValueError(
            f"{fields.file} has layer_types, which models of the type {fields.family!r} do not read: their layers are "
            f"all {read[0]}; take it out of the file, or name a model_type that reads it"
        )
    windows = kinds.count("sliding_attention")
    if windows and family.window_switch and not fields.switch("use_sliding_window", False):
        raise ValueError(
            f"{fields.file} has {windows} window layers in layer_types, but use_sliding_window is not true; make both "
            "say the same"
        )
    if windows and keys is None:
        raise ValueError(f"{fields.file} has {windows} window layers but no sliding_window, the keys that they see")
    return ((keys, windows),) if windows and keys is not None else ()


def _check_window(fields: Fields, family: Family, keys: int | None) -> None:
    """Raise ValueError if the family would use a window although the file does not clearly say so.

    ``keys`` is the ``sliding_window`` of the file.
    """
    on = not family.window_switch or fields.switch("use_sliding_window", False)
    if on and fields.config.get("sliding_window") == 0:
        raise ValueError(f'{fields.file} has sliding_window 0; write "sliding_window": null where layers see all keys')
    missing = "sliding_window" not in fields.config
    if missing and (family.window_asked or (family.window_switch and on)):
        none = "the keys that window layers see" if family.windows == "pattern" else "null if there is none"
        raise ValueError(
            f"{fields.file} has no sliding_window, and models of the type {fields.family!r} have a window by default: "
            "write it into the "
            f'file, "sliding_window": {none}, or save the file with config.save_pretrained(folder)'
        )
    if keys is None and not missing and family.windows == "pattern" and fields.config.get("layer_types") is None:
        raise ValueError(
            f"{fields.file} has sliding_window null, but models of the type {fields.family!r} have window layers "
            "unless layer_types says "
            'otherwise: write "layer_types" with "full_attention" for each layer, or the keys that window layers see'
        )


def _check_kinds(fields: Fields, kinds: object, layers: int) -> None:
    """Raise an error unless ``kinds`` is a list with a known kind for each layer.

    It is NotImplementedError for an unknown kind, and ValueError for anything else.
    """
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"{fields.file}: layer_types must be a list with a kind for each of the {layers} layers")
    unknown = sorted({str(kind)[:40] for kind in kinds if kind not in KINDS})
    if unknown:
        raise NotImplementedError(
            f"{fields.file} has layers of kind {', '.join(unknown)[:200]}; only {' and '.join(KINDS)} are read from a "
            "file"
        )


def _unwritten(fields: Fields, family: Family, layers: int, keys: int | None) -> list[str]:
    """Return the kind of each layer that the family uses for a file without ``layer_types``.

    ``keys`` is the ``sliding_window`` of the file. Raise ValueError if the file does not say which layers have a
    window.
    """
    full, window = KINDS
    if keys is None or family.windows == "never":
        return [full] * layers
    if family.window_switch and not fields.switch("use_sliding_window", False):
        if "use_sliding_window" not in fields.config:
            raise _unsaid(fields, keys, "use_sliding_window")
        return [full] * layers
    if family.windows == "all":
        return [window] * layers
    if family.windows == "pattern":
        every = (fields.count("sliding_window_pattern") if family.every_field else None) or family.every
        last = 0 if family.full_first else every - 1
        return [full if i % every == last else window for i in range(layers)]
    needed = "layer_types" if family.windows == "listed" else "max_window_layers"
    if fields.config.get(needed) is None:
        raise _unsaid(fields, keys, needed)
    first = fields.count(needed) or 0
    return [full if i < first else window for i in range(layers)]


def _unsaid(fields: Fields, keys: int, name: str) -> ValueError:
    """Return the error for a file with a window that lacks the field ``name``, which says for which layers it is."""
    return ValueError(
        f"{fields.file} has sliding_window {keys} but no {name}, of which models of the type {fields.family!r} have a "
        "default: write it, or layer_types, into the file, or save the file with config.save_pretrained(folder)"
    )
