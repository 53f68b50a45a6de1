"""Candidates: the strategies that ``auto`` may take for a request, each with a lower bound on its time.

- The static methods, each kind with a few degrees. Documents are distributed to groups by tokens and, if a degree makes
  several groups, also by load. The lower bound is arithmetic on sums over all documents. A closer bound distributes the
  documents, and is computed only when it is needed (:mod:`flexcp.planners.static.bounds`).
- The dynamic planners, and on up to ``MOST_RANKS_OF_OTHERS`` ranks some of other systems (``OTHERS``). To add one, or
  another argument of one, add a row in :func:`_dynamic`. No dynamic planner is expected to come closer to perfectly
  divided compute than 1 / ``NEARLY_PERFECT``. So if a static method is that fast, no dynamic planner is called.

With a fixed layout only methods that span all ranks can run: ``blocks`` and the static methods without a degree.
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
from flexcp.planners.groups.groups import all_groupings, searched_by_keys, searched_settings
from flexcp.planners.published.fcp import fcp
from flexcp.planners.published.hdp import hdp
from flexcp.planners.published.minheap import minheap
from flexcp.planners.request import Request
from flexcp.planners.static.bounds import Place, StaticBounds, StaticMethod, dealt_by_load, static_methods
from flexcp.planners.static.dealing import deals_by_load
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.step_parts import beyond_layers_ns

PlaceMany = Callable[[Request], list[Placement]]
LEAST_EFFORT = 2
"""The least effort: ``blocks`` and one static method."""
HIGH_EFFORT = 64
"""The effort from which on ``hypergraph`` is a candidate."""
OTHERS: dict[str, Place] = {"minheap": minheap, "hdp": hdp, "fcp": fcp}
"""Planners of other systems that are candidates.

They sometimes win with few tokens or few documents a rank, where every cut and every message is felt. They are few, so
they are tried besides what ``effort`` allows.
"""
MOST_RANKS_OF_OTHERS = 32
"""On more ranks they are no candidates: their plans receive much more than those of ``groups`` there, and pricing them
takes long.
"""
TOLERANT = ("blocks", "hypergraph")
"""Planners that keep the user's tolerances.

The others balance by rules of their own: they are called without tolerances, and their placements are checked
afterwards.
"""
NEARLY_PERFECT = 128
"""A dynamic planner is expected to need at least 1/128 more time than perfectly divided compute."""
NEARLY_PERFECT_BY_KEYS = 12
"""The same for ``groups`` whose teams divide keys: it computes rows in more parts and sums up their results."""
OVERPRICED_DYNAMIC = 20
"""How much the closed form may overestimate the time of dynamic plans on several nodes, per mille; that of ``blocks``
is taken as it is (see the lab notes).
"""
OVERPRICED_HEADS = 20
"""How much it may overestimate the time of static methods that split heads, per mille.

By the event simulator, a part of their work may hide a part of the exchange of heads.
"""

BOUNDS_AT_ONCE = 4
"""How many static methods get their close bounds in one call."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy with its argument.

    ``place`` is the strategy's function, which may return several placements, and ``request`` the request for it.
    ``least_ns`` is a lower bound on the time of a step, ``closer_ns()`` one on its price, which is closer but takes
    longer to compute, if there is one. ``regions`` and ``transfers`` are about how many its placement and the backward
    of its plan have, 0 if unknown. ``variant_of`` names the candidate of which this one has other settings, and whose
    price says whether it is worth trying. ``overpriced`` is how much its price may be above the simulated time, per
    mille of the price. ``beyond_effort`` says that it is placed and simulated besides the numbers that are limited, so
    that it takes no other candidate's place.
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
    overpriced: int = 0
    beyond_effort: bool = False

    def optimistic(self, price: int) -> int:
        """Return the least time in nanoseconds that the event simulator may find, for a price or a bound on it."""
        return price - price * self.overpriced // 1000

    @property
    def dealing(self) -> str:
        """How it distributes documents to groups: "tokens" or "load" for a static method, "" for a dynamic one."""
        if not self.is_static:
            return ""
        return "load" if deals_by_load(self.name) else "tokens"

    def placed(self) -> list[Placement]:
        """Return its placements; raise :class:`~flexcp.planners.request.Refused` if it cannot serve the request."""
        found = self.place(self.request)
        return found if isinstance(found, list) else [found]


