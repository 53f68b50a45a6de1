"""Proves the kernels ``cpu`` and ``reference`` against a separate dense float64 attention under torch's autograd.

Compares outputs, LSE and all gradients, with softcap, grouped heads, a value head of another size, several slices over
the same rows, results accumulated over calls, rows without keys, and inputs that are views of some heads of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexcp.executor.kernels import Settings, accumulator_dtype, cpu, find_kernel, has_triton, merge, reference, stock

KERNELS = {"cpu": cpu, "reference": reference}
FAR = 1 << 40

# Trimmed slices over 48 queries and 56 keys.
SLICES: dict[str, list[tuple[int, ...]]] = {
    "everything": [(0, 48, 0, 56, -FAR, FAR)],
    "causal": [(0, 48, 0, 48, -47, 0)],
    "causal across a shift": [(0, 48, 0, 56, -47, 8)],
    "band": [(2, 48, 0, 50, -5, 2)],
    "one pair": [(7, 8, 55, 56, 48, 48)],
    "strictly upper": [(0, 48, 1, 56, 1, 55)],
    # A window and a sink (the first few keys) over the same rows, and a gap: rows 20..29 see nothing.
    "shared rows": [(0, 20, 0, 20, -3, 0), (4, 20, 0, 4, -19, -4), (30, 48, 10, 56, -20, 8), (30, 40, 0, 5, -39, -26)],
    "nothing": [],
}
HEADS = {"MHA": (3, 3), "GQA": (6, 2), "MQA": (4, 1)}


@dataclass
class Problem:
    """Random inputs and output gradients, and the exact results."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    slices: np.ndarray
    settings: Settings
    exact: dict[str, Tensor]


def seen_pairs(slices: np.ndarray, queries: int, keys: int) -> Tensor:
    """Return which queries see which keys, pair by pair, by the definition of a slice."""
    return _seen_pairs(tuple(map(tuple, slices.tolist())), queries, keys)


