"""Writes are atomic; errors of a disk raise one warning and do not end the run."""

import errno
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mp._files import Failures, claim, save, save_new, write
from tests.callbacks.disks import full_disk


def words(key: str, **fields: Any) -> str:
    return f"{key}: {fields}"


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write(path, "half of the new \ud800")
    with pytest.raises(OSError, match="File too large") as caught, full_disk():
        write(path, b"x" * 100_000)
    assert caught.value.filename == str(path)  # not the temporary file
    with full_disk(), pytest.raises(Exception, match="enforce fail|File too large"):
        save(path, lambda file: torch.save(torch.zeros(100_000), file))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "file", []
    write(path, "old")

    def fill(file: Any) -> None:
        file.write(b"ne")
        file.flush()
        seen.append(path.read_text())
        file.write(b"w")

    save(path, fill)
    assert (seen, path.read_text()) == (["old"], "new")


def test_file_is_synced_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)

        def noted(*args: Any, _name: str = name, _original: Any = original) -> None:
            done.append(_name)
            _original(*args)

        monkeypatch.setattr(os, name, noted)
    write(tmp_path / "file", "new")
    save(tmp_path / "file", lambda file: file.write(b"newer"), is_durable=False)
    assert done == ["fsync", "replace", "replace"]


def test_write_recreates_the_folder_and_uses_default_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write(path, "one")
    path.unlink()
    path.parent.rmdir()
    write(path, "two")
    (tmp_path / "other").write_text("")
    assert path.read_text() == "two"
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_new_file_gets_the_next_name_unless_the_old_file_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    names = []
    for mark in (None, None, b"ours", b"ours"):
        names.append(save_new(path, lambda file: file.write(b"ours"), mark).name)
        path.write_bytes(b"mine") if len(names) == 2 else None
    assert names == ["plan.png", "plan-v1.png", "plan-v2.png", "plan-v3.png"]
    assert path.read_bytes() == b"mine"
    path.write_bytes(b"it is ours")
    assert save_new(path, lambda file: file.write(b"new"), b"ours") == path
    assert path.read_bytes() == b"new"
    with full_disk(), pytest.raises(OSError, match="too large"):
        save_new(tmp_path / "big", lambda file: file.write(b"x" * 100_000))
    assert not (tmp_path / "big").exists()


def test_claim_returns_the_path_of_the_earlier_run(tmp_path: Path) -> None:
    def make(path: Path) -> None:
        path.touch(exist_ok=False)

    first = claim(tmp_path / "a" / "page.html", make)
    assert claim(first, make) == first.with_name("page-v1.html")
    assert claim(first, make, str(first)) == first
    assert claim(first, make, str(tmp_path / "page.html")) == first.with_name("page-v2.html")


def test_failures_warn_once_per_cause() -> None:
    failures = Failures(words)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            with failures.forgiven("lost", path=f"file {number}"):
                raise OSError(errno.ENOSPC, "No space left on device", f".tmp{number}")
            with failures.forgiven("lost", path="file", logger="W&B"):
                raise OSError(errno.ENOSPC, "No space left on device")
            with failures.forgiven("lost", path="file"):
                raise ValueError("two\nlines of it")
    assert [str(each.message) for each in caught] == [
        words("lost", error="OSError: No space left on device", path="file 0"),
        words("lost", error="OSError: No space left on device", path="file", logger="W&B"),
        words("lost", error="ValueError: two", path="file"),
    ]


def test_failures_name_the_disk_error_that_torch_hides() -> None:
    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    failures, match = Failures(words), "error': 'OSError: No space left on device'"
    with pytest.warns(UserWarning, match=match), failures.forgiven("lost"):
        torch.save(torch.zeros(10), Full())


def test_failures_do_not_report_the_exception_that_ends_the_run() -> None:
    try:
        raise FileNotFoundError(errno.ENOENT, "No such file", "the user's")
    except FileNotFoundError:
        match, odd = "error': 'ValueError: odd'", ValueError("odd")
        with pytest.warns(UserWarning, match=match), Failures(words).forgiven("lost"):
            raise odd  # noqa: B904


def test_failures_do_not_suppress_exceptions_that_end_a_run() -> None:
    with pytest.raises(KeyboardInterrupt), Failures(words).forgiven("lost"):
        raise KeyboardInterrupt


def test_files_imports_neither_torch_nor_lightning() -> None:
    code = "import sys, lightning_mp._files; print({'torch', 'lightning'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "set()\n", ran.stderr
