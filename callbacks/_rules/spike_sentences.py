"""Words for what `SpikeGuard` saw: sentences with numbers, and remedies computed from them."""

import math
from dataclasses import dataclass

from lightning_mp.callbacks._rules.robust_window import SignalVerdict
from lightning_mp.callbacks._rules.verdict import Severity, Verdict
from lightning_mp.callbacks._step.facts import StepFacts

__all__ = ["Scene", "describe", "whose"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A step, and what the guard knows beside it."""

    facts: StepFacts
    first_lr: float | None  # some steps before
    clip_val: float | None  # of gradients, as the Trainer has it
    action: str  # of the guard
    is_spent: bool  # whether there are no rewinds left
    window_steps: int
    z_threshold: float


def describe(scene: Scene, loss: SignalVerdict, norm: SignalVerdict) -> Verdict:
    """Return what to say of a step at which something was not finite, or a spike."""
    facts, is_scaled = scene.facts, scene.facts.loss_scale is not None
    if not loss.is_finite:
        kind, bad, tensor = "non_finite_loss", loss, "loss"
        message = f"The loss{whose(facts)} is {_written(loss)}."
    # Under a loss scale a loss spike overflows the gradients: the loss is the news.
    elif not norm.is_finite and not (loss.is_spike and is_scaled):
        kind, bad, tensor = "non_finite_gradient", norm, str(facts.largest_gradient)
        message = (
            f"The gradient norm{whose(facts)} is {_written(norm)} while the loss is finite; the "
            f"gradient of `{tensor}` is among those that are not."
        )
        if is_scaled:
            words = (
                f"{message} The loss scaler skips the step.",
                "A rare overflow of the scaled gradient needs no remedy.",
            )
            return Verdict(kind, norm.value, None, "info", tensor, words=words)
    else:
        return _spike(scene, loss, norm)
    if not math.isnan(bad.median):
        message += f" Its median before was {bad.median:.4g}."
    ways = ["add `NonFiniteLocator()` to see the module that it comes from"]
    if facts.lr and not facts.is_rate_ending:
        ways.append(f"lower the learning rate from {facts.lr:.3g} to {facts.lr / 2:.2g}")
    words = (message + _what_is_done(scene), _any_of(ways, scene))
    return Verdict(kind, bad.value, None, "error", tensor, words=words)


def whose(facts: StepFacts) -> str:
    """Return which optimizer's loss it is, where there are several; else nothing."""
    return f" of optimizer {facts.optimizer}" if facts.optimizer else ""


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


def _spike(scene: Scene, loss: SignalVerdict, norm: SignalVerdict) -> Verdict:
    is_loss, largest = loss.is_spike, scene.facts.largest_gradient
    worse, what = (loss, "loss") if is_loss else (norm, "gradient norm")
    times = f", {worse.value / worse.median:.1f} times" if worse.median > 0 else " against"
    message = (
        f"The {what}{whose(scene.facts)} is {worse.value:.4g}{times} its median of "
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
    words = (message + _what_is_done(scene), _spike_remedy(scene, worse, norm))
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
    if lr and not scene.facts.is_rate_ending:
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


def _written(verdict: SignalVerdict) -> str:
    return "NaN" if math.isnan(verdict.value) else f"{verdict.value:g}"
