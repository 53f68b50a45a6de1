"""Proves that the list of a plan's fields is complete: a file has all that the plan has, and no field
may be missing.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import flexcp
from flexcp.plan.fields import FACTS, different_rules, header, read_facts, saved_facts
from flexcp.plan.file import VERSION
from flexcp.plan.plan import Plan


def plan() -> Plan:
    masks = {"window": (flexcp.window(99, 0), 3), "full": (flexcp.causal(), 1)}
    return flexcp.Planner(8, 4, 64, cluster=flexcp.cluster("h100", 2, 2), strategy="usp")([700, 31, 260], masks=masks)


def read(made: Plan) -> dict[str, Any]:
    return read_facts(json.loads(json.dumps(saved_facts(made))), VERSION)


def test_what_is_read_is_what_was_saved() -> None:
    made, found = plan(), read(plan())
    assert (found["shape"], found["cluster"], found["cost"]) == (made.shape, made.cluster, made.cost)
    assert (found["hash"], found["strategy"], found["note"]) == (made.hash, made.requested, made.placement.note)
    assert (found["pads"], found["traffic"]) == (made.placement.pads, made.placement.traffic)
    assert (found["assemble_own"], found["layout_given"]) == (made.placement.assemble_own, made.layout_given)
    assert found["masks"] == [(mask.name, mask.layers) for mask in made.batch.masks]
    assert len(found["rules"]) == len(different_rules(made)) == 2
    programs = [[(p.own_stage, p.stages, p.held, p.keys_kept) for p in pair] for pair in made.programs]
    assert found["programs"] == programs


@pytest.mark.parametrize("name", [name for name, fact in FACTS.items() if fact.read])
def test_a_field_that_is_missing_is_named(name: str) -> None:
    facts = saved_facts(plan())
    del facts[name]
    with pytest.raises(KeyError, match=name):
        read_facts(json.loads(json.dumps(facts)), VERSION)


def test_what_is_saved_is_read_and_every_field_is_somewhere() -> None:
    for name, fact in FACTS.items():
        assert (fact.saved is None) == (fact.read is None), name
        assert fact.saved or fact.hashed, name


def test_the_header_has_the_fields_that_it_always_had() -> None:
    """Plan hashes are computed over these keys, so another key would change every plan's hash."""
    keys = {"shape", "cluster", "cost", "strategy", "lengths", "masks", "pads", "traffic", "assemble_own", "programs"}
    assert header(plan()).keys() == keys == plan().header().keys()
