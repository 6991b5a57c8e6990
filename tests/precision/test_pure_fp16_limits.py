"""Cases in which PureFP16 raises or warns; uses of `exposed` and `fp32_modules`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_mp.precision.pure_fp16 import PureFP16
from tests.averages import weight_averaging
from tests.precision.models import (
    Regression,
    fit,
    loader,
    make_trainer,
    parameters_of,
    perceptron,
)


class Lookahead(Optimizer):
    """Averages with the weights of two steps before, every second step of an inner optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})


class Several(Optimizer):
    """Steps a list of inner optimizers."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        self.parts = [SGD([p], lr=0.1) for p in parameters]
        super().__init__(parameters, {})


@pytest.mark.parametrize(
    ("make", "inner"),
    [(lambda p: Lookahead(Adam(p)), "inner"), (Several, "parts")],
    ids=["one", "a list"],
)
def test_optimizers_with_an_inner_optimizer_raise_with_its_name(make: Any, inner: str) -> None:
    model = Regression(make_optimizer=make)
    with pytest.raises(MisconfigurationException, match=rf"\.{inner}.*`BalancedAMP`"):
        fit(model, PureFP16(), loader(1))
    assert model.losses == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.interface.*:DeprecationWarning")
def test_zero_redundancy_optimizer_raises(tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model = Regression(make_optimizer=lambda p: ZeroRedundancyOptimizer(p, Adam, lr=1e-3))
        with pytest.raises(MisconfigurationException, match="ZeroRedundancy.*`BalancedAMP`"):
            fit(model, PureFP16(), loader(1))
    finally:
        torch.distributed.destroy_process_group()


def pruned() -> nn.Module:
    network = perceptron()
    prune.l1_unstructured(network[0], "weight", 0.5)
    return network


class _WithAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()
        self.average = AveragedModel(self.body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize(
    ("make", "name"),
    [(pruned, "network.0"), (_WithAverage, "network.average")],
)
def test_pruned_modules_and_half_averages_raise_with_their_name(make: Any, name: str) -> None:
    model = Regression(make)
    with pytest.raises(MisconfigurationException, match=rf"`{name}` .*`BalancedAMP`"):
        fit(model, PureFP16(), loader(1))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    make_trainer(PureFP16()).validate(model, loader(1), verbose=False)  # writes no weights


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_lazy_modules_raise_with_their_name(run: str) -> None:
    model = Regression(lambda: nn.Sequential(nn.Linear(8, 4), nn.LazyLinear(1)))
    model.configure_optimizers = lambda: None
    with pytest.raises(MisconfigurationException, match=r"`network\.1` is lazy.*`BalancedAMP`"):
        getattr(make_trainer(PureFP16()), run)(model, loader(1))


def test_average_in_fp32_modules_is_accepted() -> None:
    model = Regression(_WithAverage)
    fit(model, PureFP16(fp32_modules=["AveragedModel"]), loader(2))
    assert len(model.losses) == 2


def test_pruning_in_training_raises() -> None:
    callback = ModelPruning("l1_unstructured", parameters_to_prune=None, amount=0.5)
    with pytest.raises(MisconfigurationException, match="ModelPruning.*`BalancedAMP`"):
        fit(Regression(), PureFP16(), loader(1), callbacks=[callback])


AVERAGES: dict[str, Callable[[], Callback]] = {
    "ema": lambda: weight_averaging().EMAWeightAveraging(decay=0.9),
    "mean": lambda: weight_averaging().WeightAveraging(),
    "multi-tensor": lambda: weight_averaging().WeightAveraging(
        multi_avg_fn=get_ema_multi_avg_fn(0.9)
    ),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.1),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_callbacks_that_average_half_weights_warn(name: str) -> None:
    model = Regression(interval="epoch")
    with pytest.warns(UserWarning, match="averages half weights.*`BalancedAMP`"):
        fit(model, PureFP16(), loader(2), callbacks=[AVERAGES[name]()], max_epochs=2)


def test_weight_averaging_returns_the_mean_of_all_steps() -> None:
    model = Regression()
    with pytest.warns(UserWarning, match="averages half weights"):
        fit(model, PureFP16(), loader(5), callbacks=[AVERAGES["mean"]()])
    mean = torch.stack(model.weights).mean(0)
    torch.testing.assert_close(parameters_of(model), mean, rtol=2**-10, atol=1e-6)


# --- writes --------------------------------------------------------------------------------------


class _Taught(Regression):
    """Has an EMA teacher with a small rate."""

    rate, is_exposed = 2.0**-13, True

    def __init__(self) -> None:
        super().__init__()
        self.teacher = perceptron().requires_grad_(False)
        self.path: list[Tensor] = []

    def follow(self) -> None:
        pairs = zip(self.teacher.parameters(), self.network.parameters(), strict=True)
        for slow, fast in pairs:
            slow.data.lerp_(fast.data, self.rate)

    def on_train_batch_end(self, *_: Any) -> None:
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, PureFP16) and self.is_exposed:
            with plugin.exposed(self):
                self.follow()
        else:
            self.follow()

    def way(self) -> Tensor:
        return torch.cat([p.detach().double().flatten() for p in self.teacher.parameters()])


@pytest.mark.slow
def test_slow_teacher_follows_exposed_weights_but_not_half_weights() -> None:
    ends = {}
    start = _Taught().way()
    for name, plugin in (("fp32", None), ("exposed", PureFP16()), ("half", PureFP16())):
        model = _Taught()
        model.is_exposed = name == "exposed"
        fit(model, plugin, loader(30, batch_size=4))
        # Frozen weights start from their half values.
        ends[name] = model.way() - (start if plugin is None else start.half().double())
    way = ends["fp32"].norm()
    assert (ends["exposed"] - ends["fp32"]).norm() < 2**-6 * way
    assert (ends["half"] - ends["fp32"]).norm() > 0.5 * way


def test_exposed_weights_have_22_bits() -> None:
    seen: dict[str, Tensor] = {}

    class Reading(Regression):
        def on_fit_end(self) -> None:
            with self.trainer.precision_plugin.exposed(self.network):
                seen.update(self.network.state_dict())

    model = Reading(make_optimizer=lambda p: SGD(p, lr=1e-4))
    fit(model, PureFP16(), loader(3))
    for name, value in model.network.state_dict().items():  # after teardown
        assert torch.equal(seen[name], value)


# --- custom functions ----------------------------------------------------------------------------


class _Wide(torch.autograd.Function):
    """A custom function that requests fp32 from autocast."""

    seen: list[torch.dtype] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Wide.seen.append(x.dtype)
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class _Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Wide.apply(x)


@pytest.mark.parametrize(("islands", "dtype"), [([], torch.float16), (["_Custom"], torch.float32)])
def test_custom_functions_receive_fp32_only_in_fp32_modules(
    islands: list[str], dtype: torch.dtype
) -> None:
    _Wide.seen.clear()
    model = Regression(lambda: nn.Sequential(nn.Linear(8, 8), _Custom(), nn.Linear(8, 1)))
    fit(model, PureFP16(fp32_modules=islands), loader(2))
    assert set(_Wide.seen) == {dtype}


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_frozen_layer_in_the_other_half_dtype_equals_one_in_fp32(half: Any) -> None:
    other = torch.float16 if half == "bf16" else torch.bfloat16

    class Based(Regression):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            layer = self.network[0].requires_grad_(False)
            layer.to(other).to(dtype)  # both dtypes hold the same values

    ends = []
    for dtype in (torch.float32, other):
        model = Based(dtype)
        fit(model, PureFP16(half=half), loader(3))
        ends.append(parameters_of(model))
    assert torch.equal(*ends)
