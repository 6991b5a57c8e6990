"""`PrecisionPreflight`: names the modules that half precision hurts, and settings that fix it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_mp._arguments import PATH, explains_arguments
from lightning_mp._files import Failures, save_new
from lightning_mp.callbacks._locate.replay import restored_training
from lightning_mp.callbacks._preflight.page import (
    preflight_page,
    settings_of,
    table_of,
    verdict_in_words,
)
from lightning_mp.callbacks._preflight.result import Preflight
from lightning_mp.callbacks._preflight.runs import Runs
from lightning_mp.callbacks._preflight.search import preflight_step
from lightning_mp.callbacks._step.training_state import is_sharded
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.callbacks.instability_report import InstabilityReport

__all__ = ["PrecisionPreflight"]


@explains_arguments(checks={"steps": "[1, inf)", "dirpath": PATH})
class PrecisionPreflight(pl.Callback):
    r"""Compares the first steps with fp32, module by module, and prints settings that fix them.

    Before the step of each of the first batches, the batch is run in fp32 and under the precision
    plugin, from the same weights and generators. Each module also runs alone on its inputs of the
    half run, which separates its own error from the errors of its inputs. The error of a gradient
    is measured in units of gradient noise:

    .. math::
        r = \max_p \frac{\lVert g_{16}^p - g_{32}^p \rVert}{\lVert g_{32}^p(B_1) -
            g_{32}^p(B_2) \rVert}

    for the halves :math:`B_1, B_2` of the batch. An :math:`r` below 5% is clean. Otherwise other
    loss scales, `inf_clamp`, `fp32_modules`, `fp32_ops` and the other dtype are tried, each by a
    run, and the YAML of the cheapest remedy is logged. All runs leave out dropout. Weights,
    optimizers, generators, buffers, metrics and data stay as they were, bit for bit.

    Args:
        steps: Number of batches to compare.
        dirpath: Folder for the page `preflight.html`. The default is the folder of
            `InstabilityReport`, which links to the page; without a report there is no page.
        stops: Whether the run ends after these batches, as with `lightning-mp preflight`.

    Raises:
        ValueError: An argument is out of range.

    Example: `Trainer(callbacks=PrecisionPreflight())`
    """

    def __init__(self, *, steps: int = 4, dirpath: str | None = None, stops: bool = False) -> None:
        self.steps = steps
        self.dirpath = dirpath
        self.stops = stops
        self.result: Preflight | None = None
        """The result, complete after the last of the steps."""
        self.failure: str | None = None
        """The reason if nothing was measured."""
        self.settings = ""
        """The YAML of the remedy."""
        self.text = ""
        """The verdict, the modules with the largest errors, and the settings."""
        self.path: Path | None = None
        """Path of the page on rank zero; `None` if none was written."""
        self._seen, self._wanted = 0, steps

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin = trainer.precision_plugin
        most = trainer.estimated_stepping_batches  # -1 for data of unknown length
        self._wanted = self.steps if most < 0 else int(min(self.steps, most))
        if trainer.global_step == 0:  # forget an earlier run
            self._seen, self.result, self.failure = 0, None, None
        reason = None
        if trainer.global_step > 0:
            self._seen = self._wanted  # a resumed run was compared when it began
        elif not pl_module.automatic_optimization:
            reason = usage("preflight_manual")
        elif is_sharded(trainer):
            reason = usage("preflight_sharded")
        elif "16" not in str(plugin.precision):
            reason = usage("preflight_fp32", precision=str(plugin.precision))
        if reason is not None:
            self._end(reason)
        trainer.should_stop |= self.stops and self._seen >= self._wanted

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._seen >= self._wanted:
            return
        self._seen += 1
        try:
            with restored_training(trainer, batch):
                self._compare(trainer, batch, batch_idx)
        except Exception as error:
            text = (str(error).splitlines() or [""])[0][:200].removesuffix(".")
            self._end(usage("preflight_failed", name=type(error).__name__, text=text))
        trainer.should_stop |= self.stops and self._seen >= self._wanted

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._seen < self._wanted and self.result is not None:  # the data have ended
            self._conclude(trainer, self.result)

    def _compare(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        runs = Runs(trainer, batch, batch_idx)
        agree = trainer.strategy.broadcast if trainer.world_size > 1 else lambda value: value
        self.result = preflight_step(runs, self.result, agree)
        if self.result is None:
            self._end(usage("preflight_rows"))
        elif self._seen == self._wanted:
            self._conclude(trainer, self.result)

    def _conclude(self, trainer: pl.Trainer, found: Preflight) -> None:
        plugin = trainer.precision_plugin
        self.settings = settings_of(found, plugin)
        verdict = verdict_in_words(found, type(plugin).__name__)
        self._write(trainer, verdict)
        said = [verdict, "", table_of(found), *found.notes]
        if self.settings:
            said.append(f"\nPaste into the configuration:\n\n{self.settings}")
        self.text = "\n".join(said)
        if not self.stops:
            rank_zero_info(self.text)

    def _write(self, trainer: pl.Trainer, verdict: str) -> None:
        folder = self.dirpath
        for each in trainer.callbacks:  # type: ignore[attr-defined]
            if folder is None and isinstance(each, InstabilityReport):
                folder = str(each.page_path(trainer).parent)
        if folder is None or not trainer.is_global_zero or self.result is None:
            return
        wanted = Path(folder).absolute() / "preflight.html"
        title = type(trainer.lightning_module).__name__
        text = preflight_page(self.result, title, verdict, self.settings)
        with Failures(usage).forgiven("report_not_written", path=str(wanted)):
            self.path = save_new(wanted, lambda file: file.write(text.encode()))

    def _end(self, failure: str) -> None:
        self._seen, self.failure = self._wanted, failure
        rank_zero_warn(failure)
