"""Verdicts of `ActivationRangeMonitor` on planted samples: what raises an alarm, and what not."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mp.callbacks import ActivationRangeMonitor
from lightning_mp.callbacks._rules.records import Sample, StepFacts, Verdict
from lightning_mp.callbacks._step.outputs import OutputKey
from lightning_mp.numerics.tensor_stats import StatField
from lightning_mp.precision import LossScaleConfig
from lightning_mp.precision.loss_scaler import LossScaler

NUMEL = 10_000


@dataclass
class Row:
    """The statistics of one module's output on one rank."""

    amax: float = 1.0
    zeros: float = 0.0
    subnormals: float = 0.0
    non_finite: float = 0.0
    squares: float = 0.0
    numel: float = NUMEL
    kind: str = "activation"
    name: str = "head"
    dtype: torch.dtype = torch.float16

    @property
    def numbers(self) -> list[float]:
        sums = (self.zeros, self.subnormals, self.non_finite, self.squares)
        return [self.amax, *sums, self.numel]


class Run:
    """A monitor, and a precision plugin with the given loss scaler."""

    def __init__(self, scale: float | None = None, *, dynamic: bool = True, **given: Any) -> None:
        self.monitor = ActivationRangeMonitor(**{"every_n_steps": 1} | given)
        config = LossScaleConfig(init_scale=scale or 1.0, dynamic=dynamic)
        scaler = None if scale is None else LossScaler(config)
        plugin = SimpleNamespace(scaler=scaler)
        self.monitor.recorder.trainer = SimpleNamespace(
            log_every_n_steps=0, precision_plugin=plugin
        )
        self.facts = StepFacts(
            step=0, global_step=0, epoch=0, batch_idx=0, rank=0, loss_scale=scale,
            next_loss_scale=scale, skipped=False,
        )  # fmt: skip

    def sample(self, *rows: Row, others: tuple[Row, ...] = (), **facts: Any) -> list[Verdict]:
        """Return the verdicts of a sample; `others` are the rows of a second rank."""
        self.facts = replace(self.facts, step=self.facts.step + 1)
        ranks = [rows, others] if others else [rows]
        array = np.array([[row.numbers for row in rank] for rank in ranks])
        assert array.shape[2] == len(StatField) + 1
        keys = [OutputKey(row.name, row.kind, row.dtype) for row in rows]
        sample = Sample(replace(self.facts, **facts), array, {"keys": keys})
        return self.monitor.judge(sample)


def kinds(verdicts: list[Verdict]) -> list[str]:
    return [verdict.kind for verdict in verdicts]


def test_headroom_is_that_of_the_dtype() -> None:
    run, limit = Run(), 65504 / 4
    assert run.sample(Row(limit)) == []
    (verdict,) = run.sample(Row(1.01 * limit))
    assert (verdict.kind, verdict.tensor) == ("activation_headroom", "head")
    assert verdict.value == pytest.approx(2 - math.log2(1.01))
    assert "fp16" in verdict.tags
    assert run.sample(Row(1.01 * limit, dtype=torch.bfloat16, name="other")) == []
    (verdict,) = run.sample(Row(1e38, dtype=torch.bfloat16, name="other"))
    assert verdict.tags == ("wide",)
    assert run.sample(Row(0.0, zeros=NUMEL, name="zeros")) == []


def test_rank_of_the_largest_value_is_named() -> None:
    (verdict,) = Run().sample(Row(1.0), others=(Row(6e4),))
    assert verdict.rank == 1
    run = Run()
    run.sample(Row(), others=(Row(),))
    (verdict,) = run.sample(Row(6e4), others=(Row(non_finite=3),))
    assert (verdict.kind, verdict.rank, verdict.value) == ("activation_non_finite", 1, 3)


def test_values_that_become_non_finite_are_an_error_but_a_mask_is_not() -> None:
    run = Run()
    mask = Row(non_finite=9, name="mask")
    assert run.sample(Row(), mask) == []
    (verdict,) = run.sample(Row(non_finite=1), mask)
    assert (verdict.kind, verdict.severity) == ("activation_non_finite", "error")
    assert verdict.tensor == "head"


