"""Private files: a folder whose content is executed, read and written so that no other user can put anything into it.

Whoever can write a folder of compiled code runs code as whoever reads it. So a folder, and a file in it, is believed
only when it belongs to the user or to root and nobody else may write it. What is checked is what is used: folder and
file are opened once, without following a link, and looked at through their descriptors; nothing can be exchanged in
between. Folders above need no look: whoever may write there can put another folder in the place of this one, but none
that belongs to the user or root and that he could fill.
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
    """A folder or file that another user could have written; the message says whose it is and the way out."""


def read_own(folder: Path, name: str) -> bytes:
    """The content of a file; FileNotFoundError without it, NotOwnError where others could have written it."""
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
                raise NotOwnError(f"{folder} holds what is no plain file; remove it")
            return opened.read()


def write_own(folder: Path, name: str, content: bytes) -> None:
    """All of it or nothing, writable by the user alone; the folder is made where it is missing.
    NotOwnError where others may write.
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
    """Why a folder is not believed; None where it is, or is not there."""
    try:
        with _opened(folder):
            return None
    except NotOwnError as error:
        return str(error)
    except OSError:
        return None


def _made(folder: Path) -> None:
    """Missing folders, for the user alone; those of root can be read by everybody,
    because an image is made by root and used by others.
    """
    mode = 0o755 if os.geteuid() == 0 else 0o700
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode, exist_ok=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder that only the user and root can write."""
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
    if found.st_uid not in (0, os.geteuid()):
        raise NotOwnError(
            f"{what} belongs to another user (uid {found.st_uid}); remove it, or use a folder of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotOwnError(f"{what} can be written by others (mode {stat.S_IMODE(found.st_mode):o}); remove it")