@cache
def _seen_pairs(slices: tuple[tuple[int, ...], ...], queries: int, keys: int) -> Tensor:
    def sees(q: int, k: int) -> bool:
        return any(a <= q < b and c <= k < d and lo <= k - q <= hi for a, b, c, d, lo, hi in slices)

    return torch.tensor([[sees(q, k) for k in range(keys)] for q in range(queries)])


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Dense attention, head by head.

    Only rows that see a key are computed, so that autograd never computes -inf minus -inf.
    """
    share = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    rows = torch.nonzero(seen.any(1))[:, 0]
    outs, lses = [], []
    for head in range(q.shape[1]):
        logits = q[rows, head] @ k[:, head // share].T * settings.scale
        if settings.softcap is not None:
            logits = settings.softcap * torch.tanh(logits / settings.softcap)
        logits = logits.masked_fill(~seen[rows], -torch.inf)
        outs.append(torch.softmax(logits, -1) @ v[:, head // share])
        lses.append(torch.logsumexp(logits, -1))
    return out.index_put((rows,), torch.stack(outs, 1)), lse.index_put((rows,), torch.stack(lses, 1))


def make_problem(
    slices: list[tuple[int, ...]],
    heads: tuple[int, int] = (3, 3),
    *,
    sizes: tuple[int, int] = (48, 56),
    dims: tuple[int, int] = (8, 8),
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    generator = torch.Generator().manual_seed(len(slices) + heads[0] * 7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = normal(sizes[0], heads[0], dims[0])
    k, v = normal(sizes[1], heads[1], dims[0]), normal(sizes[1], heads[1], dims[1])
    do, dlse = normal(sizes[0], heads[0], dims[1]), normal(sizes[0], heads[0])
    table = np.array(slices, np.int64).reshape(-1, 6)
    settings = Settings(0.7 * dims[0] ** -0.5, softcap)
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    seen = seen_pairs(table, *sizes)
    out, lse = dense(*leaves, seen, settings)
    objective = (out * do.double()).sum() + (lse[seen.any(1)] * dlse.double()[seen.any(1)]).sum()
    grads = torch.autograd.grad(objective, leaves, allow_unused=True, materialize_grads=True)
    exact = dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))
    return Problem(q, k, v, do, dlse, table, settings, exact)


def solve(kernel: Any, problem: Problem, parts: list[np.ndarray] | None = None) -> dict[str, Tensor]:
    """Run forward over all parts of the slices, then backward over all parts from the complete LSE."""
    p, accumulator = problem, accumulator_dtype(problem.q.dtype)
    out = torch.zeros(p.do.shape, dtype=accumulator)
    lse = torch.full(p.dlse.shape, -torch.inf, dtype=accumulator)
    dq, dk, dv = (torch.zeros(x.shape, dtype=accumulator) for x in (p.q, p.k, p.v))
    sizes = (p.q.shape[1], p.k.shape[1], p.q.shape[2], p.v.shape[2])
    work = [kernel.prepare(part, *sizes, p.q.device) for part in parts or [p.slices]]
    for part in work:
        kernel.forward(p.q, p.k, p.v, part, p.settings, out, lse)
    delta = (p.do.to(accumulator) * out).sum(-1) - p.dlse.to(accumulator)
    for part in work:
        kernel.backward(p.q, p.k, p.v, p.do, lse, delta, part, p.settings, dq, dk, dv)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_equal(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, value in exact.items():
        assert torch.isfinite(found[name]).all() or name == "lse", name
        torch.testing.assert_close(
            found[name].double(), value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("heads", HEADS)
def test_kernel_equals_dense_attention(kernel: str, slices: str, heads: str) -> None:
    problem = make_problem(SLICES[slices], HEADS[heads], dims=(8, 5))
    assert_equal(solve(KERNELS[kernel], problem), problem.exact)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("slices", ["causal", "band", "shared rows"])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_bad_number_stays_with_those_that_see_it(
    kernel: str, slices: str, where: str, bad: float, softcap: float | None
) -> None:
    """Rows and keys without a pair that involves the row of a NaN or infinity give the same results as without it."""
    problem, row = make_problem(SLICES[slices], HEADS["GQA"], softcap=softcap), 17
    clean = solve(KERNELS[kernel], problem)
    tensor = getattr(problem, where).clone()
    tensor[row, -1, 3] = bad
    found = solve(KERNELS[kernel], replace(problem, **{where: tensor}))
    seen = seen_pairs(problem.slices, *problem.exact["out"].shape[:1], problem.k.shape[0])
    query_side = where in ("q", "do")
    touched_rows = torch.arange(len(seen)) == row if query_side else seen[:, row]
    # A row that holds or sees a bad number passes it on to the gradients of all keys that it sees; these pass it on to
    # nobody.
    touched_keys = seen[touched_rows].any(0)
    touched_keys[row] |= not query_side
    assert not found["out"][touched_rows].isfinite().all() or where != "v"
    for name, touched in (
        ("out", touched_rows),
        ("lse", touched_rows),
        ("dq", touched_rows),
        ("dk", touched_keys),
        ("dv", touched_keys),
    ):
        torch.testing.assert_close(found[name][~touched], clean[name][~touched], rtol=0, atol=1e-13, msg=name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_infinite_value_is_infinite_where_it_is_seen(kernel: str) -> None:
    problem = make_problem(SLICES["causal"], (1, 1))
    problem.v[20, 0, 1], problem.v[30, 0, 2], problem.v[40, 0, 1] = torch.inf, -torch.inf, -torch.inf
    out = solve(KERNELS[kernel], problem)["out"][:, 0]
    assert out[:20].isfinite().all() and (out[20:40, 1] == torch.inf).all() and (out[30:, 2] == -torch.inf).all()
    assert out[40:, 1].isnan().all() and out[:, [0, 3]].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_softcap_bounds_the_logits(kernel: str) -> None:
    problem = make_problem(SLICES["shared rows"], HEADS["GQA"], softcap=0.8)
    found = solve(KERNELS[kernel], problem)
    assert_equal(found, problem.exact)
    uncapped = make_problem(SLICES["shared rows"], HEADS["GQA"])
    assert not torch.allclose(found["out"], uncapped.exact["out"], atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_accumulate_over_the_same_rows(kernel: str) -> None:
    problem = make_problem(SLICES["shared rows"], HEADS["GQA"], softcap=2.0)
    one_by_one = [problem.slices[i : i + 1] for i in (2, 0, 3, 1)]
    assert_equal(solve(KERNELS[kernel], problem, one_by_one), problem.exact)
    assert_equal(solve(KERNELS[kernel], problem, [problem.slices[:2], problem.slices[2:]]), problem.exact)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_without_keys_stay_untouched(kernel: str) -> None:
    problem = make_problem(SLICES["shared rows"], HEADS["MHA"])
    found = solve(KERNELS[kernel], problem)
    assert torch.equal(found["out"][20:30], torch.zeros_like(found["out"][20:30]))
    assert torch.equal(found["lse"][20:30], torch.full_like(found["lse"][20:30], -torch.inf))
    assert torch.equal(found["dq"][20:30], torch.zeros_like(found["dq"][20:30]))
    assert torch.isfinite(found["lse"][30:]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_of_heads_write_only_their_heads(kernel: str) -> None:
    """KV head 1 with its query heads 2 and 3, as views into tensors of more heads."""
    problem = make_problem(SLICES["band"], (2, 1), dims=(8, 5))
    p = problem

    def wide(x: Tensor, heads: int, fill: float) -> Tensor:
        return torch.full((x.shape[0], heads, *x.shape[2:]), fill, dtype=x.dtype)

    views, whole = {}, {}
    for name, x, heads, fill in (
        ("q", p.q, 6, 3.0),
        ("k", p.k, 3, 3.0),
        ("v", p.v, 3, 3.0),
        ("do", p.do, 6, 3.0),
        ("out", p.exact["out"], 6, 0.0),
        ("lse", p.exact["lse"], 6, -torch.inf),
        ("dq", p.q, 6, 0.0),
        ("dk", p.k, 3, 0.0),
        ("dv", p.v, 3, 0.0),
    ):
        whole[name] = wide(x, heads, fill)
        views[name] = whole[name][:, 2:4] if heads == 6 else whole[name][:, 1:2]
        if fill == 3.0:
            views[name].copy_(x)
    module = KERNELS[kernel]
    work = module.prepare(p.slices, 2, 1, 8, 5, p.q.device)
    module.forward(views["q"], views["k"], views["v"], work, p.settings, views["out"], views["lse"])
    delta = (views["do"] * views["out"]).sum(-1) - p.dlse
    module.backward(
        *(views[n] for n in ("q", "k", "v", "do", "lse")),
        delta,
        work,
        p.settings,
        views["dq"],
        views["dk"],
        views["dv"],
    )
    assert_equal(views, p.exact)
    for name, untouched in (("out", 0.0), ("lse", -torch.inf), ("dq", 0.0), ("dk", 0.0), ("dv", 0.0)):
        other = [0, 1, 4, 5] if whole[name].shape[1] == 6 else [0, 2]
        assert (whole[name][:, other] == untouched).all(), name


def test_cpu_kernel_over_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of 16 rows every slice spans several tiles, and the edge of a band crosses tiles at all positions."""
    monkeypatch.setattr(cpu, "TILE_LOGITS", 1)
    for name, slices in SLICES.items():
        problem = make_problem(slices, HEADS["GQA"], softcap=1.5 if name == "band" else None)
        tiles = list(cpu._tiles(problem.slices, 6))
        assert name in ("nothing", "one pair") or len(tiles) > len(slices)
        assert name != "everything" or all(band is None for _, _, band in tiles)
        assert_equal(solve(cpu, problem), problem.exact)


