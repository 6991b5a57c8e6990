"""How steps are planned and timed; never how fast they are."""

import pytest
import torch

from benchmarks import _common
from benchmarks._common import CsvTable, Spread, _Plan, median_ratio, pick_device, time_alternately

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("seconds", "max_seconds", "device", "plan"),
    [
        (1.0, None, CPU, _Plan(rounds=7, calls=1)),
        (1.0, 3.5, CPU, _Plan(rounds=3, calls=1)),
        (9.0, 3.5, CUDA, _Plan(rounds=1, calls=1)),
        (0.1, 3.5, CUDA, _Plan(rounds=7, calls=1)),
        (0.001, 3.5, CUDA, _Plan(rounds=7, calls=20)),
        (0.0, 3.5, CUDA, _Plan(rounds=7, calls=100)),
        (0.001, None, CPU, _Plan(rounds=7, calls=1)),
    ],
)
def test_long_steps_get_fewer_rounds_and_short_ones_on_a_gpu_more_calls(
    seconds, max_seconds, device, plan
):
    assert _Plan.of(seconds, 7, max_seconds, device) == plan


def test_steps_take_turns_until_their_rounds_are_over(monkeypatch):
    calls: list[str] = []
    seconds = {"long": 2.0, "short": 0.5}

    def pretend(step, count, device):
        step()
        return seconds[calls[-1]]

    monkeypatch.setattr(_common, "_seconds_of", pretend)
    spreads = time_alternately(
        {name: (lambda name=name: calls.append(name)) for name in seconds},
        rounds=3,
        device=CPU,
        title="",
        max_seconds=4.5,
    )
    assert calls == ["long", "short"] * 3 + ["short"]
    assert spreads == {"long": Spread((2.0, 2.0)), "short": Spread((0.5, 0.5, 0.5))}


def test_step_that_runs_out_of_memory_is_dropped():
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    steps = {"small": lambda: None, "large": fail}
    assert list(time_alternately(steps, rounds=1, device=CPU, title="")) == ["small"]


def test_ratio_is_taken_within_common_rounds():
    assert median_ratio(Spread((4.0, 9.0)), Spread((2.0, 3.0, 100.0))) == 2.5


def test_device_is_picked(monkeypatch):
    assert pick_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match="Passed --device cuda:1, but torch sees no GPU"):
        pick_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == "cuda"


def test_table_keeps_its_header_over_runs(tmp_path):
    path = tmp_path / "new" / "table.csv"
    for value in (1, None):
        CsvTable(path, ["name", "value"]).append([{"name": "a", "value": value}])
    assert path.read_text() == "name,value\na,1\na,\n"


def test_row_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path):
    table = CsvTable(tmp_path / "table.csv", ["date", "name", "chip", "ms"], ["ms"])
    for date, name, chip, ms in [(1, "a", "x", 5), (2, "a", "y", 4), (3, "b", "x", 3)]:
        table.append([{"date": date, "name": name, "chip": chip, "ms": ms}])
    table.append([{"date": 4, "name": "a", "chip": "x", "ms": 2}])
    assert table.path.read_text() == "date,name,chip,ms\n4,a,x,2\n2,a,y,4\n3,b,x,3\n"
    assert list(tmp_path.iterdir()) == [table.path]
