"""Tests of the three forms of multi-latent attention (expanded, latent, absorbed): all equal dense attention over
expanded heads, and send the planned bytes.

The cases have values of another size than keys; latents that are sent directly, round a ring, through relays, or kept
for the backward; gradients of latents and of the expansion; and the cost of each form.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.batch import make_batch
from flexcp.compare.latent_forms import LatentForms
from flexcp.cost import CostModel
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan
from flexcp.planners.request import Request
from flexcp.shape import Kind, Shape

LENGTHS = [33, 1, 50, 2, 8, 21]
TOKENS = sum(LENGTHS)
FORMS = LatentForms(heads=4, rank=10, rope=4, nope=6, value=5, dtype="float64")
HEADS, RANK, ROPE, NOPE, VALUE = 4, 10, 4, 6, 5
SCALE = (NOPE + ROPE) ** -0.5
Arrays = dict[str, np.ndarray]


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "q": (TOKENS, HEADS, NOPE + ROPE),
        "latent": (TOKENS, RANK + ROPE),
        "up": (HEADS, NOPE + VALUE, RANK),
        "do": (TOKENS, HEADS, VALUE),
    }
    return {n: torch.randn(*size, generator=generator, dtype=torch.float64) for n, size in sizes.items()}


def expand(latent: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys (each head's own part, then the rotary part that all heads share) and values of every head."""
    wide = torch.einsum("tr,hwr->thw", latent[:, :RANK], up)
    shared = latent[:, None, RANK:].expand(-1, HEADS, -1)
    return torch.cat([wide[..., :NOPE], shared], -1), wide[..., NOPE:]


def absorb(q: Tensor, up: Tensor) -> Tensor:
    """Return queries that are multiplied with the latent itself instead of expanded keys."""
    return torch.cat([torch.einsum("thn,hnr->thr", q[..., :NOPE], up[:, :NOPE]), q[..., NOPE:]], -1)


def dense(mask: flexcp.Mask) -> Arrays:
    given = inputs()
    q, latent, up = (given[n].requires_grad_() for n in ("q", "latent", "up"))
    k, v = expand(latent, up)
    outs = []
    for start, n in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        rows = slice(int(start), int(start) + n)
        logits = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) * SCALE
        logits = logits.masked_fill(~torch.from_numpy(mask.dense(n)), -torch.inf)
        outs.append(torch.einsum("hqk,khv->qhv", torch.softmax(logits, -1), v[rows]))
    out = torch.cat(outs)
    dq, dlatent, dup = torch.autograd.grad((out * given["do"]).sum(), (q, latent, up))
    return {n: x.detach().numpy() for n, x in (("out", out), ("dq", dq), ("dlatent", dlatent), ("dup", dup))}


def on_ranks(group: dist.ProcessGroup, form: str, plan: Plan) -> tuple[Arrays, dict[str, list[int]]]:
    step = flexcp.bind(plan, group)
    given = inputs()
    q, latent = (step.shard(given[n]).requires_grad_() for n in ("q", "latent"))
    up = given["up"].requires_grad_()
    if form == "latent":
        out = flexcp.latent_attention(q, latent, expand, [up], step)
    elif form == "expanded":
        out = flexcp.attention(q, *expand(latent, up), step)
    else:
        values = flexcp.attention(absorb(q, up), latent[:, None], latent[:, None, :RANK], step, scale=SCALE)
        out = torch.einsum("thr,hvr->thv", values, up[:, NOPE:])
    (out * step.shard(given["do"])).sum().backward()
    dist.all_reduce(up.grad, group=group)
    found = {"out": out.detach(), "dq": q.grad, "dlatent": latent.grad}
    return {n: step.gather(x).numpy() for n, x in found.items()} | {"dup": up.grad.numpy()}, step.sent_bytes