def test_values_that_are_lost_with_the_loss_at_the_first_sample_are_no_mask() -> None:
    loss = Row(kind="loss", name="loss", non_finite=1, numel=1)
    assert kinds(Run().sample(Row(non_finite=1), loss)) == ["activation_non_finite"]


def test_input_of_a_norm_is_judged_by_its_size_alone() -> None:
    stream = Row(kind="norm_input", name="norm")
    run = Run()
    assert run.sample(stream) == []
    assert run.sample(replace(stream, non_finite=5)) == []
    assert run.sample(replace(stream, zeros=5000, subnormals=5000)) == []
    assert kinds(run.sample(replace(stream, amax=6e4))) == ["norm_input_headroom"]


def test_forecast_of_growth_is_part_of_the_verdict() -> None:
    run = Run()
    for at in range(9):
        assert run.sample(Row(2.0 ** (4 + at))) == []
    run.sample(Row(2.0**13))
    (verdict,) = run.sample(Row(2.0**14.5))
    assert verdict.also == ("forecast",)
    assert verdict.numbers["overflow"] in (12, 13)
    (verdict,) = Run().sample(Row(6e4))
    assert verdict.also == ()


def gradient(amax: float = 1.0, **planted: Any) -> Row:
    return Row(amax, kind="output_gradient", **planted)


@pytest.mark.parametrize("scale", [1024.0, None])
def test_gradients_near_overflow_raise_an_alarm_if_no_scale_is_sought(scale: float | None) -> None:
    run = Run(scale=scale, dynamic=False)
    (verdict,) = run.sample(gradient(6e4))
    assert verdict.kind == "output_gradient_headroom"
    # A quarter of the scale has two more bits of headroom.
    expected = "min_scale=0.25, max_scale=0.25" if scale is None else "max_scale=256"
    assert verdict.numbers["limits"] == expected


def test_dynamic_scale_may_rise_until_gradients_overflow_in_one_step() -> None:
    run = Run(scale=1024.0)
    assert run.sample(gradient(6e4)) == []
    bad = gradient(6e4, non_finite=2)
    assert run.sample(bad, skipped=True, next_loss_scale=512.0) == []
    # Not skipped, or no lower scale left.
    assert kinds(run.sample(bad, skipped=False)) == ["output_gradient_non_finite"]
    assert kinds(run.sample(bad, skipped=True, next_loss_scale=1.0)) == [
        "output_gradient_non_finite"
    ]


def test_remedy_for_gradients_of_a_lost_loss_is_not_that_of_a_scale() -> None:
    run = Run(scale=1024.0)
    loss = Row(kind="loss", name="loss", non_finite=1, numel=1)
    run.sample(gradient())
    (verdict,) = run.sample(gradient(non_finite=2), loss, skipped=True, next_loss_scale=512.0)
    assert verdict.tags == ("wide",)


def test_underflow_is_judged_in_fp16_alone() -> None:
    for dtype, expected in ((torch.float16, ["activation_underflow"]), (torch.bfloat16, [])):
        run = Run(baseline_samples=2)
        for _ in range(3):
            assert run.sample(Row(zeros=100, dtype=dtype)) == []
        cut = Row(zeros=3000, subnormals=3000, dtype=dtype)
        assert run.sample(cut) == []  # one odd batch
        assert kinds(run.sample(cut)) == expected


def test_clamped_values_are_counted_since_the_last_sample() -> None:
    run, clamped = Run(), {"kind": "clamped", "name": "head", "numel": 1}
    assert run.sample(Row(0.0, **clamped), others=(Row(0.0, **clamped),)) == []
    (verdict,) = run.sample(Row(3.0, **clamped), others=(Row(4.0, **clamped),))
    assert (verdict.kind, verdict.value, verdict.numbers["total"]) == ("activation_clamped", 7, 7)
    assert run.sample(Row(3.0, **clamped), others=(Row(4.0, **clamped),)) == []
    (verdict,) = run.sample(Row(5.0, **clamped), others=(Row(4.0, **clamped),))
    assert (verdict.value, verdict.numbers["total"]) == (2, 9)


