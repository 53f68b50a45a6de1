"""Trust, numbers: adversarial values through flexcp's kernels and through torch's own attention on one device, both
compared with float64.

A case is q, k and v of one document. A sample of rows of the output and of dq is computed again in float64, over all
their keys; for short documents, also every row of dk and dv. An error is the largest difference divided by the size of
what was summed (the same sums over absolute values), which does not vanish where terms cancel. flexcp's error may be
twice that of torch's attention (``scaled_dot_product_attention``) plus one rounding. The case *256 merges* runs a work
list for each 256th of the keys and merges all of them into the same rows, as a rank does with results that arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flexcp
from flexcp.executor.kernels import Settings, find_kernel
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.executor.slice_attention import packed_slices
from lib.trust_ranks import Row, Setting, attempted

ROWS, GRADIENT_TOKENS = 64, 4096
"""How many rows are sampled, and the longest document of which dk and dv are checked."""
MERGES = 256
"""The number of merges in the case with merges."""
HEADS, SIZE = 4, 128


def rows(setting: Setting) -> Iterator[Row]:
    """Yield a row for every case in every dtype."""
    dtypes = (torch.float32,) if setting.device == "cpu" else (torch.bfloat16, torch.float16)
    for dtype in dtypes:
        for name, (tokens, change) in _cases(setting.small).items():
            what = f"{name}, {tokens:,} tokens"
            yield attempted(setting, what, 1, partial(_judged, setting, tokens, change, dtype), least=5)
        yield attempted(setting, f"{MERGES} merges", 1, partial(_merged, setting, dtype), least=5)
    yield attempted(setting, "a row of -inf, and NaN", 1, partial(_not_finite, setting), least=5)


Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _cases(small: bool) -> dict[str, tuple[int, Change]]:
    """Return for each case its number of tokens, and a function that makes its q, k and v from normally distributed
    ones.
    """
    short, long = (96, 128) if small else (GRADIENT_TOKENS, 65_536)
    return {
        "normal values": (short, lambda q, k, v: (q, k, v)),
        "large logits": (short, lambda q, k, v: (q * 30, k * 30, v)),
        "equal logits": (short, lambda q, k, v: (q, _repeated(k), v)),
        "equal and large logits": (short, lambda q, k, v: (q * 30, _repeated(k * 30), v)),
        "all logits zero": (short, lambda q, k, v: (torch.zeros_like(q), k, v)),
        "values that cancel": (short, lambda q, k, v: (q, k, v.abs() * _signs(v))),
        "one key above all": (short, lambda q, k, v: (q, torch.cat([k[:1] * 50, k[1:]]), v)),
        "rows of many keys": (long, lambda q, k, v: (q, k, v)),
        "rows of many keys, equal logits": (long, lambda q, k, v: (q, _repeated(k), v)),
    }


def _repeated(x: Tensor) -> Tensor:
    """Return a tensor in which every row is the first row of ``x``."""
    return x[:1].expand_as(x).contiguous()


def _signs(x: Tensor) -> Tensor:
    """Return 1 and -1 alternating from row to row."""
    return 1 - 2 * (torch.arange(len(x), device=x.device) % 2)[:, None, None]


def _made(setting: Setting, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and the gradient of the output with normally distributed values."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    return [
        torch.randn(tokens, HEADS, SIZE, generator=generator, device=setting.device).to(dtype)
        for _ in ("q", "k", "v", "do")
    ]


def _judged(setting: Setting, tokens: int, change: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype) -> Row:
    """Return the row of one case: the errors of flexcp and of torch, and whether flexcp's are small enough."""
    *qkv, do = _made(setting, tokens, dtype)
    qkv = [x.to(dtype) for x in change(*qkv)]
    sample = torch.linspace(0, tokens - 1, min(tokens, ROWS), device=setting.device).long()
    exact, sizes = _exact(qkv, do, sample)
    ours, theirs = (_gradients(call, qkv, do) for call in (_flexcp, _torch))
    names = ["out", "dq", "dk", "dv"][: 4 if tokens <= GRADIENT_TOKENS else 2]
    errors = {
        name: tuple(_error(_picked(found, name, sample), exact[name], sizes[name]) for found in (ours, theirs))
        for name in names
    }
    allowed = torch.finfo(dtype).eps
    ok = all(mine <= 2 * other + allowed for mine, other in errors.values())
    return {"dtype": str(dtype).removeprefix("torch."), "errors": errors, "ok": ok}


def _picked(found: dict[str, Tensor], name: str, sample: Tensor) -> Tensor:
    """Return the sampled rows of the output or dq, and all rows of dk or dv."""
    return found[name][sample] if name in ("out", "dq") else found[name]


def _flexcp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by flexcp's kernel."""
    return _output(q, k, v, flexcp.causal())


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by torch."""
    return _attended(q, k, v, causal=True)


def _attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return torch's attention of one document, ``[tokens, heads, size]``."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)[0].transpose(0, 1)


def _gradients(call: Callable[..., Tensor], qkv: list[Tensor], do: Tensor) -> dict[str, Tensor]:
    """Return the output and the gradients of an attention function."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = call(*leaves)
    return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, do), strict=True))


