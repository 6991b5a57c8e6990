"""Clipping, norms and edits of `p.grad` take effect under PureFP16 as in fp32."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from lightning_mp.optim.safe_adamw import SafeAdamW
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import Regression, fit, loader, parameters_of

TOLERANCE = {"fp16": 2**-7, "bf16": 2**-4}
halves = pytest.mark.parametrize("half", TOLERANCE)
optimizers = pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        lambda p: AdamW(p, lr=0.01),
        lambda p: SafeAdamW(p, lr=0.01),
    ],
    ids=["sgd", "adamw", "SafeAdamW"],
)


def plugin(half: Any) -> PureFP16:
    return PureFP16(half=half, loss_scale=2.0**9 if half == "fp16" else None)


def ends_apart(kind: Any, make: Any, half: Any, **options: Any) -> tuple[float, Regression]:
    """Return the distance to fp32, relative to the change of weights, and the model."""
    reference, model = kind(make_optimizer=make), kind(make_optimizer=make)
    start = parameters_of(model)
    fit(reference, None, loader(12), **options)
    fit(model, plugin(half), loader(12), **options)
    moved = parameters_of(reference) - start
    assert moved.norm() > 1e-2
    return ((parameters_of(model) - parameters_of(reference)).norm() / moved.norm()).item(), model


class ClipsItself(Regression):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.05)


class ClipsBefore(Regression):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        clip_grad_norm_(self.parameters(), 0.05)


class Freezes(Regression):
    """Removes the gradients of its last layer, as DINO does."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if len(self.losses) <= 6:
            for p in self.network[-1].parameters():
                p.grad = None


@pytest.mark.slow
@halves
@optimizers
@pytest.mark.parametrize("kind", [ClipsItself, ClipsBefore, Freezes])
def test_edits_of_gradients_take_effect_as_in_fp32(kind: Any, make: Any, half: Any) -> None:
    distance, model = ends_apart(kind, make, half)
    assert distance < TOLERANCE[half]
    if kind is Freezes:
        start = parameters_of(kind().network[-1])
        before = model.weights[5][-len(start) :]
        assert torch.equal(before, start.to(PureFP16(half=half).half_dtype).double())


@halves
@pytest.mark.parametrize("is_safe", [False, True], ids=["sgd", "SafeAdamW"])
def test_gradients_below_the_range_of_half_precision_are_stepped_as_set(
    is_safe: bool, half: Any
) -> None:
    size = 2.0**-30  # zero in fp16, also with a loss scale of 2^2

    class Replaces(Regression):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            for p in self.parameters():
                p.grad = torch.full_like(p, size, dtype=torch.float32)

    def make(parameters: Any) -> Optimizer:
        if is_safe:  # its first step is lr * g / (|g| + epsilon)
            return SafeAdamW(parameters, lr=0.25, eps=2.0**-40, weight_decay=0.0)
        return SGD(parameters, lr=0.25 / size)

    model = Replaces(make_optimizer=make)
    start = parameters_of(model)
    fit(model, plugin(half), loader(1))
    moved = start - parameters_of(model)
    largest = (start.abs() + 0.25).max().item()
    bits = {"fp16": 22, "bf16": 16}[half]
    expected = 0.25 / (1 + 2.0**-10) if is_safe else 0.25
    assert (moved - expected).abs().max() <= 2 * largest * 2.0**-bits


@halves
def test_grad_norm_of_lightning_equals_fp32(half: Any) -> None:
    class Norms(Regression):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.gradient_norms.append(grad_norm(self, 2)["grad_2.0_norm_total"].item())

    reference, model = Norms(), Norms()
    fit(reference, None, loader(8))
    fit(model, plugin(half), loader(8))
    assert model.gradient_norms == pytest.approx(reference.gradient_norms, rel=TOLERANCE[half])


class StepsInEveryThirdBatch(Regression):
    """Clips in every batch, steps in every third, and zeroes gradients in place."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@pytest.mark.slow
@halves
@optimizers
def test_clipped_gradients_accumulate_over_later_backwards(make: Any, half: Any) -> None:
    distance, _ = ends_apart(StepsInEveryThirdBatch, make, half)
    assert distance < TOLERANCE[half]


@pytest.mark.slow
@halves
@pytest.mark.parametrize("kind", [SGD, AdamW, SafeAdamW])
def test_gradients_that_are_never_zeroed_accumulate(kind: Any, half: Any) -> None:
    class Keeps(Regression):
        def optimizer_zero_grad(self, *_: Any) -> None:
            pass

    distance, model = ends_apart(Keeps, lambda p: kind(p, lr=0.01), half)
    assert distance < TOLERANCE[half]
    assert model.gradient_dtypes == {torch.float32}


@pytest.mark.slow
@halves
def test_gradients_of_64_batches_accumulate_as_in_fp32(half: Any) -> None:
    class RecordsGradient(Regression):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.met = torch.cat([p.grad.double().flatten() for p in self.parameters()])

    met: list[Tensor] = []
    for each in (None, plugin(half)):
        model = RecordsGradient()
        fit(model, each, loader(64, batch_size=4), accumulate_grad_batches=64)
        met.append(model.met)
    error = (met[1] - met[0]).norm() / met[0].norm()
    # Each of 64 sums is rounded to half precision, by at most half a ULP at random; the gradients
    # themselves are rounded too.
    bits = {"fp16": 11, "bf16": 8}[half]
    assert error < (64**0.5 + 4) * 2.0**-bits
