"""Words for what `SpikeGuard` saw: sentences with numbers, and remedies computed from them."""

import math
from dataclasses import dataclass, replace

from lightning_mp.callbacks._rules.robust_window import SignalVerdict
from lightning_mp.callbacks._rules.verdict import Severity, Verdict
from lightning_mp.callbacks._step.facts import StepFacts

__all__ = ["Scene", "describe", "kept_checkpoints", "level_shift", "non_finite_run"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A step, and what the guard knows beside it.

    Args:
        facts: The step.
        first_lr: The learning rate some steps before.
        clip_val: Of gradients, as the Trainer has it.
        is_ending: Whether the learning rate is being lowered to 0 anyway.
        action: Of the guard.
        is_spent: Whether there are no rewinds left.
        window_steps: Size of the window.
        judge_after_steps: Healthy steps before a spike is called.
        z_threshold: Of the window.
        patience: Bad steps in a row that are too many.
    """

    facts: StepFacts
    first_lr: float | None
    clip_val: float | None
    is_ending: bool
    action: str
    is_spent: bool
    window_steps: int
    judge_after_steps: int
    z_threshold: float
    patience: int


def describe(scene: Scene, loss: SignalVerdict, norm: SignalVerdict) -> Verdict:
    """Return what to say of a step at which something was not finite, or a spike."""
    is_scaled = scene.facts.loss_scale is not None
    if not loss.is_finite:
        verdict = _non_finite_loss(scene, loss)
    # Under a loss scale a loss spike overflows the gradients: the loss is the news.
    elif not norm.is_finite and not (loss.is_spike and is_scaled):
        verdict = _non_finite_gradient(scene, norm)
    else:
        verdict = _spike(scene, loss, norm)
    message, remedy = verdict.words or ("", "")
    is_note = verdict.severity == "info"
    return verdict if is_note else replace(verdict, words=(message + _what_is_done(scene), remedy))


def _what_is_done(scene: Scene) -> str:
    """Return what the guard does about it: a sentence after a space, or nothing."""
    if scene.action == "rewind" and scene.is_spent:
        return " All rewinds are used up, so training goes on."
    return {
        "warn": "",
        "skip": " The step was skipped.",
        "stop": " Training stops before this step.",
        "raise": " Training ends before this step.",
        "rewind": " Training rewinds.",
    }[scene.action]


def level_shift(scene: Scene, name: str, verdict: SignalVerdict) -> Verdict:
    """Return that spikes in a row are taken for a new level, the end of an event."""
    message = (
        f"The {name}{_of_optimizer(scene)} was above its limit of {verdict.limit:.4g} for "
        f"{scene.patience} steps in a row. It is {verdict.value:.4g} now, which is taken for the "
        f"new level. Spikes are called again after {scene.judge_after_steps} steps."
    )
    remedy = (
        "If no change of the learning rate or of the data explains it, go back to a "
        f"checkpoint before step {scene.facts.step - scene.patience + 1}."
    )
    words = (message, remedy)
    return Verdict("level_shift", verdict.value, verdict.limit, tensor=name, words=words)


def non_finite_run(scene: Scene) -> Verdict:
    """Return that non-finite values do not go away."""
    message = (
        f"No step{_of_optimizer(scene)} was finite for {scene.patience} steps in a row, so "
        "weights or optimizer states are probably lost."
    )
    remedy = f"Go back to a checkpoint before step {scene.facts.step - scene.patience + 1}"
    remedy += "." if scene.action == "rewind" else ", or pass `SpikeGuard(action='rewind')`."
    count = float(scene.patience)
    return Verdict("non_finite_run", count, count, "error", words=(message, remedy))


def kept_checkpoints(most: int, size: int, is_in_memory: bool) -> str:
    """Return what it costs to be able to rewind."""
    where = "in the memory of each rank" if is_in_memory else "on disk"
    return (
        f"`SpikeGuard(action='rewind')` keeps up to {most} checkpoints of {size:,} bytes each "
        f"{where}, {most * size:,} bytes in all."
    )


def _of_optimizer(scene: Scene) -> str:
    return f" of optimizer {scene.facts.optimizer}" if scene.facts.optimizer else ""


def _non_finite_loss(scene: Scene, loss: SignalVerdict) -> Verdict:
    message = f"The loss{_of_optimizer(scene)} is {_written(loss)}.{_last_seen(loss)}"
    words = (message, _non_finite_remedy(scene))
    return Verdict("non_finite_loss", loss.value, None, "error", tensor="loss", words=words)


def _non_finite_gradient(scene: Scene, norm: SignalVerdict) -> Verdict:
    facts = scene.facts
    is_scaled = facts.loss_scale is not None
    message = (
        f"The gradient norm{_of_optimizer(scene)} is {_written(norm)} while the loss is finite; "
        f"the gradient of `{facts.largest_gradient}` is among those that are not."
    )
    words = (message + _last_seen(norm), _non_finite_remedy(scene))
    severity: Severity = "error"
    if is_scaled:
        remedy = "A rare overflow of the scaled gradient needs no remedy."
        words, severity = (f"{message} The loss scaler skips the step.", remedy), "info"
    tensor = facts.largest_gradient
    return Verdict("non_finite_gradient", norm.value, None, severity, tensor=tensor, words=words)


def _non_finite_remedy(scene: Scene) -> str:
    ways, lr = ["add `NonFiniteLocator()` to see the module that it comes from"], scene.facts.lr
    if lr and not scene.is_ending:
        ways.append(f"lower the learning rate from {lr:.3g} to {lr / 2:.2g}")
    return _any_of(ways, scene)


def _spike(scene: Scene, loss: SignalVerdict, norm: SignalVerdict) -> Verdict:
    is_loss, largest = loss.is_spike, scene.facts.largest_gradient
    worse, what = (loss, "loss") if is_loss else (norm, "gradient norm")
    message = (
        f"The {what}{_of_optimizer(scene)} is {worse.value:.4g}{_times(worse)} its median of "
        f"{worse.median:.4g} in the last {scene.window_steps} healthy steps, above the limit of "
        f"{worse.limit:.4g} (z = {worse.z:.1f}, threshold {scene.z_threshold:g})."
    )
    if norm.is_spike and is_loss:
        message += (
            f" The gradient norm is {norm.value:.4g} and beyond its limit of {norm.limit:.4g} too, "
            f"the largest in `{largest}`."
        )
    elif not norm.is_finite:
        message += " The scaled gradients overflow, so the loss scaler skips the step."
    elif is_loss:
        message += " The gradient norm is as usual."
    else:
        message += f" The largest is that of `{largest}`, {scene.facts.largest_gradient_norm:.4g}."
    kind, tensor = ("loss_spike", "loss") if is_loss else ("gradient_spike", largest)
    words = (message, _spike_remedy(scene, worse, norm))
    severity: Severity = "warning"
    if not is_loss and scene.action == "warn" and scene.clip_val and norm.limit >= scene.clip_val:
        words = (f"{message} It is clipped to {scene.clip_val:g}.", "This needs no remedy.")
        severity = "info"
    return Verdict(kind, worse.value, worse.limit, severity, tensor, words=words)


def _spike_remedy(scene: Scene, worse: SignalVerdict, norm: SignalVerdict) -> str:
    """Return what to set; each value leaves the healthy steps of the window as they are."""
    ways, lr, step = [], scene.facts.lr, scene.facts.step
    if norm.is_spike and (not scene.clip_val or scene.clip_val > norm.highest):
        ways.append(f"set `Trainer(gradient_clip_val={norm.highest:.2g})`")
    is_adam = "Adam" in scene.facts.optimizer_name and scene.facts.optimizer_name != "SafeAdamW"
    if norm.is_spike and is_adam:
        ways.append("clip updates with `SafeAdamW(clip_update_rms=1.0)`")
    if lr and scene.first_lr is not None and lr > 1.01 * scene.first_lr:
        ways.append(f"lengthen the warm-up from {step} steps or more to {2 * step}")
    if lr and not scene.is_ending:
        # As much lower as the value is above what is still fine, within reason.
        factor = min(max(worse.value / worse.limit, 2.0), 10.0) if worse.limit > 0 else 2.0
        ways.append(f"lower the learning rate from {lr:.3g} to {lr / factor:.2g}")
    return _any_of(ways, scene)


def _any_of(ways: list[str], scene: Scene) -> str:
    if scene.action == "warn":
        ways = [*ways, "leave such batches out with `SpikeGuard(action='skip')`"]
    if not ways:
        return "Lower the learning rate to half."
    text = ", ".join(ways[:-1]) + f", or {ways[-1]}" if len(ways) > 1 else ways[0]
    return text[0].upper() + text[1:] + "."


def _times(verdict: SignalVerdict) -> str:
    if verdict.median > 0:
        return f", {verdict.value / verdict.median:.1f} times"
    return " against"


def _last_seen(verdict: SignalVerdict) -> str:
    return "" if math.isnan(verdict.median) else f" Its median before was {verdict.median:.4g}."


def _written(verdict: SignalVerdict) -> str:
    return "NaN" if math.isnan(verdict.value) else f"{verdict.value:g}"
