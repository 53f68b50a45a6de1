"""Tests of the fuzzer's reference implementations: masks and dense attention agree with independent computations, and
the token machine, which executes plans symbolically, detects mistakes in plans.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flexcp.clusters import cluster
from flexcp.fuzz.dense_attention import Inputs, dense_attention
from flexcp.fuzz.draw_masks import document_mask
from flexcp.fuzz.mask_words import allowed, rule_of
from flexcp.fuzz.token_machine import Wrong, execute
from flexcp.masks import causal
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.shape import Kind


def test_masks_by_definition_are_masks_by_slices() -> None:
    rng, kinds = random.Random(1), set()
    for _ in range(300):
        length = rng.randrange(1, 20)
        words = document_mask(rng, length)
        kinds.add(words[0])
        np.testing.assert_array_equal(rule_of(words).dense(length), allowed(words, length), str(words))
    assert len(kinds) == 11


@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}, {"sinks": True}])
def test_dense_attention_is_what_autograd_says(extras: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    q, do = rng.normal(size=(2, 9, 4, 8))
    k, v = rng.normal(size=(2, 9, 2, 8))
    dlse = rng.normal(size=(9, 4))
    sinks = rng.normal(size=4) if extras.get("sinks") else None
    pairs = [allowed(["causal"], 5), allowed(["window", 1, 1], 4)]
    pairs[0][2] = False  # a row without keys
    found = dense_attention(Inputs(q, k, v, do, dlse, sinks, extras.get("softcap")), pairs)
    tensors = [torch.from_numpy(x.copy()).requires_grad_() for x in (q, k, v)]
    sink = torch.from_numpy(np.zeros(4) if sinks is None else sinks.copy()).requires_grad_()
    mask = torch.block_diag(*(torch.from_numpy(p.astype(float)) for p in pairs)).bool()
    scores = torch.einsum("qhd,khd->hqk", tensors[0], tensors[1].repeat_interleave(2, 1)) * 8**-0.5
    if extras.get("softcap"):
        scores = 2.0 * torch.tanh(scores / 2.0)
    # Row 2 has no keys and thus no finite logit: it is left out of the comparison, and must be empty in ``found``.
    scores = scores.masked_fill(~mask, -torch.inf)
    rows = [i for i in range(9) if i != 2]
    total = scores[:, rows]
    if sinks is not None:
        total = torch.cat([total, sink[:, None, None].expand(4, 8, 1)], 2)
    lse = torch.logsumexp(total, 2).T
    out = torch.einsum(
        "hqk,khd->qhd", torch.exp(scores[:, rows] - lse.T[..., None]), tensors[2].repeat_interleave(2, 1)
    )
    torch.autograd.backward([out, lse], [torch.from_numpy(do[rows]), torch.from_numpy(dlse[rows])])
    np.testing.assert_allclose(found["out"][rows], out.detach(), atol=1e-12)
    np.testing.assert_allclose(found["lse"][rows], lse.detach(), atol=1e-12)
    for name, x in zip(("dq", "dk", "dv"), tensors, strict=True):
        np.testing.assert_allclose(found[name], x.grad, atol=1e-12)
    assert not found["out"][2].any()
    if sinks is None:
        assert np.isneginf(found["lse"][2]).all()
    else:
        assert sink.grad is not None
        alone = found["dsinks"] - dlse[2]  # the LSE of a row without keys is its sink alone
        np.testing.assert_allclose(alone, sink.grad, atol=1e-12)


def a_plan() -> tuple[Plan, list[list[np.ndarray]]]:
    plan = Planner(4, 2, 8, cluster=cluster("cpu", 1, 3), strategy="blocks")([60, 9, 30], causal())
    return plan, [[allowed(["causal"], n) for n in (60, 9, 30)]]


def test_a_good_plan_comes_out_right() -> None:
    execute(*a_plan())


def changed(plan: Plan, backward: bool, change: Any) -> Plan:
    """Return the plan with its transfers in one direction replaced by ``change`` of them."""
    pair = list(plan.programs[0])
    pair[backward] = replace(pair[backward], transfers=change(pair[backward].transfers))
    return replace(plan, programs=(tuple(pair),))


@pytest.mark.parametrize("kind", [Kind.Q, Kind.KV, Kind.O, Kind.DO, Kind.DQ, Kind.DKV])
def test_a_transfer_that_is_missing_is_found(kind: Kind) -> None:
    plan, dense = a_plan()
    backward = kind not in (Kind.Q, Kind.KV, Kind.O)
    transfers = plan.programs[0][backward].transfers
    rows = np.flatnonzero(transfers.kind == kind)
    assert len(rows), "the plan moves every kind"
    keep = np.delete(np.arange(len(transfers)), rows[-1])
    with pytest.raises(Wrong):
        execute(changed(plan, backward, lambda t: t.take(keep)), dense)


def test_a_transfer_that_comes_twice_leaves_too_early_or_says_too_much_is_found() -> None:
    plan, dense = a_plan()
    with pytest.raises(Wrong):
        execute(changed(plan, False, lambda t: t.take(np.append(np.arange(len(t)), 0))), dense)
    with pytest.raises(Wrong, match=r"before it has it|does not exist"):
        early = lambda t: replace(t, stage=np.where(t.kind == Kind.DKV, 1, t.stage))  # noqa: E731
        execute(changed(plan, True, early), dense)
    with pytest.raises(Wrong):
        execute(plan, [[~pairs for pairs in dense[0]]])


def test_a_region_that_is_smaller_or_doubled_is_found() -> None:
    plan, dense = a_plan()
    regions = plan.placement.regions[0]
    for other in (
        replace(regions, q1=regions.q1 - (np.arange(len(regions)) == 0)),
        regions.take(np.append(np.arange(len(regions)), 0)),
    ):
        with pytest.raises(Wrong, match="computed"):
            execute(replace(plan, placement=replace(plan.placement, regions=(other,))), dense)
