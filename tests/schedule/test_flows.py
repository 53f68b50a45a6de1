"""Proves flows (bytes from one rank to another): what stays on its rank or has no bytes is not a message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.schedule.flows import Flows, exchange_ns, join_flows


def test_flows_without_bytes_are_no_messages() -> None:
    """A rank without tokens sends nothing, so no other rank pays for the start of its message."""
    machine = replace(cluster("h100", 1, 3), latency_ns=1000)
    found = join_flows([Flows(*np.array([(0, 1, 5), (1, 2, 0), (2, 2, 7)]).T), Flows(*np.zeros((3, 0), np.int64))])
    assert [column.tolist() for column in found] == [[0], [1], [5]]
    assert (exchange_ns(found, machine, CostModel()) > 0).tolist() == [True, True, False]
