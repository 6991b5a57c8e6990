"""Dtypes of weights, activations, buffers, batches and `fp32_modules` under PureFP16."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import (
    Regression,
    Transformer,
    fit,
    loader,
    make_trainer,
    parameters_of,
    perceptron,
    relative,
    sequences,
)

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
halves = pytest.mark.parametrize("half", HALVES)


class Watched(Regression):
    """Records the dtype of every output, weight and gradient in training."""

    def on_fit_start(self) -> None:
        self.outputs: dict[str, torch.dtype] = {}
        for name, module in self.network.named_modules():
            module.register_forward_hook(
                lambda _, __, out, name=name: self.outputs.__setitem__(name, out.dtype)
            )

    def on_train_batch_end(self, *_: Any) -> None:
        self.parameter_dtypes = {n: p.dtype for n, p in self.network.named_parameters()}

    def on_after_backward(self) -> None:
        self.accumulated = {p.grad.dtype for p in self.network.parameters()}


# --- weights, activations and gradients ----------------------------------------------------------


@halves
def test_weights_activations_and_gradients_are_half_and_the_step_is_fp32(half: Any) -> None:
    model = Watched(Transformer)
    trainer = fit(model, PureFP16(half=half), sequences(2))
    assert trainer.precision == {"fp16": "16-true", "bf16": "bf16-true"}[half]
    assert set(model.parameter_dtypes.values()) == {HALVES[half]}
    assert model.accumulated == {HALVES[half]}
    assert model.outputs.pop("") == torch.float32  # the transformer casts its output
    assert set(model.outputs.values()) == {HALVES[half]}
    assert model.gradient_dtypes == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("way", ["kahan", "stochastic", "nearest"])
def test_teardown_restores_22_bits_or_the_bits_of_half(way: Any) -> None:
    model = Regression()
    start = parameters_of(model)
    trainer = make_trainer(PureFP16(write_back=way))
    trainer.validate(model, loader(1), verbose=False)
    error = ((parameters_of(model) - start) / start).nan_to_num().abs()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if way == "kahan":
        assert error[start.abs() > 2.0**-13].max() <= 2.0**-22
    else:
        assert torch.equal(parameters_of(model), start.half().double())


def test_exception_resets_the_default_dtype() -> None:
    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert torch.get_default_dtype() == torch.float16
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(Fails(), PureFP16(), loader(1))
    assert torch.get_default_dtype() == torch.float32


@halves
def test_validation_test_and_prediction_run_in_half_precision(half: Any) -> None:
    seen: list[torch.dtype] = []

    class RecordsDtypes(Regression):
        def loss(self, batch: list[Tensor]) -> Tensor:
            seen.append(batch[0].dtype)
            seen.append(self.network(batch[0]).dtype)
            return super().loss(batch)

    model, data = RecordsDtypes(), loader(2)
    expected = sum(Regression.loss(model, batch).item() for batch in data) / 2
    trainer = make_trainer(PureFP16(half=half))
    tolerance = {"fp16": 2**-8, "bf16": 2**-5}[half]
    for run in (trainer.validate, trainer.test):
        value = run(model, data, verbose=False)[0]["val_loss"]
        assert value == pytest.approx(expected, rel=tolerance)
    assert {each.dtype for each in trainer.predict(model, data)} == {HALVES[half]}
    assert set(seen) == {HALVES[half]}


class _Scaled(nn.Module):
    """Has parameters of shape [] and [1]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.tensor([0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale + self.shift


@pytest.mark.parametrize("way", ["kahan", "stochastic", "nearest"])
def test_zero_dimensional_parameters_train(way: Any) -> None:
    reference, model = Regression(_Scaled), Regression(_Scaled)
    start = parameters_of(model)
    fit(reference, None, loader(8))
    fit(model, PureFP16(write_back=way), loader(8))
    assert model.network.scale.shape == ()
    assert relative(model, reference, start) < (2**-8 if way == "kahan" else 2**-6)


@halves
def test_half_model_trains_like_a_rounded_fp32_model(half: Any) -> None:
    model, other = Regression(), Regression(lambda: perceptron().to(HALVES[half]))
    for p in model.parameters():
        p.data = p.data.to(HALVES[half]).float()
    fit(model, PureFP16(half=half), loader(4))
    fit(other, PureFP16(half=half), loader(4))
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    assert torch.equal(parameters_of(model), parameters_of(other))


# --- batches -------------------------------------------------------------------------------------


def test_model_summary_runs_the_example_input_in_half_precision() -> None:
    class Summarized(Regression):
        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

    model = Summarized()
    model.example_input_array = torch.ones(2, 8)
    fit(model, PureFP16(), loader(1), enable_model_summary=True)
    assert model.example_input_array.dtype == torch.float32


def test_only_floating_point_tensors_of_batches_become_half() -> None:
    batch = {
        "float": torch.randn(4, 8),
        "double": [torch.randn(4, dtype=torch.float64)],
        "image": torch.arange(32, dtype=torch.uint8).view(4, 8),
        "ids": (torch.arange(4), torch.tensor([True, False, True, True])),
        "name": "glyph",
    }
    seen: list[Any] = []

    class RecordsBatch(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch)
            return self.network(batch["float"]).float().mean()

    fit(RecordsBatch(), PureFP16(), DataLoader([batch], batch_size=None))
    (got,) = seen
    assert torch.equal(got["float"], batch["float"].half())
    assert torch.equal(got["double"][0], batch["double"][0].half())
    pairs = zip((got["image"], *got["ids"]), (batch["image"], *batch["ids"]), strict=True)
    for after, before in pairs:
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
    assert got["name"] == "glyph"


# --- norms with statistics, and buffers ----------------------------------------------------------


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))


