"""BalancedAMP and PureFP16 with Lightning's callbacks and entry points, against fp32."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.averages import weight_averaging
from tests.precision.models import (
    Regression,
    fit,
    loader,
    make_trainer,
    one_thread,
    parameters_of,
    perceptron,
    relative,
)

Plugin = BalancedAMP | PureFP16
plugins = pytest.mark.parametrize("plugin_type", [BalancedAMP, PureFP16])


def fp16(plugin_type: type[Plugin]) -> Plugin:
    return plugin_type(loss_scale=2.0**10)


class _Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.network[:3])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            modules = pl_module.network[:3]
            self.unfreeze_and_add_param_group(modules, optimizer, initial_denom_lr=2.0)


class _Unfrozen(Regression):
    def configure_optimizers(self) -> Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return SGD(trained, lr=0.1, momentum=0.9)


@plugins
def test_layers_unfrozen_in_training_train_as_in_fp32(plugin_type: Any) -> None:
    reference, model = _Unfrozen(), _Unfrozen()
    start = parameters_of(model)
    for each, plugin in ((reference, None), (model, fp16(plugin_type))):
        trainer = fit(each, plugin, loader(4), max_epochs=3, callbacks=[_Unfreezes()])
        optimizer = trainer.optimizers[0]
        assert len(optimizer.param_groups) == 2
        frozen = each.network[0].weight.numel()
        assert torch.equal(each.weights[3][:frozen], each.weights[0][:frozen])
        assert not torch.equal(each.weights[4][:frozen], each.weights[0][:frozen])
        states = [s["momentum_buffer"].dtype for s in optimizer.state.values()]
        assert states == [torch.float32] * 6
    assert relative(model, reference, start) < 2**-8


@pytest.mark.parametrize("fused", [False, True])
def test_forward_in_a_hook_under_autocast_uses_the_stepped_weights(fused: bool) -> None:
    outputs = []

    class Samples(Regression):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return self.network(batch[0]).float().square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            layer, x = self.network, torch.ones(1, 300)
            with torch.no_grad(), torch.autocast("cpu", torch.float16):
                outputs.append((layer(x), nn.functional.linear(x, layer.weight, layer.bias)))

    data = DataLoader(TensorDataset(torch.randn(12, 300)), batch_size=4)
    network = functools.partial(nn.Linear, 300, 300)  # small weights have no copies
    model = Samples(network, lambda parameters: AdamW(parameters, lr=0.1, fused=fused))
    fit(model, BalancedAMP(), data)
    for output, expected in outputs:
        torch.testing.assert_close(output, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Swapping scheduler", "ignore:.*averages half weights")
@plugins
def test_stochastic_weight_averaging_equals_fp32(plugin_type: Any) -> None:
    reference, model = Regression(interval="epoch"), Regression(interval="epoch")
    start = parameters_of(model)
    for each, plugin in ((reference, None), (model, fp16(plugin_type))):
        average = StochasticWeightAveraging(swa_lrs=0.2, swa_epoch_start=1, annealing_epochs=1)
        fit(each, plugin, loader(4), max_epochs=4, callbacks=[average])
    assert relative(model, reference, start) < 2**-7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*averages half weights")
@plugins
def test_ema_weight_averaging_with_validation_equals_fp32(plugin_type: Any) -> None:
    averages = weight_averaging()
    reference, model = Regression(), Regression()
    start, losses = parameters_of(model), []
    for each, plugin in ((reference, None), (model, fp16(plugin_type))):
        trainer = make_trainer(
            plugin, max_epochs=3, callbacks=[averages.EMAWeightAveraging(decay=0.8)]
        )
        trainer.fit(each, loader(4), loader(2, seed=9))
        losses.append(trainer.callback_metrics["val_loss"].item())
    assert relative(model, reference, start) < 2**-7
    assert losses[1] == pytest.approx(losses[0], rel=2**-8)


@plugins
def test_learning_rate_does_not_change_at_skipped_steps(plugin_type: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitor = LearningRateMonitor("step")
    model = Regression(bad_batches=[1], interval="step")
    plugin = plugin_type(loss_scale=LossScaleConfig(init_scale=2.0**10))
    options = {"logger": logger, "log_every_n_steps": 1, "callbacks": [monitor]}
    fit(model, plugin, loader(4), **options)
    # The learning rates at global steps 0, 1, 1 and 2.
    assert monitor.lrs == {"lr-SGD": pytest.approx([0.1, 0.09, 0.09, 0.081])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin_type", "options"),
    [
        (BalancedAMP, {"weights": "half"}),
        (BalancedAMP, {"weights": "full"}),
        *((PureFP16, {"write_back": way}) for way in ("kahan", "stochastic", "nearest")),
    ],
)
def test_second_fit_continues_from_the_master_weights(
    plugin_type: Any, options: dict[str, Any]
) -> None:
    once, twice = Regression(), Regression()
    fit(once, plugin_type(loss_scale=2.0**10, **options), loader(4), max_epochs=2)
    trainer = fit(twice, plugin_type(loss_scale=2.0**10, **options), loader(4))
    between = parameters_of(twice)
    trainer.fit_loop.max_epochs = 2
    with one_thread():
        trainer.fit(twice, loader(4))
    assert trainer.global_step == 8
    assert not torch.equal(parameters_of(twice), between)
    assert torch.equal(parameters_of(twice), parameters_of(once))


def test_validate_test_and_predict_run_without_fit_and_restore_the_model() -> None:
    model, data = Regression(), loader(2)
    before = [p.clone() for p in model.parameters()]
    expected = sum(model.loss(batch).item() for batch in data) / 2
    outputs = torch.cat([model.network(x) for x, _ in data])
    trainer = make_trainer(BalancedAMP())
    for run in (trainer.validate, trainer.test):
        assert run(model, data, verbose=False)[0]["val_loss"] == pytest.approx(expected, rel=2**-8)
    predicted = torch.cat(trainer.predict(model, data))
    assert predicted.dtype == torch.float16
    torch.testing.assert_close(predicted.float(), outputs, rtol=0, atol=2**-8)
    for p, q in zip(model.parameters(), before, strict=True):
        assert p.dtype == torch.float32
        assert torch.equal(p, q)


@plugins
def test_exception_in_training_restores_the_fp32_model(plugin_type: Any) -> None:
    class Fails(Regression):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            if len(self.losses) == 3:
                raise ArithmeticError
            super().on_before_optimizer_step(optimizer)

    model, reference = Fails(), Regression()
    with pytest.raises(ArithmeticError):
        fit(model, fp16(plugin_type), loader(4))
    fit(reference, fp16(plugin_type), loader(2))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(parameters_of(model), parameters_of(reference))


@pytest.mark.slow
@plugins
def test_compiled_submodule_trains_as_in_fp32(plugin_type: Any) -> None:
    def network() -> nn.Module:
        whole = perceptron()
        whole[:3].compile(backend="aot_eager")
        return nn.Sequential(torch.compile(whole[:3], backend="aot_eager"), whole[3])

    torch.compiler.reset()
    reference, model = Regression(), Regression(network)
    start = parameters_of(reference)
    assert torch.equal(parameters_of(model), start)
    fit(reference, None, loader(6))
    fit(model, fp16(plugin_type), loader(6))
    torch.compiler.reset()
    assert relative(model, reference, start) < 2**-7
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_compiled_module_is_one_graph(half: Any) -> None:
    class Plain(Regression):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.loss(batch)

    reference, model = Plain(), Plain()
    start = parameters_of(reference)
    fit(reference, None, loader(6))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    fit(torch.compile(model, backend="aot_eager"), BalancedAMP(half=half), loader(6))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.compiler.reset()
    assert relative(model, reference, start) < (2**-7 if half == "fp16" else 2**-4)


@plugins
def test_optimizer_state_is_fp32_in_every_entry(plugin_type: Any) -> None:
    model = Regression(make_optimizer=lambda p: AdamW(p, lr=0.01, amsgrad=True))
    trainer = fit(model, fp16(plugin_type), loader(2))
    states = trainer.optimizers[0].state_dict()["state"].values()
    assert len(states) == 6
    assert {v.dtype for state in states for v in state.values()} == {torch.float32}


class Rated(Regression):
    """Has a learning rate that Lightning's finder sets."""

    lr = 0.1

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=self.lr)