def find_candidates(request: Request, effort: int) -> list[Candidate]:
    """Return all candidates of ``auto`` for a request, the static ones first.

    ``effort`` is that of ``auto``: ``groups``, settings of ``blocks`` and planners of other systems need more than
    ``LEAST_EFFORT``, ``hypergraph`` needs ``HIGH_EFFORT``. Of equally fast candidates, the first is to be taken.
    """
    # Auto's effort is a number of candidates. Each candidate gets its own default effort.
    asked = replace(request, effort=None)
    return [*_static(asked), *_dynamic(asked, effort)]


def _static(request: Request) -> Iterator[Candidate]:
    """Yield the static methods as candidates."""
    plain = replace(request, compute_tolerance=None, token_tolerance=None)
    methods = static_methods(request)
    methods += dealt_by_load(methods, request)
    bounds = StaticBounds(request)
    loose = bounds.loose(methods)
    close = _CloseBounds(bounds, [methods[i] for i in sorted(range(len(methods)), key=loose.__getitem__)])
    for method, bound in zip(methods, loose, strict=True):
        asked = replace(plain, argument=method.request_argument)
        size = method.regions(request.batch.documents), method.transfers(request.ranks)
        over = OVERPRICED_HEADS if method.split > 1 else 0
        found = Candidate(method.name, method.place, asked, 0, partial(close.of, method), True, *size, overpriced=over)
        yield replace(found, least_ns=found.optimistic(bound))


class _CloseBounds:
    """The closer bounds of static methods, computed for a few methods at a time, in the order of ``methods``.

    Most of their time goes to NumPy calls, whose number does not depend on how many methods there are.
    """

    def __init__(self, bounds: StaticBounds, methods: list[StaticMethod]) -> None:
        self.bounds = bounds
        self.left = methods
        self.found: dict[str, int] = {}

    def of(self, method: StaticMethod) -> int:
        """Return the closer bound of one method, in nanoseconds."""
        while method.name not in self.found:
            few, self.left = self.left[:BOUNDS_AT_ONCE], self.left[BOUNDS_AT_ONCE:]
            self.found |= dict(zip((each.name for each in few), self.bounds.close(few), strict=True))
        return self.found[method.name]


def _dynamic(request: Request, effort: int) -> Iterator[Candidate]:
    """Yield the dynamic planners as candidates, as far as ``effort`` and the layout allow."""
    free = request.layout is None
    rows: list[tuple[str, Place | PlaceMany, str, int]] = [("blocks", blocks, "", NEARLY_PERFECT)]
    variants: dict[str, str] = {}
    if free and effort > LEAST_EFFORT:
        # All settings are candidates, because the event simulator compares them better than the closed form.
        rows += [("groups", all_groupings, argument, NEARLY_PERFECT) for argument in searched_settings(request)]
        rows += [("groups", all_groupings, argument, NEARLY_PERFECT_BY_KEYS) for argument in searched_by_keys(request)]
        variants = settings_of_blocks(request)
        rows += [("blocks", blocks, argument, NEARLY_PERFECT) for argument in variants]
        if request.ranks <= MOST_RANKS_OF_OTHERS:
            rows += [(name, place, "", NEARLY_PERFECT) for name, place in OTHERS.items()]
    if free and effort >= HIGH_EFFORT and importlib.util.find_spec("mtkahypar"):
        from flexcp.planners.hypergraph.hypergraph import hypergraph

        rows.append(("hypergraph", hypergraph, "", NEARLY_PERFECT))
    perfect = _perfect_ns(request)
    for name, place, argument, nearly in rows:
        asked = replace(request, argument=argument)
        if name not in TOLERANT:
            asked = replace(asked, compute_tolerance=None, token_tolerance=None)
        full_name = _full_name(name, argument)
        other = _full_name("blocks", variants[argument]) if argument in variants else ""
        over = OVERPRICED_DYNAMIC if name != "blocks" and request.cluster.nodes > 1 else 0
        found = Candidate(full_name, place, asked, perfect + perfect // nearly, variant_of=other, overpriced=over)
        yield replace(found, beyond_effort=name in OTHERS)


def _full_name(name: str, argument: str) -> str:
    return f"{name}:{argument}" if argument else name


def _perfect_ns(request: Request) -> int:
    """Return the nanoseconds of a step whose compute is divided perfectly over the ranks.

    If the request describes a step, this includes its parts outside the layers, for ranks with equal tokens.
    """
    known = (request.shape, request.cluster, request.cost)
    perfect = lower_bound(request.batch, *known)
    if request.training is None:
        return perfect
    tokens = np.full(request.ranks, request.batch.tokens // request.ranks)
    return perfect + int(beyond_layers_ns(tokens, request.batch.layers, *known, request.training).min())
