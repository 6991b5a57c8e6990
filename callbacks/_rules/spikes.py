"""Detects spikes of loss and gradient norm on the device, and describes them as verdicts.

Legend: K signals, N places in the window.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_mp.callbacks._rules.course import SIGMA_PER_MAD
from lightning_mp.callbacks._rules.records import Severity, StepFacts, Verdict

__all__ = ["RobustWindow", "SignalVerdict", "describe", "is_slight"]

_REACH = 2.0  # least height of a spike in units of (highest healthy value - median)
_MAX_Z = 1e4  # keeps plots of z readable
_SLIGHT = 0.1  # share of the improvement since the highest level


class SignalVerdict(NamedTuple):
    """Result of a window: tensors or arrays over all signals, or numbers of one signal."""

    value: Any  # measured value
    median: Any  # median of the window; NaN if the window is empty
    limit: Any  # values above are spikes
    highest: Any  # the highest value in the window
    z: Any  # robust deviations above the median; NaN if the window has too few values
    is_spike: Any
    is_finite: Any
    is_new_level: Any  # whether `patience` spikes are reached, so that the window starts again


class RobustWindow:
    """Detects spikes by a one-sided score from median and MAD of the last healthy values.

    A value x is a spike if
    z = (log x - median(log w)) / max(1.4826 MAD(log w), reach, floor) > z_threshold, where reach is
    2 / z_threshold times the distance from the median to the highest value. `floors` are relative.
    There is no host sync. docs/callbacks/spike-guard.md explains the score.
    """

    def __init__(
        self,
        floors: tuple[float, ...],
        *,
        size: int = 128,
        min_values: int = 64,
        z_threshold: float = 6.0,
        patience: int = 16,
    ) -> None:
        self.min_values = min_values
        self.z_threshold = z_threshold
        self.patience = patience
        # NumPy arrays, or tensors after `judge` of a tensor.
        self._floors_k: Any = np.array(floors, np.float32)
        self._values_kn: Any = np.full((len(floors), size), np.nan, np.float32)  # latest last
        self._streak_k: Any = np.zeros(len(floors), np.int64)  # consecutive spikes
        # The highest median so far.
        self.highest_k: Any = np.full(len(floors), -np.inf, np.float32)

    def judge(self, values_k: Any, spread: float = 1.0) -> SignalVerdict:
        """Judge the fp32 signals of a step, and add healthy values to the window.

        Signals are a tensor on any device, or a NumPy array, which takes the host less time. A
        signal that the step lacks is 0. `spread` multiplies the deviation.
        """
        if type(self._values_kn) is not type(values_k) or (
            isinstance(values_k, Tensor) and self._values_kn.device != values_k.device
        ):
            for name in ("_floors_k", "_values_kn", "_streak_k", "highest_k"):
                is_tensor = isinstance(values_k, Tensor)
                where = values_k.device if is_tensor else "cpu"
                held = torch.as_tensor(getattr(self, name), device=where)
                setattr(self, name, held if is_tensor else held.numpy())
        xp: Any = torch if isinstance(values_k, Tensor) else np
        with np.errstate(all="ignore"):
            verdict, judged_k = self._judge_values(xp, values_k, spread)
        is_spike_k, is_new_k = verdict.is_spike, verdict.is_new_level
        is_healthy_k = verdict.is_finite & ~is_spike_k & judged_k
        moved_kn = xp.concatenate([self._values_kn[:, 1:], values_k[:, None]], 1)
        values_kn = xp.where(is_healthy_k[:, None], moved_kn, self._values_kn)
        self._values_kn = xp.where(is_new_k[:, None], math.nan, values_kn)
        self._streak_k = (self._streak_k + is_spike_k) * ~(is_healthy_k | is_new_k)
        return verdict

    def _judge_values(self, xp: Any, values_k: Any, spread: float) -> tuple[SignalVerdict, Any]:
        """Return the verdict and the judged signals; `xp` is `torch` or `numpy`."""
        # A loss of exactly 0 is not judged: no sample of the batch violates its margin.
        judged_k = values_k != 0
        # `nanmedian` raises on CUDA with deterministic algorithms, so sort.
        sorted_kn = _sorted(self._values_kn)  # NaN (no value) is sorted last
        count_k = xp.isfinite(self._values_kn).sum(1)
        last_k1 = (count_k - 1).clip(0)[:, None]
        # In logarithms, noise proportional to the level has the same size throughout training. A
        # loss that may be negative is judged without logarithm.
        is_positive_k = sorted_kn[:, 0] > 0
        to_log_kn = xp.where(is_positive_k[:, None], xp.log(sorted_kn), sorted_kn)
        center_k, highest_k = _taken(to_log_kn, last_k1 // 2), _taken(to_log_kn, last_k1)
        mad_k = _taken(_sorted(xp.abs(to_log_kn - center_k[:, None])), last_k1 // 2)
        floor_k = xp.where(is_positive_k, self._floors_k, self._floors_k * xp.abs(center_k))
        reach_k = _REACH * (highest_k - center_k) / self.z_threshold
        sigma_k = xp.maximum(SIGMA_PER_MAD * mad_k, xp.maximum(floor_k, reach_k)) * spread
        # The log of a nonpositive value is -inf or NaN; such a value is not a spike.
        x_k = xp.where(is_positive_k, xp.log(values_k), values_k)
        # A loss that is mostly zero, such as a hinge loss, has no usable deviation.
        is_known_k = (count_k >= self.min_values) & (is_positive_k | (mad_k > 0)) & judged_k
        z_k = ((x_k - center_k) / sigma_k).clip(-_MAX_Z, _MAX_Z)
        is_finite_k = xp.isfinite(values_k) | ~judged_k
        is_spike_k = is_known_k & is_finite_k & (z_k > self.z_threshold)
        limit_k = center_k + self.z_threshold * sigma_k
        median_k = xp.where(is_positive_k, xp.exp(center_k), center_k)
        known_k = xp.where(is_known_k, median_k, -math.inf)
        self.highest_k = xp.maximum(self.highest_k, known_k)
        verdict = SignalVerdict(
            value=values_k,
            median=median_k,
            limit=xp.where(is_positive_k, xp.exp(limit_k), limit_k),
            highest=_taken(sorted_kn, last_k1),
            z=xp.where(is_known_k & is_finite_k, z_k, math.nan),
            is_spike=is_spike_k,
            is_finite=is_finite_k,
            is_new_level=is_spike_k & (self._streak_k + 1 >= self.patience),
        )
        return verdict, judged_k

    def state_dict(self) -> dict[str, Any]:
        known = {"values": self._values_kn, "streak": self._streak_k, "highest": self.highest_k}
        return {name: torch.as_tensor(values, device="cpu") for name, values in known.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the window of a checkpoint; a window of another size is ignored."""
        state = {name: tensor.cpu().clone().numpy() for name, tensor in state_dict.items()}
        if state["values"].shape == self._values_kn.shape:
            self._values_kn = state["values"]
            self._streak_k = state.get("streak", self._streak_k)
            self.highest_k = state.get("highest", self.highest_k)


