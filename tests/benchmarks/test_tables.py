"""The tables of the documentation equal those of the CSV files."""

from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks._common import append_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def documented() -> str:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return "\n".join(page.read_text() for page in pages)


def test_documented_figures_of_the_loss_are_those_of_the_file(documented):
    rows = tables.read(RESULTS / "contrastive_loss.csv")
    lines = list(tables.loss_lines(rows))[1:]
    assert lines
    for line in lines:
        assert line in documented


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "O1-fp16", "O2-fp16", "pure-fp16"])
@pytest.mark.parametrize("optimizer", ["fused", "safe"])
def test_documented_host_times_are_those_of_the_file(documented, precision, optimizer):
    rows = tables.read(RESULTS / "precision.csv")
    problem = {"precision": precision, "optimizer": optimizer, "device": "cpu", "size": "thin"}
    *_, row = (row for row in rows if row.items() >= problem.items())  # the row of the last run
    assert f"| {row['ms_median']:.1f} | {1 / row['speedup']:.2f} |" in documented


@pytest.mark.parametrize("name", ["precision", "optimizer_step"])
def test_documented_figures_of_a_gpu_are_those_of_the_file(documented, name):
    rows = [row for row in tables.read(RESULTS / f"{name}.csv") if row["device"] == "cuda"]
    assert rows
    for line in tables.lines_of(name, rows):
        assert line in documented


@pytest.mark.slow
def test_every_file_becomes_a_table_and_a_plot(tmp_path, capsys):
    row = {"date": "2026-01-02T03:04:05", "contender": "SafeAdamW", "device_name": "a chip"}
    row |= {"ms_median": 2.0, "ms_min": 1.0, "ms_max": 3.0, "speedup": None, "parameters": 10}
    row |= {"bytes_per_element": 28, "gb_per_second": 4.0, "copy_fraction": 0.5, "error": 1e-6}
    append_rows(tmp_path / "optimizer_step.csv", list(row), [row])
    tables.main(["--results", str(tmp_path), "--plots", str(tmp_path / "plots")])
    said = capsys.readouterr().out
    assert "## `python benchmarks/optimizer_step.py`" in said
    assert "device_name a chip; 2026-01-02:" in said
    assert "| SafeAdamW | 2.00 [1.00-3.00] | - | 28 | 4.0 | 50% | 1.0e-06 |" in said
    assert (tmp_path / "plots" / "optimizer_step.png").stat().st_size > 0
