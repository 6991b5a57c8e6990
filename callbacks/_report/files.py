"""Finds and writes files of reports: never half of one, none for two runs, and none ends a run."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_mp.callbacks._report.data import FORMAT
from lightning_mp.callbacks._report.page import report_page
from lightning_mp.callbacks._rules.sentences import usage

__all__ = ["alarms_since", "claim", "forgiven", "rebuild_page", "write_atomically"]


def rebuild_page(run_dir: str | Path) -> Path:
    """Write the page of a run anew from a report's data, or from the folder that holds one's."""
    path = Path(run_dir)
    source, data = (path, _read(path)) if path.is_file() else _search(path)
    if data is None:
        raise ValueError(usage("no_report_data", path=str(path)))
    page = source.with_suffix(".html")
    write_atomically(page, report_page(data))
    return page


def _search(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    if not folder.is_dir():
        raise ValueError(usage("no_folder", path=str(folder)))
    # The folder itself first: reports of other runs may lie below it.
    for pattern in ("*.json", "**/*.json"):
        read = {path: _read(path) for path in sorted(folder.glob(pattern))}
        found = {path: data for path, data in read.items() if data is not None}
        if len(found) > 1:
            names = ", ".join(repr(str(each)) for each in list(found)[:5])
            text = usage("several_reports", path=str(folder), count=len(found), names=names)
            raise ValueError(text)
        if found:
            return next(iter(found.items()))
    raise ValueError(usage("no_report", path=str(folder)))


def _read(path: Path) -> dict[str, Any] | None:
    """Return a report's data; `None` for files of others."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def alarms_since(data: Path, step: int) -> list[dict[str, Any]]:
    """Return the alarms of a step and of later ones that a report's data holds."""
    found = _read(data)
    return [] if found is None else [a for a in found["alarms"] if a["step"] >= step]


def claim(path: Path, earlier: str | None, create: Callable[[Path], object]) -> Path:
    """Return a path that no other run writes to: with `-v1` or higher where `create` finds it."""
    # What the run that is resumed wrote to is taken again.
    if earlier and Path(earlier).parent == path.parent and Path(earlier).exists():
        return Path(earlier)
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = (path.with_name(f"{path.stem}-v{n}{path.suffix}") for n in itertools.count(1))
    # Not `exists` and then `create`, between which another run may come.
    for mine in itertools.chain([path], numbered):
        with contextlib.suppress(FileExistsError):
            # To create is to claim: of two runs that look at the same time, one finds it there.
            create(mine)
            break
    return mine


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that at any moment the old or the new one is there, whole."""
    data = content.encode() if isinstance(content, str) else content
    # In the same folder, as a file is replaced at once only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        # It is left where writing failed, as on a full disk.
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def forgiven(key: str, **fields: object) -> Iterator[None]:
    """Warn of an error, in the words of `USAGE`: a file is never worth a run."""
    try:
        yield
    except Exception as error:
        from lightning.pytorch.utilities import rank_zero_warn  # `lightning-mp report` needs none

        rank_zero_warn(usage(key, error=f"{type(error).__name__}: {error}", **fields))
