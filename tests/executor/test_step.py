"""Proves the step: what moves between the batch's stream of tokens and the ranks (shard, gather, roll, labels, loss),
and which plans and groups can be bound.

Every layout operation runs on real ranks under every strategy and layout and is compared with plain torch on the whole
stream. When the plan does not fit the group, differs between ranks, or a rank stays away, all ranks soon raise an
error.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flexcp
from flexcp.executor.step import Step
from flexcp.frameworks import used
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

LENGTHS = [1, 37, 2, 5, 90, 1, 16, 3]
TOKENS = sum(LENGTHS)
VOCABULARY = 11
RANK_COUNTS = (1, 3, 4)
STRATEGIES = ("dp", "ring", "zigzag", "allgather", "ulysses", "usp", "blocks")
Arrays = dict[str, np.ndarray]


def plan_for(strategy: str, ranks: int, lengths: list[int] = LENGTHS, **options: Any) -> Plan:
    where = flexcp.cluster("cpu", 1, ranks)
    return flexcp.Planner(12, 12, 8, dtype="float64", cluster=where, strategy=strategy)(lengths, **options)


def index_maps(ranks: int, pieces: int) -> list[list[int]]:
    """Return layouts whose local order is not stream order: pieces of the stream, dealt out to ranks in descending
    order.
    """
    parts = np.array_split(np.arange(TOKENS), pieces)[::-1]
    return [np.concatenate(parts[r::ranks]).tolist() for r in range(ranks)]


@cache
def plans(ranks: int) -> dict[str, Plan]:
    """Return plans of every strategy with every layout that it supports."""
    found = {}
    for strategy in STRATEGIES:
        found[f"{strategy} free"] = plan_for(strategy, ranks)
        found[f"{strategy} equal"] = plan_for(strategy, ranks, tokens="equal")
        found[f"{strategy} padded"] = plan_for(strategy, ranks, tokens="equal", pad_to=16)
        if strategy == "dp":
            continue
        for layout in ("contiguous", "zigzag"):
            found[f"{strategy} {layout}"] = plan_for(strategy, ranks, layout=layout)
        found[f"{strategy} index map"] = plan_for(strategy, ranks, layout=index_maps(ranks, 4 * ranks))
    found["blocks scattered"] = plan_for("blocks", ranks, layout=index_maps(ranks, TOKENS))
    if ranks == 4:
        found["zigzag:2 free"] = plan_for("zigzag:2", ranks)
    found["few tokens"] = plan_for("blocks", ranks, [2, 1])
    found["one token"] = plan_for("ring", ranks, [1])
    return found


def stream_tensor(tokens: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(tokens, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def token_ids(tokens: int) -> Tensor:
    return torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(3))


def shifted(stream: Tensor, lengths: list[int], shift: int, fill: float) -> Tensor:
    """Shift each document of the stream separately, in plain torch."""
    moved = []
    for part in stream.split(lengths):
        out = torch.full_like(part, fill)
        n, by = len(part), min(abs(shift), len(part))
        if shift < 0:
            out[: n - by] = part[by:]
        else:
            out[by:] = part[: n - by]
        moved.append(out)
    return torch.cat(moved)


# --- what runs on the ranks: each takes plans by name and answers with arrays by name ---------------------------------


def on_layouts(group: dist.ProcessGroup, named: dict[str, Plan]) -> dict[str, Arrays]:
    found = {}
    for name, plan in named.items():
        step = flexcp.bind(plan, group)
        stream = stream_tensor(plan.batch.tokens, 2, 3)
        local = step.shard(stream, pad=7.0).requires_grad_()
        full = step.gather(local)
        weights = stream_tensor(plan.batch.tokens, 2, 3, seed=step.cp_rank + 1)
        (full * weights).sum().backward()
        ids = token_ids(plan.batch.tokens)
        found[name] = {
            "rank": np.array(step.cp_rank),
            "size": np.array(step.cp_size),
            "rows": np.array(step.local_tokens),
            "indices": step.indices.numpy(),
            "positions": step.positions.numpy(),
            "local": local.detach().numpy(),
            "full": full.detach().numpy(),
            "gradient": _array(local.grad),
            "ids": step.shard(ids, pad=-5).numpy(),
            "labels": step.labels(ids).numpy(),
            "ignored": step.labels(ids, ignore=-1).numpy(),
        }
    return found


def on_rolls(group: dist.ProcessGroup, named: dict[str, Plan], shift: int, fill: float) -> dict[str, Arrays]:
    found = {}
    for name, plan in named.items():
        step = flexcp.bind(plan, group)
        local = step.shard(stream_tensor(plan.batch.tokens, 2), pad=99.0).requires_grad_()
        rolled = step.roll(local, shift, fill)
        (rolled * step.shard(stream_tensor(plan.batch.tokens, 2, seed=1), pad=50.0)).sum().backward()
        found[name] = {
            "indices": step.indices.numpy(),
            "rolled": rolled.detach().numpy(),
            "gradient": _array(local.grad),
            "ids": step.roll(step.shard(token_ids(plan.batch.tokens)), shift, -9).numpy(),
        }
    return found


def on_losses(group: dist.ProcessGroup, named: dict[str, Plan]) -> dict[str, Arrays]:
    found = {}
    for name, plan in named.items():
        step = flexcp.bind(plan, group)
        logits = step.shard(stream_tensor(plan.batch.tokens, VOCABULARY), pad=1e3).requires_grad_()
        loss = step.loss(logits, step.labels(token_ids(plan.batch.tokens)), without_attention=True)
        loss.backward()
        found[name] = {
            "indices": step.indices.numpy(),
            "loss": np.array(loss.item()),
            "gradient": _array(logits.grad),
        }
    return found


def on_masked_vocabulary(group: dist.ProcessGroup, plan: Plan) -> float:
    step = flexcp.bind(plan, group)
    logits = stream_tensor(plan.batch.tokens, VOCABULARY)
    logits = torch.cat([logits, torch.full_like(logits[:, :1], -torch.inf)], dim=1)
    labels = step.labels(token_ids(plan.batch.tokens))
    return float(step.loss(step.shard(logits), labels, without_attention=True))


def on_bind(group: dist.ProcessGroup, plans_by_rank: list[Plan | None], timeout: float) -> tuple[str, str, float]:
    """Bind once; return (the exception's type or "bound", its message, seconds). A plan of None is a rank that stays
    away.
    """
    plan = plans_by_rank[dist.get_rank(group)]
    begin = time.perf_counter()
    try:
        if plan is not None:
            flexcp.bind(plan, group, timeout=timeout)
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - begin
    return "away" if plan is None else "bound", "", time.perf_counter() - begin


def on_repeated_bind(group: dist.ProcessGroup, plan: Plan) -> tuple[list[Arrays], int, int]:
    """Bind the same plan several times; return what each step gathers, and the store's keys after one bind and after
    all.
    """
    store = group.get_group_store()
    stream = stream_tensor(plan.batch.tokens, 2)
    steps = [flexcp.bind(plan, group)]
    _ = steps[0].gather(steps[0].shard(stream))
    dist.barrier(group)
    before = store.num_keys()
    dist.barrier(group)
    steps += [flexcp.bind(plan, group, timeout=timedelta(seconds=30)) for _ in range(3)]
    dist.barrier(group)
    after = store.num_keys()
    dist.barrier(group)
    return [{"full": step.gather(step.shard(stream)).numpy()} for step in reversed(steps)], before, after


def on_mesh(group: dist.ProcessGroup, plan: Plan) -> tuple[int, int, np.ndarray]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(group),), mesh_dim_names=("cp",))
    step = flexcp.bind(plan, mesh)
    assert flexcp.bind(plan, mesh["cp"]).indices.equal(step.indices)
    return step.cp_rank, step.cp_size, step.gather(step.shard(stream_tensor(plan.batch.tokens))).numpy()


def on_mesh_axis(group: dist.ProcessGroup, plan_pair: list[Plan]) -> tuple[int, int, np.ndarray]:
    """Bind two context-parallel groups side by side, each with its own plan."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, dist.get_world_size(group) // 2), mesh_dim_names=("dp", "cp"))
    plan = plan_pair[mesh["dp"].get_local_rank()]
    step = flexcp.bind(plan, mesh["cp"])
    return step.cp_rank, step.cp_size, step.gather(step.shard(stream_tensor(plan.batch.tokens))).numpy()


def on_wrong_rows(group: dist.ProcessGroup, plan: Plan) -> list[str]:
    step = flexcp.bind(plan, group)
    messages = []
    for call in (
        lambda: step.shard(torch.zeros(plan.batch.tokens + 1)),
        lambda: step.labels(token_ids(plan.batch.tokens - 1)),
        lambda: step.shard(step.shard(token_ids(plan.batch.tokens))),
        lambda: step.labels(step.shard(token_ids(plan.batch.tokens))),
        lambda: step.gather(torch.zeros(step.local_tokens + 2)),
        lambda: step.roll(torch.zeros(step.local_tokens + 2)),
        lambda: step.loss(torch.zeros(step.local_tokens + 2, 4), torch.zeros(step.local_tokens + 2, dtype=torch.long)),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def _array(gradient: Tensor | None) -> np.ndarray:
    assert gradient is not None, "the local tensor got no gradient"
    return gradient.numpy()


def by_plan(answers: list[dict[str, Arrays]]) -> Iterator[tuple[str, list[Arrays]]]:
    for name in answers[0]:
        yield name, [answer[name] for answer in answers]


def laid_out(parts: list[Arrays], field: str, tokens: int) -> np.ndarray:
    """Return the stream assembled from every rank's rows by their indices, without pads."""
    index = np.concatenate([p["indices"] for p in parts])
    rows = np.concatenate([p[field] for p in parts])
    out = np.full((tokens, *rows.shape[1:]), np.nan)
    out[index[index >= 0]] = rows[index >= 0]
    return out


# --- shard and gather -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layouts(pool: RankPool) -> dict[int, list[dict[str, Arrays]]]:
    return {ranks: pool.run(on_layouts, plans(ranks), ranks=ranks) for ranks in RANK_COUNTS}


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_shards_are_exactly_the_stream_and_gather_restores_it(layouts: Any, ranks: int) -> None:
    for name, parts in by_plan(layouts[ranks]):
        plan = plans(ranks)[name]
        stream = stream_tensor(plan.batch.tokens, 2, 3).numpy()
        index = np.concatenate([p["indices"] for p in parts])
        assert sorted(index[index >= 0].tolist()) == list(range(plan.batch.tokens)), name
        assert (index == -1).sum() == plan.placement.pads, name
        for rank, part in enumerate(parts):
            real = part["indices"] >= 0
            assert (part["rank"], part["size"], part["rows"]) == (rank, ranks, len(part["indices"])), name
            assert np.array_equal(part["local"][real], stream[part["indices"][real]]), name
            assert np.all(part["local"][~real] == 7.0), name
            assert np.all(part["ids"][~real] == -5), name
            assert np.array_equal(part["full"], stream), name


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_gather_sums_the_gradients_of_all_ranks(layouts: Any, ranks: int) -> None:
    for name, parts in by_plan(layouts[ranks]):
        tokens = plans(ranks)[name].batch.tokens
        total = sum(stream_tensor(tokens, 2, 3, seed=r + 1) for r in range(ranks)).numpy()
        np.testing.assert_allclose(laid_out(parts, "gradient", tokens), total, atol=1e-12, err_msg=name)
        for part in parts:
            assert np.all(part["gradient"][part["indices"] < 0] == 0), name


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_positions_restart_in_every_document(layouts: Any, ranks: int) -> None:
    for name, parts in by_plan(layouts[ranks]):
        lengths = plans(ranks)[name].batch.lengths.tolist()
        expected = np.concatenate([np.arange(n) for n in lengths])
        for part in parts:
            real = part["indices"] >= 0
            assert np.array_equal(part["positions"][real], expected[part["indices"][real]]), name
            assert np.all(part["positions"][~real] == 0), name


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_a_fixed_layout_keeps_tokens_where_the_user_has_them(layouts: Any, ranks: int) -> None:
    stream = torch.arange(TOKENS)
    halves = stream.tensor_split(2 * ranks)
    expected = {
        "contiguous": [t.tolist() for t in stream.tensor_split(ranks)],
        "zigzag": [torch.cat([halves[r], halves[2 * ranks - 1 - r]]).tolist() for r in range(ranks)],
        "index map": index_maps(ranks, 4 * ranks),
        "scattered": index_maps(ranks, TOKENS),
    }
    checked = set()
    for name, parts in by_plan(layouts[ranks]):
        layout = name.partition(" ")[2]
        if layout in expected:
            assert [p["indices"].tolist() for p in parts] == expected[layout], name
            checked.add(layout)
    assert checked == set(expected)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_equal_tokens_are_equal_and_padded_to_the_multiple(layouts: Any, ranks: int) -> None:
    padded = 0
    for name, parts in by_plan(layouts[ranks]):
        counts = {int(p["rows"]) for p in parts}
        if name.endswith((" equal", " padded")):
            assert len(counts) == 1, name
        if name.endswith(" padded"):
            assert counts.pop() % 16 == 0, name
            padded += any((p["indices"] == -1).any() for p in parts)
    assert padded >= len(STRATEGIES) - 1


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_labels_are_shifted_before_sharding(layouts: Any, ranks: int) -> None:
    for name, parts in by_plan(layouts[ranks]):
        plan = plans(ranks)[name]
        ids = token_ids(plan.batch.tokens)
        expected = torch.cat([torch.cat([t[1:], torch.tensor([-100])]) for t in ids.split(plan.batch.lengths.tolist())])
        for part in parts:
            real = part["indices"] >= 0
            assert np.array_equal(part["labels"][real], expected.numpy()[part["indices"][real]]), name
            assert np.all(part["labels"][~real] == -100), name
            assert np.array_equal(part["ignored"], np.where(part["labels"] == -100, -1, part["labels"])), name


# --- roll -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(("shift", "fill"), [(-1, 0.0), (2, -4.0), (0, 3.0), (-40, 1.0)])
def test_roll_moves_rows_inside_documents_across_ranks(pool: RankPool, ranks: int, shift: int, fill: float) -> None:
    names = ["dp free", "ring free", "zigzag free", "ulysses contiguous", "blocks padded", "blocks free"]
    names += ["blocks index map", "few tokens", "one token"]
    chosen = {name: plans(ranks)[name] for name in names}
    for name, parts in by_plan(pool.run(on_rolls, chosen, shift, fill, ranks=ranks)):
        tokens, lengths = chosen[name].batch.tokens, chosen[name].batch.lengths.tolist()
        rolled = shifted(stream_tensor(tokens, 2), lengths, shift, fill).numpy()
        back = shifted(stream_tensor(tokens, 2, seed=1), lengths, -shift, 0.0).numpy()
        assert np.array_equal(laid_out(parts, "rolled", tokens), rolled), name
        assert np.array_equal(laid_out(parts, "gradient", tokens), back), name
        assert np.array_equal(laid_out(parts, "ids", tokens), shifted(token_ids(tokens), lengths, shift, -9).numpy()), (
            name
        )
        for part in parts:
            pads = part["indices"] < 0
            assert np.all(part["rolled"][pads] == fill), name
            assert np.all(part["gradient"][pads] == 0), name


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_losses_of_all_ranks_add_up_to_the_mean_cross_entropy(pool: RankPool, ranks: int) -> None:
    names = ["dp free", "zigzag free", "blocks free", "blocks padded", "blocks index map", "few tokens", "one token"]
    chosen = {name: plans(ranks)[name] for name in names}
    chosen["singles"] = plan_for("blocks", ranks, [1] * 6)
    answers = dict(by_plan(pool.run(on_losses, chosen, ranks=ranks)))
    assert ranks == 1 or any(len(p["indices"]) == 0 for p in answers["one token"]), "no rank without tokens"
    for name, parts in answers.items():
        tokens, lengths = chosen[name].batch.tokens, chosen[name].batch.lengths.tolist()
        logits = stream_tensor(tokens, VOCABULARY).requires_grad_()
        labels = shifted(token_ids(tokens), lengths, -1, -100)
        summed = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        mean = summed / max(1, tokens - len(lengths))
        mean.backward()
        np.testing.assert_allclose(sum(p["loss"] for p in parts), mean.item(), rtol=1e-12, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(
            laid_out(parts, "gradient", tokens), logits.grad.numpy(), rtol=1e-12, atol=1e-14, err_msg=name
        )
        for part in parts:
            assert np.all(part["gradient"][part["indices"] < 0] == 0), name


def test_loss_of_low_precision_logits_is_float32() -> None:
    plan = plan_for("blocks", 1, [5, 3])
    step = flexcp.bind(plan)
    logits = stream_tensor(8, VOCABULARY).to(torch.bfloat16)
    labels = step.labels(token_ids(8))
    loss = step.loss(logits, labels, without_attention=True)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.float(), labels))


def test_loss_survives_a_masked_vocabulary(pool: RankPool) -> None:
    """Logits of padded vocabulary entries are often -inf, and the term that ties the loss to the logits must not turn
    them into NaN.
    """
    plan = plans(3)["blocks free"]
    logits, labels = stream_tensor(TOKENS, VOCABULARY), shifted(token_ids(TOKENS), LENGTHS, -1, -100)
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert sum(pool.run(on_masked_vocabulary, plan, ranks=3)) == pytest.approx(expected, rel=1e-12)


def test_loss_survives_a_large_sum_of_float16_logits() -> None:
    step = flexcp.bind(plan_for("blocks", 1, [100]))
    logits = torch.ones(100, 1000, dtype=torch.float16)
    loss = step.loss(logits, torch.zeros(100, dtype=torch.long), without_attention=True)
    assert loss.item() == pytest.approx(np.log(1000), rel=1e-5)


# --- bind -------------------------------------------------------------------------------------------------------------


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    plan = plans(1)["blocks free"]
    step = flexcp.bind(plan)
    assert isinstance(step, Step)
    assert (step.cp_rank, step.cp_size, step.local_tokens, step.group) == (0, 1, TOKENS, None)
    stream = stream_tensor(TOKENS, 2)
    assert torch.equal(step.gather(step.shard(stream)), stream)
    assert "rank 0 of 1" in repr(step)


def test_a_step_recognises_its_own_positions_without_reading_them() -> None:
    """An adapter must not read positions back from a GPU, so a step recognises its own tensor by its memory.

    A part of that tensor, or another tensor with the same values, is not recognised and has to be read.
    """
    step = flexcp.bind(
        flexcp.Planner(heads=2, kv_heads=1, head_dim=16, cluster=flexcp.cluster("h100", ranks_per_node=1))([5, 3])
    )
    assert not step.tables.are_positions(step.positions)  # positions_on was not called yet
    own = step.tables.positions_on(torch.device("cpu"))
    assert own.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert step.tables.positions_on(torch.device("cpu")) is own
    assert step.tables.are_positions(own[None]) and step.tables.are_positions(own.view(2, 4))
    assert not step.tables.are_positions(own[:5])
    assert not step.tables.are_positions(own.view(2, 4).T)
    assert not step.tables.are_positions(own.clone())


def test_a_plan_of_several_ranks_needs_a_group() -> None:
    with pytest.raises(ValueError, match=r"plan is for 3 ranks.*process group"):
        flexcp.bind(plans(3)["blocks free"])


@pytest.mark.parametrize("planned", [1, 2, 4, 8])
def test_a_plan_for_another_number_of_ranks_is_refused(pool: RankPool, planned: int) -> None:
    plan = plan_for("blocks", planned)
    for kind, message, _ in pool.run(on_bind, [plan] * 3, 10.0, ranks=3):
        assert kind == "ValueError"
        assert f"plan is for {planned} ranks but the group has 3" in message


def on_wrong_group(group: Any) -> tuple[str, str, str]:
    """Return the errors of binding to a mesh of two axes, to the wrong axis of it, and to a group without this rank."""
    plan, size = plan_for("blocks", 2), dist.get_world_size(group)
    ranks = torch.arange(size).unsqueeze(0)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "cp"))
    said = []
    for wrong in (mesh, mesh["dp"], dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ValueError) as found:
            flexcp.bind(plan, wrong, timeout=10.0)  # type: ignore[arg-type]
        said.append(str(found.value))
    return said[0], said[1], said[2]


