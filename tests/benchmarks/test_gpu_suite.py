"""The script of all GPU steps, rehearsed at toy size, and with a pretended interpreter."""

import csv
import importlib
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from benchmarks.precision import OPTIMIZERS, PRECISIONS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_suite.sh"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs bash")

PRETENDER = """#!/usr/bin/env bash
if [[ $1 == - ]]; then cat >/dev/null; echo "torch 0.0"; exit; fi
echo "$PYTHONPATH" >>{folder}/paths
echo "called with $*"
[[ "$*" != *{failing}* ]] || exit 3
"""


def run_suite(
    *arguments: str, python: str | Path, out: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": str(python), "OUT": str(out), **environment},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def pretender(folder: Path, failing: str) -> Path:
    path = folder / "python"
    path.write_text(PRETENDER.format(folder=folder, failing=failing))
    path.chmod(0o755)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--quick"]], ids=["whole", "rehearsal"])
def test_benchmarks_know_the_arguments_that_they_are_called_with(arguments, tmp_path):
    out, steps = tmp_path / "out", ["bench", "million", "precision", "optimizer", "monitors"]
    done = run_suite(*arguments, *steps, python=pretender(tmp_path, failing="nothing"), out=out)
    assert done.returncode == 0
    calls = re.findall(r"^called with benchmarks/(\w+)\.py (.*)$", done.stdout, re.MULTILINE)
    benchmarks = "contrastive_loss", "million", "precision", "optimizer_step", "monitor_overhead"
    assert {name for name, _ in calls} == set(benchmarks)
    for name, given in calls:
        importlib.import_module(f"benchmarks.{name}").parse(given.split())


@pytest.mark.sweep  # six interpreters import torch and Lightning
@pytest.mark.slow
def test_rehearsal_leaves_figures_and_logs(tmp_path):
    out = tmp_path / "out"
    # Threads that wait for each other on busy cores would take most of the time.
    done = run_suite(
        "--quick",
        "bench",
        "million",
        "precision",
        "optimizer",
        "monitors",
        python=sys.executable,
        out=out,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {
        "bench.log", "contrastive_loss.csv", "environment.txt", "million.csv", "million.log",
        "precision.csv", "precision.log", "optimizer_step.csv", "optimizer.log",
        "monitor_overhead.csv", "monitors.log",
    }  # fmt: skip
    with (out / "contrastive_loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    problems = {(row["dtype"], int(row["width"]), int(row["batch"])) for row in rows}
    assert problems == set(product(["bf16", "fp16", "fp32"], [16, 32], [64, 128]))
    assert len((out / "million.csv").read_text().splitlines()) == 2
    with (out / "precision.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(PRECISIONS) * len(OPTIMIZERS)
    assert "No verdict on speed" in (out / "precision.log").read_text()
    assert "torch " in (out / "environment.txt").read_text()
    for path in out.iterdir():
        assert str(ROOT) not in path.read_text()
        assert str(tmp_path) not in path.read_text()


@pytest.mark.slow
def test_failing_step_does_not_keep_the_next_from_running(tmp_path):
    out = tmp_path / "out"
    python = pretender(tmp_path, failing="--width\\ 768")
    done = run_suite(python=python, out=out, PYTHONPATH="/elsewhere")
    assert done.returncode == 1
    failures = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert len(failures) == 3  # bf16, fp16 and fp32 at that width
    assert all("(exit status 3)" in failure for failure in failures)
    bench = (out / "bench.log").read_text()
    for width in ("512", "1024"):
        assert f"--width {width} --batch 8192 16384 32768 65536 131072 262144" in bench
    assert "--dtype fp16" in bench
    assert "--max-seconds 3" in bench
    assert "million.py --csv" in (out / "million.log").read_text()
    assert "--size H16 --batch 64" in (out / "precision.log").read_text()
    assert "-m gpu" in (out / "tests.log").read_text()
    assert len(list(out.iterdir())) + len(["the CSV files"] * 5) <= 12
    assert set((tmp_path / "paths").read_text().split()) == {f"{ROOT}:/elsewhere"}


def test_tests_run_only_files_with_gpu_marks(tmp_path):
    out = tmp_path / "out"
    done = run_suite("tests", python=pretender(tmp_path, failing="nothing"), out=out)
    assert done.returncode == 0
    assert done.stdout.endswith("all passed: tests\n")
    called = (out / "tests.log").read_text().splitlines()[-1].split()
    assert "tests/benchmarks/test_chunked.py" in called
    assert "tests/test_cli.py" not in called
    assert not (out / "bench.log").exists()


@pytest.mark.slow
def test_step_that_hangs_is_stopped(tmp_path):
    out = tmp_path / "out"
    python = tmp_path / "python"
    python.write_text("#!/usr/bin/env bash\n[[ $1 == - ]] || sleep 60\n")
    python.chmod(0o755)
    done = run_suite("million", python=python, out=out, LIMIT_SECONDS="1")
    assert done.returncode == 1
    assert "(exit status 124)" in done.stdout


def test_unknown_step_is_refused(tmp_path):
    done = run_suite("dance", python=sys.executable, out=tmp_path / "out")
    assert done.returncode == 2
    assert (
        "Passed 'dance'. Steps are tests, bench, million, precision, optimizer and monitors"
        in done.stderr
    )
    assert not (tmp_path / "out").exists()
