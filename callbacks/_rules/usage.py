"""What callbacks say of how they are used: errors and warnings that no rule raises, all here.

`tests/callbacks/golden/usage.txt` holds each of them with samples, for review.
"""

from typing import Any

__all__ = ["ACCEPTED", "USAGE", "usage"]

_WRITTEN_BY = "It is written by the callback `InstabilityReport`, as `instability.json`."
_ALIVE = "{error}. Training goes on."

USAGE = {
    # --- arguments -------------------------------------------------------------------------------
    "argument": "Passed `{callback}({name}={value!r})`. `{name}` must be {accepted}. Leave it out "
    "for the default.",
    "judge_after_steps": "Passed `SpikeGuard(judge_after_steps={judge_after_steps!r}, "
    "window_steps={window_steps!r})`. `judge_after_steps` must be at most `window_steps`. Pass "
    "`judge_after_steps={fitting}`.",
    "shares": "Passed `GradientUnderflowMonitor(warn_share={warn_share!r}, "
    "alarm_share={alarm_share!r})`. They must be shares between 0 and 1, the first the lower. Pass "
    "0.01 and 0.05.",
    "filename": "Passed `InstabilityReport(filename={filename!r})`. `filename` must be a file's "
    "name that ends in .html, without a folder. Pass the folder as `dirpath`.",
    "regular_expression": "Passed `TensorCollector(include=[{pattern!r}])`. What follows `re:` "
    "must be a regular expression: {error}. Leave out `re:` to write `*` and `?`.",
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
    "batch_saved": "Its batch is in `{path}`.",
    "before_resuming": "This was before the run was resumed.",
    "batch_not_saved": "A batch could not be saved in {path!r}: " + _ALIVE + " Train where the log "
    "folder can be written to.",
    "report_not_written": "`InstabilityReport` could not write {path!r}: " + _ALIVE + " Pass a "
    "`dirpath` that can be written to.",
    "report_logged": "All of it is in `{page}`.",
    "report_not_logged": "`InstabilityReport` could not give its page to {logger}: " + _ALIVE,
    "tensors_not_written": "`TensorCollector` could not write to {path!r}: " + _ALIVE + " Pass a "
    "`dirpath` that can be written to.",
    "alert_not_sent": "Passed `InstabilityReport(alert=...)`, {alert} that an alarm could not be "
    "sent to: " + _ALIVE + " Check that it can be reached from this machine.",
    "hook_failed": "`{callback}.on_exception` failed: {error!r}.",
    # --- `lightning-mp report` -------------------------------------------------------------------
    "no_report_data": "Passed {path!r}, which does not hold a report's data. " + _WRITTEN_BY
    + " Pass the folder of a run.",
    "no_folder": "Passed {path!r}, which does not exist. Pass the folder of a run.",
    "several_reports": "Passed {path!r}, which holds the data of {count} reports: {names}. Pass "
    "one of them.",
    "no_report": "Passed {path!r}, which holds no report's data, and neither do the folders in it. "
    + _WRITTEN_BY + " Add it to the callbacks of the run, or pass its `dirpath`.",
}  # fmt: skip

ACCEPTED = {
    "at_least": "an integer of at least {least}",
    "to_500": "an integer from 1 to 500",
    "positive": "a positive number",
    "finite": "finite",
    "below_1": "below 1",
    "at_most_1": "at most 1",
    "headroom": "from 0 to 16, where 65504 itself has 0 bits",
    "one_of": "one of {names}",
    "list": "a list of {names}",
    "alert": "a function, or a URL that begins with http:// or https://",
}
"""What `argument` says that an argument must be."""


def usage(key: str, **fields: Any) -> str:
    return USAGE[key].format(**fields)