def test_a_wrong_group_is_named() -> None:
    with RankPool(2) as ranks:
        for rank, (whole, axis, outside) in enumerate(ranks.run(on_wrong_group)):
            assert "one axis of a DeviceMesh" in whole
            assert "'dp' and 'cp'" in whole
            assert "plan is for 2 ranks but the group has 1" in axis
            assert "of the 2 ranks that share the batch" in axis
            assert f"a group that this rank, {rank}, is not in" in outside


@pytest.mark.parametrize("other", [0, 2])
def test_a_rank_with_another_plan_raises_on_all_ranks(pool: RankPool, other: int) -> None:
    right, wrong = plan_for("blocks", 4), plan_for("blocks", 4, [*LENGTHS[:-1], LENGTHS[-1] + 1])
    held = [wrong if r == other else right for r in range(4)]
    for kind, message, seconds in pool.run(on_bind, held, 60.0, ranks=4):
        assert kind == "RuntimeError"
        assert "disagree" in message
        assert f"rank {other} has {wrong.hash[:12]}" in message
        assert right.hash[:12] in message
        assert seconds < 10
    answers = pool.run(on_bind, [right] * 4, 60.0, ranks=4)
    assert [a[0] for a in answers] == ["bound"] * 4, "the group cannot bind any more after a disagreement"


