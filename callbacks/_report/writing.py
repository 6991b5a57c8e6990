"""Files that are never half there, that no two runs share, and that are not worth a run."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["claim", "forgiven", "write_atomically"]


def claim(path: Path, earlier: str | None, create: Callable[[Path], object]) -> Path:
    """Return a path that no other run writes to, which is from then on taken.

    Args:
        path: What to call it; where another run has it, `-v1` or a higher number is put behind.
        earlier: What the run that is resumed wrote to; taken if it is still in the same folder.
        create: Makes it, or raises a `FileExistsError`.
    """
    is_here = earlier and os.path.dirname(earlier) == os.path.abspath(path.parent)
    if earlier and is_here and os.path.exists(earlier):
        return Path(earlier)
    path.parent.mkdir(parents=True, exist_ok=True)
    mine, number = path, 0
    while True:
        try:
            create(mine)
        except FileExistsError:
            number += 1
            mine = path.with_name(f"{path.stem}-v{number}{path.suffix}")
        else:
            return mine


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that at any moment the old or the new one is there, whole."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def forgiven(who: str, what: str, fix: str = "") -> Iterator[None]:
    """Warn of an error instead of raising it: a file is never worth a run.

    Args:
        who: The callback.
        what: What it could not do.
        fix: What to do about it, as a sentence.
    """
    try:
        yield
    except Exception as error:
        from lightning.pytorch.utilities import rank_zero_warn  # `lightning-mp report` needs none

        text = f"`{who}` {what}: {type(error).__name__}: {error}. Training goes on. {fix}"
        rank_zero_warn(text.strip())
