"""In healthy runs of real models monitors say nothing, or nearly so.

`make test` takes 150 steps of each model in one precision, sampled often enough to be judged;
`make sweep` takes 1000 steps of each in every precision, at the default settings.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.monitors import table
from tests.monitors.healthy_models import MODELS, PRECISIONS, healthy_run

STEPS, SWEEP_STEPS = 150, 1000
# Each model once, each precision at least three times.
COVERING = {
    "GPT-2": "PureFP16",
    "BERT": "BalancedAMP",
    "T5": "PureFP16",
    "LSTM": "16-mixed",
    "MoE": "BalancedAMP",
    "ViT": "16-mixed",
    "conv + BN": "PureFP16",
    "GAN": "BalancedAMP",
    "A2C": "16-mixed",
    "contrastive": "BalancedAMP",
    "LoRA at zero": "fp32",
    "curriculum": "PureFP16",
    "hinge": "fp32",
    "short last batch": "fp32",
}
# What today's rules raise too often, in 1000 steps.
TOO_LOUD = {
    "MoE": "zero runs are judged by their length, and rare experts have long ones",
    "curriculum": "a loss that jumps with the data is taken for a spike",
    "hinge": "zero runs are judged by their length, and a loss of 0 makes long ones",
}


def test_covering_choice_has_every_model_and_precision() -> None:
    assert list(COVERING) == list(MODELS)
    assert set(COVERING.values()) == set(PRECISIONS)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision"), COVERING.items(), ids=COVERING)
def test_short_healthy_run_raises_no_alarm(model: str, precision: str) -> None:
    outcome = healthy_run(model, precision, STEPS, every_n_steps=10)
    assert [alarm.message for alarm in outcome.alarms] == []
    assert outcome.is_healthy, f"{outcome.error}; {outcome.measured} against {outcome.bound}"


def _row(model: str, precision: str) -> Any:
    reason = TOO_LOUD.get(model)
    marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
    return pytest.param(model, precision, marks=marks, id=f"{model}-{precision}")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "precision"), [_row(model, each) for model in MODELS for each in PRECISIONS]
)
def test_long_healthy_run_raises_at_most_one_alarm(model: str, precision: str) -> None:
    outcome = healthy_run(model, precision, SWEEP_STEPS)
    assert len(outcome.alarms) <= 1, [alarm.message for alarm in outcome.alarms]


@pytest.mark.sweep
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_long_healthy_run_learns(model: str, precision: str) -> None:
    outcome = healthy_run(model, precision, SWEEP_STEPS)
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
    assert [line.split()[:5] for line in printed[2:4]] == [
        ["hinge", "fp32", "30", "0", "0"], ["hinge", "BalancedAMP", "30", "0", "0"],
    ]  # fmt: skip
    assert "0 false alarms in 60 healthy steps: 0 per 1000" in printed
    assert csv.read_text() == "model,precision,step,monitor,kind,tensor,message\n"
    assert markdown.read_text().splitlines()[2].startswith("| hinge | fp32 | 30 | 0 | 0 | yes |")