def test_a_rank_whose_plan_is_for_other_ranks_raises_on_all_ranks() -> None:
    """The other rank must not wait for it, and the two ranks' next binds must match each other."""
    held = [plan_for("blocks", 2), plan_for("blocks", 3)]
    with RankPool(2) as own:
        answers = own.run(on_bind, held, 6.0)
        again = own.run(on_bind, [held[0]] * 2, 6.0)
    assert all(kind in ("ValueError", "RuntimeError") for kind, _, _ in answers)
    assert all(seconds < 4 for _, _, seconds in answers), "waited for a rank that had already failed"
    assert [kind for kind, _, _ in again] == ["bound", "bound"]


def test_a_rank_that_stays_away_is_named_within_the_timeout() -> None:
    plan = plan_for("blocks", 2)
    with RankPool(2) as own:
        (kind, message, seconds), (away, _, _) = own.run(on_bind, [plan, None], 0.5)
    assert (kind, away) == ("RuntimeError", "away")
    assert "only 1 of 2 ranks" in message
    assert "0.5 s" in message
    assert 0.3 < seconds < 10


def test_the_same_plan_binds_again_and_leaves_no_keys_in_the_store(pool: RankPool) -> None:
    plan = plans(3)["blocks free"]
    for rounds, before, after in pool.run(on_repeated_bind, plan, ranks=3):
        assert before == after
        for found in rounds:
            assert np.array_equal(found["full"], stream_tensor(TOKENS, 2).numpy())


