"""Hugging Face Trainer and Accelerate: the batches of all ranks are planned and sharded before each forward.

    trainer = FlexcpTrainer(model, args, train_dataset=..., data_collator=..., cluster=flexcp.cluster("h100", nodes=2,
    ranks_per_node=8))

    class Trainer(FlexcpTrainer, SFTTrainer):                            # or any other trainer built on the Trainer
        pass

The Trainer works as in data parallelism: its sampler gives every rank its own documents, DDP or FSDP averages
gradients, and the loss is scaled as usual (``num_items_in_batch`` over all devices). In between, the ranks' documents
become one batch, in one of two ways:

- if the loss is the Trainer's own, which the model computes from its labels, :func:`prepared` replaces the inputs, and
  each rank's loss is a share of one mean. Only attention communicates.
- if a trainer has its own loss (TRL's SFTTrainer, DPOTrainer, GRPOTrainer; ``compute_loss_func``, label smoothing), or
  logits are needed row by row (``predict``, ``compute_metrics``), the model's forward is shared
  (:mod:`flexcp.frameworks.shared_forward`): what it returns for a token goes back to the rank and the place of the
  token, and the trainer's code sees its own documents.

With Accelerate and your own loop, the first way is ``loss = model(**prepared(batch, planner,
gradients="averaged")).loss``, since Accelerate averages gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from flexcp.clusters import Cluster
from flexcp.executor.losses.averaging import Gradients
from flexcp.executor.step import Step
from flexcp.frameworks import huggingface, not_used
from flexcp.frameworks.collated import BORDERS, read_batch, refuse_unknown, with_trained_labels
from flexcp.frameworks.huggingface import keywords_of, masks
from flexcp.frameworks.repeated_samples import without_repeats
from flexcp.frameworks.shared_batch import IGNORE, share
from flexcp.frameworks.shared_forward import LastPlan, share_forward
from flexcp.frameworks.trainer_logs import SharedBatches
from flexcp.planner import Planner

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def of_the_batch(found: Any, step: Step) -> Any:
    """Return an evaluated loss as that of the whole batch, the mean of the ranks' values, the same on every rank.

    The Trainer weights the losses of ranks by documents. ``found`` is the loss, or a tuple that begins with it.
    """
    loss = found[0] if isinstance(found, tuple) else found
    mean = step.collectives.summed("evaluation", loss.detach()) / step.cp_size
    return (mean, *found[1:]) if isinstance(found, tuple) else mean


def prepared(
    batch: Mapping[str, Any],
    planner: Planner,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    gradients: Gradients = "summed",
    **options: Any,
) -> dict[str, Any]:
    """Return the keywords of the model's forward for this rank, from the batch that its collator made.

    Every rank of ``group``, by default all ranks, calls this with a batch of its own. ``gradients`` says how gradients
    are reduced over them, as in :func:`flexcp.Step.loss`: with ``"summed"``, ``model(**prepared).loss`` is this rank's
    sum / the valid labels of all ranks; with ``"averaged"`` (DDP, Accelerate) it is multiplied by the number of ranks.
    ``options`` go to the planner's call (``masks=``, ``tokens=``).

    A batch without ``labels`` is trained on every next token, prompts included. To train on answers alone, let the
    collator return labels that are not shifted, with -100 at tokens that are not to be predicted. ValueError is raised
    on every rank if some ranks have labels and others have none. A model with window layers needs its masks:
    ``prepared(..., masks=huggingface.masks(model.config))``.
    """
    refuse_unknown(batch)
    found = read_batch(batch)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    rows = share(found.tokens, found.labels, found.lengths, planner, group, labelled=found.labelled, **options)
    valid = (rows.labels != IGNORE).sum()
    dist.all_reduce(valid, group=group if isinstance(group, dist.ProcessGroup) else group.get_group())
    return keywords_of(rows, valid, gradients)


class FlexcpTrainer(Trainer):
    """A Trainer whose ranks share every batch, alone or in front of another trainer.

    In front of another it is ``class T(FlexcpTrainer, SFTTrainer)``. Give either ``cluster`` or ``planner``, else
    ValueError: ``cluster`` describes the machine, and heads and dtype are taken from the model; ``planner`` plans for
    as many ranks as the Trainer has. ``options`` go to the planner's call (``masks=``, ``tokens=``). Everything else is
    as in the Trainer. Logs have ``tokens_per_second`` (of all ranks), ``attention_balance`` and ``token_balance`` (the
    busiest rank over the mean) beside the loss.
    """

    def __init__(
        self,
        *arguments: Any,
        planner: Planner | None = None,
        cluster: Cluster | None = None,
        options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        if (planner is None) == (cluster is None):
            raise ValueError(
                "say on what the ranks share batches: cluster=flexcp.cluster('h100', nodes=..., ranks_per_node=...), "
                "or a planner="
            )
        for given in (*arguments, *keywords.values()):
            _refuse_parallelism(given)
        super().__init__(*arguments, **keywords)
        self._batches = SharedBatches()
        self._rows_wanted = False
        model = _model_inside(self, self.model)
        if cluster is not None:
            planner = huggingface.planner(model, cluster, _dtype(self.args, model))
        assert planner is not None
        self._planner = planner
        self._options = {"masks": masks(model.config), **(options or {})}
        self._refuse()
        last = LastPlan(self._planner, self._options)
        share_forward(model, last).watch = self._note
        if isinstance(getattr(self, "ref_model", None), nn.Module):
            share_forward(_model_inside(self, self.ref_model), last)

    def _note(self, step: Step) -> None:
        if torch.is_grad_enabled():
            self._batches.note(step)

    def _refuse(self) -> None:
        """Raise for settings under which the loss of a batch that ranks share would be wrong.

        ValueError: another number of ranks than the planner's, or losses averaged by rank. NotImplementedError:
        parallelism by Accelerate, or a model that does not take the number of labels.
        """
        ranks = self.accelerator.num_processes
        _refuse_parallelism(self.accelerator)
        if self._planner.cluster.ranks != ranks:
            raise ValueError(
                f"the planner plans for {self._planner.cluster.ranks} ranks, but the Trainer runs on {ranks}: make it "
                f"with cluster=flexcp.cluster('h100', nodes=..., ranks_per_node=...) of {ranks} ranks, or start "
                f"{self._planner.cluster.ranks} processes"
            )
        if ranks > 1 and not self.args.average_tokens_across_devices:
            raise ValueError(
                "ranks that share a batch divide by the labels of all of them: set average_tokens_across_devices=True"
            )
        if ranks > 1 and self._model_takes_the_loss() and not self.model_accepts_loss_kwargs:
            raise NotImplementedError(
                f"{type(self.model).__name__} takes no num_items_in_batch, "
                "so the Trainer would average shares of one loss"
            )

    def _owner_of_the_loss(self) -> type:
        """Return the class behind FlexcpTrainer whose ``compute_loss`` is used: the Trainer, or one built on it."""
        after = type(self).__mro__[type(self).__mro__.index(FlexcpTrainer) + 1 :]
        return next(kind for kind in after if "compute_loss" in vars(kind))

    def _model_takes_the_loss(self) -> bool:
        """Return whether the model computes the loss from its labels, and logits are not needed row by row.

        Otherwise another trainer, label smoothing or the user's function computes it.
        """
        return (
            self._owner_of_the_loss() is Trainer
            and self.label_smoother is None
            and self.compute_loss_func is None
            and not self._rows_wanted
        )

    def _loss_is_a_mean_over_labels(self) -> bool:
        """Return whether the loss is a sum over labels / their number, made by Transformers or by TRL's SFTTrainer.

        Losses of the user and of other trainers may be anything, and see the labels as the collator made them.
        """
        return self._owner_of_the_loss().__name__ in ("Trainer", "SFTTrainer") and self.compute_loss_func is None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        """Return the number of labels of all ranks by which the Trainer divides the losses of ``batch_samples``.

        Documents are trained on apart and without padding, so labels of their first tokens and of padding are in no
        sum, and must not be counted. The Trainer knows only the first column of a batch as such.
        """
        if self._loss_is_a_mean_over_labels():
            batch_samples = [with_trained_labels(batch) for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)

    def _prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        found = prepared(self._prepare_inputs(inputs), self._planner, **self._options)
        self._note(found["step"])
        # The Trainer itself scales losses for averaged gradients, which None says.
        return found | {"gradients": None, "num_items_in_batch": found["num_items_in_batch"].count}

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Return a function that makes an empty context, and the inputs of the model's forward.

        The inputs are this rank's rows of the shared batch if the model computes the loss, else the given ones. The
        Trainer calls this before every forward of training and evaluation.
        """
        return nullcontext, self._prepared(inputs) if self._model_takes_the_loss() else inputs

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **keywords: Any,
    ) -> Any:
        """Return the trainer's loss, from a prepared batch or a shared forward.

        If it is computed from labels, an evaluated loss is that of the whole batch on every rank. Raise RuntimeError
        if the model did not use the step.
        """
        if not self._model_takes_the_loss():
            self._refuse_lost_borders(inputs)
            if self._loss_is_a_mean_over_labels():
                inputs = with_trained_labels(inputs)
            if num_items_in_batch is None and not torch.is_grad_enabled():
                # An evaluated loss is that of the whole batch; otherwise ranks would average means over different
                # numbers of labels.
                num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
            found = super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **keywords
            )
            if torch.is_grad_enabled() or num_items_in_batch is None:
                return found
            # Each rank has a share of one mean, and Accelerate drops values of some ranks from the last batch.
            loss = self.accelerator.reduce((found[0] if return_outputs else found).detach(), "mean")
            return (loss, *found[1:]) if return_outputs else loss
        inputs = inputs if "step" in inputs else self._prepared(inputs)
        step, valid = inputs["step"], inputs["num_items_in_batch"]
        before = step.calls
        number = valid if num_items_in_batch is None else num_items_in_batch
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=number, **keywords)
        if step.calls == before:
            raise RuntimeError(not_used(step))
        step.losses.report(loss[0] if isinstance(loss, tuple) else loss)
        return loss if torch.is_grad_enabled() else of_the_batch(loss, step)

    def _refuse_lost_borders(self, inputs: Mapping[str, Any]) -> None:
        """Raise ValueError if TRL's arguments ask for packing, but the batch does not say where documents begin.

        TRL's ``"wrapped"`` packing has no such borders and is accepted.
        """
        packed = getattr(self.args, "packing", False) and getattr(self.args, "packing_strategy", "wrapped") != "wrapped"
        if packed and not BORDERS & set(inputs):
            raise ValueError(
                f"packing=True, but the batch holds only {', '.join(sorted(inputs))}: nothing says where documents "
                "begin; let the collator return position_ids that start anew with every document"
            )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Run the trainer's prediction step; logits, if needed, are those of this rank's own rows of the batch.

        If the loss is a mean over tokens, samples that Accelerate repeats in the last batch do not count.
        """
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and self._owner_of_the_loss().__name__ in ("Trainer", "SFTTrainer"):
            inputs = without_repeats(inputs, state.active_dataloader)
        with self._with_rows(not prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    @contextmanager
    def _with_rows(self, wanted: bool) -> Iterator[None]:
        before, self._rows_wanted = self._rows_wanted, wanted
        try:
            yield
        finally:
            self._rows_wanted = before

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log the trainer's entry; if it has a training loss, add tokens per second and the balance of ranks."""
        super().log(logs | self._batches.entries() if "loss" in logs else logs, *arguments, **keywords)


def _refuse_parallelism(owner: Any) -> None:
    """Raise NotImplementedError if Accelerate's own parallelism is on besides flexcp.

    ``owner`` is anything that may have a ``parallelism_config``, such as training arguments or an accelerator.
    """
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(getattr(owner, "parallelism_config", None), name, 1)
        if size > 1:
            raise NotImplementedError(
                f"parallelism_config has {name}={size} beside flexcp, "
                f"which shares every batch over all ranks itself: set {name}=1"
            )


def _model_inside(trainer: Trainer, model: Any) -> Any:
    """Return the Transformers model inside wrappers of Accelerate or PEFT."""
    found = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    return found.get_base_model() if hasattr(found, "get_base_model") else found


def _dtype(arguments: Any, model: Any) -> Any:
    """Return the dtype in which attention computes: that of autocast if the arguments turn it on, else the model's."""
    return torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else model.dtype