@halves
def test_batch_norm_keeps_fp32_statistics_and_weights(half: Any) -> None:
    reference, model = (Watched(with_batch_norm) for _ in range(2))
    start = parameters_of(model)
    buffers: set[torch.dtype] = set()
    watch = pl.Callback()
    watch.on_train_batch_end = lambda *_: buffers.update(b.dtype for b in model.buffers())
    fit(reference, None, loader(8))
    fit(model, PureFP16(half=half), loader(8), callbacks=[watch])
    assert buffers == {torch.float32, torch.int64}
    assert set(model.outputs.values()) == {HALVES[half]}
    kept = {"1.weight", "1.bias"}
    for name, dtype in model.parameter_dtypes.items():
        assert dtype == (torch.float32 if name in kept else HALVES[half])
    tolerance = {"fp16": 2**-8, "bf16": 2**-5}[half]
    assert relative(model, reference, start) < tolerance
    for name in ("running_mean", "running_var"):
        mine, theirs = (getattr(m.network[1], name) for m in (model, reference))
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance / 8)


# --- islands of fp32 -----------------------------------------------------------------------------

ISLANDS: dict[str, tuple[list[str], Callable[[str], bool]]] = {
    "a path": (["network.blocks.1.up"], lambda name: name.startswith("blocks.1.up")),
    "norms": (["norm"], lambda name: "norm" in name),
    "nested": (["network.blocks.1", "norm"], lambda n: "norm" in n or n.startswith("blocks.1.")),
    "a class": (["Block"], lambda name: name.startswith("blocks.")),
}


