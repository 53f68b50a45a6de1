"""Scalars: summarize a step in a few numbers, for TensorBoard or any writer with ``add_scalar(tag, value, step)``."""

from __future__ import annotations

from typing import Protocol

from flexcp.telemetry.records import StepRecord


class ScalarWriter(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def scalars(step: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by tag.

    Times are those of this rank, in milliseconds. Balances are the largest value of a rank divided by the mean.
    """
    times = step.times()
    return {
        "flexcp/compute_balance": step.compute_balance,
        "flexcp/token_balance": step.token_balance,
        "flexcp/sent_bytes": float(step.sent_bytes()),
        "flexcp/compute_ms": times.compute / 1e6,
        "flexcp/wait_ms": times.wait / 1e6,
        "flexcp/pack_ms": times.pack / 1e6,
        "flexcp/wait_share": times.wait / times.total if times.total else 0.0,
        "flexcp/planning_wait_ms": step.planning_wait / 1e6,
    }


def write_scalars(step: StepRecord, writer: ScalarWriter) -> None:
    """Write the numbers of a step to a writer."""
    for tag, value in scalars(step).items():
        writer.add_scalar(tag, value, step.number)
