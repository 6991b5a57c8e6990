"""PureFP16 on two gloo ranks, under DDP and under InfCLStrategy with offload."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from lightning_mp.strategies import InfCLStrategy
from tests.precision.models import Regression, fit, parameters_of
from tests.precision.on_ranks import RANKS, STEPS, batches, fit_on_ranks, momentum
from tests.processes import run_ranks
from tests.strategies.models import TinyCLIP
from tests.strategies.models import loader as pairs_loader

pytestmark = pytest.mark.distributed

SETTINGS: dict[str, dict[str, Any]] = {
    "kahan": {"loss_scale": 2.0**10},
    "stochastic": {"loss_scale": 2.0**10, "write_back": "stochastic"},
    "nearest": {"loss_scale": 2.0**10, "write_back": "nearest"},
    "half sums": {"loss_scale": 2.0**10, "reduce_dtype": "half"},
    "bf16": {"half": "bf16"},
}


# --- DDP -----------------------------------------------------------------------------------------


def _train_with_ddp(rank: int) -> dict[str, Tensor]:
    ends = {}
    for name, setting in SETTINGS.items():
        model = Regression(make_optimizer=momentum, seed=rank)
        fit_on_ranks(model, PureFP16(**setting), batches(rank), DDPStrategy())
        ends[name] = parameters_of(model)
    bad = [2] if rank == 1 else []
    model = Regression(make_optimizer=momentum, bad_batches=bad)
    plugin = PureFP16(loss_scale=LossScaleConfig(init_scale=2.0**10))
    trainer = fit_on_ranks(model, plugin, batches(rank), DDPStrategy())
    assert trainer.global_step == STEPS - 1
    assert plugin.scaler.skipped_steps == 1
    return {**ends, "skipped": parameters_of(model)}


def test_ddp_ranks_are_bitwise_equal_and_train_as_one_process_with_the_global_batch() -> None:
    reference, start = Regression(make_optimizer=momentum), parameters_of(Regression())
    assert (
        parameters_of(Regression(seed=1)) - start
    ).norm() > 1  # initial weights differ between ranks
    fit(reference, None, batches())
    expected = parameters_of(reference)
    first, second = run_ranks(_train_with_ddp, RANKS)
    assert torch.isfinite(first["skipped"]).all()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        error = (value - expected).norm() / (expected - start).norm()
        if name != "skipped":
            assert error < {"bf16": 2**-4, "kahan": 2**-8}.get(name, 2**-7), name
    assert not torch.equal(first["stochastic"], first["nearest"])


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.GELU(), nn.Linear(16, 1))


def _train_normed(rank: int) -> Tensor:
    model = Regression(_normed, momentum)
    fit_on_ranks(model, PureFP16(loss_scale=2.0**10), batches(rank), DDPStrategy())
    return parameters_of(model)


def test_ddp_takes_fp32_gradients_of_half_weights() -> None:
    """On a CPU, torch's RMSNorm returns them, and DDP's buckets are half."""
    reference, start = Regression(_normed, momentum), parameters_of(Regression(_normed))
    fit(reference, None, batches())
    first, second = run_ranks(_train_normed, RANKS)
    assert torch.equal(first, second)
    expected = parameters_of(reference)
    assert (first - expected).norm() / (expected - start).norm() < 2**-7


# --- InfCLStrategy -------------------------------------------------------------------------------


class _Recording(TinyCLIP):
    """Records the dtypes of features in the loss and of batches in a tower."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.seen: set[torch.dtype] = set()
        self.visual.register_forward_pre_hook(lambda _, args: self.seen.add(args[0].dtype))
        self.loss.register_forward_pre_hook(lambda _, args: self.seen.add(args[0].dtype))


def _train_with_inf_cl(rank: int) -> dict[str, tuple[Tensor, set[torch.dtype]]]:
    ends = {}
    for name, make_plugin, offload in (
        ("fp32", lambda: None, "none"),
        ("fp16", lambda: PureFP16(loss_scale=LossScaleConfig(init_scale=2.0)), "none"),
        ("fp16, host", lambda: PureFP16(loss_scale=LossScaleConfig(init_scale=2.0)), "host"),
        ("bf16, host", lambda: PureFP16(half="bf16"), "host"),
    ):
        model = _Recording()
        data = [[p[rank::RANKS] for p in batch] for batch in pairs_loader(24 * STEPS, 24)]
        strategy = InfCLStrategy(micro_batch_size=5, offload=offload)
        fit_on_ranks(model, make_plugin(), DataLoader(data, batch_size=None), strategy)
        ends[name] = parameters_of(model), model.seen
    return ends


def test_inf_cl_trains_half_towers_with_micro_batches_and_offload_as_in_fp32() -> None:
    start = parameters_of(TinyCLIP(dropout=0.0))
    first, second = run_ranks(_train_with_inf_cl, RANKS)
    expected, _ = first["fp32"]
    moved = (expected - start).norm()
    assert moved > 1e-2
    for name, (value, seen) in first.items():
        assert torch.equal(value, second[name][0]), name
        if name != "fp32":
            half = torch.float16 if "fp16" in name else torch.bfloat16
            assert seen == {half}, name
            assert (value - expected).norm() / moved < (0.02 if "fp16" in name else 0.1), name


# --- accumulated gradients -----------------------------------------------------------------------


class _Waiting(Regression):
    """Clips in every batch and steps in every second batch."""

    def __init__(self) -> None:
        super().__init__(make_optimizer=momentum)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=100.0)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class _Kept(Regression):
    """Zeroes gradients in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def _accumulate(rank: int | None = None) -> dict[str, Tensor]:
    ends = {}
    for name, model, options in (
        ("waiting", _Waiting(), {}),
        ("kept", _Kept(make_optimizer=momentum), {}),
        ("accumulated", Regression(make_optimizer=momentum), {"accumulate_grad_batches": 4}),
        ("views", _Waiting(), {"gradient_as_bucket_view": True}),
    ):
        if rank is None:
            options.pop("gradient_as_bucket_view", None)
            fit(model, None, batches(), **options)
        else:
            view = options.pop("gradient_as_bucket_view", False)
            strategy = DDPStrategy(gradient_as_bucket_view=view)
            plugin = PureFP16(loss_scale=2.0**10)
            options |= {"devices": RANKS, "use_distributed_sampler": False}
            fit(model, plugin, batches(rank), strategy=strategy, **options)
        ends[name] = parameters_of(model)
    return ends


def test_accumulated_gradients_are_averaged_over_ranks() -> None:
    expected, start = _accumulate(), parameters_of(Regression())
    first, second = run_ranks(_accumulate, RANKS)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        moved = (expected[name] - start).norm()
        assert moved > 1e-2
        assert (value - expected[name]).norm() < 2**-7 * moved, name
