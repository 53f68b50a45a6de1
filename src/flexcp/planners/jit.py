"""Compiled loops: how a function is compiled, and where the result is kept.

A loop is compiled by Numba when it is first called, which takes seconds, so the result is kept on disk. Numba's own cache does not do for
us: it reads only from a folder it can write, so a package that was warmed up by root and runs as somebody else is compiled again; it
numbers files in an index, where two processes may exchange names; it does not notice changes in other files; and whatever the file system
refuses ends the plan. So results are kept here, as Numba serialises them:

- one file for each function, signature and processor, in a folder named by a digest of the sources and versions;
- looked for in all these places, and written to the first that takes it: ``NUMBA_CACHE_DIR``, ``__pycache__`` beside the source, the user's
  cache folder;
- written under another name and renamed, so that readers see all of it or nothing, whoever writes at the same time;
- what fails is logged and no more: then the loop is compiled in this process only.

Nothing is printed. Every compilation is a record of the logger ``flexcp.compile``, at level INFO; trouble with folders is at WARNING.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import uuid
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numba
from numba.core import types
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

Loop = Callable[..., Any]
LOGGER = logging.getLogger("flexcp.compile")
LOGGER.addHandler(logging.NullHandler())  # silent unless the application listens


def compiled(function: Loop) -> Loop:
    """The function, compiled on first use; on disk afterwards, where a folder can be written."""
    loop: Any = numba.njit(function)
    if hasattr(loop, "get_call_template"):  # not under NUMBA_DISABLE_JIT
        loop._cache = _Kept(function)
        loop.get_call_template = partial(_of_plain_types, loop.get_call_template)
    return cast(Loop, loop)


def _of_plain_types(get_call_template: Loop, args: Any, kws: Any) -> Any:
    """Called from another loop with constants, a function would be compiled anew for every constant; here it is once for all numbers."""
    plain = {name: types.unliteral(each) for name, each in kws.items()}
    return get_call_template([types.unliteral(each) for each in args], plain)


class _Kept(NullCache):
    """A function's compiled signatures on disk, in the place of Numba's own cache."""

    def __init__(self, function: Loop) -> None:
        self.source = Path(function.__code__.co_filename)
        self.name = f"{self.source.stem}.{function.__qualname__}"

    @property
    def cache_path(self) -> str:
        """The folder that is tried first."""
        return str(_folders(self.source)[0])

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was kept for a signature, or None: then Numba compiles.

        Numba would first load all it needs to compile, which is most of a warm start; kept code needs only the runtime.
        """
        key = _key(sig, target_context.codegen())
        for folder in _folders(self.source):
            try:
                kept, payload = pickle.loads((folder / self._file(key)).read_bytes())
                if kept == key:
                    rtsys.initialize(target_context)
                    return CompileResult._rebuild(target_context, *payload)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except Exception as error:  # no rights, or half a file: what a broken pickle raises has no common name
                LOGGER.warning("cannot read compiled %s from %s: %s", self.name, folder, error)
        LOGGER.info("compiling %s", self.name)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compilation, in the first folder that takes it."""
        if data.lifted or data.library.has_dynamic_globals:
            return
        key = _key(sig, data.codegen)
        content = dumps((key, data._reduce()))
        refused = []
        for folder in _folders(self.source):
            try:
                _write(folder / self._file(key), content)
                return
            except OSError as error:
                refused.append(str(error))
        LOGGER.warning("compiled %s is lost with this process, no folder takes it: %s", self.name, "; ".join(refused))

    def _file(self, key: str) -> str:
        return f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.nbc"


def _key(signature: Any, codegen: Any) -> str:
    """Argument types, and what processor the code is for."""
    return repr((signature, codegen.magic_tuple()))


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing, readable as the user's umask says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


@cache
def _folders(source: Path) -> tuple[Path, ...]:
    """Where compiled code of this source may be kept, the best first."""
    found = [source.parent / "__pycache__"]
    given = getattr(numba.config, "CACHE_DIR", "")
    if given:
        found.insert(0, Path(given))
    home = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    if home.is_absolute():  # "~" remains where there is no home
        found.append(home / "flexcp")
    return tuple(folder / f"flexcp-{_digest(source)}" for folder in found)


@cache
def _digest(source: Path) -> str:
    """Changes with any loop beside this source, Python and Numba: compiled code has others' code inside."""
    versions = f"{sys.implementation.cache_tag} {numba.__version__}"
    files = sorted({source, *source.parent.glob("loops*.py")})
    return hashlib.sha256(versions.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
