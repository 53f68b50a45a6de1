"""Fields: everything of a plan that is not a table, field by field.

``FACTS`` is the one list of them: what a field is in ``Plan.header()``, which the hash covers, what it is in a plan
file, and how it is read from there, believing nothing. The two differ where a file of version 1 or a hash must stay as
it is, and where the file has the value elsewhere: document lengths and the rule of every document are columns of it.

A new field is a new row here, a field of ``Plan`` or ``Placement``, and its use in ``_plan`` of
:mod:`flexcp.plan.file`. What a file of a version holds never changes, and a file without one of its version's fields is
refused. So a new field raises ``VERSION`` there and names it as ``since``, files of earlier versions, which lack it,
are read with the value that means "as before", and the new field stays out of the hash where it has that value (as
``keys_kept`` does), so that old plans keep theirs. A test reads a kept file of each earlier version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.io.plain_values import flag, integer, items, mapping, text
from flexcp.masks import Mask
from flexcp.plan.placement import Traffic
from flexcp.shape import Shape

if TYPE_CHECKING:
    from flexcp.plan.plan import Plan

MAX_RANKS = 1 << 14


class Fact(NamedTuple):
    """A field: its JSON value in the header and in the file (None: it is not there), and the value of what a file says.

    Files have it since version ``since``; earlier ones are read as if they said ``before``.
    """

    hashed: Callable[[Plan], Any] | None
    saved: Callable[[Plan], Any] | None
    read: Callable[[Any], Any] | None
    since: int = 1
    before: Any = None


def header(plan: Plan) -> dict[str, Any]:
    """The fields that the hash covers."""
    return {name: fact.hashed(plan) for name, fact in FACTS.items() if fact.hashed}


def version_1_header(plan: Plan) -> dict[str, Any]:
    """The fields as a hash of version 1 covered them: the cost model said less of compute beside transfers."""
    return {**header(plan), "cost": plan.cost.version_1()}


def saved_facts(plan: Plan) -> dict[str, Any]:
    """The fields of a plan file."""
    return {name: fact.saved(plan) for name, fact in FACTS.items() if fact.saved}


def read_facts(given: Any, version: int) -> dict[str, Any]:
    """The values of the fields of a plan file of this version; raises KeyError with the name of a missing one."""
    given = mapping(given, "the facts")
    return {
        name: fact.read(given[name]) if version >= fact.since else fact.before
        for name, fact in FACTS.items()
        if fact.read
    }


def different_rules(plan: Plan) -> list[Mask]:
    """The rules of all masks and documents, each once: what a file numbers them by."""
    return list(dict.fromkeys(rule for mask in plan.batch.masks for rule in mask.rules))


# --- what takes more than a line --------------------------------------------------------------------------------------


def _hashed_masks(plan: Plan) -> list[dict[str, Any]]:
    # Not by asdict, which copies every number of a tree by itself.
    return [
        {
            "name": mask.name,
            "layers": mask.layers,
            "rules": [{f.name: getattr(rule, f.name) for f in fields(rule)} for rule in mask.rules],
        }
        for mask in plan.batch.masks
    ]


def _saved_rule(rule: Mask) -> list[Any]:
    """What a file has of a rule beside its columns: a tree's segments and ends are such."""
    return [rule.name, rule.params[3:] if rule.name == "tree" else rule.params, rule.length]


def _hashed_programs(plan: Plan) -> list[list[list[Any]]]:
    """Plans of a time before keys were kept have no word for it, and keep their hashes."""
    return [
        [[p.own_stage, p.stages, list(p.held), *["keys kept"] * p.keys_kept] for p in pair] for pair in plan.programs
    ]


def _saved_programs(plan: Plan) -> list[list[list[Any]]]:
    return [[[p.own_stage, p.stages, p.held, p.keys_kept] for p in pair] for pair in plan.programs]


def _read_programs(given: Any) -> list[list[tuple[int, int, tuple[int, ...], bool]]]:
    return [[_read_program(entry) for entry in items(pair, "a pair of programs")] for pair in items(given, "programs")]


def _read_program(entry: Any) -> tuple[int, int, tuple[int, ...], bool]:
    own_stage, stages, held, kept = items(entry, "a program")
    shares = tuple(integer(share, "a share of held work") for share in items(held, "held work"))
    if not isinstance(kept, bool):
        raise ValueError(f"whether keys are kept is true or false; got {kept!r}")
    return integer(own_stage, "own stage"), integer(stages, "stages"), shares, kept


def _read_cluster(given: Mapping[str, Any]) -> Cluster:
    text(given["name"], "the cluster's name")
    speeds = tuple(integer(s, "a speed") for s in items(given["speeds"], "speeds"))
    nodes, each = integer(given["nodes"], "nodes"), integer(given["ranks_per_node"], "ranks of a node")
    if nodes * each > MAX_RANKS:
        raise ValueError(f"{nodes} nodes of {each} ranks are more than {MAX_RANKS} ranks")
    return Cluster(**{**given, "speeds": speeds})


def _read_traffic(given: Mapping[str, Any]) -> Traffic:
    kind, relay = text(given["kind"], "the kind of traffic"), flag(given["relay"], "relay")
    if kind not in ("needed", "ring", "gather"):
        raise ValueError(f"no traffic is called {kind!r}")
    groups = tuple(
        tuple(tuple(integer(r, "a rank") for r in items(row, "a row")) for row in items(grid, "a group"))
        for grid in items(given["groups"], "groups")
    )
    return Traffic(kind, groups, relay)


def _read_masks(given: Any) -> list[tuple[str, int]]:
    named = [(text(name, "a mask's name"), integer(layers, "layers")) for name, layers in items(given, "masks")]
    if len({name for name, _ in named}) != len(named):
        raise ValueError("two masks of one name")
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
    # Files that do not say it are not doubted: whoever runs their plans is not warned of rows that he cut himself.
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
"""All fields, in the order of the file."""
