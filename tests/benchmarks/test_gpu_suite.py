"""The script of all GPU steps, run on the CPU and with a fake Python interpreter."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_suite.sh"
LOG, PASSED = "suite.log", "passed.txt"
LONGEST_STEP = 9 * 60
MAKEFILE = (ROOT / "Makefile").read_text()

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs bash")

PRETENDER = """#!/usr/bin/env bash
[[ $1 == -m && $2 == torch* ]] && exit
echo "$PYTHONPATH $TRITON_CACHE_DIR" >>{folder}/environment
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


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def pretender(folder: Path, failing: str = "nothing") -> Path:
    text = PRETENDER.format(folder=folder, failing=failing.replace(" ", "\\ "))
    return executable(folder / "python", text)


def steps_of(tmp_path: Path) -> dict[str, tuple[int, str]]:
    """Return the limit and the command of each step."""
    listed = run_suite("--list", python="python", out=tmp_path / "out").stdout
    found = re.findall(r"^(\S+) \((\d+) s\): python (.*)$", listed, re.MULTILINE)
    return {name: (int(limit), command) for name, limit, command in found}


@pytest.mark.slow
def test_benchmarks_know_the_arguments_that_they_are_called_with(tmp_path):
    steps = steps_of(tmp_path)
    called = set()
    for name, (_, command) in steps.items():
        script, _, arguments = command.partition(".py ")
        if script.startswith("benchmarks/") and name not in ("kernels", "smoke"):
            module = importlib.import_module(script.replace("/", "."))
            module.main.parse(arguments.replace("--device cuda", "--device cpu").split())
            called.add(script.removeprefix("benchmarks/"))
    assert called == {
        "contrastive_loss", "monitor_overhead", "optimizer_step", "precision", "tile_rows"
    }  # fmt: skip


@pytest.mark.slow
def test_make_bench_calls_benchmarks_with_arguments_that_they_know():
    calls = re.findall(r"\$\(BIN\)/python benchmarks/(\w+)\.py ?(.*)$", MAKEFILE, re.MULTILINE)
    names = [name for name, _ in calls]
    assert {"contrastive_loss", "precision", "monitor_overhead"} < set(names)
    assert names[-1] == "tables"
    for name, arguments in calls[:-1]:
        args = importlib.import_module(f"benchmarks.{name}").main.parse(arguments.split())
        assert args.device.type == "cpu"


def test_no_step_is_long_and_the_most_important_come_first(tmp_path):
    steps = steps_of(tmp_path)
    assert all(limit < LONGEST_STEP for limit, _ in steps.values())
    names = list(steps)
    first = ["smoke", "loss-bf16", "tests", "nccl", "precision-H16", "optimizer", "ladder"]
    assert names[: len(first)] == first
    assert steps["smoke"] == (60, "benchmarks/smoke.py")
    assert names.index("loss-fp32") < names.index("loss-512")
    assert names.index("loss-fp16") < names.index("loss-1024")
    assert "papers meta-vit" in steps["ladder"][1]


@pytest.fixture
def failed_suite(tmp_path) -> subprocess.CompletedProcess[str]:
    """Return the result of the whole suite with one failing step."""
    return run_suite(
        python=pretender(tmp_path, failing="--dtype fp16"),
        out=tmp_path / "out",
        PYTHONPATH="/elsewhere",
    )


def test_failing_step_does_not_keep_the_next_from_running(failed_suite, tmp_path):
    out, steps = tmp_path / "out", steps_of(tmp_path)
    assert failed_suite.returncode == 1
    failures = re.findall("^failed: (.*)$", failed_suite.stdout, re.MULTILINE)
    assert failures == ["loss-fp16 (exit status 3)"]
    log = (out / LOG).read_text()
    assert re.findall(r"^== (\S+)$", log, re.MULTILINE) == list(steps)
    assert "--max-seconds 3" in log
    assert "-v --tb=short -W default" in log
    assert {path.name for path in out.iterdir()} == {LOG, PASSED, "summary.md"}
    environments = set((tmp_path / "environment").read_text().splitlines())
    assert environments == {f"{ROOT}:/elsewhere {ROOT}/kernels"}


