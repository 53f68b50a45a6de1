"""Atomic files: write a file completely or not at all.

The content is written to a file of another name beside the target, which is then renamed to the target. If anything
fails (a full disk, Ctrl-C), that file is removed and the target is unchanged. A device or a pipe (``/dev/stdout``) is
written directly.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path | str, content: bytes | str) -> None:
    """Write a file completely or not at all; raise an OSError that names ``path`` if it cannot be written.

    Text is written as UTF-8. A device or a pipe is written directly.
    """
    data = content.encode() if isinstance(content, str) else content
    given = Path(path)
    target = Path(os.path.realpath(path))  # if path is a link, the file it points to is replaced, and not the link
    try:
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
