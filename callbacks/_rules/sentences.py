"""What callbacks say: a message and a remedy for each rule; errors and warnings of their use.

`tests/callbacks/golden/` holds each of them with sample numbers, for review.
"""

from typing import Any

from lightning_mp.callbacks._rules.records import Verdict

__all__ = ["MESSAGES", "REMEDIES", "REMEDIES_AT_THE_END", "USAGE", "usage", "words_for"]

_COUNT = "There {count:is} {count:count such tensor}."
_USUAL = "At the start it was at most {usual:.1%}, and {excess:.0%} more is the limit."
_REWIND = (
    "Training went back {undone:count step}, to the checkpoint before step {value:.0f}, and left "
    "out {left_out} more batches."
)
_FP32 = "fp32_modules=['norm', '{tensor}']"
_RATE = "the learning rate to {lower_rate:.3g}"

MESSAGES = {
    "loss_scale_floor": "A step was skipped at the lowest loss scale, {value:g}; it is the "
    "{in_a_row:th} skipped step in a row.",
    "loss_scale_low": "The loss scale fell to {value:g}, below {threshold:g}, after "
    "{in_a_row:count skipped step} in a row: gradients reach {reach:.3g}.",
    "skip_rate": "{skipped} of the last {of:count step} were skipped for overflow, more than "
    "{threshold:.1%} of {window}; the loss scale is {scale:g}.",
    "gradient_underflow": "{value:.1%} of the gradient of `{tensor}` is exactly zero. "
    f"{_USUAL} {_COUNT}",
    "all_gradients_underflow": f"{{value:.1%}} of all gradients is exactly zero. {_USUAL} {_COUNT}",
    "gradient_underflow_at_once": "{value:.1%} of the gradient of `{tensor}` is exactly zero, and "
    "{subnormal:.1%} is subnormal: it is too small for its format. " + _COUNT,
    "all_gradients_underflow_at_once": "{value:.1%} of all gradients is exactly zero, and "
    "{subnormal:.1%} is subnormal: they are too small for their format.",
    "activation_clamped": "`InfClamp` had to clamp {value:count value} of `{tensor}` since the "
    "last sample, {total:.0f} in all. A healthy run has none.",
    "attention_logit": "The logits of attention in `{tensor}` reach {value:.4g}, above "
    "{threshold:g}. A softmax of such logits is one-hot, and queries and keys learn no more.",
    "buffer_non_finite": "The buffer `{tensor}` holds NaN or inf, and was finite before. Training "
    "may not use it, as the running statistics of a norm; evaluation does.",
    "update_rms": "The gradient of `{tensor}` is {value:.3g} times (RMS) what Adam's second moment "
    "expects, above {threshold:.3g}. " + _COUNT,
    "below_epsilon": "For {value:.1%} of `{tensor}` the root of Adam's second moment is below "
    "eps={eps:g}, more than {excess:.0%} above the usual {usual:.1%}. Epsilon sets these steps, "
    "and they shrink.",
    "below_epsilon_all": "For {value:.1%} of `{tensor}` the root of Adam's second moment is below "
    "eps={eps:g}. Epsilon sets the steps, so that Adam does not adapt them.",
    "optimizer_state_non_finite": "Adam's moments of `{tensor}` hold NaN or inf, while its "
    f"gradient and weights are finite. {_COUNT} Where the second moment is inf, no gradient moves "
    "the weight again.",
    "zero_run": "The gradient of `{tensor}` has been zero in every sample for {value:count step}; "
    "{threshold:.0f} are the limit. If it returns as it was, its first step is {boost:.3g} times "
    "as long as before, and up to {limit:.3g} times later on.",
    "update_to_weight": "The next update of `{tensor}` has {value:.3g} times the norm of its "
    "weights, outside [{least:g}, {most:g}].",
    "divergence": "The loss{whose} has risen to {value:.4g}, the median of {window} steps, from "
    "{best:.4g} at its best, around step {best_step:.0f}: above {threshold:.4g}, which noise does "
    "not explain, and more than half of what was gained since the start.",
    "divergence_from_start": "The loss{whose} has risen to {value:.4g}, the median of {window} "
    "steps, from {best:.4g} at its start, and never came below that. Noise explains "
    "{threshold:.4g} at the most.",
    "stalled_loss": "The loss{whose} rose from {start:.4g} to {peak:.4g} in the first steps. After "
    "{steps:count step} it is {value:.4g}, and was never clearly below its start.",
    "stalled_loss_long": "The loss{whose} is {value:.4g} after {steps:count step}, and was never "
    "clearly below {start:.4g}, where it started.",
    "gradient_trend": "The gradient norm{whose} has risen to {value:.4g}, the median of {window} "
    "steps, {times:.1f} times {lowest:.4g} around step {lowest_step:.0f}. It rises for {span} "
    "steps, while the loss is not at its best.",
    "level_shift": "The {tensor}{whose} was above its limit of {threshold:.4g} for {patience} "
    "steps in a row. It is {value:.4g} now, which is taken for the new level. Spikes are called "
    "again after {again} steps.",
    "non_finite_run": "No step{whose} was finite for {value:.0f} steps in a row, so weights or "
    "optimizer states are probably lost.",
    "rewind_to_step": _REWIND,
    "rewind_failed": "No checkpoint to go back to could be read, so training goes on as it is.",
    "rewind_lost": "Of the checkpoints to go back to, {value:.0f} could not be read.",
    "rewind_to_step_short": _REWIND + " No checkpoint is {wanted} steps back.",
}
# The same is said of outputs, of their gradients, and of what goes into norms.
for _kind, _what in (("activation", "output"), ("output_gradient", "gradient of the output")):
    _what = f"The {_what} of `{{tensor}}` in {{dtype}}"
    MESSAGES |= {
        f"{_kind}_non_finite": _what + " has {value:count value} that {value:is} NaN or inf.",
        f"{_kind}_underflow": _what + " is exactly zero in {value:.1%} of its values. "
        f"{_USUAL} As many are close to zero.",
    }
