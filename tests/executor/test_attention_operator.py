"""Proves attention as a torch operator: torch's own checks, no graph break, few compilations, masks chosen by a layer's
window, and how long a step is kept alive.

The numbers under compile, recomputation and FSDP2 on several ranks are checked in tests/frameworks.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flexcp
from flexcp.executor import step_handles
from flexcp.executor.step import Step

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def bound(lengths: list[int], mask: Any = None, **options: Any) -> Step:
    where = flexcp.cluster("cpu", 1, 1)
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, dtype="float64", cluster=where, strategy="dp")
    return flexcp.bind(planner(lengths, mask, **options))


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    sizes = ((tokens, HEADS, HEAD_DIM), (tokens, KV_HEADS, HEAD_DIM), (tokens, KV_HEADS, HEAD_DIM))
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes)
    return q, k, v


def model(q: Tensor, k: Tensor, v: Tensor, step: Step, sinks: Tensor) -> Tensor:
    out, lse = flexcp.attention(q * 1.5, k, v, step, softcap=3.0, sinks=sinks, window=0, return_lse=True)
    out = flexcp.attention(torch.tanh(out), k, v, step, window=5)
    return out.sum() + (lse * torch.arange(HEADS)).sum()


MASKS = {"full": (flexcp.causal(), 1), "window": (flexcp.window(4), 1)}


def test_a_compiled_model_has_no_graph_break_and_compiles_twice() -> None:
    """It compiles once for the first sizes and once for dynamic sizes; other steps and plans use the same graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    sinks = torch.linspace(-1.0, 1.0, HEADS, dtype=torch.float64).requires_grad_()
    for lengths in ([33], [40, 7, 3], [5, 5, 5, 9], [100, 2], [17, 60]):
        given, step = inputs(sum(lengths)), bound(lengths, masks=MASKS)
        results = []
        for call in (model, compiled):
            loss = call(*given, step=step, sinks=sinks)
            results.append([loss, *torch.autograd.grad(loss, [*given, sinks])])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
        assert step.calls == 4
    assert counter.frame_count == 2


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()])
def test_the_operator_passes_torchs_checks(sinks: Tensor | None) -> None:
    step = bound([12, 8])
    arguments = (*inputs(20), sinks, step.handle, 0.3, 2.0, False, 0, None, None, None)
    told = torch.library.opcheck(torch.ops.flexcp.attention.default, arguments)
    assert set(told.values()) == {"SUCCESS"}


def test_a_graph_keeps_its_step_and_nobody_else_does() -> None:
    step = bound([6, 3])
    watch = weakref.ref(step)
    out = flexcp.attention(*inputs(9), step)
    del step
    gc.collect()
    assert watch() is not None
    out.sum().backward()
    del out
    gc.collect()
    assert watch() is None


def test_a_step_that_is_gone_is_named() -> None:
    step = bound([4])
    handle = step.handle
    assert step_handles.step_of(handle) is step
    del step
    gc.collect()
    with pytest.raises(RuntimeError, match=r"step of this attention call is gone.*until backward"):
        step_handles.step_of(handle)


def test_a_window_names_the_mask_that_has_it() -> None:
    lengths = [20, 3]
    step, given = bound(lengths, masks=MASKS), inputs(23)
    for window, name in ((0, "full"), (5, "window")):
        assert torch.equal(flexcp.attention(*given, step, window=window), flexcp.attention(*given, step, mask=name))
    with pytest.raises(
        ValueError, match=r"window of 6 keys.*'full' \(causal\), 'window' \(window of 5 keys\).*flexcp\.window\(5\)"
    ):
        flexcp.attention(*given, step, window=6)
    with pytest.raises(ValueError, match=r"mask='full' and window=5"):
        flexcp.attention(*given, step, mask="full", window=5)


def test_a_causal_plan_serves_windows_its_documents_fit_in() -> None:
    step, given = bound([5, 3]), inputs(8)
    assert torch.equal(flexcp.attention(*given, step, window=5), flexcp.attention(*given, step))
    with pytest.raises(ValueError, match=r"window of 4 keys"):
        flexcp.attention(*given, step, window=4)
