"""`ActivationRangeMonitor`: sees activations grow towards the largest number of their format."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.underflow import UnderflowJudge, Verdict
from lightning_mp.callbacks._step.outputs import OutputKey, OutputSampler, eager_modules
from lightning_mp.callbacks._step.sampling import SamplingMonitor, merge_ranks
from lightning_mp.callbacks._step.training_state import loss_scale_of, lower_rate, plain_name
from lightning_mp.numerics.async_readback import Readback
from lightning_mp.numerics.tensor_stats import StatField
from lightning_mp.precision.inf_clamp import InfClamp
from lightning_mp.precision.module_selection import select_modules

__all__ = ["ActivationRangeMonitor"]


@explains_arguments()
class ActivationRangeMonitor(SamplingMonitor):
    """Watches how far the outputs of modules are from overflow, and what `InfClamp` had to clamp.

    A transformer's residual stream can double every few thousand steps for days before one value
    passes 65504, becomes inf, and takes the run with it. Its headroom, log2(65504 / amax) in bits,
    tells so with days to spare: at 2 bits, activations may quadruple.

    Outputs are sampled by hooks that are there in sampled steps only, as they come out of the
    modules, in one pass a module and without a host sync. Inside a module compiled by
    `torch.compile` hooks do not run; the output of the whole is seen. Gradients with respect to
    outputs are sampled where `backward=True`; they carry the loss scale, as they do in fp16.

    Logs `instability/activation_headroom_bits` (the smallest of all modules),
    `instability/activation_zero_share` (of all values), and with a clamp
    `instability/clamped_values` (since the start).

    Args:
        modules: Names of classes or dotted names; all modules without children by default.
        backward: Whether to sample gradients with respect to outputs too.
        min_headroom_bits: Warns below.
        calls_per_step: Calls of a module to look at in a sampled step, the first ones. Those of
            further micro-batches are more of the same; raise it where a forward calls one module
            more often.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Samples at the start that tell what is usual.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range, or a module is unknown.

    Alarms:
        `activation_headroom`, `activation_underflow`, `activation_clamped`, and as an error
        `activation_non_finite`. The same with `output_gradient` for gradients.

    References:
        T5's clamp: https://github.com/huggingface/transformers/pull/9487
    """

    def __init__(
        self,
        *,
        modules: Sequence[str] | None = None,
        backward: bool = False,
        min_headroom_bits: float = 2.0,
        calls_per_step: int = 4,
        every_n_steps: int = 100,
        baseline_samples: int = 10,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(
            every_n_steps=every_n_steps,
            baseline_samples=baseline_samples,
            repeat_after_steps=repeat_after_steps,
        )
        if not 0 <= min_headroom_bits < 16:
            raise ValueError(
                f"Passed `ActivationRangeMonitor(min_headroom_bits={min_headroom_bits!r})`. It "
                "must be from 0 to 16, where 65504 itself has 0 bits. Pass 2."
            )
        if type(calls_per_step) is not int or calls_per_step < 1:
            raise ValueError(
                f"Passed `ActivationRangeMonitor(calls_per_step={calls_per_step!r})`. It must be "
                "an integer of at least 1. Leave it out for 4."
            )
        self.modules = modules
        self.backward = backward
        self.min_headroom_bits = min_headroom_bits
        self.calls_per_step = calls_per_step
        self._underflow = UnderflowJudge(baseline_samples, 0.01, 0.05)
        self._sampler = OutputSampler({}, backward=backward, max_calls=calls_per_step)
        self._clamped: dict[str, float] = {}  # values that were clamped until the last sample

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the modules to watch."""
        eager = dict(eager_modules(pl_module))
        if self.modules is None:
            parents = {name.rpartition(".")[0] for name in eager}
            chosen = {n: m for n, m in eager.items() if n and n not in parents}
        else:
            chosen = select_modules(pl_module, self.modules)
            chosen = {name: module for name, module in chosen.items() if name in eager}
        watched = {plain_name(name): module for name, module in chosen.items()}
        self._sampler = OutputSampler(
            watched, backward=self.backward, max_calls=self.calls_per_step
        )
        self._clamped.clear()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hook the modules where this step is to be sampled."""
        if self.is_due(trainer):
            self._sampler.start()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Send the sample of this step on its way, and judge those that have arrived."""
        sampled = self._sampler.stop() if self._sampler.is_running else None
        if sampled is not None:
            keys, table = sampled
            clamp = getattr(trainer.precision_plugin, "inf_clamp", None)
            clamped = list(clamp.names) if isinstance(clamp, InfClamp) else []
            if isinstance(clamp, InfClamp) and clamped:
                rows = table.new_zeros(len(clamped), table.shape[1])
                rows[:, 0] = clamp.counts().to(rows)
                table = torch.cat([table, rows])
            self.submit(trainer, table, gather=True, keys=keys, clamped=clamped)
        super().on_train_batch_end(trainer, *args)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Unhook the modules, and judge the samples that are left."""
        self._sampler.stop()
        super().on_exception(trainer, pl_module, exception)

    @override
    def judge(self, trainer: pl.Trainer, sample: Readback) -> None:
        """Hold a sample against the limits of formats and against what is usual."""
        keys: list[OutputKey] = sample.context["keys"]
        metrics: dict[str, float] = {}
        for kind in dict.fromkeys(key.kind for key in keys):
            chosen = [i for i, key in enumerate(keys) if key.kind == kind]
            self._judge_kind(trainer, sample, kind, chosen, metrics)
        if sample.context["clamped"]:
            counts = sample.array[:, len(keys) :, 0].sum(axis=0).tolist()
            metrics["instability/clamped_values"] = float(sum(counts))
            self._judge_clamps(trainer, sample.step, sample.context["clamped"], counts)
        for name, value in metrics.items():
            self.history.add_point(name.removeprefix("instability/"), sample.step, value)
        self.log_metrics(trainer, metrics, sample.step)

    def _judge_kind(
        self,
        trainer: pl.Trainer,
        sample: Readback,
        kind: str,
        chosen: list[int],
        metrics: dict[str, float],
    ) -> None:
        keys = [sample.context["keys"][i] for i in chosen]
        labels = [_label(key, keys) for key in keys]
        stats = merge_ranks(labels, sample.array[:, chosen])
        largest = np.array([torch.finfo(key.dtype).max for key in keys])
        with np.errstate(divide="ignore"):
            bits = np.log2(largest) - np.log2(stats.column(StatField.AMAX))
        title, zeros = kind.replace("_", " "), list(stats.zero_share.values())
        self.history.add_column(f"{title} headroom (bits)", sample.step, labels, bits.tolist())
        self.history.add_column(f"{title} zero share", sample.step, labels, zeros)
        if np.isfinite(bits.min()):
            metrics[f"instability/{kind}_headroom_bits"] = float(bits.min())
        all_zeros = stats.column(StatField.ZEROS).sum() / max(sum(stats.numels), 1)
        metrics[f"instability/{kind}_zero_share"] = float(all_zeros)
        for key, label, left in zip(keys, labels, bits.tolist(), strict=True):
            if stats.non_finite[label]:
                self._say_non_finite(trainer, sample.step, key, stats.non_finite[label])
            elif left < self.min_headroom_bits:
                self._say_headroom(trainer, sample.step, key, left, stats.amax[label])
            if key.dtype == torch.float16:
                share, subnormals = stats.zero_share[label], stats.subnormal_share[label]
                verdict = self._underflow.judge(f"{kind}:{label}", share, subnormals)
                if verdict is not None:
                    self._say_underflow(trainer, sample.step, key, verdict)

    def _say_non_finite(self, trainer: pl.Trainer, step: int, key: OutputKey, count: int) -> None:
        self.alarm(
            trainer,
            f"{key.kind}_non_finite",
            f"{_what(key)} has {count} values that are NaN or inf.",
            f"Add NonFiniteLocator() to learn where they come from, or {_fix(trainer, key)}.",
            step=step,
            severity="error",
            tensor=key.name,
            value=count,
            threshold=0,
        )

    def _say_headroom(
        self, trainer: pl.Trainer, step: int, key: OutputKey, bits: float, amax: float
    ) -> None:
        fix = _fix(trainer, key)
        self.alarm(
            trainer,
            f"{key.kind}_headroom",
            f"{_what(key)} reaches {amax:.4g}, {bits:.2f} bits from the "
            f"{torch.finfo(key.dtype).max:.4g} where {_short(key.dtype)} ends, less than "
            f"{self.min_headroom_bits:g}.",
            f"{fix[0].upper()}{fix[1:]}.",
            step=step,
            tensor=key.name,
            value=bits,
            threshold=self.min_headroom_bits,
        )

    def _say_underflow(
        self, trainer: pl.Trainer, step: int, key: OutputKey, verdict: Verdict
    ) -> None:
        self.alarm(
            trainer,
            f"{key.kind}_underflow",
            f"{_what(key)} is exactly zero in {verdict.zero_share:.1%} of its values, against at "
            f"most {verdict.usual_share:.1%} at the start, more than {verdict.threshold:.0%} above "
            "it, with as many close to zero.",
            f"Keep the module in fp32 by fp32_modules=['norm', '{key.name}'], or train with "
            "half='bf16'.",
            step=step,
            severity="error" if verdict.is_alarm else "warning",
            tensor=key.name,
            value=verdict.zero_share,
            threshold=verdict.usual_share + verdict.threshold,
        )

    def _judge_clamps(
        self, trainer: pl.Trainer, step: int, names: list[str], counts: list[float]
    ) -> None:
        for name, count in zip(names, counts, strict=True):
            new = count - self._clamped.get(name, 0.0)
            self._clamped[name] = count
            if new > 0:
                self.alarm(
                    trainer,
                    "activation_clamped",
                    f"InfClamp had to clamp {new:.0f} values of `{name}` since the last sample, "
                    f"{count:.0f} in all, where none would be healthy.",
                    f"Keep the module in fp32 by fp32_modules=['norm', '{name}'], or lower the "
                    f"learning rate to {lower_rate(trainer):.3g}.",
                    step=step,
                    tensor=name,
                    value=new,
                    threshold=0,
                )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what is usual, and what the base keeps."""
        return {**super().state_dict(), "usual": self._underflow.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        super().load_state_dict(state_dict)
        self._underflow.load_state_dict(state_dict["usual"])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _label(key: OutputKey, keys: list[OutputKey]) -> str:
    """Return the module's name, with its dtype where it has outputs of several."""
    is_alone = [each.name for each in keys].count(key.name) == 1
    return key.name if is_alone else f"{key.name} ({_short(key.dtype)})"


def _what(key: OutputKey) -> str:
    of = "The output" if key.kind == "activation" else "The gradient of the output"
    return f"{of} of `{key.name}` in {_short(key.dtype)}"


def _fix(trainer: pl.Trainer, key: OutputKey) -> str:
    if key.kind == "output_gradient":
        scale = loss_scale_of(trainer)
        lower = 1.0 if scale is None else float(scale) / 4
        return f"pass LossScaleConfig(max_scale={lower:g}), or train with half='bf16'"
    return (
        f"pass inf_clamp=['{key.name}'] or fp32_modules=['norm', '{key.name}'] to the precision "
        "plugin, or train with half='bf16'"
    )
