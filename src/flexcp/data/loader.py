"""Loader: turn a dataset of variable-length samples into planned steps.

    loader = flexcp.data.Loader(dataset, planner, budget=131_072, group=mesh["cp"], shuffle=True)
    for batch in loader:                                     # one epoch; each rank gets its own part of every batch
        logits = model(batch.tokens, batch.positions, batch.step)
        loss   = batch.step.loss(logits, batch.labels, gradients="averaged")    # under DDP, which averages

A batch is made in four steps. A source gives the documents at the next places of the epoch (``reading/``);
``next_batch`` collects documents up to the token budget; planner processes plan the batch while earlier steps train
(``planning/planning_pool.py``, ``planning/plan_sharing.py``); and when the batch is due, its plan is bound and this
rank's rows are read or received (``reading/row_sharing.py``). The state of a loader is its place in the epoch, which
moves on when a batch is handed out. Everything ahead of this place can be made again, so a state is small, and
look-ahead, number of workers and number of ranks may change from run to run.

All ranks of the group make the loader with the same arguments and take the same steps. The only threads in the training
process are those that wait for planner processes.
"""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from flexcp.data.documents import BatchLimits, BatchSpec, next_batch
from flexcp.data.loader_agreement import check_same, sampler_share
from flexcp.data.loader_arguments import check_dataset, check_planner, check_telemetry, masks_of
from flexcp.data.loader_group import check_group, group_of
from flexcp.data.loader_settings import (
    Batches,
    Planning,
    Samples,
    check_tokens,
    warn_of_old_arguments,
    with_old_arguments,
)
from flexcp.data.loader_state import FORMAT, PLACES, check_state
from flexcp.data.local_batch import LocalBatch, local_batch, own_labels
from flexcp.data.order import count_batches
from flexcp.data.planning.plan_options import check_micro_batches, check_options
from flexcp.data.planning.plan_orders import PlannedPart, PlannerLike, PlanOrder, RecipeWish
from flexcp.data.planning.plan_sharing import SharedPlans
from flexcp.data.planning.planning_pool import PlanningError, Pool
from flexcp.data.reading.find_source import find_source
from flexcp.data.reading.grouped_samples import grouped, masks_of_trees
from flexcp.data.reading.known_source import KnownSource
from flexcp.data.reading.read_source import ReadSource
from flexcp.data.reading.row_sharing import Peers, local_columns, segments, shared
from flexcp.data.reading.samples import LABELS, TOKENS, Fields, Sample
from flexcp.data.reading.sources import Reading
from flexcp.data.speeds.corrections import Correction, read_corrections
from flexcp.data.speeds.follow import SpeedFollower
from flexcp.data.stats import Stats
from flexcp.executor.arguments import device_of, named_kind, process_group, time_limit
from flexcp.executor.bind import bind, cannot_bind
from flexcp.executor.run.prepared import packs_by_rows
from flexcp.executor.step_watcher import Watcher
from flexcp.io.plain_values import shown
from flexcp.io.setting_checks import check_flag, check_whole
from flexcp.masks import Mask
from flexcp.plan.sequences import saved_tokens

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Ints = NDArray[np.int64]


