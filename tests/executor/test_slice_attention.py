"""Proves flexcp.slice_attention: packed documents and structured masks on one device equal dense attention under
torch's autograd.

Also what compiled models rely on: no graph break, no recompilation when numbers of tokens and slices change, registered
operators that pass torch's own checks; and errors that name the value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flexcp
from flexcp.batch import make_batch
from flexcp.executor.slice_attention import _work
from flexcp.masks import Mask

LENGTHS = [33, 1, 50, 2, 8]
TOKENS = sum(LENGTHS)
HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 4, 2, 8, 6
MASKS: dict[str, Mask] = {
    "causal": flexcp.causal(),
    "full": flexcp.full(),
    "window": flexcp.window(6, 3),
    "lambda": flexcp.masks.lambda_(4, 8),
    "question": flexcp.masks.shared_question(3, 0.3),
    "blockwise": flexcp.masks.causal_blockwise(8, 1),
}


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (HEADS, HEAD_DIM), "k": (KV_HEADS, HEAD_DIM), "v": (KV_HEADS, V_HEAD_DIM)}
    found = {n: torch.randn(tokens, *s, generator=generator, dtype=torch.float64).to(dtype) for n, s in sizes.items()}
    return {n: x.requires_grad_() for n, x in found.items()}


def sinks_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1.0, 2.0, HEADS, dtype=dtype).requires_grad_()


def objective(out: Tensor, lse: Tensor) -> Tensor:
    return (out * torch.cos(torch.arange(out.numel())).view(out.shape)).sum() + (
        lse * torch.linspace(0, 1, lse.shape[1])
    ).sum()


def dense(
    q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~torch.from_numpy(seen), -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(HEADS, len(q), 1)], -1)
    out = torch.einsum("hqk,khv->qhv", torch.softmax(logits, -1)[..., : len(k)], v)
    return out, torch.logsumexp(logits, -1).T


def dense_batch(masks: list[Mask]) -> np.ndarray:
    """Return the packed documents' masks as one dense matrix."""
    seen = np.zeros((TOKENS, TOKENS), bool)
    for mask, start, n in zip(masks, np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        seen[start : start + n, start : start + n] = mask.dense(n)
    return seen


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("extras", [False, True])
def test_packed_documents_equal_dense_attention(kernel: str | None, name: str, extras: bool) -> None:
    given, mask = inputs(), MASKS[name]
    softcap, sinks = (1.7, sinks_of()) if extras else (None, None)
    leaves = [*given.values(), *([sinks] if extras else [])]
    found = flexcp.slice_attention(
        **given, mask=mask, lengths=LENGTHS, softcap=softcap, sinks=sinks, return_lse=True, kernel=kernel
    )
    exact = dense(**given, seen=dense_batch([mask] * len(LENGTHS)), softcap=softcap, sinks=sinks)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    grads, right = (torch.autograd.grad(objective(*results), leaves) for results in (found, exact))
    for a, b in zip(grads, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_every_way_to_say_the_mask_is_the_same() -> None:
    given, rules = inputs(), [MASKS[n] for n in ("causal", "full", "window", "lambda", "question")]
    exact, _ = dense(**given, seen=dense_batch(rules), softcap=None, sinks=None)
    for said in (
        {"mask": rules, "lengths": LENGTHS},
        {"mask": make_batch(LENGTHS, rules)},
        {"mask": flexcp.packed_slices(LENGTHS, rules)},
        {"mask": flexcp.packed_slices(np.array(LENGTHS), rules)},
    ):
        torch.testing.assert_close(flexcp.slice_attention(**given, **said), exact, atol=1e-12, rtol=1e-12)
    alone = flexcp.slice_attention(**given, mask=flexcp.causal())
    whole, _ = dense(**given, seen=flexcp.causal().dense(TOKENS), softcap=None, sinks=None)
    torch.testing.assert_close(alone, whole, atol=1e-12, rtol=1e-12)


def test_packed_slices_are_never_fewer_than_two() -> None:
    """torch.compile would compile separate graphs for sizes 0 and 1."""
    assert flexcp.packed_slices([7], flexcp.causal()).tolist() == [[0, 7, 0, 7, -6, 0], [0] * 6]
    assert flexcp.packed_slices([7], flexcp.from_slices(7, [])).tolist() == [[0] * 6] * 2
    assert len(flexcp.packed_slices([3, 4], flexcp.causal())) == 2


def test_rows_that_see_nothing_are_zero_with_finite_gradients() -> None:
    given = inputs(7)
    out, lse = flexcp.slice_attention(**given, mask=flexcp.from_slices(7, [(2, 4, 0, 7, None, None)]), return_lse=True)
    assert (out[[0, 1, 4, 5, 6]] == 0).all()
    assert (lse[[0, 1, 4, 5, 6]] == -torch.inf).all()
    for grad in torch.autograd.grad(out.sum() + lse[2:4].sum(), list(given.values())):
        assert torch.isfinite(grad).all()
    nothing = flexcp.slice_attention(**given, mask=flexcp.from_slices(7, []))
    assert (nothing == 0).all()


def test_queries_and_keys_may_differ_in_number() -> None:
    given = inputs()
    slices = torch.tensor([[0, 5, 10, 20, -(1 << 40), 1 << 40], [5, 9, 0, 30, -(1 << 40), 1 << 40]])
    seen = np.zeros((9, TOKENS), bool)
    seen[:5, 10:20] = seen[5:, :30] = True
    found = flexcp.slice_attention(given["q"][:9], given["k"], given["v"], slices)
    exact, _ = dense(given["q"][:9], given["k"], given["v"], seen, None, None)
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_one_rank_attention(dtype: torch.dtype) -> None:
    """The results and gradients are bitwise equal."""
    where = flexcp.cluster("cpu", 1, 1)
    name = str(dtype).removeprefix("torch.")
    plan = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, name, where, strategy="dp")(LENGTHS, flexcp.window(9))
    results = []
    for call in (
        lambda **x: flexcp.attention(**x, step=flexcp.bind(plan), return_lse=True, sinks=sinks_of(dtype)),
        lambda **x: flexcp.slice_attention(
            **x, mask=flexcp.window(9), lengths=LENGTHS, return_lse=True, sinks=sinks_of(dtype)
        ),
    ):
        given = inputs(dtype=dtype)
        out, lse = call(**given)
        results.append([out, lse, *torch.autograd.grad(objective(out, lse), list(given.values()))])
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_work_lists_are_made_once_for_all_layers_and_the_backward() -> None:
    given, slices = inputs(), flexcp.packed_slices(LENGTHS, flexcp.window(11, 2))
    before = _work.cache_info().misses
    for _ in range(3):
        flexcp.slice_attention(**given, mask=slices.clone()).sum().backward()
    assert _work.cache_info().misses == before + 1


# --- torch.compile ----------------------------------------------------------------------------------------------------


def model(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, sinks: Tensor) -> Tensor:
    out, lse = flexcp.slice_attention(q * 1.5, k, v, slices, softcap=3.0, sinks=sinks, return_lse=True)
    return objective(torch.tanh(out), lse)


def test_a_compiled_model_has_no_graph_break_and_compiles_twice() -> None:
    """It compiles once for the first sizes and once for dynamic sizes."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in ([33], [40, 7, 3], [5, 5, 5, 5, 9], [100, 2], [17, 60]):
        given, sinks = inputs(sum(lengths)), sinks_of()
        slices = flexcp.packed_slices(lengths, flexcp.causal())
        leaves = [*given.values(), sinks]
        results = []
        for call in (model, compiled):
            loss = call(**given, slices=slices, sinks=sinks)
            results.append([loss, *torch.autograd.grad(loss, leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    assert counter.frame_count == 2


def test_a_mask_object_in_a_compiled_model_is_refused_with_the_way_out() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flexcp.slice_attention(q, k, v, flexcp.causal())

    with pytest.raises(Exception, match=r"packed_slices"):
        torch.compile(call, backend="eager", fullgraph=True)(**inputs())


@pytest.mark.parametrize("sinks", [None, sinks_of()])
def test_the_operators_pass_torchs_checks(sinks: Tensor | None) -> None:
    given = inputs(20)
    arguments = (*given.values(), sinks, flexcp.packed_slices([12, 8], flexcp.causal()), 0.3, 2.0, False, 0, None)
    told = torch.library.opcheck(torch.ops.flexcp.slice_attention_forward.default, arguments)
    assert set(told.values()) == {"SUCCESS"}


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": [TOKENS + 1]}, rf"{TOKENS + 1} tokens.*q has {TOKENS} rows"),
        ({"q": torch.zeros(TOKENS, HEADS, HEAD_DIM)}, r"k is torch.float64 and q torch.float32"),
        ({"k": torch.zeros(TOKENS, KV_HEADS, 9, dtype=torch.float64)}, r"got \(94, 4, 8\), \(94, 2, 9\)"),
        ({"k": torch.zeros(TOKENS, 3, HEAD_DIM, dtype=torch.float64)}, r"\(94, 3, 8\)"),
        (
            {"v": torch.zeros(TOKENS, KV_HEADS * 6, dtype=torch.float64)},
            r"v is \[tokens, heads, head size\]; got shape \(94, 12\)",
        ),
        ({"softcap": 0.0}, r"softcap must be above 0.*got 0\.0"),
        ({"softcap": float("inf")}, r"softcap must be above 0 and finite.*got inf"),
        ({"scale": float("nan")}, r"scale must be above 0 and finite.*got nan"),
        ({"scale": -1.0}, r"scale must be above 0.*got -1\.0"),
        ({"sinks": torch.zeros(3)}, r"shape \(4,\).*got \(3,\)"),
        ({"kernel": "flash"}, r"'flash'"),
        ({"mask": torch.zeros(2, 5, dtype=torch.int64)}, r"int64.*\[slices, 6\].*\(2, 5\)"),
        ({"mask": torch.zeros(2, 6)}, r"int64.*got torch.float32"),
        (
            {"mask": make_batch([94], masks={"all": (flexcp.causal(), 1), "near": (flexcp.window(4), 2)})},
            r"the batch has 2 masks, all, near",
        ),
        (
            {"mask": torch.tensor([[0, 95, 0, 10, -100, 100]] * 2)},
            r"\(0, 95, 0, 10.*94 queries and 94 keys.*packed_slices",
        ),
        ({"mask": torch.tensor([[0, 9, -1, 10, -100, 100]] * 2)}, r"\(0, 9, -1, 10"),
        (
            {"mask": torch.tensor([[0, 9, 0, 9, -100, 0], [8, 20, 3, 20, -100, 0]])},
            r"\(0, 9, 0, 9, -8, 0\) and \(8, 20, 3, 20, -16, 0\) share a \(query, key\) pair",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flexcp.slice_attention(**({**inputs(), "mask": flexcp.causal()} | change))
