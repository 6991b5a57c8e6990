"""A disk error costs `SpikeGuard(action="rewind")` a checkpoint, but does not end the run."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from tests.callbacks.disks import full_disk
from tests.callbacks.spike_models import PlantedModel, fit, kinds, make_batches
from tests.callbacks.test_rewind import SPIKE, guard
from tests.processes import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 35
FULL = 25  # the step from which the disk is full


class Trained(PlantedModel):
    def on_train_end(self) -> None:
        self.end = [p.detach().clone() for p in self.parameters()]


class Sharded(PlantedModel):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_train_end(self) -> None:
        self.end = [p.full_tensor().detach() for p in self.parameters()]  # type: ignore[attr-defined]


def train(rank: int, kind: str, how: str, folder: str) -> Any:
    """Train with a guard whose disk fails, and without a guard; return models and warnings."""
    ranks = torch.distributed.get_world_size()
    ends, said = [], []
    for is_guarded in (True, False):
        model = {"sharded": Sharded}.get(kind, Trained)(None, lambda p: SGD(p, lr=0.05))
        watch = guard(Path(folder))
        if how == "in the way":
            (Path(folder) / "marks").write_text("a file")
        strategies: dict[str, Any] = {"sharded": lambda: ModelParallelStrategy(ranks, 1)}
        options: dict[str, Any] = {"default_root_dir": folder, "devices": ranks}
        options["strategy"] = strategies.get(kind, lambda: "ddp" if ranks > 1 else "auto")()
        limit = full_disk() if how == "full" and is_guarded else warnings.catch_warnings()
        with warnings.catch_warnings(record=True) as caught, limit:
            warnings.simplefilter("always")
            batches = make_batches(STEPS * ranks)[rank::ranks]
            callbacks = [watch] if is_guarded else []
            fit(model, batches, *callbacks, **options, use_distributed_sampler=False)
        said += [str(each.message) for each in caught if "SpikeGuard" in str(each.message)]
        ends.append(model.end)
    left = [path.name for path in Path(folder).rglob("*") if path.is_file()]
    return said, ends, left, len(model.seen)


WHERE = {"1": (1, "plain"), "2": (2, "ddp"), "2-sharded": (2, "sharded")}
# Each fault, each strategy, and both faults in one process; `make sweep` has the others.
GATE = {("1", "in the way"), ("1", "full"), ("2", "full"), ("2-sharded", "in the way")}


@pytest.mark.parametrize(
    ("ranks", "kind", "how"),
    [
        pytest.param(
            *WHERE[where],
            how,
            id=f"{where}-{how}",
            marks=[] if (where, how) in GATE else pytest.mark.sweep,
        )
        for where in WHERE
        for how in ("in the way", "full")
    ],
)
def test_run_with_failing_checkpoints_equals_a_run_without_guard(
    tmp_path: Path, ranks: int, kind: str, how: str
) -> None:
    results = run_ranks(train, ranks, kind, how, str(tmp_path))
    for said, (ours, theirs), left, steps in results:
        assert steps == STEPS
        assert left == (["marks"] if how == "in the way" else [])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert len(said) <= 1
    (text,) = results[0][0]
    assert "could not write a checkpoint to" in text
    assert text.count(str(tmp_path)) == 1  # names no temporary file
    assert "Training continues" in text


class FillsUp(PlantedModel):
    """Fills the disk at a step; later, the loss explodes on all ranks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == FULL:
            self.limit = full_disk()
            self.limit.__enter__()
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.limit.__exit__(None, None, None)


def train_until_full(rank: int, folder: str) -> Any:
    ranks = torch.distributed.get_world_size()
    watch, model = guard(Path(folder)), FillsUp({SPIKE: "explosion"})
    options: dict[str, Any] = {"strategy": "ddp", "devices": ranks, "default_root_dir": folder}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = make_batches(90 * ranks)[rank::ranks]
        fit(model, batches, watch, **options, use_distributed_sampler=False)
    said = [str(each.message) for each in caught if "could not write" in str(each.message)]
    return said, kinds(watch), [alarm.value for alarm in watch.alarms], model.seen[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rewind_on_a_full_disk_uses_an_earlier_checkpoint(tmp_path: Path, ranks: int) -> None:
    results = run_ranks(train_until_full, ranks, str(tmp_path))
    for said, events, values, last in results:
        assert events[0] == (SPIKE, "loss_spike")
        assert [kind for _, kind in events[1:]] == ["rewind_to_step"]
        assert values[-1] == 20
        assert last == 89
        assert len(said) <= 1
    assert "OSError: File too large" in results[0][0][0]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
