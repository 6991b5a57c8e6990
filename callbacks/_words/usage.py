"""What callbacks say of how they are used: errors, and warnings while training."""

from typing import Any

__all__ = ["USAGE", "usage"]

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
    "no_features": "`RepresentationMonitor` found no loss of lightning-mp among the modules of the "
    "model. Pass the towers: `RepresentationMonitor(modules=['image_tower', 'text_tower'])`.",
    "skip_sync": "`SpikeGuard(action='skip')` reads one flag a step from the device, because "
    "`{optimizer}` cannot skip there. Pass `fused=True` to the optimizer if it has that, or train "
    "with `BalancedAMP`, to save this host sync.",
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
    "preflight_no_loss": "No loss was returned by `training_step`.",
    "preflight_not_finite": "The loss is {loss} in fp32, so half precision is not the cause.",
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
