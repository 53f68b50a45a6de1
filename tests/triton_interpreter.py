"""Lets the ranks of a pool run Triton's kernels in its interpreter, on the CPU.

Triton reads TRITON_INTERPRET when its modules are imported. A pool's ranks are forked from a server that has imported
them, but none of flexcp's kernels, so a rank forgets Triton's modules, sets the variable, and imports them again. That
takes a tenth of a second; a new process would import torch first.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flexcp.measure.ranks import RankPool


@contextmanager
def interpreting_pool(size: int) -> Iterator[RankPool]:
    """Yield a pool of ranks that run Triton's kernels in its interpreter."""
    with RankPool(size) as pool:
        pool.run(_use_interpreter)
        yield pool


def _use_interpreter(group: Any) -> None:
    """Make this process import Triton again, with the interpreter; flexcp's kernels must not be imported yet."""
    kernels = ("flexcp.executor.kernels.row_kernels", "flexcp.executor.kernels.triton.")
    early = [name for name in sys.modules if name.startswith(kernels)]
    assert not early, f"imported before the interpreter was chosen: {early}"
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        # The compiled part cannot be imported twice in one process, and knows nothing of the interpreter.
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    import triton

    assert triton.knobs.runtime.interpret
    gc.freeze()  # the interpreter makes many small objects; without this each collection looks at those of torch, too
    warnings.simplefilter("ignore")  # the interpreter divides by zero where a GPU would, too
