"""Shape: the head counts and sizes of an attention layer, the kinds of pieces that travel, and their exact bytes.

A piece is a run of tokens of the rank that keeps them (the *owner*), a range of heads, and a kind. Inputs travel from
the owner to the rank that computes with them; outputs travel back and are reduced on the way:

    forward    q, kv  ->  compute  ->  o (with its LSE)
    backward   q, do (with LSE and delta), kv  ->  compute  ->  dq, dkv

Query-sided kinds count query heads, key-sided kinds KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number of each supported dtype."""


class Kind(IntEnum):
    """What a piece of a message holds: queries, keys and values, outputs, or the gradient of one of these."""

    Q = 0
    KV = 1
    O = 2  # noqa: E741 - the field's name for the attention output
    DO = 3
    DQ = 4
    DKV = 5


QUERY_SIDED = (Kind.Q, Kind.O, Kind.DO, Kind.DQ)
"""Kinds that belong to rows and count query heads."""
OUTPUTS = (Kind.O, Kind.DQ, Kind.DKV)
"""Kinds that are results of attention; they travel to the rank that keeps the tokens."""
IS_OUTPUT = np.isin(np.arange(len(Kind)), OUTPUTS)
"""``IS_OUTPUT[kind]`` is whether a kind is an output; indexing with a column of kinds is faster than ``np.isin``."""


@dataclass(frozen=True)
class Field:
    """One of the tensors that a piece consists of.

    ``name`` is the tensor's name in the executor. ``width`` names the field of :class:`Shape` with the size of its last
    dimension; None means one number per token and head.
    """

    name: str
    width: str | None
    precise: bool | None
    """True: always in the accumulator's dtype. False: always in the model's. None: in the accumulator's if partial.

    A partial piece is a result that has still to be added to others.
    """

    def numbers(self, shape: Shape) -> int:
        """Return how many numbers the tensor holds per token and head."""
        return int(getattr(shape, self.width)) if self.width else 1


FIELDS: dict[Kind, tuple[Field, ...]] = {
    Kind.Q: (Field("q", "head_dim", False),),
    Kind.KV: (Field("k", "head_dim", False), Field("v", "v_head_dim", False)),
    Kind.O: (Field("out", "v_head_dim", None), Field("lse", None, True)),
    Kind.DO: (Field("do", "v_head_dim", False), Field("lse", None, True), Field("delta", None, True)),
    Kind.DQ: (Field("dq", "head_dim", None),),
    Kind.DKV: (Field("dk", "head_dim", None), Field("dv", "v_head_dim", None)),
}
"""The tensors that a piece of each kind consists of."""
LARGEST_SIZE = 2**16
"""The largest number of heads and size of a head; with any size, costs would not fit 64 bits."""


@dataclass(frozen=True)
class Shape:
    """An attention layer: query heads, KV heads, size of a key head and of a value head, dtype of activations.

    ``latent`` is for multi-latent attention: the numbers per token that travel in place of the keys and values of all
    heads. There is then one KV head, and the head sizes are those of the heads that are expanded from the latent.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "bfloat16"
    latent: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
                raise ValueError(f"{name} must be an integer from 1 to {LARGEST_SIZE:,}; got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads; got {self.heads} heads and {self.kv_heads} KV heads"
            )
        if self.latent is not None:
            if not isinstance(self.latent, int) or not 1 <= self.latent <= LARGEST_SIZE:
                raise ValueError(
                    f"latent is how many numbers per token travel, from 1 to {LARGEST_SIZE:,}, or None; got "
                    f"{self.latent!r}"
                )
            if self.kv_heads != 1:
                raise ValueError(
                    f"a latent of {self.latent} stands for the keys of all heads: kv_heads must be 1; got "
                    f"{self.kv_heads}"
                )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}; got {self.dtype!r}")

    @property
    def queries_per_key(self) -> int:
        """The number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of one number of a partial result, an LSE or a delta."""
        return 8 if self.dtype == "float64" else 4

    def divides_over(self, parts: int) -> bool:
        """Return whether heads can be divided over ``parts`` ranks.

        Each has as many query heads, and KV heads of its own, or one that as many ranks share as any other.
        """
        return self.heads % parts == 0 and (self.kv_heads % parts == 0 or parts % self.kv_heads == 0)

    def kv_range(self, h0: Ints, h1: Ints) -> tuple[Ints, Ints]:
        """Return the range of KV heads that the query heads ``h0 <= h < h1`` read."""
        return h0 // self.queries_per_key, -(-h1 // self.queries_per_key)

    def bytes_per_token_head(self) -> Ints:
        """Return the bytes per token and head of a piece, as a table ``[kind, partial]``, with 1 for partial results.

        Heads are query heads, or KV heads for keys, values and their gradients.
        """
        return _bytes_per_token_head(self)


@cache
def _bytes_per_token_head(shape: Shape) -> Ints:
    """Compute the table of :meth:`Shape.bytes_per_token_head`."""
    e, acc = shape.element_bytes, shape.accumulator_bytes
    d, dv = shape.head_dim, shape.v_head_dim
    kv = shape.latent or d + dv
    table = np.zeros((len(Kind), 2), np.int64)
    table[Kind.Q] = e * d
    table[Kind.KV] = e * kv
    table[Kind.O] = e * dv + acc, acc * dv + acc
    table[Kind.DO] = e * dv + 2 * acc
    table[Kind.DQ] = e * d, acc * d
    table[Kind.DKV] = e * kv, acc * kv
    table.flags.writeable = False
    return table
