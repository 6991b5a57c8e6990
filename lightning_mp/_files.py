"""All writes to disk: files are complete or absent, and only files of this package are removed.

Imports neither torch nor Lightning, so that `lightning-mp plan` and `report` start fast.
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
except ImportError:  # Windows: files of killed runs are not removed
    fcntl = None  # type: ignore[assignment]

__all__ = ["SIGNATURE", "Failures", "SignedFolder", "claim", "save", "save_new", "touch", "write"]

SIGNATURE = "Made by lightning-mp, which removes its files from this folder when its run is over.\n"
_MARKER = "in_use"  # the file with the signature and the lock


def save(path: Path, fill: Callable[[IO[bytes]], object], *, is_durable: bool = True) -> None:
    """Write a file atomically: at any time, the complete old or the complete new file exists.

    A missing folder is created. A durable file survives a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because `os.replace` is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # the caller does not know the temporary file
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write(path: Path, content: str | bytes) -> None:
    """Write text or bytes atomically, as `save` does."""
    data = content.encode() if isinstance(content, str) else content
    save(path, lambda file: file.write(data))


def claim(path: Path, create: Callable[[Path], object], earlier: str | None = None) -> Path:
    """Return a path that no other process writes to, with `-v1` or higher if files exist.

    `earlier`, the path that the resumed run wrote to, is used again if it is in the same folder.
    """
    if earlier and Path(earlier).parent == path.parent and Path(earlier).exists():
        return Path(earlier)
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = (path.with_name(f"{path.stem}-v{n}{path.suffix}") for n in itertools.count(1))
    # No call of `exists`, because another process may create the file in between.
    for mine in itertools.chain([path], numbered):
        with contextlib.suppress(FileExistsError):
            # Creation is exclusive: of two concurrent processes one gets FileExistsError.
            create(mine)
            break
    return mine


def touch(*paths: Path) -> None:
    """Create empty files; if one exists, raise `FileExistsError` and create none."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            path.touch(exist_ok=False)
            stack.callback(path.unlink)
        stack.pop_all()


def save_new(path: Path, fill: Callable[[IO[bytes]], object], mark: bytes | None = None) -> Path:
    """Write as `save` does, over a file that contains `mark`, or else to a path from `claim`."""
    if mark is not None and path.is_file() and mark in path.read_bytes():
        save(path, fill)  # an earlier file of this package
        return path
    mine = claim(path, touch)
    try:
        save(mine, fill)
    except BaseException:
        mine.unlink(missing_ok=True)  # still empty, created by `claim`
        raise
    return mine


class SignedFolder:
    """A folder that is locked while its run lives and in which only own files are removed.

    The relative POSIX paths of own files match `own`. A folder of the same name without the
    signature is never changed.
    """

    def __init__(self, path: Path, own: re.Pattern[str]) -> None:
        self.path, self._own = path, own
        self._lock: IO[bytes] | None = None

    def make(self) -> None:
        """Create, sign and lock the folder, again if it was removed."""
        if self._lock is not None and (self.path / _MARKER).exists():
            return
        self.release()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / _MARKER).open("xb", buffering=0)
        try:
            self._lock.write(SIGNATURE.encode())
        except OSError:
            self.close()  # the folder is empty
            raise
        if fcntl is not None:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def take(self) -> bool:
        """Lock the folder if it is signed and no process holds its lock; return whether locked."""
        marker = self.path / _MARKER
        # A link would redirect to another folder, and reading a pipe would block.
        if fcntl is None or any(map(Path.is_symlink, (self.path, marker))) or not marker.is_file():
            return False
        # The lock lasts while the file is open, so a killed process holds no lock.
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            lock = stack.enter_context(marker.open("r+b", buffering=0))
            if lock.read(len(SIGNATURE) + 1) == SIGNATURE.encode():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
                stack.pop_all()
        return self._lock is not None

    def remove(self, names: Iterable[str]) -> None:
        """Remove own files and folders of these names; in folders, only own files."""
        for path in (self.path / name for name in names if self._lock is not None):
            for parent, _, files in () if path.is_symlink() else os.walk(path, topdown=False):
                for each in (*(Path(parent, file) for file in files), Path(parent)):
                    self._remove(each)
            self._remove(path)

    def _remove(self, path: Path) -> None:
        if not self._own.fullmatch(path.relative_to(self.path).as_posix()):
            return
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # other files are in it
                path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove own files, and the folder if it is empty then; release the lock."""
        if self._lock is not None and self.path.is_dir():
            self.remove(os.listdir(self.path))
            if os.listdir(self.path) == [_MARKER]:
                if fcntl is None:
                    self._lock.close()  # Windows cannot remove an open file
                (self.path / _MARKER).unlink()
                self.path.rmdir()
        self.release()

    def release(self) -> None:
        """Release the lock and keep all files for the next run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class Failures:
    """Turns errors into one warning per cause, because no file is worth a failed run."""

    def __init__(self, words: Callable[..., str]) -> None:
        self._words = words  # returns the message for a key and its fields
        self._causes: set[tuple[object, ...]] = set()

    @contextlib.contextmanager
    def forgiven(self, key: str, **fields: object) -> Iterator[None]:
        """Turn an error in the block into a warning; the rest of the block is skipped."""
        before = sys.exc_info()[1]  # the error that ends the run, if any
        try:
            yield
        except Exception as error:
            reason = _reason(error, before)
            # Without the path: a full disk draws one warning for all files.
            cause = (key, reason, *(value for name, value in fields.items() if name != "path"))
            if cause not in self._causes:
                self._causes.add(cause)
                warnings.warn(self._words(key, error=reason, **fields), stacklevel=3)


def _reason(error: BaseException, before: BaseException | None) -> str:
    """Return an error in one line, without the file name, which may be temporary."""
    behind: BaseException | None = error
    # torch may raise its own error for a failing disk, without the cause in its message.
    while behind is not None and behind is not before:
        if isinstance(behind, OSError) and behind.strerror:
            return f"{type(behind).__name__}: {behind.strerror}"
        behind = behind.__cause__ or behind.__context__
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}".removesuffix(": ")