@pytest.mark.slow
@halves
@pytest.mark.parametrize(("names", "is_kept"), ISLANDS.values(), ids=ISLANDS)
def test_fp32_modules_compute_in_fp32_and_return_half(half: Any, names: Any, is_kept: Any) -> None:
    inside: dict[str, set[torch.dtype]] = {}

    class RecordsDtypesOfLayers(Regression):
        def on_fit_start(self) -> None:
            for name, module in self.network.named_modules():
                if isinstance(module, nn.Linear | nn.LayerNorm):
                    hook = lambda _, args, out, name=name: inside.__setitem__(  # noqa: E731
                        name, {args[0].dtype, out.dtype}
                    )
                    # Runs before the cast of the output.
                    module.register_forward_hook(hook, prepend=True)

    reference, model = (RecordsDtypesOfLayers(Transformer) for _ in range(2))
    start = parameters_of(model)
    fit(reference, None, sequences(3))
    inside.clear()
    fit(model, PureFP16(half=half, fp32_modules=names), sequences(3))
    for name, dtypes in inside.items():
        expected = torch.float32 if is_kept(name + ".") else HALVES[half]
        assert dtypes == {expected}, name
    assert {torch.float32 if is_kept(n + ".") else 0 for n in inside} == {torch.float32, 0}
    assert relative(model, reference, start) < {"fp16": 2**-7, "bf16": 2**-4}[half]


def test_fp32_modules_are_plain_modules_after_training() -> None:
    model = Regression()
    fit(model, PureFP16(fp32_modules=["norm"]), loader(1))
    x = torch.randn(3, 8)
    assert model.network(x).dtype == torch.float32
    expected = model.network[:3](x)
    assert not torch.equal(expected, expected.half().float())  # the norm is not rounded


# --- forwards that create tensors ----------------------------------------------------------------


class _Masked(nn.Module):
    """Creates tensors of the default dtype in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * torch.ones(8)) + torch.zeros(8)


class _Checkpointed(nn.Module):
    def __init__(self, is_reentrant: bool, is_plain: bool = False) -> None:
        super().__init__()
        self.first, self.masked, self.head = nn.Linear(8, 8), _Masked(), nn.Linear(8, 1)
        self.is_reentrant, self.is_plain = is_reentrant, is_plain

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.is_plain:
            return self.head(self.masked(x))
        return self.head(checkpoint(self.masked, x, use_reentrant=self.is_reentrant))


@pytest.mark.parametrize("is_manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_forward_that_checkpointing_recomputes_runs_in_half_precision(
    is_reentrant: bool, is_manual: bool
) -> None:
    class Manual(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            if self.automatic_optimization:
                return super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            return None

    ends = []
    for is_plain in (True, False):
        model = Manual(lambda is_plain=is_plain: _Checkpointed(is_reentrant, is_plain))
        model.automatic_optimization = not is_manual
        fit(model, PureFP16(), loader(4))
        ends.append(parameters_of(model))
    assert torch.equal(*ends)


class _MadeLate(Regression):
    """Creates its network in `configure_model`, on the meta device if `is_meta`."""

    def __init__(self, is_meta: bool) -> None:
        super().__init__(nn.Identity, lambda p: SGD(p, lr=0.1))
        self.is_meta = is_meta

    def configure_model(self) -> None:
        if not isinstance(self.network, nn.Identity):
            return
        torch.manual_seed(0)
        network = perceptron()
        if self.is_meta:
            values = network.state_dict()
            with torch.device("meta"):
                network = perceptron()
            network.to_empty(device=self.device).load_state_dict(values)
        self.network = network


@pytest.mark.parametrize("is_meta", [False, True])
def test_network_created_in_configure_model_trains_like_one_created_before(is_meta: bool) -> None:
    reference, model = Regression(), _MadeLate(is_meta)
    fit(reference, PureFP16(), loader(4))
    fit(model, PureFP16(), loader(4))
    assert torch.equal(parameters_of(model), parameters_of(reference))


@halves
def test_closure_of_a_manual_step_creates_half_tensors(half: Any) -> None:
    class Noisy(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            def closure() -> None:
                self.manual_backward(self.network(torch.randn(16, 8)).float().square().mean())

            self.optimizers().step(closure=closure)

    assert fit(Noisy(), PureFP16(half=half), loader(2)).global_step == 2