@pytest.mark.slow
@plugins
def test_learning_rate_finder_tries_rates_and_restores_the_weights(
    plugin_type: Any, tmp_path: Path
) -> None:
    found = []
    for plugin in (None, fp16(plugin_type)):
        model = Rated()
        start = parameters_of(model)
        trainer = make_trainer(plugin, default_root_dir=tmp_path, max_epochs=1)
        finder = Tuner(trainer).lr_find(model, loader(40), num_training=30, min_lr=1e-4)
        # A half and its residual hold 22 bits of an fp32 weight.
        torch.testing.assert_close(parameters_of(model), start, rtol=2**-21, atol=1e-9)
        found.append([loss for loss in finder.results["loss"][:20]])
        trainer.fit(model, loader(2))
        assert not torch.equal(parameters_of(model), start)
    assert found[1] == pytest.approx(found[0], rel=2**-6)


@plugins
def test_learning_rate_finder_averages_losses_of_skipped_steps(
    plugin_type: Any, tmp_path: Path
) -> None:
    found = []
    scale = LossScaleConfig(init_scale=2.0**120, max_scale=2.0**120, backoff_factor=2.0**-60)
    for plugin in (None, plugin_type(loss_scale=scale)):
        trainer = make_trainer(plugin, default_root_dir=tmp_path, max_epochs=1)
        finder = Tuner(trainer).lr_find(Rated(), loader(20), num_training=10, max_lr=1e-4)
        found.append(finder.results["loss"])
    assert found[1] == pytest.approx(found[0], rel=2**-6)


