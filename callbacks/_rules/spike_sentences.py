"""Words for what `SpikeGuard` saw: sentences with numbers, and remedies computed from them."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lightning_mp.callbacks._rules.robust_window import Verdict
from lightning_mp.numerics.async_readback import Readback

if TYPE_CHECKING:
    from lightning_mp.callbacks.spike_guard import SpikeGuard

__all__ = ["Finding", "Scene", "describe", "level_shift", "non_finite_run", "what_is_done"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A step as it was.

    Args:
        step: Of the loggers.
        optimizer: Index of the optimizer.
        optimizer_name: Its class.
        lr: Its learning rate; `None` where that is a tensor.
        first_lr: The learning rate some steps before.
        largest: The parameter with the largest gradient, and the norm of that.
        largest_norm: Its norm.
        is_scaled: Whether the loss is scaled, so that overflows are met by skipping.
        clip_val: Of gradients, as the Trainer has it.
        action: Of the guard.
        window_steps: Size of the window.
        z_threshold: Of the window.
    """

    step: int
    optimizer: int
    optimizer_name: str
    lr: float | None
    first_lr: float | None
    largest: str
    largest_norm: float
    is_scaled: bool
    clip_val: float | None
    action: str
    window_steps: int
    z_threshold: float

    @classmethod
    def of(
        cls, guard: "SpikeGuard", trainer: pl.Trainer, readback: Readback, lrs: deque[float]
    ) -> "Scene":
        """Read what came with a report, and take its learning rate into those of the window."""
        index, names = readback.context["optimizer"], readback.context["names"]
        lr = readback.context["lr"]
        lr = lr if isinstance(lr, int | float) else None  # a tensor would have to be waited for
        if index == 0 and lr is not None:
            lrs.append(lr)
        return cls(
            step=readback.step,
            optimizer=index,
            optimizer_name=type(trainer.optimizers[index]).__name__,
            lr=lr,
            first_lr=lrs[0] if lrs and index == 0 else None,
            largest=names[int(readback.array[-2])] if names else "no gradient",
            largest_norm=float(readback.array[-1]),
            is_scaled=getattr(trainer.precision_plugin, "scaler", None) is not None,
            clip_val=trainer.gradient_clip_val,
            action=guard.action,
            window_steps=guard.window_steps,
            z_threshold=guard.z_threshold,
        )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An event: what to raise an alarm with.

    Args:
        kind: `"non_finite_loss"`, `"non_finite_gradient"`, `"loss_spike"` or `"gradient_spike"`.
        severity: `"info"` where the loss scaler deals with it.
        message: What was seen.
        remedy: What to set.
        details: Other arguments of the alarm.
    """

    kind: str
    severity: Any
    message: str
    remedy: str
    details: dict[str, Any] = field(default_factory=dict)


def describe(scene: Scene, loss: Verdict, norm: Verdict) -> Finding:
    """Return the one finding about a step at which something was not finite, or a spike."""
    if not loss.is_finite:
        return _non_finite_loss(scene, loss)
    # Under a loss scale a loss spike overflows the gradients: the loss is the news.
    if not norm.is_finite and not (loss.is_spike and scene.is_scaled):
        return _non_finite_gradient(scene, norm)
    return _spike(scene, loss, norm)


def what_is_done(event: Finding, action: str, is_spent: bool) -> str:
    """Return what the guard does about an event: a sentence after a space, or nothing.

    Args:
        event: What happened.
        action: Of the guard.
        is_spent: Whether there are no rewinds left.
    """
    if event.severity == "info" or action == "warn":
        return ""
    if action == "rewind" and is_spent:
        return " All rewinds are used up, so training goes on."
    return {
        "skip": " The step was skipped.",
        "stop": " Training stops, as asked for.",
        "rewind": " Training rewinds.",
    }[action]


def level_shift(
    scene: Scene, name: str, verdict: Verdict, patience: int, judge_after_steps: int
) -> Finding:
    """Return that spikes in a row are taken for a new level, the end of an event."""
    return Finding(
        kind="level_shift",
        severity="warning",
        message=f"the {name}{_of_optimizer(scene)} was above its limit for {patience} steps in a "
        f"row and is {verdict.value:.4g} now, limit {verdict.limit:.4g}, so this is the new level; "
        f"spikes are called again after {judge_after_steps} steps.",
        remedy="If no change of the learning rate or of the data explains it, go back to a "
        f"checkpoint before step {scene.step - patience + 1}.",
        details={"tensor": name, "value": verdict.value, "threshold": verdict.limit},
    )


def non_finite_run(scene: Scene, patience: int) -> Finding:
    """Return that non-finite values do not go away."""
    remedy = f"Go back to a checkpoint before step {scene.step - patience + 1}"
    is_last_hope = scene.action == "rewind"
    return Finding(
        kind="non_finite_run",
        severity="error",
        message=f"no step{_of_optimizer(scene)} was finite for {patience} steps in a row, so "
        "weights or optimizer states are probably lost.",
        remedy=remedy + ("." if is_last_hope else ", or pass `SpikeGuard(action='rewind')`."),
        details={"value": float(patience), "threshold": float(patience)},
    )


def _of_optimizer(scene: Scene) -> str:
    return f" of optimizer {scene.optimizer}" if scene.optimizer else ""


def _non_finite_loss(scene: Scene, loss: Verdict) -> Finding:
    return Finding(
        kind="non_finite_loss",
        severity="error",
        message=f"the loss{_of_optimizer(scene)} is {loss.value:g}, where only finite values are "
        f"fine{_last_seen(loss)}.",
        remedy=_non_finite_remedy(scene),
        details={"tensor": "loss", "value": loss.value},
    )


def _non_finite_gradient(scene: Scene, norm: Verdict) -> Finding:
    seen = (
        f"the gradient norm{_of_optimizer(scene)} is {norm.value:g} at a finite loss, first in "
        f"{scene.largest!r}, where only finite values are fine{_last_seen(norm)}"
    )
    details = {"tensor": scene.largest, "value": norm.value}
    if scene.is_scaled:
        return Finding(
            kind="non_finite_gradient",
            severity="info",
            message=f"{seen}; the loss scaler skips the step.",
            remedy="If it is a rare overflow of the scaled gradient, nothing is to be done.",
            details=details,
        )
    return Finding(
        kind="non_finite_gradient",
        severity="error",
        message=f"{seen}.",
        remedy=_non_finite_remedy(scene),
        details=details,
    )


def _non_finite_remedy(scene: Scene) -> str:
    ways = ["add `NonFiniteLocator()` to the callbacks to see the module it comes from"]
    if scene.lr:
        ways.append(f"lower the learning rate from {scene.lr:.3g} to {_round(scene.lr / 2)}")
    return _any_of(ways, scene)


def _spike(scene: Scene, loss: Verdict, norm: Verdict) -> Finding:
    is_loss = loss.is_spike
    worse = loss if is_loss else norm
    what = "loss" if is_loss else "gradient norm"
    message = (
        f"the {what}{_of_optimizer(scene)} is {worse.value:.4g}{_times(worse)} its median of "
        f"{worse.median:.4g} in the last {scene.window_steps} healthy steps, above the limit of "
        f"{worse.limit:.4g} (z = {worse.z:.1f}, threshold {scene.z_threshold:g})"
    )
    if norm.is_spike and is_loss:
        message += (
            f", and so is the gradient norm of {norm.value:.4g}, limit {norm.limit:.4g}, largest "
            f"in {scene.largest!r}"
        )
    elif not norm.is_finite:
        message += ", and the scaled gradients overflow, so that the loss scaler skips the step"
    elif is_loss:
        message += ", while the gradient norm is as usual"
    else:
        message += f", largest in {scene.largest!r} with {scene.largest_norm:.4g}"
    return Finding(
        kind="loss_spike" if is_loss else "gradient_spike",
        severity="warning",
        message=message + ".",
        remedy=_spike_remedy(scene, worse, norm),
        details={
            "tensor": "loss" if is_loss else scene.largest,
            "value": worse.value,
            "threshold": worse.limit,
        },
    )


def _spike_remedy(scene: Scene, worse: Verdict, norm: Verdict) -> str:
    """Return what to set; each value leaves the healthy steps of the window as they are."""
    ways = []
    if norm.is_spike and (not scene.clip_val or scene.clip_val > norm.highest):
        ways.append(f"set `Trainer(gradient_clip_val={_round(norm.highest)})`")
    is_adam = "Adam" in scene.optimizer_name and scene.optimizer_name != "SafeAdamW"
    if norm.is_spike and is_adam:
        ways.append("clip updates with `SafeAdamW(clip_update_rms=1.0)`")
    is_warming_up = None not in (scene.lr, scene.first_lr) and scene.lr > 1.01 * scene.first_lr  # type: ignore[operator]
    if is_warming_up:
        ways.append(f"lengthen the warm-up from {scene.step} steps or more to {2 * scene.step}")
    if scene.lr:
        # As much lower as the value is above what is still fine, within reason.
        factor = min(max(worse.value / worse.limit, 2.0), 10.0) if worse.limit > 0 else 2.0
        ways.append(f"lower the learning rate from {scene.lr:.3g} to {_round(scene.lr / factor)}")
    return _any_of(ways, scene)


def _any_of(ways: list[str], scene: Scene) -> str:
    if scene.action == "warn":
        ways = [*ways, "leave such batches out with `SpikeGuard(action='skip')`"]
    if not ways:
        return "Lower the learning rate to half."
    text = ", ".join(ways[:-1]) + f", or {ways[-1]}" if len(ways) > 1 else ways[0]
    return text[0].upper() + text[1:] + "."


def _times(verdict: Verdict) -> str:
    if verdict.median > 0:
        return f", {verdict.value / verdict.median:.1f} times"
    return " against"


def _last_seen(verdict: Verdict) -> str:
    return "" if math.isnan(verdict.median) else f" (the median before was {verdict.median:.4g})"


def _round(value: float) -> str:
    return f"{value:.2g}"
