"""Request: everything a planner is told.

A planner is a pure function from a :class:`Request` to a placement (:class:`~flexcp.plan.placement.Placement`), or it
raises :class:`Refused` and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training

if TYPE_CHECKING:
    from flexcp.plan.plan import Plan

Ints = NDArray[np.int64]
MOST_PAIRS = 1 << 61
"""The most (query, key) pairs of a batch over all heads, or over all layers; sums of more overflow 64 bits."""


class Refused(ValueError):  # noqa: N818 - an answer more than an error
    """Raised if a strategy cannot serve a request although another strategy may.

    The reason is a limit, a tolerance, a fixed layout or a number of heads that does not suit the strategy. What no
    strategy would accept, such as an argument that is no number or an effort below 0, is a plain ValueError instead.
    """


@dataclass(frozen=True, eq=False)
class Request:
    """One batch to place, and what the user demands of the placement.

    ``argument`` is what follows the colon in a strategy's name (``"4"`` in ``zigzag:4``). ``layout`` is None if the
    planner places the tokens. Otherwise tokens stay where they are, and ``layout[rank]`` lists the stream indices of
    the tokens that a rank keeps, in its local order.

    ``equal_tokens`` asks for the same number of tokens on every rank, rounded up to a multiple of ``pad_to`` by pads.
    ``priced_tokens`` asks ``blocks`` to balance the sum of attention and the rest of the layer instead of attention and
    tokens separately. ``compute_tolerance`` and ``token_tolerance`` are how far a rank may be above the mean, as
    fractions (0.05 is 5 %); None lets the planner choose what is fastest.

    ``max_tokens_per_rank`` limits the tokens that a rank keeps. ``max_memory_per_rank`` (bytes that attention needs on
    a rank) and ``max_peers`` (other ranks that a rank exchanges messages with) depend on the plan, so strategies other
    than ``auto`` ignore them, and their plans are checked afterwards. ``keep_kv`` is how many bytes of received keys
    and values a rank may keep for the backward, over all layers.

    ``effort`` is how many candidates a strategy evaluates, None for the strategy's own choice. ``training`` describes
    the step whose time counts; None counts the layers alone. Its model is that of ``cost``.
    """

    batch: Batch
    shape: Shape
    cluster: Cluster
    cost: CostModel
    argument: str = ""
    layout: tuple[Ints, ...] | None = None
    equal_tokens: bool = False
    pad_to: int = 1
    compute_tolerance: float | None = None
    token_tolerance: float | None = None
    max_tokens_per_rank: int | None = None
    effort: int | None = None
    max_memory_per_rank: int | None = None
    keep_kv: int = 0
    max_peers: int | None = None
    priced_tokens: bool = False
    training: Training | None = None

    def __post_init__(self) -> None:
        # Most batches have far fewer pairs even if every token saw every key of the longest document.
        most = int(self.batch.lengths.max()) * self.batch.tokens
        if most * max(self.shape.heads, self.batch.layers) > MOST_PAIRS:
            _refuse_more_pairs(self)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.cluster.ranks

    @property
    def most_ahead(self) -> int:
        """The most slots by which messages may be posted before the slot that waits for them.

        A pass runs in slots, in each of which a rank waits for messages, posts later ones and computes. The number is
        2, or 1 if memory is limited, because messages under way take memory. If it is 2, inputs may even be posted all
        at once, before the first slot's work.
        """
        return 2 if self.max_memory_per_rank is None else 1

    @property
    def token_cap(self) -> int | None:
        """The most document tokens a rank may keep, None for no limit.

        It is ``max_tokens_per_rank``, with ``equal_tokens`` rounded down to a multiple of ``pad_to``.
        """
        cap = self.max_tokens_per_rank
        if cap is None or not self.equal_tokens:
            return cap
        return cap // self.pad_to * self.pad_to


def _refuse_more_pairs(request: Request) -> None:
    """Raise ValueError if the batch has more than ``MOST_PAIRS`` over all heads or all layers."""
    batch = request.batch
    documents = np.arange(batch.documents, dtype=np.int64)
    pairs = []
    for mask in batch.masks:
        areas = mask.rows_area(documents, np.zeros_like(documents), batch.lengths)
        # Halves are summed, because the sum may exceed 64 bits.
        pairs.append((int((areas >> 32).sum()) << 32) + int((areas & (1 << 32) - 1).sum()))
    layers = sum(mask.layers * count for mask, count in zip(batch.masks, pairs, strict=True))
    if max(layers, max(pairs) * request.shape.heads) > MOST_PAIRS:
        longest = int(batch.lengths.argmax())
        raise ValueError(
            f"the attention of this batch has more than {MOST_PAIRS:.2g} (query, key) pairs over all heads or layers, "
            f"and so many are not counted: document {longest} has {int(batch.lengths[longest]):,} tokens; divide it, "
            "or give it a mask with fewer pairs, such as a window"
        )


def refuse_over_cap(request: Request) -> None:
    """Raise :class:`Refused` if the batch has more tokens than all ranks together may keep under the token cap."""
    if request.token_cap is None:
        return
    lengths, room = request.batch.lengths, request.token_cap * request.ranks
    limit = f"max_tokens_per_rank={request.max_tokens_per_rank}"
    if request.equal_tokens and request.pad_to > 1:
        limit += f" in multiples of pad_to={request.pad_to}"
    longest = int(lengths.argmax())
    multiple = request.pad_to if request.equal_tokens else 1
    alone, enough = (
        -(-tokens // (request.ranks * multiple)) * multiple for tokens in (int(lengths[longest]), request.batch.tokens)
    )
    if int(lengths[longest]) > room:
        raise Refused(
            f"document {longest} has {int(lengths[longest])} tokens, more than {request.ranks} ranks keep together "
            f"with {limit}; raise the cap to {enough}"
            + (
                f", which all {request.batch.tokens} tokens of the batch need ({alone} if the batch is cut into "
                "micro-batches)"
                if alone < enough
                else ""
            )
            + ", use more ranks, or cut the document"
        )
    if request.batch.tokens > room:
        raise Refused(
            f"{request.batch.tokens} tokens do not fit {request.ranks} ranks with {limit}: at least "
            f"{enough} a rank are needed; "
            "raise the cap, or cut the batch into micro-batches"
        )


def refuse_over_memory(request: Request, plan: Plan) -> None:
    """Raise :class:`Refused` if the plan's attention needs more than ``max_memory_per_rank`` bytes on any rank."""
    cap = request.max_memory_per_rank
    if cap is None:
        return
    most = max((plan.memory(rank) for rank in range(plan.ranks)), key=lambda memory: memory.total)
    if most.total > cap:
        kept = f" + {most.kept_keys} of kept keys" if most.kept_keys else ""
        raise Refused(
            f"attention needs {most.total} bytes on rank {most.rank} (arena {most.arena} + {most.layers} layers x "
            f"{most.saved} saved for the backward{kept} + {most.in_a_pass} in a pass), over "
            f"max_memory_per_rank={cap}; raise the cap, {'lower keep_kv, ' if most.kept_keys else ''}use more ranks, "
            "another strategy, or smaller micro-batches"
        )


def refuse_over_peers(request: Request, plan: Plan) -> None:
    """Raise :class:`Refused` if a rank of the plan exchanges messages with more than ``max_peers`` other ranks."""
    cap = request.max_peers
    if cap is None:
        return
    counts = [len(plan.peers(rank)) for rank in range(plan.ranks)]
    if max(counts) > cap:
        raise Refused(
            f"rank {counts.index(max(counts))} exchanges with {max(counts)} other ranks, over max_peers={cap}; raise "
            "the cap, or use a strategy that keeps documents together (auto, groups, or a static one with a degree "
            "such as zigzag:8)"
        )


def refuse_tolerances(request: Request) -> None:
    """Raise :class:`Refused` if the request has tolerances; for strategies that balance by rules of their own."""
    for name in ("compute_tolerance", "token_tolerance"):
        value = getattr(request, name)
        if value is not None:
            raise Refused(
                f"this strategy balances by its own rule and takes no tolerances; got {name}={value}, use blocks"
            )
