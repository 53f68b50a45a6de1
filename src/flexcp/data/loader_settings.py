"""Loader settings: how samples are read, how batches are filled and how they are planned, as three small dataclasses.

    flexcp.data.Loader(
        dataset, planner, budget=131_072, group=mesh["cp"], shuffle=True,
        samples=flexcp.data.Samples(labels="labels"),
        batches=flexcp.data.Batches(too_long="cut"),
        planning=flexcp.data.Planning(workers=2),
    )

Before version 0.2 their fields were arguments of the Loader itself. It still takes these, with a DeprecationWarning
that says the new spelling.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flexcp.io.plain_values import shown
from flexcp.io.setting_checks import check_flag, check_mapping, check_seconds, check_whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from flexcp.data.reading.document_masks import MaskChoice


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What a sample of the dataset holds.

    ``tokens`` and ``labels`` name the fields with token ids and labels. By default token ids are in ``tokens`` or
    ``input_ids``, and each token's label is the next token. A labels field has one label per token, not shifted; the
    loader shifts them. The label ``ignore`` marks tokens that do not count, also for ``batch.step.loss``. Fields named
    in ``document_fields`` belong to the document as a whole, not to its tokens. Where ranks are padded to equal counts,
    the extra token ids are ``pad_token``.

    ``lengths`` (numbers, or a text such as ``"@lengths.txt"``) gives the lengths of a map-style dataset without reading
    it; by default its attribute ``lengths`` is used, if it has one. With known lengths and masks, a rank reads only the
    documents it keeps tokens of (a rank that keeps none of its first batch reads one to learn the fields). Otherwise
    each sample is read once, by one rank, and shared.

    ``mask_fn(sample)`` returns the sample's mask, or several as ``{"name": (mask, layers)}``. ``spans`` (the name of a
    field, or a list with the spans of each document) gives :func:`flexcp.masks.modality` masks; spans are
    ``[(start, end), ...]``, the images of a document.

    ``tree_by`` names a field, such as the number of a prompt; samples with the same value are merged into one tree,
    which holds their common beginnings once. The tree's document has a field ``samples`` with the other fields of each
    sample, in order, and ``stats.tokens_saved`` counts the tokens saved. In a stream, the samples of a tree must follow
    each other. With ``tree_by``, the loader's ``mask`` or ``masks`` must be causal or windows; a window counts the
    tokens of a sequence and not those of other branches. Fewer than ``least_shared`` common tokens are repeated instead
    of shared (:func:`flexcp.tree_of`).
    """

    tokens: str | None = None
    labels: str | None = None
    document_fields: Sequence[str] = ()
    ignore: int = -100
    pad_token: int = 0
    lengths: Sequence[int] | NDArray[np.int64] | str | None = None
    mask_fn: Callable[[Any], MaskChoice] | None = None
    spans: str | Sequence[Any] | None = None
    tree_by: str | None = None
    least_shared: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "labels", "tree_by"):
            _check_field(name, getattr(self, name))
        _check_fields("document_fields", self.document_fields)
        _check_token_id("ignore", self.ignore, "the label of tokens that do not count, a whole number", "-100")
        padding = "the id of the end-of-text token"
        _check_token_id("pad_token", self.pad_token, "the token id of padded rows, a whole number", padding)
        check_whole("least_shared", self.least_shared, "a whole number of tokens, at least 1", 1)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Which documents a batch holds.

    ``too_long`` says what happens to documents of more than ``max_length`` tokens (by default, and at most, the
    loader's budget): ``"refuse"`` raises ValueError, ``"cut"`` keeps their first ``max_length`` tokens, and ``"drop"``
    leaves them out. ``drop_last`` leaves out the last batch of an epoch unless it has exactly as many tokens as the
    budget. With ``micro_batches``, a batch over the planner's caps (``max_tokens_per_rank``, ``max_memory_per_rank``)
    is handed out in several parts, as many on every rank, each a :class:`LocalBatch` with its ``weight``.

    A tree that ``Samples(tree_by=...)`` made and that is too large is cut between its sequences into several trees, and
    ``stats.tokens_repeated`` counts the tokens that these hold more than once. It is too large over ``max_length`` if
    ``too_long="cut"``, and with ``micro_batches`` over ``max_tokens_per_rank`` times the ranks.
    """

    max_length: int | None = None
    too_long: str = "refuse"
    drop_last: bool = False
    micro_batches: bool = False

    def __post_init__(self) -> None:
        if self.max_length is not None:
            check_tokens("max_length", self.max_length)
        check_flag("drop_last", self.drop_last)
        check_flag("micro_batches", self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How steps are planned while earlier ones train.

    ``lookahead`` steps are planned ahead by ``workers`` processes; if either is 0, each step is planned in this process
    when it is needed. With ``share_plans`` each step is planned on one rank for all. By default every rank plans for
    itself, except with the strategies ``hypergraph`` and ``dcp``, which may find different plans on different ranks.
    ``patience`` is how many seconds the training loop waits for a planner process before it plans the step itself,
    ``timeout`` how many seconds it waits for other ranks. ``plan_options`` are arguments for the planner's call
    (``tokens="equal"``, ``pad_to=128``, ``layout=...``). ``cpu_group`` is a gloo group for sharing samples if the
    loader's group is an NCCL group.

    With ``follow_speeds=n``, every n steps the ranks agree on how fast each of them computed, as measured by the
    loader's telemetry, and later steps are planned with these speeds. The corrections are in :meth:`Loader.state_dict`,
    so a loader that loads them makes the same plans.
    """

    lookahead: int = 4
    workers: int = 1
    share_plans: bool | None = None
    plan_options: Mapping[str, Any] | None = None
    patience: float = 120.0
    timeout: float = 600.0
    cpu_group: ProcessGroup | None = None
    follow_speeds: int = 0

    def __post_init__(self) -> None:
        check_whole("lookahead", self.lookahead, "a count of steps, 0 or more", 0)
        check_whole("workers", self.workers, "a count of processes, 0 or more", 0)
        check_flag("share_plans", self.share_plans, None)
        check_mapping("plan_options", self.plan_options, "{'tokens': 'equal'}")
        check_seconds("patience", self.patience)


Part = TypeVar("Part", Samples, Batches, Planning)
KINDS: dict[str, type[Samples] | type[Batches] | type[Planning]] = {
    "samples": Samples,
    "batches": Batches,
    "planning": Planning,
}
OLD_ARGUMENTS = {field.name: part for part, kind in KINDS.items() for field in fields(kind)}
"""Arguments that a Loader took before version 0.2, with the argument that has each as a field now.

``workers`` gives ``"planning"``.
"""


def check_tokens(name: str, value: object) -> None:
    """Raise ValueError unless ``value``, the argument ``name``, is a whole number; it may be 0 or negative."""
    check_whole(name, value, "a whole number of tokens")


def _check_field(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is the name of a field of samples, or None."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is the name of a field of the samples, or None; got {shown(value)}")


def _check_fields(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a collection of names of fields."""
    if isinstance(value, str):
        raise ValueError(f"{name} is a list of names of fields; got {shown(value)}: write {name}=[{shown(value)}]")
    if not isinstance(value, Collection) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"{name} is a list of names of fields of the samples; got {shown(value)}")


def _check_token_id(name: str, value: object, what: str, example: str) -> None:
    """Raise ValueError unless ``value`` is a whole number of 64 bits; for None, name an ``example`` of what to pass.

    Tokenizers without a padding token have the id None for it.
    """
    if value is None:
        raise ValueError(f"{name} is {what}; got None: pass a number, such as {example}")
    check_whole(name, value, what)
    if isinstance(value, int | np.integer) and not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{name} is {what} of 64 bits; got {value}")


def warn_of_old_arguments(old: Collection[str], known: Collection[str], stacklevel: int) -> None:
    """Warn how to write arguments that a Loader took before version 0.2; raise TypeError for a name that it never took.

    ``old`` are the names to check, ``known`` the arguments that a Loader takes today, and ``stacklevel`` is that of
    ``warnings.warn``, so that the warning names the line that made the Loader.
    """
    for name in old:
        if name not in OLD_ARGUMENTS:
            close = difflib.get_close_matches(name, [*known, *OLD_ARGUMENTS], n=1)
            instead = f"; did you mean {_written(close)}?" if close else ""
            raise TypeError(f"Loader has no argument {name!r}{instead}")
    if old:
        warnings.warn(
            f"flexcp.data.Loader({', '.join(f'{name}=...' for name in old)}) is deprecated since flexcp 0.2 and an "
            f"error from 0.4 on; write {_written(old)}",
            DeprecationWarning,
            stacklevel=stacklevel,
        )


def with_old_arguments(part: str, given: Part, old: Mapping[str, Any]) -> Part:
    """Return the settings ``given``, with the values of deprecated arguments that are fields of these settings now.

    ``part`` is the Loader's argument for the settings (``"samples"``, ``"batches"`` or ``"planning"``), and ``old`` are
    the deprecated arguments by name. Raise ValueError if ``given`` is of another class, and TypeError for a value that
    is given both ways.
    """
    if not isinstance(given, KINDS[part]):
        raise ValueError(f"{part}= is made by flexcp.data.{KINDS[part].__name__}(...); got {given!r}")
    mine = {name: value for name, value in old.items() if OLD_ARGUMENTS[name] == part}
    for name in mine:
        if getattr(given, name) is not getattr(type(given)(), name):
            raise TypeError(f"Loader has {name}= twice, alone and in {part}=; drop the one that stands alone")
    return replace(given, **mine)


def _written(names: Collection[str]) -> str:
    """Return how arguments of a Loader are written today, such as ``planning=flexcp.data.Planning(workers=...)``."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(OLD_ARGUMENTS.get(name, ""), []).append(f"{name}=...")
    return ", ".join(
        f"{part}=flexcp.data.{KINDS[part].__name__}({', '.join(given)})" if part else ", ".join(given)
        for part, given in parts.items()
    )