def test_a_device_mesh_is_accepted(pool: RankPool) -> None:
    answers = pool.run(on_mesh, plan_for("blocks", 8))
    for rank, (cp_rank, cp_size, full) in enumerate(answers):
        assert (cp_rank, cp_size) == (rank, 8)
        assert np.array_equal(full, stream_tensor(TOKENS).numpy())


def test_the_axes_of_a_mesh_bind_plans_of_their_own(pool: RankPool) -> None:
    pair = [plan_for("blocks", 4), plan_for("zigzag", 4, [70, 8])]
    for rank, (cp_rank, cp_size, full) in enumerate(pool.run(on_mesh_axis, pair)):
        assert (cp_rank, cp_size) == (rank % 4, 4)
        assert np.array_equal(full, stream_tensor(pair[rank // 4].batch.tokens).numpy())


def test_tensors_of_the_wrong_length_are_refused(pool: RankPool) -> None:
    plan = plans(3)["blocks free"]
    for rank, messages in enumerate(pool.run(on_wrong_rows, plan, ranks=3)):
        rows = int(plan.placement.tokens[rank])
        assert len(messages) == 7
        assert f"{TOKENS} tokens" in messages[0]
        assert f"shape ({TOKENS + 1},)" in messages[0]
        assert f"shape ({TOKENS - 1},)" in messages[1]
        assert messages[2].startswith(f"step.shard: full has shape ({rows},)")
        assert messages[3].startswith(f"step.labels: tokens has shape ({rows},)")
        for message in messages[2:4]:
            assert message.endswith(
                "as many as this rank's rows: pass those of the whole batch, its documents end to end, not yet sharded"
            )
        for message in messages[4:]:
            assert f"rank {rank} keeps {rows} tokens" in message
            assert f"{rows + 2} rows" in message


def on_cuda_tensors(group: dist.ProcessGroup, plan: Plan) -> str:
    try:
        flexcp.bind(plan, group).choose_kernel(torch.device("cuda:0"), None)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_cuda_tensors_over_gloo_are_refused_with_the_way_out(pool: RankPool) -> None:
    for message in pool.run(on_cuda_tensors, plan_for("ring", 2), ranks=2):
        assert "on cuda:0" in message
        assert "gloo" in message
        assert "backend='nccl'" in message


def on_rows_cut_by_hand(group: dist.ProcessGroup, plan: Plan, asked: str | None) -> list[str]:
    """Return the warnings of two attention calls, after the user asked the step for ``asked``."""
    step = flexcp.bind(plan, group)
    stream = torch.arange(plan.batch.tokens)
    if asked == "shard":
        step.shard(stream)
    elif asked == "restore":
        step.restore(stream.tensor_split(plan.ranks)[step.cp_rank])
    elif asked == "labels":
        step.labels(stream)
    elif asked is not None:
        getattr(step, asked)
    shape = plan.shape
    q, k, v = (torch.ones(step.local_tokens, h, shape.head_dim) for h in (shape.heads, shape.kv_heads, shape.kv_heads))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flexcp.attention(q, k, v, step)
        flexcp.attention(q, k, v, step)
    return [str(w.message) for w in caught if "asked this step" in str(w.message)]


def planned_on_two(strategy: str, **options: Any) -> Plan:
    where = flexcp.cluster("cpu", ranks_per_node=2)
    return flexcp.Planner(2, 2, 8, dtype="float32", cluster=where, strategy=strategy)([12], flexcp.causal(), **options)


@pytest.mark.parametrize(
    ("asked", "warned"),
    [(None, 1), ("positions", 1), ("labels", 1), ("shard", 0), ("indices", 0), ("restore", 0)],
)
def test_rows_that_nobody_asked_for_are_warned_of_once(pool: RankPool, asked: str | None, warned: int) -> None:
    """Any six of the twelve rows have the right shape; a user who never asks the step which rows to use may have cut
    them by hand.
    """
    for said in pool.run(on_rows_cut_by_hand, planned_on_two("zigzag"), asked, ranks=2):
        assert len(said) == warned
        assert all("layout='contiguous'" in text and "step.shard" in text for text in said)


@pytest.mark.parametrize(
    ("strategy", "options", "warned"),
    [
        ("zigzag", {"layout": "zigzag"}, 0),
        ("blocks", {"layout": "contiguous"}, 0),
        ("blocks", {"layout": [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]}, 0),
        ("allgather", {}, 0),
        ("dp", {}, 0),
        ("allgather", {"tokens": "equal", "pad_to": 8}, 1),
    ],
)
def test_rows_that_can_be_those_of_the_plan_are_not_warned_of(
    pool: RankPool, strategy: str, options: dict[str, Any], warned: int
) -> None:
    """No warning is due for a layout that the user gave, for the contiguous part that everybody would cut, or for a
    number of rows that no cut by hand has; a part of a padded stream still causes one.
    """
    plan = flexcp.load_plan(flexcp.save_plan(planned_on_two(strategy, **options)))
    assert [len(said) for said in pool.run(on_rows_cut_by_hand, plan, "positions", ranks=2)] == [warned] * 2


def test_a_loss_of_a_step_that_the_model_was_not_given_names_the_step_that_ran() -> None:
    """A step kept from the last batch, or inside a function, runs in place of the step whose loss is asked."""
    plan = plan_for("dp", 1)
    kept = flexcp.bind(plan)
    q = torch.zeros(kept.local_tokens, 12, 8, dtype=torch.float64)
    logits, ids = torch.zeros(kept.local_tokens, 50), token_ids(kept.local_tokens)
    flexcp.attention(q, q, q, kept)
    step = flexcp.bind(plan)
    with pytest.raises(RuntimeError, match=r"never ran: the model's layers still use their own"):
        step.loss(logits, step.labels(ids))  # the kept step ran only before this one was made
    flexcp.attention(q, q, q, kept)
    for ask in (lambda: step.loss(logits, step.labels(ids)), lambda: step.share(logits.sum(), 3)):
        with pytest.raises(RuntimeError, match=r"never ran\. Attention ran under another step .*<Step") as said:
            ask()
        assert "Give the model the step that was bound for its batch" in str(said.value)
        assert "still use their own" not in str(said.value)
    with pytest.raises(RuntimeError, match=r"was not used by any attention\. Attention ran under another"), used(step):
        flexcp.attention(q, q, q, kept)
    flexcp.attention(q, q, q, step)
    step.loss(logits, step.labels(ids))
