"""All monitors: no host sync, equal verdicts on all ranks, instantiation from YAML."""

import sys
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    GradientUnderflowMonitor,
    InstabilityMonitor,
    LossScaleMonitor,
    NonFiniteLocator,
    SpikeGuard,
)
from tests.callbacks.models import Watched, watch
from tests.processes import run_ranks

# Operations that make the host wait for the device: reading a number, or a data-dependent shape.
SYNCS = ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "equal", "masked_select", "unique")


class CountSyncs(TorchDispatchMode):
    """Counts the operations that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in SYNCS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def monitors(every_n_steps: int = 3) -> list[InstabilityMonitor]:
    return [
        LossScaleMonitor(),
        GradientUnderflowMonitor(every_n_steps=every_n_steps),
        ActivationRangeMonitor(every_n_steps=every_n_steps, backward=True),
        AdamStateMonitor(every_n_steps=every_n_steps),
        SpikeGuard(),
        NonFiniteLocator(),
    ]


def capturable(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3, foreach=True)


def syncs_of(plugin: Any, callbacks: list[InstabilityMonitor]) -> Counter[str]:
    with CountSyncs() as mode:
        watch(Watched(None, capturable, steps=24), callbacks, plugin)
    return mode.counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_plugin",
    [
        pytest.param(lambda: None, id="fp32", marks=pytest.mark.sweep),
        pytest.param(lambda: BalancedAMP(loss_scale=64.0), id="BalancedAMP"),
        pytest.param(lambda: PureFP16(loss_scale=64.0), id="PureFP16", marks=pytest.mark.sweep),
    ],
)
def test_monitors_add_no_host_sync(make_plugin: Any) -> None:
    watching = monitors()
    assert syncs_of(make_plugin(), watching) == syncs_of(make_plugin(), [])
    assert all(monitor.samples > 5 for monitor in watching[1:4])


@pytest.mark.slow
def test_sync_counter_counts() -> None:
    class Reads(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            torch.ones(()).item()

    with_reads = syncs_of(None, [Reads()])  # type: ignore[list-item]
    assert sum(with_reads.values()) - sum(syncs_of(None, []).values()) == 24


def _train(rank: int) -> list[Any]:
    factor = lambda step: torch.inf if rank == 1 and step in {5, 6, 7} else 1.0  # noqa: E731
    watching = monitors(every_n_steps=2)
    plugin = BalancedAMP(loss_scale=1024.0, weights="full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch(
            Watched(steps=16, factor=factor),
            watching,
            plugin,
            strategy=DDPStrategy(),
            devices=2,
            use_distributed_sampler=False,
        )
    return [
        [(a.step, a.kind, a.tensor, a.value) for a in monitor.alarms] for monitor in watching
    ] + [monitor.history.curves for monitor in watching[:4]]


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_measure_the_same_and_raise_the_same_alarms() -> None:
    first, second = run_ranks(_train, 2)
    assert repr(first) == repr(second)
    assert first[0][0][:2] == (5, "loss_scale_floor")  # only the loss of the second rank was inf


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # LightningCLI's use of jsonargparse
@pytest.mark.parametrize("name", [type(m).__name__ for m in monitors()])
def test_monitors_are_instantiated_from_yaml(name: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-mp"])
    args = [
        "--seed_everything=0",
        "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={tmp_path}",
        f"--trainer.callbacks+=lightning_mp.callbacks.{name}",
        "--trainer.callbacks.repeat_after_steps=7",
    ]
    cli = LightningCLI(BoringModel, args=args, run=False, save_config_callback=None)
    made = next(c for c in cli.trainer.callbacks if type(c).__name__ == name)
    assert made.repeat_after_steps == 7
