"""The doctor: what this machine has, what flexcp would use of it and why, and whether that works.

:func:`examine` looks at the machine. :func:`try_out` plans a batch, executes the plan symbolically, runs it on two real
processes against dense attention, and on a GPU runs the chosen kernel against plain torch. A finding that prevents
flexcp from working has a fix; the doctor itself changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexcp.version import __version__

if TYPE_CHECKING:
    import torch.distributed as dist

    from flexcp.plan.plan import Plan

OPTIONAL = ("triton", "mtkahypar", "transformers", "torchtitan", "megatron-core", "datasets")
"""Packages that flexcp can use if they are installed."""
LEAST_TORCH = (2, 11)


@dataclass(frozen=True)
class Finding:
    """One fact about this machine: its name and what was found.

    ``fix`` says what to do if it prevents flexcp from working, ``hint`` if it could be better.
    """

    name: str
    value: str
    fix: str | None = None
    hint: str | None = None

    @property
    def ok(self) -> bool:
        return self.fix is None


def examine() -> Iterator[Finding]:
    """Yield what this machine has, from hardware to optional packages."""
    yield Finding("flexcp", f"{__version__} in {Path(__file__).parents[1]}")
    yield Finding(
        "machine", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {_cores()}"
    )
    yield from _torch()
    yield from _kernels()
    yield _cache()
    for name in OPTIONAL:
        version = _version(name)
        yield Finding(name, version or "not installed (optional)")


def try_out(tell: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Plan, check and run something small, and yield a finding about each; if it worked, it says how long it took.

    ``tell`` is called with a message before each trial.
    """
    tell("planning (the first time on a machine, loops are compiled)")
    yield _timed("plan a batch", _plan_something)
    tell("running two processes")
    yield _timed("two processes against dense attention", _run_two)
    import torch

    if torch.cuda.is_available():
        tell("running a kernel on the GPU")
        yield _timed("the GPU kernel against plain torch", _run_kernel)


def _cores() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of memory"
    except (ValueError, OSError):
        memory = ""
    return f"{count} cores{memory}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "not installed", fix="pip install 'torch>=2.11'")
        return
    import torch
    import torch.distributed as dist

    parts = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    old = None if parts >= LEAST_TORCH else "flexcp needs torch 2.11 or newer: pip install -U torch"
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}", fix=old)
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        "gloo", "for CPU ranks" if gloo else "missing", fix=None if gloo else "install a torch built with gloo"
    )
    if not torch.cuda.is_available():
        why = (
            "torch has no CUDA"
            if torch.version.cuda is None
            else "no device, or its driver does not answer (try nvidia-smi)"
        )
        yield Finding("GPU", f"none: {why}; everything runs on the CPU, for planning, tests and simulation")
        return
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield Finding(
            f"GPU {number}",
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB",
        )
    nccl = dist.is_available() and dist.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "missing"
    yield Finding("NCCL", version, fix=None if nccl else "install a torch built with NCCL; several GPUs need it")
    if nccl:
        yield transfer_stream(dist.group.WORLD if dist.is_initialized() else None)


def transfer_stream(group: dist.ProcessGroup | None) -> Finding:
    """Return whether transfers have priority over kernels that need the same multiprocessors.

    ``group`` is the process group of the transfers; None if there is none yet.
    """
    from flexcp.executor.exchange.start_group import OWN_GROUP, has_high_priority

    if group is None:
        words = "of high priority in groups that flexcp makes (flexcp train, bench step, accept)"
        return Finding("stream of transfers", words, hint=f"your own process group has to ask for it: {OWN_GROUP}")
    if has_high_priority(group):
        return Finding("stream of transfers", "of high priority")
    return Finding("stream of transfers", "not of high priority", hint=f"make the group with {OWN_GROUP}")


def _kernels() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from flexcp.executor.kernels.choose import choose_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.bfloat16, torch.float32):
        name = f"kernel for {str(dtype).removeprefix('torch.')}"
        try:
            yield Finding(name, str(choose_kernel(device, dtype, 128)))
        except NotImplementedError as error:
            yield Finding(name, "none", fix=str(error))


def _cache() -> Finding:
    """Return where compiled planning loops are kept, and whether they have been compiled."""
    from flexcp.arrays.jit import cache_folders
    from flexcp.io.private_files import refusal

    folders = cache_folders()
    if not folders:
        return Finding(
            "compiled loops",
            "not kept, because the sources cannot be read",
            fix="install flexcp as files, not in an archive, or the first plan of every process takes half a minute",
        )
    refused = next((why for folder in folders if (why := refusal(folder)) is not None), None)
    if refused is not None:
        return Finding("compiled loops", "not used, because others may have written them", fix=refused)
    filled = next((f for f in folders if f.is_dir() and any(f.iterdir())), None)
    if filled is not None:
        return Finding("compiled loops", f"kept in {filled}")
    writable = next((f for f in folders if _can_write(f)), None)
    if writable is None:
        fix = (
            "set NUMBA_CACHE_DIR to a folder of your own (it holds code) that can be written, or the first plan of "
            "every process takes half a minute"
        )
        return Finding("compiled loops", f"none of {', '.join(map(str, folders))} can be written", fix=fix)
    hint = "flexcp warmup compiles the planners' loops now instead of during the first plan"
    return Finding("compiled loops", f"not yet; would be kept in {writable}", hint=hint)


def _can_write(folder: Path) -> bool:
    there = next((p for p in (folder, *folder.parents) if p.exists()), None)
    return there is not None and os.access(there, os.W_OK)


def _timed(name: str, work: Callable[[], str]) -> Finding:
    """Run ``work`` and return its words with the seconds it took, or a finding that it failed."""
    begin = time.perf_counter()
    try:
        found = work()
    except Exception as error:  # any error on a machine is a finding
        return Finding(
            name, "failed", fix=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    return Finding(name, f"{found}, {time.perf_counter() - begin:.1f} s")


def _plan_something() -> str:
    plan = _tried()
    plan.check()
    return f"{plan!r}, checked"


def _run_two() -> str:
    from flexcp.measure.ranks import RankPool
    from flexcp.measure.verify import Options, verify_on

    with RankPool(2, timeout=60.0) as pool:
        verdict = pool.run(verify_on, _tried(), Options())[0]
    if not verdict.passed:
        raise RuntimeError(f"results differ: {verdict.errors} of {verdict.allowed}, bytes equal: {verdict.bytes_match}")
    return f"largest error {max(verdict.errors.values()):.1e}, bytes as planned"


def _run_kernel() -> str:
    """Run the chosen kernel on the GPU against plain torch."""
    import torch

    from flexcp.executor.slice_attention import slice_attention
    from flexcp.masks import causal

    q = torch.randn(512, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 512, 2, 128, device="cuda", dtype=torch.bfloat16)
    fast = slice_attention(q, k, v, causal(), lengths=[400, 112])
    slow = slice_attention(q.float(), k.float(), v.float(), causal(), lengths=[400, 112], kernel="cpu")
    assert isinstance(fast, torch.Tensor) and isinstance(slow, torch.Tensor)
    error = float((fast.float() - slow).abs().max())
    if not error < 0.05:
        raise RuntimeError(f"bfloat16 attention is off by {error:.3g}")
    return f"largest error {error:.1e} in bfloat16"


def _tried() -> Plan:
    from flexcp.clusters import cluster
    from flexcp.planner import Planner

    machine = cluster("cpu", ranks_per_node=2)
    return Planner(4, 2, 32, dtype="float64", cluster=machine, strategy="blocks")([700, 31, 1])
