"""Proves flexcp.attention: what it accepts, what it refuses and how, and what a caller can rely on besides the numbers.

tests/benchmarks/test_matrix.py checks the numbers under all strategies. Here: refusals name the value; views, several
masks, sinks, LSE gradients and recomputation give what torch's autograd gives on one process; two runs are bitwise the
same; bytes sent are the plan's for every pair of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp.batch import MaskLike
from flexcp.executor import step_tables
from flexcp.executor.kernels import Settings, cpu
from flexcp.executor.step import Step
from flexcp.masks import Mask
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

LENGTHS = [33, 1, 50, 2, 8]
TOKENS = sum(LENGTHS)
HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 4, 2, 8, 6
NAMES = ("out", "lse", "dq", "dk", "dv")
Arrays = dict[str, np.ndarray]


def plan_for(
    ranks: int, mask: MaskLike | None = None, strategy: str = "blocks", dtype: str = "float64", **more: Any
) -> Plan:
    where = flexcp.cluster("cpu", 1, ranks)
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, dtype, where, strategy=strategy)
    return planner(LENGTHS, mask, **more)


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return random q, k, v of all tokens, gradients of the output and the LSE, and sinks."""
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "q": (TOKENS, HEADS, HEAD_DIM),
        "k": (TOKENS, KV_HEADS, HEAD_DIM),
        "v": (TOKENS, KV_HEADS, V_HEAD_DIM),
        "do": (TOKENS, HEADS, V_HEAD_DIM),
        "dlse": (TOKENS, HEADS),
        "sinks": (HEADS,),
    }
    return {n: torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype) for n, size in sizes.items()}


def dense(
    mask: Mask, *, softcap: float | None = None, sinks: bool = False, dlse: bool = True, do: bool = True
) -> Arrays:
    """Compute attention in plain torch on one process, document by document, with gradients by autograd."""
    given = inputs()
    q, k, v, sink = (given[n].clone().requires_grad_() for n in ("q", "k", "v", "sinks"))
    outs, lses = [], []
    for start, n in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        rows = slice(int(start), int(start) + n)
        wide_k, wide_v = (x[rows].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[rows], wide_k) * HEAD_DIM**-0.5
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~torch.from_numpy(mask.dense(n)), -torch.inf)
        if sinks:
            logits = torch.cat([logits, sink[:, None, None].expand(HEADS, n, 1)], -1)
        outs.append(torch.einsum("hqk,khv->qhv", torch.softmax(logits, -1)[..., :n], wide_v))
        lses.append(torch.logsumexp(logits, -1).T)
    out, lse = torch.cat(outs), torch.cat(lses)
    objective = (out * given["do"]).sum() * do + (lse * given["dlse"]).sum() * dlse
    dq, dk, dv, dsinks = torch.autograd.grad(objective, (q, k, v, sink), allow_unused=True, materialize_grads=True)
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv} | ({"dsinks": dsinks} if sinks else {})
    return {n: x.detach().numpy() for n, x in found.items()}


def one_rank(**more: Any) -> tuple[Step, dict[str, Tensor]]:
    given = inputs()
    return flexcp.bind(plan_for(1, **more)), {n: given[n] for n in ("q", "k", "v")}


# --- what runs on the ranks -------------------------------------------------------------------------------------------


