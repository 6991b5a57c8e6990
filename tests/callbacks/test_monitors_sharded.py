"""Monitors on two ranks that hold different shards: FSDP 1 and 2, tensor parallelism."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from lightning_mp import BalancedAMP, FSDPBalancedAMP, ModelParallelBalancedAMP
from lightning_mp.callbacks._rules.adam_statistics import adam_statistics
from lightning_mp.callbacks._step.training_state import TrainingStep, advised_plugin
from lightning_mp.callbacks.monitor import InstabilityMonitor
from tests.callbacks.test_monitors_together import monitors
from tests.precision.test_fsdp import SCALE, _Model, _SelfSharding, batches, fit_on_ranks
from tests.processes import run_ranks

KINDS: dict[str, tuple[Any, Any]] = {
    "fsdp": (_Model, FSDPBalancedAMP),
    "fsdp2": (_SelfSharding, ModelParallelBalancedAMP),
}


class _Names(InstabilityMonitor):
    """Keeps the names of the gradients of the last step."""

    def observe(self, step: TrainingStep) -> None:
        self.names = list(step.found.names)


def _train(rank: int, kind: str) -> tuple[list[Any], list[Any]]:
    model, plugin = KINDS[kind]
    watching, made = [*monitors(every_n_steps=10), _Names()], model()
    names = [name for name, _ in made.named_parameters()]
    made.configure_optimizers = lambda: AdamW(made.parameters(), lr=1e-3)
    # The sanity check of the validation leaves weights of the root module gathered.
    made.val_dataloader = lambda: batches(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_on_ranks(made, plugin(loss_scale=SCALE), rank, max_epochs=3, callbacks=watching)
    alarms = [alarm.severity for monitor in watching for alarm in monitor.alarms]
    assert watching.pop().names == names
    return [monitor.history.curves for monitor in watching], alarms


@pytest.mark.parametrize(
    ("strategy", "plugin"),
    [
        (FSDPStrategy, FSDPBalancedAMP),
        (ModelParallelStrategy, ModelParallelBalancedAMP),
        (DDPStrategy, BalancedAMP),
    ],
)
def test_remedies_for_stock_precision_name_the_plugin_for_the_strategy(
    strategy: Any, plugin: Any
) -> None:
    trainer: Any = SimpleNamespace(precision_plugin=Precision(), strategy=strategy())
    assert advised_plugin(trainer) is plugin


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.sweep)])
def test_ranks_with_shards_measure_the_same_and_raise_no_alarm(kind: str) -> None:
    (curves, alarms), (other_curves, other_alarms) = run_ranks(_train, 2, kind)
    assert repr(curves) == repr(other_curves)
    assert set(alarms) | set(other_alarms) <= {"info"}
    # Before its first step, an optimizer has no states, so the next step is sampled in any case.
    (rms,) = (c["update_rms"] for c in curves if "update_rms" in c)
    assert [step for step, _ in rms][:2] == [1, 2]
    assert {"gradient_norm", "activation_headroom_bits", "update_rms"} <= {
        n for c in curves for n in c
    }


def _statistics(rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(15.0).view(5, 3)
    weight = torch.nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    gradient = distribute_tensor(values, mesh, [Shard(0)])
    optimizer = AdamW([weight])
    weight.grad = gradient.clone()
    optimizer.step()
    whole = distribute_tensor(values, mesh, [Replicate()])
    summands = DTensor.from_local(values / 2, mesh, [Partial()])
    return [adam_statistics(optimizer, [weight], [g], 1.0) for g in (gradient, whole, summands)]


@pytest.mark.distributed
def test_adam_statistics_reduce_gradients_of_tensor_parallelism() -> None:
    for expected, *others in run_ranks(_statistics, 2):
        assert all(torch.equal(other, expected) for other in others)
