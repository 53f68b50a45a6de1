"""Proves that a forward or backward pass works in the memory that the plan announced: one allocation of exactly that
size, used to its last byte.

A torch dispatch mode around each pass, which knows nothing about plans, records every allocation with its size and
which bytes of it each operation reads or writes. Other tests show that arenas do not interfere with each other (nested
leases, errors, several steps, recomputation), and that results do not depend on what an arena contained before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp.executor import attention
from flexcp.executor.exchange.arena import Arena, Buffers
from flexcp.executor.run.rank_program import rank_program
from flexcp.executor.step import Step
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

CPU = torch.device("cpu")
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 6}


# --- what runs on the ranks -------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Records the tensors that one pass allocates, and, for each size of arena, the end of the last byte that the pass
    uses.

    Arenas are the storages that were allocated as plain bytes (uint8).
    """

    def __init__(self, arenas: dict[int, Any]) -> None:
        super().__init__()
        self.arenas, self.made = arenas, list[tuple[torch.dtype, int]]()
        self.touched: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default, torch.ops.aten.full.default):
            storage = found.untyped_storage()
            self.made.append((found.dtype, storage.nbytes()))
            if found.dtype == torch.uint8 and storage.nbytes():
                self.arenas[storage.data_ptr()] = storage  # kept alive so that its address is not reused
            return found
        views = func in (torch.ops.aten.slice.Tensor, torch.ops.aten.view.default, torch.ops.aten.view.dtype)
        for x in [] if views else tree_leaves((args, kwargs, found)):
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() in self.arenas:
                last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
                size = x.untyped_storage().nbytes()
                self.touched[size] = max(self.touched.get(size, 0), (last + 1) * x.element_size())
        return found


