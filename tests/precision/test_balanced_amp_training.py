"""Dtypes, weights and clipping of small models under BalancedAMP."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_mp.optim.safe_adamw import SafeAdamW
from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import (
    Regression,
    Transformer,
    fit,
    loader,
    make_trainer,
    norm_of,
    parameters_of,
    sequences,
)

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.slow
def test_master_weights_keep_updates_that_half_weights_lose() -> None:
    """No update reaches 2^-12 of a weight here, so half weights would not change."""

    def make() -> Regression:
        return Regression(Transformer, lambda p: SGD(p, lr=2e-5), seed=0)

    start, reference, model = parameters_of(make()), make(), make()
    fit(reference, None, sequences(16))
    fit(model, BalancedAMP(loss_scale=2.0**10), sequences(16))
    moved = parameters_of(reference) - start
    assert (parameters_of(model) - start - moved).norm() < 2**-7 * moved.norm()
    halves = [weights.half() for weights in model.weights]
    still = [(a == b).double().mean().item() for a, b in zip(halves, halves[1:], strict=False)]
    assert sum(still) / len(still) > 0.9


class _Records(TorchFunctionMode):
    """Records the dtypes of weights in function calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, list[torch.dtype]] = {"linear": [], "layer_norm": []}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in self.weights:
            weight = args[1] if name == "linear" else kwargs["weight"]
            self.weights[name].append(weight.dtype)
        return func(*args, **kwargs)


class _Dtypes(Regression):
    """Records the dtypes of weights and outputs in modules, and of weights between them."""

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.outputs: dict[str, torch.dtype] = {}
        for name in ("blocks.0.qkv", "blocks.0.norm1", "blocks.0"):
            self.network.get_submodule(name).register_forward_hook(
                lambda _, __, out, name=name: self.outputs.__setitem__(name, out.dtype)
            )
        self.at_rest = {p.dtype for p in self.parameters()}
        with _Records() as record:
            result = super().loss(batch)
        self.weights_seen = record.weights
        return result


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("weights", ["half", "full"])
def test_weights_and_activations_have_the_dtypes_of_the_setting(half: Any, weights: Any) -> None:
    model = _Dtypes(Transformer)
    own = list(model.parameters())
    plugin = BalancedAMP(
        half=half, weights=weights, fp32_modules=["norm", "network.head", "network.blocks.1"]
    )
    fit(model, plugin, sequences(1))
    assert model.at_rest == {torch.float32}
    assert all(p is q for p, q in zip(model.parameters(), own, strict=True))
    computing = HALVES[half] if weights == "half" else torch.float32
    # The embedding and four layers of block 0; four layers of block 1 and the head.
    assert model.weights_seen["linear"] == [computing] * 5 + [torch.float32] * 5
    assert model.weights_seen["layer_norm"] == [torch.float32] * 5
    assert model.outputs["blocks.0.qkv"] == HALVES[half]
    # The network itself has one parameter, the position, which is half during its forward.
    stream = HALVES[half] if weights == "half" else torch.float32
    assert model.outputs["blocks.0.norm1"] == model.outputs["blocks.0"] == stream


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


def test_clipping_reads_the_gradients_of_an_automatic_step_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, check = [], torch._amp_foreach_non_finite_check_and_unscale_
    monkeypatch.setattr(
        torch,
        "_amp_foreach_non_finite_check_and_unscale_",
        lambda *args: (calls.append(args), check(*args)),
    )
    fit(Regression(), BalancedAMP(), loader(3), gradient_clip_val=0.1)
    assert len(calls) == 3


class LayerScale(nn.Module):
    """A block that checkpoints a function of its own weights."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)
        self.scale, self.shift = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        def scaled(x: Tensor) -> Tensor:
            return torch.sin(self.scale * x + self.shift)

        x = self.up(x)
        if self.use_reentrant is None:
            return self.down(scaled(x))
        return self.down(checkpoint(scaled, x, use_reentrant=self.use_reentrant))


class Leaf(LayerScale):
    """A layer without submodules that checkpoints a function of its own weights."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__(use_reentrant)
        del self.up, self.down
        self.up = self.down = torch.relu


