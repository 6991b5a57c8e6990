"""What a parameter costs, against what is alive after a step of each precision."""

import gc
import logging
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import BalancedAMP
from lightning_mp.plan.precisions import PRECISIONS

WIDTH, ROWS, STEPS = 512, 4, 3


class _Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ended_ns = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_batch_end(self, *_: object) -> None:
        self.ended_ns = time.time_ns()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "copies_at_rest"),
    [("32-true", 0), ("bf16-mixed", 0), ("bf16-true", 0), ("BalancedAMP", 2)],
)
def test_parameter_costs_what_the_table_says(name: str, copies_at_rest: int) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    precision = {"plugins": [BalancedAMP()]} if name == "BalancedAMP" else {"precision": name}
    gc.collect()  # what is freed in between would count
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiled:
        model = _Model()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **precision,  # type: ignore[arg-type]
        )
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(STEPS * ROWS, WIDTH)), ROWS))
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    alive = sum(
        event.nbytes()
        for event in events
        if event.name() == "[memory]" and event.start_ns() <= model.ended_ns
    )
    table = PRECISIONS[name]
    # Weights, gradients, states, buckets; autocast's half copies are gone after the forward.
    expected = table.at_rest(1, 8) + table.gradient - table.copy + copies_at_rest
    beside = alive - expected * WIDTH**2
    # The data set and the batch in use; less than 4 KiB are numbers and Adam's step.
    assert 0 <= beside <= (STEPS + 1) * ROWS * WIDTH * 4 + 4096
