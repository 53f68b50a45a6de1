"""Compiles the CuTe kernels for sm90 without a GPU.

Run by test_kernels_cute.py in a separate process; the compiler dumps PTX and machine code into a folder.
"""

from __future__ import annotations

import sys

import torch

from flexcp.executor.kernels.cute import gpu_functions

BACKWARDS = {"backward": "rows", "backward_open": "open", "backward_alone": "alone"}
"""For each backward kernel, the order argument that says how dq is laid out while kernels add to it."""


def main() -> None:
    """Compile the kernels named on the command line, ignoring any that were compiled and stored before."""
    gpu_functions.kept = lambda _, compile_now: compile_now()
    for name in sys.argv[1:]:
        if name in BACKWARDS:
            gpu_functions.compiled_backward(torch.bfloat16, 4, 4, False, BACKWARDS[name], name != "backward_alone")
        elif name == "before":
            gpu_functions.compiled_before(torch.bfloat16, 4, True)
        elif name == "after":
            gpu_functions.compiled_after(torch.bfloat16, 4)
        elif name == "open":
            gpu_functions.compiled_open(4, True)
        elif name == "close":
            gpu_functions.compiled_close(torch.float32)
        else:
            fresh = name == "forward"
            out = torch.bfloat16 if fresh else torch.float32
            finishes = name == "forward_finishing"
            gpu_functions.compiled_forward(torch.bfloat16, out, 4, 4, False, fresh, finishes, not fresh)
        print(name, flush=True)


if __name__ == "__main__":
    main()
