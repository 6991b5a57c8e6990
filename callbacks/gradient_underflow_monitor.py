"""`GradientUnderflowMonitor`: sees gradients vanish hours before training stops to learn."""

import functools
import math
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments, refuse_values
from lightning_mp.callbacks._rules.ranges import ROUNDING, UnderflowJudge
from lightning_mp.callbacks._rules.records import StepFacts, Verdict
from lightning_mp.callbacks._rules.sentences import usage
from lightning_mp.callbacks._step.sampling import SamplingMonitor, merge_ranks, pack_stats
from lightning_mp.callbacks._step.training_state import is_sharded, loss_scale_of
from lightning_mp.numerics.async_readback import Readback
from lightning_mp.numerics.tensor_stats import StatField

__all__ = ["GradientUnderflowMonitor"]

_ALL = "all gradients"
# At this scale, what is subnormal in bf16 and fp32 (below 2^-126) is what is so in fp16 at 1.
_WIDE_SCALE = 2.0**112


@explains_arguments(checks={"warn_share alarm_share": "(0, 1)"})
class GradientUnderflowMonitor(SamplingMonitor):
    """Warns of gradients that vanish, hours before training stops to learn.

    A loss scaler looks for inf only. Hard batches push its scale down, more gradients fall below
    what fp16 holds, and become zero: without a scale, 23.6% of N(0, 1e-7) gradients do. What counts
    as underflow: docs/callbacks/gradient-underflow-monitor.md.

    Example: `Trainer(callbacks=GradientUnderflowMonitor())`

    Args:
        warn_share: Warns where the share of zeros is more than this above the usual, and rising.
        alarm_share: Alarms where it is more than this above the usual.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Samples at the start that tell what is usual.
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
    def on_before_optimizer_step(self, trainer: pl.Trainer, _: Any, optimizer: Optimizer) -> None:
        if not self.is_due(trainer):
            return
        found = self.recorder.gradients(trainer, optimizer)
        if not found.gradients:
            return
        scale, loss = loss_scale_of(trainer), self.recorder.newest_loss
        held_at = 1.0 if scale is None else scale
        held_at = held_at if _passes_through_fp16(trainer) else _WIDE_SCALE
        # The loss is sent as a tensor of one value: one copy for both.
        last = torch.full((), torch.nan) if loss is None else loss
        packed = pack_stats([*found.gradients, last], scale=held_at, unscale=found.unscale)
        # And the scale behind it: torch's scaler keeps its own on the device, and will change it.
        row = packed.new_empty(1, packed.shape[1])
        if isinstance(scale, Tensor):
            row.copy_(scale.reshape(1, 1))
        else:
            row.fill_(torch.nan if scale is None else scale)
        # Under DDP all ranks hold the same gradients.
        packed = torch.cat([packed, row])
        self.submit(trainer, packed, gather=is_sharded(trainer), names=found.names)

    @override
    def judge(self, trainer: pl.Trainer, sample: Readback) -> None:
        facts: StepFacts = sample.context["facts"]
        # The last rows, as they were sent behind the gradients.
        losses, scale = sample.array[:, -2], _scale_of(sample)
        stats = merge_ranks(sample.context["names"], sample.array[:, :-2])
        numel = max(sum(stats.numels), 1)
        zeros = float(stats.column(StatField.ZEROS).sum() / numel)
        subnormals = float(stats.column(StatField.SUBNORMALS).sum() / numel)
        columns = {"gradient_zero_share": stats.zero_share}
        metrics = {
            "gradient_zero_share": zeros,
            "gradient_subnormal_share": subnormals,
            "gradient_norm": float(np.sqrt(stats.column(StatField.SUM_OF_SQUARES).sum())),
        }
        if _passes_through_fp16(trainer):
            headroom = stats.headroom_bits(scale or 1.0)
            metrics["gradient_headroom_bits"] = min(headroom.values())
            columns["gradient_headroom_bits"] = headroom
        for name, column in columns.items():
            self.history.add_column(name, facts.step, column)
        self.record(trainer, metrics, facts)
        # A loss of exactly 0 has no gradient; with any other one it has been lost.
        is_finite = not losses[:, StatField.NON_FINITE].any()
        if zeros == 1 and is_finite and not losses[:, StatField.AMAX].any():
            return  # a loss of exactly 0, as of a margin that all samples keep
        is_gone = zeros == 1 and is_finite and _passes_through_fp16(trainer)
        judge, prefix = functools.partial(self._rule.judge, is_gone=is_gone), f"{facts.optimizer}:"
        squares = stats.column(StatField.SUM_OF_SQUARES)
        # Too small to be of a gradient at all: as of a bias in front of a norm.
        rms = np.sqrt(squares / np.maximum(np.array(stats.numels), 1))
        is_rounding = rms <= ROUNDING * (np.median(rms[rms > 0]) if rms.any() else 0.0)
        verdicts = [judge(prefix + _ALL, zeros, subnormals)]
        verdicts += [
            judge(prefix + name, share, stats.subnormal_share[name], is_rounding=is_small)
            for (name, share), is_small in zip(stats.zero_share.items(), is_rounding, strict=True)
        ]
        found = [v for v in verdicts if v is not None]
        found.sort(key=lambda v: (v.value or 0) - v.numbers["usual"], reverse=True)
        for underflow in found[:3]:  # the worst name the place; all would only repeat it
            self._say(trainer, sample, underflow, len(found))

    def _say(self, trainer: pl.Trainer, sample: Readback, found: Verdict, count: int) -> None:
        name, scale = str(found.tensor).partition(":")[2], _scale_of(sample)
        # 64 times the scale now, as a power of two, or the largest that fp16 itself could take.
        start = torch.finfo(torch.float16).max if scale is None else scale * 64
        says = "all_gradients_underflow" if name == _ALL else "gradient_underflow"
        # `fp32_modules` takes modules, and neither all of them nor a parameter of the root.
        fix = "" if "." in name else "all_gradients_underflow"
        verdict = replace(
            found,
            kind="gradient_underflow",
            says=says + found.says,
            fix=fix if _passes_through_fp16(trainer) else "gradient_underflow_wide",
            tensor=name,
            numbers={**found.numbers, "count": count},
        )
        numbers = {"owner": name.rpartition(".")[0], "higher_scale": 2 ** int(np.log2(start))}
        self.say(trainer, verdict, sample.context["facts"], **numbers)


def _scale_of(sample: Readback) -> float | None:
    """Return the loss scale of the sampled step, if there was one."""
    scale = float(sample.array[0, -1, 0])
    return None if math.isnan(scale) else scale


def _passes_through_fp16(trainer: pl.Trainer) -> bool:
    # `16-mixed` and `16-true`; all names of bf16 begin with `bf16`.
    return str(trainer.precision_plugin.precision).startswith("16")
