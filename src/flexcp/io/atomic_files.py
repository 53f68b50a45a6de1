"""Atomic files: what is written is there as a whole or not at all, and nothing half-written stays behind.

The content goes to a file of another name beside the target, which then takes its place. When anything fails, a full
disk or Ctrl-C, that file is removed and the target is as it was. A device or a pipe (``/dev/stdout``) is written as it
is.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path | str, content: bytes | str) -> None:
    """Write a file; OSError with the file's name when it cannot be written."""
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))  # a link stays a link
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            aside.write_bytes(data)
            aside.replace(target)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
    except OSError as error:  # the system names the file aside, or none
        raise OSError(error.errno, error.strerror, str(path)) from None
