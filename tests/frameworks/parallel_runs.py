"""Functions that run on ranks in tests of framework adapters.

They are in a file of their own that is light to import: every rank of the pool imports the module of a function that
the pool is given, also ranks that do not run it. Heavy packages are imported where they are used.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flexcp
from flexcp.executor.losses.averaging import Gradients
from lib.model_runs import Run, make_model, make_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.checkpoint import CheckpointPolicy

STEPS = 3


class Longer(Run):
    """A run in which every rank keeps more than one token in every step, because torch.compile compiles separate graphs
    for sizes 0 and 1.
    """

    def lengths(self, step: int) -> list[int]:
        return [8 + (5 * step) % 17, 1, 11 + (3 * step) % 7]


class Training:
    """A model on this rank with the optimizer of the single-process run, and a method that runs one training step."""

    def __init__(self, group: dist.ProcessGroup, run: Run, change: Callable[[nn.Module], None] = lambda model: None):
        from flexcp.frameworks import huggingface

        self.group, self.run, self.inputs = group, run, huggingface.inputs
        self.model: Any = make_model(run, "eager")
        huggingface.turn_on(self.model)
        change(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.learning_rate, eps=1e-3)
        self.forward: Callable[..., Any] = self.model
        self.calls = 0

    def step(self, number: int, train: bool = True) -> float:
        step = flexcp.bind(make_plan(self.run, self.model.config, number), self.group)
        tokens = self.run.tokens(number)
        with torch.set_grad_enabled(train):
            found = self.forward(**self.inputs(tokens, step))
            # Transformers computes its loss in float32.
            plain = self.run.dtype == "float32"
            loss = found.loss if plain else step.loss(found.logits[0][: step.local_tokens], step.labels(tokens))
        if train:
            loss.backward()
            self.update()
        self.calls = step.calls
        return summed(loss, self.group)

    def update(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None and type(parameter.grad) is Tensor:  # not FSDP2's DTensors
                dist.all_reduce(parameter.grad, group=self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()


def summed(loss: Tensor, group: dist.ProcessGroup) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return float(total)


def shard(group: dist.ProcessGroup, model: Any, **policy: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from flexcp.frameworks import fsdp

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    fsdp.sum_gradients(model)


def with_fsdp(group: dist.ProcessGroup, run: Run) -> list[float]:
    training = Training(group, run, partial(shard, group))
    return [training.step(n) for n in range(run.steps)]


def with_checkpointing(group: dist.ProcessGroup, run: Run) -> list[float | int]:
    training = Training(group, run)
    training.model.gradient_checkpointing_enable({"use_reentrant": False})
    training.model.train()
    return [*(training.step(n) for n in range(run.steps)), training.calls]


def save_attention(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    from torch.utils.checkpoint import CheckpointPolicy

    keep = operator == torch.ops.flexcp.attention.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_all_but_attention(model: Any) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, save_attention)
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


def with_selective_checkpointing(group: dist.ProcessGroup, run: Run) -> list[float | int]:
    training = Training(group, run, recompute_all_but_attention)
    return [*(training.step(n) for n in range(run.steps)), training.calls]


def with_accumulation(group: dist.ProcessGroup, run: Run) -> list[float]:
    """Train with documents dealt to two micro-batches, each under its own plan; FSDP2 reduces gradients once."""
    from flexcp.frameworks import huggingface

    training = Training(group, run, partial(shard, group))
    planner = huggingface.planner(
        training.model.config, flexcp.cluster("cpu", 1, run.ranks), run.dtype, strategy="blocks"
    )
    losses = []
    for number in range(run.steps):
        documents = run.tokens(number).split(run.lengths(number))
        targets = len(run.tokens(number)) - len(documents)
        total = 0.0
        for part in (documents[:2], documents[2:]):
            last = part[-1] is documents[-1]
            training.model.set_requires_gradient_sync(last)
            step = flexcp.bind(planner([len(d) for d in part], masks=huggingface.masks(training.model.config)), group)
            tokens = torch.cat(part)
            logits = training.model(**huggingface.inputs(tokens, step)).logits[0]
            share = (len(tokens) - len(part)) / targets
            loss = step.loss(logits[: step.local_tokens], step.labels(tokens)) * share
            loss.backward()
            total += summed(loss, group)
        training.update()
        losses.append(total)
    return losses


def with_mixed_precision(group: dist.ProcessGroup, run: Run) -> list[float]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    training = Training(group, run, partial(shard, group, mp_policy=policy))
    training.run = Run(run.family, run.strategy, ranks=run.ranks, dtype="bfloat16", steps=run.steps)
    return [training.step(n) for n in range(run.steps)]


def with_tensor_parallelism(group: dist.ProcessGroup, run: Run, sequence: bool) -> list[float]:
    """Train on the first four ranks. All ranks make the mesh: torch names groups by how many a rank has made, so ranks
    that have made different numbers of groups would wait forever for each other in the next mesh of all ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from flexcp.frameworks import huggingface

    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp", "tp"))
    if dist.get_rank(group) >= 4:
        return []
    training = Training(mesh["cp"].get_group(), run, partial(split_heads, mesh["tp"], sequence=sequence))
    planner = huggingface.planner(
        training.model.config, flexcp.cluster("cpu", 1, 2), run.dtype, tp=2, strategy="blocks"
    )
    losses = []
    for number in range(run.steps):
        plan = planner(run.lengths(number), masks=huggingface.masks(training.model.config), tokens="equal", pad_to=2)
        step, tokens = flexcp.bind(plan, mesh["cp"]), run.tokens(number)
        logits = training.model(**huggingface.inputs(tokens, step)).logits[0]
        loss = step.loss(logits, step.labels(tokens))
        loss.backward()
        losses.append(summed(loss, training.group))
        for parameter in training.model.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor):  # norms under sequence parallelism hold partial gradients
                parameter.grad = grad = grad.redistribute(placements=parameter.placements)
                grad = grad.to_local()
            dist.all_reduce(grad, group=training.group)
        training.optimizer.step()
        training.optimizer.zero_grad()
    return losses


