"""Step: a plan bound to a process group on this rank, made by :mod:`flexcp.executor.bind`.

The *stream* is the documents of the batch laid end to end. The step knows which tokens of the stream this rank keeps
and in which order, moves per-token tensors in and out of that layout, and holds the rank's programs for
:func:`flexcp.attention`. It is passed as an argument, never by a global.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Never

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor import local_rows, step_mistakes
from flexcp.executor.arguments import (
    check_held,
    check_int,
    check_number,
    check_rows,
    check_stream,
    check_whole_numbers,
    device_of,
    is_mean,
    named_kind,
    single,
)
from flexcp.executor.exchange.arena import Arena
from flexcp.executor.exchange.pass_exchanges import Passes
from flexcp.executor.exchange.rank_calls import Call
from flexcp.executor.exchange.transports import Exchange
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.executor.losses.averaging import Gradients, share_factor
from flexcp.executor.losses.copied_labels import SeenTokens
from flexcp.executor.losses.edges import (
    Edges,
    check_edge_logits,
    edge_log_probs,
    edges_of,
    gathered,
    weighed_loss,
)
from flexcp.executor.losses.loss_watch import LossWatch
from flexcp.executor.run.message_layout import Types, types_of
from flexcp.executor.run.prepared import Prepared
from flexcp.executor.run.rank_recipe import RankRecipe
from flexcp.executor.step_handles import new_handle, next_number
from flexcp.executor.step_tables import StepTables
from flexcp.executor.step_watcher import Watcher
from flexcp.plan.plan import Plan
from flexcp.plan.positions import refuse_branches, refuse_order
from flexcp.plan.sequences import Sequences, batch_sequences
from flexcp.plan.user_layouts import user_layout


class Step:
    """One rank's view of a plan. Make it with :func:`bind` and pass it to :func:`flexcp.attention`.

    The *stream* is the documents of the batch laid end to end. The parts for users (everything else is for the executor
    and may change):

    - rows of this rank: ``local_tokens``, ``indices`` (tokens of the stream), ``positions`` (for RoPE);
    - between the stream and this rank: ``shard``, ``gather``, ``labels``, ``roll``, ``relayout``, ``restore``;
    - for documents that branch: ``edges``, ``log_probs``, ``gather_sequences``;
    - ``loss``, and ``share`` for a loss of your own; ``prepare`` to set up ahead of the first layer;
    - what it is and did: ``plan``, ``group``, ``cp_rank``, ``cp_size``, ``calls``, ``sent_bytes``, ``kernels``,
      ``arena``.
    """

    def __init__(self, passes: Passes, recipe: RankRecipe | None = None) -> None:
        self.passes, self.collectives = passes, passes.collectives
        """``passes`` opens the exchanges of attention, ``collectives`` are exchanges of this step outside attention."""
        self.plan, self.rank = plan, rank = passes.plan, passes.rank
        self.group, self.timeout = self.collectives.group, self.collectives.timeout
        self.local_tokens = int(plan.placement.tokens[rank])
        """Tokens on this rank, pads included."""
        self.sent_bytes = {"forward": [0] * plan.ranks, "backward": [0] * plan.ranks}
        """Bytes that attention on this rank has sent to each rank so far, by direction."""
        self.telemetry: Watcher | None = None
        """The telemetry that watches this step, or None (:mod:`flexcp.telemetry`)."""
        self.handle = new_handle(self)
        """This step as a tensor, for operators (:mod:`flexcp.executor.step_handles`)."""
        self.calls = 0
        """How many attention calls this step ran so far, including recomputed ones.

        If it is 0 after a model's forward, the model does not use flexcp.
        """
        self.last_call = -1
        """The number of this step's last attention call among all calls of the process; -1 if it ran none."""
        self.losses = LossWatch(plan.placement, self.group)
        """What is known about the division of the step's losses and the reduction of its gradients."""
        self.stream_compared = False
        """Whether a framework adapter has compared the streams that the ranks pass to this step."""
        self.asked_for_rows = False
        """Whether the step was asked for its rows, or the loader or a framework provided them (:meth:`note_call`)."""
        self.ignore = local_rows.DEFAULT_IGNORE
        """The default of ``ignore=``, the label of rows without a label: that of the loader's samples, else -100."""
        self.seen = SeenTokens()
        """The streams of integers that the step saw (:mod:`flexcp.executor.losses.copied_labels`)."""
        self.arena = Arena()
        """The memory in which passes work; another step may use it again: ``bind(..., arena=step.arena)``."""
        self.keeps_keys = any(backward.keys_kept for _, backward in plan.programs)
        """Whether the plan keeps received keys for the backward, for any of its masks."""
        self.kernels: dict[str, str] = {}
        """The names of the kernels that were chosen for this step, with the reason for each choice."""
        self.tables = StepTables(plan, rank, recipe)
        """What is derived from the plan for this rank: rows, and programs on devices."""
        self._chosen: dict[tuple[torch.device, str | None], str] = {}

    @property
    def cp_size(self) -> int:
        """The number of ranks that share this step's batch."""
        return self.plan.ranks

    @property
    def cp_rank(self) -> int:
        """The number of this rank among the ranks that share the batch."""
        return self.rank

    @property
    def indices(self) -> Tensor:
        """The stream token of each local row, int64 on the CPU; -1 for a pad.

        Reading it tells the step that the user took rows by it, which ends the warning about rows that nobody asked
        for.
        """
        self.asked_for_rows = True
        self.seen.indexed()
        return self.tables.tokens

    @property
    def positions(self) -> Tensor:
        """The position of each local row in its document, as RoPE needs it, int64 on the CPU; 0 for a pad.

        In a tree the position is the depth on the path from the root, so every answer of a shared question continues
        the positions of the question. Raises ValueError if the masks of a document disagree about it.
        """
        return self.tables.positions

    def shard(self, full: Tensor, pad: float | int | None = None) -> Tensor:
        """Return this rank's rows of a stream tensor ``[tokens, ...]``; pads get the value ``pad``.

        By default pads are 0, except in signed integers that hold -100 or -1, the usual labels of tokens that do not
        count: their pads have that label (-100 if they hold both), so that a loss of your own leaves pads out. Labels
        without such a token need ``pad=-100``.
        """
        check_stream(full, "full", "step.shard", self.plan.batch.tokens, self.local_tokens)
        if pad is not None:
            check_number("pad", pad)
            check_held("pad", pad, full.dtype, "step.shard")
        self.asked_for_rows = True
        local = local_rows.shard(full, self.tables.tokens, pad)
        self.seen.sharded(full, local)
        return local

    def gather(self, local: Tensor) -> Tensor:
        """Gather the local rows of all ranks, and return on every rank the stream tensor ``[tokens, ...]``.

        Pads are left out. Differentiable; the backward sums the gradients of all ranks.
        """
        self._check_rows(local, "step.gather")
        # A loss of gathered rows is that of the whole batch on every rank, and its gradients are right if averaged.
        return self.losses.report(local_rows.gather(local, self.plan.placement, self.collectives))

    def roll(self, local: Tensor, shift: int = -1, fill: float | int = 0) -> Tensor:
        """Shift rows by ``shift`` inside their documents, across ranks; -1 gives each token the row of the next token.

        Rows whose source lies outside their document, and pads, get ``fill``. Differentiable. Raises
        NotImplementedError for documents that branch.
        """
        refuse_branches(self.plan.batch, "step.roll knows")
        check_int("shift", shift)
        check_number("fill", fill)
        self._check_rows(local, "step.roll")
        with self.collectives.checking("step.roll"):
            check_held("fill", fill, local.dtype, "step.roll")
        return local_rows.roll(local, self.plan.placement, self.collectives, shift, fill)

    def relayout(self, local: Tensor, to: str | Sequence[Sequence[int]] = "contiguous") -> Tensor:
        """Move local rows to another layout of the same stream. Differentiable.

        ``to`` is ``"contiguous"``, ``"zigzag"``, or for each rank an array of its stream tokens. Use it for layers that
        read tokens in order (state space models, convolutions): ``y = layer(step.relayout(x))``, then :meth:`restore`.
        Pads are left out. Raises NotImplementedError for documents that branch.
        """
        refuse_order(self.plan.batch, "step.relayout")
        self._check_rows(local, "step.relayout")
        return local_rows.relayout(local, self.plan.placement, self.collectives, self._maps(to), back=False)

    def restore(self, moved: Tensor, of: str | Sequence[Sequence[int]] = "contiguous") -> Tensor:
        """Undo :meth:`relayout`: move rows from the layout ``of`` back to the plan's; pads are zero. Differentiable.

        ``of`` is the ``to`` of that call.
        """
        maps = self._maps(of)
        self.asked_for_rows = True
        check_rows(moved, "step.restore")
        with self.collectives.checking("step.restore"):
            if len(moved) != len(maps[self.rank]):
                raise ValueError(
                    f"rank {self.rank} holds {len(maps[self.rank])} tokens in the layout {of!r}, but got a tensor of "
                    f"{len(moved)} rows"
                )
        return local_rows.relayout(moved, self.plan.placement, self.collectives, maps, back=True, place="step.restore")

    def _maps(self, name: str | Sequence[Sequence[int]]) -> tuple[local_rows.Ints, ...]:
        """Return the stream tokens of each rank in a layout; raise ValueError for ``"free"``, the plan's own layout."""
        maps = user_layout(name, self.plan.batch.tokens, self.plan.ranks)
        if maps is None:
            raise ValueError(
                "'free' is the plan's own layout; relayout to 'contiguous', 'zigzag' or an index array per rank"
            )
        return maps

    def labels(self, tokens: Tensor, ignore: int | None = None) -> Tensor:
        """Return the next-token labels of this rank's rows, int64, given the token ids of the whole stream.

        They are shifted inside documents *before* sharding. If a token has several ids, ``[tokens, ids]``, each is
        shifted by itself. ``ignore`` marks pads and rows without a next token; by default it is the loader's
        ``Samples(ignore=...)``, else -100. Raises NotImplementedError for documents that branch.

        Do not pass labels that are already shifted; take ``step.shard(labels, pad=-100)`` instead. Labels that are
        already shifted raise ValueError, here or in the first attention call, if the step has seen the tokens too (in
        ``shard`` or a framework's inputs). Tensors on a device are compared only in a group's first step, because the
        host has to wait for them.
        """
        ignore = self._ignored(ignore)
        check_stream(tokens, "tokens", "step.labels", self.plan.batch.tokens, self.local_tokens)
        check_whole_numbers(tokens, "tokens", "step.labels")
        successors = local_rows.next_tokens(tokens, self.plan.batch, ignore)
        self.seen.labelled(tokens, ignore)
        step_mistakes.refuse_labels_shifted_twice(self)
        # This does not count as asking for rows: labels do not tell where the model's input comes from.
        return local_rows.shard(successors, self.tables.tokens, ignore)

    def edges(self, tokens: Tensor, ignore: int | None = None) -> Edges:
        """Return the edges of this rank, which are its tokens with each of their next tokens.

        ``tokens`` are the token ids of the whole stream, ``[tokens]``. Edges are made for documents that branch, and
        work for all; see :class:`Edges`. Next tokens whose id is ``ignore`` (as in :meth:`labels`) do not count, so
        ``tokens`` may also be labels that are not shifted.
        """
        ignore = self._ignored(ignore)
        check_stream(tokens, "tokens", "step.edges", self.plan.batch.tokens, self.local_tokens)
        check_whole_numbers(tokens, "tokens", "step.edges")
        if tokens.dim() != 1:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}, but step.edges takes one id a token")
        return edges_of(self.sequences, self.tables.tokens.numpy(), tokens, ignore)

    def log_probs(self, logits: Tensor, tokens: Tensor | Edges, ignore: int | None = None) -> Tensor:
        """Return the log-probability of the next token of each edge of this rank, ``[edges]``, in float32 or wider.

        ``logits`` are those of this rank's rows, ``[local tokens, vocabulary]``. ``tokens`` are the ids of the whole
        stream, or ``step.edges(tokens)``, whose ``pairs()`` tell the (sequence, position) of each value. Edges whose
        next token is ``ignore`` have 0; ``ignore`` is used only with ids, because edges were made with theirs.
        :meth:`gather_sequences` collects the values of all ranks. Logits are read in chunks, so no second tensor of
        their size is made in the forward.
        """
        edges = tokens if isinstance(tokens, Edges) else self.edges(tokens, ignore)
        with self.collectives.checking("step.log_probs"):
            self._check_edges(edges, "step.log_probs")
            check_edge_logits(logits, self.local_tokens, "step.log_probs")
            return edge_log_probs(logits, edges)

    def gather_sequences(self, values: Tensor, edges: Edges) -> list[Tensor]:
        """Gather values of all ranks' edges, and return for each sequence of the batch a tensor of one value per token.

        ``values`` has one number for each of this rank's ``edges``. The result is the same on every rank. The first
        token of a sequence is not predicted and has 0. Sequences are ordered by document and, in a tree, by its leaves.
        Differentiable, as :meth:`gather` is.
        """
        with self.collectives.checking("step.gather_sequences"):
            self._check_edges(edges, "step.gather_sequences")
            if values.shape != (len(edges),):
                raise ValueError(
                    f"values have shape {tuple(values.shape)}, but these are {len(edges)} edges; give one for each"
                )
        found = gathered(values, edges, self.plan.placement, self.collectives)
        return [self.losses.report(x) for x in found]

    @cached_property
    def sequences(self) -> Sequences:
        return batch_sequences(self.plan.batch)

    def _check_edges(self, edges: Edges, place: str) -> None:
        """Raise ValueError for edges that another step made."""
        if edges.of_batch is not self.sequences:
            raise ValueError(
                f"{place} got the edges of another step; take them by edges = step.edges(tokens) of this one"
            )

    def loss(
        self,
        logits: Tensor,
        labels: Tensor | Edges,
        ignore: int | None = None,
        *,
        weights: Tensor | None = None,
        gradients: Gradients = "summed",
        without_attention: bool = False,
    ) -> Tensor:
        """Return this rank's share of the batch's mean cross entropy.

        It is the sum over this rank's rows, divided by the number of valid labels on all ranks. ``labels`` are next
        tokens, ``step.labels(tokens)``; nothing is shifted here. Shift labels of your own inside their documents before
        you shard them. Rows with the label ``ignore``, and all pads, do not count; by default these are rows with the
        label -100 and, in a step of the loader, with that of its ``Samples(ignore=...)``. Labels that are the tokens
        themselves give a warning, if the step has seen the tokens.

        A document that branches has more next tokens than rows: pass ``step.edges(tokens)`` instead of labels. The loss
        is then this rank's sum over edges with ``weights``, by default ``edges.weights()``: a share of the mean over
        all positions of all sequences, as if each sequence were a document of its own. ``weights`` without edges raise
        ValueError.

        ``gradients`` says what happens to gradients over the ranks of this step. With ``"summed"`` the batch's loss is
        the sum of the ranks' values. With ``"averaged"``, for DDP and other wrappers that average, the share is
        multiplied by the number of ranks, so that the averaged gradient is the batch's, and the batch's loss is the
        mean of the ranks' values. If nothing averages them after all, gradients are too large by the number of ranks,
        which flexcp cannot detect.

        The result depends on ``logits`` even on a rank without valid labels, so that every rank takes part in the
        backward. If this step's attention never ran, this raises RuntimeError, unless ``without_attention`` says that
        this is intended. If attention ran inside a DDP or FSDP2 module that reduces gradients otherwise than
        ``gradients`` says, and ``logits`` need gradients, it raises ValueError.
        """
        factor = share_factor(gradients, self.plan.ranks)
        if isinstance(labels, Edges):
            values = self.log_probs(logits, labels)
            step_mistakes.check_attended(self, without_attention)
            if logits.requires_grad:
                self.losses.check_reduction(gradients)
            with self.collectives.checking("step.loss"):
                return self.losses.report(weighed_loss(values, labels, weights) * factor)
        refuse_branches(self.plan.batch, "labels hold")
        if weights is not None:
            raise ValueError("weights are for edges: pass step.edges(tokens) instead of labels, or leave weights out")
        said, ignore = ignore, self._ignored(ignore)
        with self.collectives.checking("step.loss"):
            local_rows.check_logits(logits, labels, self.local_tokens)
        self._check_rows(logits, "step.loss")
        step_mistakes.check_attended(self, without_attention)
        if logits.requires_grad:
            self.losses.check_reduction(gradients)
        labels = local_rows.without_pads(labels, self.tables.tokens, ignore)
        if said is None and ignore != local_rows.DEFAULT_IGNORE:  # the user may have left out more of the loader's
            labels = labels.masked_fill(labels == local_rows.DEFAULT_IGNORE, ignore)
        step_mistakes.warn_of_copied_labels(self, labels, ignore, logits)
        return self.losses.report(local_rows.token_mean_loss(logits, labels, self.collectives, ignore) * factor)

    def share(
        self,
        total: Tensor,
        count: Tensor | int,
        *,
        gradients: Gradients = "summed",
        without_attention: bool = False,
    ) -> Tensor:
        """Return this rank's share of a mean that you compute yourself: ``total`` / the sum of all ranks' ``count``.

        ``total`` is a tensor of one number, the sum over this rank's rows. ``count`` is the number of this rank's own
        valid labels, ``(labels != -100).sum()``, or the sum of their weights; if counts add up to 0, the share is
        ``total``. Do not pass the batch's count, such as the loader's ``batch.valid``, because counts are summed over
        ranks here. Leave pads (``step.indices < 0``) out of sum and count. ``gradients`` and ``without_attention`` are
        those of :meth:`loss`.

        On several ranks a count above this rank's rows raises ValueError; a tensor on a GPU is checked only in the
        first step of a group. A ``total`` that was made by a mean raises ValueError if ``count`` is above 1. If
        ``total`` was made by torch's cross entropy, a ``count`` of its rows gives a warning if some of them have no
        label.
        """
        factor = share_factor(gradients, self.plan.ranks)
        if not isinstance(total, Tensor) or total.dim():
            raise ValueError(f"total is a tensor of one number, the sum over this rank's rows; got {named_kind(total)}")
        if not isinstance(count, int | float | Tensor) or (isinstance(count, Tensor) and count.dim()):
            raise ValueError(f"count is one number, the labels that this rank's sum is over; got {named_kind(count)}")
        here = torch.as_tensor(count, device=total.device)
        if is_mean(total) and float(here) > 1:
            raise ValueError(
                f"total is a mean, and would be divided again by the {float(here):g} labels that it is over: pass the "
                'sum over this rank\'s rows, such as cross_entropy(..., reduction="sum")'
            )
        with self.collectives.checking("step.share"):
            step_mistakes.check_count(self, count)
        step_mistakes.check_attended(self, without_attention)
        step_mistakes.warn_of_counted_rows(self, total, count)
        if total.requires_grad:
            self.losses.check_reduction(gradients)
        return self.losses.report(local_rows.mean_over_ranks(total, here, self.collectives, "step.share") * factor)

    def _ignored(self, ignore: int | None) -> int:
        """Return the label of rows without a label: the one given, else this step's own."""
        if ignore is None:
            return self.ignore
        check_int("ignore", ignore)
        return ignore

    def note_call(self) -> None:
        """Count an attention call, and note the DDP or FSDP2 modules that it runs in.

        In the first call, warn if its rows may not be the plan's, and raise ValueError for labels that were shifted
        twice.
        """
        self.calls += 1
        self.last_call = next_number()
        if self.calls == 1:
            step_mistakes.warn_of_rows_nobody_asked_for(self)
            step_mistakes.refuse_labels_shifted_twice(self)
        self.losses.note_call(self.calls == 1, self.collectives.step == 1)

    def prepared(self, mask: int, backward: bool, kernel: str, types: Types) -> Prepared:
        """Return the program of a pass (one mask, one direction) with its work lists and index maps on the device.

        It is made on first use. ``mask`` is the mask's index, ``types`` the dtypes and the device.
        """
        return self.tables.prepared(mask, backward, kernel, types, self.arena)

    def prepare(self, device: torch.device | str, kernel: str | None = None) -> None:
        """Make everything that attention needs on ``device`` now, instead of in the first layer.

        It is made for all masks and both directions. ``kernel`` overrides the choice of the kernel, as in
        :func:`flexcp.attention`.
        """
        types = types_of(torch.empty(0, dtype=getattr(torch, self.plan.shape.dtype), device=device_of(device)))
        name = self.choose_kernel(types.device, kernel)
        for mask in range(len(self.plan.batch.masks)):
            for backward in (False, True):
                self.prepared(mask, backward, name, types)
                self.passes.calls(mask, backward)
        self.tables.order_on(types.device)
        if self.tables.has_positions:
            self.tables.positions_on(types.device)

    def open_exchange(
        self, mask: int, backward: bool, device: torch.device, calls: tuple[tuple[Call, ...], ...] | None = None
    ) -> Exchange:
        """Open the exchange of this step's next pass, with the messages that the plan has for it, or with ``calls``.

        ``mask`` is the mask's index. ``calls`` has for each stage of the pass what is sent and received together.
        """
        return self.passes.open(mask, backward, device, self.sent_bytes["backward" if backward else "forward"], calls)

    def choose_kernel(self, device: torch.device, kernel: str | None) -> str:
        """Return the name of the kernel for tensors on ``device``, and note it in ``self.kernels``.

        ``kernel`` overrides the choice; an unknown name raises ValueError, and a kernel that cannot run the plan's
        shape NotImplementedError. Raise ValueError if the group's backend cannot send tensors of that device.
        """
        if (device, kernel) not in self._chosen:
            self._check_backend(device)
            shape = self.plan.shape
            dtype = getattr(torch, shape.dtype)
            choice = choose_kernel(device, dtype, shape.head_dim, shape.v_head_dim, kernel)
            self._chosen[device, kernel] = choice.kernel
            self.kernels[choice.kernel] = choice.reason
        return self._chosen[device, kernel]

    def _check_backend(self, device: torch.device) -> None:
        """Raise ValueError if the group's backend cannot send tensors of this device."""
        if self.group is None or device.type != "cuda":
            return
        backends = str(dist.get_backend_config(self.group))
        if "nccl" not in backends:
            raise ValueError(
                f"the tensors are on {device}, but the group's backends are {backends}, which cannot send them from "
                "rank to rank; make the group with backend='nccl'"
            )

    def _check_rows(self, local: Tensor, place: str) -> None:
        """Raise ValueError unless ``local`` has a row for each token of this rank; ``place`` names the caller.

        Raise RuntimeError if an earlier exchange of this step failed.
        """
        self.collectives.check_usable()
        with self.collectives.checking(place):
            check_rows(local, place)
            if len(local) != self.local_tokens:
                instead = single("local", local.shape, self.local_tokens)
                raise ValueError(
                    f"rank {self.rank} keeps {self.local_tokens} tokens under this plan, but got a tensor of "
                    f"{len(local)} rows; " + (f"pass {instead}" if instead else "shard the stream with step.shard(...)")
                )

    def __reduce__(self) -> Never:
        raise TypeError(
            "a Step cannot be pickled or copied: it belongs to its process, with a process group and buffers; send its "
            "plan, step.plan, which can be pickled, and bind it in each process"
        )

    def __repr__(self) -> str:
        return f"<Step rank {self.rank} of {self.cp_size}, {self.local_tokens} tokens, {self.plan!r}>"


def check_bound(step: object) -> None:
    """Raise ValueError for an argument that is not a step, such as a plan."""
    if isinstance(step, Plan):
        raise ValueError(
            f"{step!r} is a plan, and attention runs a step: "
            "step = flexcp.bind(plan, group) on every rank, then pass the step"
        )
    if not isinstance(step, Step):
        raise ValueError(
            f"attention runs a step, made by flexcp.bind(plan, group); got {named_kind(step)} in its place"
        )
