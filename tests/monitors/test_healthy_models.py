"""Healthy runs of real models raise no alarm, or at most one in long runs.

`make test` takes 100 steps of each model or a few more in one precision, sampled often enough to be
judged;
`make sweep` takes 1000 steps of each in every precision, at the default settings.
"""

import functools
from pathlib import Path

import pytest

from tests.monitors import table
from tests.monitors.healthy_models import MODELS, PRECISIONS, healthy_run
from tests.monitors.running import Outcome

STEPS, SWEEP_STEPS = 100, 1000
LEARNS_LATE = {"short last batch": 150}
# Models with short runs, and each precision twice; `make sweep` runs all combinations for longer.
COVERING = {
    "LSTM": "16-mixed",
    "conv + BN": "PureFP16",
    "A2C": "16-mixed",
    "contrastive": "BalancedAMP",
    "LoRA at zero": "fp32",
    "curriculum": "PureFP16",
    "hinge": "BalancedAMP",
    "short last batch": "fp32",
    "VAE": "fp32",
    "denoiser": "16-mixed",
    "EMA teacher": "BalancedAMP",
}


@functools.cache
def long(model: str, precision: str) -> Outcome:
    return healthy_run(model, precision, SWEEP_STEPS)


def test_sampled_cases_cover_every_precision() -> None:
    assert set(COVERING.values()) == set(PRECISIONS)


@pytest.mark.slow
@pytest.mark.parametrize("model", COVERING)
def test_short_healthy_run_learns_and_raises_no_alarm(model: str) -> None:
    outcome = healthy_run(model, COVERING[model], LEARNS_LATE.get(model, STEPS), every=10)
    if not outcome.is_healthy:
        pytest.fail(f"{outcome.error}; {outcome.measured} against {outcome.bound}")
    assert [alarm.message for alarm in outcome.alarms] == []


each_run = [(model, precision) for model in MODELS for precision in PRECISIONS]


@pytest.mark.sweep
@pytest.mark.parametrize(("model", "precision"), each_run)
def test_long_healthy_run_raises_at_most_one_alarm(model: str, precision: str) -> None:
    alarms = long(model, precision).alarms
    assert len(alarms) <= 1, [alarm.message for alarm in alarms]


@pytest.mark.sweep
@pytest.mark.parametrize(("model", "precision"), each_run)
def test_long_healthy_run_learns(model: str, precision: str) -> None:
    outcome = long(model, precision)
    assert outcome.is_healthy, f"{outcome.error}; {outcome.measured} against {outcome.bound}"


@pytest.mark.slow
def test_table_counts_alarms_by_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, markdown = tmp_path / "alarms.csv", tmp_path / "table.md"
    status = table.main(
        ["--only", "hinge", "--precision", "fp32", "BalancedAMP", "--steps", "30", "-j", "1",
         "--csv", str(csv), "--markdown", str(markdown)]
    )  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert status == 0
    assert printed[0].split()[:3] == ["model", "precision", "steps"]
    assert [line.split()[:5] for line in printed[1:3]] == [
        ["hinge", "fp32", "30", "0", "0"], ["hinge", "BalancedAMP", "30", "0", "0"],
    ]  # fmt: skip
    assert "0 false alarms in 60 healthy steps: 0 per 1000" in printed
    assert csv.read_text() == "model,precision,step,monitor,kind,tensor,message\n"
    assert markdown.read_text().splitlines()[2].startswith("| hinge | fp32 | 30 | 0 | 0 | yes |")
