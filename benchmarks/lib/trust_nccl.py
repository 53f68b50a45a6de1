"""NCCL on a GPU: checks of what only NCCL's transport does and CPU ranks cannot show, on ranks that share one GPU.

- *telemetry*: events of every slot become durations, ``log`` and ``trace`` work, ``check_every`` passes right results
  and finds a wrong one on every rank.
- *loader*: samples that one rank reads reach the ranks that keep them, without a CPU group.
- *latents*: attention over latents equals attention over the expanded keys, gradients too.
- *another stream*: a step prepared on a delayed stream gives the same bits as one prepared in time.
- *out of step*: one rank counts one call more than the others, all of the same sizes; no rank may end as if nothing had
  happened.

The same functions run on gloo ranks (``--device cpu``), without the check of streams.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.data import Loader, Planning
from flexcp.executor.kernels import Settings
from flexcp.executor.latent import latent_attention
from flexcp.executor.slice_attention import packed_slices
from flexcp.executor.step import Step
from flexcp.plan.plan import Plan
from flexcp.telemetry.sample import chosen_rows, worst_row
from lib.trust_ranks import Row, Setting, attempted, on_ranks, synchronize

LENGTHS = [700, 1, 260, 63, 128, 2]
"""The lengths of the documents in all checks but the loader's."""
LATE = 200_000_000
"""Clock cycles by which a stream is delayed: about a tenth of a second."""
LIMIT = 15.0
"""Seconds that NCCL waits for a rank that is out of step."""


def rows(setting: Setting) -> Iterator[Row]:
    """Yield every check on 2 ranks, then on 4; ranks are started once for all checks that should pass."""
    for ranks in (2,) if setting.small else (2, 4):
        found = attempted(
            setting, "all checks", ranks, partial(_passing, setting, ranks), least=40 - 30 * setting.small
        )
        yield from found.get("rows") or [found]
        if setting.device == "cuda":
            yield attempted(setting, "out of step", ranks, partial(_out_of_step, setting, ranks), least=LIMIT + 30)


def _passing(setting: Setting, ranks: int) -> Row:
    """Return a row for each check that should pass, with the messages of all ranks."""
    answers = on_ranks(setting, ranks, _checks, setting.device, setting.dtype, patience=150)
    names = answers[0].keys()
    found = {name: sorted({told for answer in answers for told in answer[name]}) for name in names}
    return {
        "rows": [
            {
                "what": name,
                "ranks": ranks,
                "seen": "; ".join(told),
                "ok": not any(line.startswith("wrong") for line in told),
            }
            for name, told in found.items()
        ]
    }


def _checks(group: dist.ProcessGroup, device: str, dtype: str) -> dict[str, list[str]]:
    """Return the messages of each check on this rank; a message that begins with "wrong" is a failure."""
    checks = {"telemetry": _telemetry, "loader": _loader, "latents": _latents, "another stream": _another_stream}
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check(group, device, dtype)
        except Exception as error:  # a failure is a row; if only some ranks fail, the next check may fail too
            found[name] = [f"wrong: {type(error).__name__}: {error}"[:600]]
        synchronize(device)
    return found


# --- telemetry --------------------------------------------------------------------------------------------------------


