"""Choose: select the kernel that runs, and say why.

The first kernel of this table that supports the tensors is used:

    CPU tensors           cpu      plain torch
    CUDA, Hopper          fa4      FlashAttention-4 where it is faster, else cute; if installed (flexcp[fa4])
                          cute     CuTe DSL, if installed (flexcp[cute])
                          hopper   Gluon, needs nothing but Triton
    CUDA, Ampere or newer triton   head sizes that are multiples of 8 up to 256, and float32
    any other device      cpu      plain torch runs anywhere

``stock`` and ``reference`` run only by ``kernel=``: ``stock`` is for GPUs on which torch's own kernels are faster
(:func:`flexcp.executor.fastest_kernel.fastest_kernel` measures that), ``reference`` is for tests. If no GPU kernel
supports the tensors, :func:`choose_kernel` raises and says what they support; it never falls back silently to a slow
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexcp.executor.kernels import find_kernel, has_triton

NEED_TRITON = ("triton", "hopper", "cute", "fa4", "stock")
EXTRAS = ("cute", "fa4")


@dataclass(frozen=True)
class Choice:
    """A kernel's name and why it was chosen."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


def choose_kernel(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int | None = None,
    kernel: str | None = None,
) -> Choice:
    """Return the kernel for tensors like these, and the reason; ``kernel`` overrides the choice.

    ``v_head_dim`` is ``head_dim`` by default. Raises NotImplementedError if no kernel, or not the given one, supports
    such tensors, and ValueError if no kernel has the given name.
    """
    device = torch.device(device)
    sizes = (head_dim, head_dim if v_head_dim is None else v_head_dim)
    if kernel is not None:
        refusal = why_not(kernel, device, dtype, *sizes)
        if refusal:
            raise NotImplementedError(f"kernel {kernel!r} cannot run this: {refusal}{_instead(device, dtype, *sizes)}")
        return Choice(kernel, "asked for by kernel=")
    if device.type == "cpu":
        return Choice("cpu", "the tensors are on the CPU")
    if device.type != "cuda":
        return Choice("cpu", f"plain torch, the only kernel that runs on {device.type}")
    no_hopper = why_not("hopper", device, dtype, *sizes)
    if no_hopper is None:
        name = torch.cuda.get_device_name(device)
        no_fa4 = why_not("fa4", device, dtype, *sizes)
        if no_fa4 is None:
            return Choice("fa4", f"{name} has what the CuTe kernels and FlashAttention-4 need, and both are installed")
        no_cute = why_not("cute", device, dtype, *sizes)
        if no_cute is None:
            return Choice("cute", f"{name} has what the CuTe kernels need, and the CuTe DSL is installed")
        return Choice("hopper", f"{name} has what the Gluon kernels need; not the cute kernel: {no_cute}")
    no_triton = why_not("triton", device, dtype, *sizes)
    if no_triton is None:
        return Choice("triton", f"{torch.cuda.get_device_name(device)} runs Triton; not the hopper kernel: {no_hopper}")
    raise NotImplementedError(
        f"no GPU kernel can run this: {no_triton}. kernel='cpu' runs anything in plain torch on {device}, "
        "correct and slow"
    )


def _instead(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str:
    """Return the end of a message that names the kernel which would run without ``kernel=``; "" if none would."""
    try:
        return f". Without kernel= the {choose_kernel(device, dtype, head_dim, v_head_dim).kernel} kernel runs"
    except NotImplementedError:
        return ""


def why_not(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return why a kernel cannot run tensors like these; None if it can. An unknown name raises ValueError."""
    if kernel in NEED_TRITON and not has_triton():
        return "Triton is not installed (pip install triton)"
    try:
        module = find_kernel(kernel)
    except ImportError as error:  # there is no CuTe DSL, or Triton has no Gluon or another version of it
        way = f" (pip install flexcp[{kernel}])" if kernel in EXTRAS else ""
        return f"it cannot be imported here ({error}){way}"
    refusal: str | None = module.supports(device, dtype, head_dim, v_head_dim)
    return refusal
