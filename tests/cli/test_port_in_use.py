"""Tests of ports that are in use: ``flexcp accept`` ends with one line that names the port, and local ranks are not
affected, because they ask for a free port.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from flexcp.cli.commands.accept import _store
from flexcp.measure.local_store import joined_store, kept_store


def test_a_store_whose_port_is_taken_is_one_line_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ValueError, match=rf"^rank 0 found no store at 127\.0\.0\.1:{port} within") as found:
            _store(2.0)
    assert "\n" not in str(found.value)


def test_stores_of_local_ranks_take_ports_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store is reached at its own port, although the port that the environment names is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        first, second = kept_store(), kept_store()
        assert len({first.port, second.port, taken.getsockname()[1]}) == 3
        for name, store in (("first", first), ("second", second)):
            store.set("name", name)
        limit = timedelta(seconds=20)
        assert [joined_store(store.port, limit).get("name") for store in (first, second)] == [b"first", b"second"]