def _exact(qkv: list[Tensor], do: Tensor, sample: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return causal attention in float64, computed head by head, and the size of what each result is a sum of.

    The results are sampled rows of the output and of dq, and, for short documents, all rows of dk and dv.
    """
    tokens, whole = len(do), len(do) <= GRADIENT_TOKENS
    asked = torch.arange(tokens, device=do.device) if whole else sample
    found: dict[str, list[Tensor]] = {"out": [], "dq": [], "dk": [], "dv": []}
    sizes = dict.fromkeys(found, 1e-30)
    hidden = torch.arange(tokens, device=do.device)[None] > asked[:, None]
    for head in range(HEADS):
        q, k, v, g = (x[:, head].double() for x in (*qkv, do))
        p = torch.softmax((q[asked] @ k.T / math.sqrt(SIZE)).masked_fill(hidden, -torch.inf), 1)
        dp = g[asked] @ v.T
        delta = (p * dp).sum(1, keepdim=True)
        ds, terms = p * (dp - delta) / math.sqrt(SIZE), p * (dp.abs() + delta.abs()) / math.sqrt(SIZE)
        sums = {"out": (p, v, p), "dq": (ds, k, terms), "dk": (ds.T, q[asked], terms.T), "dv": (p.T, g[asked], p.T)}
        for name, (left, right, size) in sums.items():
            if name in ("out", "dq") or whole:
                rows = sample if whole and name in ("out", "dq") else slice(None)
                found[name].append((left @ right)[rows])
                sizes[name] = max(sizes[name], float((size.abs() @ right.abs()).max()))
    return {name: torch.stack(parts, 1) for name, parts in found.items() if parts}, sizes


def _error(found: Tensor, exact: Tensor, size: float) -> float:
    """Return the largest difference divided by ``size``; infinity if a value is not finite."""
    worst = float((found.double() - exact).abs().max()) / size
    return worst if math.isfinite(worst) else math.inf


def _merged(setting: Setting, dtype: torch.dtype) -> Row:
    """Return the row of rows that see every key, computed in ``MERGES`` work lists, compared with torch's attention."""
    keys = 2 * MERGES if setting.small else 64 * MERGES
    q, k, v, _ = _made(setting, keys, dtype)
    q = q[:128].contiguous()
    exact = torch.stack(
        [
            torch.softmax(q[:, h].double() @ k[:, h].double().T / math.sqrt(SIZE), 1) @ v[:, h].double()
            for h in range(HEADS)
        ],
        1,
    )
    name = choose_kernel(q.device, dtype, SIZE, SIZE).kernel
    kernel, settings = find_kernel(name), Settings(SIZE**-0.5)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    statistics = torch.float64 if setting.device == "cpu" else torch.float32
    lse = torch.full(q.shape[:2], -torch.inf, dtype=statistics, device=q.device)
    far = keys + len(q)  # a band so wide that it hides no key
    for part in range(MERGES):
        first, last = part * keys // MERGES, (part + 1) * keys // MERGES
        slices = np.array([[0, len(q), 0, last - first, -far, far]], np.int64)
        work = kernel.prepare(slices, HEADS, HEADS, SIZE, SIZE, q.device)
        kernel.forward(q, k[first:last], v[first:last], work, settings, out, lse)
    other = _attended(q, k, v, causal=False)
    size = float(v.abs().max())
    errors = {"out": (_error(out.to(dtype), exact, size), _error(other, exact, size))}
    ok = errors["out"][0] <= 2 * errors["out"][1] + torch.finfo(dtype).eps
    return {"dtype": str(dtype).removeprefix("torch."), "errors": errors, "ok": ok}


def _not_finite(setting: Setting) -> Row:
    """Return the row of values that are not finite.

    A row without keys must be 0 with an LSE of -inf, NaN in one document must not reach another, and a key of -inf must
    have no effect.
    """
    q, k, v, _ = _made(setting, 64, getattr(torch, setting.dtype))
    out, lse = flexcp.slice_attention(q, k, v, flexcp.from_slices(64, [(8, 64, 0, 64, None, 0)]), return_lse=True)
    empty = bool((out[:8] == 0).all()) and bool((lse[:8] == -torch.inf).all()) and bool(torch.isfinite(out[8:]).all())
    stays = []
    for of in ("k", "v"):
        changed = {"k": k.clone(), "v": v.clone()}
        changed[of][40:] = torch.nan
        two = _output(q, changed["k"], changed["v"], packed_slices([40, 24], flexcp.causal()))
        stays.append(bool(torch.isfinite(two[:40]).all()) and bool(torch.isnan(two[40:]).all()))
    minus = k.clone()
    minus[0] = -torch.inf
    seen = bool(torch.isfinite(_output(q.abs() + 0.1, minus, v, flexcp.causal())[1:]).all())
    told = {
        "rows without a key are 0": empty,
        "NaN keys of a document stay in it": stays[0],
        "NaN values of a document stay in it": stays[1],
        "a key of -inf is not seen": seen,
    }
    return {"dtype": setting.dtype, "why": "; ".join(f"{k}: {v}" for k, v in told.items()), "ok": all(told.values())}


def _output(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Return the output of :func:`flexcp.slice_attention`."""
    found = flexcp.slice_attention(q, k, v, mask)
    assert isinstance(found, Tensor)
    return found
