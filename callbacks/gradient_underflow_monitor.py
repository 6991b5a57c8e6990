"""`GradientUnderflowMonitor`: warns of gradients that underflow before training stops learning."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_mp._arguments import explains_arguments, refuse_values
from lightning_mp.callbacks._rules.records import Sample, Verdict
from lightning_mp.callbacks._rules.underflow import ROUNDING, UnderflowJudge, origin_of
from lightning_mp.callbacks._step.sampling import SamplingMonitor, merge_ranks, pack_stats
from lightning_mp.callbacks._step.training_state import TrainingStep, is_fp16, loss_scale_of
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.numerics.tensor_stats import StatField
from lightning_mp.precision.loss_scale_config import LossScaleConfig

__all__ = ["GradientUnderflowMonitor"]

_ALL = "all gradients"
# Multiplied by this scale, subnormals of bf16 and fp32 (below 2^-126) are subnormals of fp16.
_WIDE_SCALE = 2.0**112


@explains_arguments(checks={"warn_share alarm_share": "(0, 1)"})
class GradientUnderflowMonitor(SamplingMonitor):
    """Warns of gradients that underflow, hours before training stops learning.

    A loss scaler looks for inf only. Hard batches push its scale down, so that more gradients fall
    below the range of fp16 and become zero: without a scale, 23.6% of N(0, 1e-7) gradients do.
    Definition of underflow: docs/callbacks/gradient-underflow-monitor.md.

    Example: `Trainer(callbacks=GradientUnderflowMonitor())`

    Args:
        warn_share: Excess of the share of zeros over the baseline that raises a warning if the
            share is rising.
        alarm_share: Excess that raises an error in any case.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Number of first samples that form the baseline.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        warn_share: float = 0.01,
        alarm_share: float = 0.05,
        every_n_steps: int = 50,
        baseline_samples: int = 10,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(every_n_steps, baseline_samples, repeat_after_steps)
        if warn_share > alarm_share:
            shares = {"warn_share": warn_share, "alarm_share": alarm_share}
            refuse_values(self, usage("shares"), **shares)
        self.warn_share = warn_share
        self.alarm_share = alarm_share
        self._rule = UnderflowJudge(baseline_samples, warn_share, alarm_share, is_absolute=True)

    @override
    def observe(self, step: TrainingStep) -> Tensor | None:
        found = step.found if self.is_due(step.facts.step) else None
        if found is None or not found.gradients:
            return None
        scale = loss_scale_of(step.trainer)
        held_at = 1.0 if scale is None else scale
        held_at = held_at if is_fp16(self.recorder.trainer) else _WIDE_SCALE
        last = torch.full((), torch.nan) if step.loss is None else step.loss
        packed = pack_stats([*found.gradients, last], scale=held_at, unscale=found.unscale)
        # Under DDP all ranks hold the same gradients.
        return step.gather(packed, shards_only=True, names=found.names)

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        facts, names = sample.facts, sample.context["names"]
        losses = sample.array[:, -1]  # a row after those of the gradients
        stats = merge_ranks(names, sample.array[:, :-1])
        numel = max(sum(stats.numels), 1)
        zeros = float(stats.column(StatField.ZEROS).sum() / numel)
        subnormals = float(stats.column(StatField.SUBNORMALS).sum() / numel)
        squares = stats.column(StatField.SUM_OF_SQUARES)
        self.history.add_column("gradient_zero_share", facts.step, stats.zero_share)
        metrics = {
            "gradient_zero_share": zeros,
            "gradient_subnormal_share": subnormals,
            "gradient_norm": float(np.sqrt(squares.sum())),
        }
        if is_fp16(self.recorder.trainer):
            headroom = stats.headroom_bits(facts.loss_scale or 1.0)
            metrics["gradient_headroom_bits"] = min(headroom.values())
            self.history.add_column("gradient_headroom_bits", facts.step, headroom)
        self.record(metrics, facts)
        # A loss of exactly 0 has no gradient; with any other loss the gradient was lost.
        is_finite = not losses[:, StatField.NON_FINITE].any()
        if zeros == 1 and is_finite and not losses[:, StatField.AMAX].any():
            return []  # for example a hinge loss without violated margins
        is_gone = zeros == 1 and is_finite and is_fp16(self.recorder.trainer)
        # Pure rounding error, for example the gradient of a bias before a norm.
        rms = np.sqrt(squares / np.maximum(np.array(stats.numels), 1))
        is_rounding = rms <= ROUNDING * (np.median(rms[rms > 0]) if rms.any() else 0.0)
        rows: list[tuple[str, Any, Any, Any]] = [(_ALL, zeros, subnormals, False)]
        shares_of = (stats.zero_share.values(), stats.subnormal_share.values(), is_rounding)
        rows += zip(names, *shares_of, strict=True)
        worst = []
        for name, *shares in rows:
            found = self._rule.judge(f"{facts.optimizer}:{name}", *shares, is_gone=is_gone)
            worst += [replace(found, tensor=name)] if found is not None else []
        worst.sort(key=lambda v: (v.value or 0) - v.numbers["usual"], reverse=True)
        # If units have died, earlier modules have no gradient because of them.
        gone = {name for name, share in stats.zero_share.items() if share == 1}
        origin = None if zeros == 1 else origin_of(gone, names)
        named = [v for v in worst if v.value != 1 or str(v.tensor).rpartition(".")[0] == origin]
        worst = worst if origin is None or not named else named
        # The worst tensors name the place; the others would only repeat it.
        count = sum(v.tensor != _ALL for v in worst)
        return [_worded(v, facts.loss_scale).given(count=count) for v in worst[:3]]


def _worded(found: Verdict, scale: float | None) -> Verdict:
    name = str(found.tensor)
    # 64 times the present scale as a power of two, or the largest scale that fp16 can hold. The
    # scale of torch can reach 0.
    start = scale * 64 if scale else torch.finfo(torch.float16).max
    # `fp32_modules` accepts neither all modules nor a parameter of the root.
    remedy = "all" if name == _ALL or "." not in name else "one"
    found = replace(found, kind="gradient_underflow", tags=(*found.tags, remedy))
    higher = 2 ** max(int(np.log2(start)), 0)
    limits = f"init_scale={higher:g}"
    limits += f", max_scale={higher:g}" * (higher > LossScaleConfig.max_scale)
    return found.given(owner=name.rpartition(".")[0], limits=limits)