@plugins
def test_learning_rate_finder_without_early_stop_ends_where_steps_fail(
    plugin_type: Any, tmp_path: Path
) -> None:
    model = Rated()
    start = parameters_of(model)
    plugin = plugin_type(loss_scale=LossScaleConfig(min_scale=1.0, patience=3))
    trainer = make_trainer(plugin, default_root_dir=tmp_path, max_epochs=1)
    finder = Tuner(trainer).lr_find(
        model, loader(80), num_training=60, min_lr=1e-3, max_lr=1e3, early_stop_threshold=None
    )
    assert 30 < len(finder.results["loss"]) < 60
    torch.testing.assert_close(parameters_of(model), start, rtol=2**-21, atol=1e-9)
    assert not trainer.should_stop


@plugins
def test_throughput_is_compared_with_that_of_half_precision(
    plugin_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = []
    monkeypatch.setattr(
        "lightning.pytorch.callbacks.throughput_monitor.get_available_flops",
        lambda _, dtype: dtypes.append(dtype),
    )
    model = Regression()
    model.flops_per_batch = 1
    fit(model, plugin_type(), loader(1), callbacks=[ThroughputMonitor(batch_size_fn=len)])
    assert dtypes == [torch.float16]


@pytest.mark.slow
@plugins
def test_model_trains_after_the_batch_size_finder(plugin_type: Any, tmp_path: Path) -> None:
    class Sized(Regression):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return loader(8, self.batch_size)

        val_dataloader = train_dataloader

    model = Sized()
    start = parameters_of(model)
    trainer = make_trainer(fp16(plugin_type), default_root_dir=tmp_path, max_epochs=1)
    Tuner(trainer).scale_batch_size(model, max_trials=3, init_val=2)
    assert model.batch_size in (8, 16)  # Lightning 2.5 doubles once more after the last trial
    torch.testing.assert_close(parameters_of(model), start, rtol=2**-21, atol=1e-9)
    trainer.fit(model)
    assert not torch.equal(parameters_of(model), start)


@plugins
def test_accumulation_schedule_equals_fp32(plugin_type: Any) -> None:
    reference, model = Regression(), Regression()
    start = parameters_of(model)
    for each, plugin in ((reference, None), (model, fp16(plugin_type))):
        schedule = GradientAccumulationScheduler({0: 1, 1: 4})
        trainer = fit(each, plugin, loader(8), max_epochs=2, callbacks=[schedule])
        assert trainer.global_step == 10
    assert relative(model, reference, start) < 2**-7
