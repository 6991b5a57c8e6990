"""Monitors on ranks that call different modules, as experts, under DDP."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import ActivationRangeMonitor, RepresentationMonitor
from tests.callbacks.test_monitors_together import monitors
from tests.processes import run_ranks
from tests.quiet import QUIET

WIDTH = 8


class _Experts(pl.LightningModule):
    """Calls the expert of the rank, from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        chosen = self.experts if batch_idx < 3 else [self.experts[self.global_rank]]
        return sum((expert(batch).square().mean() for expert in chosen), torch.zeros(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _train(rank: int, names: list[str] | None) -> list[Any]:
    if names is None:
        watching = monitors(every_n_steps=1)
    else:
        watching = [
            ActivationRangeMonitor(modules=names, every_n_steps=1),
            RepresentationMonitor(modules=names, every_n_steps=1),
        ]
    trainer = pl.Trainer(
        **{**QUIET, "max_epochs": 1, "devices": 2, "callbacks": watching},
        strategy=DDPStrategy(find_unused_parameters=True),
        use_distributed_sampler=False,
    )
    generator = torch.Generator().manual_seed(rank)
    data: Any = torch.randn(8, 6, WIDTH, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(_Experts(), DataLoader(data, batch_size=None))
    return [(monitor.history.curves, monitor.history.maps) for monitor in watching]


@pytest.mark.distributed
@pytest.mark.parametrize("names", [None, ["experts.0"]], ids=["all monitors", "one expert"])
def test_ranks_that_call_different_experts_measure_the_same(names: list[str] | None) -> None:
    histories, others = run_ranks(_train, 2, names)
    assert repr(histories) == repr(others)
    (headroom,) = (
        curves["activation_headroom_bits"]
        for curves, _ in histories
        if "activation_headroom_bits" in curves
    )
    assert [step for step, _ in headroom] == list(range(8))