@pytest.mark.parametrize("row", [*SLICES["shared rows"], (0, 700, 0, 900, -699, 200), (40, 1000, 0, 900, -50, -30)])
def test_cpu_tiles_read_what_their_rows_see_and_mask_what_a_band_crosses(
    row: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles' rows follow each other without gaps; their keys are all that their rows see.

    Keys run from the first that the tile's first row sees to the last that its last row sees, and no band is applied
    where every row of the tile sees all of these keys.
    """
    q0, q1, k0, k1, lo, hi = row
    for logits in (1, 6 * 100 * 40, 1 << 21):
        monkeypatch.setattr(cpu, "TILE_LOGITS", logits)
        tiles = list(cpu._tiles(np.array([row]), 6))
        assert [tiles[0][0].start, *(rows.stop for rows, _, _ in tiles)] == [*(rows.start for rows, _, _ in tiles), q1]
        assert tiles[0][0].start == q0
        for rows, keys, band in tiles:
            seen = [(max(k0, q + lo), min(k1, q + hi + 1)) for q in range(rows.start, rows.stop)]
            assert (keys.start, keys.stop) == (seen[0][0], seen[-1][1])
            assert (band is None) == (set(seen) == {(keys.start, keys.stop)})
            assert band in (None, (lo + rows.start - keys.start, hi + rows.start - keys.start))


def test_cpu_tiles_have_16_to_256_rows_and_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's height follows from the number of keys that its first row sees, which is 100 for every row here."""
    for logits, rows in ((1, 16), (6 * 100 * 40, 40), (6 * 100 * 41 - 1, 40), (1 << 30, 256)):
        monkeypatch.setattr(cpu, "TILE_LOGITS", logits)
        heights = [tile.stop - tile.start for tile, _, _ in cpu._tiles(np.array([(0, 600, 0, 699, 0, 99)]), 6)]
        assert set(heights[:-1]) == {rows} and sum(heights) == 600


def test_cpu_kernel_over_tiles_of_full_height() -> None:
    problem = make_problem([(0, 300, 0, 310, -299, 10)], (1, 1), sizes=(300, 310), dims=(4, 4))
    assert_equal(solve(cpu, problem), problem.exact)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.06), (torch.float16, 0.008)], ids=str
)
def test_lower_precision_accumulates_in_float32(kernel: str, dtype: torch.dtype, tolerance: float) -> None:
    problem = make_problem(SLICES["shared rows"], HEADS["GQA"], dtype=dtype)
    found = solve(KERNELS[kernel], problem)
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert_equal(found, problem.exact, tolerance)


