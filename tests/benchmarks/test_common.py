"""Timing, memory measurement and CSV files of the benchmarks; no test depends on speed."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks import _common
from benchmarks._common import (
    Benchmark,
    append_rows,
    error_words,
    median_ratio,
    peak_bytes,
    take_turns,
    time_columns,
    time_in_turn,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_steps_alternate_until_the_time_limit():
    calls: list[str] = []

    def run(name: str, seconds: float) -> Callable[[], float]:
        return lambda: calls.append(name) or seconds

    runs = {"long": run("long", 2.0), "short": run("short", 0.5)}
    found, failures = take_turns(runs, rounds=3, max_seconds=4.5)
    assert calls == [*["long", "short"] * 2, "short"]
    assert found == {"long": [2.0, 2.0], "short": [0.5, 0.5, 0.5]}
    assert failures == {}


def test_failing_contender_is_left_out():
    def fail() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found, failures = take_turns({"a": lambda: 1.0, "b": fail}, rounds=2)
    assert found == {"a": [1.0, 1.0]}
    assert failures == {"b": "ran out of memory"}
    assert error_words(ValueError("No kernel. Details.")) == "failed: ValueError: No kernel"


@pytest.fixture
def timed(monkeypatch) -> list[tuple[str, bool]]:
    """Replace timers by the seconds that steps return; list each step, and whether called once."""
    calls: list[tuple[str, bool]] = []

    def pretend(step: Callable[[], tuple[str, float]], *, once: bool) -> float:
        name, seconds = step()
        calls.append((name, once))
        return seconds

    monkeypatch.setattr(_common, "_seconds_of_call", partial(pretend, once=True))
    monkeypatch.setattr(_common, "_seconds_of_many", partial(pretend, once=False))
    return calls


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_only_short_steps_on_a_gpu_are_repeated(timed, device):
    steps = {"long": lambda: ("long", 0.03), "short": lambda: ("short", 0.001)}
    spreads, _ = time_in_turn(steps, device, 1)
    # Two rounds are not timed, because the first may compile.
    assert timed[:4] == [("long", True), ("short", True)] * 2
    assert timed[4:] == [("long", True), ("short", device == CPU)]
    assert spreads == {"long": [0.03], "short": [0.001]}


def test_calls_are_timed():
    calls: list[int] = []
    spreads, _ = time_in_turn({"a": lambda: calls.append(1)}, CPU, 2)
    assert len(calls) == 4
    assert 0 < sum(spreads["a"]) < 1


def test_times_become_columns_and_ratios_are_taken_within_common_rounds():
    columns = {"rounds": 3, "ms_median": 2000.0, "ms_min": 1000.0, "ms_max": 9000.0}
    assert time_columns([1.0, 9.0, 2.0]) == columns
    assert median_ratio([4.0, 9.0], [2.0, 3.0, 100.0]) == 2.5


def test_peak_counts_tensors_that_exist_at_the_same_time():
    def run() -> torch.Tensor:
        first = torch.zeros(1024)
        second = first + 1
        del first
        return second * 2

    scalars = (peak_bytes(run, CPU) or 0) - 2 * 4096
    assert 0 <= scalars <= 64


def test_device_defaults_to_a_gpu_and_must_exist(monkeypatch, capsys):
    def parse(*argv: str) -> torch.device:
        return Benchmark("toy", "What it does.", lambda args: []).parse(argv).device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse() == parse("--device", "cpu") == CPU
    with pytest.raises(SystemExit, match="2"):
        parse("--device", "cuda:1")
    assert "torch sees no GPU for cuda:1; pass --device cpu" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse() == CUDA


def test_row_that_is_measured_again_replaces_the_old_row(tmp_path):
    path, columns = tmp_path / "new" / "table.csv", ["date", "name", "chip", "ms"]
    for date, name, chip, ms in [
        (1, "a", "x", 5), (2, "a", "y", 4), (3, "b", "x", None), (4, "a", "x", 2)
    ]:  # fmt: skip
        row = {"date": date, "name": name, "chip": chip, "ms": ms}
        append_rows(path, columns, [row], measured=["ms"])
    assert path.read_text() == "date,name,chip,ms\n4,a,x,2\n2,a,y,4\n3,b,x,\n"
    assert list(path.parent.iterdir()) == [path]


def test_new_columns_are_added_to_an_existing_file(tmp_path):
    path = tmp_path / "table.csv"
    append_rows(path, ["name", "old"], [{"name": "a", "old": 1}], ["old"])
    append_rows(path, ["name", "new"], [{"name": "b", "new": 2}], ["new"])
    assert path.read_text() == "name,old,new\na,1,\nb,,2\n"