def split_heads(mesh: DeviceMesh, model: Any, sequence: bool) -> None:
    """Apply tensor parallelism by torch's parallel styles; with ``sequence``, everything between attention and MLP
    holds half of the rows.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()
    for layer in model.model.layers:
        columns = {
            n: ColwiseParallel()
            for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        }
        rows = {n: RowwiseParallel(output_layouts=between) for n in ("self_attn.o_proj", "mlp.down_proj")}
        plan: dict[str, Any] = columns | rows
        if sequence:
            plan |= {n: SequenceParallel() for n in ("input_layernorm", "post_attention_layernorm")}
            plan["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        parallelize_module(layer, mesh, plan)
    if sequence:
        whole = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, whole)


def with_everything(group: dist.ProcessGroup, run: Run) -> list[float | int]:
    """Train with layers that are compiled without graph breaks, recomputed in backward and sharded by FSDP2."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def change(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        for layer in model.model.layers:
            layer.compile(backend=counter, fullgraph=True)
        shard(group, model)

    training = Training(group, run, change)
    return [*(training.step(n) for n in range(run.steps)), training.calls, counter.frame_count]


def with_a_compiled_model(group: dist.ProcessGroup, run: Run) -> tuple[list[float], list[float], int]:
    """Return the losses of a model of one layer, uncompiled and compiled as a whole, and the count of compilations."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def one_layer(model: Any) -> None:
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain, compiled = Training(group, run, one_layer), Training(group, run, one_layer)
    compiled.forward = torch.compile(compiled.model, backend=counter, fullgraph=True)
    losses = [[training.step(n) for n in range(run.steps)] for training in (plain, compiled)]
    return losses[0], losses[1], counter.frame_count


def side_by_side(group: dist.ProcessGroup, runs: list[Run]) -> list[list[float]]:
    """Train two models together: the forwards of both, then the backwards of both in reverse order."""
    trainings = [Training(group, run) for run in runs]
    losses: list[list[float]] = [[], []]
    for number in range(STEPS):
        pending = []
        for training in trainings:
            run = training.run
            step = flexcp.bind(make_plan(run, training.model.config, number), group)
            logits = training.model(**training.inputs(run.tokens(number), step)).logits[0]
            pending.append(step.loss(logits[: step.local_tokens], step.labels(run.tokens(number))))
            del step  # the autograd graph keeps what the backward needs
        for loss, training, mine in reversed(list(zip(pending, trainings, losses, strict=True))):
            loss.backward()
            training.update()
            mine.append(summed(loss, group))
    return losses


def with_evaluation(group: dist.ProcessGroup, run: Run) -> tuple[list[float], list[float]]:
    training = Training(group, run)
    plans = {True: run, False: Run(run.family, "zigzag", "contiguous", run.ranks)}
    losses: dict[bool, list[float]] = {True: [], False: []}
    for number in range(run.steps):
        for train in (False, True):
            training.run = plans[train]
            losses[train].append(training.step(number, train))
    return losses[True], losses[False]


def streams_of_their_own(group: dist.ProcessGroup, given: str) -> str:
    """Return what a rank is told when token ids are ``given`` to a group's first step: the same ids to all ranks, other
    ids to each, too few to rank 1, other labels to each, or labels to one rank alone.
    """
    from flexcp.frameworks import huggingface

    plan = flexcp.Planner(2, 2, 8, dtype="float32", cluster=flexcp.cluster("cpu", 1, 2))([8, 8])
    step = flexcp.bind(plan, group, timeout=4)
    huggingface.inputs(torch.arange(16) + step.rank, flexcp.bind(plan, group))  # later steps are not compared
    step.collectives.step = 1  # as in a new group; the pool has used this one before
    try:
        if given == "too few" and step.rank == 1:
            huggingface.inputs(torch.arange(15), step)
        if given == "other labels":
            labels = [torch.arange(16), torch.where(torch.arange(16) < 3, -100, torch.arange(16))]
            huggingface.inputs(torch.arange(16), step, labels[step.rank])
        if given == "labels of one rank":  # these labels are the default that the other rank uses
            huggingface.inputs(torch.arange(16), step, torch.arange(16) if step.rank else None)
        huggingface.inputs(torch.arange(16) + (step.rank if given == "others" else 0), step)
        huggingface.inputs(torch.arange(16) + step.rank, step)  # a step that is used again is not compared
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        dist.barrier(group)  # delete the key only after all ranks have read it
        if step.rank == 0:
            group.get_group_store().delete_key("flexcp/said/token ids/0")
    return "accepted"


def labels_of_some_ranks(group: dist.ProcessGroup, given: str) -> str:
    """Return what a rank is told when rank 0 has labels and rank 1 has none, ``given`` being rank 1's documents.

    They are "a document", "no documents", or "none has" if rank 0 has no labels either.
    """
    from flexcp.frameworks.huggingface_trainer import prepared

    planner = flexcp.Planner(2, 2, 8, dtype="float32", cluster=flexcp.cluster("cpu", 1, 2))
    rank = dist.get_rank(group)
    ids = torch.arange(1, 9)[None] + rank
    batch = {"input_ids": ids}
    if rank == 0 and given != "none has":
        batch["labels"] = torch.where(torch.arange(8) < 5, -100, ids)
    if rank == 1 and given == "no documents":
        batch["input_ids"] = ids[:, :0]
    try:
        return f"{int(prepared(batch, planner, group)['num_items_in_batch'])} labels"
    except ValueError as error:
        return str(error)


def ids_cut_by_hand(group: dist.ProcessGroup, ids: str) -> list[str]:
    """Return the warnings of a turned-on model and its loss; ``ids`` says where this rank's token ids come from."""
    from flexcp.frameworks import huggingface

    run = Run("llama")
    model = make_model(run, "eager")
    huggingface.turn_on(model)
    where = flexcp.cluster("cpu", ranks_per_node=2)
    plan = huggingface.planner(model, where, strategy="zigzag")([16, 16], masks=huggingface.masks(model.config))
    tokens = torch.randint(64, (32,), generator=torch.Generator().manual_seed(0))
    step = flexcp.bind(plan, group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        labels = step.labels(tokens)
        rows = tokens.tensor_split(2)[step.rank] if ids == "cut by hand" else step.shard(tokens)
        logits = model(rows[None], step=step, use_cache=False).logits[0]
        step.loss(logits, rows.clone() if ids == "labels too" else labels)
    return [str(w.message) for w in caught if "step" in str(w.message)]


def rows_after_a_failure(group: dist.ProcessGroup) -> bool:
    """Return whether logits have all rows of this rank after an earlier forward, with empty ranks, failed."""
    from flexcp.frameworks import huggingface

    model = make_model(Run("llama"), "eager")
    huggingface.turn_on(model)
    planner = huggingface.planner(model, flexcp.cluster("cpu", ranks_per_node=3), strategy="dp")

    def fail(module: nn.Module, arguments: Any) -> None:
        raise ArithmeticError("a user's own mistake")

    for lengths, hook in (([7], model.lm_head.register_forward_pre_hook(fail)), ([7, 7, 7], None)):
        step = flexcp.bind(planner(lengths), group)
        ids = step.shard(torch.arange(sum(lengths)))[None]
        try:
            logits = model(ids, step=step, use_cache=False).logits
        except ArithmeticError:
            assert hook is not None
            hook.remove()
    return bool(logits.shape[1] == step.local_tokens == 7)


def own_ids_of_few_tokens(group: dist.ProcessGroup) -> tuple[int, float, float]:
    """Train a batch that leaves some ranks without a token; return this rank's tokens, and the differences of the loss
    and (the largest) of the gradients from those of one process.
    """
    from flexcp.frameworks import huggingface

    run = Run("llama")
    model, alone = make_model(run, "eager"), make_model(run, "eager")
    huggingface.turn_on(model)
    where = flexcp.cluster("cpu", ranks_per_node=3)
    step = flexcp.bind(huggingface.planner(model, where, strategy="dp")([7]), group)
    tokens = torch.randint(64, (7,), generator=torch.Generator().manual_seed(0))
    logits = model(step.shard(tokens)[None], position_ids=step.positions[None], step=step, use_cache=False).logits[0]
    loss = step.loss(logits, step.labels(tokens))
    loss.backward()
    # Not by Transformers' own loss and softmax, which are in float32.
    huggingface.turn_on(alone)
    logits = alone(tokens[None], use_cache=False, step="alone").logits[0, :-1]
    right = nn.functional.cross_entropy(logits, tokens[1:])
    right.backward()
    dist.all_reduce(loss := loss.detach(), group=group)
    off = 0.0
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        dist.all_reduce(mine.grad, group=group)
        off = max(off, float((mine.grad - other.grad).abs().max()))
    return step.local_tokens, float(loss - right.detach()), off


def counted_labels(group: dist.ProcessGroup, gradients: Gradients) -> int:
    """Return the number of labels that a model is given, as an integer."""
    from flexcp.frameworks import huggingface

    plan = flexcp.Planner(2, 2, 8, dtype="float32", cluster=flexcp.cluster("cpu", 1, 2))([8, 8])
    given = huggingface.inputs(torch.arange(16), flexcp.bind(plan, group), gradients=gradients)
    return int(given["num_items_in_batch"])


def whole_stream(group: dist.ProcessGroup, positions: bool) -> str:
    """Return the error of a turned-on model that gets the ids of all ranks, with or without this rank's positions."""
    from flexcp.frameworks import huggingface

    run = Run("llama", ranks=2)
    model = make_model(run, "eager")
    huggingface.turn_on(model)
    step = flexcp.bind(make_plan(run, model.config, 0), group)
    try:
        more = {"position_ids": step.positions[None]} if positions else {}
        model(run.tokens(0)[None], step=step, use_cache=False, **more)
    except ValueError as error:
        return str(error)
    return "accepted"


def uses_of_the_count(group: dist.ProcessGroup, tokens: Tensor, lengths: list[int], as_tensor: bool) -> list[list[Any]]:
    """Return what is read of ``num_items_in_batch``: texts, comparisons, numbers, copies and a tensor divided by it."""
    from flexcp.frameworks import huggingface
    from flexcp.frameworks.huggingface_checks import ValidLabels

    plan = flexcp.Planner(2, 2, 8, dtype="float32", cluster=flexcp.cluster("cpu", 1, 2))(lengths)
    step = flexcp.bind(plan, group)
    n = huggingface.inputs(tokens, step, gradients="averaged")["num_items_in_batch"]
    if as_tensor:
        n = ValidLabels(torch.tensor(int(n)), step, "averaged")
    valid = len(tokens) - len(lengths)
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, n, group)
    step.calls = 1  # as if a model had run: tensors are divided only then
    return [
        [str(n), repr(n), f"{n}", f"{n:.1f}", f"{n:>6d}", f"{n:,}"],
        [n == valid, n == n * 1, n != valid / group.size(), n < valid, n >= n, {valid: True}.get(n)],
        [n - 1, 1 - n, 2 / n, n + 0.5, bool(n)],
        [gathered[0], type(gathered[1]), copy.copy(n) is n, copy.deepcopy({"n": n})["n"] is n],
        [float(torch.tensor(3.0, dtype=torch.float64) / n)],
    ]


