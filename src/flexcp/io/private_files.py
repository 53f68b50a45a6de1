"""Private files: read and write files of executable content in a folder that no other user can write.

A user who can write a folder of compiled code can run code as the user who reads it. So a folder or file is trusted
only if it belongs to the user or to root and no other user may write it. Folder and file are opened once, without
following links, and checked through their descriptors, so that they cannot be exchanged between check and use. The
folders above need no check: another user who can write there could replace this folder, but not by one that belongs to
the user or root and that the other user can fill.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotOwnError(OSError):
    """Raised for a folder or file that another user could have written; the message says why and what to do."""


def read_own(folder: Path, name: str) -> bytes:
    """Return the content of a file in a folder; raise NotOwnError if another user could have written one of them.

    NotOwnError is also raised if one of them is a link or the file is no plain file, and another OSError if the file
    cannot be read.
    """
    with _opened(folder) as inside:
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotOwnError(f"{folder} holds links, which could lead anywhere; remove it") from None
            raise
        with open(file, "rb") as opened:
            found = os.fstat(file)
            _check(f"{folder} holds a file that", found)
            if not stat.S_ISREG(found.st_mode):
                raise NotOwnError(f"{folder} holds something that is no plain file; remove the folder")
            return opened.read()


def write_own(folder: Path, name: str, content: bytes) -> None:
    """Write a file completely or not at all; make the folder if it is missing.

    Only the user can write the file. Raise NotOwnError if other users can write the folder.
    """
    _made(folder)
    with _opened(folder) as inside:
        aside = f"{name}.{uuid.uuid4().hex}"
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=inside)
        try:
            with open(file, "wb") as opened:
                opened.write(content)
            os.replace(aside, name, src_dir_fd=inside, dst_dir_fd=inside)
        except BaseException:
            os.unlink(aside, dir_fd=inside)
            raise


def refusal(folder: Path) -> str | None:
    """Return why a folder is not trusted, because others could write it; None if it is trusted or cannot be opened."""
    try:
        with _opened(folder):
            return None
    except NotOwnError as error:
        return str(error)
    except OSError:
        return None


def _made(folder: Path) -> None:
    """Create a folder and its missing parents, private to the current user; leave existing folders as they are.

    If root creates them, all users can read them, because container images are built by root and used by others.
    """
    mode = 0o755 if os.geteuid() == 0 else 0o700
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode, exist_ok=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder and yield its descriptor.

    Raise NotOwnError if it is a link, or if others than the user and root can write it.
    """
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        if folder.is_symlink():
            raise NotOwnError(f"{folder} is a link, which could lead anywhere; put a folder in its place") from None
        raise
    try:
        _check(str(folder), os.fstat(inside))
        yield inside
    finally:
        os.close(inside)


def _check(what: str, found: os.stat_result) -> None:
    """Raise NotOwnError if a file or folder belongs to another user or can be written by others; ``what`` names it."""
    if found.st_uid not in (0, os.geteuid()):
        raise NotOwnError(
            f"{what} belongs to another user (uid {found.st_uid}); remove it, or use a folder of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotOwnError(f"{what} can be written by others (mode {stat.S_IMODE(found.st_mode):o}); remove it")