def under_step(step: Step, *, dtype: torch.dtype = torch.float64, **options: Any) -> Arrays:
    """Run forward and backward of one call and gather the results.

    ``use`` says which results get a gradient, ``strided`` whether inputs are not contiguous.
    """
    given = inputs(dtype)
    use, strided = options.pop("use", ("out", "lse")), options.pop("strided", False)
    recompute = options.pop("recompute", False)
    leaves = [step.shard(given[n]) for n in ("q", "k", "v")]
    if strided:
        leaves = [torch.stack([x, -x], -1)[..., 0] for x in leaves]
        assert len(leaves[0]) < 2 or not any(x.is_contiguous() for x in leaves)
    leaves = [x.requires_grad_() for x in leaves]
    sinks = given["sinks"].clone().requires_grad_() if options.pop("sinks", False) else None

    def call(*qkv: Tensor) -> Any:
        return flexcp.attention(*qkv, step, sinks=sinks, return_lse=True, **options)

    out, lse = checkpoint(call, *leaves, use_reentrant=False) if recompute else call(*leaves)
    objective = torch.zeros((), dtype=lse.dtype)
    if "out" in use:
        objective = objective + (out * step.shard(given["do"])).sum()
    if "lse" in use:
        objective = objective + (lse * step.shard(given["dlse"])).sum()
    objective.backward()
    found = {"out": out.detach(), "lse": lse.detach(), "dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad}
    gathered = {n: step.gather(x) for n, x in found.items()}
    if sinks is not None:
        gathered["dsinks"] = sinks.grad.clone()
        if step.group is not None:
            dist.all_reduce(gathered["dsinks"], group=step.group)
    return {n: x.to(torch.float64).numpy() for n, x in gathered.items()}


def on_ranks(group: dist.ProcessGroup, plan: Plan, calls: list[dict[str, Any]]) -> list[Arrays]:
    step = flexcp.bind(plan, group)
    return [under_step(step, **call) for call in calls]


def on_bytes(group: dist.ProcessGroup, plan: Plan, mask: str | None, times: int) -> dict[str, list[int]]:
    step = flexcp.bind(plan, group)
    for _ in range(times):
        under_step(step, mask=mask)
    return step.sent_bytes


def on_wrong_rows(group: dist.ProcessGroup, plan: Plan) -> str:
    step = flexcp.bind(plan, group)
    given = inputs()
    q, k, v = (torch.cat([step.shard(given[n]), given[n][:1]]) for n in ("q", "k", "v"))
    try:
        flexcp.attention(q, k, v, step)
    except ValueError as error:
        return str(error)
    return "accepted"


def assert_close(found: Arrays, exact: Arrays, tolerance: float = 1e-12) -> None:
    for name, value in exact.items():
        np.testing.assert_allclose(found[name], value, atol=tolerance, rtol=tolerance, err_msg=name)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: torch.cat([x, x[:1]]), id="tokens"),
        pytest.param(lambda x: x[:-1], id="fewer tokens"),
        pytest.param(lambda x: x.repeat(1, 2, 1), id="heads"),
        pytest.param(lambda x: x[..., :-1], id="head size"),
        pytest.param(lambda x: x[None], id="batch dimension"),
        pytest.param(lambda x: x.flatten(1), id="heads flattened"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(name: str, change: Any) -> None:
    step, given = one_rank()
    right = tuple(given[name].shape)
    given[name] = change(given[name])
    with pytest.raises(ValueError) as caught:
        flexcp.attention(**given, step=step)
    for words in (f"{name} has shape", str(tuple(given[name].shape)), f"= {right}"):
        assert words in str(caught.value)


def test_a_wrong_token_count_names_the_rank(pool: RankPool) -> None:
    plan = plan_for(3)
    for rank, message in enumerate(pool.run(on_wrong_rows, plan, ranks=3)):
        rows = int(plan.placement.tokens[rank])
        assert f"q has shape ({rows + 1}, {HEADS}, {HEAD_DIM})" in message
        assert f"rank {rank}" in message
        assert f"({rows}, {HEADS}, {HEAD_DIM})" in message
        assert f"the plan's lengths add up to {plan.batch.tokens} tokens, so a stream with pads needs them" in message


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_wrong_dtype_is_refused_by_name(name: str) -> None:
    step, given = one_rank()
    given[name] = given[name].to(torch.bfloat16)
    with pytest.raises(ValueError, match=rf"{name} is torch.bfloat16.*float64.*dtype="):
        flexcp.attention(**given, step=step)


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_wrong_device_is_refused_by_name(name: str) -> None:
    step, given = one_rank()
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=rf"{name} is on meta and q on cpu"):
        flexcp.attention(**given, step=step)


def test_q_on_another_device_is_refused() -> None:
    step, given = one_rank()
    given["q"] = given["q"].to("meta")
    with pytest.raises(ValueError, match=r"on cpu and q on meta"):
        flexcp.attention(**given, step=step)


@pytest.mark.parametrize("size", [(), (HEADS + 1,), (KV_HEADS,), (HEADS, 1)], ids=str)
def test_sinks_of_the_wrong_shape_are_refused(size: tuple[int, ...]) -> None:
    step, given = one_rank()
    with pytest.raises(ValueError) as caught:
        flexcp.attention(**given, step=step, sinks=torch.zeros(size, dtype=torch.float64))
    assert f"({HEADS},)" in str(caught.value)
    assert str(size) in str(caught.value)


