"""`GradientUnderflowMonitor`: sees gradients vanish hours before training stops to learn."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.underflow import UnderflowJudge, Verdict
from lightning_mp.callbacks._step.sampling import SamplingMonitor, merge_ranks, pack_stats
from lightning_mp.callbacks._step.training_state import (
    gradients_of,
    is_sharded,
    loss_scale_of,
    parameter_names,
)
from lightning_mp.numerics.async_readback import Readback
from lightning_mp.numerics.tensor_stats import StatField, TensorStats

__all__ = ["GradientUnderflowMonitor"]

_ALL = "all gradients"
# At this scale, what is subnormal in bf16 and fp32 (below 2^-126) is what is so in fp16 at 1.
_WIDE_SCALE = 2.0**112


@explains_arguments()
class GradientUnderflowMonitor(SamplingMonitor):
    """Watches the share of gradients that are exactly zero, and how far the rest is from it.

    A loss scaler looks for inf only. Hard batches push its scale down, more gradients fall below
    what fp16 holds, and become zero: without a scale, 23.6% of N(0, 1e-7) gradients do. Less than
    1% that does not rise is healthy; beyond 5% failure is near, often hours before it shows.

    One pass over all gradients every `every_n_steps` steps, on unscaled gradients; no host sync.
    Zeros that are usual, as in sparse embeddings, are learnt from the first samples of each tensor;
    zeros without subnormals beside them, as of ReLUs that die, do not count as underflow. For
    gradients that come through fp16, the headroom is log2(65504 / (amax * loss scale)) in bits.

    Logs `instability/gradient_zero_share` and `instability/gradient_subnormal_share` (of all
    values, 0 to 1), `instability/gradient_headroom_bits` (the smallest of all tensors) and
    `instability/gradient_norm`; those of a second optimizer with `_1` at their end.

    Args:
        warn_share: Warns where the share of zeros is more than this above the usual, and rising.
        alarm_share: Alarms where it is more than this above the usual.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Samples at the start that tell what is usual.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range.

    Alarms:
        `gradient_underflow` as a warning or an error, of a tensor or of all gradients together.

    References:
        Mixed Precision Training, arXiv:1710.03740, section 3.2: histograms of vanishing gradients.
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
        super().__init__(
            every_n_steps=every_n_steps,
            baseline_samples=baseline_samples,
            repeat_after_steps=repeat_after_steps,
        )
        if not 0 < warn_share <= alarm_share < 1:
            raise ValueError(
                f"Passed `GradientUnderflowMonitor(warn_share={warn_share!r}, "
                f"alarm_share={alarm_share!r})`. They must be shares between 0 and 1, the first "
                "the lower. Pass 0.01 and 0.05."
            )
        self.warn_share = warn_share
        self.alarm_share = alarm_share
        self._judge_underflow = UnderflowJudge(baseline_samples, warn_share, alarm_share)
        self._names: dict[int, str] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the parameters' names."""
        self._names = parameter_names(pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Sample the gradients of an optimizer."""
        if not self.is_due(trainer):
            return
        found = gradients_of(trainer, optimizer, self._names)
        if not found.gradients:
            return
        scale = loss_scale_of(trainer)
        held_at = 1.0 if scale is None else scale
        if not _passes_through_fp16(trainer):
            held_at = _WIDE_SCALE
        packed = pack_stats(found.gradients, scale=held_at, unscale=found.unscale)
        # A number on the host is known for this step; one on the device belongs to its row.
        self.submit(
            trainer,
            packed,
            gather=is_sharded(trainer),
            names=found.names,
            scale=scale if isinstance(scale, float) else None,
            index=trainer.optimizers.index(_plain(optimizer)),
        )

    @override
    def judge(self, trainer: pl.Trainer, sample: Readback) -> None:
        """Hold a sample against what is usual."""
        stats = merge_ranks(sample.context["names"], sample.array)
        step, is_half = sample.step, _passes_through_fp16(trainer)
        zeros, subnormals, numel = (
            stats.column(StatField.ZEROS).sum(),
            stats.column(StatField.SUBNORMALS).sum(),
            max(sum(stats.numels), 1),
        )
        headroom = stats.headroom_bits(sample.context["scale"] or 1.0)
        tensors = list(stats.zero_share)
        self.history.add_column("gradient zero share", step, tensors, [*stats.zero_share.values()])
        metrics = {
            "instability/gradient_zero_share": float(zeros / numel),
            "instability/gradient_subnormal_share": float(subnormals / numel),
            "instability/gradient_norm": float(
                np.sqrt(stats.column(StatField.SUM_OF_SQUARES).sum())
            ),
        }
        if is_half:
            lowest = min(headroom.values())
            metrics["instability/gradient_headroom_bits"] = lowest
            self.history.add_column("gradient headroom (bits)", step, tensors, [*headroom.values()])
        if sample.context["index"]:  # of a second optimizer
            metrics = {f"{k}_{sample.context['index']}": v for k, v in metrics.items()}
        for name, value in metrics.items():
            self.history.add_point(name.removeprefix("instability/"), step, value)
        self.log_metrics(trainer, {k: v for k, v in metrics.items() if np.isfinite(v)}, step)
        self._look_for_underflow(
            trainer, sample, stats, float(zeros / numel), float(subnormals / numel)
        )

    def _look_for_underflow(
        self,
        trainer: pl.Trainer,
        sample: Readback,
        stats: TensorStats,
        zero_share: float,
        subnormal_share: float,
    ) -> None:
        judge, subnormals = self._judge_underflow.judge, stats.subnormal_share
        prefix = f"{sample.context['index']}:"
        verdicts = [judge(prefix + _ALL, zero_share, subnormal_share)]
        verdicts += [judge(prefix + n, z, subnormals[n]) for n, z in stats.zero_share.items()]
        found = [v for v in verdicts if v is not None]
        found.sort(key=lambda v: v.zero_share - v.usual_share, reverse=True)
        for verdict in found[:3]:  # the worst name the place; all would only repeat it
            self._say(trainer, sample, verdict, len(found))

    def _say(self, trainer: pl.Trainer, sample: Readback, verdict: Verdict, count: int) -> None:
        name = verdict.name.partition(":")[2]
        scale = sample.context["scale"]
        what = f"the gradient of `{name}`" if name != _ALL else "all gradients"
        self.alarm(
            trainer,
            "gradient_underflow",
            f"{verdict.zero_share:.1%} of {what} is exactly zero, against at most "
            f"{verdict.usual_share:.1%} at the start, more than {verdict.threshold:.0%} above it; "
            f"{count} such tensors.",
            _remedy(trainer, scale, name),
            step=sample.step,
            severity="error" if verdict.is_alarm else "warning",
            tensor=name,
            value=verdict.zero_share,
            threshold=verdict.usual_share + verdict.threshold,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what is usual, and what the base keeps."""
        return {**super().state_dict(), "usual": self._judge_underflow.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        super().load_state_dict(state_dict)
        self._judge_underflow.load_state_dict(state_dict["usual"])


def _plain(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _passes_through_fp16(trainer: pl.Trainer) -> bool:
    precision = str(trainer.precision_plugin.precision)
    return precision.startswith("16")


def _remedy(trainer: pl.Trainer, scale: float | None, name: str) -> str:
    if not _passes_through_fp16(trainer):
        return (
            "Nothing reaches the parameter any more: check that its branch is used, and lower the "
            "learning rate if its activations have died."
        )
    start = torch.finfo(torch.float16).max if scale is None else scale * 64
    owner = name.rpartition(".")[0] or name
    return (
        f"Raise the loss scale, by LossScaleConfig(init_scale={2 ** int(np.log2(start)):g}), keep "
        f"the module in fp32 by fp32_modules=['norm', '{owner}'], or train with half='bf16'."
    )