def without_a_step(group: dist.ProcessGroup, tokens: Tensor, positions: Tensor) -> str:
    training = Training(group, Run("llama"))
    given = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False}
    training.model(**given, step="alone")
    try:
        training.model(**given)
    except ValueError as error:
        return str(error)
    return "accepted"


def logits_or_message(
    group: dist.ProcessGroup | None, config: Any, lengths: list[int], on: bool = True, ranks: int = 2
) -> Tensor | str:
    """Return the logits of the whole stream by a model of ``config`` under a plan, or why the model was refused.

    Without ``on``, ``huggingface.turn_on`` is not called; flexcp is only the model's ``attn_implementation``.
    """
    import transformers

    from flexcp.frameworks import huggingface

    torch.manual_seed(0)
    huggingface.register()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if on else "flexcp")
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, ranks), strategy="blocks")
    step = flexcp.bind(planner(lengths, flexcp.causal(), layout="contiguous"), group)
    tokens = torch.arange(sum(lengths)) % 64
    try:
        if on:
            huggingface.turn_on(model)
        found = model(step.shard(tokens)[None], position_ids=step.positions[None], step=step, use_cache=False).logits[0]
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return step.gather(found.detach())


def copies_of_a_shared_model(group: dist.ProcessGroup) -> dict[str, list[bool]]:
    """Return for a model whose forwards are shared, and for a copy of it, whether forward and generate are their own.

    The copy is made when the model is shared already, and then the weights of the model change.
    """
    from flexcp.frameworks import huggingface
    from flexcp.frameworks.shared_forward import share_forward

    model, *alone = (make_model(Run("llama", dtype="float32"), "eager") for _ in range(3))
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, dist.get_world_size(group)))
    share_forward(model, planner, group)
    twin = copy.deepcopy(model)
    ids = torch.arange(1, 9)[None] + dist.get_rank(group)
    found = {}
    with torch.no_grad():
        for one in (model, alone[0]):
            for number, weight in enumerate(one.parameters()):
                weight.add_(torch.sin(torch.arange(weight.numel()) + number).view_as(weight) * 0.3)
        for name, shared, own in (("model", model, alone[0]), ("copy", twin, alone[1])):
            right = own(input_ids=ids, use_cache=False).logits
            many = [x.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist() for x in (shared, own)]
            again = shared(input_ids=ids).logits  # generating leaves the forward shared
            found[name] = [torch.allclose(again, right, atol=1e-5), many[0] == many[1]]
    return found