@pytest.mark.parametrize("scale", [0.0, -3.5, float("nan"), float("inf")])
def test_a_scale_that_is_no_number_above_0_is_refused(scale: float) -> None:
    step, given = one_rank()
    with pytest.raises(ValueError, match=rf"scale must be above 0.*got {scale}"):
        flexcp.attention(**given, step=step, scale=scale)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"softcap": "30"}, "softcap is a number or None; got '30'"),
        ({"scale": "x"}, "scale is a number or None; got 'x'"),
        ({"window": (64, 0)}, r"window= is how many keys a query sees.*got \(64, 0\)"),
        ({"mask": flexcp.causal()}, r"mask= is the name of one of the plan's masks.*got Mask\(name='causal'"),
    ],
)
def test_arguments_of_another_kind_are_named(wrong: dict[str, Any], words: str) -> None:
    step, given = one_rank()
    with pytest.raises(ValueError, match=words):
        flexcp.attention(**given, step=step, **wrong)


@pytest.mark.parametrize("softcap", [0.0, -3.5, float("nan"), float("inf")])
def test_a_softcap_that_is_not_positive_is_refused(softcap: float) -> None:
    step, given = one_rank()
    with pytest.raises(ValueError, match=rf"softcap must be above 0.*got {softcap}"):
        flexcp.attention(**given, step=step, softcap=softcap)


def test_dropout_is_refused() -> None:
    step, given = one_rank()
    with pytest.raises(NotImplementedError, match=r"dropout.*0\.1.*dropout=0"):
        flexcp.attention(**given, step=step, dropout=0.1)


def test_a_bias_is_refused() -> None:
    step, given = one_rank()
    with pytest.raises(NotImplementedError, match=r"bias.*mask"):
        flexcp.attention(**given, step=step, bias=torch.zeros(HEADS, TOKENS, TOKENS))


def test_an_unknown_mask_name_is_refused() -> None:
    step, given = one_rank(masks={"full": (flexcp.full(), 1), "window": (flexcp.window(4), 3)})
    with pytest.raises(ValueError, match=r"no mask named 'windows' .*'full' \(full\), 'window' \(.*; name one"):
        flexcp.attention(**given, step=step, mask="windows")


def test_a_layer_of_several_masks_must_say_which() -> None:
    """Without a name, the first mask might be taken for a layer that needs another one."""
    step, given = one_rank(masks={"full": (flexcp.full(), 1), "window": (flexcp.window(4), 3)})
    with pytest.raises(ValueError, match=r"'full' \(full\), 'window' \(window of 5 keys\).*mask='full'.*window="):
        flexcp.attention(**given, step=step)


def test_a_plan_in_the_place_of_a_step_is_refused_with_the_way_out() -> None:
    step, given = one_rank()
    with pytest.raises(ValueError, match=r"is a plan.*flexcp\.bind\(plan, group\)") as caught:
        flexcp.attention(**given, step=step.plan)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"flexcp\.bind\(plan, group\); got None"):
        flexcp.attention(**given, step=None)


def test_an_unknown_kernel_is_refused() -> None:
    step, given = one_rank()
    with pytest.raises(ValueError, match=r"'flash'.*cpu, reference"):
        flexcp.attention(**given, step=step, kernel="flash")


# --- results ----------------------------------------------------------------------------------------------------------


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    step = flexcp.bind(plan_for(1, flexcp.causal()))
    assert_close(under_step(step), dense(flexcp.causal()))
    assert step.sent_bytes == {"forward": [0], "backward": [0]}


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_sinks_and_softcap_have_the_gradients_of_autograd(pool: RankPool, kernel: str) -> None:
    call = {"sinks": True, "softcap": 1.7, "kernel": kernel}
    exact = dense(flexcp.window(6, 3), softcap=1.7, sinks=True)
    for answers in pool.run(on_ranks, plan_for(3, flexcp.window(6, 3)), [call], ranks=3):
        assert_close(answers[0], exact)


