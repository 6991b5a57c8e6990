"""Full disks, failing disk operations and missing folders do not end a run."""

import logging
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from tests.callbacks.disks import full_disk
from tests.faults.effects import effects_on, refuse
from tests.faults.runs import KINDS, STEPS, Run, assert_same, end_without_fault
from tests.processes import exit_code_of

__all__ = ["DISKS", "SHORT", "Disk", "check_disks"]

EFFECTS = 40  # a run without Lightning's checkpoints has more disk operations
WAYS = ("full", "in the way", "removed", "removed at every step")


@dataclass(frozen=True)
class Disk:
    """A fault of the disk or of the log folder.

    Args:
        kind: Kind of the run, a key of `KINDS`.
        how: `"effect"`: one disk operation fails. Otherwise one of `WAYS`: the disk is full from a
            step on, a file has the path of the folder, or the folder is removed.
        where: Number of the disk operation, or the step.
    """

    kind: str
    how: str
    where: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.how}-{self.where}".replace(" ", "_")

    def check(self) -> None:
        """Train with the fault, and compare with a run without a fault."""
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            folder, refused = Path(name) / "logs", [""]
            run = self._train(folder, refused)
            assert run.trainer.global_step == STEPS
            assert_same(run.end(), end_without_fault(self.kind))
            assert run.alarms() == []
            said = [str(each.message) for each in caught]
            failures = [each for each in said if re.search("Error: ", each)]
            assert not [each for each in failures if "tmp" in each.replace(name, "")], failures
            assert not [each for each in failures if re.search(r"/\.[^/]+\.\d+", each)], failures
            assert len(failures) == len(set(failures)) <= 2, failures
            if self.how == "effect":
                assert refused[-1], "the run has fewer effects"
            if self.how in ("full", "in the way") or refused[-1] in ("open", "os.rename"):
                assert failures, said
            left = [path.parent.name for path in Path(name).rglob("*") if path.is_file()]
            assert self.how == "effect" or not [e for e in left if e.startswith("spike")], left
            # After a single failure the page is written later; a full disk stays full.
            if self.how in ("effect", "removed"):
                assert run.page()["run"]["end"]["how"] == "finished"

    def _train(self, folder: Path, refused: list[str]) -> Run:
        with ExitStack() as stack:
            if self.how == "in the way":
                folder.write_text("a file")
            else:
                folder.mkdir()
            each: Callable[[int], Any] = lambda step: None  # noqa: E731
            if self.how == "full":
                each = lambda s: stack.enter_context(full_disk()) if s == self.where else None  # noqa: E731
            elif self.how == "removed":
                each = lambda s: shutil.rmtree(folder) if s == self.where else None  # noqa: E731
            elif self.how == "removed at every step":
                each = lambda s: shutil.rmtree(folder, ignore_errors=True)  # noqa: E731
            if self.how == "effect":

                def inject(n: int, event: str, path: str) -> None:
                    if n == self.where:
                        refused.append(event)
                        refuse(event, path)

                stack.enter_context(effects_on(folder, inject))
            run = Run(self.kind, folder, [AtSteps(each)], has_checkpoints=False)
            run.fit()
        return run


class AtSteps(pl.Callback):
    """Calls a function at the start of every step."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self.call = call

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.call(trainer.global_step)


def _disks() -> list[Disk]:
    steps = range(0, STEPS, 2)
    ways = [Disk(k, how, n) for k in KINDS for how in WAYS[:3] for n in steps]
    ways = [each for each in ways if each.how != "in the way" or each.where == 0]
    always = [Disk(kind, "removed at every step", 0) for kind in KINDS]
    effects = [Disk(kind, "effect", n) for kind in KINDS for n in range(1, EFFECTS + 1)]
    return [*ways, *always, *effects]


DISKS = _disks()
SHORT = {
    *("BalancedAMP-full-4", "PureFP16-removed-6", "PureFP16-in_the_way-0"),
    *("BalancedAMP-removed_at_every_step-0", "BalancedAMP-effect-9", "BalancedAMP-effect-20"),
}


def check_disks(disks: list[Disk]) -> None:
    """Check cases in a separate process, because an audit hook cannot be removed."""
    with tempfile.NamedTemporaryFile() as said:
        assert exit_code_of(_check_all, disks, said.name) == 0, Path(said.name).read_text()


def _check_all(disks: list[Disk], said: str) -> None:
    logging.disable()
    for disk in disks:
        try:
            disk.check()
        except BaseException as error:
            Path(said).write_text(f"{disk}: {type(error).__name__}: {error}")
            raise