@contextmanager
def watching() -> Iterator[list[Seen]]:
    """Watch every pass of this process with a :class:`Seen`; yields the list of them, in the order of the passes."""
    made: list[Seen] = []
    arenas: dict[int, Any] = {}

    def seen(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            made.append(Seen(arenas))
            with made[-1]:
                return run(*arguments, **options)

        return wrapped

    before = attention.run_forward, attention.run_backward
    attention.run_forward, attention.run_backward = (seen(run) for run in before)
    try:
        yield made
    finally:
        attention.run_forward, attention.run_backward = before


def one_layer(step: Step, mask: str | None = None, seed: int = 0, recompute: bool = False) -> list[Tensor]:
    """Run forward and backward of one attention call; return out, dq, dk and dv of this rank's rows."""
    shape, generator = step.plan.shape, torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    sizes = [(shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim)]
    stream = [torch.randn(step.plan.batch.tokens, *size, generator=generator) for size in sizes]
    leaves = [step.shard(x).to(dtype).requires_grad_() for x in stream]

    def call(*qkv: Tensor) -> Tensor:
        return flexcp.attention(*qkv, step, mask=mask)  # type: ignore[return-value]

    out = checkpoint(call, *leaves, use_reentrant=False) if recompute else call(*leaves)
    out.sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def on_passes(
    group: dist.ProcessGroup, plans: list[Plan]
) -> list[list[tuple[list[tuple[torch.dtype, int]], dict[int, int]]]]:
    """For each plan, return what each pass allocated and how far it used the arenas, for all masks, forward before
    backward.
    """
    found = []
    for plan in plans:
        step = flexcp.bind(plan, group)
        with watching() as passes:
            for mask in plan.batch.masks:
                one_layer(step, mask.name)
        found.append([(one.made, one.touched) for one in passes])
    return found


def on_two_layers(group: dist.ProcessGroup, plans: list[Plan], share: bool, recompute: bool) -> tuple[Any, list[int]]:
    """Return the results of two layers of each plan, and the size of every allocation of plain bytes."""
    results: list[Any] = []
    arena = None
    with watching() as passes:
        for plan in plans:
            step = flexcp.bind(plan, group, arena=arena if share else None)
            arena = step.arena
            results += [one_layer(step, seed=layer, recompute=recompute) for layer in range(2)]
    return [_arrays(layer) for layer in results], [
        size for one in passes for dtype, size in one.made if dtype == torch.uint8 and size
    ]


def on_strange_memory(group: dist.ProcessGroup, plan: Plan) -> tuple[list[Any], bool]:
    """Return the results of three runs, and whether the third one left somebody else's lease of the arena unchanged.

    The runs are: with new memory, with an arena full of NaNs, and while the arena is leased to somebody else.
    """
    step = flexcp.bind(plan, group)
    runs = [one_layer(step)]
    with step.arena.lease(step.arena.size, CPU) as memory:
        memory.fill_(0xFF)  # a NaN in every dtype
    runs.append(one_layer(step))
    with step.arena.lease(step.arena.size, CPU) as memory:
        memory.fill_(7)
        runs.append(one_layer(step))
        alone = bool((memory == 7).all())
    return [_arrays(run) for run in runs], alone


def _arrays(tensors: list[Tensor]) -> list[Any]:
    return [x.to(torch.float64).numpy() for x in tensors]


# --- planned memory equals measured memory ----------------------------------------------------------------------------


def random_plans(ranks: int, count: int) -> list[Plan]:
    """Plans of every strategy over random lengths, masks, dtypes and layouts, from a seed."""
    random = np.random.default_rng(ranks)
    strategies = ["ring", "blocks", "zigzag", "groups", "allgather", "blocks", "auto", "minheap", "blocks"]
    strategies[7:] = ["ulysses", "usp"] if ranks in (2, 4) else strategies[7:]
    every = [
        flexcp.causal(),
        flexcp.full(),
        flexcp.window(20, 5),
        flexcp.masks.lambda_(4, 9),
        flexcp.masks.causal_blockwise(16, 1),
    ]
    found = []
    for number in range(count):
        strategy = strategies[number % len(strategies)]
        lengths = random.integers(1, 50, random.integers(1, 4)).tolist()
        where = flexcp.cluster("cpu", 2, ranks // 2) if ranks == 4 and number % 2 else flexcp.cluster("cpu", 1, ranks)
        dtype = ("float64", "bfloat16", "float32")[number % 3]
        planner = flexcp.Planner(**SHAPE, dtype=dtype, cluster=where, strategy=strategy)
        one, two = (every[i] for i in random.permutation(len(every))[:2])
        options: dict[str, Any] = {"masks": {"one": (one, 2), "two": (two, 1)}} if number % 4 == 1 else {"mask": one}
        if strategy == "blocks":
            options["layout"] = ("contiguous", "zigzag", _scattered(sum(lengths), ranks))[number // 3 % 3]
        found.append(planner(lengths, **options))
    return found


def _scattered(tokens: int, ranks: int) -> list[list[int]]:
    order = np.random.default_rng(tokens).permutation(tokens)
    return [part.tolist() for part in np.array_split(order, ranks)]


@pytest.mark.parametrize("ranks", [3, 4])
def test_planned_memory_is_what_is_allocated_and_touched(pool: RankPool, ranks: int) -> None:
    plans = random_plans(ranks, 9) + [plan for plan in keeping_plans(1 << 30) if plan.ranks == ranks][:2]
    for rank, of_plans in enumerate(pool.run(on_passes, plans, ranks=ranks)):
        for plan, passes in zip(plans, of_plans, strict=True):
            where, memory = f"{plan!r} rank {rank}", plan.memory(rank)
            plain = [size for made, _ in passes for dtype, size in made if dtype == torch.uint8 and size]
            kept = [mask_bytes for mask_bytes in kept_keys(plan, rank) if mask_bytes]
            assert sorted(plain) == sorted([memory.arena] * bool(memory.arena) + kept), where
            touched = [max(ends.get(memory.arena, 0) for _, ends in passes[way::2]) for way in (0, 1)]
            assert [-(-end // 128) * 128 for end in touched] == [memory.forward, memory.backward], where
            own = [sum(size for dtype, size in made if dtype != torch.uint8) for made, _ in passes]
            assert own == own_results(plan, rank) * len(plan.batch.masks), where


def kept_keys(plan: Plan, rank: int) -> list[int]:
    """Return, for each mask, the bytes of received keys that one layer keeps for the backward pass."""
    return [rank_program(plan, rank, mask, False).kept_size for mask in range(len(plan.programs))]


def own_results(plan: Plan, rank: int) -> list[int]:
    """Return the bytes of a rank's own results, forward and backward, in the accumulator's dtype.

    Own results are all that a pass allocates outside of the arena.
    """
    shape, tokens, acc = plan.shape, int(plan.placement.tokens[rank]), plan.shape.accumulator_bytes
    keys = shape.kv_heads * (shape.head_dim + shape.v_head_dim)
    return [tokens * shape.heads * (shape.v_head_dim * acc + 8), tokens * (shape.heads * shape.head_dim + keys) * acc]


# --- sharing an arena -------------------------------------------------------------------------------------------------


def two_plans(ranks: int) -> list[Plan]:
    planner = flexcp.Planner(**SHAPE, dtype="float32", cluster=flexcp.cluster("cpu", 1, ranks), strategy="ring")
    return [planner([40, 9], flexcp.causal()), planner([90, 31], flexcp.full())]


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_and_steps_share_one_arena(pool: RankPool, recompute: bool) -> None:
    plans = two_plans(3)
    apart = pool.run(on_two_layers, plans, False, recompute, ranks=3)
    shared = pool.run(on_two_layers, plans, True, recompute, ranks=3)
    for rank, ((one, sizes), (two, _)) in enumerate(zip(shared, apart, strict=True)):
        assert sizes == [plan.memory(rank).arena for plan in plans]  # the second plan is larger, so the arena grew once
        assert all(np.array_equal(x, y) for a, b in zip(one, two, strict=True) for x, y in zip(a, b, strict=True))
    backwards = pool.run(on_two_layers, plans[::-1], True, recompute, ranks=3)
    assert [sizes for _, sizes in backwards] == [[plans[1].memory(rank).arena] for rank in range(3)]


@pytest.mark.parametrize("strategy", ["usp", "blocks"])
def test_what_the_arena_held_does_not_matter_nor_who_holds_it(pool: RankPool, strategy: str) -> None:
    planner = flexcp.Planner(**SHAPE, dtype="bfloat16", cluster=flexcp.cluster("cpu", 2, 2), strategy=strategy)
    for (first, *others), alone in pool.run(on_strange_memory, planner([70, 33, 2], flexcp.causal()), ranks=4):
        assert alone
        for other in others:
            assert all(np.array_equal(x, y) for x, y in zip(first, other, strict=True))


# --- the arena alone --------------------------------------------------------------------------------------------------


def test_a_lease_inside_a_lease_and_one_in_another_thread_get_other_bytes() -> None:
    arena = Arena()
    found: list[Tensor] = []

    def elsewhere() -> None:
        with arena.lease(64, CPU) as memory:
            found.append(memory)

    with arena.lease(64, CPU) as outer:
        elsewhere()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    elsewhere()
    assert [x.data_ptr() == outer.data_ptr() for x in found] == [False, False, True]


def test_an_arena_is_made_once_as_large_as_was_asked() -> None:
    arena = Arena()
    arena.reserve(1000)
    assert arena.size == 0
    with arena.lease(0, CPU) as none:
        assert (len(none), arena.size) == (0, 0)
    with arena.lease(300, CPU) as first:
        assert (len(first), arena.size) == (300, 1000)
    with arena.lease(1000, CPU) as second:
        assert first.data_ptr() == second.data_ptr()
    with arena.lease(2000, CPU):
        assert arena.size == 2000


def test_after_an_error_the_bytes_are_given_up() -> None:
    arena = Arena()
    with pytest.raises(RuntimeError, match="lost"), arena.lease(64, CPU) as late:
        raise RuntimeError("a message was lost on its way here")
    with arena.lease(64, CPU) as memory:
        assert memory.data_ptr() != late.data_ptr()  # a late message may still be written there


class Owner:
    """Something that views are made for."""


def kept_views(arena: Arena, owner: Owner, size: int = 64) -> Tensor:
    """Return what the arena keeps for an owner: a view of the first bytes of a lease."""
    with arena.lease(size, CPU) as memory:
        return arena.kept(owner, memory, lambda whole: whole[:8])


def test_views_are_made_once_for_an_owner_and_the_arenas_own_bytes() -> None:
    arena, one, other = Arena(), Owner(), Owner()
    first = kept_views(arena, one)
    assert kept_views(arena, one) is first and kept_views(arena, other) is not first
    with arena.lease(64, CPU) as outer, arena.lease(64, CPU) as inner:
        assert arena.kept(one, outer, lambda whole: whole[:8]) is first
        strange = arena.kept(one, inner, lambda whole: whole[:8])
        assert strange.data_ptr() == inner.data_ptr() != first.data_ptr()
    assert kept_views(arena, one) is first, "nothing of a second lease is kept"


def test_views_are_forgotten_with_their_owner_and_with_their_bytes() -> None:
    arena, owner = Arena(), Owner()
    first = weakref.ref(kept_views(arena, owner))
    assert first() is not None
    grown = kept_views(arena, owner, 1000)
    assert first() is None and grown.data_ptr() == kept_views(arena, owner, 1000).data_ptr()
    lost = weakref.ref(grown)
    with pytest.raises(RuntimeError, match="lost"), arena.lease(64, CPU):
        raise RuntimeError("a message was lost on its way here")
    del grown
    assert lost() is None
    last = weakref.ref(kept_views(arena, owner))
    del owner
    assert last() is None


def test_messages_lie_side_by_side_at_whole_lines() -> None:
    memory = torch.zeros(600, dtype=torch.uint8)
    buffers = Buffers([(3, 100), (1, 130), (2, 8)], memory)
    ends = [(peer, x.data_ptr() - memory.data_ptr(), len(x)) for peer, x in buffers.messages]
    assert ends == [(3, 0, 100), (1, 128, 130), (2, 384, 8)]
    assert len(buffers.memory) == 512
    assert buffers.part(1, 2, 5) is buffers.part(1, 2, 5) and buffers.part(1, 2, 5).storage_offset() == 130
    assert len(buffers.part(1, 2, 6)) == 4


# --- keys kept for the backward pass ----------------------------------------------------------------------------------


def keeping_plans(keep: int) -> list[Plan]:
    """Return plans that send only keys that are read, with moved queries, relays, several stages, two masks or pads."""
    found = []
    for number, (nodes, each) in enumerate(((1, 3), (2, 2), (1, 4))):
        ranks = nodes * each
        where = flexcp.cluster("cpu", nodes, each)
        dtype = ("float64", "bfloat16")[number % 2]
        for strategy in ("blocks", "groups:level=no"):
            planner = flexcp.Planner(**SHAPE, dtype=dtype, cluster=where, strategy=strategy, keep_kv=keep)
            masks = {"one": (flexcp.causal(), 2), "two": (flexcp.window(30, 4), 1)}
            found.append(planner([90, 20, 3], masks=masks))
            found.append(planner([100, 3], flexcp.full(), tokens="equal", pad_to=8))
        if ranks == 4:
            planner = flexcp.Planner(**SHAPE, dtype=dtype, cluster=where, strategy="blocks", keep_kv=keep)
            found.append(planner([70, 31], flexcp.causal(), layout="zigzag"))
    return found


def on_kept(group: dist.ProcessGroup, plans: list[tuple[Plan, Plan]], recompute: bool) -> list[dict[str, Any]]:
    """Run both plans of each pair with all masks; return results, bytes sent backward, and the sizes of saved keys.

    The sizes of saved keys are those that autograd's saved-tensor hooks see.
    """
    found = []
    for pair in plans:
        one: dict[str, Any] = {"results": [], "sent": [], "saved": []}
        for plan in pair:
            step, saved = flexcp.bind(plan, group), list[int]()

            def pack(x: Tensor, saved: list[int] = saved) -> Tensor:
                saved += [x.numel()] if x.dtype == torch.uint8 and x.dim() == 1 else []
                return x.clone()  # as offloading would: backward gets different memory

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                runs = [one_layer(step, mask.name, recompute=recompute) for mask in plan.batch.masks]
            one["results"].append([_arrays(run) for run in runs])
            one["sent"].append(list(step.sent_bytes["backward"]))
            one["saved"].append(saved)
        found.append(one)
    return found


@pytest.mark.parametrize(("counts", "recompute"), [((3, 4), False), ((3,), True)])
def test_kept_keys_do_not_travel_again(pool: RankPool, counts: tuple[int, ...], recompute: bool) -> None:
    pairs = list(zip(keeping_plans(1 << 30), keeping_plans(0), strict=True))
    assert all(one.programs[0][1].keys_kept and not two.programs[0][1].keys_kept for one, two in pairs)
    for ranks in counts:
        mine = [pair for pair in pairs if pair[0].ranks == ranks]
        for rank, runs in enumerate(pool.run(on_kept, mine, recompute, ranks=ranks)):
            for (kept, again), run in zip(mine, runs, strict=True):
                where = f"{kept!r} rank {rank}"
                for x, y in zip(*([y for m in r for y in m] for r in run["results"]), strict=True):
                    scale = max(1.0, float(np.abs(y).max(initial=0)))
                    bound = 1e-11 if kept.shape.dtype == "float64" else 0.02
                    assert np.abs(x - y).max(initial=0) <= bound * scale, where
                for plan, sent in zip((kept, again), run["sent"], strict=True):
                    planned = sum(plan.bytes(True, mask)[rank] for mask in range(len(plan.programs)))
                    assert sent == planned.tolist(), where
                assert sum(run["sent"][0]) < sum(run["sent"][1]) or not sum(run["sent"][1]), where


def test_kept_keys_are_saved_where_hooks_see_them_and_counted(pool: RankPool) -> None:
    pairs = [pair for pair in zip(keeping_plans(1 << 30), keeping_plans(0), strict=True) if pair[0].ranks == 3]
    for rank, runs in enumerate(pool.run(on_kept, pairs, False, ranks=3)):
        for (kept, again), run in zip(pairs, runs, strict=True):
            layers = [mask.layers for mask in kept.batch.masks]
            sizes = [size for size in run["saved"][0] if size]
            assert kept.memory(rank).kept_keys == sum(n * size for n, size in zip(layers, run["saved"][0], strict=True))
            assert bool(sizes) == bool(kept.memory(rank).kept_keys)
            assert not any(run["saved"][1]) and again.memory(rank).kept_keys == 0