def test_the_scale_is_the_callers() -> None:
    step, given = one_rank()
    doubled = flexcp.attention(given["q"] * 2, given["k"], given["v"], step)
    scaled = flexcp.attention(**given, step=step, scale=2 * HEAD_DIM**-0.5)
    torch.testing.assert_close(doubled, scaled, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(scaled, flexcp.attention(**given, step=step))


def test_lse_is_returned_only_on_request() -> None:
    step, given = one_rank()
    alone = flexcp.attention(**given, step=step)
    out, lse = flexcp.attention(**given, step=step, return_lse=True)
    assert torch.equal(alone, out)
    assert lse.shape == (TOKENS, HEADS)
    low = flexcp.bind(plan_for(1, dtype="bfloat16"))
    out, lse = flexcp.attention(*(x.to(torch.bfloat16) for x in given.values()), low, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("strategy", ["blocks", "zigzag", "usp:2,2"])
def test_out_and_lse_are_differentiable_alone_and_together(pool: RankPool, strategy: str) -> None:
    plan = plan_for(4, flexcp.causal(), strategy)
    uses = [("out",), ("lse",), ("out", "lse")]
    for answers in pool.run(on_ranks, plan, [{"use": use} for use in uses], ranks=4):
        for use, found in zip(uses, answers, strict=True):
            assert_close(found, dense(flexcp.causal(), do="out" in use, dlse="lse" in use))


@pytest.mark.parametrize("ranks", [1, 3])
def test_non_contiguous_inputs_are_accepted(pool: RankPool, ranks: int) -> None:
    for answers in pool.run(on_ranks, plan_for(ranks), [{}, {"strided": True}], ranks=ranks):
        assert_close(answers[1], answers[0])


def test_a_gradient_without_memory_of_its_own_is_accepted() -> None:
    """``out.sum().backward()`` brings an expanded gradient of stride 0."""
    step, given = one_rank()
    results = []
    for objective in (torch.sum, lambda out: (out * torch.ones_like(out)).sum()):
        q = given["q"].clone().requires_grad_()
        objective(flexcp.attention(q, given["k"], given["v"], step)).backward()
        results.append(q.grad)
    torch.testing.assert_close(results[0], results[1], atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("strategy", ["blocks", "ring"])
def test_each_of_several_masks_is_what_it_is_alone(pool: RankPool, strategy: str) -> None:
    rules = {"full": flexcp.causal(), "window": flexcp.window(5, 1), "answers": flexcp.masks.shared_question(3, 0.3)}
    plan = plan_for(3, strategy=strategy, masks={name: (rule, i + 1) for i, (name, rule) in enumerate(rules.items())})
    plan.check()
    calls = [{"mask": name} for name in reversed(rules)]
    for answers in pool.run(on_ranks, plan, calls, ranks=3):
        by_name = dict(zip(reversed(rules), answers, strict=True))
        for name, rule in rules.items():
            assert_close(by_name[name], dense(rule))
    for name, rule in rules.items():
        alone = pool.run(on_ranks, plan_for(3, rule, strategy), [{}], ranks=3)[0][0]
        assert_close(by_name[name], alone)


@pytest.mark.parametrize("strategy", ["blocks", "usp:2,2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_are_bitwise_the_same(pool: RankPool, strategy: str, dtype: str) -> None:
    plan = plan_for(4, flexcp.causal(), strategy, dtype)
    call = {"dtype": getattr(torch, dtype), "softcap": 5.0}
    first, second = (pool.run(on_ranks, plan, [call, call], ranks=4) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for other in (a[1], b[0], b[1]):
            for name in NAMES:
                assert a[0][name].tobytes() == other[name].tobytes(), name


def test_recomputation_gives_the_same_gradients(pool: RankPool) -> None:
    for answers in pool.run(on_ranks, plan_for(3), [{}, {"recompute": True}], ranks=3):
        assert_close(answers[1], answers[0], 0.0)


def test_work_lists_are_made_once_for_all_layers_and_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(cpu, "prepare", lambda slices, *rest: made.append(rest) or slices)
    step, given = one_rank()
    for _ in range(3):
        q = given["q"].clone().requires_grad_()
        flexcp.attention(q, given["k"], given["v"], step).sum().backward()
    assert made == [(HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, q.device)]


def test_a_prepared_step_prepares_nothing_at_its_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {"full": (flexcp.full(), 1), "window": (flexcp.window(4), 3)}
    step, given = one_rank(masks=masks)
    step.prepare("cpu")
    monkeypatch.setattr(step_tables, "prepare", None)
    monkeypatch.setattr(step_tables, "rank_program", None)
    monkeypatch.setattr(step_tables, "pass_recipe", None)
    for name in masks:
        q = given["q"].clone().requires_grad_()
        flexcp.attention(q, given["k"], given["v"], step, mask=name).sum().backward()
        assert q.grad is not None and q.grad.isfinite().all()


def test_kernels_hear_of_determinism_and_the_sm_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    for name in ("forward", "backward"):
        run = getattr(cpu, name)
        monkeypatch.setattr(
            cpu, name, lambda *x, run=run: (heard.extend(s for s in x if isinstance(s, Settings)), run(*x))
        )
    step, given = one_rank()
    q = given["q"].clone().requires_grad_()
    flexcp.attention(q, given["k"], given["v"], step, deterministic=True, sm_margin=7).sum().backward()
    flexcp.slice_attention(q, given["k"], given["v"], flexcp.causal(), deterministic=True, sm_margin=7).sum().backward()
    assert heard == [Settings(HEAD_DIM**-0.5, None, deterministic=True, sm_margin=7)] * 4


@pytest.mark.parametrize("strategy", ["dp", "ring", "allgather", "usp:2,2", "blocks"])
def test_bytes_sent_are_the_plans_for_every_pair(pool: RankPool, strategy: str) -> None:
    plan = plan_for(4, strategy=strategy, masks={"full": (flexcp.full(), 1), "window": (flexcp.window(3), 1)})
    for number, mask in enumerate(("full", "window")):
        sent = pool.run(on_bytes, plan, mask, 2, ranks=4)
        for direction in ("forward", "backward"):
            expected = 2 * plan.bytes(direction == "backward", number)
            assert [s[direction] for s in sent] == expected.tolist()
            assert strategy == "dp" or expected.sum() > 0


# --- rows without keys ------------------------------------------------------------------------------------------------


def half_empty(n: int) -> Mask:
    return flexcp.from_slices(n, [(n // 2, n, 0, n, None, None)])


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_rows_without_keys_are_zero_with_zero_gradients(pool: RankPool, kernel: str) -> None:
    plan = plan_for(3, [half_empty(n) for n in LENGTHS])
    empty = np.concatenate([np.arange(n) < n // 2 for n in LENGTHS])
    for answers in pool.run(on_ranks, plan, [{"kernel": kernel, "use": ("out",)}], ranks=3):
        found = answers[0]
        assert np.all(found["out"][empty] == 0)
        assert np.all(found["lse"][empty] == -np.inf)
        assert np.all(found["dq"][empty] == 0)
        assert np.all(np.isfinite(found["lse"][~empty]))
        assert all(np.all(np.isfinite(found[n])) for n in ("out", "dq", "dk", "dv"))


def test_a_row_without_keys_gives_all_to_its_sink(pool: RankPool) -> None:
    plan = plan_for(3, [half_empty(n) for n in LENGTHS])
    empty = np.concatenate([np.arange(n) < n // 2 for n in LENGTHS])
    exact = inputs()["sinks"].numpy()
    for answers in pool.run(on_ranks, plan, [{"sinks": True}], ranks=3):
        found = answers[0]
        assert np.all(found["out"][empty] == 0)
        np.testing.assert_allclose(found["lse"][empty], np.broadcast_to(exact, found["lse"][empty].shape))
        assert all(np.all(np.isfinite(found[n])) for n in (*NAMES, "dsinks"))


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    """A head without a sink, on rows with and without keys: finite numbers, zero gradients, no NaN."""
    given = inputs()
    step = flexcp.bind(plan_for(1, [half_empty(n) for n in LENGTHS]))
    plain, found = [], []
    for results, sinks in ((plain, None), (found, torch.full((HEADS,), -torch.inf, dtype=torch.float64))):
        leaves = [given[n].clone().requires_grad_() for n in ("q", "k", "v")]
        out, lse = flexcp.attention(*leaves, step, sinks=sinks, return_lse=True)
        (out * given["do"]).sum().backward()
        results += [out.detach(), lse.detach(), *(x.grad for x in leaves)]
    for name, a, b in zip(NAMES, found, plain, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")
