"""Files that are never half there, that no two runs share, and that are not worth a run."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_mp.callbacks._rules.usage import usage

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
def forgiven(key: str, **fields: object) -> Iterator[None]:
    """Warn of an error, in the words of `_rules/usage.py`: a file is never worth a run."""
    try:
        yield
    except Exception as error:
        from lightning.pytorch.utilities import rank_zero_warn  # `lightning-mp report` needs none

        rank_zero_warn(usage(key, error=f"{type(error).__name__}: {error}", **fields))
