"""Compiled loops: decorators that compile a function with Numba and keep the result on disk.

Numba compiles a loop when it is first called, which takes seconds, so the result is kept on disk. Numba's own cache has
five problems. It loads the whole compiler before it looks for a file, which takes three times as long as a warm start
does here. It reads only from folders that it can write, so a package that root warmed up is compiled again for other
users. It numbers files in an index, in which two processes may mix up names. It does not notice changes in other files.
And an error of the file system stops planning. So :class:`Kept` replaces Numba's cache. It stores what Numba
serialises:

- There is one file for each function, signature and processor, in a folder named by a digest of sources and versions.
- Files are searched in ``NUMBA_CACHE_DIR``, in ``__pycache__`` beside the source and in the user's cache folder, and
  written to the first of these that can be written.
- A file is written under another name and renamed, so that readers never see a part of it.
- Files are executed when they are read. So folders and files that another user could have written are refused with a
  warning (:mod:`flexcp.io.private_files`), and the next folder is tried.
- Other failures are only logged; the loop is then compiled for this process alone.

This uses internal names of Numba, which are the same in the versions ``KNOWN``. With other versions, loops are compiled
in every process, and a warning is logged.

Nothing else is printed. Every compilation is logged by ``flexcp.compile`` at level INFO, problems with folders at level
WARNING.
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
"""The first and the last version of Numba with which compiled loops are kept on disk."""
LOGGER = logging.getLogger("flexcp.compile")
LOGGER.addHandler(logging.NullHandler())  # silent unless the application configures logging


def compiled(function: Loop) -> Loop:
    """Return the function, compiled with Numba on first use; the result is kept on disk if a folder can be written."""
    return _compiled(function)


def compiled_leaf(function: Loop) -> Loop:
    """Like :func:`compiled`, for a function that makes no arrays and is called millions of times.

    Numba counts the references to every array argument with atomic operations, which take most of the time of a short
    function; this decorator switches them off. Passing the descriptors of arrays takes most of the rest, so the
    function is also inlined into its callers.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def compiled_inline(function: Loop) -> Loop:
    """Like :func:`compiled`, but the function is inlined into each caller before the caller is compiled.

    It is meant for the parts of a long loop, each called in few places; with :func:`compiled_leaf`, a function that
    calls other leaves would be compiled again for every level. It can be used inside a leaf, because it gets the
    options of its caller.
    """
    return _compiled(function, inline="always")


def compiled_fused(function: Loop) -> Loop:
    """Like :func:`compiled`, with fused multiply-add instructions if the processor has them.

    They round once instead of twice, so results may differ between processors. Use this only for floating-point numbers
    that hold integers, which are not rounded at all.
    """
    return _compiled(function, fastmath={"contract"})


def _compiled(function: Loop, **options: Any) -> Loop:
    """Return the function compiled with Numba's ``options``, and with :class:`Kept` as its cache.

    With a version of Numba that is not ``KNOWN``, options and cache are left out, and a warning is logged.
    """
    if not KNOWN[0] <= numba.version_info.short <= KNOWN[1]:
        _warn_of_version()
        return cast(Loop, numba.njit(function))
    loop: Any = numba.njit(function, **options)
    if loop is not function:  # with NUMBA_DISABLE_JIT, njit returns the function itself
        loop._cache = Kept(function)
        loop.get_call_template = partial(_of_plain_types, loop.get_call_template)
    return cast(Loop, loop)


def _of_plain_types(get_call_template: Loop, args: Any, kws: Any) -> Any:
    """Replace the types of constants by the types of plain numbers when one loop calls another.

    Otherwise Numba would compile the called function again for every constant.
    """
    plain = {name: numba.types.unliteral(each) for name, each in kws.items()}
    return get_call_template([numba.types.unliteral(each) for each in args], plain)


