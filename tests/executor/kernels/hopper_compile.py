"""Compiles the Hopper kernels for sm90 without a GPU, and prints one JSON line for each.

Run by test_kernels_hopper.py in a separate process, because Triton's bindings print complaints when a process that
compiled Gluon code ends.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from flexcp.executor.kernels.hopper import forward as hopper_forward
from flexcp.executor.kernels.hopper import keys as hopper_keys
from flexcp.executor.kernels.hopper import queries as hopper_queries

PACK, BLOCK = 4, 128


def sizes(head: int) -> dict[str, Any]:
    return {"SHARE": 4, "PACK": PACK, "D": head, "V": head, "STAGES": 2, "SOFTCAP": False}


# Heads of 128 need the most shared memory. The second variant of queries_kernel uses heads of 64, which compile faster.
KERNELS = (
    (hopper_forward.forward_kernel, {**sizes(128), "N": BLOCK, "FRESH": True}),
    (hopper_keys.keys_kernel, sizes(128)),
    (hopper_queries.queries_kernel, {**sizes(128), "N": BLOCK, "FRESH": False}),
    (hopper_queries.queries_kernel, {**sizes(64), "N": BLOCK, "FRESH": True}),
)
INSTRUCTIONS = ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg")


def described(rows: int, heads: int, head: int) -> str:
    return f"tensordesc<bf16[{rows},{heads},{head}],{gl.NVMMASharedLayout(128, 16, 3)!r}>"


def tensors(head: int, fresh: bool) -> dict[str, str]:
    """Return the types of tensor arguments by name."""
    return {
        **dict.fromkeys(("q", "do"), described(64 // PACK, PACK, head)),
        **dict.fromkeys(("k", "v"), described(BLOCK, 1, head)),
        **dict.fromkeys(("lse", "delta", "statistics", "dk", "dv"), "*fp32"),
        **dict.fromkeys(("tiles", "segments"), "*i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
        "dq": "*bf16" if fresh else "*fp32",
        "out": "*bf16",
    }


def main() -> None:
    """Print each kernel's name, its shared memory, and for each of Hopper's instructions whether the kernel contains
    it.
    """
    for kernel, constants in KERNELS:
        made = compiled(kernel, constants, tensors(constants["D"], constants.get("FRESH", False)))
        code = str(made.asm["ptx"])
        print(json.dumps([kernel.__name__, made.metadata.shared, [i in code for i in INSTRUCTIONS]]), flush=True)


def compiled(kernel: Any, constants: dict[str, Any], tensors: dict[str, str]) -> Any:
    """Compile the kernel for sm90; arguments that are not tensors are 32-bit integers."""
    signature = {n: "constexpr" if n in constants else tensors.get(n, "i32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    main()
