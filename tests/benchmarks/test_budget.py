"""Which contenders are left out for their time, from figures that are made up."""

from dataclasses import replace

import pytest
import torch

from benchmarks import _budget
from benchmarks._budget import Budget
from benchmarks._contenders import Contender, dense_formula
from benchmarks._inputs import Case

CASE = Case(batch=1024, width=16, dtype="fp32", scale=10.0, device="cpu")
DENSE = Contender("dense", dense_formula)


@pytest.fixture
def probes(monkeypatch) -> list[int]:
    """Pretend that every probe takes half a second; the batches that were probed."""
    batches = []

    def pretend(contender: Contender, case: Case) -> float:
        batches.append(case.batch)
        return 0.5

    monkeypatch.setattr(_budget, "_seconds", pretend)
    return batches


def test_time_grows_with_the_square_of_the_batch(probes):
    budget = Budget(7.9)
    budget.note("dense", CASE, 0.5)
    assert budget.predict(DENSE, replace(CASE, batch=2048)) == 2.0
    assert budget.reason_to_skip(DENSE, replace(CASE, batch=2048)) is None
    reason = budget.reason_to_skip(DENSE, replace(CASE, batch=4096))
    assert reason == "predicted 8.0 s a call, more than the 7.9 s of --max-seconds"
    # The last figure counts.
    budget.note("dense", replace(CASE, batch=2048), 1.0)
    assert budget.predict(DENSE, replace(CASE, batch=4096)) == 4.0
    assert probes == []


def test_other_problems_and_contenders_do_not_count(probes):
    budget = Budget(1e6)
    budget.note("dense", CASE, 0.001)
    for case in (replace(CASE, width=32), replace(CASE, dtype="bf16")):
        assert budget.predict(DENSE, case) == 32.0
    assert budget.predict(Contender("other", dense_formula), CASE) == 32.0
    assert probes == [128, 128, 128]


def test_first_batch_is_predicted_from_an_eighth(probes):
    assert Budget(31.0).reason_to_skip(DENSE, CASE).startswith("predicted 32.0 s")
    assert Budget(33.0).reason_to_skip(DENSE, CASE) is None
    assert probes == [128, 128]


def test_batch_too_small_for_an_eighth_is_tried(probes):
    assert Budget(0.1).reason_to_skip(DENSE, replace(CASE, batch=64)) is None
    assert probes == []


def test_without_limit_nothing_is_tried(probes):
    assert Budget(None).reason_to_skip(DENSE, CASE) is None
    assert probes == []


def test_contender_that_fails_is_left_to_the_comparison():
    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")

    assert Budget(1.0).reason_to_skip(Contender("broken", fail), CASE) is None


def test_probe_measures_a_call():
    seconds = Budget(1e6).predict(DENSE, CASE)
    assert 0 < seconds < 1e6
