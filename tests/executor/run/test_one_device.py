"""Proves which memory attention without communication gives to a kernel: uninitialised results only where every row
sees a key and the kernel overwrites its results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.one_device import local_backward, local_forward

X = torch.ones(5, 2, 8, dtype=torch.bfloat16)
V = torch.ones(5, 2, 6, dtype=torch.bfloat16)
ROWS = torch.zeros(5, 2)


@pytest.mark.parametrize(("fresh", "whole"), [(True, True), (True, False), (False, True)])
def test_rows_without_a_key_and_kernels_that_add_start_from_nothing(fresh: bool, whole: bool) -> None:
    """With a kernel that writes nothing, results that it should overwrite may be anything, and those it adds to must be
    zero.
    """
    given: list[bool] = []

    def untouched(*arguments: Any) -> None:
        given.append(next(a for a in arguments if isinstance(a, Settings)).fresh)

    kernel = SimpleNamespace(FRESH=fresh, forward=untouched, backward=untouched)
    types, settings = types_of(X), Settings(0.5)
    out, lse = local_forward(kernel, None, whole, types, settings, X, X, V, rounded=True)
    back = OutputGradient(X, X, None, torch.float32)
    dq, dk, dv = local_backward(kernel, None, whole, types, settings, X, X, V, ROWS, back)
    assert out.shape == (5, 2, 6) and lse.shape == (5, 2)
    assert dq.shape == dk.shape == X.shape and dv.shape == V.shape
    written = fresh and whole
    assert given == [written, written]
    assert out.dtype == dq.dtype == (torch.bfloat16 if written else torch.float32)
    assert dk.dtype == dv.dtype == torch.float32 and not dk.any() and not dv.any()
    if not written:
        assert not out.any() and not dq.any() and bool((lse == -torch.inf).all())


@pytest.mark.parametrize(
    ("whole", "deterministic", "ordered"),
    [(True, False, True), (False, False, True), (True, True, True), (True, False, False)],
)
def test_a_backward_of_the_kernels_own_runs_where_it_may(whole: bool, deterministic: bool, ordered: bool) -> None:
    """The kernel's own whole backward needs every row to see a key, the output in row order, and permission to add in
    any order.
    """
    ran: list[str] = []
    kernel = SimpleNamespace(
        FRESH=True,
        backward=lambda *_: ran.append("backward"),
        backward_alone=lambda *_: ran.append("alone") or (X, X, X),
    )
    back = OutputGradient(X, X, None, torch.float32)
    back = back if ordered else back.in_order(lambda x: x.flip(0))
    local_backward(kernel, None, whole, types_of(X), Settings(0.5, deterministic=deterministic), X, X, X, ROWS, back)
    assert ran == ["alone" if whole and ordered and not deterministic else "backward"]
    assert torch.equal(back.delta, torch.full((5, 2), 8.0))