def test_steps_that_passed_are_not_run_again(failed_suite, tmp_path):
    python = pretender(tmp_path)
    again = run_suite(python=python, out=tmp_path / "out")
    assert again.returncode == 0
    calls = re.findall("^called with (.*)$", again.stdout, re.MULTILINE)
    assert [call.split()[0] for call in calls] == [
        "benchmarks/smoke.py", "benchmarks/contrastive_loss.py", "benchmarks/tables.py"
    ]  # fmt: skip
    assert "--dtype fp16" in calls[1]
    assert (tmp_path / "out" / "summary.md").read_text() == f"called with {calls[2]}\n"
    assert again.stdout.endswith("all passed\n")


def test_failed_smoke_ends_the_suite(tmp_path):
    python = pretender(tmp_path, failing="smoke.py")
    done = run_suite(python=python, out=tmp_path / "out")
    assert done.returncode == 1
    assert done.stdout.count("called with") == 2  # the smoke step and the summary
    assert "smoke failed, so no other step runs." in done.stdout
    named = run_suite("loss-fp", python=python, out=tmp_path / "out")
    assert named.returncode == 0
    assert named.stdout.count("called with") == 3


def test_tests_run_only_files_with_gpu_marks(tmp_path):
    called = steps_of(tmp_path)["tests"][1].split()
    assert "tests/optim/test_gpu_fused_adamw.py" in called
    assert "tests/test_cli.py" not in called
    assert steps_of(tmp_path)["nccl"][1].endswith(" tests/contrastive/test_nccl.py")


HANGING = f"""#!/usr/bin/env bash
[[ $1 == -m && $2 == torch* ]] && exit
[[ "$*" == *1048576* ]] || exec true
exec {sys.executable} -I -S -c '
import time
time.sleep(60)
'
"""


@pytest.mark.slow
def test_step_that_hangs_is_interrupted_with_a_traceback(tmp_path):
    """Shells start background jobs with SIGINT ignored. Both kinds of jobs wait together."""
    python = executable(tmp_path / "python", HANGING)
    runs = {}
    for kind, launcher in {"foreground": "bash", "background": "trap '' INT; bash"}.items():
        runs[kind] = subprocess.Popen(
            ["bash", "-c", f"{launcher} {SCRIPT} million monitors"],
            env={
                **os.environ,
                "PYTHON": str(python),
                "OUT": str(tmp_path / kind),
                "LIMIT_SECONDS": "4",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for kind, run in runs.items():
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 1, kind
        assert "failed: million (exit status 124)" in output, kind
        assert "== monitors took" in output, kind
        log = (tmp_path / kind / LOG).read_text()
        assert 'File "<string>", line 3' in log, kind
        assert "KeyboardInterrupt" in log, kind
        assert "stopped at its limit of 4 s" in log, kind


def test_unknown_step_and_blanks_are_refused(tmp_path):
    done = run_suite("dance", python=sys.executable, out=tmp_path / "out")
    assert done.returncode == 2
    assert "Passed 'dance'. Pass names of steps or how they begin" in done.stderr
    assert "smoke loss-bf16 tests nccl precision-H16" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run_suite("smoke", python=sys.executable, out=tmp_path / "my folder")
    assert done.returncode == 2
    assert "Use paths without blanks" in done.stderr


def test_minutes_choose_what_fits_and_the_loss_comes_first(tmp_path: Path) -> None:
    chosen = {}
    for minutes in ("10", "30", "120"):
        said = run_suite(
            "--list", "--minutes", minutes, python="python", out=tmp_path / "out"
        ).stdout
        found = re.findall(r"^(\S+) \((\d+) s\)", said, re.MULTILINE)
        assert sum(int(limit) for _, limit in found) <= 60 * int(minutes)
        chosen[minutes] = [name for name, _ in found]
    assert chosen["10"] == ["smoke", "loss-bf16"]
    assert chosen["30"] == ["smoke", "loss-bf16", "tests", "nccl", "tiles"]
    assert {"precision-H16", "optimizer", "ladder"} < set(chosen["120"])
    assert set(chosen["30"]) < set(chosen["120"]) <= set(steps_of(tmp_path))
    refused = run_suite("--minutes", "soon", python="python", out=tmp_path / "out")
    assert refused.returncode == 2
    assert "Pass a whole number" in refused.stderr
