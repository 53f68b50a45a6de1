"""Step: a plan bound to a process group on this rank; :mod:`flexcp.executor.bind` makes it.

The step knows which tokens of the stream are here and in which order, moves any per-token tensor in and out of that
layout, and carries the rank's programs for :func:`flexcp.attention`. It travels as an argument, never through a global.
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
from flexcp.executor.losses.averaging import CountOfAllRanks, Gradients, share_factor, wrong_count
from flexcp.executor.losses.copied_labels import SeenTokens
from flexcp.executor.losses.edges import (
    Edges,
    check_edge_logits,
    edge_log_probs,
    edges_of,
    gathered,
    predictions,
    weighed_loss,
)
from flexcp.executor.losses.loss_watch import LossWatch
from flexcp.executor.run.device_tables import TableStreams, tables_in
from flexcp.executor.run.message_layout import Types, types_of
from flexcp.executor.run.pass_recipe import PassRecipe, pass_recipe
from flexcp.executor.run.prepared import Prepared, WorkLists
from flexcp.executor.run.prepared import prepare as prepare_program
from flexcp.executor.run.rank_program import rank_program
from flexcp.executor.run.rank_recipe import RankRecipe
from flexcp.executor.run.rank_rows import RankRows, local_stream, rank_rows, row_positions
from flexcp.executor.step_handles import new_handle
from flexcp.executor.step_watcher import Watcher
from flexcp.plan.plan import Plan
from flexcp.plan.positions import refuse_branches, refuse_order
from flexcp.plan.sequences import Sequences, batch_sequences
from flexcp.plan.user_layouts import user_layout


class Step:
    """One rank's view of a plan. Make it with :func:`bind`, give it to :func:`flexcp.attention`.

    What users take from it (everything else is for the executor and may change):

    - rows of this rank: ``local_tokens``, ``indices`` (tokens of the stream), ``positions`` (what RoPE wants);
    - between the stream and this rank: ``shard``, ``gather``, ``labels``, ``roll``, ``relayout``, ``restore``;
    - of documents that branch: ``edges``, ``log_probs``, ``gather_sequences``;
    - ``loss``, and ``share`` for a loss of one's own; ``prepare`` to set up ahead of the first layer;
    - what it is and did: ``plan``, ``group``, ``cp_rank``, ``cp_size``, ``calls``, ``sent_bytes``, ``kernels``,
      ``arena``.
    """

    def __init__(self, passes: Passes, recipe: RankRecipe | None = None) -> None:
        self.passes, self.collectives = passes, passes.collectives
        """What its ranks tell each other outside attention: see :mod:`flexcp.executor.exchange.collectives`."""
        self.plan, self.rank = plan, rank = passes.plan, passes.rank
        self.group, self.timeout = self.collectives.group, self.collectives.timeout
        self.local_tokens = int(plan.placement.tokens[rank])
        """Tokens on this rank, pads included."""
        self.sent_bytes = {"forward": [0] * plan.ranks, "backward": [0] * plan.ranks}
        """Bytes this rank really sent to each rank so far."""
        self.telemetry: Watcher | None = None
        """Who watches this step, if anybody: see :mod:`flexcp.telemetry`."""
        self.handle = new_handle(self)
        """This step as a tensor, for operators: see :mod:`flexcp.executor.step_handles`."""
        self.calls = 0
        """Attention calls of this step so far, recomputed ones included. 0 after a model's forward:
        the model does not use flexcp.
        """
        self.losses = LossWatch(plan.placement, self.group)
        """How its losses and gradients are divided and reduced, as far as it was said or seen."""
        self.stream_compared = False
        """Whether the ranks have told each other the stream they give this step, where a framework has them do so."""
        self.asked_for_rows = False
        """Whether somebody asked which rows of the stream are here, or brought them: see :meth:`note_call`."""
        self.seen = SeenTokens()
        """The streams of integers it saw: see :mod:`flexcp.executor.losses.copied_labels`."""
        self.arena = Arena()
        """The memory its passes work in; another step may go on with it: ``bind(..., arena=step.arena)``."""
        self.keeps_keys = any(backward.keys_kept for _, backward in plan.programs)
        """Whether a mask of the plan keeps received keys for the backward."""
        self.kernels: dict[str, str] = {}
        """Kernels this step ran with, and why each was chosen."""
        self._recipe = recipe
        self._pass_recipes: dict[tuple[int, bool], PassRecipe] = {} if recipe is None else dict(recipe.passes)
        self._prepared: dict[tuple[int, bool, str, Types], Prepared] = {}
        self._work_lists: WorkLists = {}
        self._chosen: dict[tuple[torch.device, str | None], str] = {}
        self._orders: dict[torch.device, Tensor | None] = {}
        self._table_streams = TableStreams()

    @property
    def cp_size(self) -> int:
        """Ranks that share this step's batch."""
        return self.plan.ranks

    @property
    def cp_rank(self) -> int:
        """This rank among them."""
        return self.rank

    @property
    def indices(self) -> Tensor:
        """The stream token of each local row, int64; -1 for a pad."""
        self.asked_for_rows = True
        self.seen.indexed()
        return self.row_tokens

    @property
    def positions(self) -> Tensor:
        """The position of each local row in its document, int64; 0 for a pad. What RoPE wants.

        In a tree it is the depth on the path from the root: every answer of a shared question goes on from the
        question.
        """
        return self.row_positions

    @cached_property
    def row_tokens(self) -> Tensor:
        """:attr:`indices`, for those who do not ask for the user."""
        return torch.from_numpy(self._rows.tokens)

    @cached_property
    def row_positions(self) -> Tensor:
        """:attr:`positions`, made once."""
        rows = self._rows
        found = (
            row_positions(self.plan, local_stream(self.plan.placement, self.rank))
            if rows.positions is None
            else rows.positions
        )
        return torch.from_numpy(found)

    @cached_property
    def kept_order(self) -> Tensor | None:
        """Local rows in stream order, or None when they already are."""
        return None if self._rows.order is None else torch.from_numpy(self._rows.order)

    @cached_property
    def _rows(self) -> RankRows:
        return rank_rows(self.plan, self.rank) if self._recipe is None else self._recipe.rows

    def kept_order_on(self, device: torch.device) -> Tensor | None:
        """:attr:`kept_order` on a device, copied there once."""
        if device not in self._orders:
            order = self.kept_order
            self._orders[device] = None if order is None else uploaded(order.numpy(), device)
        return self._orders[device]

    def in_stream_order(self, local: Tensor) -> Tensor:
        """Local rows in stream order, in which programs know them."""
        order = self.kept_order_on(local.device)
        return local if order is None else local[order]

    def in_local_order(self, kept: Tensor) -> Tensor:
        """Undo :meth:`in_stream_order`."""
        order = self.kept_order_on(kept.device)
        if order is None:
            return kept
        local = torch.empty_like(kept)
        local[order] = kept
        return local

    def shard(self, full: Tensor, pad: float | int = 0) -> Tensor:
        """This rank's rows of a stream tensor ``[tokens, ...]``; pads get the value ``pad``."""
        check_stream(full, "full", "step.shard", self.plan.batch.tokens, self.local_tokens)
        check_number("pad", pad)
        self.asked_for_rows = True
        local = local_rows.shard(full, self.row_tokens, pad)
        self.seen.sharded(full, local)
        return local

    def gather(self, local: Tensor) -> Tensor:
        """The stream tensor ``[tokens, ...]`` on every rank, from every rank's local rows. Differentiable."""
        self._check_rows(local, "step.gather")
        # A loss of the gathered rows is the whole batch's on every rank, and its gradients are right where they are
        # averaged.
        return self.losses.say(local_rows.gather(local, self.plan.placement, self.collectives))

    def roll(self, local: Tensor, shift: int = -1, fill: float | int = 0) -> Tensor:
        """Local rows moved by ``shift`` inside their documents, across ranks:
        ``roll(x, -1)`` is each token's successor.

        Rows whose source lies outside the document, and pads, get ``fill``. Differentiable. A document that branches is
        refused.
        """
        refuse_branches(self.plan.batch, "step.roll knows")
        check_whole("shift", shift)
        check_number("fill", fill)
        self._check_rows(local, "step.roll")
        return local_rows.roll(local, self.plan.placement, self.collectives, shift, fill)

    def relayout(self, local: Tensor, to: str | Sequence[Sequence[int]] = "contiguous") -> Tensor:
        """Local rows in another layout of the same stream: ``"contiguous"``, ``"zigzag"``,
        or an index array per rank. Differentiable.

        What layers that read tokens in order need (state space models, convolutions): ``y = layer(step.relayout(x))``,
        then back with :meth:`restore`. Pads stay behind. A document that branches is refused.
        """
        refuse_order(self.plan.batch, "step.relayout")
        self._check_rows(local, "step.relayout")
        return local_rows.relayout(local, self.plan.placement, self.collectives, self._maps(to), back=False)

    def restore(self, moved: Tensor, of: str | Sequence[Sequence[int]] = "contiguous") -> Tensor:
        """Undo :meth:`relayout`: rows in the layout ``of`` moved back to the plan's,
        zeros where it has pads. Differentiable.
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
        maps = user_layout(name, self.plan.batch.tokens, self.plan.ranks)
        if maps is None:
            raise ValueError(
                "'free' is the plan's own layout; relayout to 'contiguous', 'zigzag' or an index array per rank"
            )
        return maps

    def labels(self, tokens: Tensor, ignore: int = -100) -> Tensor:
        """Next-token labels of this rank's rows from the stream's token ids:
        shifted inside documents *before* sharding.

        Where a token has several ids, ``[tokens, ids]``, each has its own successor. Labels that are shifted already
        (each the token after its own) are not for here: ``step.shard`` them. A document that branches is refused.
        """
        check_whole("ignore", ignore)
        check_stream(tokens, "tokens", "step.labels", self.plan.batch.tokens, self.local_tokens)
        check_whole_numbers(tokens, "tokens", "step.labels")
        successors = local_rows.next_tokens(tokens, self.plan.batch, ignore)
        # Labels say nothing of where the model's input came from, so this is no asking for rows.
        return local_rows.shard(successors, self.row_tokens, ignore)

    def edges(self, tokens: Tensor, ignore: int = -100) -> Edges:
        """Every token of this rank with each of its next tokens, from the stream's token ids: for documents that
        branch, and any others.

        See :class:`Edges` for what it holds. Next tokens whose id is ``ignore`` do not count, so ``tokens`` may also be
        labels that stand beside their own tokens.
        """
        check_whole("ignore", ignore)
        check_stream(tokens, "tokens", "step.edges", self.plan.batch.tokens, self.local_tokens)
        check_whole_numbers(tokens, "tokens", "step.edges")
        if tokens.dim() != 1:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}, but step.edges takes one id a token")
        return edges_of(self._sequences, self.row_tokens.numpy(), tokens, ignore)

    def log_probs(self, logits: Tensor, tokens: Tensor | Edges, ignore: int = -100) -> Tensor:
        """The log-probability of the next token of each edge of this rank, ``[edges]``, float32 at least;
        0 where it does not count.

        ``tokens`` are the stream's ids, or ``step.edges(tokens)``: whose ``pairs()`` say which (sequence, position) a
        value is of. :meth:`gather_sequences` brings values of all ranks together. Logits are read in chunks, and not
        copied whole.
        """
        edges = tokens if isinstance(tokens, Edges) else self.edges(tokens, ignore)
        with self.collectives.checking("step.log_probs"):
            self._check_edges(edges, "step.log_probs")
            check_edge_logits(logits, self.local_tokens, "step.log_probs")
            return edge_log_probs(logits, edges)

    def gather_sequences(self, values: Tensor, edges: Edges) -> list[Tensor]:
        """Values of all ranks' edges by sequence, on every rank:
        for each sequence of the batch one for each of its tokens.

        The first token of a sequence is nobody's next and has 0. Sequences come document by document, those of a tree
        in the order of its ends. Differentiable, as :meth:`gather` is.
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
        if edges.of_batch is not self._sequences:
            raise ValueError(
                f"{place} got the edges of another step; take them by edges = step.edges(tokens) of this one"
            )

    def loss(
        self,
        logits: Tensor,
        labels: Tensor | Edges,
        ignore: int = -100,
        *,
        weights: Tensor | None = None,
        gradients: Gradients = "summed",
        without_attention: bool = False,
    ) -> Tensor:
        """Cross entropy of this rank's rows: local sum / valid tokens of all ranks, a share of the batch's mean.

        ``labels`` are next tokens, ``step.labels(tokens)``: nothing is shifted here. Labels of one's own are shifted
        inside their documents before they are sharded. Rows with the label ``ignore``, and pads whatever their label,
        do not count. Labels that are the tokens themselves are warned of where the step has seen those.

        A document that branches has more next tokens than rows: there give ``step.edges(tokens)`` in the place of
        labels. The loss is then this rank's sum of edges by their ``weights``, which are ``edges.weights()`` unless
        given: a share of the mean over all positions of all sequences, as if each were a document of its own.

        ``gradients`` says what happens to gradients over the ranks of this step. ``"summed"``: the batch's loss is the
        sum of the ranks' values. ``"averaged"``, for DDP and whatever else averages: the share is multiplied by the
        number of ranks, so that the averaged gradient is the batch's, and the batch's loss is the mean of the ranks'
        values. Nothing can see that nobody averages: gradients are then as many times too large as there are ranks.

        The result depends on ``logits`` even on a rank without a valid token, so that every rank takes part in
        backward. Logits of a model that ran no attention of this step are refused, unless ``without_attention`` says
        that this is meant; shares made for one treatment of gradients are refused where attention ran inside a DDP or
        FSDP2 module that does the other.
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
            raise ValueError(
                "weights are of edges: pass step.edges(tokens) in the place of labels, or leave weights out"
            )
        check_whole("ignore", ignore)
        with self.collectives.checking("step.loss"):
            local_rows.check_logits(logits, labels, self.local_tokens)
        self._check_rows(logits, "step.loss")
        self._check_attended(without_attention)
        if logits.requires_grad:
            self.losses.check_reduction(gradients)
        labels = local_rows.without_pads(labels, self.row_tokens, ignore)
        self._warn_of_copied_labels(labels, ignore)
        return self.losses.say(local_rows.token_mean_loss(logits, labels, self.collectives, ignore) * factor)

    def share(
        self,
        total: Tensor,
        count: Tensor | int,
        *,
        gradients: Gradients = "summed",
        without_attention: bool = False,
    ) -> Tensor:
        """This rank's share of a mean of one's own: ``total`` (a sum over local rows) / ``count`` of all ranks,
        as :meth:`loss` does it.

        ``count`` is what this rank's sum would be divided by if it were alone: its own valid labels,
        ``(labels != -100).sum()``, and not the batch's, such as the loader's ``batch.valid``, because counts are summed
        over ranks here. One above this rank's rows is refused; on a GPU a tensor is looked at in the first step of a
        group alone. Pads (``step.indices < 0``) are in neither sum nor count. ``gradients`` and ``without_attention``
        are :meth:`loss`'s. A ``total`` that is plainly a mean is refused, unless ``count`` is 1.
        """
        factor = share_factor(gradients, self.plan.ranks)
        if not isinstance(total, Tensor) or total.dim():
            raise ValueError(f"total is a tensor of one number, the sum over this rank's rows; got {named_kind(total)}")
        if not isinstance(count, int | float | Tensor) or (isinstance(count, Tensor) and count.dim()):
            raise ValueError(f"count is one number, of what this rank's sum is over; got {named_kind(count)}")
        here = torch.as_tensor(count, device=total.device)
        if is_mean(total) and float(here) > 1:
            raise ValueError(
                f"total is a mean, and would be divided once more by the {float(here):g} labels it is over: pass the "
                "sum over this rank's "
                'rows, as of cross_entropy(..., reduction="sum")'
            )
        with self.collectives.checking("step.share"):
            self._check_count(count)
        self._check_attended(without_attention)
        if total.requires_grad:
            self.losses.check_reduction(gradients)
        return self.losses.say(local_rows.mean_over_ranks(total, here, self.collectives, "step.share") * factor)

    def _check_count(self, count: Tensor | float) -> None:
        """Raise for a count that cannot be this rank's: one known to be the batch's, or above this rank's rows."""
        if self.plan.ranks == 1 or (isinstance(count, Tensor) and not self.may_look_at(count)):
            return
        rows = int((self.row_tokens >= 0).sum())
        if self.plan.batch.trees:  # a token counts once for each sequence that follows it
            rows = predictions(self._sequences, self.row_tokens.numpy())
        if isinstance(count, CountOfAllRanks) or float(count) > max(1, rows):
            raise ValueError(wrong_count(float(count), rows, self.plan.ranks))

    def may_look_at(self, x: Tensor) -> bool:
        """Whether the host may read ``x``: a device would have to be waited for,
        which is done in the first step of a group alone.
        """
        return x.device.type == "cpu" or self.collectives.step == 1

    def _warn_of_copied_labels(self, labels: Tensor, ignore: int) -> None:
        if self.seen.done or not self.may_look_at(labels):
            return
        own_cut = self.plan.ranks > 1 and self._cut_by_hand_fits()
        found = self.seen.copied(labels, ignore, self.plan.batch, own_cut)
        if found is not None:
            warnings.warn(found, stacklevel=3)

    def _cut_by_hand_fits(self) -> bool:
        """Whether rows that a user cut himself are the plan's: he said how, or it is the part that everybody cuts."""
        if self.plan.layout_given:
            return True
        cut = self._maps("contiguous")[self.rank]
        return np.array_equal(local_stream(self.plan.placement, self.rank), cut)

    def _check_attended(self, without_attention: bool) -> None:
        if not self.calls and not without_attention:
            raise RuntimeError(
                f"a loss is asked of {self!r}, but its attention never ran: the model's layers still use their own. "
                "Turn flexcp on (docs/frameworks.md), or pass without_attention=True if the logits come from elsewhere"
            )

    def note_call(self) -> None:
        """Count an attention call, see whether its rows can be the plan's and inside which module it runs."""
        self.calls += 1
        if self.calls == 1:
            self._warn_of_rows_nobody_asked_for()
        self.losses.note_call(first=self.calls == 1)

    def _warn_of_rows_nobody_asked_for(self) -> None:
        """Warn where rows that a user cut himself would fit in number, but not be the plan's: a forgotten ``layout=``.

        No tensor shows which rows it holds, and labels at the ends of documents do not either: next tokens across
        documents are a way to train. But rows of a plan that places tokens freely can only come from the step, so it is
        enough to see whether anybody took them there: by ``shard``, ``indices`` or ``restore``, or as rows that the
        loader or a framework brought. ``positions`` and ``labels`` do not count, because who cuts his rows himself
        takes those from the step too. Nothing is said where a layout was given, where the plan's rows are the part that
        everybody cuts, and where this rank's count is one that no cut into equal parts has. Rows may follow the plan
        without a question, on a later stage of a pipeline or made at random, so it is a warning.
        """
        if self.plan.ranks == 1 or self.asked_for_rows or self._cut_by_hand_fits():
            return
        counts, tokens, ranks = self.plan.placement.tokens, self.plan.batch.tokens, self.plan.ranks
        if self.local_tokens in (tokens // ranks, -(-tokens // ranks)) or bool((counts == counts[0]).all()):
            warnings.warn(
                f"the plan gives rank {self.rank} tokens that are not part {self.rank} of {ranks} equal parts of the "
                "stream, and nothing has asked this step which: take them by step.shard(stream), and their positions "
                "from step.positions; or plan with layout='contiguous' where every rank keeps the part it cut itself "
                "('zigzag' or index arrays for other cuts). Rows that follow the plan all the same: ask for "
                "step.indices once, before attention",
                stacklevel=2,
            )

    def pass_recipe(self, mask: int, backward: bool) -> PassRecipe:
        """This rank's program for a mask and direction with what the plan decides about it,
        derived on first use unless it came along.
        """
        key = (mask, backward)
        if key not in self._pass_recipes:
            self._pass_recipes[key] = pass_recipe(rank_program(self.plan, self.rank, *key), backward, self.plan.shape)
        return self._pass_recipes[key]

    def prepared(self, mask: int, backward: bool, kernel: str, types: Types) -> Prepared:
        """The program with its work lists and index maps on the device, made on first use."""
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
        """The work lists and index maps that were made so far."""
        return tables_in(self._prepared, self._work_lists, self._orders)

    def prepare(self, device: torch.device | str, kernel: str | None = None) -> None:
        """Make everything attention needs on ``device`` now, for all masks and both directions,
        rather than at the first layer.
        """
        types = types_of(torch.empty(0, dtype=getattr(torch, self.plan.shape.dtype), device=device_of(device)))
        name = self.choose_kernel(types.device, kernel)
        for mask in range(len(self.plan.batch.masks)):
            for backward in (False, True):
                self.prepared(mask, backward, name, types)
                self.passes.calls(mask, backward)
        self.kept_order_on(types.device)

    def open_exchange(
        self, mask: int, backward: bool, device: torch.device, calls: tuple[tuple[Call, ...], ...] | None = None
    ) -> Exchange:
        """The exchange of the next pass of this step, in the plan's calls or in those given."""
        return self.passes.open(mask, backward, device, self.sent_bytes["backward" if backward else "forward"], calls)

    def choose_kernel(self, device: torch.device, kernel: str | None) -> str:
        """The name of the kernel for tensors on ``device``; ``kernel`` overrides the choice.
        Noted in ``self.kernels``.
        """
        if (device, kernel) not in self._chosen:
            shape = self.plan.shape
            dtype = getattr(torch, shape.dtype)
            choice = choose_kernel(device, dtype, shape.head_dim, shape.v_head_dim, kernel)
            self._chosen[device, kernel] = choice.kernel
            self.kernels[choice.kernel] = choice.reason
        return self._chosen[device, kernel]

    def _check_backend(self, device: torch.device) -> None:
        if self.group is None or device.type != "cuda":
            return
        backends = str(dist.get_backend_config(self.group))
        if "nccl" not in backends:
            raise ValueError(
                f"the tensors are on {device}, but the group's backends are {backends}, which cannot send them from "
                "rank to rank; make the group with backend='nccl'"
            )

    def _check_rows(self, local: Tensor, place: str) -> None:
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
    """Raise for what is no step, such as the plan itself."""
    if isinstance(step, Plan):
        raise ValueError(
            f"{step!r} is a plan, and attention runs a step: "
            "step = flexcp.bind(plan, group) on every rank, then pass the step"
        )
    if not isinstance(step, Step):
        raise ValueError(
            f"attention runs a step, made by flexcp.bind(plan, group); got {named_kind(step)} in its place"
        )
