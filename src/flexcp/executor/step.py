"""Step: a plan bound to a process group on this rank, made by :mod:`flexcp.executor.bind`.

The *stream* is the documents of the batch laid end to end. The step knows which tokens of the stream this rank keeps
and in which order, moves per-token tensors in and out of that layout, and holds the rank's programs for
:func:`flexcp.attention`. It is passed as an argument, never by a global.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor import local_rows
from flexcp.executor.arguments import (
    check_number,
    check_rows,
    check_stream,
    check_whole,
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
from flexcp.executor.kernels import uploaded
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.executor.losses.averaging import CountOfAllRanks, Gradients, counted_rows, share_factor, wrong_count
from flexcp.executor.losses.copied_labels import SHIFTED_TWICE, SeenTokens
from flexcp.executor.losses.edges import (
    Edges,
    check_edge_logits,
    edge_log_probs,
    edges_of,
    gathered,
    predictions,
    weighed_loss,
)
from flexcp.executor.losses.loss_graph import cross_entropy_labels, embedded_ids
from flexcp.executor.losses.loss_watch import LossWatch
from flexcp.executor.run.device_tables import TableStreams, tables_in
from flexcp.executor.run.message_layout import Types, types_of
from flexcp.executor.run.pass_recipe import PassRecipe, pass_recipe
from flexcp.executor.run.prepared import Prepared, WorkLists
from flexcp.executor.run.prepared import prepare as prepare_program
from flexcp.executor.run.rank_program import rank_program
from flexcp.executor.run.rank_recipe import RankRecipe
from flexcp.executor.run.rank_rows import RankRows, local_stream, rank_rows, row_positions
from flexcp.executor.step_handles import given_another, new_handle, next_number, run_instead
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
        self._recipe = recipe
        self._pass_recipes: dict[tuple[int, bool], PassRecipe] = {} if recipe is None else dict(recipe.passes)
        self._prepared: dict[tuple[int, bool, str, Types], Prepared] = {}
        self._work_lists: WorkLists = {}
        self._chosen: dict[tuple[torch.device, str | None], str] = {}
        self._orders: dict[torch.device, Tensor | None] = {}
        self._positions: dict[torch.device, Tensor] = {}
        self._table_streams = TableStreams()

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
        return self.row_tokens

    @property
    def positions(self) -> Tensor:
        """The position of each local row in its document, as RoPE needs it, int64 on the CPU; 0 for a pad.

        In a tree the position is the depth on the path from the root, so every answer of a shared question continues
        the positions of the question. Raises ValueError if the masks of a document disagree about it.
        """
        return self.row_positions

    @cached_property
    def row_tokens(self) -> Tensor:
        """:attr:`indices`, for internal use: reading it does not count as the user asking for rows."""
        return torch.from_numpy(self._rows.tokens)

    @cached_property
    def row_positions(self) -> Tensor:
        """:attr:`positions`, computed once."""
        rows = self._rows
        found = (
            row_positions(self.plan, local_stream(self.plan.placement, self.rank))
            if rows.positions is None
            else rows.positions
        )
        return torch.from_numpy(found)

    @cached_property
    def kept_order(self) -> Tensor | None:
        """The row numbers of this rank sorted by stream token, or None if the rows are in that order already."""
        return None if self._rows.order is None else torch.from_numpy(self._rows.order)

    @cached_property
    def _rows(self) -> RankRows:
        return rank_rows(self.plan, self.rank) if self._recipe is None else self._recipe.rows

    def kept_order_on(self, device: torch.device) -> Tensor | None:
        """Return :attr:`kept_order` on a device; it is copied there once."""
        if device not in self._orders:
            order = self.kept_order
            self._orders[device] = None if order is None else uploaded(order.numpy(), device)
        return self._orders[device]

    def positions_on(self, device: torch.device) -> Tensor:
        """Return :attr:`positions` on a device; they are copied there once, and the host does not wait for the copy."""
        self._table_streams.use(device, self.tables)
        if device not in self._positions:
            self._positions[device] = uploaded(self.row_positions.numpy(), device)
        return self._positions[device]

    def are_positions(self, x: Tensor) -> bool:
        """Return whether ``x`` has the memory of the tensor that :meth:`positions_on` gave; its values are not read."""
        own = self._positions.get(x.device)
        return own is not None and x.data_ptr() == own.data_ptr() and x.numel() == len(own) and x.is_contiguous()

    def in_stream_order(self, local: Tensor) -> Tensor:
        """Return local rows sorted by stream token, which is the order in which programs use them."""
        order = self.kept_order_on(local.device)
        return local if order is None else local[order]

    def in_local_order(self, kept: Tensor) -> Tensor:
        """Return rows that are sorted by stream token in local order; the inverse of :meth:`in_stream_order`."""
        order = self.kept_order_on(kept.device)
        if order is None:
            return kept
        local = torch.empty_like(kept)
        local[order] = kept
        return local

    def shard(self, full: Tensor, pad: float | int | None = None) -> Tensor:
        """Return this rank's rows of a stream tensor ``[tokens, ...]``; pads get the value ``pad``.

        By default pads are 0, except in signed integers that hold -100 or -1, the usual labels of tokens that do not
        count: their pads have that label (-100 if they hold both), so that a loss of your own leaves pads out. Labels
        without such a token need ``pad=-100``.
        """
        check_stream(full, "full", "step.shard", self.plan.batch.tokens, self.local_tokens)
        if pad is not None:
            check_number("pad", pad)
        self.asked_for_rows = True
        local = local_rows.shard(full, self.row_tokens, pad)
        self.seen.sharded(full, local)
        return local

    def gather(self, local: Tensor) -> Tensor:
        """Gather the local rows of all ranks, and return on every rank the stream tensor ``[tokens, ...]``.

        Pads are left out. Differentiable; the backward sums the gradients of all ranks.
        """
        self._check_rows(local, "step.gather")
        # A loss of gathered rows is that of the whole batch on every rank, and its gradients are right if averaged.
        return self.losses.say(local_rows.gather(local, self.plan.placement, self.collectives))

    def roll(self, local: Tensor, shift: int = -1, fill: float | int = 0) -> Tensor:
        """Shift rows by ``shift`` inside their documents, across ranks; -1 gives each token the row of the next token.

        Rows whose source lies outside their document, and pads, get ``fill``. Differentiable. Raises
        NotImplementedError for documents that branch.
        """
        refuse_branches(self.plan.batch, "step.roll knows")
        check_whole("shift", shift)
        check_number("fill", fill)
        self._check_rows(local, "step.roll")
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
        self._refuse_labels_shifted_twice()
        # This does not count as asking for rows: labels do not tell where the model's input comes from.
        return local_rows.shard(successors, self.row_tokens, ignore)

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
        return edges_of(self._sequences, self.row_tokens.numpy(), tokens, ignore)

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
        return [self.losses.say(x) for x in found]

    @cached_property
    def _sequences(self) -> Sequences:
        return batch_sequences(self.plan.batch)

    def _check_edges(self, edges: Edges, place: str) -> None:
        """Raise ValueError for edges that another step made."""
        if edges.of_batch is not self._sequences:
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
            self._check_attended(without_attention)
            if logits.requires_grad:
                self.losses.check_reduction(gradients)
            with self.collectives.checking("step.loss"):
                return self.losses.say(weighed_loss(values, labels, weights) * factor)
        refuse_branches(self.plan.batch, "labels hold")
        if weights is not None:
            raise ValueError("weights are for edges: pass step.edges(tokens) instead of labels, or leave weights out")
        said, ignore = ignore, self._ignored(ignore)
        with self.collectives.checking("step.loss"):
            local_rows.check_logits(logits, labels, self.local_tokens)
        self._check_rows(logits, "step.loss")
        self._check_attended(without_attention)
        if logits.requires_grad:
            self.losses.check_reduction(gradients)
        labels = local_rows.without_pads(labels, self.row_tokens, ignore)
        if said is None and ignore != local_rows.DEFAULT_IGNORE:  # the user may have left out more of the loader's
            labels = labels.masked_fill(labels == local_rows.DEFAULT_IGNORE, ignore)
        self._warn_of_copied_labels(labels, ignore, logits)
        return self.losses.say(local_rows.token_mean_loss(logits, labels, self.collectives, ignore) * factor)

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
        valid labels, ``(labels != -100).sum()``. Do not pass the batch's count, such as the loader's ``batch.valid``,
        because counts are summed over ranks here. Leave pads (``step.indices < 0``) out of sum and count. ``gradients``
        and ``without_attention`` are those of :meth:`loss`.

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
            self._check_count(count)
        self._check_attended(without_attention)
        self._warn_of_counted_rows(total, count)
        if total.requires_grad:
            self.losses.check_reduction(gradients)
        return self.losses.say(local_rows.mean_over_ranks(total, here, self.collectives, "step.share") * factor)

    def _ignored(self, ignore: int | None) -> int:
        """Return the label of rows without a label: the one given, else this step's own."""
        if ignore is None:
            return self.ignore
        check_whole("ignore", ignore)
        return ignore

    def _check_count(self, count: Tensor | float) -> None:
        """Raise ValueError for a count that cannot be this rank's own.

        That is a :class:`CountOfAllRanks`, or one above this rank's rows (in trees, above the positions predicted from
        them). With one rank, and for tensors that the host may not read, nothing is checked.
        """
        if self.plan.ranks == 1 or (isinstance(count, Tensor) and not self.may_look_at(count)):
            return
        rows = int((self.row_tokens >= 0).sum())
        if self.plan.batch.trees:  # a token counts once for each sequence that follows it
            rows = predictions(self._sequences, self.row_tokens.numpy())
        if isinstance(count, CountOfAllRanks) or float(count) > max(1, rows):
            pads = self.local_tokens - int((self.row_tokens >= 0).sum())
            raise ValueError(wrong_count(float(count), rows, self.plan.ranks, pads))

    def _warn_of_counted_rows(self, total: Tensor, count: Tensor | float) -> None:
        """Warn if ``count`` is the number of rows of the cross entropy in ``total``, and some of them have no label."""
        labels = cross_entropy_labels(total)
        if not labels or not all(self.may_look_at(x) for x in (total, *(x for x, _ in labels))):
            return
        rows = sum(x.numel() for x, _ in labels)
        if float(count) not in (rows, int((self.row_tokens >= 0).sum())):
            return
        valid = sum(int((x != ignore).sum()) for x, ignore in labels)
        if valid < float(count) and rows == self.local_tokens:
            warnings.warn(counted_rows(float(count), valid), stacklevel=3)

    def may_look_at(self, x: Tensor) -> bool:
        """Return whether the host may read ``x``: always on a CPU, and on a device only in the first step of a group.

        On a device the host has to wait for the value.
        """
        return x.device.type == "cpu" or self.collectives.step == 1

    def _warn_of_copied_labels(self, labels: Tensor, ignore: int, logits: Tensor) -> None:
        """Warn if labels are the tokens themselves; only the first labels that the host may read are checked."""
        if self.seen.done or not self.may_look_at(labels):
            return
        own_cut = self.plan.ranks > 1 and self._cut_by_hand_fits()

        def embedded() -> list[Tensor]:
            return [ids for ids in embedded_ids(logits) if self.may_look_at(ids)]

        found = self.seen.copied(labels, ignore, self.plan.batch, own_cut, embedded)
        if found is not None:
            warnings.warn(found, stacklevel=3)

    def _refuse_labels_shifted_twice(self) -> None:
        """Raise ValueError if :meth:`labels` was given next tokens of the ids that this step has seen."""
        with self.collectives.checking("step.labels"):
            if self.seen.shifted_twice(self.row_tokens.numpy(), self.plan.batch, self.may_look_at):
                raise ValueError(SHIFTED_TWICE)

    def _cut_by_hand_fits(self) -> bool:
        """Return whether rows that a user cuts without the step are the plan's.

        They are if the plan was made for the user's layout, or if this rank's rows are its contiguous part of the
        stream.
        """
        if self.plan.layout_given:
            return True
        cut = self._maps("contiguous")[self.rank]
        return np.array_equal(local_stream(self.plan.placement, self.rank), cut)

    def _check_attended(self, without_attention: bool) -> None:
        """Raise RuntimeError if this step's attention never ran, unless ``without_attention`` is True."""
        if not self.calls and not without_attention:
            other = run_instead(self)
            if other is not None:
                raise RuntimeError(
                    f"a loss is asked of {self!r}, but its attention never ran. {given_another(other)}. Or pass "
                    "without_attention=True if the logits come from elsewhere"
                )
            raise RuntimeError(
                f"a loss is asked of {self!r}, but its attention never ran: the model's layers still use their own. "
                "Turn flexcp on (docs/frameworks.md), or pass without_attention=True if the logits come from elsewhere"
            )

    def note_call(self) -> None:
        """Count an attention call, and note the DDP or FSDP2 modules that it runs in.

        In the first call, warn if its rows may not be the plan's, and raise ValueError for labels that were shifted
        twice.
        """
        self.calls += 1
        self.last_call = next_number()
        if self.calls == 1:
            self._warn_of_rows_nobody_asked_for()
            self._refuse_labels_shifted_twice()
        self.losses.note_call(self.calls == 1, self.collectives.step == 1)

    def _warn_of_rows_nobody_asked_for(self) -> None:
        """Warn if the user seems to have cut rows without the step and forgotten ``layout=``.

        Such rows would fit in number, but would not be the plan's. A tensor does not show which rows it holds. Labels
        at the ends of documents do not show it either, because some train on next tokens across documents. But rows of
        a plan that places tokens freely can only come from the step, so it suffices to know whether they were taken
        from it: by ``shard``, ``indices`` or ``restore``, or by the loader or a framework. ``positions`` and ``labels``
        do not count, because users who cut rows themselves take those from the step too. There is no warning if a
        layout was given, if the plan's rows are the contiguous part that everyone would cut, or if the number of rows
        does not fit a cut into equal parts. It is not an error, because rows may follow the plan although the step was
        not asked: on a later pipeline stage, or if they are random numbers.
        """
        if self.plan.ranks == 1 or self.asked_for_rows or self._cut_by_hand_fits():
            return
        counts, tokens, ranks = self.plan.placement.tokens, self.plan.batch.tokens, self.plan.ranks
        if self.local_tokens in (tokens // ranks, -(-tokens // ranks)) or bool((counts == counts[0]).all()):
            warnings.warn(
                f"the plan gives rank {self.rank} tokens that are not part {self.rank} of {ranks} equal parts of the "
                "stream, and nothing has asked this step which: take them by step.shard(stream), and their positions "
                "from step.positions; or plan with layout='contiguous' if every rank cuts its own part of the stream "
                "('zigzag' or index arrays for other cuts). If the rows are the plan's after all, read step.indices "
                "once before attention to end this warning",
                stacklevel=2,
            )

    def pass_recipe(self, mask: int, backward: bool) -> PassRecipe:
        """Return what this rank does in a pass (one mask, one direction), as integers; ``mask`` is the mask's index.

        It is derived on first use, unless the step was bound with a recipe.
        """
        key = (mask, backward)
        if key not in self._pass_recipes:
            self._pass_recipes[key] = pass_recipe(rank_program(self.plan, self.rank, *key), backward, self.plan.shape)
        return self._pass_recipes[key]

    def prepared(self, mask: int, backward: bool, kernel: str, types: Types) -> Prepared:
        """Return the program of a pass (one mask, one direction) with its work lists and index maps on the device.

        It is made on first use. ``mask`` is the mask's index, ``types`` the dtypes and the device. Raise ValueError if
        the group's backend cannot send tensors of that device.
        """
        key = (mask, backward, kernel, types)
        if key not in self._prepared:
            self._check_backend(types.device)
        self._table_streams.use(types.device, self.tables)
        if key not in self._prepared:
            if not self._prepared:
                recipe = self._recipe
                self.arena.reserve(self.plan.memory(self.rank).arena if recipe is None else recipe.arena)
            made = self.pass_recipe(mask, backward)
            self._prepared[key] = prepare_program(made, self.plan.shape, kernel, types, self._work_lists)
        return self._prepared[key]

    def tables(self) -> list[Tensor]:
        """Return the tensors that this step has made on devices so far: work lists, index maps and positions."""
        return tables_in(self._prepared, self._work_lists, self._orders, self._positions)

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
        self.kept_order_on(types.device)
        if self._rows.positions is not None:
            self.positions_on(types.device)

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
        shape NotImplementedError.
        """
        if (device, kernel) not in self._chosen:
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