def plan_for(form: str, nodes: int, ranks: int, mask: flexcp.Mask, strategy: str, **more: Any) -> Plan:
    return FORMS.planner(form, flexcp.cluster("cpu", nodes, ranks), strategy=strategy, **more)(LENGTHS, mask)


CASES = [
    pytest.param("latent", (1, 2), "blocks", {}, id="latent-2"),
    pytest.param("latent", (1, 4), "blocks", {"keep_kv": 1 << 20}, id="latent-4-keys kept"),
    pytest.param("latent", (2, 2), "groups:level=no", {}, id="latent-2 nodes"),
    pytest.param("latent", (2, 2), "blocks", {}, id="latent-2 nodes-stages without some ranks"),
    pytest.param("latent", (1, 4), "zigzag", {}, id="latent-ring"),
    pytest.param("expanded", (1, 4), "blocks", {}, id="expanded-4"),
    pytest.param("expanded", (1, 2), "ulysses", {}, id="expanded-2-heads"),
    pytest.param("absorbed", (1, 2), "blocks", {}, id="absorbed-2"),
    pytest.param("absorbed", (1, 4), "zigzag", {}, id="absorbed-4"),
]


@pytest.mark.parametrize(("form", "size", "strategy", "more"), CASES)
def test_every_form_equals_dense_attention_and_moves_its_bytes(
    pool: RankPool, form: str, size: tuple[int, int], strategy: str, more: dict[str, Any]
) -> None:
    mask = flexcp.window(20, 0) if strategy.startswith("groups") else flexcp.causal()
    plan = plan_for(form, *size, mask, strategy, **more)
    plan.check()
    exact = dense(mask)
    results = pool.run(on_ranks, form, plan, ranks=plan.ranks)
    assert int(plan.bytes().sum()) > 0
    for rank, (found, sent) in enumerate(results):
        for name, value in exact.items():
            np.testing.assert_allclose(found[name], value, atol=1e-12, err_msg=name)
        for backward, direction in enumerate(("forward", "backward")):
            assert sent[direction] == plan.bytes(bool(backward))[rank].tolist(), direction


def test_bytes_of_a_key_are_the_latents_whatever_the_heads() -> None:
    forms = LatentForms(heads=128, rank=512, rope=64, nope=128, value=128)
    assert forms.key_bytes() == {"expanded": 2 * 128 * 320, "latent": 2 * 576, "absorbed": 2 * (576 + 512)}
    table = forms.shape("latent").bytes_per_token_head()
    assert table[Kind.DKV].tolist() == [2 * 576, 4 * 576]
    assert table[Kind.Q, 0] == 2 * 192
    plans = {
        f: forms.planner(f, flexcp.cluster("h100", 1, 8), strategy="blocks")([65536]) for f in ("expanded", "latent")
    }
    assert int(plans["latent"].bytes().sum()) % (2 * 576) == 0  # only whole latents are sent
    assert plans["latent"].bytes().sum() < plans["expanded"].bytes().sum() / 20


def test_a_plan_of_latents_is_another_plan_and_travels() -> None:
    plan = plan_for("latent", 1, 2, flexcp.causal(), "blocks")
    assert flexcp.load_plan(flexcp.save_plan(plan)).shape == plan.shape
    assert flexcp.load_plan(flexcp.save_plan(plan)) == plan
    same = flexcp.Planner(4, 1, 10, 5, "float64", flexcp.cluster("cpu", 1, 2), strategy="blocks")(LENGTHS)
    assert same != plan


