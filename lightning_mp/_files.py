"""Every effect on disk: files are whole or not there, and nothing unsigned is removed.

Imports neither torch nor Lightning: `lightning-mp plan` and `lightning-mp report` need none.
"""

import contextlib
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: what a killed run leaves there is left alone
    fcntl = None  # type: ignore[assignment]

__all__ = ["SIGNATURE", "Failures", "SignedFolder", "claim", "save", "save_new", "touch", "write"]

SIGNATURE = "Made by lightning-mp, which removes its files from this folder when its run is over.\n"
_MARKER = "in_use"  # the file that holds the signature, and the lock


def save(path: Path, fill: Callable[[IO[bytes]], object], *, is_durable: bool = True) -> None:
    """Write a file so that at any moment the old or the new one is there, whole.

    Its folder is made where there is none, also again. A durable file outlives a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, as a file is replaced at once only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # the caller knows no temporary file
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write(path: Path, content: str | bytes) -> None:
    """Write a file as `save` does, from what is in memory."""
    data = content.encode() if isinstance(content, str) else content
    save(path, lambda file: file.write(data))


def claim(path: Path, create: Callable[[Path], object], earlier: str | None = None) -> Path:
    """Return a path that nobody else writes to: with `-v1` or higher where `create` finds one.

    What `earlier`, the run that is resumed, wrote to in the same folder is taken again.
    """
    if earlier and Path(earlier).parent == path.parent and Path(earlier).exists():
        return Path(earlier)
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = (path.with_name(f"{path.stem}-v{n}{path.suffix}") for n in itertools.count(1))
    # Not `exists` and then `create`, between which another process may come.
    for mine in itertools.chain([path], numbered):
        with contextlib.suppress(FileExistsError):
            # To create is to claim: of two that look at the same time, one finds it there.
            create(mine)
            break
    return mine


def touch(*paths: Path) -> None:
    """Create empty files; `FileExistsError`, and none of them, where one is there."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            path.touch(exist_ok=False)
            stack.callback(path.unlink)
        stack.pop_all()


def save_new(path: Path, fill: Callable[[IO[bytes]], object], mark: bytes | None = None) -> Path:
    """Write a file as `save` does, over one that holds `mark`, or else to a path of `claim`'s."""
    if mark is not None and path.is_file() and mark in path.read_bytes():
        save(path, fill)  # an earlier one of ours
        return path
    mine = claim(path, touch)
    try:
        save(mine, fill)
    except BaseException:
        mine.unlink(missing_ok=True)  # empty, and made here
        raise
    return mine


class SignedFolder:
    """A folder of our own, locked while its run lives; only our files in it are ever removed.

    Those have paths, relative and with `/`, that match `own`. A name is no proof: a folder of the
    same name without our signature stays as it is.
    """

    def __init__(self, path: Path, own: re.Pattern[str]) -> None:
        self.path, self._own = path, own
        self._lock: IO[bytes] | None = None

    def make(self) -> None:
        """Make, sign and lock the folder; again where it has vanished."""
        if self._lock is not None and (self.path / _MARKER).exists():
            return
        self.release()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / _MARKER).open("xb", buffering=0)
        try:
            self._lock.write(SIGNATURE.encode())
        except OSError:
            self.close()  # nothing is in it yet
            raise
        if fcntl is not None:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def take(self) -> bool:
        """Lock the folder if it is signed and no living process has it; return whether it was."""
        marker = self.path / _MARKER
        # Of a link only the target is signed, and a pipe would never be read.
        if fcntl is None or any(map(Path.is_symlink, (self.path, marker))) or not marker.is_file():
            return False
        # A lock lasts as long as the file is open, so that a killed process has none.
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            lock = stack.enter_context(marker.open("r+b", buffering=0))
            if lock.read(len(SIGNATURE) + 1) == SIGNATURE.encode():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
                stack.pop_all()
        return self._lock is not None

    def remove(self, names: Iterable[str]) -> None:
        """Remove our files and folders of these names; of a folder, only what is ours in it."""
        for path in (self.path / name for name in names if self._lock is not None):
            for parent, _, files in () if path.is_symlink() else os.walk(path, topdown=False):
                for each in (*(Path(parent, file) for file in files), Path(parent)):
                    self._remove(each)
            self._remove(path)

    def _remove(self, path: Path) -> None:
        if not self._own.fullmatch(path.relative_to(self.path).as_posix()):
            return
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # something else is in it
                path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove our files, and the folder if nothing else is in it; release it."""
        if self._lock is not None and self.path.is_dir():
            self.remove(os.listdir(self.path))
            if os.listdir(self.path) == [_MARKER]:
                if fcntl is None:
                    self._lock.close()  # Windows removes no open file
                (self.path / _MARKER).unlink()
                self.path.rmdir()
        self.release()

    def release(self) -> None:
        """Let the next run have the folder, with all that is in it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class Failures:
    """Turns errors into warnings, one for each cause: no file is worth a run."""

    def __init__(self, words: Callable[..., str]) -> None:
        self._words = words  # return the sentence of a key, with its fields
        self._causes: set[tuple[object, ...]] = set()

    @contextlib.contextmanager
    def forgiven(self, key: str, **fields: object) -> Iterator[None]:
        """Warn of an error inside; what comes after it in the block is not done."""
        before = sys.exc_info()[1]  # what ends the run, while a last report is written
        try:
            yield
        except Exception as error:
            reason = _reason(error, before)
            # A full disk is told of once, however many files find it full.
            cause = (key, reason, *(value for name, value in fields.items() if name != "path"))
            if cause not in self._causes:
                self._causes.add(cause)
                warnings.warn(self._words(key, error=reason, **fields), stacklevel=3)

    def tried(self, key: str, effect: Callable[[], object], **fields: object) -> bool:
        """Return whether an effect has come about; warn of what it raises."""
        with self.forgiven(key, **fields):
            effect()
            return True
        return False


def _reason(error: BaseException, before: BaseException | None) -> str:
    """Return an error in one line, without the name of a file, which may be a temporary one."""
    behind: BaseException | None = error
    # Where the disk fails torch may raise an error of its own, which says nothing of it.
    while behind is not None and behind is not before:
        if isinstance(behind, OSError) and behind.strerror:
            return f"{type(behind).__name__}: {behind.strerror}"
        behind = behind.__cause__ or behind.__context__
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}".removesuffix(": ")
