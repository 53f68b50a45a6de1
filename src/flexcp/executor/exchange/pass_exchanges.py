"""Pass exchanges: those of a step, one for every pass through attention.

A pass is one direction of one layer. Ranks make the same passes in the same order, so the n-th pass of a step is the
same on all of them; its number travels in the tags of its messages. Ranks of a step that broke off in a pass no longer
agree on anything, so it has no next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist

from flexcp.executor.exchange.collectives import Collectives
from flexcp.executor.exchange.rank_calls import AS_PLANNED, Call, CallSettings, rank_calls
from flexcp.executor.exchange.transports import Exchange, HostExchange, PassLabel, transport_for
from flexcp.plan.plan import Plan

NOTHING: Mapping[tuple[int, bool], tuple[tuple[Call, ...], ...]] = MappingProxyType({})


class Passes:
    """Opens the exchange of each pass of one rank; ``step`` is the number of the bind, the same on all ranks, ``calls``
    what was derived ahead of this rank's calls by (mask, backward).
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: dist.ProcessGroup | None,
        timeout: timedelta,
        step: int = 0,
        settings: CallSettings = AS_PLANNED,
        calls: Mapping[tuple[int, bool], tuple[tuple[Call, ...], ...]] = NOTHING,
    ) -> None:
        self.plan, self.rank, self.settings = plan, rank, settings
        self.collectives = Collectives(group, timeout, step)
        """The ranks of the step, and whether they still agree."""
        self.host_exchange: type[HostExchange] = HostExchange
        """How CPU ranks talk; a test puts in one that dawdles."""
        self.count = 0
        # Calls that were derived ahead are the plan's own.
        self._calls = dict(calls) if settings == AS_PLANNED else {}

    def open(
        self,
        mask: int,
        backward: bool,
        device: torch.device,
        sent: list[int],
        calls: tuple[tuple[Call, ...], ...] | None = None,
    ) -> Exchange:
        """The exchange of the next pass; ``sent`` counts the bytes to each rank,
        ``calls`` stand for the plan's own where given.
        """
        wire = self.collectives.wire(sent)
        self.count += 1
        stages = self.calls(mask, backward) if calls is None else calls
        this = PassLabel(
            self.collectives.step, self.count, mask, self.plan.batch.masks[mask].name, backward, len(stages)
        )
        return transport_for(device, self.host_exchange)(wire, this, stages)

    def calls(self, mask: int, backward: bool) -> tuple[tuple[Call, ...], ...]:
        """This rank's calls for a mask and direction, derived on first use."""
        key = (mask, backward)
        if key not in self._calls:
            self._calls[key] = rank_calls(self.plan, self.rank, mask, backward, self.settings)
        return self._calls[key]
