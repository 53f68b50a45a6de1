"""Proves the choice of kernels: which kernel each machine gets, the reason given for it, and errors that say what is
supported.

The machines are simulated: the tests set the compute capability, whether Triton is installed, and the kernels' limits.
"""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexcp
from flexcp.executor.fastest_kernel import fastest_kernel
from flexcp.executor.kernels import choose, reference
from flexcp.executor.kernels.choose import choose_kernel

BF16 = torch.bfloat16


def limited(sizes: tuple[int, ...] | range, dtypes: tuple[torch.dtype, ...] = (BF16,), only: int | None = None) -> Any:
    def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA tensors; these are on {device}"
        if only not in (None, torch.cuda.get_device_capability(device)[0]):
            return "the GPU is of another age"
        if not {head_dim, v_head_dim} <= set(sizes):
            return f"head sizes are {sizes}; got {head_dim} and {v_head_dim}"
        return None if dtype in dtypes else f"dtypes are {dtypes}; got {dtype}"

    return SimpleNamespace(supports=supports)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes every CUDA device appear to have this compute capability and these kernels."""
    real = choose.find_kernel
    modules = {
        "fa4": ImportError("No module named 'flash_attn'"),
        "cute": limited((128,), only=9),
        "hopper": limited((64, 128), only=9),
        "triton": limited(range(8, 257, 8), (BF16, torch.float32)),
    }

    def find(name: str) -> Any:
        found = modules.get(name) or real(name)
        if isinstance(found, ImportError):
            raise found
        return found

    def make(capability: tuple[int, int], installed: bool = True, **kernels: Any) -> None:
        modules.update(kernels)
        monkeypatch.setattr(choose, "find_kernel", find)
        monkeypatch.setattr(choose, "has_triton", lambda: installed)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"sm{capability[0]}{capability[1]}")

    return make


def test_cpu_tensors_get_the_cpu_kernel() -> None:
    choice = choose_kernel("cpu", torch.float64, 80)
    assert choice.kernel == "cpu"
    assert str(choice) == "cpu: the tensors are on the CPU"


def test_other_devices_get_plain_torch() -> None:
    assert choose_kernel("xpu", BF16, 64).kernel == "cpu"
    assert "xpu" in choose_kernel("xpu", BF16, 64).reason


@pytest.mark.parametrize(
    ("capability", "sizes", "kernel", "reason"),
    [
        ((9, 0), (128,), "cute", "sm90"),
        ((9, 0), (64,), "hopper", "not the cute kernel: head sizes are (128,); got 64 and 64"),
        ((9, 0), (192, 128), "triton", "got 192 and 128"),
        ((8, 0), (64,), "triton", "another age"),
        ((10, 0), (64,), "triton", "another age"),
    ],
)
def test_the_best_kernel_that_can_is_chosen(
    machine: Any, capability: tuple[int, int], sizes: tuple[int, ...], kernel: str, reason: str
) -> None:
    machine(capability)
    choice = choose_kernel("cuda:0", BF16, *sizes)
    assert choice.kernel == kernel
    assert reason in choice.reason


def test_with_the_fa4_extra_the_choice_is_the_kernel_that_has_both(machine: Any) -> None:
    machine((9, 0), fa4=limited((128,), only=9))
    assert choose_kernel("cuda", BF16, 128).kernel == "fa4"
    assert choose_kernel("cuda", BF16, 64).kernel == "hopper"
    machine((9, 0), fa4=ImportError("No module named 'flash_attn'"))
    with pytest.raises(NotImplementedError, match=r"'flash_attn'.*pip install flexcp\[fa4\]"):
        choose_kernel("cuda", BF16, 128, kernel="fa4")


def test_without_the_cute_extra_the_choice_is_the_hopper_kernel(machine: Any) -> None:
    machine((9, 0), cute=ImportError("No module named 'cutlass'"))
    choice = choose_kernel("cuda", BF16, 128)
    assert choice.kernel == "hopper"
    assert "No module named 'cutlass'" in choice.reason and "pip install flexcp[cute]" in choice.reason


def test_a_hopper_kernel_that_cannot_be_imported_is_passed_over(machine: Any) -> None:
    machine((9, 0), hopper=ImportError("no gluon"))
    choice = choose_kernel("cuda", BF16, 128)
    assert choice.kernel == "triton"
    assert "no gluon" in choice.reason


def test_an_unsupported_head_size_names_the_supported_ones(machine: Any) -> None:
    machine((9, 0))
    for kernel in (None, "triton"):
        with pytest.raises(NotImplementedError, match=r"range\(8, 257, 8\); got 84 and 84"):
            choose_kernel("cuda", BF16, 84, kernel=kernel)
    assert choose_kernel("cuda", BF16, 84, kernel="cpu").kernel == "cpu"


@pytest.mark.parametrize("sizes", [(80, 80), (72, 128), (192, 128), (256, 256)])
def test_head_sizes_that_only_triton_has_run_on_hopper(machine: Any, sizes: tuple[int, int]) -> None:
    """Uses the real limits of the Triton and Hopper kernels."""
    names = ("triton", "hopper")
    machine((9, 0), **{n: pytest.importorskip(f"flexcp.executor.kernels.{n}_kernel") for n in names})
    choice = choose_kernel("cuda", BF16, *sizes)
    why = f"the hopper kernel has head sizes 64, 128; got {sizes[0]} and {sizes[1]}"
    assert str(choice) == f"triton: sm90 runs Triton; not the hopper kernel: {why}"
    with pytest.raises(NotImplementedError) as refused:
        choose_kernel("cuda", BF16, *sizes, kernel="hopper")
    assert str(refused.value) == f"kernel 'hopper' cannot run this: {why}. Without kernel= the triton kernel runs"


def test_a_gpu_too_old_is_named_with_what_is_needed(machine: Any) -> None:
    machine((7, 5), triton=pytest.importorskip("flexcp.executor.kernels.triton.kernel"))
    with pytest.raises(NotImplementedError, match=r"8\.0 \(Ampere\).*sm75 has 7\.5.*kernel='cpu'"):
        choose_kernel("cuda", BF16, 64)


def test_missing_triton_is_named_with_the_way_out(machine: Any) -> None:
    machine((9, 0), installed=False)
    with pytest.raises(NotImplementedError, match=r"Triton is not installed \(pip install triton\).*kernel='cpu'"):
        choose_kernel("cuda", BF16, 64)


def test_cpu_tensors_for_a_gpu_kernel_are_refused(machine: Any) -> None:
    machine((9, 0))
    with pytest.raises(NotImplementedError, match=r"'triton'.*CUDA tensors.*cpu"):
        choose_kernel("cpu", BF16, 64, kernel="triton")
    with pytest.raises(NotImplementedError, match=r"'stock'.*CUDA tensors.*cpu"):
        choose_kernel("cpu", BF16, 64, kernel="stock")


@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float32, (64, 64)), (BF16, (64, 128)), (BF16, (512, 512)), (BF16, (60, 60))]
)
def test_stock_names_the_limits_of_flash_attention(machine: Any, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    machine((9, 0))
    with pytest.raises(NotImplementedError, match=r"FlashAttention"):
        choose_kernel("cuda", dtype, *sizes, kernel="stock")


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'flash'.*cpu, reference, triton, hopper, cute, fa4, stock"):
        choose_kernel("cpu", BF16, 64, kernel="flash")


def test_a_step_says_which_kernels_ran_and_why() -> None:
    plan = flexcp.Planner(2, 2, 8, dtype="float64", strategy="dp", cluster=flexcp.cluster("cpu", 1, 1))([5])
    step = flexcp.bind(plan)
    assert step.kernels == {}
    q, k, v = torch.randn(3, 5, 2, 8, dtype=torch.float64)
    flexcp.attention(q, k, v, step)
    flexcp.attention(q, k, v, step, kernel="reference")
    assert step.kernels == {"cpu": "the tensors are on the CPU", "reference": "asked for by kernel="}


def test_the_fastest_kernel_is_measured_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(reference, "backward", lambda *arguments: (waits.append(1), time.sleep(0.1)))
    slices = flexcp.causal().slices(40)
    choice = fastest_kernel("cpu", torch.float32, heads=4, kv_heads=2, head_dim=16, slices=slices, repeats=3)
    assert choice.kernel == "cpu"
    assert len(waits) == 4
    found = re.search(r"cpu ([\d.]+) \+ ([\d.]+) ms, reference ([\d.]+) \+ ([\d.]+) ms", choice.reason)
    assert found
    assert float(found[4]) >= 100
    assert "triton" not in choice.reason
