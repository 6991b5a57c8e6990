"""`AdamStateMonitor`: sees Adam's second moments starve before the step that they let explode."""

import math
import statistics
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.adam_statistics import (
    AdamField,
    adam_statistics,
    has_second_moments,
)
from lightning_mp.callbacks._step.sampling import SamplingMonitor
from lightning_mp.callbacks._step.training_state import (
    gradients_of,
    is_sharded,
    lower_rate,
    parameter_names,
    plain_name,
)
from lightning_mp.numerics.async_readback import Readback

__all__ = ["AdamStateMonitor"]


@explains_arguments()
class AdamStateMonitor(SamplingMonitor):
    r"""Watches how far Adam's next update is from what its second moment expects.

    After 1000 steps with a gradient of zero the old gradient makes an update 1.65 times as long as
    before, after 5000 steps 11 times, after 10000 steps 31 times: the second moment has starved. An
    update RMS of 2.3 and more in an embedding has been seen 1 to 8 steps before loss spikes.

    .. math::
        \mathrm{RMS} = \sqrt{\mathrm{mean}(g^2 / \max(\hat v, \epsilon^2))}

    Sampled right before a step, every `every_n_steps` steps, without a host sync, for every
    optimizer that keeps `exp_avg` and `exp_avg_sq`. After a sample with a high RMS the next four
    steps are sampled too, and a second one raises the alarm: one odd batch does not. What is usual
    for a tensor, such as a high RMS for an embedding whose rows are seldom used, is learnt from the
    first samples.

    Logs `instability/update_rms` (the largest of all tensors), `instability/below_epsilon_share`
    (of the values whose gradient is not 0) and `instability/update_to_weight` (the largest ratio
    of norms); those of a second optimizer with `_1` at their end.

    Args:
        max_update_rms: Warns where the RMS of a tensor is above, if it is also 1.5 times above
            the highest of the first samples and 3 times above the median of the newest 32. For a
            tensor of n values it is multiplied by 1 + 10 / sqrt(n), as few values scatter more.
        max_below_epsilon: Warns where `sqrt(v_hat) < eps` for a larger share of a tensor than
            this, above the usual; there epsilon sets the step, and Adam adapts no more.
        zero_run_steps: Warns when a tensor that had gradients has had none for so many steps.
        min_ratio: Warns where the norm of the update is a smaller part of that of the weights.
        max_ratio: Warns where it is a larger one.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Samples at the start that tell what is usual.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range.

    Alarms:
        `update_rms`, `below_epsilon`, `zero_run`, `update_to_weight`. Of several tensors with a
        high RMS, embeddings are named first, then the first and the last layer.

    References:
        - Stable and low-precision training for large-scale vision-language models,
          arXiv:2304.13013
        - Adafactor, arXiv:1804.04235, section 5
        - Rules for weight updates: Amazon SageMaker Debugger, `WeightUpdateRatio`
    """

    def __init__(
        self,
        *,
        max_update_rms: float = 2.3,
        max_below_epsilon: float = 0.05,
        zero_run_steps: int = 500,
        min_ratio: float = 1e-8,
        max_ratio: float = 10.0,
        every_n_steps: int = 100,
        baseline_samples: int = 10,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(
            every_n_steps=every_n_steps,
            baseline_samples=baseline_samples,
            repeat_after_steps=repeat_after_steps,
        )
        for name, value in (
            ("max_update_rms", max_update_rms),
            ("max_below_epsilon", max_below_epsilon),
            ("zero_run_steps", zero_run_steps),
            ("min_ratio", min_ratio),
            ("max_ratio", max_ratio),
        ):
            if not value > 0:
                raise ValueError(
                    f"Passed `AdamStateMonitor({name}={value!r})`. `{name}` must be above 0. Leave "
                    "it out for the default."
                )
        self.max_update_rms = max_update_rms
        self.max_below_epsilon = max_below_epsilon
        self.zero_run_steps = zero_run_steps
        self.min_ratio = min_ratio
        self.max_ratio = max_ratio
        self._names: dict[int, str] = {}
        self._first: list[str] = []  # tensors to name first
        # Of each tensor: samples, highest RMS and highest share below epsilon at the start, the
        # newest RMS values, the step from which on its gradient has been zero, or None, and whether
        # it ever was not.
        self._usual: dict[str, dict[str, Any]] = {}
        self._highest_rate = 0.0
        self._suspects: dict[str, int] = {}  # the step of a high RMS that waits for a second
        self._extra_samples = 0

    @override
    def is_due(self, trainer: pl.Trainer) -> bool:
        """Return whether to sample now: also in the steps after one with a high RMS."""
        if self._extra_samples > 0:
            self._extra_samples -= 1
            return True
        return super().is_due(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the parameters' names, and which of them matter first."""
        self._names = parameter_names(pl_module)
        embeddings = [
            plain_name(f"{path}.weight")
            for path, module in pl_module.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        ]
        names = list(dict.fromkeys(self._names.values()))
        self._first = [*embeddings, *names[:1], *names[-2:]]
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        if not any("betas" in group and "eps" in group for group in groups):
            rank_zero_warn(
                "Passed `AdamStateMonitor`, but no optimizer has `betas` and `eps`. It watches "
                "Adam and optimizers with its states. Leave it out, or train with one."
            )

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Sample what the step to come will do."""
        if not self.is_due(trainer):
            return
        found = gradients_of(trainer, optimizer, self._names)
        chosen = [i for i, p in enumerate(found.parameters) if has_second_moments(optimizer, p)]
        if is_sharded(trainer) and "betas" in optimizer.param_groups[0]:
            # A rank may hold no part of a parameter, and so no state; all must send the same rows.
            chosen = list(range(len(found.parameters)))
        if not chosen:
            return
        sums_NK = adam_statistics(
            optimizer,
            [found.parameters[i] for i in chosen],
            [found.gradients[i] for i in chosen],
            found.unscale,
        )
        group = optimizer.param_groups[0]
        self.submit(
            trainer,
            sums_NK,
            gather=is_sharded(trainer),
            names=[found.names[i] for i in chosen],
            index=trainer.optimizers.index(getattr(optimizer, "optimizer", optimizer)),
            rate=group["lr"] if isinstance(group["lr"], float) else None,
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
        )

    @override
    def judge(self, trainer: pl.Trainer, sample: Readback) -> None:
        """Hold a sample against the limits and against what is usual."""
        names, step = sample.context["names"], sample.step
        sums_NK = sample.array.sum(axis=0)
        count = np.maximum(sums_NK[:, AdamField.NUMEL], 1)
        moving = np.maximum(sums_NK[:, AdamField.NON_ZERO], 1)
        rms = np.sqrt(sums_NK[:, AdamField.SQUARED_RATIO] / count)
        below = sums_NK[:, AdamField.BELOW_EPSILON] / moving
        weight = np.sqrt(sums_NK[:, AdamField.SQUARED_WEIGHT])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.sqrt(sums_NK[:, AdamField.SQUARED_UPDATE]) / weight
        ratio[weight == 0] = np.nan
        self.history.add_column("update RMS", step, names, rms.tolist())
        metrics = {
            "instability/update_rms": float(rms.max()),
            "instability/below_epsilon_share": float(below.max()),
        }
        if np.isfinite(ratio).any():
            metrics["instability/update_to_weight"] = float(np.nanmax(ratio))
        if sample.context["index"]:  # of a second optimizer
            metrics = {f"{k}_{sample.context['index']}": v for k, v in metrics.items()}
        for name, value in metrics.items():
            self.history.add_point(name.removeprefix("instability/"), step, value)
        self.log_metrics(trainer, metrics, step)
        high: list[tuple[str, float, float]] = []
        for i, name in enumerate(names):
            # What is not finite is an event of its own, for other monitors.
            if sums_NK[i, AdamField.NUMEL] and not sums_NK[i, AdamField.NON_FINITE]:
                is_zero = not sums_NK[i, AdamField.NON_ZERO]
                # The RMS of few values is noisy, the more so as those of a bias move together.
                limit = self.max_update_rms * (1 + 10 / math.sqrt(count[i]))
                numbers = float(rms[i]), limit, float(below[i]), float(ratio[i])
                high += self._judge_tensor(trainer, sample, name, is_zero, *numbers)
        if high:
            self._say_rms(trainer, step, high)

    def _judge_tensor(
        self,
        trainer: pl.Trainer,
        sample: Readback,
        name: str,
        is_zero: bool,
        rms: float,
        limit: float,
        below: float,
        ratio: float,
    ) -> list[tuple[str, float, float]]:
        """Judge one tensor; return it with its RMS and the limit if that is too high."""
        usual = self._usual_of(name)
        self._judge_zero_run(trainer, sample, name, is_zero)
        newest = usual["newest"] = [*usual["newest"], rms][-32:]
        if usual["samples"] <= self.baseline_samples:
            usual["rms"] = max(usual["rms"], rms)
            usual["below"] = max(usual["below"], below)
            return []
        if below > usual["below"] + self.max_below_epsilon:
            self._say_below_epsilon(trainer, sample, name, below)
        if not is_zero:
            self._judge_ratio(trainer, sample, name, ratio)
        limit = max(limit, 1.5 * usual["rms"], 3 * statistics.median(newest))
        return [(name, rms, limit)] if rms > limit else []

    def _usual_of(self, name: str) -> dict[str, Any]:
        empty = {
            "samples": 0,
            "rms": 0.0,
            "below": 0.0,
            "newest": [],
            "zero_from": None,
            "was_moving": False,
        }
        usual = self._usual.setdefault(name, empty)
        usual["samples"] += 1
        return usual

    def _say_rms(
        self, trainer: pl.Trainer, step: int, high: list[tuple[str, float, float]]
    ) -> None:
        suspects, self._suspects = self._suspects, dict.fromkeys([name for name, *_ in high], step)
        confirmed = [each for each in high if step - suspects.get(each[0], -100) <= 10]
        if not confirmed:
            self._extra_samples = 4
            return
        first = [each for each in confirmed if each[0] in self._first]
        name, rms, limit = max(first or confirmed, key=lambda each: each[1] / each[2])
        self.alarm(
            trainer,
            "update_rms",
            f"The gradient of `{name}` is {rms:.3g} times (RMS) what Adam's second moment expects, "
            f"above {limit:.3g}; {len(confirmed)} such tensors.",
            "Use SafeAdamW(clip_update_rms=1.0), or Adam with betas=(0.9, 0.95).",
            step=step,
            tensor=name,
            value=rms,
            threshold=limit,
        )

    def _say_below_epsilon(
        self, trainer: pl.Trainer, sample: Readback, name: str, share: float
    ) -> None:
        eps = sample.context["eps"]
        self.alarm(
            trainer,
            "below_epsilon",
            f"For {share:.1%} of `{name}` the root of Adam's second moment is below eps={eps:g}, "
            f"more than {self.max_below_epsilon:.0%} above the usual "
            f"{self._usual[name]['below']:.1%}: epsilon sets these steps, and they shrink.",
            f"Lower epsilon to {eps / 1000:g} with states in fp32, or use SafeAdamW(rule='atan2').",
            step=sample.step,
            tensor=name,
            value=share,
            threshold=self._usual[name]["below"] + self.max_below_epsilon,
        )

    def _judge_zero_run(
        self, trainer: pl.Trainer, sample: Readback, name: str, is_zero: bool
    ) -> None:
        usual, beta2 = self._usual[name], sample.context["beta2"]
        usual["was_moving"] |= not is_zero
        if not is_zero:
            usual["zero_from"] = None
            return
        if usual["zero_from"] is None:
            usual["zero_from"] = sample.step
        steps = sample.step - usual["zero_from"]
        if usual["was_moving"] and steps >= self.zero_run_steps:
            now, limit = _boost(steps, beta2), _boost(math.inf, beta2)
            self.alarm(
                trainer,
                "zero_run",
                f"The gradient of `{name}` has been zero in every sample for {steps} steps, "
                f"{self.zero_run_steps} are the limit: if it returns as it was, its first step is "
                f"{now:.3g} times as long as before, and up to {limit:.3g} times later on.",
                "Use SafeAdamW(clip_update_rms=1.0), freeze the parameter, or raise the loss scale "
                "where its gradients underflow.",
                step=sample.step,
                tensor=name,
                value=steps,
                threshold=self.zero_run_steps,
            )

    def _judge_ratio(self, trainer: pl.Trainer, sample: Readback, name: str, ratio: float) -> None:
        rate = sample.context["rate"]
        self._highest_rate = max(self._highest_rate, rate or 0.0)
        is_low = ratio < self.min_ratio and (rate is None or rate > 1e-3 * self._highest_rate)
        if is_low:  # a schedule that ends near 0 is no failure
            limit, fix = self.min_ratio, "Raise the learning rate of its group, or lower epsilon."
        elif ratio > self.max_ratio:
            limit = self.max_ratio
            fix = f"Lower the learning rate to {lower_rate(trainer):.3g}, or warm it up for longer."
        else:
            return
        self.alarm(
            trainer,
            "update_to_weight",
            f"The next update of `{name}` has {ratio:.3g} times the norm of its weights, outside "
            f"[{self.min_ratio:g}, {self.max_ratio:g}].",
            fix,
            step=sample.step,
            tensor=name,
            value=ratio,
            threshold=limit,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what is usual, and what the base keeps."""
        usual = {name: dict(values) for name, values in self._usual.items()}
        return {**super().state_dict(), "usual": usual, "highest_rate": self._highest_rate}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        super().load_state_dict(state_dict)
        self._usual = {name: dict(values) for name, values in state_dict["usual"].items()}
        self._highest_rate = state_dict["highest_rate"]


def _boost(steps: float, beta2: float) -> float:
    """Return how much longer than before a step is, after so many without gradient."""
    return math.sqrt(1 / (beta2 ** (steps + 1) + 1 - beta2))