class Whole(nn.Module):
    """Checkpoints a block, but saves the results of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.block = LayerScale(None)

    def forward(self, x: Tensor) -> Tensor:
        contexts = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=lambda: contexts)


def _layers(use_reentrant: bool | None) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), Leaf(use_reentrant), nn.Linear(16, 1))


@pytest.mark.parametrize(
    ("make_plain", "make"),
    [
        (lambda: LayerScale(None), lambda: LayerScale(False)),
        (lambda: LayerScale(None), lambda: LayerScale(True)),
        (lambda: LayerScale(None), Whole),
        (lambda: _layers(None), lambda: _layers(False)),
    ],
    ids=["", "reentrant", "all", "leaf"],
)
def test_checkpointed_functions_read_the_copies_of_their_forward(
    make_plain: Any, make: Any
) -> None:
    plain, model = Regression(make_plain), Regression(make)
    own = list(model.parameters())
    for each in (plain, model):
        fit(each, BalancedAMP(loss_scale=2.0**10), loader(4))
    assert torch.equal(parameters_of(model), parameters_of(plain))
    assert all(p is q for p, q in zip(model.parameters(), own, strict=True))


class Spectral(nn.Module):
    """Filters frequencies by complex weights, and scales by float64 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=8)
        return self.down(torch.tanh(self.up((x * self.gain).float())))


class Unrecorded(Regression):
    """Records nothing, because the records are real numbers."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def on_train_batch_end(self, *_: Any) -> None: ...


@pytest.mark.parametrize("half", HALVES)
def test_complex_and_float64_parameters_train_as_in_fp32(half: Any) -> None:
    model, reference, start = (Unrecorded(Spectral) for _ in range(3))
    fit(reference, None, loader(8))
    fit(model, BalancedAMP(half=half), loader(8))
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in start.parameters()}
    for name in ("network.filter", "network.gain", "network.up.weight"):
        end, aim, first = (m.get_parameter(name).detach() for m in (model, reference, start))
        assert (end - aim).norm() < 16 * torch.finfo(HALVES[half]).eps * (aim - first).norm()


@pytest.mark.parametrize("half", HALVES)
def test_clipping_by_value_bounds_inf_where_no_loss_scale_skips_the_step(half: Any) -> None:
    class Overflows(Regression):
        def on_after_backward(self) -> None:
            self.network[0].weight.grad[0, 0] = torch.inf

    model = Overflows()
    before = model.network[0].weight[0, 0].item()
    clip = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    fit(model, BalancedAMP(half=half), loader(1), **clip)
    moved = 0.1 * 0.5 if half == "bf16" else 0
    assert model.network[0].weight[0, 0].item() == pytest.approx(before - moved)


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
def test_gradients_stay_unscaled_after_the_step_if_the_scale_grows(make_plugin: Any) -> None:
    class Reads(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            self.after = norm_of([p.grad for p in self.parameters()])

    model = Reads()
    fit(model, make_plugin(loss_scale=LossScaleConfig(growth_interval=1)), loader(1))
    assert model.after == model.gradient_norms[0]


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
def test_model_without_parameters_predicts(make_plugin: Any) -> None:
    class Sums(pl.LightningModule):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return batch[0].float().sum()

    data = loader(1)
    (total,) = make_trainer(make_plugin()).predict(Sums(), data)
    torch.testing.assert_close(total, next(iter(data))[0].sum(), rtol=2**-9, atol=2**-4)


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
@pytest.mark.parametrize("make", [AdamW, SafeAdamW])
def test_empty_parameter_groups_are_no_error(make: Any, make_plugin: Any) -> None:
    model = Regression(make_optimizer=lambda p: make([{"params": []}, {"params": list(p)}]))
    start = parameters_of(model)
    fit(model, make_plugin(), loader(2))
    assert not torch.equal(parameters_of(model), start)