class _Scalars:
    """A writer of scalars that keeps what it is given."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.found[tag] = value


def _telemetry(group: dist.ProcessGroup, device: str, dtype: str) -> list[str]:
    """Return the messages of the check of telemetry on this rank."""
    telemetry, writer = flexcp.Telemetry(nan_check=True, check_every=1, keep=4), _Scalars()
    for strategy in ("ring", "allgather"):
        step = flexcp.bind(_plan(group, device, dtype, strategy), group, telemetry=telemetry)
        _layer(step, device)
    synchronize(device)
    telemetry.log(writer)
    passes = [p for record in telemetry.steps for p in record.passes]
    found = ["wrong: no numbers were logged"] if not writer.found else []
    found += [f"wrong: {p.name} is not finished" for p in passes if not p.finished()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        telemetry.trace(path, group)
        if dist.get_rank(group) == 0 and path.stat().st_size < 1000:
            found.append("wrong: the trace is empty")
    found += _wrong_row_is_found(group, device, dtype)
    telemetry.close()
    return found or [f"{len(passes)} passes followed, {len(writer.found)} numbers, all rows right, a wrong one found"]


def _wrong_row_is_found(group: dist.ProcessGroup, device: str, dtype: str) -> list[str]:
    """Return the messages of the check that a right output passes the sample check and a wrong one does not."""
    step = flexcp.bind(_plan(group, device, dtype, "ring"), group)
    q, k, v = _tensors(step, device)
    out, lse = flexcp.attention(q, k, v, step, return_lse=True)
    tokens = chosen_rows(step.plan.batch.tokens, 4, 0, 1)
    asked = (step, 0, Settings(step.plan.shape.head_dim**-0.5), (q, k, v), None)
    right = worst_row(*asked, out.detach(), lse.detach(), tokens)
    wrong = worst_row(*asked, out.detach() * 1.5 + 1, lse.detach(), tokens)
    return ([] if right.right else [f"wrong: {right}"]) + (["wrong: a wrong row was not found"] if wrong.right else [])


# --- the loader -------------------------------------------------------------------------------------------------------


class _Samples:
    """Samples whose tokens contain the number of their sample and their place in it."""

    lengths = (30, 1, 2, 77, 5, 64, 3, 1, 90, 12, 41, 8, 8, 1, 55, 19, 100, 2, 6, 33, 47, 21, 1, 9)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"tokens": number * 1000 + torch.arange(self.lengths[number]), "id": number}


def _loader(group: dist.ProcessGroup, device: str, dtype: str) -> list[str]:
    """Return the messages of the check of the loader on this rank."""
    where = flexcp.cluster("cpu", 1, dist.get_world_size(group))
    planner = flexcp.Planner(4, 2, 64, dtype=dtype, cluster=where, strategy="zigzag")
    data, batches, tokens, found = _Samples(), 0, 0, list[str]()
    with Loader(data, planner, budget=150, group=group, device=device, planning=Planning(workers=0)) as loader:
        for batch in loader:
            stream = torch.cat([n * 1000 + torch.arange(data.lengths[n]) for n in batch.samples.tolist()])
            here, kept = batch.step.indices, batch.tokens.cpu()
            if not torch.equal(kept[here >= 0], stream[here[here >= 0]]):
                found.append(f"wrong: tokens of batch {batches}")
            batches, tokens = batches + 1, tokens + int((here >= 0).sum())
    total = torch.tensor([tokens], device=device)
    dist.all_reduce(total, group=group)
    if int(total) != sum(data.lengths):
        found.append(f"wrong: {int(total)} of {sum(data.lengths)} tokens arrived")
    return found or [f"{batches} batches, every token where the plan keeps it"]


# --- latents ----------------------------------------------------------------------------------------------------------


def _latents(group: dist.ProcessGroup, device: str, dtype: str) -> list[str]:
    """Return the messages of the check of latents on this rank.

    The result over latents is compared with attention on one device over keys that were expanded first.
    """
    ranks, heads, width = dist.get_world_size(group), 4, 96
    planner = flexcp.Planner(
        heads, 1, 64, dtype=dtype, latent=width, cluster=flexcp.cluster("cpu", 1, ranks), strategy="allgather"
    )
    step = flexcp.bind(planner(LENGTHS, flexcp.causal()), group)
    kind, tokens = getattr(torch, dtype), step.plan.batch.tokens
    generator = torch.Generator().manual_seed(3)
    stream_q = torch.randn(tokens, heads, 64, generator=generator).to(device, kind)
    stream_latent = torch.randn(tokens, width, generator=generator).to(device, kind)
    weight = (torch.randn(width, heads * 128, generator=generator) / width**0.5).to(device, kind).requires_grad_()
    q, latent = (step.shard(x).requires_grad_() for x in (stream_q, stream_latent))
    out = latent_attention(q, latent, _expand, [weight], step)
    mine = torch.autograd.grad(out.float().square().sum(), (q, latent, weight))
    whole_q, whole_latent = (x.detach().requires_grad_() for x in (stream_q, stream_latent))
    k, v = _expand(whole_latent, weight)
    alone = flexcp.slice_attention(whole_q, k, v, packed_slices(LENGTHS, flexcp.causal()))
    assert isinstance(alone, Tensor)
    exact = torch.autograd.grad(alone.float().square().sum(), (whole_q, whole_latent, weight))
    share = mine[2].float()
    dist.all_reduce(share, group=group)
    pairs = {
        "out": (step.gather(out.detach()), alone.detach()),
        "dq": (mine[0], step.shard(exact[0])),
        "dlatent": (mine[1], step.shard(exact[1])),
        "dweight": (share, exact[2]),
    }
    limit = 1e-4 if dtype == "float32" else 3e-2
    errors = {
        name: float((a.float() - b.float()).abs().max() / b.float().abs().max()) for name, (a, b) in pairs.items()
    }
    bad = [f"wrong: {name} differs by {error:.1e}" for name, error in errors.items() if not error <= limit]
    return bad or [f"out, dq, dlatent and dweight of one device, within {limit:g}"]


def _expand(latent: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of latents."""
    both = (latent @ weight).unflatten(1, (4, 128))
    return both[..., :64].contiguous(), both[..., 64:].contiguous()


