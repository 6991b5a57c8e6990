"""What `SpikeGuard` says of a bad step follows from its loss, its gradient norm and the run."""

import math
from typing import Any

import pytest

from lightning_mp.callbacks._rules.records import StepFacts, Verdict
from lightning_mp.callbacks._rules.spikes import SignalVerdict, describe


def signal(value: float = 1.0, *, spike: bool = False, median: float = 1.0) -> SignalVerdict:
    return SignalVerdict(
        value=value,
        median=median,
        limit=2.0,
        highest=1.5,
        z=7.0 if spike else 0.0,
        is_spike=spike,
        is_finite=math.isfinite(value),
        is_new_level=False,
    )


def verdict(
    loss: SignalVerdict,
    norm: SignalVerdict,
    *,
    first_lr: float | None = 0.1,
    clip_val: float | None = None,
    action: str = "warn",
    **facts: Any,
) -> Verdict:
    known = {"lr": 0.1, "highest_lr": 0.1, "optimizer_name": "SGD", "largest_gradient": "w"}
    step = StepFacts(step=7, global_step=7, epoch=0, batch_idx=7, rank=0, **known | facts)
    return describe(step, loss, norm, first_lr=first_lr, clip_val=clip_val, action=action)


USUAL, HIGH, INF, NAN = signal(), signal(8.0, spike=True), signal(math.inf), signal(math.nan)
GENERAL = ("lower rate", "leave out")


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "kind", "severity", "also"),
    [
        (HIGH, USUAL, None, "loss_spike", "warning", ("usual norm",)),
        (HIGH, HIGH, None, "loss_spike", "warning", ("norm too",)),
        (HIGH, INF, 1024.0, "loss_spike", "warning", ("overflow too",)),
        (HIGH, INF, None, "non_finite_gradient", "error", ()),
        (USUAL, HIGH, None, "gradient_spike", "warning", ()),
        (USUAL, HIGH, 1024.0, "gradient_spike", "warning", ()),
        (USUAL, INF, None, "non_finite_gradient", "error", ()),
        (USUAL, INF, 1024.0, "non_finite_gradient", "info", ("scaler skips",)),
        (NAN, INF, None, "non_finite_loss", "error", ("median before",)),
        (NAN, INF, 1024.0, "non_finite_loss", "error", ("median before",)),
        (signal(math.nan, median=math.nan), INF, None, "non_finite_loss", "error", ()),
    ],
)
def test_cause_is_the_loss_unless_only_the_gradients_are_bad(
    loss: SignalVerdict,
    norm: SignalVerdict,
    scale: float | None,
    kind: str,
    severity: str,
    also: tuple[str, ...],
) -> None:
    found = verdict(loss, norm, loss_scale=scale)
    assert (found.kind, found.severity, found.also) == (kind, severity, also)
    assert found.tensor == ("loss" if "loss" in kind else "w")
    assert found.threshold == (2.0 if "spike" in kind else None)
    if kind != "loss_spike" and severity != "info":
        acted = verdict(loss, norm, loss_scale=scale, action="skip")
        assert acted.also == (*also, "skip")


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        ({}, ("clip", *GENERAL)),
        ({"clip_val": 4.0}, ("clip", *GENERAL)),  # the limit of 2 is below the clip
        ({"clip_val": 1.2, "action": "skip"}, ("lower rate",)),  # clips healthy steps already
        ({"action": "skip"}, ("clip", "lower rate")),
        ({"optimizer_name": "AdamW"}, ("clip", "safe adam", *GENERAL)),
        ({"optimizer_name": "SafeAdamW"}, ("clip", *GENERAL)),
        ({"first_lr": 0.05}, ("clip", "warm up", *GENERAL)),
        ({"first_lr": None}, ("clip", *GENERAL)),
        ({"lr": None}, ("clip", "leave out")),
        ({"highest_lr": 10.0}, ("clip", "leave out")),  # the schedule ends
    ],
)
def test_remedies_of_a_gradient_spike_fit_the_run(
    options: dict[str, Any], remedies: tuple[str, ...]
) -> None:
    assert verdict(USUAL, HIGH, **options).remedies == remedies


def test_gradient_spike_that_clipping_has_limited_is_a_note() -> None:
    found = verdict(USUAL, HIGH, clip_val=2.0)
    assert (found.severity, found.also, found.remedies) == ("info", ("clipped",), ("nothing",))
    assert verdict(HIGH, HIGH, clip_val=2.0).severity == "warning"  # the loss has spiked, too
    assert verdict(USUAL, INF, clip_val=2.0).severity == "error"
    assert verdict(USUAL, INF, clip_val=2.0).remedies == ("locate", *GENERAL)
    assert verdict(USUAL, INF, loss_scale=8.0).remedies == ("rare",)
    assert verdict(HIGH, USUAL).remedies == GENERAL


@pytest.mark.parametrize(("value", "factor"), [(2.5, 2.0), (8.0, 4.0), (100.0, 10.0)])
def test_rate_falls_by_the_factor_by_which_the_limit_is_exceeded(
    value: float, factor: float
) -> None:
    found = verdict(signal(value, spike=True), USUAL)
    assert found.numbers["fitting_rate"] == pytest.approx(0.1 / factor)
    below_zero = signal(-1.0, spike=True)._replace(limit=-2.0)
    assert verdict(below_zero, USUAL).numbers["fitting_rate"] == pytest.approx(0.05)
    assert verdict(NAN, USUAL).numbers["fitting_rate"] == pytest.approx(0.05)
