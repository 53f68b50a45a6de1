"""Telemetry: the object that a user passes to ``bind`` to have steps recorded; one serves all steps of a process.

    telemetry = flexcp.Telemetry("dumps", nan_check=True, check_every=500)
    with telemetry.planning():
        plan = next(plans)
    step = flexcp.bind(plan, group, telemetry=telemetry)
    ...                                       # forward, backward
    telemetry.log(writer)                     # TensorBoard: what is known of finished steps
    telemetry.trace("trace.json", group)      # Perfetto: the last steps of all ranks, written by rank 0

It keeps the last ``keep`` steps, each with its plan and the progress of its passes. When attention raises an error,
stalls or gives NaN, a dump is written to ``dump_dir`` (see ``dump.py``); without a ``dump_dir`` nothing is written. The
host waits for the device only in ``trace`` and in the calls that are checked because of ``check_every``.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.kernels import Settings
from flexcp.io.atomic_files import write_whole
from flexcp.io.plain_values import shown
from flexcp.io.setting_checks import check_flag, check_seconds, check_whole
from flexcp.plan.plan import Plan
from flexcp.telemetry.dump import write_dump
from flexcp.telemetry.finite import FiniteWatch
from flexcp.telemetry.gather_on_rank_0 import gather_on_rank_0
from flexcp.telemetry.records import PassRecord, StepRecord
from flexcp.telemetry.sample import MismatchError, chosen_rows, worst_row
from flexcp.telemetry.scalars import ScalarWriter, write_scalars
from flexcp.telemetry.stall import Progress, StallWatch, thread_stacks
from flexcp.telemetry.timestamps import passed, stamper
from flexcp.telemetry.trace import rank_log, trace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flexcp.executor.step import Step

MOST_DUMPS = 4
"""After this many automatic dumps no more are written; the first ones show what went wrong."""


class Telemetry:
    """Records the steps that are bound with it.

    - ``dump_dir``: the folder for dumps; without it none are written.
    - ``keep``: how many of the last steps are remembered.
    - ``stall``: seconds without progress after which a dump is written (None: never).
    - ``nan_check``: look for NaN and Inf in every output; if there are some, write a dump and warn.
    - ``check_every=n``: in every n-th attention forward, compute ``check_rows`` rows chosen by ``seed`` again densely,
      and raise :class:`flexcp.telemetry.sample.MismatchError` on all ranks if they differ (0: never).

    Give every rank the same values. Raises ValueError for values out of range.
    """

    def __init__(
        self,
        dump_dir: str | Path | None = None,
        *,
        keep: int = 8,
        stall: float | None = 60.0,
        nan_check: bool = False,
        check_every: int = 0,
        check_rows: int = 4,
        seed: int = 0,
    ) -> None:
        for name, value, least in (("keep", keep, 1), ("check_every", check_every, 0), ("check_rows", check_rows, 1)):
            check_whole(name, value, f"a whole number of at least {least}", least)
        check_whole("seed", seed, "a whole number of at least 0", 0)
        check_flag("nan_check", nan_check)
        if stall is not None:
            check_seconds("stall", stall, "; pass None for no watch")
        if dump_dir is not None and not isinstance(dump_dir, str | PathLike):
            raise ValueError(f"dump_dir is a folder, or None for no dumps; got {shown(dump_dir)}")
        self.dump_dir = None if dump_dir is None else Path(dump_dir)
        self.check_every, self.check_rows, self.seed = check_every, check_rows, seed
        self.dumps: list[Path] = []
        """The dumps written so far."""
        self._dumped_by_itself = 0
        self._steps: deque[StepRecord] = deque(maxlen=int(keep))
        self._bound, self._forwards, self._logged, self._planning = 0, 0, 0, 0
        self._finite = FiniteWatch() if nan_check else None
        self._stall = None if stall is None else float(stall)
        self._stall_watch: StallWatch | None = None

    @property
    def steps(self) -> list[StepRecord]:
        """The records of the last steps, oldest first."""
        return list(self._steps)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Measure how long the code inside this context takes, as time that the next step waited for its plan."""
        start = perf_counter_ns()
        yield
        self._planning += perf_counter_ns() - start

    # --- what the executor calls --------------------------------------------------------------------------------------

    @contextmanager
    def binding(self, plan: Plan) -> Iterator[None]:
        """Record the binding of a plan inside this context; if it raises, write a dump."""
        record = self._new_step(plan)
        try:
            yield
        except BaseException as error:
            record.error = f"{type(error).__name__}: {error}"
            self._dump_error("bind", error)
            raise

    def watch(self, step: Step, mask: int, backward: bool, device: torch.device) -> PassRecord:
        """Return a new record for a pass of ``step`` that is about to begin, and start the stall watch if needed.

        ``mask`` is the mask's index in the plan.
        """
        record = self._record(step)
        if self._stall is not None and self._stall_watch is None and self.dump_dir is not None:
            self._stall_watch = StallWatch(self, self._stall, Telemetry._progress, Telemetry._stalled)
        slots, name = step.plan.programs[mask][backward].stages, step.plan.batch.masks[mask].name
        found = PassRecord(name, backward, record.count, slots, stamper(device), self._failed)
        record.count += 1
        record.passes.append(found)
        return found

    def after_forward(
        self,
        step: Step,
        mask: int,
        settings: Settings,
        qkv: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Check the result of a forward pass as ``nan_check`` and ``check_every`` ask.

        Raises :class:`flexcp.telemetry.sample.MismatchError`, after writing a dump, if a sampled row is wrong.
        """
        self._forwards += 1
        record = self._record(step)
        if self._finite is not None:
            call = f"pass {record.count - 1} of step {record.number} ({step.plan.batch.masks[mask].name})"
            self._finite.look(call, {"q": qkv[0], "k": qkv[1], "v": qkv[2], "out": out})
            self._tell_not_finite()
        if self.check_every and self._forwards % self.check_every == 0:
            tokens = chosen_rows(step.plan.batch.tokens, self.check_rows, self.seed, self._forwards)
            worst = worst_row(step, mask, settings, qkv, sinks, out, lse, tokens)
            if not worst.right:
                error = MismatchError(
                    f"attention is wrong in step {record.number}, plan {step.plan.hash[:12]}: {worst}"
                )
                self._dump_error("mismatch", error)
                raise error

    # --- what the user calls ------------------------------------------------------------------------------------------

    def log(self, writer: ScalarWriter) -> None:
        """Write the numbers of every step that the device has finished and that was not written before.

        ``writer`` is a ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar``. Call this at the
        end of a training step. It does not wait for the device: on a GPU a step may be written one call later.
        """
        for step in self.steps:
            if step.number < self._logged:
                continue
            if not step.passes or not all(p.finished() for p in list(step.passes)):
                return
            write_scalars(step, writer)
            self._logged = step.number + 1

    def trace(
        self, path: str | Path, group: dist.ProcessGroup | DeviceMesh | None = None, timeout: float = 120.0
    ) -> None:
        """Write the last steps of all ranks of ``group`` as a Perfetto trace.

        Every rank must call this; rank 0 writes the file. It waits for the device, and up to ``timeout`` seconds for
        the other ranks.
        """
        facts = rank_log(self.steps)
        whole = group if group is None or isinstance(group, dist.ProcessGroup) else group.get_group()
        if whole is None or dist.get_world_size(whole) == 1:
            logs: list[dict[str, object]] | None = [facts | {"offset_ns": 0, "offset_error_ns": 0}]
        else:
            logs = gather_on_rank_0(facts, whole, timedelta(seconds=timeout))
        if logs is not None:
            write_whole(path, json.dumps(trace(logs), separators=(",", ":")))

    def dump(self, reason: str = "asked", message: str = "") -> Path:
        """Write a dump of the last steps to ``dump_dir`` now, and return its path.

        Raises ValueError without a ``dump_dir``.
        """
        if self.dump_dir is None:
            raise ValueError("there is no folder for dumps; make the telemetry with flexcp.Telemetry('folder')")
        threads = thread_stacks() if reason == "stall" else None
        path = write_dump(self.dump_dir, reason, message, self.steps, _global_rank(), threads)
        self.dumps.append(path)
        return path

    def close(self) -> None:
        """Stop the thread that looks for stalls, and warn of NaNs that were not reported yet."""
        if self._stall_watch is not None:
            self._stall_watch.close()
            self._stall_watch = None
        self._tell_not_finite()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _new_step(self, plan: Plan) -> StepRecord:
        """Add the record of a new step."""
        record = StepRecord(self._bound, plan, self._planning)
        self._bound, self._planning = self._bound + 1, 0
        self._steps.append(record)
        return record

    def _record(self, step: Step) -> StepRecord:
        """Return the record of a step; a new one if it has none because more than ``keep`` steps are in use."""
        same = [s for s in self._steps if s.plan is step.plan]
        for record in same:
            if record.owner is not None and record.owner() is step:
                return record
        found = next((s for s in same if s.owner is None), None) or self._new_step(step.plan)
        found.rank, found.owner = step.rank, weakref.ref(step)
        return found

    def _failed(self, record: PassRecord, error: BaseException) -> None:
        """Write a dump because of the error of a pass."""
        self._dump_error(f"{record.name}, which {record.reached()}", error)

    def _dump_error(self, where: str, error: BaseException) -> None:
        """Write a dump because of an error, and add its path to the error as a note."""
        reason = "mismatch" if isinstance(error, MismatchError) else "error"
        path = self._dumped(reason, f"{where}: {type(error).__name__}: {error}")
        if path is not None:
            error.add_note(f"flexcp wrote {path}; flexcp verify @{path} replays its plans")

    def _dumped(self, reason: str, message: str) -> Path | None:
        """Write a dump and return its path; None if there is no folder, or ``MOST_DUMPS`` were written before.

        If writing fails, only warn and return None, so that the error that caused the dump is not hidden.
        """
        if self.dump_dir is None or self._dumped_by_itself >= MOST_DUMPS:
            return None
        try:
            path = self.dump(reason, message)
            self._dumped_by_itself += 1
            return path
        except Exception as problem:  # any error: the caller is about to raise the error that caused the dump
            warnings.warn(f"flexcp could not write a dump to {self.dump_dir}: {problem}", stacklevel=2)
            return None

    def _tell_not_finite(self) -> None:
        """Write a dump and warn if a result with NaN or Inf is known by now."""
        bad = None if self._finite is None else self._finite.found()
        if bad is not None:
            path = self._dumped("nan", str(bad))
            warnings.warn(f"flexcp: {bad}{'' if path is None else f'; wrote {path}'}", stacklevel=2)

    def _progress(self) -> Progress:
        """Return (id, stamps reached) of each pass that has begun and not ended; empty if there is none."""
        open_passes = [p for step in self.steps for p in list(step.passes) if not p.error and not p.finished()]
        return tuple((id(p), passed(p.stamps)) for p in open_passes if p.stamps)

    def _stalled(self) -> None:
        """Write a dump that names the passes that make no progress."""
        stuck = [p for step in self.steps for p in list(step.passes) if p.stamps and not p.error and not p.finished()]
        words = "; ".join(f"{p.name} (pass {p.number}) {p.reached()}" for p in stuck[:4])
        self._dumped("stall", f"nothing moved for {self._stall:g} s: {words}")


def _global_rank() -> int:
    """Return this process's rank in the whole run, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