def test_the_fastest_form_follows_what_must_move() -> None:
    forms = LatentForms(heads=128, rank=512, rope=64, nope=128, value=128)
    slow = flexcp.cluster("h100", 8, 1)
    form, times = forms.fastest([131072], slow, strategy="blocks")
    assert form == "latent"
    assert times["latent"] < times["expanded"]
    assert times["absorbed"] > 1.5 * times["latent"]
    # Short documents that stay whole send nothing; latents then only cost a second expansion in the backward.
    form, times = forms.fastest([4096] * 64, slow, strategy="blocks")
    assert form == "expanded"
    assert times["expanded"] <= times["latent"] < 1.2 * times["expanded"]


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv_heads must be 1; got 4"):
        Shape(4, 4, 8, 8, latent=12)
    with pytest.raises(ValueError, match="got 0"):
        Shape(4, 1, 8, 8, latent=0)
    with pytest.raises(ValueError, match="got 'both'"):
        FORMS.shape("both")
    given = inputs()
    step = flexcp.bind(plan_for("latent", 1, 1, flexcp.causal(), "blocks"))
    with pytest.raises(ValueError, match=r"flexcp\.latent_attention"):
        flexcp.attention(given["q"], given["q"][:, :1], given["q"][:, :1], step)
    with pytest.raises(ValueError, match=r"latent has shape .*\(115, 14\)"):
        flexcp.latent_attention(given["q"], given["latent"][:, :3], expand, [given["up"]], step)
    with pytest.raises(ValueError, match="expand must make"):
        flexcp.latent_attention(given["q"], given["latent"], lambda c, w: (c, c), [given["up"]], step)
    for part in (slice(1, None), (slice(None), slice(1, None))):  # v without a row, then without a head, that k has

        def short(c: Tensor, w: Tensor, part: Any = part) -> tuple[Tensor, Tensor]:
            k, v = expand(c, w)
            return k, v[part]

        with pytest.raises(ValueError, match="expand must make"):
            flexcp.latent_attention(given["q"], given["latent"], short, [given["up"]], step)
    with pytest.raises(ValueError, match=r"latent=WIDTH"):
        whole = flexcp.bind(plan_for("absorbed", 1, 1, flexcp.causal(), "blocks"))
        flexcp.latent_attention(given["q"], given["latent"], expand, [given["up"]], whole)


def test_a_call_is_checked_as_any_attention() -> None:
    given = inputs()
    call = (given["q"], given["latent"], expand, [given["up"]])
    step = flexcp.bind(plan_for("latent", 1, 1, flexcp.causal(), "blocks"))
    for name, value in (("softcap", float("inf")), ("softcap", 0.0), ("scale", float("nan")), ("scale", -1.0)):
        with pytest.raises(ValueError, match=rf"{name} must be above 0.*got {value}"):
            flexcp.latent_attention(*call, step, **{name: value})
    with pytest.raises(ValueError, match=r"flexcp\.bind\(plan, group\)"):
        flexcp.latent_attention(*call, step.plan)
    shape, masks = step.plan.shape, {"full": (flexcp.causal(), 1), "window": (flexcp.window(4), 3)}
    planner = flexcp.Planner(
        shape.heads,
        1,
        shape.head_dim,
        shape.v_head_dim,
        shape.dtype,
        flexcp.cluster("cpu", 1, 1),
        strategy="blocks",
        latent=shape.latent,
    )
    several = flexcp.bind(planner(step.plan.batch.lengths, masks=masks))
    with pytest.raises(ValueError, match=r"'full' \(causal\), 'window' \(window of 5 keys\)"):
        flexcp.latent_attention(*call, several)
    assert flexcp.latent_attention(*call, several, mask="window").isfinite().all()


def test_plans_that_move_queries_are_refused() -> None:
    """The planner makes none, but a plan may come from a file."""
    from flexcp.executor.latent_program import make_latent_program
    from flexcp.planners.static.static import ulysses
    from flexcp.schedule.transfers import make_plan

    known = Shape(4, 1, 10, 5, "float64", latent=14), flexcp.cluster("cpu", 1, 2), CostModel()
    placement = ulysses(Request(make_batch([40], flexcp.causal()), *known))
    plan = make_plan(placement, *known, "ulysses")
    with pytest.raises(NotImplementedError, match=r"'ulysses' moves queries.*'blocks'"):
        make_latent_program(plan, 0, 0)
