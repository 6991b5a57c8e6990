"""The benchmark of the monitors, rehearsed at toy size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.monitor_overhead import HOOKS, Switch, main, monitors
from tests.benchmarks.rehearsing import QUICK, read


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_rehearsal_has_a_row_for_every_monitor_and_for_all(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.csv"
    assert main([*QUICK, "--csv", str(path)]) == 0
    rows = read(path)
    names = [type(monitor).__name__ for monitor in monitors(5)]
    assert [row["monitor"] for row in rows] == [*names, "all, inside", "all, on against off"]
    parts = [float(row["share_of_step"]) for row in rows]
    assert sum(parts[:-2]) == pytest.approx(parts[-2], abs=1e-4)
    for name, part in zip(names, parts, strict=False):
        assert part > 0 or name == "LossScaleMonitor"  # which has nothing to do in fp32
    said = capsys.readouterr().out
    assert "Goal on this device, at most 2% of a step" in said
    assert torch.get_num_threads() == 1


def test_hooks_are_passed_on_only_while_monitors_are_on() -> None:
    class Notes:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *_: self.calls.append(name)

    notes = Notes()
    switch = Switch(notes)  # type: ignore[arg-type]
    for is_on, expected in (
        (False, {"on_fit_start", "on_train_start", "on_train_end"}),
        (True, set(HOOKS)),
    ):
        Switch.is_on = is_on
        notes.calls.clear()
        for name in HOOKS:
            getattr(switch, name)(None, None)
        assert set(notes.calls) == expected
    Switch.is_on = False
