"""Fields: how each part of a plan that is not a table is hashed, saved to a file and read from a file.

``FACTS`` lists these fields. For each it gives the value in ``Plan.header()``, which the hash covers, the value in a
plan file, and the function that checks and reads the latter. The two values differ where old files and hashes must stay
valid, and where the file stores the value elsewhere: document lengths and the rule of every document are columns.

To add a field, add a row here and a field of ``Plan`` or ``Placement``, and use it in ``_plan`` of
:mod:`flexcp.plan.file`. The content of a file version never changes, and a file that lacks a field of its version is
refused, so a new field needs a higher ``VERSION`` there, which its row names as ``since``. Files of earlier versions
are read with the value that means "as before", and the hash leaves the field out when it has that value (as for
``keys_kept``), so that the hashes of old plans do not change. A test reads a stored file of each earlier version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.io.plain_values import flag, integer, items, mapping, text
from flexcp.masks import Mask
from flexcp.masks.mask import TREE
from flexcp.plan.placement import Traffic
from flexcp.shape import Shape

if TYPE_CHECKING:
    from flexcp.plan.plan import Plan

MAX_RANKS = 1 << 14


class Fact(NamedTuple):
    """A field of a plan that is not a table.

    ``hashed`` and ``saved`` give its JSON value in the header (which the hash covers) and in the file, ``read`` checks
    the value from a file and turns it into the field's value; None means that the field is not there. Files have the
    field since version ``since``; files of earlier versions are read with the value ``before``.
    """

    hashed: Callable[[Plan], Any] | None
    saved: Callable[[Plan], Any] | None
    read: Callable[[Any], Any] | None
    since: int = 1
    before: Any = None


def header(plan: Plan) -> dict[str, Any]:
    """Return the fields that the hash of a plan covers, as JSON values."""
    return {name: fact.hashed(plan) for name, fact in FACTS.items() if fact.hashed}


def version_1_header(plan: Plan) -> dict[str, Any]:
    """Return the fields that a hash of version 1 covers: its cost model describes contention in less detail."""
    return {**header(plan), "cost": plan.cost.version_1()}


def saved_facts(plan: Plan) -> dict[str, Any]:
    """Return the fields that a plan file holds, as JSON values."""
    return {name: fact.saved(plan) for name, fact in FACTS.items() if fact.saved}


def read_facts(given: Any, version: int) -> dict[str, Any]:
    """Check and read the fields of a plan file of this version.

    Raise KeyError with the name of a missing field, and ValueError (or another exception of
    :data:`flexcp.plan.file.BROKEN`) for a value that is not possible.
    """
    given = mapping(given, "the facts")
    return {
        name: fact.read(given[name]) if version >= fact.since else fact.before
        for name, fact in FACTS.items()
        if fact.read
    }


def different_rules(plan: Plan) -> list[Mask]:
    """Return the rules (masks of single documents) of a batch, each once, in order of appearance.

    A file refers to a rule by its place in this list.
    """
    return list(dict.fromkeys(rule for mask in plan.batch.masks for rule in mask.rules))


# --- fields that take more than a line --------------------------------------------------------------------------------


def _hashed_masks(plan: Plan) -> list[dict[str, Any]]:
    """Return name, layers and rules of each mask, for the hash."""
    # dataclasses.asdict would copy every number of a tree separately, which is slow.
    return [
        {
            "name": mask.name,
            "layers": mask.layers,
            "rules": [{f.name: getattr(rule, f.name) for f in fields(rule)} for rule in mask.rules],
        }
        for mask in plan.batch.masks
    ]


def _saved_rule(rule: Mask) -> list[Any]:
    """Return the JSON value of a rule: its name, its parameters and its length.

    The segments and ends of a tree are left out: they are columns of the file.
    """
    return [rule.name, rule.params[3:] if rule.name == TREE else rule.params, rule.length]


def _hashed_programs(plan: Plan) -> list[list[list[Any]]]:
    """Return the fields of each program but its tables for the hash, ``[mask][backward]``.

    ``keys_kept`` is added only when it is true, so that plans from before this field keep their hashes.
    """
    return [
        [[p.own_stage, p.stages, list(p.held), *["keys kept"] * p.keys_kept] for p in pair] for pair in plan.programs
    ]


def _saved_programs(plan: Plan) -> list[list[list[Any]]]:
    """Return the fields of each program but its tables for a plan file, ``[mask][backward]``."""
    return [[[p.own_stage, p.stages, p.held, p.keys_kept] for p in pair] for pair in plan.programs]


def _read_programs(given: Any) -> list[list[tuple[int, int, tuple[int, ...], bool]]]:
    """Check and read what :func:`_saved_programs` wrote."""
    return [[_read_program(entry) for entry in items(pair, "a pair of programs")] for pair in items(given, "programs")]


def _read_program(entry: Any) -> tuple[int, int, tuple[int, ...], bool]:
    """Check and read (own stage, stages, held work, keys kept) of one program."""
    own_stage, stages, held, kept = items(entry, "a program")
    shares = tuple(integer(share, "a share of held work") for share in items(held, "held work"))
    if not isinstance(kept, bool):
        raise ValueError(f"keys_kept of a program must be true or false; got {kept!r}")
    return integer(own_stage, "own stage"), integer(stages, "stages"), shares, kept


def _read_cluster(given: Mapping[str, Any]) -> Cluster:
    """Check and read the cluster of a plan file; raise ValueError for more than ``MAX_RANKS`` ranks."""
    text(given["name"], "the cluster's name")
    speeds = tuple(integer(s, "a speed") for s in items(given["speeds"], "speeds"))
    nodes, each = integer(given["nodes"], "nodes"), integer(given["ranks_per_node"], "ranks of a node")
    if nodes * each > MAX_RANKS:
        raise ValueError(f"{nodes} nodes of {each} ranks are more than {MAX_RANKS} ranks")
    return Cluster(**{**given, "speeds": speeds})


def _read_traffic(given: Mapping[str, Any]) -> Traffic:
    """Check and read the traffic of a plan file."""
    kind, relay = text(given["kind"], "the kind of traffic"), flag(given["relay"], "relay")
    if kind not in ("needed", "ring", "gather"):
        raise ValueError(f"no traffic is called {kind!r}")
    groups = tuple(
        tuple(tuple(integer(r, "a rank") for r in items(row, "a row")) for row in items(grid, "a group"))
        for grid in items(given["groups"], "groups")
    )
    return Traffic(kind, groups, relay)


def _read_masks(given: Any) -> list[tuple[str, int]]:
    """Check and read (name, layers) of each mask of a plan file."""
    named = [(text(name, "a mask's name"), integer(layers, "layers")) for name, layers in items(given, "masks")]
    if len({name for name, _ in named}) != len(named):
        raise ValueError("two masks have the same name")
    return named


FACTS: dict[str, Fact] = {
    "hash": Fact(None, lambda plan: plan.hash, lambda given: text(given, "the hash")),
    "shape": Fact(
        lambda plan: {name: value for name, value in asdict(plan.shape).items() if value is not None},
        lambda plan: asdict(plan.shape),
        lambda given: Shape(**mapping(given, "the shape")),
    ),
    "cluster": Fact(
        lambda plan: asdict(plan.cluster),
        lambda plan: asdict(plan.cluster),
        lambda given: _read_cluster(mapping(given, "the cluster")),
    ),
    "cost": Fact(
        lambda plan: asdict(plan.cost),
        lambda plan: plan.cost.to_json(),
        lambda given: CostModel.from_json(mapping(given, "the cost model")),
    ),
    "strategy": Fact(
        lambda plan: plan.requested, lambda plan: plan.requested, lambda given: text(given, "the strategy")
    ),
    "lengths": Fact(lambda plan: plan.batch.lengths.tolist(), None, None),
    "note": Fact(None, lambda plan: plan.placement.note, lambda given: text(given, "the note")),
    # Plans of old files count as plans with a given layout, so that users who cut rows themselves are not warned.
    "layout_given": Fact(
        None, lambda plan: plan.layout_given, lambda given: flag(given, "layout_given"), since=4, before=True
    ),
    "pads": Fact(
        lambda plan: plan.placement.pads, lambda plan: plan.placement.pads, lambda given: integer(given, "pads")
    ),
    "traffic": Fact(
        lambda plan: asdict(plan.placement.traffic),
        lambda plan: asdict(plan.placement.traffic),
        lambda given: _read_traffic(mapping(given, "the traffic")),
    ),
    "assemble_own": Fact(
        lambda plan: plan.placement.assemble_own,
        lambda plan: plan.placement.assemble_own,
        lambda given: flag(given, "assemble_own"),
    ),
    "rules": Fact(
        None,
        lambda plan: [_saved_rule(rule) for rule in different_rules(plan)],
        lambda given: items(given, "rules"),
    ),
    "masks": Fact(_hashed_masks, lambda plan: [[mask.name, mask.layers] for mask in plan.batch.masks], _read_masks),
    "programs": Fact(_hashed_programs, _saved_programs, _read_programs),
}
"""All fields of a plan that are not tables, in the order of the file."""
