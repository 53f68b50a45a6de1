"""The kernel benchmark: our kernels and all other installed ones, on one GPU, in one run.

All contenders of a workload are timed in turns, round after round, so that the chip's clock and temperature are the
same for all. A result is the median over rounds of the mean of a few launches between two events. Only useful work
counts: 4 x pairs x heads x head size forward, 2.5 times that backward. Results are also given as a percentage of the
rate of a large matrix product, measured in the same run.

Ours are the bare kernels (``cute``, ``hopper``, ``triton``) and the whole call (``op``: :func:`flexcp.slice_attention`,
with everything around the kernel). The kernels' results are first compared with float64 on randomly drawn rows and
keys. The other contenders are not checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp import masks
from flexcp.executor.kernels import Settings, find_kernel
from flexcp.executor.kernels.choose import why_not
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.slice_attention import packed_slices, slice_attention
from flexcp.masks import Q0, Q1
from flexcp.measure.kernels.work import WINDOW, Workload, mask_mod, workload

OURS = ("cute", "hopper", "triton", "op")
BASELINES = ("fa4", "cudnn", "flash", "flex", "flexfa4", "varlen")
ALLOWED_ERROR = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
"""The largest error of a kernel's results in each dtype, relative to the largest exact value if that is above 1."""
BACKWARD = 2.5
"""FLOPs of a backward relative to a forward: five matrix products instead of two."""
MATRIX, MATRIX_ROUNDS = 8192, 7
"""Rows of the square matrices whose product is timed beside the kernels, and how often it is timed."""
CHECKED = 64
"""How many random rows, and as many keys, of a kernel's results are checked."""


@dataclass(frozen=True)
class Heads:
    """The numbers of query and KV heads, their size, and the dtype."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def flops(self, pairs: int) -> float:
        """Return the FLOPs of a forward with this many (query, key) pairs."""
        return 4.0 * pairs * self.heads * self.head_dim


@dataclass
class Result:
    """One contender on one workload, or in ``missing`` why it did not run.

    ``forward_ms`` and ``backward_ms`` are milliseconds, ``forward`` and ``backward`` useful TFLOP/s, and ``errors``
    those of the results (our bare kernels only).
    """

    contender: str
    workload: str
    tokens: int
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward: float | None = None
    backward: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    missing: str | None = None


@dataclass(frozen=True)
class Calls:
    """The forward and the backward of a contender, ready to be timed."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]


def bench(
    names: list[str], tokens: int, heads: Heads, contenders: list[str], rounds: int = 7, check: bool = True
) -> list[Result]:
    """Time every contender on every workload of ``names``.

    With ``check``, the results of our bare kernels are compared with float64 first; AssertionError is raised if one is
    wrong.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    results: list[Result] = []
    for name in names:
        work = workload(name, tokens)
        calls: dict[str, Calls] = {}
        found: dict[str, Result] = {}
        for contender in contenders:
            found[contender] = Result(contender, name, tokens)
            made = _calls(contender, work, heads, device)
            if isinstance(made, str):
                found[contender].missing = made
            else:
                calls[contender] = made
                if check and contender in OURS and contender != "op":
                    found[contender].errors = sample_errors(contender, work, heads, device)
        flops = heads.flops(work.pairs())
        for way, times in (("forward", 1.0), ("backward", BACKWARD)):
            for contender, ms in timed({c: getattr(x, way) for c, x in calls.items()}, rounds).items():
                setattr(found[contender], f"{way}_ms", ms)
                setattr(found[contender], way, times * flops / ms / 1e9)
        results += found.values()
        calls.clear()
        torch.cuda.empty_cache()
    return results


def timed(calls: dict[str, Callable[[], Any]], rounds: int, span_ms: float = 40.0) -> dict[str, float]:
    """Return the milliseconds of each call, the median over ``rounds`` rounds in which the calls take turns.

    A turn has as many launches as fill ``span_ms``. A chip lowers its clock under heavy work, and after a light
    contender the clock stays high for some time. Each call therefore runs for three spans before it is timed.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    counts: dict[str, int] = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, round(span_ms / max(1e-3, _milliseconds(call, 2))))
    names = list(calls)
    for number in range(rounds):
        # A different call comes first in every round, and every other round is reversed, so that no two calls always
        # follow each other in the same order.
        first = number % len(names)
        turn = names[first:] + names[:first]
        for name in turn if number % 2 == 0 else turn[::-1]:
            _milliseconds(calls[name], 3 * counts[name])
            samples[name].append(_milliseconds(calls[name], counts[name]))
    return {name: statistics.median(x) for name, x in samples.items()}


