"""Compiles the Hopper kernels for sm90 without a GPU, for test_kernels_hopper in a process of their own: one JSON line each.

Triton's bindings complain when a process that compiled Gluon code ends; here nobody reads it.
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

PACK, HEAD, BLOCK = 4, 128, 128
SIZES = {"SHARE": 4, "PACK": PACK, "D": HEAD, "V": HEAD, "STAGES": 2, "SOFTCAP": False}
KERNELS = (
    (hopper_forward.forward_kernel, {**SIZES, "N": BLOCK, "FRESH": True}),
    (hopper_keys.keys_kernel, SIZES),
    (hopper_queries.queries_kernel, {**SIZES, "N": BLOCK, "FRESH": False}),
    (hopper_queries.queries_kernel, {**SIZES, "N": BLOCK, "FRESH": True}),
)
INSTRUCTIONS = ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg")


def described(rows: int, heads: int) -> str:
    return f"tensordesc<bf16[{rows},{heads},{HEAD}],{gl.NVMMASharedLayout(128, 16, 3)!r}>"


TENSORS = {
    **dict.fromkeys(("q", "do"), described(64 // PACK, PACK)),
    **dict.fromkeys(("k", "v"), described(BLOCK, 1)),
    **dict.fromkeys(("lse", "delta", "statistics", "dq", "dk", "dv"), "*fp32"),
    **dict.fromkeys(("tiles", "segments"), "*i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    "out": "*bf16",
}


def main() -> None:
    """Print each kernel's name, shared memory, and which of Hopper's instructions it has."""
    for kernel, constants in KERNELS:
        made = compiled(kernel, constants, TENSORS | ({"dq": "*bf16"} if constants.get("FRESH") else {}))
        code = str(made.asm["ptx"])
        print(json.dumps([kernel.__name__, made.metadata.shared, [i in code for i in INSTRUCTIONS]]), flush=True)


def compiled(kernel: Any, constants: dict[str, Any], tensors: dict[str, str]) -> Any:
    """The kernel for sm90: arguments that are no tensor are 32-bit integers."""
    signature = {n: "constexpr" if n in constants else tensors.get(n, "i32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    main()
