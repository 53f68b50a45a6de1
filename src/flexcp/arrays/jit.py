"""Compiled loops: how a function is compiled, and where the result is kept.

A loop is compiled by Numba when it is first called, which takes seconds, so the result is kept on disk. Numba's own
cache does not do for us: it loads all that compiling needs before it looks for a file, three times as long as a warm
start takes here; it reads only from a folder it can write, so a package that was warmed up by root and runs as somebody
else is compiled again; it numbers files in an index, where two processes may exchange names; it does not notice changes
in other files; and whatever the file system refuses ends the plan. So :class:`Kept` stands where Numba's cache would,
and keeps results as Numba serialises them:

- one file for each function, signature and processor, in a folder named by a digest of the sources and versions;
- looked for in all these places, and written to the first that takes it: ``NUMBA_CACHE_DIR``, ``__pycache__`` beside
  the source, the user's cache folder;
- written under another name and renamed, so that readers see all of it or nothing, whoever writes at the same time;
- executed when they are read, so folders and files that another user could have written are refused with a warning
  (:mod:`flexcp.io.private_files`), and the next place is tried;
- what fails otherwise is logged and no more: then the loop is compiled in this process only.

This rests on names inside Numba, which are the same in the versions ``KNOWN``. With any other, loops are compiled
plainly, anew in every process, and a warning says so.

Nothing else is printed. Every compilation is a record of the logger ``flexcp.compile``, at level INFO; trouble with
folders is at WARNING.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numba

from flexcp.io.private_files import NotOwnError, read_own, write_own

Loop = Callable[..., Any]
KNOWN = ((0, 60), (0, 68))
"""The first and the last version of Numba that compiled loops are kept with."""
LOGGER = logging.getLogger("flexcp.compile")
LOGGER.addHandler(logging.NullHandler())  # silent unless the application listens


def compiled(function: Loop) -> Loop:
    """The function, compiled on first use; on disk afterwards, where a folder can be written."""
    return _compiled(function)


def compiled_leaf(function: Loop) -> Loop:
    """Like :func:`compiled`, for a function that makes no arrays and is called millions of times.

    Numba counts references to every array it is handed, an atomic operation each, and that takes most of the time of a
    short function. What is left is handing over what describes each array, so it is made part of its callers.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def compiled_inline(function: Loop) -> Loop:
    """A function that becomes part of whatever loop calls it before that one is compiled,
    and is never compiled by itself.

    For the parts that a long loop is written in, each called in few places: a leaf of leaves is compiled once more for
    every level. Inside a leaf, as it has the caller's options.
    """
    return _compiled(function, inline="always")


def compiled_fused(function: Loop) -> Loop:
    """Like :func:`compiled`, with a product and a sum in one instruction where the processor has that.

    It rounds once instead of twice: for floating point that holds integers, where nothing is rounded.
    """
    return _compiled(function, fastmath={"contract"})


def _compiled(function: Loop, **options: Any) -> Loop:
    if not KNOWN[0] <= numba.version_info.short <= KNOWN[1]:
        _warn_of_version()
        return cast(Loop, numba.njit(function))
    loop: Any = numba.njit(function, **options)
    if loop is not function:  # it is under NUMBA_DISABLE_JIT
        loop._cache = Kept(function)
        loop.get_call_template = partial(_of_plain_types, loop.get_call_template)
    return cast(Loop, loop)


def _of_plain_types(get_call_template: Loop, args: Any, kws: Any) -> Any:
    """Called from another loop with constants, a function would be compiled anew for every constant;
    here it is once for all numbers.
    """
    plain = {name: numba.types.unliteral(each) for name, each in kws.items()}
    return get_call_template([numba.types.unliteral(each) for each in args], plain)


class Kept:
    """A function's compiled signatures on disk. Numba asks it before it compiles, and hands it what it has compiled."""

    def __init__(self, function: Loop) -> None:
        self.source = Path(function.__code__.co_filename)
        module = self.source.relative_to(_package(self.source)).with_suffix("")
        self.name = ".".join([*module.parts, function.__qualname__])

    def load_overload(self, signature: Any, target: Any) -> Any:
        """What was kept for a signature, or None: then Numba compiles."""
        key = _key(signature, target.codegen())
        for folder in _folders(self.source):
            try:
                kept, payload = pickle.loads(read_own(folder, self._file(key)))
                if kept == key:
                    return _rebuilt(target, payload)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except NotOwnError as error:
                _warn(str(error))
            except Exception as error:  # no rights, half a file: what these raise has no common name
                LOGGER.warning("cannot read compiled %s from %s: %s", self.name, folder, error)
        LOGGER.info("compiling %s", self.name)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compilation, in the first folder that takes it."""
        from numba.core.serialize import dumps

        if result.lifted or result.library.has_dynamic_globals:
            return  # what else it needs is known to this process only
        key = _key(signature, result.codegen)
        content = bytes(dumps((key, result._reduce())))
        refused = []
        for folder in _folders(self.source):
            try:
                write_own(folder, self._file(key), content)
                return
            except NotOwnError as error:
                _warn(str(error))
                refused.append(str(error))
            except OSError as error:
                refused.append(str(error))
        LOGGER.warning("compiled %s is lost with this process, no folder takes it: %s", self.name, "; ".join(refused))

    @property
    def cache_path(self) -> str:
        """The folder that is tried first, for Numba's statistics."""
        return str(_folders(self.source)[0])

    def flush(self) -> None:
        """Numba asks for this before it compiles all anew; files are replaced then."""

    def _file(self, key: str) -> str:
        return f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.nbc"


def _rebuilt(target: Any, payload: Any) -> Any:
    """A compilation ready to run. Numba would load all it needs to compile, which is most of a warm start;
    this needs only the runtime.
    """
    from numba.core.compiler import CompileResult
    from numba.core.runtime.nrt import rtsys

    rtsys.initialize(target)
    return CompileResult._rebuild(target, *payload)


def _key(signature: Any, codegen: Any) -> str:
    """Argument types, and what processor the code is for."""
    return repr((signature, codegen.magic_tuple()))


@cache
def _warn(why: str) -> None:
    """Said once in a process, not for every loop."""
    text = f"flexcp does not use compiled loops that others may have written: {why}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


@cache
def _warn_of_version() -> None:
    first, last = (".".join(map(str, version)) for version in KNOWN)
    LOGGER.warning(
        "compiled loops are lost with this process: they are kept with Numba %s to %s, and this is %s",
        first,
        last,
        numba.__version__,
    )


def cache_folders() -> tuple[Path, ...]:
    """Where compilations of this version are looked for; they are kept in the first that can be written."""
    return _folders(Path(__file__).with_name("compiled_sort.py"))


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
    """Changes with any loop of the package, this file, Python and Numba: compiled code has others' code inside."""
    versions = f"{sys.implementation.cache_tag} {numba.__version__}"
    files = sorted({source, Path(__file__), *_package(source).rglob("compiled*.py")})
    return hashlib.sha256(versions.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _package(source: Path) -> Path:
    """The folder of the outermost package that a source belongs to."""
    folder = source.parent
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder
