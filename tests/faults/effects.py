"""The effects that a process has on a folder, in their order, and what befalls one of them."""

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["die", "die_while_writing", "effects_on", "refuse"]

_ADDING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}
_watching: list[Callable[[str, str], None]] = []  # a hook of the interpreter cannot be taken off
_is_watched: list[bool] = []


def die(*_: Any) -> None:
    """End this process as the kernel does that is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_writing(*_: Any) -> None:
    """End this process amid the write that goes past the first bytes of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


def refuse(event: str, path: str) -> None:
    """Let an effect fail as on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@contextmanager
def effects_on(folder: Path, befall: Callable[[int, str, str], None]) -> Iterator[None]:
    """Call `befall` with number, event and path before each effect on a folder and inside it."""
    if not _is_watched:
        _is_watched.append(True)
        sys.addaudithook(_notice)
    count = 0

    def notice(event: str, path: str) -> None:
        nonlocal count
        if Path(path).is_relative_to(folder):
            count += 1
            befall(count, event, path)

    _watching.append(notice)
    try:
        yield
    finally:
        _watching.remove(notice)


def _notice(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or (event != "open" and event not in _CHANGES):
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & _ADDING):
        return
    if isinstance(args[0], str | os.PathLike):
        for notice in list(_watching):
            notice(event, os.fspath(args[0]))
