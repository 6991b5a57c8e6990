"""How steps are timed, weighed and written down; never how fast they are."""

from collections.abc import Callable

import pytest
import torch

from benchmarks import _common
from benchmarks._common import (
    CsvTable,
    Spread,
    error_words,
    median_ratio,
    peak_bytes,
    pick_device,
    time_alternately,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def timed(monkeypatch) -> list[tuple[str, bool]]:
    """Pretend that steps take what they return; what was timed, and whether by one call."""
    calls: list[tuple[str, bool]] = []

    def pretend(step: Callable[[], tuple[str, float]], *, once: bool) -> float:
        name, seconds = step()
        calls.append((name, once))
        return seconds

    monkeypatch.setattr(_common, "_seconds_of", pretend)
    return calls


def test_steps_take_turns_until_their_rounds_are_over(timed):
    steps = {"long": lambda: ("long", 2.0), "short": lambda: ("short", 0.5)}
    spreads = time_alternately(steps, rounds=3, device=CPU, max_seconds=4.5)
    # Two calls each do not count; the first may compile.
    names = [name for name, _ in timed]
    assert names == ["long", "long", "short", "short", *["long", "short"] * 2, "short"]
    assert spreads == {"long": Spread((2.0, 2.0)), "short": Spread((0.5, 0.5, 0.5))}


def test_only_short_steps_on_a_gpu_are_repeated(timed):
    steps = {"long": lambda: ("long", 0.03), "short": lambda: ("short", 0.001)}
    time_alternately(steps, rounds=1, device=CUDA)
    assert timed[-2:] == [("long", True), ("short", False)]


def test_a_call_is_timed():
    calls: list[int] = []
    spreads = time_alternately({"a": lambda: calls.append(1)}, rounds=2, device=CPU)
    assert len(calls) == 4
    assert 0 < spreads["a"].median < 1
    assert spreads["a"].columns["rounds"] == 2


def test_step_that_runs_out_of_memory_is_dropped():
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    steps = {"small": lambda: None, "large": fail}
    assert list(time_alternately(steps, rounds=1, device=CPU)) == ["small"]
    assert error_words(torch.OutOfMemoryError("no room")) == "ran out of memory"
    assert error_words(ValueError("No kernel. Details.")) == "failed: ValueError: No kernel"


def test_ratio_is_taken_within_common_rounds():
    assert median_ratio(Spread((4.0, 9.0)), Spread((2.0, 3.0, 100.0))) == 2.5


def test_peak_counts_what_lives_at_a_time():
    def run() -> torch.Tensor:
        first = torch.zeros(1024)
        second = first + 1
        del first
        return second * 2

    scalars = (peak_bytes(run, CPU) or 0) - 2 * 4096
    assert 0 <= scalars <= 64


def test_device_is_picked(monkeypatch):
    assert pick_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match="Passed --device cuda:1, but torch sees no GPU"):
        pick_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == "cuda"


def test_row_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path):
    table = CsvTable(tmp_path / "new" / "table.csv", ["date", "name", "chip", "ms"], ["ms"])
    for date, name, chip, ms in [(1, "a", "x", 5), (2, "a", "y", 4), (3, "b", "x", None)]:
        table.append([{"date": date, "name": name, "chip": chip, "ms": ms}])
    table.append([{"date": 4, "name": "a", "chip": "x", "ms": 2}])
    assert table.path.read_text() == "date,name,chip,ms\n4,a,x,2\n2,a,y,4\n3,b,x,\n"
    assert list(table.path.parent.iterdir()) == [table.path]


def test_columns_that_a_file_has_not_are_added(tmp_path):
    path = tmp_path / "table.csv"
    CsvTable(path, ["name", "old"], ["old"]).append([{"name": "a", "old": 1}])
    CsvTable(path, ["name", "new"], ["new"]).append([{"name": "b", "new": 2}])
    assert path.read_text() == "name,old,new\na,1,\nb,,2\n"
