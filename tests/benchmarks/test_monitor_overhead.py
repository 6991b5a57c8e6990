"""The benchmark of the monitors, rehearsed at toy size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.monitor_overhead import main, monitors
from tests.benchmarks.rehearsing import QUICK, read


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rehearsal_has_a_row_for_every_monitor_and_for_all(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.csv"
    assert main([*QUICK, "--csv", str(path)]) == 0
    rows = read(path)
    names = [type(monitor).__name__ for monitor in monitors()]
    assert [row["monitor"] for row in rows] == [
        *names,
        "FactsRecorder",
        "all, inside",
        "all, on against off",
    ]
    parts = [float(row["share_of_step"]) for row in rows]
    assert sum(parts[:-2]) == pytest.approx(parts[-2], abs=1e-4)
    for name, part in zip(names, parts, strict=False):
        assert part > 0 or name == "LossScaleMonitor"  # does nothing in fp32
    said = capsys.readouterr().out
    assert "All monitors take " in said
    assert "(target: 2%)" in said
    assert torch.get_num_threads() == 1
