"""The cost of what ring-flash-attention does between its kernels: it accumulates in float32 outside FlashAttention.

The operations were counted in its public code (zhuzilin/ring-flash-attention: utils.py, and the modules of ring and
zigzag, batch and varlen) before any figure was simulated with the count. Keys and values are sent from where they are,
so no message is copied. But the result of every step is merged into the accumulated one, in PyTorch. In a zigzag a rank
merges all its rows while keys come from ranks before it in the ring, and the later half of every document's rows
afterwards. A single document is halved by a slice, which is a view. Several documents are halved by a mask on the host:
rows are gathered and put back, and each use of the mask makes the host wait for the device.

Bytes per number of out or dq, of k and v or dk and dv, and per LSE; *m* is the size of the model's dtype, *a* of the
accumulator's:

=================  =====================================================================================================
when               bytes read and written
=================  =====================================================================================================
begin              k and v made contiguous, 2m; several documents: the later half of q gathered, 2m
                   (backward: of dout, q and out)
first step         out to float32, m + a (backward: dq, dk and dv)
all rows           out merged, m + 2a, LSE 3a; backward: dq added, m + 2a, and the first half of dk and dv, m + 2a.
                   Several documents: the first half of k and v gathered, 2m; backward: dk and dv gathered and
                   put back, 4a
later half         the same merge of half of the rows, and put back, 2a; backward: half of dq added,
                   m + 2a, and all of dk and dv.
                   Several documents: out and LSE gathered before, 2a; backward: dq gathered and put back, 4a
end                out rounded, a + m (backward: dq, dk and dv)
=================  =====================================================================================================

The merge is a scripted function, which TorchScript fuses on a GPU into one pass over out. Issue 60 of that repository
agrees: three of the first calls take up to a quarter of a second, as compiling does, and the later ones 0.14 ms.
Without fusion it would read and write 38 bytes a number instead of 10. A plain ring merges all rows in every step that
has work. Bytes move at the speed of copies (:func:`flexcp.simulator.copies.copy_mbps`); every kernel, and every wait of
the host, costs the start of a kernel. The time that Python needs to issue the next kernel after a wait is not published
and not included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.cost import CostModel
from flexcp.plan.plan import Plan
from flexcp.simulator.slot_work import slot_ns, slot_work

Ints = NDArray[np.int64]
METHODS = ("ring", "zigzag")
"""Strategies whose slots are this library's steps."""


@dataclass(frozen=True)
class Price:
    """Bytes read and written, and the number of kernel starts and host waits."""

    size: int = 0
    starts: int = 0

    def __add__(self, other: Price) -> Price:
        return Price(self.size + other.size, self.starts + other.starts)

    def ns(self, mbps: int, kernel_ns: int) -> int:
        return -(-self.size * 1000 // mbps) + self.starts * kernel_ns


@dataclass(frozen=True)
class Merges:
    """A rank's prices; ``out``, ``lse`` and ``kv`` are its numbers of out or dq, of LSE,
    and of k and v or dk and dv.

    ``masked`` tells that documents are halved by a mask; each use of it gathers or puts back, and makes the host wait.
    """

    out: int
    lse: int
    kv: int
    model: int
    accumulator: int
    masked: bool

    def begin(self, backward: bool) -> Price:
        contiguous = Price() if backward else Price(2 * self.model * self.kv, 2)
        return contiguous + self._moved(self.model * self.out // 2, 3 if backward else 1)

    def first(self, backward: bool) -> Price:
        return self._each(self.model + self.accumulator, backward)

    def end(self, backward: bool) -> Price:
        return self._each(self.model + self.accumulator, backward)

    def plain(self, backward: bool) -> Price:
        """Return the price of a step of a plain ring."""
        added = self.model + 2 * self.accumulator
        return self._each(added, True) if backward else Price(added * self.out + 3 * self.accumulator * self.lse, 2)

    def all_rows(self, backward: bool) -> Price:
        """Return the price of a zigzag step with keys from before the rank: all rows see the first half of them."""
        added = self.model + 2 * self.accumulator
        keys = self._moved(self.model * self.kv // 4, 2)
        if not backward:
            return self.plain(False) + keys
        back = self._moved(self.accumulator * self.kv // 4, 4)
        return Price(added * self.out + added * self.kv // 2, 3) + keys + back

    def later_half(self, backward: bool) -> Price:
        """Return the price of a zigzag step with keys from after the rank: half of the rows see all of them."""
        added = self.model + 2 * self.accumulator
        if backward:
            return Price(added * self.out // 2 + added * self.kv, 3) + self._moved(self.accumulator * self.out // 2, 2)
        whole = self.plain(False)
        rows = self.accumulator * (self.out + self.lse) // 2
        merged = Price(whole.size // 2 + 2 * rows, whole.starts + 2)
        # With a slice, putting back is a copy too. A mask also gathers before, and the host waits for both of both
        # tensors.
        return merged + (Price(2 * rows, 2 + 4) if self.masked else Price())

    def _each(self, size: int, backward: bool) -> Price:
        return Price(size * (self.out + self.kv), 3) if backward else Price(size * self.out, 1)

    def _moved(self, size: int, times: int) -> Price:
        """Return the price of ``times`` gathers (or puts) of ``size`` bytes by the mask, each with its wait;
        nothing if a slice does it.
        """
        return Price(2 * size * times, 2 * times) if self.masked else Price()


def is_step_by_step(method: str) -> bool:
    """Return whether a strategy's slots are this library's steps: one of ``METHODS`` with its degree."""
    name, _, degree = method.partition(":")
    return name in METHODS and degree.isdigit()


def with_merges(plan: Plan, cost: CostModel, method: str, mbps: int) -> Callable[[int, bool], Ints]:
    """Return a function that gives compute and merges ``[rank, slot]`` of a mask's pass,
    as ``measured`` of :func:`flexcp.simulator.training.simulate`.
    """
    name, _, degree = method.partition(":")

    def measured(mask: int, backward: bool) -> Ints:
        work = slot_work(plan, mask, backward)
        ns = slot_ns(work, plan, cost, backward)
        for rank in range(plan.ranks):
            merges = _merges(plan, rank, masked=name == "zigzag" and len(plan.batch.lengths) > 1)
            position = rank % int(degree)
            prices = [merges.begin(backward) + merges.first(backward)]
            for step in range(1, int(degree)):
                if not work.kernels[rank, step]:
                    prices.append(Price())
                elif name == "ring":
                    prices.append(merges.plain(backward))
                else:
                    prices.append(merges.all_rows(backward) if step <= position else merges.later_half(backward))
            ns[rank, : len(prices)] += [p.ns(mbps, cost.kernel_ns) for p in prices]
            ns[rank, -1] += merges.end(backward).ns(mbps, cost.kernel_ns)
        return ns

    return measured


def _merges(plan: Plan, rank: int, masked: bool) -> Merges:
    shape, tokens = plan.shape, int(plan.placement.tokens[rank])
    return Merges(
        out=tokens * shape.heads * shape.v_head_dim,
        lse=tokens * shape.heads,
        kv=tokens * shape.kv_heads * (shape.head_dim + shape.v_head_dim),
        model=shape.element_bytes,
        accumulator=shape.accumulator_bytes,
        masked=masked,
    )