for _kind, _what in (
    ("activation", "output"),
    ("output_gradient", "gradient of the output"),
    ("norm_input", "input"),
):
    _what = f"The {_what} of `{{tensor}}` in {{dtype}}"
    _near = (
        _what + " reaches {amax:.4g}, {value:.2f} bits below the {largest:.4g} where {dtype} ends. "
        "Less than {threshold:g} bits is too close."
    )
    MESSAGES |= {
        f"{_kind}_headroom": _near,
        f"{_kind}_headroom_forecast": _near + " As it has grown so far, it overflows by about step "
        "{overflow:.0f}.",
    }

_LOWER_SCALE = "ass LossScaleConfig(max_scale={lower_scale:g}), or train with half='bf16'."
_START_ANEW = (
    "Start anew with a learning rate of {lower_rate:.3g} or less, or with a longer warm-up."
)
_KEEP_FP32 = f"Keep the module in fp32 by {_FP32}, or train with half='bf16'."
_CLAMP = (
    f"ass inf_clamp=['{{tensor}}'] or {_FP32} to the precision plugin, or train with half='bf16'."
)

REMEDIES = {
    "loss_scale_floor": "Check loss and data for NaN and for values far out of range. Add "
    "NonFiniteLocator() to name the module, then keep it in fp32 by fp32_modules=[...], or train "
    "with half='bf16'.",
    "loss_scale_floor_static": "Pass loss_scale='dynamic'. Add NonFiniteLocator() to name the "
    "module, then keep it in fp32 by fp32_modules=[...], or train with half='bf16'.",
    "loss_scale_low": f"Lower {_RATE} or double its warm-up, or add NonFiniteLocator() and keep "
    "the module that it names in fp32 by fp32_modules=[...].",
    "skip_rate": f"Lower {_RATE}, or pass "
    "LossScaleConfig(max_scale={scale:g}, growth_interval=4000).",
    "gradient_underflow": "Raise the loss scale, by LossScaleConfig(init_scale={higher_scale:g}), "
    "keep the module in fp32 by fp32_modules=['norm', '{owner}'], or train with half='bf16'.",
    "all_gradients_underflow": "Raise the loss scale, by "
    "LossScaleConfig(init_scale={higher_scale:g}), or train with half='bf16'.",
    "gradient_underflow_wide": "Nothing reaches the parameter any more: check that its branch is "
    "used, and lower the learning rate if its activations have died.",
    "activation_non_finite": "Add NonFiniteLocator() to learn where they come from, or p" + _CLAMP,
    "activation_headroom": "P" + _CLAMP,
    "norm_input_headroom": "Keep the residual stream in fp32 where the plugin has that, or train "
    "with half='bf16'.",
    "attention_logit": f"Normalise queries and keys, or lower {_RATE}.",
    "buffer_non_finite": "Take what is not finite or far out of range out of the batch, and start "
    "the buffer anew, as by `reset_running_stats()`.",
    "activation_underflow": _KEEP_FP32,
    "activation_clamped": f"Keep the module in fp32 by {_FP32}, or lower {_RATE}.",
    "output_gradient_non_finite": "Add NonFiniteLocator() to learn where they come from, or p"
    + _LOWER_SCALE,
    "output_gradient_headroom": "P" + _LOWER_SCALE,
    "output_gradient_underflow": _KEEP_FP32,
    "update_rms": "Use SafeAdamW(clip_update_rms=1.0), or Adam with betas=(0.9, 0.95).",
    "below_epsilon": "Lower epsilon to {lower_eps:g} with states in fp32, or use "
    "SafeAdamW(rule='atan2').",
    "optimizer_state_non_finite": "Go back to a checkpoint from before, or start these states anew "
    "by `optimizer.state.pop(parameter)`.",
    "zero_run": "Use SafeAdamW(clip_update_rms=1.0), or freeze the parameter. Where its units have "
    "died, put a norm before them; where its gradients underflow, raise the loss scale.",
    "update_to_weight": f"Lower {_RATE}, or warm it up for longer.",
    "update_to_weight_low": "Raise the learning rate of its group, or lower epsilon.",
    "level_shift": "If no change of the learning rate or of the data explains it, go back to a "
    "checkpoint before step {first_bad:.0f}.",
    "non_finite_run": "Go back to a checkpoint before step {first_bad:.0f}, or pass "
    "`SpikeGuard(action='rewind')`.",
    "non_finite_run_rewind": "Go back to a checkpoint before step {first_bad:.0f}.",
    "rewind_failed": "Go back to a checkpoint of your own, and keep those of `SpikeGuard` by "
    "`rewind_storage='memory'` or on another disk by `dirpath`.",
    "rewind_lost": "Keep them by `rewind_storage='memory'` or on another disk by `dirpath`.",
    "rewind_to_step": "The learning rate is {rate:.3g} now. This was rewind {rewinds} of "
    "{max_rewinds}.",
    "divergence": "Go back to a checkpoint of about step {best_step:.0f}, and lower the learning "
    "rate from there on, to {lower_rate:.3g} or less.",
    "divergence_from_start": _START_ANEW,
    "stalled_loss": _START_ANEW,
    "stalled_loss_long": "If it should learn by now, compare it with a run at a tenth and at ten "
    "times the learning rate, and check that the targets belong to their inputs.",
    "gradient_trend": "Set `Trainer(gradient_clip_val={lowest:.2g})`, or lower " + _RATE + ".",
}

