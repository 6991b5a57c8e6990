"""The gradient cache in plain torch and in Fabric trains like the strategy."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from examples import plain_torch
from lightning_mp.gradient_cache import GradientCache
from lightning_mp.strategies import InfCLStrategy
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.reference.contrastive import relative_error
from tests.strategies.models import make_trainer

STEPS = 5


class Module(pl.LightningModule):
    def __init__(self, clip: plain_torch.CLIP) -> None:
        super().__init__()
        self.clip = clip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.clip(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_clip() -> plain_torch.CLIP:
    torch.manual_seed(0)
    return plain_torch.CLIP()


def _example(clip: plain_torch.CLIP) -> None:
    plain_torch.train(clip, STEPS)


def _strategy(clip: plain_torch.CLIP) -> None:
    strategy = InfCLStrategy(towers=["clip.visual", "clip.text"], micro_batch_size=16)
    batches = [plain_torch.batch(step) for step in range(STEPS)]
    trainer = make_trainer(strategy, devices=2, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Module(clip), DataLoader(batches, batch_size=None))


def _fabric(clip: plain_torch.CLIP) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(clip, torch.optim.SGD(clip.parameters(), lr=0.1))
    cache = GradientCache(micro_batch_size=16)
    for step in range(STEPS):
        optimizer.zero_grad()
        with cache.serving(clip, ["visual", "text"]):
            loss = model(*plain_torch.batch(step))
        fabric.backward(loss)
        optimizer.step()


def _plainly(clip: plain_torch.CLIP) -> None:
    ddp = DistributedDataParallel(clip)
    optimizer = torch.optim.SGD(clip.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(*plain_torch.batch(step)).backward()
        optimizer.step()


def _train(rank: int) -> list[Tensor]:
    weights = []
    for train in (_plainly, _example, _strategy, _fabric):
        clip: Any = make_clip()
        train(clip)
        weights.append(parameters_of(clip))
    return weights


@pytest.mark.distributed
def test_plain_torch_and_fabric_train_as_the_strategy_and_as_without_a_cache() -> None:
    start = parameters_of(make_clip())
    results = run_ranks(_train, 2)
    for expected, *others in results:
        assert relative_error(expected, start) > 1e-3
        for weights in others:
            assert relative_error(weights, expected) < 1e-5
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
