"""The smoke step runs all benchmarks and names those that failed or were left out."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks import smoke


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the benchmarks by two, the first of which fails; list their calls."""
    calls: list[list[str]] = []
    monkeypatch.setattr(smoke, "BENCHMARKS", {"first": ("--repeats", "1"), "second": ()})
    for name, status in (("first", 1), ("second", 0)):
        module = SimpleNamespace(main=lambda argv, status=status: calls.append(argv) or status)
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
    return calls


def test_benchmark_that_fails_is_named_and_the_next_one_runs(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke.main([]) == 1
    options = ["--quick", "--device", "cuda"]
    assert calls == [[*options, "--repeats", "1"], options]
    assert capsys.readouterr().out.endswith("Failed: first.\n")


def test_benchmark_that_raises_has_failed(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(sys.modules, "benchmarks.second", SimpleNamespace(main=fail))
    assert smoke.main([]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("Failed: first, second.\n")
    assert "no kernel image" in said.err


def test_benchmark_without_its_package_is_left_out(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'lightning'", name="lightning")

    monkeypatch.setitem(sys.modules, "benchmarks.first", SimpleNamespace(main=fail))
    assert smoke.main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "Left out: first needs the package 'lightning'." in said


@pytest.mark.gpu
def test_every_benchmark_runs_at_toy_size() -> None:
    assert smoke.main([]) == 0


@pytest.mark.slow
def test_loss_runs_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "contrastive_loss"
    monkeypatch.setattr(smoke, "BENCHMARKS", {name: smoke.BENCHMARKS[name]})
    assert smoke.main(["--device", "cpu"]) == 0
