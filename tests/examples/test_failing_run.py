"""The failing example fails without the plugins, learns with them, and reports both runs."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from examples.failing_run import run
from tests.precision.models import one_thread

pytestmark = pytest.mark.slow

STEPS = 200
TRAIN = run.train
AFTER = slice(
    int(0.4 * STEPS) + run.BAD, STEPS // 2
)  # after the bad batches, before the stem grows


def _train(plugins: bool, folder: Path) -> tuple[list[float], dict[str, Any]]:
    with one_thread():
        losses = TRAIN(STEPS, plugins, folder)
    assert "<html" in (folder / "instability.html").read_text()
    return losses, json.loads((folder / "instability.json").read_text())


def test_failing_run_without_plugins_ends_and_its_page_names_the_cause(tmp_path: Path) -> None:
    losses, data = _train(False, tmp_path)
    start = statistics.fmean(losses[:5])
    assert statistics.fmean(losses[AFTER]) > start
    assert not math.isfinite(losses[-1])
    said = [(alarm["step"], alarm["kind"], alarm["tensor"]) for alarm in data["alarms"]]
    assert (int(0.4 * STEPS), "loss_spike", "loss") in said
    first = {(kind, tensor): step for step, kind, tensor in reversed(said)}
    assert first["activation_headroom", "network.stem"] < first["non_finite", "network.stem"]


@pytest.mark.sweep
def test_failing_run_with_plugins_learns_and_prints_where_its_page_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[tuple[list[float], dict[str, Any]]] = []

    def train(steps: int, plugins: bool, folder: Path) -> list[float]:
        assert (steps, plugins) == (STEPS, True)
        kept.append(_train(plugins, folder))
        return kept[0][0]

    monkeypatch.setattr(run, "train", train)
    assert run.main(["--plugins", "on", "--steps", str(STEPS), "--output", str(tmp_path)]) == 0
    losses, data = kept[0]
    start = statistics.fmean(losses[:5])
    assert statistics.fmean(losses[AFTER]) < 0.5 * start
    assert statistics.fmean(losses[-20:]) < 0.5 * start
    assert "loss_scale_floor" not in {alarm["kind"] for alarm in data["alarms"]}
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    end = f"{statistics.fmean(losses[-20:]):.4g}"
    page = tmp_path / "on" / "instability.html"
    assert printed == f"plugins on: learned, loss of the last 20 steps {end}; see {page}"
