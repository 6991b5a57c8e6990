"""BalancedAMP on two gloo ranks, under DDP and under InfCLStrategy."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.strategies import InfCLStrategy
from tests.precision.models import Regression, fit, gradients_of, loader, parameters_of
from tests.precision.on_ranks import RANKS, STEPS, batches, fit_on_ranks, momentum
from tests.processes import run_ranks
from tests.strategies.models import TinyCLIP
from tests.strategies.models import loader as pairs_loader

pytestmark = pytest.mark.distributed

# --- DDP -----------------------------------------------------------------------------------------


def _train_with_ddp(rank: int) -> dict[str, Tensor]:
    weights = {}
    for reduce_dtype in ("fp32", "half"):
        model = Regression(make_optimizer=momentum, seed=rank)
        plugin = BalancedAMP(loss_scale=2.0**10, reduce_dtype=reduce_dtype)
        fit_on_ranks(model, plugin, batches(rank))
        weights[reduce_dtype] = parameters_of(model)
    return weights


def test_ddp_equals_one_process_with_the_global_batch_and_ranks_are_bitwise_equal() -> None:
    reference, start = Regression(make_optimizer=momentum), parameters_of(Regression())
    assert (
        parameters_of(Regression(seed=1)) - start
    ).norm() > 1  # initial weights differ between ranks
    fit(reference, BalancedAMP(loss_scale=2.0**10), batches())
    expected = parameters_of(reference)
    first, second = run_ranks(_train_with_ddp, RANKS)
    for reduce_dtype in ("fp32", "half"):
        assert torch.equal(first[reduce_dtype], second[reduce_dtype])
        error = (first[reduce_dtype] - expected).norm() / (expected - start).norm()
        assert error < 2**-8, reduce_dtype
    assert not torch.equal(first["fp32"], first["fp32"].half().double())  # more bits than half


class _SmallestGradient(Regression):
    """The gradient is 2^-24, the smallest fp16 number, on every rank."""

    def __init__(self) -> None:
        super().__init__(network=lambda: nn.Linear(4, 1, bias=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.network.weight * 2.0**-24).sum()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.gradient = gradients_of(optimizer)[0].clone()


def _average_the_smallest_gradient(rank: int) -> dict[str, Tensor]:
    gradients = {}
    for reduce_dtype in ("fp32", "half"):
        model = _SmallestGradient()
        plugin = BalancedAMP(loss_scale=1.0, reduce_dtype=reduce_dtype)
        fit_on_ranks(model, plugin, loader(1))
        gradients[reduce_dtype] = model.gradient
    return gradients


def test_ddp_averages_in_fp32_gradients_that_half_would_lose() -> None:
    for gradients in run_ranks(_average_the_smallest_gradient, RANKS):
        assert torch.equal(gradients["fp32"], torch.full((1, 4), 2.0**-24))
        assert torch.equal(gradients["half"], torch.zeros(1, 4))


def _overflow_on_one_rank(rank: int) -> tuple[int, Tensor, int]:
    model = Regression(make_optimizer=momentum, bad_batches=[2] if rank == 1 else [])
    plugin = BalancedAMP(loss_scale=LossScaleConfig(init_scale=2.0**10))
    trainer = fit_on_ranks(model, plugin, batches(rank))
    return trainer.global_step, parameters_of(model), plugin.scaler.skipped_steps


def test_all_ddp_ranks_skip_if_one_overflows() -> None:
    first, second = run_ranks(_overflow_on_one_rank, RANKS)
    assert first[0] == second[0] == STEPS - 1
    assert first[2] == second[2] == 1
    assert torch.equal(first[1], second[1])
    assert torch.isfinite(first[1]).all()


def _train_with_zero(rank: int) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import warns about torch.jit

    ends = []
    for plugin in (None, BalancedAMP(loss_scale=2.0**10)):
        model = Regression(
            make_optimizer=lambda p: ZeroRedundancyOptimizer(p, AdamW, lr=0.01, eps=1e-3)
        )
        fit_on_ranks(model, plugin, batches(rank))
        ends.append(parameters_of(model))
    return ends


def test_optimizer_with_sharded_states_trains_as_in_fp32() -> None:
    """ZeroRedundancyOptimizer broadcasts the stepped weights of each rank into `p.data`."""
    first, second = run_ranks(_train_with_zero, RANKS)
    assert torch.equal(first[1], second[1])
    start = parameters_of(Regression())
    assert (first[1] - first[0]).norm() < 2**-7 * (first[0] - start).norm()


# --- InfCLStrategy -------------------------------------------------------------------------------


class _TwoOptimizers(TinyCLIP):
    """Steps its towers one after the other, each with its own loss, in every batch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0, automatic=False)

    def configure_optimizers(self) -> list[Optimizer]:
        rest = [*self.visual.parameters(), *self.head.parameters(), self.log_scale]
        return [SGD(rest, lr=0.1), SGD(self.text.parameters(), lr=0.1)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            image, text = self.features(batch)
            loss = self.loss(image, text.to(image.dtype), self.log_scale.exp())
            self.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def _train_with_inf_cl(rank: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    results = {}
    makers = {"automatic": lambda: TinyCLIP(dropout=0.0), "two optimizers": _TwoOptimizers}
    for name, make in makers.items():
        start, ends = parameters_of(make()), []
        for is_half in (False, True):
            model = make()
            config = LossScaleConfig(init_scale=2.0, growth_interval=1)
            plugin = BalancedAMP(loss_scale=config) if is_half else None
            data = [[p[rank::RANKS] for p in batch] for batch in pairs_loader(24 * STEPS, 24)]
            strategy = InfCLStrategy(micro_batch_size=5)
            fit_on_ranks(model, plugin, DataLoader(data, batch_size=None), strategy)
            ends.append(parameters_of(model))
        results[name] = (start, *ends)
    return results


def test_inf_cl_in_half_precision_equals_fp32_while_the_loss_scale_grows() -> None:
    """A replay must not change the loss scale between a backward and its step."""
    first, second = run_ranks(_train_with_inf_cl, RANKS)
    for name, (start, expected, value) in first.items():
        assert torch.equal(value, second[name][2])
        moved = (expected - start).norm()
        assert moved > 1e-2
        assert (value - expected).norm() / moved < 0.02, name