def _milliseconds(call: Callable[[], Any], count: int) -> float:
    """Return the mean milliseconds of ``count`` calls on the GPU."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / count


def matrix_rate() -> float:
    """Return the TFLOP/s of a bfloat16 matrix product of two square matrices."""
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATRIX**3 / timed({"product": lambda: a @ b}, MATRIX_ROUNDS)["product"] / 1e9


@dataclass(frozen=True)
class _Tensors:
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def random_tensors(tokens: int, heads: Heads, device: torch.device, seed: int = 0) -> _Tensors:
    """Return random q, k, v and output gradient, ``[tokens, heads, head size]``."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(count: int) -> Tensor:
        size = (tokens, count, heads.head_dim)
        return torch.randn(size, generator=generator, device=device).to(heads.dtype)

    return _Tensors(normal(heads.heads), normal(heads.kv_heads), normal(heads.kv_heads), normal(heads.heads))


def _calls(contender: str, work: Workload, heads: Heads, device: torch.device) -> Calls | str:
    """Return the contender's calls, or why it cannot run; raise ValueError if no contender has this name."""
    if contender == "op":
        return _op_calls(work, random_tensors(work.tokens, heads, device))
    if contender in OURS:
        refusal = why_not(contender, device, heads.dtype, heads.head_dim, heads.head_dim)
        return refusal or our_calls(contender, work.slices(), random_tensors(work.tokens, heads, device), heads)
    makers = {
        "fa4": _fa4_calls,
        "cudnn": _sdpa_calls,
        "flash": _sdpa_calls,
        "flex": _flex_calls,
        "flexfa4": _flex_calls,
        "varlen": _varlen_calls,
    }
    if contender not in makers:
        raise ValueError(f"unknown contender {contender!r}; known are {', '.join((*OURS, *BASELINES))}")
    try:
        return makers[contender](contender, work, random_tensors(work.tokens, heads, device))
    except (RuntimeError, ImportError, NotImplementedError, TypeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def our_calls(name: str, slices: Any, x: _Tensors, heads: Heads, settings: Settings | None = None) -> Calls:
    """Return the forward and backward of our kernel ``name`` on these slices, without the operation around it.

    By default nothing is added to existing results (``fresh``).
    """
    kernel = find_kernel(name)
    settings = settings or Settings(heads.head_dim**-0.5, fresh=True)
    device = x.q.device
    work = kernel.prepare(slices, heads.heads, heads.kv_heads, heads.head_dim, heads.head_dim, x.q.device)
    own = x.q.dtype if settings.fresh else torch.float32
    out = torch.zeros(x.do.shape, dtype=own, device=device)
    lse = torch.full(x.q.shape[:2], -torch.inf, device=device)
    kernel.forward(x.q, x.k, x.v, work, settings, out, lse)
    delta = (out.float() * x.do.float()).sum(-1)
    if settings.fresh and hasattr(kernel, "backward_alone"):
        back = OutputGradient(x.do, out, None, torch.float32)
        return Calls(
            lambda: kernel.forward(x.q, x.k, x.v, work, settings, out, lse),
            lambda: kernel.backward_alone(x.q, x.k, x.v, lse, back, work, settings),
        )
    dq = torch.zeros(x.q.shape, dtype=own, device=device)
    dk, dv = (torch.zeros(t.shape, device=device) for t in (x.k, x.v))
    return Calls(
        lambda: kernel.forward(x.q, x.k, x.v, work, settings, out, lse),
        lambda: kernel.backward(x.q, x.k, x.v, x.do, lse, delta, work, settings, dq, dk, dv),
    )


def _op_calls(work: Workload, x: _Tensors) -> Calls:
    """Return calls of the whole differentiable operation, which does all that the baselines' calls do."""
    slices = packed_slices(work.lengths, work.mask)
    q, k, v = (t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))

    def forward() -> Tensor:
        return slice_attention(q, k, v, slices)  # type: ignore[return-value]

    return _autograd_calls(forward, (q, k, v), x.do)