class Loader:
    """Batches of a dataset, planned ahead; iterate it once per epoch.

    ``dataset`` is map-style or iterable (a dataset, or a loader that yields samples or lists of them). A sample is a
    mapping of fields, or its token ids alone (in lists, samples must be mappings); ``samples`` says which fields hold
    what. Batches hold documents in order up to ``budget`` tokens, and ``batches`` says what happens to those that do
    not fit. With ``shuffle``, each epoch has an order of its own, made from ``seed``. ``planning`` says how plans are
    made while earlier steps train.

    ``group`` is the ranks that share each batch, as many as the planner is for: a process group or a 1-D DeviceMesh
    axis. Without a group, the loader is for one rank. In a run of several ranks this gives a warning, unless
    ``group="alone"`` or a ``DistributedSampler`` says that every rank has its own samples (data parallelism).

    ``mask`` is one for all documents or, for a map-style dataset, a list with one for each;
    ``masks={"name": (mask, layers)}`` does the same for several kinds of layers, where ``layers`` is how many layers
    use the mask. By default documents are causal. With a mask of :func:`flexcp.tree`, a sample is a tree of sequences.
    :class:`Samples` has other sources of masks.

    Tensors are moved to ``device``. ``telemetry`` follows every step (docs/telemetry.md).

    Iterating continues where it stopped: an unfinished epoch is resumed, and a finished one is followed by the next.
    """

    def __init__(
        self,
        dataset: Any,
        planner: PlannerLike,
        *,
        budget: int,
        group: dist.ProcessGroup | DeviceMesh | Literal["alone"] | None = None,
        mask: Mask | Sequence[Mask] | None = None,
        masks: Mapping[str, tuple[Mask | Sequence[Mask], int]] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        telemetry: Watcher | None = None,
        samples: Samples = Samples(),
        batches: Batches = Batches(),
        planning: Planning = Planning(),
        **old: Any,
    ) -> None:
        warn_of_old_arguments(old, ARGUMENTS, stacklevel=3)
        samples = with_old_arguments("samples", samples, old)
        batches = with_old_arguments("batches", batches, old)
        planning = with_old_arguments("planning", planning, old)
        check_tokens("budget", budget)
        check_flag("shuffle", shuffle)
        check_whole("seed", seed, "a whole number")
        self.group = group_of(group)
        self.timeout = time_limit(planning.timeout)
        self.peers = _peers(self.group, planning.cpu_group, self.timeout)
        check_planner(planner)
        check_telemetry(telemetry)
        check_dataset(dataset)
        check_group(group, self.peers.size, planner, dataset, batches.micro_batches)
        self.stats = Stats()
        self.drop_last, self.lookahead = batches.drop_last, planning.lookahead
        self.device = None if device is None else device_of(device)
        self.telemetry, self.micro_batches = telemetry, batches.micro_batches
        self.options = dict(planning.plan_options or {})
        check_options(planner, self.options)
        if self.micro_batches:
            check_micro_batches(planner, self.options)
        longest = budget if batches.max_length is None else batches.max_length
        limits = BatchLimits(budget, min(budget, longest), batches.too_long)
        field = samples.spans if isinstance(samples.spans, str) else None
        named = frozenset(samples.document_fields)
        fields = Fields(samples.tokens, samples.labels, field, named, samples.ignore)
        self.pads = {TOKENS: samples.pad_token, LABELS: samples.ignore, **({field: -1} if field else {})}
        found = masks_of(mask, masks, samples.mask_fn, samples.spans)
        if samples.tree_by is not None:
            most = self._most_of_a_tree(planner, limits)
            dataset = grouped(dataset, samples.tree_by, fields, samples.least_shared, most)
            found = masks_of_trees(found)
        self.reading = Reading(fields, found, limits, bool(shuffle), int(seed), self.stats)
        self.dataset = dataset
        self.source = find_source(dataset, samples.lengths, self.reading, self.peers)
        self.plans = self._plans(planner, planning)
        self.speeds = SpeedFollower(planner, planning.follow_speeds, telemetry, self.peers)
        self.epoch = self.place = self.step = 0
        self._iteration = 0
        self._closed = False

    def _plans(self, planner: PlannerLike, planning: Planning) -> Pool | SharedPlans:
        """Return what makes the plans: planner processes of this rank, or of all ranks together if plans are shared."""
        packed = "rows" if packs_by_rows("cpu" if self.device is None else self.device.type) else "fields"
        wish = RecipeWish(self.peers.rank, packed)
        pool = Pool(planner, planning.workers if planning.lookahead else 0, float(planning.patience), self.stats, wish)
        share = planning.share_plans
        if share is None:
            share = may_differ(str(getattr(planner, "strategy", "")))
        if share and self.group is not None and self.peers.size > 1:
            return SharedPlans(pool, self.group, self.timeout)
        return pool

    def _most_of_a_tree(self, planner: PlannerLike, limits: BatchLimits) -> int | None:
        """Return the most tokens of a tree before it is cut, or None if trees are never cut.

        With micro-batches it is what all ranks may keep together, with ``too_long="cut"`` the longest document; the
        smaller of both counts.
        """
        cap, pad_to = getattr(planner, "max_tokens_per_rank", None), self.options.get("pad_to") or 1
        room = None if cap is None or not self.micro_batches else cap // pad_to * pad_to * self.peers.size
        return min((n for n in (room, limits.longest if limits.too_long == "cut" else None) if n), default=None)

    # --- iterating ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[LocalBatch]:
        if self._closed:
            raise RuntimeError("this loader is closed; make another, and give it this one's state_dict() to go on")
        self._iteration += 1
        return self._steps(self._iteration)

    def _steps(self, iteration: int) -> Iterator[LocalBatch]:
        """Yield the batches of the rest of the epoch; plans of later batches are ordered before a batch is handed out.

        Raise RuntimeError if the loader was iterated again or loaded a state since ``iteration``, the number of this
        iteration.
        """
        self.plans.forget()
        check_same(self._said_by_all(), self.peers)
        self.source.begin(self.epoch, self.place)
        ahead: deque[BatchSpec] = deque()
        place, step = self.place, self.step
        try:
            while True:
                place, step = self._look_ahead(ahead, place, step)
                if not ahead:
                    self._refuse_nothing()
                    break
                spec = ahead.popleft()
                with nullcontext() if self.telemetry is None else self.telemetry.planning():
                    parts = self._planned(spec)
                batches = self._local_parts(spec, parts)
                place, step = self._look_ahead(ahead, place, step)
                self.stats.dropped += spec.dropped
                for batch in batches:
                    # The place moves with the last micro-batch: a step that is left before that is repeated as a whole.
                    if batch.micro_batch == len(batches) - 1:
                        self.place, self.step = spec.end, spec.step + 1
                        self.source.release(spec.end)
                    yield batch
                    if iteration != self._iteration:
                        raise RuntimeError(
                            "this loader was iterated again or loaded another state; continue with the new iterator"
                        )
                self.speeds.after(self.epoch, spec.step, step)
        finally:
            if iteration == self._iteration:
                self.plans.forget()
        self.epoch, self.place, self.step = self.epoch + 1, 0, 0

    def _said_by_all(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, under names for an error message."""
        limits = self.reading.limits
        return {
            "samples": self._samples(),
            "the share (rank, ranks) of a DistributedSampler": sampler_share(self.dataset),
            "shuffle": self.reading.shuffle,
            "seed": self.reading.seed,
            "budget": limits.budget,
            "max_length": limits.longest,
            "too_long": limits.too_long,
            "drop_last": self.drop_last,
            "lookahead": self.lookahead,
            "follow_speeds": self.speeds.every,
            "speed corrections": self.speeds.state(),
            "epoch": self.epoch,
            "place": self.place,
        }

    def _refuse_nothing(self) -> None:
        """Raise ValueError if the epoch has no batch; with ``drop_last``, only if the dataset has no sample either."""
        if self.step or (self.drop_last and self.source.document(0) is not None):
            return
        raise ValueError(
            f"epoch {self.epoch} has no batch: no sample has at most {self.reading.limits.longest} tokens, or there "
            "are none (an iterator that has ended cannot begin again)"
        )

    def _look_ahead(self, ahead: deque[BatchSpec], place: int, step: int) -> tuple[int, int]:
        """Order plans until ``lookahead`` steps (at least one) are in ``ahead``, or the epoch ends.

        ``place`` and ``step`` are those of the first batch that is not ordered yet; return them as they are afterwards.
        """
        while len(ahead) < max(1, self.lookahead):
            spec = next_batch(self.source.document, place, step, self.reading.limits.budget, self.drop_last)
            if spec is None:
                break
            arguments = {**spec.planner_arguments(), **self.options}
            self.plans.ask(
                step, PlanOrder(spec.lengths, arguments, self.micro_batches, self.speeds.at(self.epoch, step))
            )
            ahead.append(spec)
            place, step = spec.end, step + 1
        return place, step

    def _local_parts(self, spec: BatchSpec, parts: list[PlannedPart]) -> list[LocalBatch]:
        """Return the batch of a step, or its micro-batches; the weight of each is its share of the step's labels."""
        found = [self._local(spec.take(part.documents), part) for part in parts]
        labels = sum(counted for _, counted in found)
        return [
            replace(batch, micro_batch=number, micro_batches=len(found), weight=counted / labels if labels else 1.0)
            for number, (batch, counted) in enumerate(found)
        ]

    def _local(self, spec: BatchSpec, part: PlannedPart) -> tuple[LocalBatch, int]:
        """Bind the plan of a part and get this rank's rows; return the batch and how many labels count on all ranks.

        Rows are read, or received from the ranks that read them. The batch's own ``valid`` is at least 1, because
        losses are divided by it.
        """
        step = bind(part.plan, self.group, self.timeout, self.telemetry, recipe=part.recipe)
        placement, source = part.plan.placement, self.source
        kept = segments(placement, step.rank)
        if isinstance(source, ReadSource):
            held = {d: source.held[place] for d, place in enumerate(spec.places) if place in source.held}
            assert source.schema is not None
            columns, values = shared(placement, spec.documents, held, source.schema, self.pads, self.peers)
        else:
            reading = "the loader's reading of samples"
            with step.collectives.checking(reading), self.peers.collectives.checking(reading):
                samples = self._read(source, spec, kept.document)
            assert source.schema is not None
            columns = local_columns(kept, step.local_tokens, samples, source.schema, self.pads)
            values = {d: sample.values for d, sample in samples.items()}
        self.stats.cut += sum(d.length < d.whole for d in spec.documents)
        ignore = self.reading.fields.ignore
        known = [d.valid for d in spec.documents if d.valid is not None]
        if len(known) == len(spec.documents):
            valid = sum(known)
        else:
            valid = self.peers.total(own_labels(kept, columns[LABELS], spec.documents, ignore))
        self.stats.tokens_saved += saved_tokens(part.plan.batch)
        self.stats.tokens_repeated += sum(d.repeated for d in spec.documents)
        batch = local_batch(step, spec, kept, columns, values, max(1, valid), self.epoch, self.device, ignore)
        return batch, valid

    def _read(self, source: KnownSource, spec: BatchSpec, kept: Ints) -> dict[int, Sample]:
        """Read the documents in ``kept``, of which this rank keeps tokens; return samples by number in the batch.

        As long as the fields of samples are not known, a rank that keeps no tokens reads one document to learn them.
        """
        held = {d: source.read(spec.documents[d]) for d in np.unique(kept).tolist()}
        if source.schema is None:
            source.read(spec.documents[0])
        return held

    def __len__(self) -> int:
        """Return the number of steps of an epoch, which may have several micro-batches each.

        Raise TypeError if lengths are not known before samples are read.
        """
        if not isinstance(self.source, KnownSource):
            raise TypeError(
                "the number of batches is not known before the samples are read; give the Loader their lengths"
            )
        self.source.begin(self.epoch, self.place)
        return count_batches(self.source.fitted_lengths(), self.reading.limits.budget, self.drop_last)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is: after the last batch that it handed out.

        The state consists of plain values and, for a stream with ``state_dict``, the stream's state and the samples
        read ahead. Save the state of rank 0: every rank can load it, in a run of any number of ranks.
        """
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "place": self.place,
            "step": self.step,
            "shuffle": self.reading.shuffle,
            "seed": self.reading.seed,
            "samples": self._samples(),
            "source": self.source.state(self.epoch),
            "speeds": self.speeds.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`. Call this on every rank, before iterating.

        Look-ahead, workers, ranks and budget may differ from those when the state was saved. Raise ValueError if the
        state is damaged, or if ``shuffle``, ``seed`` or the number of samples differ.
        """
        with self.peers.collectives.checking("Loader.load_state_dict"):
            corrections = self._checked(state)
        self._iteration += 1
        self.plans.forget()
        self.source.load(state["source"], state["epoch"], state["place"])
        self.epoch, self.place, self.step = (state[name] for name in PLACES)
        self.speeds.corrections = corrections

    def _checked(self, state: Any) -> list[Correction]:
        """Return the speed corrections in a state; raise ValueError if the state is damaged or of another loader."""
        if not isinstance(state, Mapping):
            raise ValueError(
                f"a state is what state_dict() gave on rank 0, on every rank; got {named_kind(state)[:80]}"
            )
        check_state(state)
        now = {"shuffle": self.reading.shuffle, "seed": self.reading.seed, "samples": self._samples()}
        for name, value in now.items():
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={shown(state[name])}, but this loader has {value!r}; the order "
                    "of samples would differ"
                )
        return read_corrections(state.get("speeds", ()), self.peers.size)

    def _samples(self) -> int | None:
        """Return the number of samples of the dataset, None for a stream."""
        return len(self.source.lengths) if isinstance(self.source, KnownSource) else self.source.samples

    def _planned(self, spec: BatchSpec) -> list[PlannedPart]:
        """Return the planned parts of a step; if it could not be planned, raise PlanningError.

        Errors number documents within a step, so which samples these are is added to the message. Ranks that could plan
        the step raise when they bind it.
        """
        try:
            return self.plans.take(spec.step)
        except PlanningError as error:
            cannot_bind(self.group, f"step {spec.step} of its loader was not planned: {error}", self.timeout)
            named = {int(number) for number in re.findall(r"document (\d+)", str(error))}
            samples = [
                f"document {n} is sample {spec.documents[n].number}" for n in sorted(named) if n < len(spec.documents)
            ]
            if not samples:
                raise
            raise PlanningError(f"{error} (documents are numbered within a step: {', '.join(samples)})") from error

    # --- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the planner processes; they also end when the loader is garbage-collected or the process ends."""
        self._iteration += 1
        self._closed = True
        self.plans.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader cannot be pickled or copied: it belongs to its process, with planner processes of its own; make "
            "another one, and carry this one's place to it by state_dict() and load_state_dict()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


ARGUMENTS = tuple(name for name in inspect.signature(Loader).parameters if name != "old")
"""Names of the arguments that a Loader takes today, without those that are deprecated."""


def _peers(group: dist.ProcessGroup | None, cpu_group: dist.ProcessGroup | None, timeout: timedelta) -> Peers:
    """Return the ranks with which samples are shared, over ``cpu_group`` if there is one, else over ``group``.

    Raise ValueError if ``cpu_group`` does not have as many ranks as ``group``.
    """
    if cpu_group is not None:
        cpu_group = process_group(cpu_group, "Planning(cpu_group=...)")
    peers = Peers(cpu_group if cpu_group is not None else group, timeout)
    if cpu_group is not None and (group is None or dist.get_world_size(group) != peers.size):
        raise ValueError(f"cpu_group has {peers.size} ranks; make it of the same ranks as group, in the same order")
    return peers


def may_differ(strategy: str) -> bool:
    """Return whether a strategy, such as ``dcp``, may find different plans for one batch on two machines.

    This is so for strategies that use a partitioner with floating-point arithmetic.
    """
    return strategy.partition(":")[0] in ("hypergraph", "dcp")