class Kept:
    """The compiled signatures of a function on disk, in place of Numba's cache.

    Numba calls :meth:`load_overload` before it compiles a signature, and :meth:`save_overload` after.
    """

    def __init__(self, function: Loop) -> None:
        self.source = Path(function.__code__.co_filename)
        module = self.source.relative_to(_package(self.source)).with_suffix("")
        self.name = ".".join([*module.parts, function.__qualname__])

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the compiled code of a signature from disk, or None, in which case Numba compiles it."""
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
            except Exception as error:  # missing rights or damaged files raise errors without a common class
                LOGGER.warning("cannot read compiled %s from %s: %s", self.name, folder, error)
        LOGGER.info("compiling %s", self.name)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write compiled code to the first folder that can be written; log a warning if none takes it.

        Code that needs objects of this process is not written.
        """
        from numba.core.serialize import dumps

        if result.lifted or result.library.has_dynamic_globals:
            return  # this code needs objects that exist in this process only
        if not _folders(self.source):
            return  # _folders has said why
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
        return str(next(iter(_folders(self.source)), ""))

    def flush(self) -> None:
        """Do nothing: Numba calls this before it recompiles everything, and files are then replaced."""

    def _file(self, key: str) -> str:
        """Return the name of the file for a key."""
        return f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.nbc"


def _rebuilt(target: Any, payload: Any) -> Any:
    """Turn compiled code that was read from disk into a Numba compile result, ready to be called.

    ``target`` is Numba's target context, and ``payload`` is what ``CompileResult._reduce`` returned when the code was
    saved. Only Numba's runtime is initialized. Numba's own cache would load the whole compiler first, which would be
    most of the time of a warm start.
    """
    from numba.core.compiler import CompileResult
    from numba.core.runtime.nrt import rtsys

    rtsys.initialize(target)
    return CompileResult._rebuild(target, *payload)


def _key(signature: Any, codegen: Any) -> str:
    """Return a key of the argument types and of the processor that the code is for."""
    return repr((signature, codegen.magic_tuple()))


@cache
def _warn(why: str) -> None:
    """Warn that a folder is not used; once per process and reason."""
    text = f"flexcp does not use compiled loops that others may have written: {why}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


@cache
def _warn_of_version() -> None:
    """Log, once per process, that compiled loops are not kept with this version of Numba."""
    first, last = (".".join(map(str, version)) for version in KNOWN)
    LOGGER.warning(
        "compiled loops are lost with this process: they are kept with Numba %s to %s, and this is %s",
        first,
        last,
        numba.__version__,
    )


@cache
def _warn_of_sources(error: str) -> None:
    """Log, once per process and kind of error, that compiled loops are not kept because sources cannot be read."""
    LOGGER.warning(
        "compiled loops are lost with this process: the sources cannot be read (%s in %s); install flexcp as files, "
        "not in an archive",
        error,
        Path(__file__).parent,
    )


def cache_folders() -> tuple[Path, ...]:
    """Return the folders in which compiled code is searched; it is written to the first that can be written."""
    return _folders(Path(__file__).with_name("compiled_sort.py"))


@cache
def _folders(source: Path) -> tuple[Path, ...]:
    """Return the folders in which compiled code of a source file may be kept, in the order of preference.

    There are none if the sources cannot be read: without their digest, code of another version could be taken.
    """
    found = [source.parent / "__pycache__"]
    given = getattr(numba.config, "CACHE_DIR", "")
    if given:
        found.insert(0, Path(given))
    home = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    if home.is_absolute():  # without a home folder, "~" is not replaced
        found.append(home / "flexcp")
    try:
        digest = _digest(source)
    except OSError as error:  # the sources are in an archive, or were not installed
        _warn_of_sources(type(error).__name__)
        return ()
    return tuple(folder / f"flexcp-{digest}" for folder in found)


@cache
def _digest(source: Path) -> str:
    """Return a digest of all compiled source files of the package, this file, and the versions of Python and Numba.

    All files count, because compiled code contains inlined code of other files.
    """
    versions = f"{sys.implementation.cache_tag} {numba.__version__}"
    files = sorted({source, Path(__file__), *_package(source).rglob("compiled*.py")})
    return hashlib.sha256(versions.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _package(source: Path) -> Path:
    """Return the folder of the outermost package that contains a source file."""
    folder = source.parent
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder
