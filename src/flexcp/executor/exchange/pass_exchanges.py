"""Pass exchanges: open one exchange for every pass of a step.

A pass is one direction of one attention layer. All ranks make the same passes in the same order, so the n-th pass of a
step is the same on all of them, and its number is part of its messages' tags. After a pass has failed, the ranks may
disagree on that number, so the step opens no further exchange.
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
"""No calls derived ahead of time; see :class:`Passes`."""


class Passes:
    """Opens the exchange of each pass of one rank.

    ``timeout`` is the time limit of waits between CPU ranks. ``step`` is the number of the bind, the same on all ranks.
    ``calls`` are this rank's calls by (mask, backward), as far as they were derived ahead of time; they are ignored if
    ``settings`` replace the plan's calls.
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
        """Exchanges with the other ranks of the step outside attention; after a failure they refuse further ones."""
        self.host_exchange: type[HostExchange] = HostExchange
        """The exchange that CPU ranks use; tests replace it with a slow one."""
        self.count = 0
        # Calls derived ahead of time are those of the plan, so they do not fit other settings.
        self._calls = dict(calls) if settings == AS_PLANNED else {}

    def open(
        self,
        mask: int,
        backward: bool,
        device: torch.device,
        sent: list[int],
        calls: tuple[tuple[Call, ...], ...] | None = None,
    ) -> Exchange:
        """Open the exchange of the next pass, for one mask (its index in the plan) and direction.

        Bytes sent to each rank are added to ``sent``; ``calls``, if given, replace the plan's. Raises RuntimeError
        after a failed pass.
        """
        wire = self.collectives.wire(sent)
        self.count += 1
        stages = self.calls(mask, backward) if calls is None else calls
        this = PassLabel(
            self.collectives.step, self.count, mask, self.plan.batch.masks[mask].name, backward, len(stages)
        )
        return transport_for(device, self.host_exchange)(wire, this, stages)

    def calls(self, mask: int, backward: bool) -> tuple[tuple[Call, ...], ...]:
        """Return, for each stage, this rank's calls for a mask and direction, derived on first use."""
        key = (mask, backward)
        if key not in self._calls:
            self._calls[key] = rank_calls(self.plan, self.rank, mask, backward, self.settings)
        return self._calls[key]
