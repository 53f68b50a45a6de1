"""Atomic files: write a file completely or not at all.

The content is written to a file of another name beside the target, which is then renamed to the target. If anything
fails (a full disk, Ctrl-C), that file is removed and the target is unchanged. A device or a pipe is written directly,
and so is the file that stdout or stderr goes to, if it is given by the name of the stream (``--save /dev/stdout >>
log``): a new file in its place would take away what was written before, and what the stream writes afterwards.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from contextlib import suppress
from pathlib import Path

STREAMS = re.compile(r"/dev/(stdout|stderr|fd/\d+)|/proc/[^/]+(/task/\d+)?/fd/\d+")
"""The names that a process's open files have as paths."""


def write_whole(path: Path | str, content: bytes | str) -> None:
    """Write a file completely or not at all; raise an OSError that names ``path`` if it cannot be written.

    Text is written as UTF-8. A device, a pipe, or what stdout or stderr goes to, is written directly.
    """
    data = content.encode() if isinstance(content, str) else content
    given = Path(path)
    target = Path(os.path.realpath(path))  # if path is a link, the file it points to is replaced, and not the link
    try:
        stream = stream_to(given)
        if stream is not None:
            _append(stream, data)
            return
        if given.exists() and not given.is_file():  # asked of the link itself: what one to a pipe names does not exist
            given.write_bytes(data)
            return
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            aside.write_bytes(data)
            aside.replace(target)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
    except OSError as error:  # the original error names the temporary file, or none
        raise OSError(error.errno, error.strerror, str(path)) from None


def stream_to(path: Path) -> int | None:
    """Return the descriptor of stdout or stderr if ``path`` is a name of that stream, one of :data:`STREAMS`.

    A file that is given by its own name is replaced, also if a stream goes to it. In a process that was started without
    one of these streams, their descriptors may be those of any file.
    """
    if STREAMS.fullmatch(os.path.abspath(path)) is None:
        return None
    for descriptor, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        with suppress(OSError):  # there is no such file, or the stream was closed
            if stream is not None and os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


def _append(descriptor: int, data: bytes) -> None:
    """Write to stdout or stderr, after what Python has still to write to them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, AttributeError):  # it was closed, or replaced by something else
            stream.flush()
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
