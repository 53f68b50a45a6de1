"""Candidates: the strategies that ``auto`` may take for a request, each with a time that it cannot be faster than.

- The static methods, every kind in a few degrees, with documents dealt by tokens and, where a degree makes several
  groups, by load. What each takes at least is arithmetic on sums over all documents; a closer bound deals the
  documents, and is found when it is asked for (:mod:`flexcp.planners.static.bounds`).
- The dynamic planners. Another one, or one more argument of one, is a row of :func:`_dynamic`. None of them comes
  closer to perfectly divided compute than 1 / ``NEARLY_PERFECT``, so where a static method is that fast already, none
  is asked.

With a fixed layout only methods that span all ranks can run: ``blocks`` and the static ones without a degree.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flexcp.plan.placement import Placement
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.blocks.blocks import searched_settings as settings_of_blocks
from flexcp.planners.groups.groups import all_groupings, searched_settings
from flexcp.planners.request import Request
from flexcp.planners.static.bounds import Place, StaticBounds, StaticMethod, dealt_by_load, static_methods
from flexcp.planners.static.dealing import deals_by_load
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.step_parts import beyond_layers_ns

PlaceMany = Callable[[Request], list[Placement]]
LEAST_EFFORT = 2
HIGH_EFFORT = 64
TOLERANT = ("blocks", "hypergraph")
"""Planners that keep tolerances. The others balance by their own rule: they are asked without tolerances,
and judged by them.
"""
NEARLY_PERFECT = 128
"""How close to perfectly divided compute a dynamic planner is believed to come: within one part of so many."""

BOUNDS_AT_ONCE = 4
"""Static methods whose close bounds are found together."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy with its argument; ``least_ns`` is what it takes at least,
    ``closer_ns()`` a dearer bound where there is one.

    ``regions`` and ``transfers`` are about how many its plan has, 0 for unknown. ``variant_of`` is the candidate of
    which this one has other settings, and whose price says whether it is worth a look.
    """

    name: str
    place: Place | PlaceMany
    request: Request
    least_ns: int
    closer_ns: Callable[[], int] | None = None
    is_static: bool = False
    regions: int = 0
    transfers: int = 0
    variant_of: str = ""

    @property
    def dealing(self) -> str:
        """How it deals documents to groups: a static one by ``tokens`` or by ``load``; nothing for a dynamic one."""
        if not self.is_static:
            return ""
        return "load" if deals_by_load(self.name) else "tokens"

    def placed(self) -> list[Placement]:
        """Its answers, or it raises :class:`~flexcp.planners.request.Refused`."""
        found = self.place(self.request)
        return found if isinstance(found, list) else [found]


def find_candidates(request: Request, effort: int) -> list[Candidate]:
    """All candidates; of equally fast ones the first is to be taken."""
    # The effort is a count of candidates; each of them is asked for its best.
    asked = replace(request, effort=None)
    return [*_static(asked), *_dynamic(asked, effort)]


def _static(request: Request) -> Iterator[Candidate]:
    plain = replace(request, compute_tolerance=None, token_tolerance=None)
    methods = static_methods(request)
    methods += dealt_by_load(methods, request)
    bounds = StaticBounds(request)
    loose = bounds.loose(methods)
    close = _CloseBounds(bounds, [methods[i] for i in sorted(range(len(methods)), key=loose.__getitem__)])
    for method, bound in zip(methods, loose, strict=True):
        asked = replace(plain, argument=method.request_argument)
        size = method.regions(request.batch.documents), method.transfers(request.ranks)
        yield Candidate(method.name, method.place, asked, bound, partial(close.of, method), True, *size)


class _CloseBounds:
    """Close bounds of static methods, found for a few at a time, in the order in which they are asked for: most of the
    time goes to NumPy calls, which are as many for one method as for several.
    """

    def __init__(self, bounds: StaticBounds, methods: list[StaticMethod]) -> None:
        self.bounds = bounds
        self.left = methods
        self.found: dict[str, int] = {}

    def of(self, method: StaticMethod) -> int:
        """The bound of one method."""
        while method.name not in self.found:
            few, self.left = self.left[:BOUNDS_AT_ONCE], self.left[BOUNDS_AT_ONCE:]
            self.found |= dict(zip((each.name for each in few), self.bounds.close(few), strict=True))
        return self.found[method.name]


def _dynamic(request: Request, effort: int) -> Iterator[Candidate]:
    free = request.layout is None
    rows: list[tuple[str, Place | PlaceMany, str]] = [("blocks", blocks, "")]
    variants: dict[str, str] = {}
    if free and effort > LEAST_EFFORT:
        # Which team size and which settings are faster, events say better than a prediction.
        rows += [("groups", all_groupings, argument) for argument in searched_settings(request)]
        variants = settings_of_blocks(request)
        rows += [("blocks", blocks, argument) for argument in variants]
    if free and effort >= HIGH_EFFORT and importlib.util.find_spec("mtkahypar"):
        from flexcp.planners.hypergraph.hypergraph import hypergraph

        rows.append(("hypergraph", hypergraph, ""))
    perfect = _perfect_ns(request)
    for name, place, argument in rows:
        asked = replace(request, argument=argument)
        if name not in TOLERANT:
            asked = replace(asked, compute_tolerance=None, token_tolerance=None)
        full_name = _full_name(name, argument)
        other = _full_name("blocks", variants[argument]) if argument in variants else ""
        yield Candidate(full_name, place, asked, perfect + perfect // NEARLY_PERFECT, variant_of=other)


def _full_name(name: str, argument: str) -> str:
    return f"{name}:{argument}" if argument else name


def _perfect_ns(request: Request) -> int:
    """Perfectly divided compute, and what the step has beyond its layers where every rank has the same tokens."""
    known = (request.shape, request.cluster, request.cost)
    perfect = lower_bound(request.batch, *known)
    if request.training is None:
        return perfect
    tokens = np.full(request.ranks, request.batch.tokens // request.ranks)
    return perfect + int(beyond_layers_ns(tokens, request.batch.layers, *known, request.training).min())