# --- streams ----------------------------------------------------------------------------------------------------------


def _another_stream(group: dist.ProcessGroup, device: str, dtype: str) -> list[str]:
    """Return the messages of the check of a step that is prepared on a delayed stream."""
    if device != "cuda":
        return ["a CPU has no streams"]
    found = []
    for strategy in ("ring", "allgather"):
        plan = _plan(group, device, dtype, strategy)
        exact = _layer(flexcp.bind(plan, group), device)
        for _ in range(3):
            step = flexcp.bind(plan, group)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                torch.cuda._sleep(LATE)
                step.prepare(device)
            again = _layer(step, device)
            torch.cuda.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(exact, again, strict=True)):
                found.append(f"wrong: {strategy} gave other bits")
    return found or ["the bits of a step that was prepared in time"]


# --- out of step ------------------------------------------------------------------------------------------------------


def _out_of_step(setting: Setting, ranks: int) -> Row:
    """Return the row of the check in which one rank is a call ahead of the others; every rank must fail."""
    from lib.nccl_ranks import ends_of_nccl_ranks

    ends = ends_of_nccl_ranks(ranks, _one_call_more, setting.dtype, limit=LIMIT, patience=min(4 * LIMIT, setting.left))
    words = "; ".join(f"code {end['code']} after {end['seconds']} s: {_first_line(end['error'])}" for end in ends)
    unharmed = [end for end in ends if end["code"] == 0]
    return {"seen": words, "ok": not unharmed, "why": f"{len(unharmed)} ranks ended well" if unharmed else None}


def _one_call_more(groups: dict[int, Any], dtype: str) -> None:
    """Let the last rank go one call ahead of the others, with the same sizes and other data."""
    group = groups[max(groups)]
    step = flexcp.bind(_plan(group, "cuda", dtype, "ring"), group)
    q, k, v = _tensors(step, "cuda")
    for number in range(3):
        if number == 1 and step.rank == step.cp_size - 1:
            step.passes.count += 1  # as if it had made a call that exchanged nothing with the others
        flexcp.attention(q + number, k + number, v + number, step)
    torch.cuda.synchronize()


# --- common -----------------------------------------------------------------------------------------------------------


def _plan(group: dist.ProcessGroup, device: str, dtype: str, strategy: str) -> Plan:
    """Return the plan of a strategy for the documents of ``LENGTHS``."""
    where = flexcp.cluster("h200" if device == "cuda" else "cpu", 1, dist.get_world_size(group))
    return flexcp.Planner(4, 2, 64, dtype=dtype, cluster=where, strategy=strategy)(LENGTHS, flexcp.causal())


def _tensors(step: Step, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with random values for this rank."""
    shape, generator = step.plan.shape, torch.Generator().manual_seed(step.rank)
    assert len(step.indices) == step.local_tokens  # unread indices would make attention warn

    def made(heads: int) -> Tensor:
        values = torch.randn(step.local_tokens, heads, shape.head_dim, generator=generator)
        return values.to(device, getattr(torch, shape.dtype)).requires_grad_()

    return made(shape.heads), made(shape.kv_heads), made(shape.kv_heads)


def _layer(step: Step, device: str) -> list[Tensor]:
    """Return the output and the gradients of q, k and v of one layer."""
    leaves = _tensors(step, device)
    out = flexcp.attention(*leaves, step, deterministic=True)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def _first_line(error: str | None) -> str:
    """Return what a rank said at its end, without CUDA's advice behind it."""
    return "ended by NCCL's watchdog" if error is None else error.split("\\n")[0][:160]
