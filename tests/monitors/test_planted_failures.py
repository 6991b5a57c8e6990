"""Monitors report planted failures at the expected step, and the remedies cure them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_mp.callbacks import Alarm
from tests.monitors import failures_table
from tests.monitors.planted import Fit
from tests.monitors.planted_failures import FAILURES, Planted
from tests.monitors.running import train
from tests.processes import run_ranks

pytestmark = pytest.mark.slow

# Failures with long runs, which `make sweep` tests together with all remedies.
LONG = {
    "dead units",
    "learning rate 1% above the stable maximum",
    "slow growth of the residual stream",
    "growth of attention logits",
    "plateau after divergence",
    "rising learning rate",
    "learning rate at which GPT-2 does not learn",
    "learning rate at which GPT-2 diverges in its first steps",
    "exploding activations of a deep network",
    "sudden growth of the gradient of an embedding",
    "mislabeled batches",
    "division by the standard deviation of a constant",
}


def param(planted: Planted) -> Any:
    marks = [pytest.mark.sweep] * (planted.name in LONG)
    return pytest.param(planted, id=planted.name, marks=marks)


@pytest.mark.parametrize("planted", [param(planted) for planted in FAILURES])
def test_planted_failure_is_named_at_its_step_with_a_remedy(
    planted: Planted,
) -> None:
    """Steps do not depend on rounding: they stay equal without AVX or if weights change by 1e-6."""
    outcome = planted.fail()
    if outcome.is_healthy:
        pytest.fail(f"the run learned: {outcome.measured} is below {outcome.bound}")
    early = [a.message for a in outcome.alarms if a.step < planted.from_step]
    if early:
        pytest.fail(f"alarms before the failure: {early}")
    raised = [(a.step, a.monitor, a.kind, a.tensor) for a in outcome.alarms]
    alarm = planted.found(outcome)
    assert alarm, f"no alarm names {planted.tensors}; alarms: {raised}"
    assert alarm.step == planted.step, raised
    assert planted.advises in alarm.remedy


@pytest.mark.sweep
@pytest.mark.parametrize("planted", [param(planted) for planted in FAILURES])
def test_remedy_of_planted_failure_lets_the_run_learn(planted: Planted) -> None:
    outcome = planted.cured()
    assert outcome.is_healthy, f"{outcome.error}; {outcome.measured} against {outcome.bound}"


# --- several ranks -------------------------------------------------------------------------------

BAD_STEP, BAD_RANK = 20, 1


class OnRanks(Fit):
    """Has different data on each rank, with a NaN on one rank.

    Args:
        is_repaired: Whether the NaN is replaced by 0.
    """

    def __init__(self, is_repaired: bool) -> None:
        super().__init__(steps=60, lr=1e-2)
        self.is_repaired = is_repaired

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        generator.manual_seed(2 * index + self.global_rank)
        x, y = super().batch(index, generator)
        if (index, self.global_rank) == (BAD_STEP, BAD_RANK):
            x[3, 5] = math.nan
        return [x.nan_to_num() if self.is_repaired else x, y]


def _train(rank: int, is_repaired: bool) -> tuple[bool, list[Alarm]]:
    options: dict[str, Any] = {"strategy": DDPStrategy(), "devices": 2}
    outcome = train(OnRanks(is_repaired), use_distributed_sampler=False, **options)
    return outcome.is_healthy, outcome.alarms


@pytest.mark.distributed
def test_nan_in_the_data_of_one_rank_is_named_with_rank_and_batch() -> None:
    for is_healthy, alarms in run_ranks(_train, 2, False):
        assert not is_healthy
        assert [alarm for alarm in alarms if alarm.step < BAD_STEP] == []
        alarm = next(a for a in alarms if a.monitor == "NonFiniteLocator")
        assert (alarm.step, alarm.kind, alarm.tensor) == (BAD_STEP, "non_finite", "batch[0]")
        assert f"batch {BAD_STEP}, rank {BAD_RANK}" in alarm.message


@pytest.mark.sweep
@pytest.mark.distributed
def test_run_learns_once_nan_is_removed_from_the_data() -> None:
    assert [is_healthy for is_healthy, _ in run_ranks(_train, 2, True)] == [True, True]


@pytest.mark.slow
def test_table_has_a_row_for_each_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "failures.md"
    names = ["square root at 0", "learning rate of 0"]
    assert failures_table.main(["--only", *names, "-j", "1", "--markdown", str(path)]) == 0
    assert "2 of 2 failures named in time; 2 cured by their remedy" in capsys.readouterr().out
    rows = path.read_text().splitlines()
    assert rows[2].startswith("| square root at 0 | 60 | 60 | `non_finite` | `network.operation` |")
    assert rows[3].endswith("| a learning rate above 0 | yes |")