def test_buffers_that_become_non_finite_or_jump_are_named() -> None:
    run, mask = Run(), Row(kind="buffer", name="mask", non_finite=3)
    variance = Row(kind="buffer", name="norm.running_var")
    mean = Row(kind="buffer", name="norm.running_mean")
    assert run.sample(mask, variance, mean) == []
    assert run.sample(mask, replace(variance, amax=100.0), replace(mean, amax=1e9)) == []
    (verdict,) = run.sample(mask, replace(variance, amax=1e9), mean)
    assert (verdict.kind, verdict.tensor) == ("buffer_jump", "norm.running_var")
    assert verdict.numbers["usual"] == 100.0
    lost = replace(mean, non_finite=1)
    (verdict,) = run.sample(mask, variance, mean, others=(mask, variance, lost))
    assert (verdict.kind, verdict.tensor) == ("buffer_non_finite", "norm.running_mean")
    assert (verdict.rank, verdict.severity) == (1, "error")


def test_large_attention_logit_is_an_alarm_at_its_limit() -> None:
    run, logit = Run(max_attention_logit=200.0), {"kind": "attention_logit", "name": "attention"}
    assert run.sample(Row(200.0, **logit), others=(Row(1.0, **logit),)) == []
    (verdict,) = run.sample(Row(1.0, **logit), others=(Row(201.0, **logit),))
    assert (verdict.kind, verdict.threshold, verdict.rank) == ("attention_logit", 200.0, 1)
    assert Run().sample(Row(5e3, kind="output_logit", name="head")) == []


@pytest.mark.parametrize(
    ("kind", "times"), [("output_logit", 8.0), ("attention_entropy", 8.0), ("output_log_z", 4.0)]
)
def test_growth_of_a_level_is_an_alarm_beyond_its_multiple(kind: str, times: float) -> None:
    for grown, expected in ((0.98, []), (1.02, [kind])):
        run, row = Run(), Row(20.0, kind=kind, name="head")
        for _ in range(5):
            assert run.sample(row) == []
        last = np.geomspace(20.0, 20.0 * times * grown, 18).tolist()
        found = [run.sample(replace(row, amax=amax)) for amax in [*last, *[last[-1]] * 4]]
        assert kinds([each for verdicts in found for each in verdicts][:1]) == expected


def test_level_that_has_stopped_growing_is_no_alarm() -> None:
    run, row = Run(), Row(10.0, kind="output_logit", name="head")
    for _ in range(5):
        run.sample(row)
    # Up and down around 400, so that the newest samples have no trend.
    found = [run.sample(replace(row, amax=400.0 + 300 * (-1) ** at)) for at in range(40)]
    assert found[20:] == [[]] * 20


def test_levels_below_50_are_no_alarm() -> None:
    run = Run()
    for amax in np.geomspace(0.1, 49.0, 30).tolist():
        assert run.sample(Row(amax, kind="output_logit", name="head")) == []


def test_experts_without_tokens_are_named_with_their_router() -> None:
    run = Run()
    for at in range(5):
        counts = [1000.0, 1000.0, 4.0, 3.0]
        rows = [
            Row(squares=count, numel=2007.0, kind="expert", name=f"gate[{expert}]", amax=0.0)
            for expert, count in enumerate(counts)
        ]
        found = run.sample(*rows)
        assert kinds(found) == ([] if at < 4 else ["expert_dead"])
    (verdict,) = found
    assert verdict.tensor == "gate[2]"
    assert (verdict.numbers["count"], verdict.numbers["of"]) == (2, 4)
    assert verdict.value == pytest.approx(4 / 2007)
    assert run.sample(*rows) == []  # counts again