# Where the schedule is lowering the learning rate to 0 anyway: in place of advice to lower it.
REMEDIES_AT_THE_END = {
    "loss_scale_low": "Add NonFiniteLocator() and keep the module that it names in fp32 by "
    "fp32_modules=[...].",
    "skip_rate": "Pass LossScaleConfig(max_scale={scale:g}, growth_interval=4000).",
    "attention_logit": "Normalise queries and keys.",
    "activation_clamped": f"Keep the module in fp32 by {_FP32}.",
    "update_to_weight": "The schedule is lowering the learning rate already.",
    "divergence": "Go back to a checkpoint of about step {best_step:.0f}, and halve the rates of "
    "the schedule from there on.",
    "gradient_trend": "Set `Trainer(gradient_clip_val={lowest:.2g})`.",
}

_ORDINALS = ("zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


class _Number:
    """A number that is also written as an ordinal, `{n:th}`, or with a noun, `{n:count step}`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        count = int(self.value) if spec == "th" or spec.startswith(("count ", "is")) else 0
        if spec == "th" and count < len(_ORDINALS):
            return _ORDINALS[count]
        if spec == "th":
            last = 0 if count % 100 in (11, 12, 13) else count % 10
            return f"{count}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"
        if spec == "is":
            return "is" if count == 1 else "are"
        if spec.startswith("count "):
            return f"{count} {spec.removeprefix('count ')}{'' if count == 1 else 's'}"
        return format(self.value, spec)


def words_for(verdict: Verdict, *, is_ending: bool = False, **numbers: Any) -> tuple[str, str]:
    """Return message and remedy of a verdict; `numbers` are what they have beside its own."""
    if verdict.words is not None:
        return verdict.words
    own = {"value": verdict.value, "threshold": verdict.threshold, "tensor": verdict.tensor}
    fields = {**own, **verdict.numbers, **numbers}
    fields = {k: _Number(v) if isinstance(v, int | float) else v for k, v in fields.items()}
    message = MESSAGES[verdict.says or verdict.kind].format(**fields)
    remedies = REMEDIES | REMEDIES_AT_THE_END if is_ending else REMEDIES
    return message, remedies[verdict.fix or verdict.kind].format(**fields)


# --- how callbacks are used ----------------------------------------------------------------------

_ON = "{error}. Training goes on."

USAGE = {
    # --- arguments -------------------------------------------------------------------------------
    "judge_after_steps": "A guard judges by its window: `judge_after_steps` must be at most "
    "`window_steps`. Pass `judge_after_steps={fitting}`.",
    "shares": "The share to warn of must be the lower. Pass 0.01 and 0.05.",
    "no_match": "Passed `TensorCollector(include=[{pattern!r}])`, which matches none of {count} "
    "names, such as {names}. Write `*` for what may stand before and behind.",
    # --- set-ups ---------------------------------------------------------------------------------
    "peers": "Passed `callbacks=[{peers}]`. Only the last of them may skip or rewind, as it takes "
    "the step from those after it. Pass `action='warn'` to the others.",
    "dataloader_iter": "Passed `SpikeGuard(action='rewind')` with a `training_step` that takes a "
    "`dataloader_iter`. Batches can only be skipped where Lightning fetches them. Take a `batch` "
    "in `training_step`, or pass `action='skip'`.",
    "shards_in_memory": "Passed `SpikeGuard(rewind_storage='memory')` with `{strategy}`, which "
    "loads shards from files. Pass `rewind_storage='disk'`.",
    "no_adam": "Passed `AdamStateMonitor`, but no optimizer has `betas` and `eps`. It watches Adam "
    "and optimizers with its states. Leave it out, or train with one.",
    "quantized": "`AdamStateMonitor` does not look at the states {states} of `{optimizer}`, which "
    "are quantized. Train with states in fp32 to have them watched.",
    "compiled": "`ActivationRangeMonitor` cannot see into a LightningModule that is compiled as a "
    "whole. Compile its networks instead: `self.net = torch.compile(self.net)`.",
    "skip_sync": "`SpikeGuard(action='skip')` reads one flag a step from the device, because "
    "`{optimizer}` cannot skip there. Pass `fused=True` to the optimizer if it has that, or train "
    "with `BalancedAMP`, to save this host sync.",
    # --- while training --------------------------------------------------------------------------
    "kept_on_disk": "`SpikeGuard(action='rewind')` keeps up to {most} checkpoints of {size:,} "
    "bytes each on disk, {total:,} bytes in all.",
    "kept_in_memory": "`SpikeGuard(action='rewind')` keeps up to {most} checkpoints of {size:,} "
    "bytes each in the memory of each rank, {total:,} bytes in all.",
    "mark_not_written": "`SpikeGuard(action='rewind')` could not write a checkpoint to {path!r}: "
    + _ON + " There is less to go back to. Pass a `dirpath` that has space and can be written to, "
    "or `rewind_storage='memory'`.",
    "marks_not_removed": "`SpikeGuard(action='rewind')` could not remove its files in {path!r}: "
    + _ON + " Remove them by hand.",
    "batch_saved": "Its batch is in `{path}`.",
    "before_resuming": "This was before the run was resumed.",
    "batch_not_saved": "A batch could not be saved in {path!r}: " + _ON + " Train where the log "
    "folder can be written to.",
    "report_not_written": "`InstabilityReport` could not write {path!r}: " + _ON + " Pass a "
    "`dirpath` that can be written to.",
    "report_read_in_part": "The data of the report {path!r} are damaged, or from another version "
    "of lightning-mp. What cannot be read is left out.",
    "report_logged": "All of it is in `{page}`.",
    "report_not_logged": "`InstabilityReport` could not give its page to {logger}: " + _ON,
    "tensors_not_written": "`TensorCollector` could not write to {path!r}: " + _ON + " Pass a "
    "`dirpath` that can be written to.",
    "alert_not_sent": "Passed `InstabilityReport(alert=...)`, {alert} that an alarm could not be "
    "sent to: " + _ON + " Check that it can be reached from this machine.",
    "hook_failed": "`{callback}.on_exception` failed: {error!r}.",
}  # fmt: skip


def usage(key: str, **fields: Any) -> str:
    return USAGE[key].format(**fields)
