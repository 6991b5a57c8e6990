"""Messages about the use of callbacks: errors, and warnings during training."""

from typing import Any

__all__ = ["USAGE", "usage"]

USAGE = {
    # --- arguments -------------------------------------------------------------------------------
    "judge_after_steps": "`judge_after_steps` must be at most `window_steps`, because `SpikeGuard` "
    "judges by this window. Pass `judge_after_steps={fitting}`.",
    "shares": "`warn_share` must be at most `alarm_share`. Pass 0.01 and 0.05.",
    "no_match": "Passed `TensorCollector(include=[{pattern!r}])`, which matches none of {count} "
    "names, such as {names}. Write `*` for the part of a name before or after the pattern.",
    # --- set-ups ---------------------------------------------------------------------------------
    "peers": "Passed `callbacks=[{peers}]`. Only the last of these callbacks may skip or rewind, "
    "because callbacks after it would not see the step. Pass `action='warn'` to the others.",
    "dataloader_iter": "Passed `SpikeGuard(action='rewind')` with a `training_step` that takes a "
    "`dataloader_iter`. Batches can be skipped only if Lightning fetches them. Take a `batch` in "
    "`training_step`, or pass `action='skip'`.",
    "pruning": "Passed `SpikeGuard(action='rewind')` with `ModelPruning`, whose checkpoints a "
    "pruned model cannot load. Pass `action='skip'`.",
    "shards_in_memory": "Passed `SpikeGuard(rewind_storage='memory')` with `{strategy}`, which "
    "loads shards from files. Pass `rewind_storage='disk'`.",
    "no_adam": "Passed `AdamStateMonitor`, but no optimizer is Adam. The callback monitors "
    "optimizers with `Adam` in the name of their class, two `betas` and an `eps`. Remove the "
    "callback, or train with such an optimizer.",
    "quantized": "`AdamStateMonitor` does not measure the states {states} of `{optimizer}`, which "
    "are quantized. Train with states in fp32 to monitor them.",
    "compiled": "`ActivationRangeMonitor` cannot measure a LightningModule that is compiled as a "
    "whole. Compile its networks instead: `self.net = torch.compile(self.net)`.",
    "unmeasured": "`{callback}` measured no module in a step, although a sample was due. Either no "
    "selected module was called (`ActivationRangeMonitor` selects modules without children; pass "
    "`modules=['net']` for others), or only inside a function that `torch.compile` compiles or, "
    "for `RepresentationMonitor`, inside a transform of `torch.func` or with fewer than four "
    "samples. Compile a module instead: `self.net = torch.compile(self.net)`.",
    "no_features": "`RepresentationMonitor` found no loss of lightning-mp among the modules of the "
    "model. Pass the towers: `RepresentationMonitor(modules=['image_tower', 'text_tower'])`.",
    "skip_sync": "`SpikeGuard(action='skip')` reads one flag from the device in every step, "
    "because `{optimizer}` cannot skip a step on the device. To avoid this host sync, pass "
    "`fused=True` to the optimizer if it has this argument, or train with `BalancedAMP`.",
    "preflight_manual": "`PrecisionPreflight` does not support manual optimization. Remove the "
    "callback.",
    "preflight_sharded": "`PrecisionPreflight` does not support sharded parameters. Run "
    "`lightning-mp preflight` on one device.",
    "preflight_fp32": "`PrecisionPreflight` has nothing to compare, because "
    "`precision={precision!r}` does not compute in half precision. Pass `plugins=BalancedAMP()`.",
    "preflight_failed": "`PrecisionPreflight` could not run the step: {name}: {text}. Training "
    "continues.",
    "preflight_rows": "`PrecisionPreflight` compares the two halves of a batch. Pass batches of at "
    "least two rows.",
    "preflight_rank": "The step failed on another rank.",
    "preflight_no_loss": "`training_step` returned no loss.",
    "preflight_not_finite": "The loss is {loss} in fp32, too, so the cause is not half precision "
    "in this step. Check the batch.",
    "preflight_weights": "Weights are NaN or inf before this step. An optimizer step has written "
    "them, as with an epsilon that is 0 in half precision, which `lightning-mp doctor` finds.",
    # --- while training --------------------------------------------------------------------------
    "kept_on_disk": "`SpikeGuard(action='rewind')` keeps up to {most} checkpoints of {size:,} "
    "bytes each on disk, {total:,} bytes in all.",
    "kept_in_memory": "`SpikeGuard(action='rewind')` keeps up to {most} checkpoints of {size:,} "
    "bytes each in the memory of each rank, {total:,} bytes in all.",
    "mark_not_written": "`SpikeGuard(action='rewind')` could not write a checkpoint to {path!r}: "
    "{error}. Training continues with fewer checkpoints to rewind to. Pass a writable `dirpath` "
    "with free space, or `rewind_storage='memory'`.",
    "marks_not_removed": "`SpikeGuard(action='rewind')` could not remove its files in {path!r}: "
    "{error}. Training continues. Remove the files by hand.",
    "batch_saved": "Its batch is in `{path}`.",
    "before_resuming": "This alarm was raised before the run was resumed.",
    "batch_not_saved": "A batch could not be saved in {path!r}: {error}. Training continues. Make "
    "the log folder writable.",
    "report_not_written": "`InstabilityReport` could not write {path!r}: {error}. Training "
    "continues. Pass a writable `dirpath`.",
    "report_read_in_part": "The data of the report {path!r} are damaged or from another version "
    "of lightning-mp. Unreadable data are left out.",
    "report_logged": "The whole report is in `{page}`.",
    "report_not_logged": "`InstabilityReport` could not log its page to {logger}: {error}. "
    "Training continues.",
    "tensors_not_written": "`TensorCollector` could not write to {path!r}: {error}. Training "
    "continues. Pass a writable `dirpath`.",
    "alert_not_sent": "`InstabilityReport(alert=...)` could not send an alarm to {alert}: {error}. "
    "Training continues. Check that this machine can reach the receiver.",
    "hook_failed": "`{callback}.on_exception` failed: {error!r}.",
}


def usage(key: str, **fields: Any) -> str:
    return USAGE[key].format(**fields)
