"""All monitors together in unusual set-ups of a Trainer."""

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    GradientUnderflowMonitor,
    InstabilityMonitor,
    InstabilityReport,
    LossScaleMonitor,
    NonFiniteLocator,
    ParameterMonitor,
    RepresentationMonitor,
    SpikeGuard,
    TensorCollector,
)
from lightning_mp.callbacks._rules.records import Sample, Verdict
from lightning_mp.optim import SafeAdamW
from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.callbacks.models import Watched
from tests.precision.models import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")


def all_monitors() -> list[InstabilityMonitor]:
    return [
        LossScaleMonitor(),
        GradientUnderflowMonitor(),
        ActivationRangeMonitor(),
        AdamStateMonitor(),
        SpikeGuard(window_steps=8, judge_after_steps=4),
        NonFiniteLocator(),
        InstabilityReport(),
    ]


@pytest.fixture
def reset_compiler() -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("reset_compiler")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`")  # Lightning's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
def test_monitors_observe_steps_of_a_module_compiled_as_a_whole(tmp_path: Path) -> None:
    class Rooted(Watched):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch.float()[:, None].expand(-1, 16) / 20
            return (self.network(x) - 1).square().mean() * (torch.nan if batch_idx == 15 else 1.0)

    monitors = all_monitors()
    trainer = make_trainer(callbacks=monitors, default_root_dir=tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match="compiled as a whole"):
        trainer.fit(torch.compile(Rooted(steps=20), backend="eager"))
    guard, locator = monitors[4:6]
    assert len(guard.history.curves["loss"]) >= 15
    assert [(alarm.step, alarm.tensor) for alarm in locator.alarms][:1] == [(15, "Rooted")]


@pytest.mark.slow
def test_error_of_a_monitor_does_not_hide_the_exception_that_ends_training(
    tmp_path: Path, logged: list[str]
) -> None:
    class Broken(InstabilityMonitor):
        def on_exception(self, *_: Any) -> None:
            raise ValueError("of the monitor")

    def fail(module: pl.LightningModule, batch_idx: int) -> None:
        if batch_idx == 3:
            raise KeyError("of the run")

    trainer = make_trainer(callbacks=[Broken(), *all_monitors()], default_root_dir=tmp_path)
    with pytest.raises(KeyError, match="of the run"):
        trainer.fit(Watched(steps=5, sabotage=fail))
    said = "`Broken.on_exception` failed: ValueError('of the monitor')"
    assert any(said in text for text in logged)


class Plain(Optimizer):
    """An optimizer with a learning rate as its only option; `None` means 1e-3."""

    def __init__(self, parameters: Any, lr: float | None = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"] or 1e-3)
        return loss


MAKERS = {
    "sgd": lambda p: SGD(p, lr=1e-3),
    "tensor lr": lambda p: SGD([{"params": list(p)}], lr=torch.tensor(1e-3)),
    "adafactor": lambda p: Adafactor(p),
    "custom": lambda p: Plain(p),
}
# Each set-up once; `make sweep` combines all set-ups.
PAIRS = list(zip(MAKERS, ("warn", "skip", "stop", "rewind"), strict=True))
OTHERS = [(name, action) for name in MAKERS for _, action in PAIRS if (name, action) not in PAIRS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "action"),
    [*PAIRS, *(pytest.param(*each, marks=pytest.mark.sweep) for each in OTHERS)],
)
@pytest.mark.filterwarnings("ignore:`SpikeGuard.action='skip'.` reads one flag")
def test_monitors_accept_optimizers_without_betas(tmp_path: Path, name: str, action: Any) -> None:
    monitors = [each for each in all_monitors() if not isinstance(each, AdamStateMonitor)]
    monitors[3] = SpikeGuard(
        window_steps=8, judge_after_steps=4, action=action, rewind_steps=1, skip_batches=2
    )

    def factor(index: int) -> float:
        return torch.nan if index == 15 else 1.0

    model = Watched(make_optimizer=MAKERS[name], steps=20, factor=factor)
    make_trainer(callbacks=monitors, default_root_dir=tmp_path, max_epochs=1).fit(model)
    assert (15, "non_finite_loss") in [(alarm.step, alarm.kind) for alarm in monitors[3].alarms]


class Growing(InstabilityMonitor):
    """Raises an alarm whose remedy contains a learning rate."""

    every_step = True

    def judge(self, sample: Sample) -> list[Verdict]:
        return [Verdict("weight_growth", 2.0, 1.0, tensor="weight").given(usual=1.0)]


def test_remedy_names_no_rate_if_the_optimizer_computes_it_itself(tmp_path: Path) -> None:
    """As Hugging Face's `Adafactor`, whose groups have a rate of `None`."""
    makers = [lambda p: Plain(p), lambda p: Plain(p, None)]
    monitors = [Growing(), Growing()]
    for make_optimizer, monitor in zip(makers, monitors, strict=True):
        model = Watched(make_optimizer=make_optimizer, steps=2)
        make_trainer(callbacks=monitor, default_root_dir=tmp_path, max_epochs=1).fit(model)
    remedies = [monitor.alarms[0].remedy for monitor in monitors]
    decay = "et a `weight_decay`."
    assert remedies == [f"Lower the learning rate to 0.0005, or s{decay}", f"S{decay}"]


@pytest.mark.filterwarnings("ignore:A layer with UninitializedParameter was found")
@pytest.mark.filterwarnings("ignore:The total number of parameters detected")
def test_monitors_accept_layers_that_the_first_batch_initializes(tmp_path: Path) -> None:
    guard = SpikeGuard(window_steps=8, judge_after_steps=4, action="rewind", rewind_steps=1)
    monitors = [*all_monitors()[:4], guard, InstabilityReport()]

    def factor(index: int) -> float:
        return torch.nan if index == 12 else 1.0

    model = Watched(lambda: nn.LazyLinear(1), steps=20, factor=factor)
    make_trainer(callbacks=monitors, default_root_dir=tmp_path, max_epochs=1).fit(model)
    assert [alarm.kind for alarm in guard.alarms][-1] == "rewind_to_step"
    assert model.network.weight.isfinite().all()


class Nested(nn.Module):
    """Computes on sequences of different lengths."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout, self.layers = layout, nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(x.split((2, 5, 25))), layout=self.layout)
        return torch.nested.to_padded_tensor(self.layers(nested), 0.0).flatten()[:32]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_monitors_accept_nested_outputs(tmp_path: Path, layout: torch.layout) -> None:
    name = "network.layers.0"
    features = RepresentationMonitor(modules=[name], every_n_steps=2)
    collector = TensorCollector(include=[name], collect=["outputs"], every_n_steps=2)
    monitors = [*all_monitors(), features, collector]
    model = Watched(lambda: Nested(layout), steps=6)
    make_trainer(callbacks=monitors, default_root_dir=tmp_path, max_epochs=1).fit(model)
    assert name in monitors[2].history.maps["activation_headroom_bits"]["names"]
    assert features.history.maps["feature_spread"]["names"] == [name]
    assert collector.folder is not None
    with np.load(collector.folder / "00000000.npz") as file:
        assert file["count"] == 32 * 8


def test_monitors_can_be_pickled_for_processes_that_are_spawned() -> None:
    monitors = [*all_monitors(), ParameterMonitor(), RepresentationMonitor(), TensorCollector()]
    keys = [pickle.loads(pickle.dumps(monitor)).state_key for monitor in monitors]
    assert keys == [monitor.state_key for monitor in monitors]


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.filterwarnings("ignore:Passed `AdamStateMonitor`, but no optimizer")
def test_monitors_accept_a_module_without_an_optimizer(tmp_path: Path) -> None:
    model = Watched(make_optimizer=lambda _: None, steps=20)  # type: ignore[arg-type,return-value]
    trainer = make_trainer(callbacks=all_monitors(), default_root_dir=tmp_path)
    trainer.fit(model)
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed == 20


class Filter(nn.Module):
    """Multiplies frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.fft.rfft(x.float())


class Back(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return torch.fft.irfft(z).to(torch.get_default_dtype())


def spectral() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Filter(), Back(), nn.Linear(16, 1))


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
def test_complex_weights_learn_in_fp16_as_in_fp32(tmp_path: Path, make_plugin: Any) -> None:
    found = []
    for plugin in (None, make_plugin(half="fp16")):
        # Adam's first updates are signs, which rounding flips if gradients are small.
        model = Watched(spectral, lambda p: SGD(p, lr=0.05), steps=20)
        before = model.network[1].weight.detach().clone()
        make_trainer(plugin, default_root_dir=tmp_path, gradient_clip_val=1.0).fit(model)
        found.append(model.network[1].weight.detach() - before)
    difference, size = (torch.linalg.vector_norm(x) for x in (found[1] - found[0], found[0]))
    assert size > 0.01
    assert difference < 0.05 * size, f"{difference} of {size}"


@pytest.mark.parametrize("plugin", [None, BalancedAMP, PureFP16])
def test_monitors_accept_complex_weights(tmp_path: Path, plugin: Any) -> None:
    adam, collector = AdamStateMonitor(every_n_steps=1), TensorCollector(every_n_steps=5)
    monitors = [each for each in all_monitors() if not isinstance(each, AdamStateMonitor)]
    trainer = make_trainer(
        plugin and plugin(half="fp16"), default_root_dir=tmp_path,
        callbacks=[*monitors, adam, collector],
    )  # fmt: skip
    trainer.fit(Watched(spectral, steps=20))
    assert "network.1.weight" in adam.history.maps["update_rms"]["names"]


class OtherStates(SGD):
    """Steps like SGD, and has settings and states that resemble Adam's, for the first parameter.

    Args:
        settings: Entries of the parameter group.
        shape: Shape of the states.
    """

    def __init__(self, parameters: Any, settings: dict[str, Any], shape: Any) -> None:
        super().__init__(parameters, lr=1e-3)
        self.param_groups[0].update(settings)
        self.shape = shape

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        first = self.param_groups[0]["params"][0]
        self.state[first] = {name: torch.ones(self.shape) for name in ("exp_avg", "exp_avg_sq")}
        return loss


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"betas": (0.98, 0.92, 0.99), "eps": 1e-8}, (16, 16)),
        ({"betas": (0.9, 0.999), "eps": (1e-30, 1e-16)}, (16, 16)),
        ({"betas": (0.9, 0.999), "eps": 1e-8}, (2, 16)),
        ({"betas": (0.9, 0.999), "eps": 1e-8}, ()),
    ],
    ids=["Adan", "CAME", "GaLore", "Adam-mini"],
)
@pytest.mark.filterwarnings("ignore:Passed `AdamStateMonitor`, but")
def test_adam_monitor_leaves_out_states_that_are_not_those_of_adam(
    tmp_path: Path, settings: dict[str, Any], shape: Any
) -> None:
    monitor = AdamStateMonitor(every_n_steps=1)
    trainer = make_trainer(callbacks=[monitor], default_root_dir=tmp_path, max_epochs=1)
    trainer.fit(Watched(make_optimizer=lambda p: OtherStates(p, settings, shape), steps=5))
    assert monitor.samples == 0


class Renamed(AdamW):
    """Has Adam's states for all parameters, but other names of betas for some groups."""

    def __init__(self, parameters: Any) -> None:
        first, *rest = parameters
        super().__init__([{"params": [first]}, {"params": rest}], lr=1e-3)
        self.param_groups[0]["decays"] = self.param_groups[0].pop("betas")

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        self.param_groups[0]["betas"] = self.param_groups[0].pop("decays")
        super().step()
        self.param_groups[0]["decays"] = self.param_groups[0].pop("betas")
        return loss


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_monitors_accept_a_shared_weight_that_the_optimizer_holds_twice(tmp_path: Path) -> None:
    model = Watched(make_optimizer=lambda p: AdamW([first := next(p), *p, first]), steps=12)
    monitors = [*all_monitors(), ParameterMonitor()]
    make_trainer(callbacks=monitors, default_root_dir=tmp_path, max_epochs=1).fit(model)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_monitors_accept_a_batch_that_training_step_skips(tmp_path: Path) -> None:
    class Skips(Watched):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 5 else None

    collector = TensorCollector(collect=["outputs"])
    monitors = [*all_monitors(), RepresentationMonitor(modules=["network.0"]), collector]
    make_trainer(callbacks=monitors, default_root_dir=tmp_path, max_epochs=1).fit(Skips(steps=12))


def test_adam_monitor_skips_groups_without_betas(tmp_path: Path) -> None:
    monitor = AdamStateMonitor(every_n_steps=1)
    trainer = make_trainer(callbacks=[monitor], default_root_dir=tmp_path, max_epochs=1)
    model = Watched(make_optimizer=Renamed, steps=5)
    trainer.fit(model)
    names = set(monitor.history.maps["update_rms"]["names"])
    assert names == {name for name, _ in model.named_parameters()} - {"network.0.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
def test_monitors_log_to_all_loggers_and_not_at_all_with_zero(tmp_path: Path, every: int) -> None:
    loggers = [CSVLogger(tmp_path / name, name="", version="") for name in ("one", "two")]
    options: dict[str, Any] = {"log_every_n_steps": every, "max_epochs": 1}
    trainer = make_trainer(
        callbacks=all_monitors(), logger=loggers, default_root_dir=tmp_path, **options
    )
    trainer.fit(Watched(steps=12))
    first, second = ((Path(each.log_dir) / "metrics.csv") for each in loggers)
    assert first.exists() == second.exists() == bool(every)
    if every:
        assert "instability/loss" in first.read_text()
        assert first.read_text() == second.read_text()


def test_layer_that_is_replaced_in_training_keeps_its_name(tmp_path: Path) -> None:
    class Replaces(Watched):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 5:
                self.network[0] = nn.Linear(16, 16)
                self.trainer.strategy.setup_optimizers(self.trainer)

    model = Replaces(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)), steps=12)
    every = {"every_n_steps": 1}
    monitors = [AdamStateMonitor(**every), GradientUnderflowMonitor(**every)]
    trainer = make_trainer(callbacks=monitors, default_root_dir=tmp_path)
    trainer.fit(model)
    rows = {
        name for each in monitors for heat in each.history.maps.values() for name in heat["names"]
    }
    assert rows == {name for name, _ in model.named_parameters()}


def test_default_device_of_torch_is_not_used_for_memory_of_the_host(tmp_path: Path) -> None:
    class Elsewhere(Watched):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.device_mode = torch.device("meta").__enter__()

        def inputs(self, generator: torch.Generator) -> Tensor:
            return torch.ones(32, 16, device="cpu")

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.network(self.inputs(torch.Generator())).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            self.device_mode.__exit__(None, None, None)

    callbacks = [*all_monitors(), RepresentationMonitor(modules=["network"])]
    callbacks.append(TensorCollector(include=["network.*"], dirpath=tmp_path))
    model = Elsewhere(make_optimizer=SafeAdamW, steps=3)
    make_trainer(callbacks=callbacks, max_epochs=1, default_root_dir=tmp_path).fit(model)
    assert model.global_step == 3
