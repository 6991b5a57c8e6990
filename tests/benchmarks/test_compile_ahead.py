"""Kernels that were compiled without a GPU have the cache keys of launches on a GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compile_ahead
from benchmarks.compile_ahead import absent_device

ROOT = Path(__file__).resolve().parents[2]
ARCH = 90
COMPILE = "benchmarks/compile_ahead.py", "--arch", str(ARCH), "--groups", "statistics"

pytestmark = pytest.mark.slow


def compile_in(cache: Path, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *COMPILE],
        cwd=root,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.sweep  # three interpreters import torch
def test_another_process_finds_the_kernels_in_a_moved_cache(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    done = compile_in(here, ROOT)
    assert done.returncode == 0, done.stderr
    here.rename(there)
    tree = tmp_path / "tree"
    for folder in ("benchmarks", "lightning_mp"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    carried = compile_in(there, tree)
    assert carried.returncode == 0, carried.stdout + carried.stderr
    assert "statistics: 4 in the cache, 0 compiled" in carried.stdout


@pytest.mark.sweep
def test_moved_cache_is_used_and_a_missing_kernel_is_compiled(tmp_path, monkeypatch, capsys):
    arguments = ["--arch", str(ARCH), "--groups", "statistics"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    compile_ahead.main(arguments)
    assert "statistics: 0 in the cache, 4 compiled" in capsys.readouterr().out
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    compile_ahead.main(arguments)
    said = capsys.readouterr().out
    assert "Corrected the paths of 4 kernels" in said
    assert "statistics: 4 in the cache, 0 compiled" in said
    shutil.rmtree(next((tmp_path / "there").glob("*/*.cubin")).parent)
    compile_ahead.main(arguments)
    assert "statistics: 3 in the cache, 1 compiled" in capsys.readouterr().out


def test_compiled_key_equals_that_of_a_launch(monkeypatch):
    """A launch with CUDA's driver passes the same to Triton's compiler as without a driver."""
    from triton.runtime import JITFunction, driver

    passed: list[tuple[str, dict[str, object]]] = []

    def note(self, key, signature, device, constexprs, options, attrs, warmup):
        source = self.ASTSource(self, signature, constexprs, attrs)
        passed.append((source.hash(), dict(options.__dict__)))

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    with compile_ahead.pretend(ARCH):
        compile_ahead.statistics(ARCH)
    ahead, passed[:] = list(passed), []

    monkeypatch.setattr(driver, "_active", absent_device(ARCH))
    compile_ahead.statistics(ARCH)  # launches up to the compiler, which is replaced
    assert passed == ahead
    assert len(ahead) == 4


def test_settle_changes_only_moved_paths(tmp_path):
    folder = tmp_path / "key"
    folder.mkdir()
    note = folder / "__grp__kernel.json"
    note.write_text(json.dumps({"child_paths": {"kernel.cubin": "/old/key/kernel.cubin"}}))
    assert compile_ahead.settle(tmp_path) == 1
    expected = {"child_paths": {"kernel.cubin": str(folder / "kernel.cubin")}}
    assert json.loads(note.read_text()) == expected
    assert compile_ahead.settle(tmp_path) == 0
