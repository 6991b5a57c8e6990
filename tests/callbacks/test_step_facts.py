"""A step is read once for all callbacks of a Trainer, in any order."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import LBFGS, SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp import BalancedAMP
from lightning_mp.callbacks import (
    AdamStateMonitor,
    Alarm,
    GradientUnderflowMonitor,
    InstabilityReport,
    LossScaleMonitor,
    NonFiniteLocator,
    ParameterMonitor,
    SpikeGuard,
)
from lightning_mp.callbacks._report.page import MAP_TITLES
from lightning_mp.callbacks._rules.records import Sample, StepFacts, Verdict
from lightning_mp.callbacks._step import recorder, training_state
from lightning_mp.callbacks.activation_range_monitor import ActivationRangeMonitor
from lightning_mp.callbacks.monitor import InstabilityMonitor
from tests.callbacks.models import Watched, watch
from tests.precision.models import make_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_mp.callbacks.InstabilityWarning",
    "ignore:.*lr_scheduler.step.*before.*optimizer.step",
)


class Keeps(InstabilityMonitor):
    """Stores the facts of every step."""

    needs_gradient_norm = every_step = True

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[StepFacts] = []

    def judge(self, sample: Sample) -> list[Verdict]:
        self.facts.append(sample.facts)
        return []


def stock() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


def fused(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3, fused=True)


PLUGINS = {
    "ours": (lambda: BalancedAMP(loss_scale="dynamic"), None),
    "16-mixed": (stock, None),
    "16-mixed, fused": (stock, fused),
}


@pytest.mark.parametrize(("plugin", "optimizer"), PLUGINS.values(), ids=PLUGINS)
def test_facts_contain_skipped_steps_and_the_scale_before_and_after(
    plugin: Any, optimizer: Any
) -> None:
    keeps = Keeps()
    factor = lambda step: math.inf if step in (3, 4) else 1.0  # noqa: E731
    watch(Watched(None, optimizer, steps=7, factor=factor), [keeps], plugin())
    assert [f.step for f in keeps.facts if f.skipped] == [3, 4]
    scales = [1024.0] * 4 + [512.0] + [256.0] * 3
    assert [f.loss_scale for f in keeps.facts] == scales[:-1]
    assert [f.next_loss_scale for f in keeps.facts] == scales[1:]
    assert [f.loss is not None and math.isfinite(f.loss) for f in keeps.facts][2:6] == [
        *(True, False, False, True)
    ]


def test_disabled_scaler_of_torch_is_no_loss_scale() -> None:
    keeps = Keeps()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    callbacks = [keeps, LossScaleMonitor(), NonFiniteLocator(), SpikeGuard()]
    watch(Watched(steps=3), callbacks, MixedPrecision("16-mixed", "cpu", scaler))
    assert [(f.loss_scale, f.skipped) for f in keeps.facts] == [(None, False)] * 3


def test_facts_contain_epoch_batch_and_rank() -> None:
    keeps = Keeps()
    model = Watched(None, lambda p: SGD(p, torch.tensor(0.25)), steps=6)
    watch(model, [keeps], accumulate_grad_batches=2, max_epochs=2)
    assert [(f.step, f.epoch, f.batch_idx) for f in keeps.facts] == [
        *((0, 0, 1), (1, 0, 3), (2, 0, 5), (3, 1, 1), (4, 1, 3), (5, 1, 5))
    ]
    last = keeps.facts[-1]
    assert (last.global_step, last.rank, last.optimizer, last.optimizer_name) == (5, 0, 0, "SGD")
    assert last.lr == 0.25  # the learning rate is a tensor
    assert (last.loss_scale, last.skipped) == (None, False)
    assert last.largest_gradient in dict(model.named_parameters())
    assert last.gradient_norm is not None
    assert last.largest_gradient_norm is not None
    assert 0 < last.largest_gradient_norm <= last.gradient_norm


def test_line_search_of_lbfgs_is_one_step_with_the_loss_before_it() -> None:
    class Losses(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, _: Any, loss: Tensor) -> None:
            losses.setdefault(trainer.global_step, []).append(loss.item())

    keeps, losses = Keeps(), dict[int, list[float]]()
    model = Watched(None, lambda p: LBFGS(p, lr=0.1, max_iter=4), steps=6)
    make_trainer(callbacks=[keeps, Losses()], max_epochs=1).fit(model)
    assert max(map(len, losses.values())) == 4
    assert [f.loss for f in keeps.facts] == [first for first, *_ in losses.values()]


def test_gradients_are_collected_and_measured_once_for_all_callbacks(monkeypatch: Any) -> None:
    calls: Counter[str] = Counter()
    for module, name in ((training_state, "gradients_of"), (recorder, "measure_signals")):
        original = getattr(module, name)

        def counted(*args: Any, _name: str = name, _original: Any = original) -> Any:
            calls[_name] += 1
            return _original(*args)

        monkeypatch.setattr(module, name, counted)
    watching = [
        SpikeGuard(),
        InstabilityReport(),
        GradientUnderflowMonitor(every_n_steps=1),
        AdamStateMonitor(every_n_steps=1),
    ]
    watch(Watched(steps=5), watching, fast_dev_run=5)
    assert calls == {"gradients_of": 5, "measure_signals": 5}


def test_unsampled_steps_need_few_operations_for_all_monitors(monkeypatch: Any) -> None:
    """Each operation is a kernel on a GPU, in a step that may take ten milliseconds."""
    operations: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            operations[-1] += 1
            return func(*args, **(kwargs or {}))

    original = recorder.FactsRecorder.on_before_optimizer_step

    def counted(*args: Any) -> None:
        operations.append(0)
        with Counting():
            original(*args)

    monkeypatch.setattr(recorder.FactsRecorder, "on_before_optimizer_step", counted)
    sampling = [
        GradientUnderflowMonitor(every_n_steps=50),
        ActivationRangeMonitor(every_n_steps=50),
        AdamStateMonitor(every_n_steps=50),
        ParameterMonitor(every_n_steps=50),
    ]
    watch(Watched(steps=9), [SpikeGuard(), NonFiniteLocator(), *sampling], max_steps=9)
    assert operations[0] > 30  # sampled
    assert max(operations[-3:]) < 15


def monitors() -> Iterator[InstabilityMonitor]:
    yield LossScaleMonitor(min_scale=4096.0)
    yield GradientUnderflowMonitor(every_n_steps=2)
    yield ActivationRangeMonitor(every_n_steps=2, backward=True)
    yield AdamStateMonitor(every_n_steps=2)
    yield SpikeGuard(window_steps=8, judge_after_steps=4, repeat_after_steps=1)
    yield NonFiniteLocator(max_replays=1)


@pytest.mark.slow
def test_alarms_do_not_depend_on_the_order_of_callbacks() -> None:
    factor = {12: 50.0, 15: math.inf, 16: math.inf, 17: math.inf}

    def train(reverse: bool) -> dict[str, list[Alarm]]:
        watching = list(monitors())
        model = Watched(steps=20, factor=lambda step: factor.get(step, 1.0))
        plugin = BalancedAMP(loss_scale="dynamic")
        trainer = watch(model, watching[::-1] if reverse else watching, plugin)
        assert not any(isinstance(c, recorder.FactsRecorder) for c in trainer.callbacks)
        for monitor in watching:
            assert set(monitor.history.maps) <= set(MAP_TITLES)  # every map has a title
            keys = [*monitor.history.maps, *monitor.history.curves]
            assert [key for key in keys if not key.replace("_", "").isalnum()] == []
        return {type(m).__name__: m.alarms for m in watching}

    first, second = train(False), train(True)
    assert repr(first) == repr(second)
    alarms = [alarm for each in first.values() for alarm in each]
    assert {"loss_scale_low", "non_finite_loss", "non_finite"} <= {a.kind for a in alarms}
    assert all((a.epoch, a.batch_idx, a.rank) == (0, a.step, 0) for a in alarms)


class Spikes(pl.Callback):
    """A user's callback without effect."""


def test_recorder_is_shared_first_and_removed_after_training() -> None:
    seen: list[Any] = []

    class Looks(Watched):
        def on_train_start(self) -> None:
            seen.extend(self.trainer.callbacks)

    trainer = watch(Looks(steps=1), [Spikes(), SpikeGuard(), LossScaleMonitor()])  # type: ignore[list-item]
    kinds = [isinstance(each, recorder.FactsRecorder) for each in seen]
    assert kinds == [True, *[False] * (len(seen) - 1)]
    assert seen[2].recorder is seen[3].recorder is seen[0]
    assert seen[0] not in trainer.callbacks
