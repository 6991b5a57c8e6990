"""Runs that are killed during `fit` resume exactly from the newest checkpoint."""

import logging
import signal
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from tests.faults.effects import die, die_while_writing, effects_on
from tests.faults.runs import KINDS, Run, assert_same, end_without_fault, newest_checkpoint
from tests.processes import exit_code_of

__all__ = ["KILLS", "SHORT", "Kill"]

HOOKS = (
    *("on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"),
    *("on_save_checkpoint", "on_validation_start", "on_train_epoch_end", "on_train_end"),
)
# A run without a fault has more disk operations: a mark, a checkpoint and a page every three steps.
EFFECTS = 60
SHORT = {
    *("BalancedAMP-hook-on_train_batch_end-2", "PureFP16-effect-28-1"),
    *("BalancedAMP-write-40-1", "InfCLStrategy-write-22-1"),
}


@dataclass(frozen=True)
class Kill:
    """A kill of the process of a run.

    Args:
        kind: Kind of the run, a key of `KINDS`.
        how: In a `"hook"` of a callback, before an `"effect"` (a disk operation), or during a
            `"write"`.
        where: Name of the hook, or number of the disk operation.
        count: Number of the call of the hook.
    """

    kind: str
    how: str
    where: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.how}-{self.where}-{self.count}"

    def check(self) -> None:
        """Kill a run, resume it, and compare with a run without a fault."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            expected = -signal.SIGXFSZ if self.how == "write" else -signal.SIGKILL
            code = exit_code_of(_train_until, self, name)
            # The last files may be so short that no write exceeds the limit.
            assert code == expected or (self.how == "write" and code == 0), code
            run = Run(self.kind, folder)
            run.fit(newest_checkpoint(folder))
            assert_same(run.end(), end_without_fault(self.kind))
            assert run.page()["run"]["end"]["how"] == "finished"
            assert run.alarms() == []
            # The killed run may leave an empty folder, and the file that it was writing.
            left = [path for path in folder.rglob("*") if path.is_file()]
            assert not [path for path in left if path.parent.name.startswith("spike_guard")], left
            assert sum(path.name.startswith(".") for path in left) <= 1, left


def _kills() -> list[Kill]:
    hooks = [
        Kill(kind, "hook", hook, count)
        for kind in KINDS
        for hook in HOOKS
        for count in ((1,) if hook == "on_train_end" else (1, 2))
    ]
    effects = [Kill(kind, "effect", str(n)) for kind in KINDS for n in range(1, EFFECTS + 1)]
    writes = [Kill(kind, "write", str(n)) for kind in KINDS for n in range(1, EFFECTS + 1, 3)]
    return [*hooks, *effects, *writes]


KILLS = _kills()


class Dies(pl.Callback):
    """Kills its process at a call of one of its hooks."""

    def __init__(self, hook: str, count: int) -> None:
        self.left = count
        setattr(self, hook, self._call)

    def _call(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            die()


def _train_until(kill: Kill, name: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    folder = Path(name)
    # Lightning writes a checkpoint here before it is renamed.
    tempfile.tempdir = str(folder / "temporary")
    Path(tempfile.tempdir).mkdir()
    if kill.how == "hook":
        Run(kill.kind, folder, after=[Dies(kill.where, kill.count)]).fit()
        return
    injects: Callable[..., None] = die if kill.how == "effect" else die_while_writing
    run = Run(kill.kind, folder)
    with effects_on(folder, lambda n, *_: injects() if n == int(kill.where) else None):
        run.fit()