def test_large_logits_do_not_overflow() -> None:
    for kernel in KERNELS.values():
        problem = make_problem(SLICES["causal"], HEADS["MHA"])
        problem.q.mul_(1e4)
        found = solve(kernel, problem)
        assert torch.isfinite(found["out"]).all()
        assert torch.isfinite(found["dq"]).all()
        seen = seen_pairs(problem.slices, 48, 56)
        out, lse = dense(problem.q, problem.k, problem.v, seen, problem.settings)
        assert_equal(found, {"out": out, "lse": lse}, 1e-9)


def test_dense_mask_is_the_definition_of_a_slice() -> None:
    for slices in SLICES.values():
        table = np.array(slices, np.int64).reshape(-1, 6)
        assert torch.equal(reference.dense_mask(table, 48, 56), seen_pairs(table, 48, 56))


def test_triton_is_there_when_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for: list[str] = []

    def find(name: str, found: object) -> object:
        looked_for.append(name)
        return found

    for found, there in ((object(), True), (None, False)):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: find(name, found))
        assert has_triton.__wrapped__() is there
    assert looked_for == ["triton"] * 2


def test_unknown_kernel_is_refused() -> None:
    assert find_kernel("cpu") is cpu
    assert find_kernel("reference") is reference
    with pytest.raises(ValueError, match=r"'cuda'.*known kernels are cpu, reference, triton, hopper, cute, fa4, stock"):
        find_kernel("cuda")


# --- stock: a dense computation replaces FlashAttention's varlen operator ---------------------------------------------


