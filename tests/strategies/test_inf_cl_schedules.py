"""Towers that are frozen and unfrozen in training, against one process with the global batch."""

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_mp import InfCLModelParallelStrategy, InfCLStrategy
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.reference.contrastive import relative_error
from tests.strategies.models import TinyCLIP, loader, make_trainer

pytestmark = pytest.mark.distributed

BATCH, STEPS, EPOCHS, ROWS = 24, 1, 4, 7


class Scheduled(TinyCLIP):
    """A float64 model with weight decay, which acts on gradients of zeros but not on `None`."""

    def __init__(self, schedule: str) -> None:
        super().__init__(dropout=0.0, automatic=schedule != "toggled")
        self.schedule = schedule
        self.double()
        if schedule == "finetuning":
            self.backbone = self.visual
            del self.visual
        if schedule in THAWED:
            self.thaw(0)
        self.teacher = copy.deepcopy(self.text).requires_grad_(False)

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for tower in (self.tower, self.text, self.head, self.teacher):
                fully_shard(tower, mesh=self.device_mesh["data_parallel"])

    @property
    def tower(self) -> nn.Module:
        return self.backbone if self.schedule == "finetuning" else self.visual

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        image = self.head(self.tower(batch[0]))
        if self.schedule == "unused" and self.trainer.global_step % 2:
            image = self.tower(batch[0])
        return tuple(nn.functional.normalize(x, dim=-1) for x in (image, self.text(batch[1])))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if self.schedule != "toggled":
            loss = super().training_step(batch, batch_idx)
            if self.schedule == "teacher":
                with torch.no_grad():
                    target = self.teacher(batch[1])
                loss = loss + (self.text(batch[1]) - target - 1).square().mean()
            return loss
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(*self.features(batch), self.log_scale.exp()))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return None

    def on_after_backward(self) -> None:
        if self.schedule == "clipped in a hook":  # which sees averaged gradients, as under DDP
            for gradient in (p.grad for p in self.parameters() if p.grad is not None):
                gradient.clamp_(-0.02, 0.02)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.schedule == "teacher":
            for slow, fast in zip(self.teacher.parameters(), self.text.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)

    def on_train_epoch_start(self) -> None:
        if self.schedule in THAWED:
            self.thaw(self.current_epoch)

    def thaw(self, epoch: int) -> None:
        for name, frozen in THAWED[self.schedule].items():
            self.get_submodule(name).requires_grad_(epoch not in frozen)

    def configure_optimizers(self) -> Any:
        def adam(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

        if self.schedule == "toggled":
            others = [*self.text.parameters(), *self.head.parameters(), self.log_scale]
            return [adam(self.visual.parameters()), adam(others)]
        if self.schedule == "finetuning":
            return adam([p for p in self.parameters() if p.requires_grad])
        return adam(self.parameters())

    def on_train_end(self) -> None:
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
        self.end = torch.cat([p.detach().flatten() for p in full])


# The epochs in which modules are frozen.
THAWED: dict[str, dict[str, set[int]]] = {
    "locked image, then unlocked": {"visual": {0, 1}},
    "progressive": {"visual": {0, 1}, "text.0": {0, 1, 2}, "text.4": {0}},
    "frozen in the middle": {"text": {1, 2}, "head": {2}},
}
SCHEDULES = [*THAWED, "finetuning", "toggled", "teacher", "unused", "clipped in a hook"]


def _fit(strategy: Any, schedule: str, rows: slice, **kwargs: Any) -> Scheduled:
    model = Scheduled(schedule)
    callbacks: list[pl.Callback] = []
    if schedule == "finetuning":
        callbacks = [BackboneFinetuning(1, backbone_initial_lr=1e-2, should_align=False)]
    batches = [[x[rows].double() for x in batch] for batch in loader(BATCH * STEPS, BATCH)]
    trainer = make_trainer(
        strategy,
        max_epochs=EPOCHS,
        limit_val_batches=1,
        callbacks=callbacks,
        use_distributed_sampler=False,
        **kwargs,
    )
    data = DataLoader(batches, batch_size=None)
    trainer.fit(model, data, DataLoader(batches, batch_size=None))  # validation gathers shards
    return model


def _train(rank: int, world_size: int, sharded: bool, schedules: list[str]) -> dict[str, Any]:
    size = BATCH // world_size
    results = {}
    for schedule in schedules:
        towers = ["backbone" if schedule == "finetuning" else "visual", "text"]
        kind = InfCLModelParallelStrategy if sharded else InfCLStrategy
        strategy = kind(towers=towers, micro_batch_size=ROWS)
        rows = slice(rank * size, (rank + 1) * size)
        results[schedule] = _fit(strategy, schedule, rows, devices=world_size).end
    return results


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    ends = {schedule: _fit("auto", schedule, slice(None)).end for schedule in SCHEDULES}
    for schedule, end in ends.items():
        # Every parameter has moved, so the comparison is not trivial.
        moved = (end - parameters_of(Scheduled(schedule))).abs()
        assert moved[: len(moved) // 4].max() > 1e-2
    return ends


# Two ranks and shards run every schedule; three ranks add an average that is not a half.
SOME = ["progressive", "unused"]


@pytest.mark.parametrize(
    ("world_size", "sharded", "schedules"),
    [
        (1, False, SCHEDULES),
        (2, False, SCHEDULES),
        (2, True, SCHEDULES),
        pytest.param(3, False, SOME, marks=pytest.mark.slow),
        pytest.param(3, False, SCHEDULES, marks=pytest.mark.sweep),
    ],
    ids=["1", "2", "2-sharded", "3", "3-all"],
)
def test_towers_frozen_and_unfrozen_train_like_in_one_process(
    expected: dict[str, Tensor], world_size: int, sharded: bool, schedules: list[str]
) -> None:
    first, *others = run_ranks(_train, world_size, world_size, sharded, schedules)
    for schedule, end in first.items():
        # float64; AdamW's quotients lose some digits for small gradients.
        assert relative_error(end, expected[schedule]) < 1e-9, schedule
        for other in others:
            assert torch.equal(end, other[schedule]), f"{schedule}: ranks differ"


class Normalized(TinyCLIP):
    """Records a running average before the towers of each step update it."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.visual = nn.Sequential(nn.BatchNorm1d(12), self.visual)
        self.means: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.means.append(self.visual[0].running_mean.clone())
        return super().training_step(batch, batch_idx)


def _normalise(rank: int) -> Tensor:
    model = Normalized()
    # Its last epoch updates running averages without backwards; then validation needs rank 0's.
    averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    strategy = InfCLStrategy(micro_batch_size=4)
    trainer = make_trainer(strategy, devices=2, max_epochs=2, callbacks=[averaging])
    trainer.fit(model, loader(48, 8), loader(16, 8))
    return torch.stack([*model.means[:6], model.visual[0].running_mean])


def test_buffers_of_rank_0_are_sent_before_every_forward() -> None:
    first, second = run_ranks(_normalise, 2)
    assert torch.equal(first, second)
    assert len(first.unique(dim=0)) == len(first) == 7
