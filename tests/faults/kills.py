"""Processes that are killed amid a fit, and resumed from the newest checkpoint there is."""

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
from tests.faults.runs import KINDS, Run, assert_same, newest_checkpoint, unharmed
from tests.processes import exit_code_of

__all__ = ["KILLS", "SHORT", "Kill"]

HOOKS = (
    *("on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"),
    *("on_save_checkpoint", "on_validation_start", "on_train_epoch_end", "on_train_end"),
)
# The unharmed run has more: a mark to rewind to, a checkpoint and a page every three steps.
EFFECTS = 60
SHORT = {
    *("BalancedAMP-hook-on_train_batch_end-2", "PureFP16-effect-28-1"),
    *("BalancedAMP-write-40-1", "InfCLStrategy-write-22-1"),
}


@dataclass(frozen=True)
class Kill:
    """Where a run of a kind is killed.

    Args:
        kind: Of the run.
        how: In a hook of a callback, before an effect on its folder, or amid a write there.
        where: The hook's name, or the number of the effect.
        count: Which call of the hook.
    """

    kind: str
    how: str
    where: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.how}-{self.where}-{self.count}"

    def check(self) -> None:
        """Kill, resume, and compare with a run that nothing has ended."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            expected = -signal.SIGXFSZ if self.how == "write" else -signal.SIGKILL
            code = exit_code_of(_train_until, self, name)
            # The last files may be too short to be cut.
            assert code == expected or (self.how == "write" and code == 0), code
            run = Run(self.kind, folder)
            run.fit(newest_checkpoint(folder))
            assert_same(run.end(), unharmed(self.kind))
            assert run.page()["run"]["end"]["how"] == "finished"
            assert run.alarms() == []
            # Of the killed run an empty folder may stay, and the file that it was writing.
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
    # Where Lightning writes to before its checkpoint has its name.
    tempfile.tempdir = str(folder / "temporary")
    Path(tempfile.tempdir).mkdir()
    if kill.how == "hook":
        Run(kill.kind, folder, behind=[Dies(kill.where, kill.count)]).fit()
        return
    befalls: Callable[..., None] = die if kill.how == "effect" else die_while_writing
    run = Run(kill.kind, folder)
    with effects_on(folder, lambda n, *_: befalls() if n == int(kill.where) else None):
        run.fit()
