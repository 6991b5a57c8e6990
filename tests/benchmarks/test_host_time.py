"""The benchmark of the host's time measures every precision and prints a ratio for each."""

import pytest

from benchmarks.host_time import PRECISIONS, main


@pytest.mark.filterwarnings("ignore")
def test_host_time_prints_a_row_for_every_precision(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--layers", "1", "--steps", "3", "--rounds", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: float(row[-1]) for row in rows if row and row[0] in PRECISIONS}
    assert set(found) == set(PRECISIONS)
    assert found["16-mixed"] == 1.0
    assert all(0 < ratio < 100 for ratio in found.values())