def seen_by_window(call: stock.Call, rows: int, keys: int) -> Tensor:
    """Return which rows see which keys by FlashAttention's definition of windows.

    In each sequence the last row and the last key are aligned; ``left`` keys before and ``right`` keys after are seen.
    """
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    row_at, key_at = call.rows_at.tolist(), call.keys_at.tolist()
    assert (row_at[-1], key_at[-1]) == (rows, keys)
    assert call.longest_rows == max(b - a for a, b in pairwise(row_at))
    assert call.longest_keys == max(b - a for a, b in pairwise(key_at))
    left, right = (n if n >= 0 else FAR for n in call.window)
    for (q0, k0), (q1, k1) in pairwise(zip(row_at, key_at, strict=True)):
        ahead = (torch.arange(k0, k1) - k1)[None, :] - (torch.arange(q0, q1) - q1)[:, None]
        seen[q0:q1, k0:k1] = (ahead >= -left) & (ahead <= right)
    return seen


def flash_forward(q: Tensor, k: Tensor, v: Tensor, call: stock.Call, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = dense(q, k, v, seen_by_window(call, len(q), len(k)), Settings(scale))
    return out, torch.where(lse == -torch.inf, torch.inf, lse).T


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, call: stock.Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients by FlashAttention's rules: the caller gives the LSE, and delta is rowsum(do * out)."""
    share = q.shape[1] // k.shape[1]
    k_KHD, v_KHV = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k_KHD) * scale
    seen = seen_by_window(call, len(q), len(k))
    p = torch.exp(logits - lse_HT[..., None].to(q.dtype)).masked_fill(~seen, 0.0)
    ds = p * (torch.einsum("qhv,khv->hqk", do, v_KHV) - (do * out).sum(-1).T[..., None]) * scale
    dq, dk = torch.einsum("hqk,khd->qhd", ds, k_KHD), torch.einsum("hqk,qhd->khd", ds, q)
    dv = torch.einsum("hqk,qhv->khv", p, do)
    return dq, *(x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))


@pytest.fixture
def stock_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RAGGED": "cpu",
        "SMALLEST_CALL": 1,
        "attend": flash_forward,
        "attend_backward": flash_backward,
    }.items():
        monkeypatch.setattr(stock, name, value)


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("smallest", [1, 100, 10**9])
def test_stock_splits_slices_between_flash_and_ragged(
    stock_on_cpu: None, monkeypatch: pytest.MonkeyPatch, slices: str, smallest: int
) -> None:
    monkeypatch.setattr(stock, "SMALLEST_CALL", smallest)
    problem = make_problem(SLICES[slices], HEADS["GQA"])
    calls, rest = stock.split(stock.prepare(problem.slices, 6, 2, 8, 8, problem.q.device).slices)
    assert (len(calls) > 0) == (smallest == 1 and slices != "nothing") or smallest == 100
    assert (len(rest) > 0) == (smallest == 10**9 and slices != "nothing") or smallest == 100
    assert_equal(solve(stock, problem), problem.exact, 1e-5)  # the made-up output is float32


def test_stock_lays_documents_of_one_window_into_one_call(stock_on_cpu: None) -> None:
    causal = [(a, b, a, b, a - b + 1, 0) for a, b in ((0, 9), (9, 20), (30, 48))]
    calls, rest = stock.split(np.array(causal, np.int64))
    assert len(rest) == 0
    assert [window for window, _ in calls] == [(-1, 0)]
    problem = make_problem(causal, HEADS["MQA"])
    assert_equal(solve(stock, problem), problem.exact, 1e-5)


