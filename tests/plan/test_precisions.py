"""Bytes of a parameter in each precision equal the memory in use after a step."""

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import BalancedAMP
from lightning_mp.plan.subject import PRECISIONS, Subject, state_bytes
from tests.quiet import QUIET

WIDTH, ROWS, STEPS = 512, 4, 3


class _Model(pl.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = optimizer
        self.ended_ns = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.optimizer, self)

    def on_train_batch_end(self, *_: object) -> None:
        self.ended_ns = time.time_ns()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim.AdamW": {},
    "torch.optim.SGD": {},
    "torch.optim.SGD with momentum": {"momentum": 0.9},
    "torch.optim.Adafactor": {},  # factored; reads its step count
    "transformers.optimization.Adafactor": {"beta1": 0.9, "relative_step": False},
    "lightning_mp.SafeAdamW": {},
    "bitsandbytes.optim.AdamW8bit": {},
}


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    module, _, kind = name.partition(" ")[0].rpartition(".")
    make: Callable[..., torch.optim.Optimizer] = getattr(pytest.importorskip(module), kind)
    return make(model.parameters(), lr=1e-4, **OPTIMIZERS[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "copies_at_rest", "optimizer"),
    [
        *(("32-true", 0, optimizer) for optimizer in OPTIMIZERS),
        ("bf16-mixed", 0, "torch.optim.AdamW"),
        *(("bf16-true", 0, optimizer) for optimizer in OPTIMIZERS if "Adafactor" not in optimizer),
        ("BalancedAMP", 2, "torch.optim.AdamW"),
    ],
)
def test_bytes_of_a_parameter_equal_the_table(
    name: str, copies_at_rest: int, optimizer: str
) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    precision = {"plugins": [BalancedAMP()]} if name == "BalancedAMP" else {"precision": name}
    gc.collect()  # memory that is freed during the measurement would count
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiled:
        model = _Model(optimizer)
        trainer = pl.Trainer(
            **QUIET,
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_steps=STEPS,
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
    # Weights, gradients, states, buckets; the half copies of autocast are freed after the forward.
    states = state_bytes([optimizer_of(optimizer, model)], getattr(torch, table.stepped))
    beside = alive - table.at_rest(WIDTH**2, {table.stepped: states})
    beside -= (table.gradient - table.copy + copies_at_rest) * WIDTH**2
    # The dataset and the batch in use, and less than 4 KiB for numbers and Adam's step.
    assert 0 <= beside <= (STEPS + 1) * ROWS * WIDTH * 4 + 4096


def test_states_are_counted_by_group_and_only_for_trained_parameters() -> None:
    rows, columns, frozen = nn.Linear(3, 5), nn.Linear(7, 2), nn.Linear(11, 1).requires_grad_(False)
    groups = [
        {"params": [*rows.parameters(), *frozen.parameters()]},
        {"params": [*columns.parameters()], "momentum": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    assert state_bytes([optimizer], torch.float32) == 4 * (3 * 5 + 5)
    assert state_bytes([optimizer, optimizer], torch.bfloat16) == 2 * 2 * (3 * 5 + 5)


def test_optimizer_that_cannot_step_is_replaced_by_adamw_in_the_table() -> None:
    model = nn.Linear(64, 64)
    known: dict[str, Any] = {"name": "", "towers": {}, "pair_bytes": 1, "precision": "32-true"}
    subject = Subject.of(model, [torch.optim.LBFGS(model.parameters())], **known)
    assert subject.optimizer.startswith("AdamW, because LBFGS cannot step here (LBFGS.step() ")
    values = 64 * 64 + 64
    # Both moments, and the step count of each tensor.
    assert subject.states == {"float32": 8 * values + 2 * 4, "bfloat16": 4 * values + 2 * 4}
