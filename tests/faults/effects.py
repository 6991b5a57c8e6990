"""Observes the disk operations of a process that change a folder, and injects faults into them."""

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
_watching: list[Callable[[str, str], None]] = []  # an audit hook cannot be removed
_is_watched: list[bool] = []


def die(*_: Any) -> None:
    """Kill this process, as the kernel does if memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_writing(*_: Any) -> None:
    """Kill this process during the next write beyond the first 100 bytes of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


def refuse(event: str, path: str) -> None:
    """Make a disk operation fail as on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@contextmanager
def effects_on(folder: Path, inject: Callable[[int, str, str], None]) -> Iterator[None]:
    """Call `inject` with number, event and path before each operation that changes the folder."""
    if not _is_watched:
        _is_watched.append(True)
        sys.addaudithook(_notice)
    count = 0

    def notice(event: str, path: str) -> None:
        nonlocal count
        if Path(path).is_relative_to(folder):
            count += 1
            inject(count, event, path)

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
