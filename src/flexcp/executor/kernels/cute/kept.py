"""Kept: keep compiled CuTe DSL functions on disk, so that later processes load them in milliseconds.

Compiling the functions of a model takes 20 to 30 seconds in every rank. The result is an object file: host code that
launches the kernel, with the kernel's machine code inside. It is kept beside the compiled loops of
:mod:`flexcp.arrays.jit`, in a folder named by a digest of the kernels' sources, the version of the DSL and the GPU's
compute capability. The same rules apply: files are written whole or not at all, and files that another user could have
written are not loaded. Any problem with a file is logged, and the function is compiled in this process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cutlass import cute

from flexcp.arrays.jit import cache_folders
from flexcp.io.private_files import read_own, write_own

LOGGER = logging.getLogger("flexcp.compile")
FUNCTION = "flexcp_kernel"
"""The name of the function inside an object file."""


def kept(name: str, compile_now: Callable[[], Any]) -> Any:
    """Return the function that was kept under this name; if there is none, call ``compile_now`` and keep the result."""
    file = f"{name}.o"
    for folder in _folders():
        try:
            return _loaded(read_own(folder, file))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Exception as error:  # no permission, a file of another user, a broken file: no common exception type
            LOGGER.warning("cannot load %s from %s: %s", file, folder, error)
    LOGGER.info("compiling %s", name)
    content = _object_file(compile_now())
    refused = []
    for folder in _folders():
        try:
            write_own(folder, file, content)
            break
        except OSError as error:
            refused.append(str(error))
    else:
        if refused:  # if there is no folder at all, cache_folders has said why
            LOGGER.warning("compiled %s is lost with this process, no folder takes it: %s", name, "; ".join(refused))
    return _loaded(content)


def _loaded(content: bytes) -> Any:
    """Load the function from the content of an object file."""
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(content)
        file.flush()
        return getattr(cute.runtime.load_module(file.name, enable_tvm_ffi=True), FUNCTION)


def _object_file(made: Any) -> bytes:
    """Return the content of the object file of a compiled function."""
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        made.export_to_c(file.name, function_name=FUNCTION)
        return Path(file.name).read_bytes()


@cache
def _folders() -> tuple[Path, ...]:
    """Return the folders in which object files may be kept, in order of preference."""
    here = Path(__file__).parent
    files = sorted([*here.glob("*.py"), *here.parent.glob("hopper/*.py")])
    chip = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    versions = repr((importlib.metadata.version("nvidia-cutlass-dsl"), chip))
    digest = hashlib.sha256(versions.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return tuple(folder.with_name(f"cute-{digest}") for folder in cache_folders())
