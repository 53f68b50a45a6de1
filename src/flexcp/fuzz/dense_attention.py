"""Dense attention: outputs and gradients of a batch in float64 NumPy, from the formulas.

They are computed document by document and head by head:

    s = softcap(q k^T * scale)    p = exp(s - lse)    out = p v            lse = log(sum exp(s) + exp(sink))
    ds = p * (do v^T - rowsum(do * out) + dlse)       dq = ds' k * scale   dk = ds'^T q * scale   dv = p^T do

ds' is ds times the softcap's derivative. The code shares nothing with the kernels, which work in blocks, merge results
and use torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a whole stream: tensors ``[token, head, size]``, and the LSE's gradient ``dlse``, ``[token, head]``.

    ``sinks`` has a logit for each head, or is None.
    """

    q: Floats
    k: Floats
    v: Floats
    do: Floats
    dlse: Floats
    sinks: Floats | None
    softcap: float | None


def dense_attention(x: Inputs, allowed: list[Bools]) -> dict[str, Floats]:
    """Return all results, by name, for documents that lie end to end in the stream.

    ``allowed[d]`` are the pairs of document d, as a boolean matrix ``[query, key]``. The names are ``out``, ``lse``,
    ``dq``, ``dk``, ``dv`` and, with sinks, ``dsinks``.
    """
    heads = x.q.shape[1]
    found = {
        "out": np.zeros((*x.q.shape[:2], x.v.shape[2])),
        "lse": np.full(x.q.shape[:2], -np.inf),
        "dq": np.zeros_like(x.q),
        "dk": np.zeros_like(x.k),
        "dv": np.zeros_like(x.v),
    }
    if x.sinks is not None:
        found["dsinks"] = np.zeros(heads)
    begin = 0
    for pairs in allowed:
        rows = slice(begin, begin + len(pairs))
        for head in range(heads):
            _one_head(x, pairs, rows, head, head * x.k.shape[1] // heads, found)
        begin += len(pairs)
    return found


def _one_head(x: Inputs, pairs: Bools, rows: slice, h: int, g: int, found: dict[str, Floats]) -> None:
    q, k, v, do = x.q[rows, h], x.k[rows, g], x.v[rows, g], x.do[rows, h]
    scale = q.shape[1] ** -0.5
    s = q @ k.T * scale
    slope = np.ones_like(s)
    if x.softcap is not None:
        bounded = np.tanh(s / x.softcap)
        s, slope = x.softcap * bounded, 1 - bounded**2
    sink = -np.inf if x.sinks is None else x.sinks[h]
    s = np.where(pairs, s, -np.inf)
    largest = np.maximum(s.max(axis=1), sink)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    total = np.exp(s - shift[:, None]).sum(axis=1) + np.exp(sink - shift)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    p = np.exp(s - np.where(np.isfinite(lse), lse, 0.0)[:, None])
    out = p @ v
    pull = x.dlse[rows, h] - (do * out).sum(axis=1)
    ds = p * (do @ v.T + pull[:, None]) * slope
    found["out"][rows, h], found["lse"][rows, h] = out, lse
    found["dq"][rows, h] = ds @ k * scale
    found["dk"][rows, g] += ds.T @ q * scale
    found["dv"][rows, g] += p.T @ do
    if x.sinks is not None:
        found["dsinks"][h] += (np.exp(sink - lse) * pull).sum()
