"""Gradients, loss scale and memory of PureFP16 in the optimizer step."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from lightning_mp.optim.safe_adamw import SafeAdamW
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import Regression, fit, loader, parameters_of

# --- gradients -----------------------------------------------------------------------------------


class GivenGradients(Regression):
    """Has a given gradient in each batch."""

    def __init__(self, gradients: list[Tensor], **options: Any) -> None:
        super().__init__(lambda: nn.Linear(1, 8, bias=False), **options)
        size = gradients[0].numel()
        self.network.weight = nn.Parameter(torch.randn(size))
        self.gradients = gradients
        self.met: list[Tensor] = []
        self.at_rest: list[Tensor] = []
        self.scales: list[float] = []

    def on_after_backward(self) -> None:
        self.at_rest.append(self.network.weight.grad.clone())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scales.append(self.trainer.precision_plugin.scaler.scale)
        return (self.network.weight.float() * self.gradients[batch_idx]).sum()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        (parameter,) = optimizer.param_groups[0]["params"]
        assert parameter is self.network.weight
        self.met.append(parameter.grad.clone())


def test_gradients_of_1e_7_reach_the_step() -> None:
    torch.seed()
    model = GivenGradients([torch.randn(50_000) * 1e-7])
    fit(model, PureFP16(), loader(1))
    (given,), (met,), (at_rest,) = model.gradients, model.met, model.at_rest
    assert met.dtype == torch.float32
    assert at_rest.dtype == torch.float16
    assert (met == 0).double().mean() < 0.001
    torch.testing.assert_close(met, given, rtol=2.0**-11, atol=2.0**-35)
    # Unscaled in place in fp16, almost a quarter of the gradients would underflow.
    assert 0.2 < ((at_rest / 2**10) == 0).double().mean() < 0.27


@pytest.mark.parametrize(("largest", "is_skipped"), [(60.0, False), (70.0, True)])
def test_initial_loss_scale_fits_gradients_below_64_and_backs_off_above(
    largest: float, is_skipped: bool
) -> None:
    model = GivenGradients([torch.full((8,), largest)] * 2)
    start, plugin = parameters_of(model), PureFP16()
    fit(model, plugin, loader(2))
    assert model.scales == [2.0**10, 2.0**9 if is_skipped else 2.0**10]
    assert plugin.scaler.skipped_steps == is_skipped
    assert torch.equal(model.weights[0], start.half().double()) == is_skipped
    assert not torch.equal(model.weights[1], model.weights[0])


@pytest.mark.slow
def test_loss_scale_grows_until_gradients_overflow_and_then_stays() -> None:
    model, plugin = GivenGradients([torch.full((8,), 3.0)] * 150), PureFP16()
    trainer = fit(model, plugin, loader(150, batch_size=1))
    # 3 * 2^14 fits into fp16, 3 * 2^15 does not; the scale doubles every 20 steps.
    assert model.scales[19:21] == [2.0**10, 2.0**11]
    assert max(model.scales) == 2.0**15
    assert plugin.scaler.scale == 2.0**14
    assert plugin.scaler.skipped_steps == 1
    assert trainer.global_step == 149


# --- memory --------------------------------------------------------------------------------------

WIDTH = 300
# Bytes per parameter at any time: weight and residual.
WEIGHTS: dict[str, tuple[Callable[[], Any], int]] = {
    "kahan": (lambda: PureFP16(), 2 + 2),
    "kahan bf16": (lambda: PureFP16(half="bf16"), 2 + 2),
    "stochastic": (lambda: PureFP16(write_back="stochastic"), 2),
    "nearest": (lambda: PureFP16(write_back="nearest"), 2),
}
# Bytes of optimizer states, and of the fp32 weight during the step.
STATES: dict[str, tuple[Callable[[Any], Optimizer], int, int]] = {
    "sgd": (lambda p: SGD(p, lr=0.1), 0, 4),
    "adam": (lambda p: Adam(p, lr=1e-3), 8, 4),
    "SafeAdamW": (lambda p: SafeAdamW(p, lr=1e-3), 8, 0),
}


def bytes_alive() -> int:
    """Return the bytes of all tensors of the size of the weight; aliases count once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.numel() == WIDTH * WIDTH:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class RecordsLiveBytes(Regression):
    """Records the live bytes at several points of a step."""

    def __init__(self, make_optimizer: Any) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH, bias=False), make_optimizer)
        self.bytes: dict[str, int] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.network(torch.ones(1, WIDTH)).float() * batch[1][0]).mean()

    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        for name in ("pre", "post"):
            register = getattr(optimizer, f"register_step_{name}_hook")
            register(lambda *_, name=name: self.bytes.__setitem__(name, bytes_alive()))
        return optimizer

    def on_after_backward(self) -> None:
        held = self.network.weight.grad  # without access, the gradient is not counted
        self.bytes["accumulated"] = bytes_alive()
        del held

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes["after"] = bytes_alive()
        self.optimizers().zero_grad()
        self.bytes["zeroed"] = bytes_alive()


@pytest.fixture
def _only_new_objects() -> None:
    """Freeze existing objects in `gc`, so that searching for tensors is fast."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_only_new_objects")
@pytest.mark.parametrize(
    ("way", "optimizer"),
    [*((way, "adam") for way in WEIGHTS), *(("kahan", each) for each in ("sgd", "SafeAdamW"))],
)
def test_bytes_per_parameter_equal_the_docstring(way: str, optimizer: str) -> None:
    (make_plugin, kept), (make_optimizer, states, stand_in) = WEIGHTS[way], STATES[optimizer]
    model = RecordsLiveBytes(make_optimizer)
    fit(model, make_plugin(), loader(2))
    found = {name: each / WIDTH**2 for name, each in model.bytes.items()}
    assert found == {
        "accumulated": kept + states + 2,
        "pre": kept + states + 4 + stand_in,
        "post": kept + states + 4 + stand_in,
        "after": kept + states + 4,
        "zeroed": kept + states,
    }


# --- reuse ---------------------------------------------------------------------------------------


def test_stochastic_rounding_is_reproducible_and_leaves_the_random_state_of_torch() -> None:
    ends = []
    for _ in range(2):
        model = Regression()
        fit(model, PureFP16(write_back="stochastic"), loader(4))
        ends.append((parameters_of(model), torch.rand(1).item()))  # unchanged random state of torch
    reference = Regression()
    fit(reference, PureFP16(), loader(4))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] == torch.rand(1).item()
    assert not torch.equal(ends[0][0], parameters_of(reference))


@pytest.mark.slow
def test_write_back_decides_whether_updates_below_half_a_ulp_are_kept() -> None:
    class Steady(GivenGradients):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.network.weight.float() * -1.0).sum()

    count, update = 64, 2.0**-14  # a weight of 1 changes by 2^-10
    moved = {}
    for way in ("kahan", "stochastic", "nearest"):
        model = Steady([torch.ones(4096)], make_optimizer=lambda p: SGD(p, lr=update))
        model.network.weight.data.fill_(1)
        plugin = PureFP16(write_back=way, loss_scale=LossScaleConfig(init_scale=1.0))
        fit(model, plugin, loader(count, batch_size=1))
        moved[way] = (model.network.weight.detach() - 1) / (count * update)
    assert torch.equal(moved["kahan"], torch.ones(4096))
    assert (moved["nearest"] == 0).all()
    # Each of 4096 weights rounds up with probability 1/16 in each of 64 steps.
    assert moved["stochastic"].mean() == pytest.approx(1, abs=6 * (15 / 64 / 4096) ** 0.5)
    assert moved["stochastic"].std() > 0.3
