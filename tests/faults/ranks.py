"""If a rank raises, exits, hangs or is killed, the other ranks end in time and name the reason."""

import logging
import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_mp import ContrastiveRecall
from tests.faults.effects import die
from tests.faults.runs import KINDS, Run

__all__ = ["RANKS", "SHORT", "Drop"]

TIMEOUT = timedelta(seconds=15)  # timeout of a collective
PATIENCE = 60.0  # seconds for a run that takes two seconds on an idle machine
STEP = 4
WAYS = ("raises", "leaves", "is killed", "hangs")
POINTS = (
    *("setup", "on_train_start", "on_train_batch_start", "in the forward", "in the backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_save_checkpoint"),
    *("on_validation_batch_end", "on_train_epoch_start"),
)


@dataclass(frozen=True)
class Drop:
    """The loss of the last rank of a run.

    Args:
        kind: Kind of the run, a key of `KINDS`.
        ranks: Number of ranks, including the last one.
        how: One of `WAYS`.
        point: A hook of a callback, or a place in the fifth step.
    """

    kind: str
    ranks: int
    how: str
    point: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}-{self.how}-{self.point}".replace(" ", "_")

    def check(self) -> None:
        """Run all ranks, and check the errors of the ranks without a fault."""
        context = get_context("forkserver")
        with tempfile.TemporaryDirectory() as folder:
            work = [(rank, self, folder) for rank in range(self.ranks)]
            processes = [context.Process(target=_run, args=args) for args in work]
            for process in processes:
                process.start()
            ends = time.monotonic() + PATIENCE
            for process in processes[:-1]:
                process.join(max(ends - time.monotonic(), 0.1))
            hanging = [process for process in processes if process.is_alive()]
            for process in hanging:
                process.kill()
            assert not set(hanging) & set(processes[:-1]), "ranks hang"
            for rank in range(self.ranks - 1):
                said = (Path(folder) / f"rank {rank}").read_text()
                kind, _, message = said.partition(": ")
                assert kind.endswith(("Error", "Exception")), said
                words = ("peer", "onnect", "imed out", "imeout", "ranks", "Socket", "closed")
                assert any(word in message for word in words), said


class Recalls(pl.Callback):
    """Computes the recall over all ranks in validation."""

    def __init__(self) -> None:
        self.recall = ContrastiveRecall(top_k=[1])

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if hasattr(module, "features"):
            self.recall.update(*(each.detach() for each in module.features(args[1])))
            self.recall.compute()


class Fails(pl.Callback):
    """Ends its rank at a point of the run."""

    def __init__(self, how: str, point: str) -> None:
        self.how, self.point = how, point
        if point.startswith("on_") or point == "setup":
            setattr(self, point, self._at)

    def _at(self, trainer: pl.Trainer, *_: Any) -> None:
        is_late = trainer.global_step >= STEP or self.point in ("setup", "on_train_start")
        if is_late:
            fail(self.how)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        if self.point == "in the backward" and trainer.global_step == STEP:
            p = next(p for p in module.parameters() if p.requires_grad)
            p.register_post_accumulate_grad_hook(lambda _: fail(self.how))


def fail(how: str) -> None:
    """Raise, exit, hang, or kill this process."""
    if how == "raises":
        raise OSError("a disk that is gone")
    if how == "leaves":
        os._exit(1)
    if how == "is killed":
        die()
    time.sleep(10 * PATIENCE)


def _run(rank: int, drop: Drop, folder: str) -> None:
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    environment = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": drop.ranks}
    environment |= {"LOCAL_WORLD_SIZE": drop.ranks, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=drop.ranks,
            timeout=TIMEOUT,
        )
        _train(rank, drop, folder)
        said = "None: the run came to its end"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    (Path(folder) / f"rank {rank}").write_text(said)
    os._exit(0)  # a regular exit might wait for the lost rank


def _train(rank: int, drop: Drop, folder: str) -> None:
    is_faulty = rank == drop.ranks - 1
    callbacks: list[pl.Callback] = [
        Recalls(),
        *([Fails(drop.how, drop.point)] if is_faulty else []),
    ]
    strategy = {} if drop.kind == "InfCLStrategy" else {"strategy": DDPStrategy()}
    run = Run(drop.kind, Path(folder), callbacks, devices=drop.ranks, max_epochs=4, **strategy)
    if drop.point == "in the forward" and is_faulty:
        step = run.model.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            loss = step(batch, batch_idx)
            if run.trainer.global_step == STEP:
                fail(drop.how)
            return loss

        run.model.training_step = training_step
    run.fit()


RANKS = [
    Drop(kind, ranks, how, point)
    for kind in KINDS
    for ranks, how in ((2, "raises"), (3, "is killed"), (2, "leaves"))
    for point in POINTS
] + [Drop(kind, 2, "hangs", "on_train_batch_start") for kind in KINDS]
SHORT = {
    "InfCLStrategy-2-raises-in_the_forward",
    "BalancedAMP-3-is_killed-on_before_optimizer_step",
}