@pytest.mark.parametrize(
    ("slices", "calls"),
    [
        ([(0, 9, 0, 12, -FAR, FAR), (9, 20, 12, 20, -FAR, FAR), (30, 48, 20, 56, -FAR, FAR)], 1),
        ([(0, 20, 0, 10, -FAR, FAR), (0, 20, 20, 30, -FAR, FAR)], 2),  # the same rows
        ([(0, 20, 0, 10, -FAR, FAR), (20, 48, 5, 30, -FAR, FAR)], 2),  # the same keys
        ([(0, 20, 20, 40, -FAR, FAR), (20, 48, 0, 10, -FAR, FAR)], 2),  # keys descend
        ([(0, 20, 0, 20, -3, 0), (20, 48, 20, 48, -5, 0)], 2),  # different windows
    ],
)
def test_stock_makes_as_few_calls_as_fit(stock_on_cpu: None, slices: list[tuple[int, ...]], calls: int) -> None:
    problem = make_problem(slices, HEADS["MHA"])
    work = stock.prepare(problem.slices, 3, 3, 8, 8, problem.q.device)
    assert len(work.dense) == calls
    assert_equal(solve(stock, problem), problem.exact, 1e-5)


def test_stock_gives_softcap_and_determinism_to_the_ragged_kernel(stock_on_cpu: None) -> None:
    problem = make_problem(SLICES["shared rows"], HEADS["GQA"], softcap=0.8)
    assert_equal(solve(stock, problem), problem.exact)
    problem = make_problem(SLICES["causal"], HEADS["GQA"])
    problem.settings = replace(problem.settings, deterministic=True)
    found = solve(stock, problem)
    assert_equal({n: found[n] for n in ("dq", "dk", "dv")}, {n: problem.exact[n] for n in ("dq", "dk", "dv")})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stand_in_has_the_given_delta(dtype: torch.dtype) -> None:
    do = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    do[10:20] = 0
    delta = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    delta[15:20] = 0
    changed, out = stock.stand_in(do, delta)
    torch.testing.assert_close((changed.float() * out.float()).sum(-1), delta, atol=1e-3, rtol=4e-3)
    assert torch.equal(changed[:10], do[:10])
    assert torch.equal(changed[15:], do[15:])
    assert changed[10:15].abs().max() <= 1e-3


# --- merge ------------------------------------------------------------------------------------------------------------

NEVER = torch.full((1, 1), -torch.inf, dtype=torch.float64)
ZERO = torch.zeros(1, 1, 2, dtype=torch.float64)
SOME = torch.tensor([[[3.0, -1.0]]], dtype=torch.float64)


def test_merge_of_two_unseen_rows_is_unseen() -> None:
    out, lse = merge(ZERO, NEVER, ZERO, NEVER)
    assert torch.equal(out, ZERO)
    assert torch.equal(lse, NEVER)


@pytest.mark.parametrize("level", [-2000.0, 0.0, 2000.0])
def test_merge_with_an_unseen_row_changes_nothing(level: float) -> None:
    seen = torch.full((1, 1), level, dtype=torch.float64)
    for out, lse in (merge(SOME, seen, ZERO, NEVER), merge(ZERO, NEVER, SOME, seen)):
        assert torch.equal(out, SOME)
        assert torch.equal(lse, seen)


def test_merge_weighs_by_the_softmax_denominators() -> None:
    a = torch.tensor([[np.log(3.0)]])
    b = torch.tensor([[0.0]], dtype=torch.float64)
    out, lse = merge(SOME, a, ZERO, b)
    torch.testing.assert_close(out, SOME * 0.75)
    torch.testing.assert_close(lse, torch.tensor([[np.log(4.0)]]))


def test_merge_of_far_apart_levels_stays_finite() -> None:
    high, low = (torch.full((1, 1), x, dtype=torch.float64) for x in (900.0, -900.0))
    out, lse = merge(SOME, high, 5 * SOME, low)
    assert torch.equal(out, SOME)
    assert torch.equal(lse, high)


def test_merge_of_halves_is_the_whole() -> None:
    problem = make_problem(SLICES["everything"], HEADS["MHA"])
    halves = []
    for keys in ((0, 20), (20, 56)):
        table = np.array([(0, 48, *keys, -FAR, FAR)], np.int64)
        halves += [*dense(problem.q, problem.k, problem.v, seen_pairs(table, 48, 56), problem.settings)]
    out, lse = merge(*halves)
    assert_equal({"out": out, "lse": lse}, {n: problem.exact[n] for n in ("out", "lse")})