def _leaves(x: _Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and output gradient as ``[1, heads, tokens, head size]``, of which q, k, v require gradients."""
    q, k, v = (t.transpose(0, 1)[None].contiguous().requires_grad_() for t in (x.q, x.k, x.v))
    return q, k, v, x.do.transpose(0, 1)[None].contiguous()


def _autograd_calls(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], do: Tensor) -> Calls:
    """Return calls of ``forward`` without a graph, and of its backward by autograd."""
    out = forward()

    def without_graph() -> Tensor:
        with torch.no_grad():
            return forward()

    return Calls(without_graph, lambda: torch.autograd.grad(out, inputs, do, retain_graph=True))


def _sdpa_calls(contender: str, work: Workload, x: _Tensors) -> Calls | str:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if work.name not in ("causal", "full"):
        return "dense causal and full only"
    backend = SDPBackend.CUDNN_ATTENTION if contender == "cudnn" else SDPBackend.FLASH_ATTENTION
    q, k, v, do = _leaves(x)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=work.name == "causal", enable_gqa=True
            )

    return _autograd_calls(forward, (q, k, v), do)


def _fa4_calls(contender: str, work: Workload, x: _Tensors) -> Calls | str:
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    q, k, v = (t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))
    if work.name not in ("causal", "full", "window") and work.mask != masks.causal():
        return "causal and full documents and windows only"
    if len(work.lengths) == 1:
        window = (WINDOW - 1, 0) if work.name == "window" else (None, None)
        causal, batch = work.name == "causal", tuple(t[None] for t in (q, k, v))
        return _autograd_calls(
            lambda: _first(flash_attn_func(*batch, causal=causal, window_size=window))[0], (q, k, v), x.do
        )
    borders = torch.tensor(np.cumsum((0, *work.lengths)), dtype=torch.int32, device=x.q.device)
    sizes: dict[str, Any] = {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
    sizes |= {"max_seqlen_q": max(work.lengths), "max_seqlen_k": max(work.lengths)}
    return _autograd_calls(lambda: _first(flash_attn_varlen_func(q, k, v, causal=True, **sizes)), (q, k, v), x.do)


def _first(result: Any) -> Tensor:
    """Return the output of a function that may return (output, LSE)."""
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


def _flex_calls(contender: str, work: Workload, x: _Tensors) -> Calls | str:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # each mask is a new graph, and dynamo gives up on a function after a few graphs
    mod = mask_mod(work, x.q.device)
    tokens = work.tokens
    blocks = None if mod is None else create_block_mask(mod, None, None, tokens, tokens, device=str(x.q.device))
    q, k, v, do = _leaves(x)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    options = {"kernel_options": {"BACKEND": "FLASH"}} if contender == "flexfa4" else {}
    return _autograd_calls(lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True, **options), (q, k, v), do)


def _varlen_calls(contender: str, work: Workload, x: _Tensors) -> Calls | str:
    from torch.nn.attention.varlen import varlen_attn

    if work.mask not in (masks.causal(), masks.full()):
        return "causal and full documents only"
    borders = torch.tensor(np.cumsum((0, *work.lengths)), dtype=torch.int32, device=x.q.device)
    share = x.q.shape[1] // x.k.shape[1]
    # The public function needs as many KV heads as query heads.
    q, k, v = (t.detach().clone().requires_grad_() for t in (x.q, *(t.repeat_interleave(share, 1) for t in (x.k, x.v))))
    longest, window = max(work.lengths), (-1, 0) if work.mask == masks.causal() else (-1, -1)

    def forward() -> Any:
        return varlen_attn(q, k, v, borders, borders, longest, longest, window_size=window)

    return _autograd_calls(forward, (q, k, v), x.do)


def sample_errors(name: str, work: Workload, heads: Heads, device: torch.device) -> dict[str, float]:
    """Return the errors of a kernel's results against float64, on ``CHECKED`` random rows and keys.

    Raise AssertionError if one is larger than ``ALLOWED_ERROR``.
    """
    x = random_tensors(work.tokens, heads, device, seed=1)
    slices, scale, share = work.slices(), heads.head_dim**-0.5, heads.heads // heads.kv_heads
    kernel = find_kernel(name)
    made = kernel.prepare(slices, heads.heads, heads.kv_heads, heads.head_dim, heads.head_dim, device)
    out, lse = torch.zeros(x.q.shape, device=device), torch.full(x.q.shape[:2], -torch.inf, device=device)
    kernel.forward(x.q, x.k, x.v, made, Settings(scale), out, lse)
    delta = (out * x.do.float()).sum(-1)
    dq, dk, dv = (torch.zeros(t.shape, device=device) for t in (x.q, x.k, x.v))
    kernel.backward(x.q, x.k, x.v, x.do, lse, delta, made, Settings(scale), dq, dk, dv)
    errors: dict[str, list[float]] = {n: [] for n in ("out", "lse", "dq", "dk", "dv")}
    at = np.random.default_rng(1).integers(0, work.tokens, CHECKED)
    seen = _seen(slices, at, work.tokens, by_row=True).to(device)
    told = _seen(slices, at, work.tokens, by_row=False).to(device)
    for group in range(heads.kv_heads):
        k, v = (t[:, group].double() for t in (x.k, x.v))
        mine = slice(group * share, (group + 1) * share)
        q, do = (t[:, mine].double() for t in (x.q, x.do))
        s = torch.einsum("rhd,kd->hrk", q[at], k).mul(scale).masked_fill(~seen, -torch.inf)
        exact_lse = torch.logsumexp(s, -1)
        p = torch.exp(s - exact_lse[..., None])
        ds = p * (torch.einsum("rhd,kd->hrk", do[at], v) - delta[at][:, mine].double().T[..., None])
        found = {
            "out": (out[at][:, mine], torch.einsum("hrk,kd->rhd", p, v)),
            "lse": (lse[at][:, mine], exact_lse.T),
            "dq": (dq[at][:, mine], torch.einsum("hrk,kd->rhd", ds, k) * scale),
        }
        s = torch.einsum("rhd,kd->hrk", q, k[at]).mul(scale).masked_fill(~told, -torch.inf)
        p = torch.exp(s - lse[:, mine].double().T[..., None])
        ds = p * (torch.einsum("rhd,kd->hrk", do, v[at]) - delta[:, mine].double().T[..., None])
        found["dk"] = (dk[at, group], torch.einsum("hrk,rhd->kd", ds, q) * scale)
        found["dv"] = (dv[at, group], torch.einsum("hrk,rhd->kd", p, do))
        for n, (got, exact) in found.items():
            errors[n].append(float((got - exact).abs().max() / max(1.0, float(exact.abs().max()))))
    worst = {n: max(e) for n, e in errors.items()}
    if not max(worst.values()) <= ALLOWED_ERROR[heads.dtype]:  # NaN fails too
        raise AssertionError(f"{name} on {work.name} is wrong: {worst}")
    return worst


def _seen(slices: Any, at: Any, tokens: int, by_row: bool) -> Tensor:
    """Return as ``[rows, keys]`` which keys the rows ``at`` see, or without ``by_row`` which rows see the keys ``at``.

    The other axis has all ``tokens`` tokens.
    """
    other = np.arange(tokens)
    q, k = (at[:, None], other[None, :]) if by_row else (other[:, None], at[None, :])
    out = np.zeros(np.broadcast_shapes(q.shape, k.shape), bool)
    for q0, q1, k0, k1, lo, hi in slices[(slices[:, Q0] < slices[:, Q1])].tolist():
        out |= (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return torch.from_numpy(out)


def table(results: list[Result], product: float) -> str:
    """Return the results as a Markdown table; ``product`` is the TFLOP/s of a matrix product.

    Cells are TFLOP/s forward (with the percentage of the matrix product) / backward; the last column is ``op`` over the
    best baseline.
    """
    columns = [c for c in (*OURS, *BASELINES) if any(r.contender == c and r.forward for r in results)]
    lines = ["| tokens | work | " + " | ".join(columns) + " | op / best other |", "| --- " * (3 + len(columns)) + "|"]
    rows: dict[tuple[int, str], dict[str, Result]] = {}
    for r in results:
        rows.setdefault((r.tokens, r.workload), {})[r.contender] = r
    for (tokens, name), by in rows.items():
        cells = []
        for c in columns:
            one = by.get(c)
            if one is None or one.forward is None or one.backward is None:
                cells.append("-")
            else:
                cells.append(f"{one.forward:.0f} ({100 * one.forward / product:.0f} %) / {one.backward:.0f}")
        others = [by[c] for c in BASELINES if c in by and by[c].forward and by[c].backward]
        ratios = [
            (getattr(by["op"], way) or 0) / max(getattr(x, way) for x in others)
            for way in ("forward", "backward")
            if others and "op" in by
        ]
        cells.append(" / ".join(f"{x:.2f}" for x in ratios) or "-")
        lines.append(f"| {tokens:,} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_data(results: list[Result], product: float, heads: Heads) -> dict[str, Any]:
    """Return all results as JSON values, with the machine; ``product`` is the TFLOP/s of a matrix product."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matrix_product_tflops": product,
        "heads": {**asdict(heads), "dtype": str(heads.dtype).removeprefix("torch.")},
        "results": [asdict(r) for r in results],
    }
