"""A tiny transformer trained with BalancedAMP against the same in fp32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scaler import LossScaleConfig
from tests.precision.models import Regression, Transformer, fit, parameters_of, sequences

EPOCHS, BATCHES = 3, 10

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=3e-3),
    "adagrad": lambda p: Adagrad(p, lr=0.03),
    "fused adamw": lambda p: AdamW(p, lr=3e-3, fused=True),
}
# The scale starts where no step of this model overflows: a skipped step is a step less.
SETTINGS: dict[str, Callable[[], BalancedAMP]] = {
    "fp16 O2": lambda: BalancedAMP(),
    "fp16 O1": lambda: BalancedAMP(weights="full", loss_scale=LossScaleConfig(init_scale=2.0**10)),
    "bf16 O2": lambda: BalancedAMP(half="bf16"),
    "bf16 O1": lambda: BalancedAMP(half="bf16", weights="full"),
}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def train(optimizer: str, seed: int, plugin: Any) -> tuple[float, Regression]:
    """Return the loss over all data after training, in fp32, and the model."""
    model, data = Regression(Transformer, OPTIMIZERS[optimizer], seed=seed), sequences(BATCHES)
    fit(model, plugin, data, max_epochs=EPOCHS)
    with torch.no_grad():
        return sum(model.loss(batch).item() for batch in data) / BATCHES, model


@pytest.mark.parametrize(
    ("seed", "optimizer"), [*enumerate(OPTIMIZERS), (4, "adamw"), (5, "adamw")]
)
def test_training_ends_at_the_loss_of_fp32(seed: int, optimizer: str) -> None:
    expected, reference = train(optimizer, seed, None)
    assert expected < 0.6 * reference.losses[0]  # it has learnt
    start = parameters_of(Regression(Transformer, seed=seed))
    moved = (parameters_of(reference) - start).norm()
    for name, make_plugin in SETTINGS.items():
        if optimizer not in ("sgd", "adamw") and "O1" in name:
            continue  # as plain an fp32 optimizer as without the plugin
        plugin = make_plugin()
        value, model = train(optimizer, seed, plugin)
        assert abs(value / expected - 1) < 0.01, f"{name}: {value} instead of {expected}"
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        if plugin.scaler is not None:
            assert plugin.scaler.skipped_steps == 0
        if optimizer == "sgd":  # Adam and Adagrad turn the rounding of a zero gradient into a step
            error = (parameters_of(model) - parameters_of(reference)).norm() / moved
            assert 0 < error < (0.005 if plugin.half == "fp16" else 0.03), name


def test_without_masters_learning_stops_where_updates_are_small() -> None:
    """The reason for masters: here no update reaches 2^-12 of a weight."""

    class Slow(Regression):
        def on_train_start(self) -> None:
            self.working = parameters_of(self)

    def make() -> Slow:
        return Slow(Transformer, lambda p: SGD(p, lr=2e-5), seed=0)

    start, reference, model = parameters_of(make()), make(), make()
    fit(reference, None, sequences(16))
    fit(model, BalancedAMP(loss_scale=2.0**10), sequences(16))
    moved = parameters_of(reference) - start
    assert (parameters_of(model) - start - moved).norm() < 0.01 * moved.norm()
    steps = [b - a for a, b in zip(model.weights, model.weights[1:], strict=False)]
    # What half weights alone do: most of them never move.
    still = sum((step == 0).double().mean().item() for step in steps) / len(steps)
    assert still > 0.9


class _Dtypes(Regression):
    """Writes down the dtypes of a training step."""

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.seen = {n: p.dtype for n, p in self.network.named_parameters()}
        handles = [
            module.register_forward_hook(
                lambda _, __, out, name=name: self.seen.__setitem__(name + "()", out.dtype)
            )
            for name, module in self.network.named_modules()
            if name in ("blocks.0.qkv", "blocks.0.norm1", "blocks.0")
        ]
        try:
            return super().loss(batch)
        finally:
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("weights", ["half", "full"])
def test_weights_and_activations_have_the_dtypes_of_the_setting(half: Any, weights: Any) -> None:
    model = _Dtypes(Transformer)
    plugin = BalancedAMP(
        half=half, weights=weights, fp32_modules=["norm", "network.head", "network.blocks.1"]
    )
    fit(model, plugin, sequences(1))
    kept = ("norm", "head.", "blocks.1.")
    for name, dtype in model.seen.items():
        if name.endswith("()"):
            continue
        is_half = weights == "half" and not any(part in name for part in kept)
        assert dtype == (HALVES[half] if is_half else torch.float32), name
    assert model.seen["blocks.0.qkv()"] == HALVES[half]
    if weights == "half":  # the residual stream stays in half through the norm
        assert model.seen["blocks.0.norm1()"] == model.seen["blocks.0()"] == HALVES[half]


def test_fp32_ops_run_in_fp32() -> None:
    seen: dict[bool, torch.dtype] = {}
    for moved in (False, True):

        class Gelu(Regression):
            def loss(self, batch: Any, moved: bool = moved) -> torch.Tensor:
                up = self.network.blocks[0].up(self.network.embed(batch[0]))
                seen[moved] = torch.nn.functional.gelu(up).dtype
                return super().loss(batch)

        fit(Gelu(Transformer), BalancedAMP(fp32_ops=["gelu"] if moved else []), sequences(1))
    assert seen == {False: torch.float16, True: torch.float32}
