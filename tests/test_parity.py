"""The criterion of `tests.parity` accepts rounding differences and rejects defects."""

import functools
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import SGD

from tests.parity import BITS, Parity, Rounded, student_quantile
from tests.precision.models import Regression, fit, loader

BATCHES = 16


def train(seed: int, plugin: Any, nudge: float = 0.0) -> float:
    """Return the loss over all data; the initial weights are perturbed by a relative `nudge`."""
    model, data = Regression(make_optimizer=lambda p: SGD(p, lr=0.03), seed=seed), loader(BATCHES)
    for p in model.parameters():
        p.data *= 1 + nudge * (2 * torch.rand_like(p) - 1)
    fit(model, plugin, data)
    with torch.no_grad():
        return statistics.fmean(model.loss(batch).item() for batch in data)


PARITY = Parity(train)


def log_ratios(losses: list[float], in_fp32: list[float]) -> list[float]:
    return [math.log(a / b) for a, b in zip(losses, in_fp32, strict=True)]


# --- defects, which must fail --------------------------------------------------------------------


class WrongScale(Rounded):
    """Computes gradients that are `factor` times too large."""

    def __init__(self, half: str, factor: float) -> None:
        super().__init__(half)
        self.factor = factor

    def backward(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor * self.factor, *args, **kwargs)


class LosesSteps(Rounded):
    """Skips one step in ten."""

    steps = 0

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps % 10 == 0:
            return closure()
        return super().optimizer_step(optimizer, model, closure, **kwargs)


class Diverges(Rounded):
    """Makes one gradient NaN."""

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        optimizer.param_groups[0]["params"][0].data[0] = math.nan
        return result


DEFECTS: dict[str, Callable[[str], Precision]] = {
    "gradients twice as large": lambda half: WrongScale(half, 2.0),
    "gradients a tenth too large": lambda half: WrongScale(half, 1.1),
    "one step in ten lost": LosesSteps,
    "a weight is NaN": Diverges,
}


@pytest.mark.slow
@pytest.mark.parametrize("half", BITS)
@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_fails_the_comparison(defect: str, half: str) -> None:
    verdict = PARITY.judge(functools.partial(DEFECTS[defect], half), half)
    assert not verdict.holds, verdict


# --- rounding, which must pass -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("half", BITS)
def test_rounding_passes_on_seeds_that_were_not_calibrated(half: str) -> None:
    others = [[train(seed, plugin) for seed in range(100, 103)] for plugin in (Rounded(half), None)]
    losses = [f * math.exp(e) for f, e in zip(PARITY.in_fp32(), log_ratios(*others), strict=False)]
    verdict = PARITY.judge(lambda: None, half, train=lambda seed, _: losses[seed])
    assert verdict.holds, verdict
    assert verdict.excess != 0
    assert f"{verdict.excess:+.4%}" in str(verdict)
    assert f"{verdict.bound:.4%}" in str(verdict)


@pytest.mark.slow
def test_fp32_scatters_less_than_half_precision() -> None:
    """The scatter of fp32 is too small to serve as the tolerance of half precision."""
    nudged = [train(seed, None, nudge=1e-6) for seed in range(3)]
    apart = log_ratios(nudged, PARITY.in_fp32()[:3])
    verdict = PARITY.judge(lambda: None, "fp16")
    assert 0 < max(map(abs, apart)) < 0.1 * verdict.noise


@pytest.mark.parametrize("half", BITS)
def test_rounded_reads_half_precision_and_steps_in_fp32(half: str) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[half]
    seen: list[torch.Tensor] = []

    class RecordsWeights(Regression):
        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            # One exact product of rounded operands, which therefore shows their bits.
            seen.append((self.network[0].weight * 1.0).detach().clone())
            return super().loss(batch)

    model = RecordsWeights()
    start = model.network[0].weight.detach().clone()
    fit(model, Rounded(half), loader(1))
    # The two round ties differently; none of the 128 weights is a tie.
    assert torch.equal(seen[0], start.to(dtype).float())
    after = model.network[0].weight
    assert not torch.equal(after, after.to(dtype).float())


# --- the statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "probability", "expected"), [(2, 0.05, 4.303), (7, 0.001, 5.408), (30, 0.01, 2.750)]
)
def test_quantiles_equal_published_tables(
    freedom: int, probability: float, expected: float
) -> None:
    assert student_quantile(freedom, probability) == pytest.approx(expected, abs=5e-4)


@pytest.mark.slow
def test_false_alarm_rate_is_below_its_bound() -> None:
    draw, trials, rate = random.Random(0), 2000, 0.1

    def scatter(seed: int, plugin: Any) -> float:
        return math.exp(0.01 * draw.gauss()) if plugin else 1.0

    def alarm() -> bool:
        parity = Parity(scatter, references=4, false_alarm=rate)
        return not parity.judge(lambda: True, "fp16").holds

    alarms = sum(alarm() for _ in range(trials))
    # The added cost makes false alarms rarer than the nominal rate; 5 standard errors of a count.
    assert 0 < alarms < trials * rate + 5 * math.sqrt(trials * rate * (1 - rate))
