"""Ranks rewind together, under every strategy, to the weights of training without the spike."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

from lightning_mp.callbacks.spike_guard import SpikeGuard
from lightning_mp.strategies import InfCLStrategy
from tests.averages import weight_averaging
from tests.callbacks.spike_models import PlantedModel, fit, kinds, make_batches
from tests.precision.test_fsdp import _CPUStrategy
from tests.processes import run_ranks

SPIKE, SKIP, BACK_TO = 43, 30, 30


class OneRankExplodes(PlantedModel):
    """Has a loss that explodes on rank 1 only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1000 if batch_idx == SPIKE and self.global_rank == 1 else loss


class LosesCheckpoint(OneRankExplodes):
    """Damages the checkpoint of the rewind at the spike."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == SPIKE and self.global_rank == 1:
            (path,) = Path(self.trainer.default_root_dir).rglob(f"step={BACK_TO}.ckpt")
            path.write_bytes(path.read_bytes()[:-100])
        return super().training_step(batch, batch_idx)


def train(
    rank: int, folder: str, make: type[PlantedModel]
) -> tuple[list[tuple[int, str]], list[int], list[Tensor]]:
    warnings.simplefilter("ignore")
    guard = SpikeGuard(
        action="rewind",
        rewind_storage="disk",
        rewind_steps=10,
        skip_batches=SKIP,
        checkpoint_every_n_steps=10,
        window_steps=32,
        judge_after_steps=16,
        dirpath=folder,
    )
    model = make(None, lambda p: SGD(p, lr=0.05, momentum=0.9))
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "default_root_dir": folder}
    fit(model, make_batches(140)[rank::2], guard, **options, use_distributed_sampler=False)
    return kinds(guard), model.seen, [p.detach() for p in model.parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "back_to"), [(OneRankExplodes, BACK_TO), (LosesCheckpoint, BACK_TO + 10)]
)
def test_ranks_rewind_together_if_one_rank_has_a_spike(
    tmp_path: Path, make: type[PlantedModel], back_to: int
) -> None:
    results = run_ranks(train, 2, str(tmp_path), make)
    for events, seen, _ in results:
        kinds_of_rank = [kind for _, kind in events]
        assert kinds_of_rank[0] == "loss_spike"
        assert kinds_of_rank[-1] == "rewind_to_step"
        assert ("rewind_lost" in kinds_of_rank) == (back_to != BACK_TO)
        assert seen == [*range(SPIKE + 1), *range(max(back_to + SKIP, SPIKE + 1), 70)]
    # One process with the samples of both ranks in a batch, without the skipped batches.
    batches = make_batches(140)
    pairs = zip(batches[::2], batches[1::2], strict=True)
    whole = [[torch.cat(part) for part in zip(*pair, strict=True)] for pair in pairs]
    whole = whole[:back_to] + whole[max(back_to + SKIP, SPIKE + 1) :]
    reference = PlantedModel()
    optimizer = SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for batch in whole:
        optimizer.zero_grad()
        reference.compute_loss(batch).backward()
        optimizer.step()
    for _, _, parameters in results:
        for ours, theirs in zip(parameters, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)


# --- strategies, and state other than weights ----------------------------------------------------


class Gathers(PlantedModel):
    """Records its unsharded weights when training ends."""

    def on_train_end(self) -> None:
        root = self.trainer.strategy.model
        whole = FullyShardedDataParallel.summon_full_params
        is_fsdp = isinstance(root, FullyShardedDataParallel)
        with whole(root, writeback=False) if is_fsdp else nullcontext():
            full = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
            self.end = torch.cat([p.detach().double().flatten() for p in full])


class ShardsItself(Gathers):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def _setup(kind: str) -> tuple[Any, Any, list[Any]]:
    """Return the class of the model, the strategy, and callbacks."""
    if kind == "fsdp":
        return Gathers, _CPUStrategy(state_dict_type="sharded"), []
    if kind == "fsdp2":
        return ShardsItself, ModelParallelStrategy(2, 1), []
    if kind == "inf_cl":
        return Gathers, InfCLStrategy(towers=["net"], micro_batch_size=16), []
    averages = [weight_averaging().EMAWeightAveraging(decay=0.9)] if kind == "ema" else []
    return Gathers, "ddp", averages


def train_kind(rank: int, kind: str, storage: str, folder: str) -> Any:
    """Train with a spike and a guard, and without both on the other batches; return both models."""
    warnings.simplefilter("ignore")
    ends, watch = [], None
    for is_planted in (True, False):
        make, strategy, callbacks = _setup(kind)
        model = make({SPIKE: "explosion"} if is_planted else {}, lambda p: AdamW(p, lr=3e-3))
        batches = make_batches(140)[rank::2]
        if is_planted:
            watch = SpikeGuard(
                action="rewind",
                rewind_steps=10,
                skip_batches=SKIP,
                checkpoint_every_n_steps=10,
                window_steps=32,
                judge_after_steps=16,
                dirpath=f"{folder}/marks",
                rewind_storage=storage,  # type: ignore[arg-type]
            )
            callbacks.append(watch)
        else:
            batches = batches[:BACK_TO] + batches[BACK_TO + SKIP :]
        options: dict[str, Any] = {"strategy": strategy, "devices": 2, "default_root_dir": folder}
        fit(model, batches, *callbacks, **options, use_distributed_sampler=False)
        ends.append(model.end)
    assert watch is not None
    left = [str(path) for path in Path(folder, "marks").rglob("*")]
    return [(alarm.kind, alarm.value) for alarm in watch.alarms[1:]], ends, left


# A file of one rank, and one of shards; `make sweep` has the others.
KINDS = [
    *(("inf_cl", "disk"), ("fsdp2", "auto")),
    *(
        pytest.param(kind, storage, marks=pytest.mark.sweep)
        for kind, storage in (
            *((kind, storage) for kind in ("ddp", "ema") for storage in ("disk", "memory")),
            *(("inf_cl", "memory"), ("fsdp", "auto")),
        )
    ),
]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "storage"), KINDS)
def test_rewind_on_two_ranks_equals_training_without_the_skipped_batches(
    tmp_path: Path, kind: str, storage: str
) -> None:
    for events, (ours, theirs), left in run_ranks(train_kind, 2, kind, storage, str(tmp_path)):
        assert events == [("rewind_to_step", BACK_TO)]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert left == []