def _sorted(values_kn: Any) -> Any:
    return values_kn.sort(1).values if isinstance(values_kn, Tensor) else np.sort(values_kn, 1)


def _taken(values_kn: Any, place_k1: Any) -> Any:
    """Return one value of every row."""
    if isinstance(values_kn, Tensor):
        return values_kn.gather(1, place_k1)[:, 0]
    return values_kn[np.arange(len(values_kn)), place_k1[:, 0]]


def is_slight(verdict: SignalVerdict, highest: Any) -> Any:
    """Return whether a loss spike is negligible, such as one odd sample at a loss near 0."""
    # One odd sample of 32 can then be 30 times the median, with a normal gradient norm.
    median = verdict.median[0]
    is_usual = ~verdict.is_spike[1] & verdict.is_finite[1]
    return is_usual & (verdict.value[0] - median < _SLIGHT * (highest - median))


def describe(
    facts: StepFacts,
    loss: SignalVerdict,
    norm: SignalVerdict,
    *,
    first_lr: float | None,
    clip_val: float | None,
    action: str,
) -> Verdict:
    """Return the verdict of a step with a non-finite value or a spike.

    `first_lr` is the learning rate some steps before, `clip_val` the Trainer's `gradient_clip_val`.
    """
    largest, is_scaled = str(facts.largest_gradient), facts.loss_scale is not None
    # With a loss scale, a loss spike also overflows the gradients; report the loss.
    is_of_loss = not loss.is_finite or (loss.is_spike and (norm.is_finite or is_scaled))
    kind, worse, name = (
        ("loss_spike", loss, "loss") if is_of_loss else ("gradient_spike", norm, largest)
    )
    limit: float | None = worse.limit
    severity: Severity = "warning"
    also: tuple[str, ...] = () if action == "warn" else (action,)
    general = ["lower rate"] if facts.lr and not facts.is_rate_ending else []
    general += ["leave out"] if action == "warn" else []
    remedies = (*_remedies(facts, norm, first_lr, clip_val), *general)
    if not worse.is_finite:
        kind = "non_finite_loss" if is_of_loss else "non_finite_gradient"
        limit, severity, remedies = None, "error", ("locate", *general)
        if is_of_loss and not math.isnan(loss.median):
            also = ("median before", *also)
        if is_scaled and not is_of_loss:
            severity, also, remedies = "info", ("scaler skips",), ("rare",)
    # A spike that clipping has limited is a note.
    elif not is_of_loss and action == "warn" and clip_val and norm.limit >= clip_val:
        severity, also, remedies = "info", ("clipped",), ("nothing",)
    elif is_of_loss:
        about_norm = "usual norm" if norm.is_finite else "overflow too"
        also = ("norm too" if norm.is_spike else about_norm, *also)
    found = Verdict(kind, worse.value, limit, severity, name, (), also, remedies)
    # Lower the rate by the factor by which the value exceeds the limit, from 2 to 10.
    excess = worse.value / limit if limit is not None and limit > 0 else 2.0
    found = found.given(rate=facts.lr, fitting_rate=(facts.lr or 0) / min(max(excess, 2.0), 10.0))
    found = found.given(median=worse.median, z=worse.z, norm=norm.value, norm_limit=norm.limit)
    found = found.given(largest=largest, largest_norm=facts.largest_gradient_norm)
    return found.given(clip=clip_val, clip_val=norm.highest, step=facts.step, longer=2 * facts.step)


def _remedies(
    facts: StepFacts, norm: SignalVerdict, first_lr: float | None, clip_val: float | None
) -> list[str]:
    """Return keys of remedies, with values that do not affect the healthy steps of the window."""
    remedies, lr = [], facts.lr
    if norm.is_spike and (not clip_val or clip_val > norm.highest):
        remedies.append("clip")
    if norm.is_spike and "Adam" in facts.optimizer_name and facts.optimizer_name != "SafeAdamW":
        remedies.append("safe adam")
    # A learning rate that has risen within the window is a warm-up.
    if lr and first_lr is not None and lr > 1.01 * first_lr:
        remedies.append("warm up")
    return remedies
