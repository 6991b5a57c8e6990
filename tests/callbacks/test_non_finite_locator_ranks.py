"""`NonFiniteLocator` on several ranks, and under `InfCLStrategy`."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mp import BalancedAMP
from lightning_mp.callbacks.non_finite_locator import NonFiniteLocator
from lightning_mp.strategies.inf_cl import InfCLStrategy
from tests.callbacks.non_finite_models import WIDTH, Model, Perceptron, data, fit
from tests.processes import run_ranks
from tests.strategies import models as clip

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning"),
]


class Spoils(nn.Module):
    """Returns inf while `is_on`."""

    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.inf if self.is_on else x


class OnRank(Model):
    """Has inf in its body on rank 1 in batch 2; every step communicates."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Perceptron(), Spoils(), nn.BatchNorm1d(WIDTH)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.body[1].is_on = batch_idx == 2 and self.global_rank == 1
        self.log("synced", batch["x"].mean(), sync_dist=True)
        return super().training_step(batch, batch_idx)


def _train(rank: int, plugin: str | None, with_locator: bool, accumulate: int) -> dict[str, Any]:
    locator = NonFiniteLocator(max_replays=1)
    torch.manual_seed(rank)
    model = OnRank()
    counted = _count_reductions()
    fit(
        model,
        data(8),
        None if plugin is None else BalancedAMP(),
        callbacks=[locator] if with_locator else [],
        strategy=DDPStrategy(),
        devices=2,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=True,
    )
    return {
        "alarms": locator.alarms,
        "weights": torch.stack(model.weights),
        "buffers": dict(model.named_buffers()),
        "runs": model.runs,
        "reductions": len(counted),
    }


def _count_reductions() -> list[int]:
    """Count the gradient buckets that DDP reduces, through its communication hook."""
    counted: list[int] = []
    original = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_comm_hook(None, hook)

    def hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        counted.append(1)
        buffer = bucket.buffer().div_(torch.distributed.get_world_size())
        work = torch.distributed.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    DistributedDataParallel.__init__ = init
    return counted


@pytest.mark.parametrize(
    ("plugin", "accumulate"),
    [(None, 1), pytest.param("balanced", 1, marks=pytest.mark.sweep), ("balanced", 2)],
)
def test_locator_replays_on_all_ranks_and_names_the_failed_rank(
    plugin: str | None, accumulate: int
) -> None:
    first, second = run_ranks(_train, 2, plugin, True, accumulate)
    assert first["alarms"] == second["alarms"]
    (alarm,) = first["alarms"]
    assert (alarm.step, alarm.tensor) == (2 // accumulate, "body.1")
    assert "batch 2, rank 1: " in alarm.message
    assert ". `body.1` (Spoils) made" in alarm.message
    runs = [0, 1, 2, 2, 3] if accumulate == 1 else [0, 1, 2, 3, 2]
    assert first["runs"] == second["runs"] == runs
    if plugin is not None:  # without a loss scale, weights become NaN
        plain = run_ranks(_train, 2, plugin, False, accumulate)
        for with_locator, without in zip((first, second), plain, strict=True):
            assert torch.equal(with_locator["weights"], without["weights"])
            assert with_locator["reductions"] == without["reductions"]
            for name, buffer in without["buffers"].items():
                assert torch.equal(
                    with_locator["buffers"][name].nan_to_num(7), buffer.nan_to_num(7)
                ), name


class _TwoPlayers(pl.LightningModule):
    """Steps two modules in turn; rank 1 gets an infinite batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.players = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        spoils = batch_idx == 2 and self.global_rank == 1
        x = batch["x"] * torch.inf if spoils else batch["x"]
        for optimizer, player in zip(self.optimizers(), self.players, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(player(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(player.parameters()) for player in self.players]


def _play(rank: int) -> list[int]:
    locator = NonFiniteLocator(max_replays=1)
    strategy = DDPStrategy(find_unused_parameters=True)
    fit(_TwoPlayers(), data(), callbacks=[locator], strategy=strategy, devices=2)
    return [alarm.step for alarm in locator.alarms]


def test_replay_between_two_backwards_leaves_unused_parameters_unused() -> None:
    """DDP ended training with an error: rank 0 had a gradient of the first player in the replay."""
    assert run_ranks(_play, 2) == [[2], [2]]


class _Spoiled(clip.TinyCLIP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                if self.trainer.precision_plugin.precision == "32-true":
                    self.text[0].weight.fill_(3e38)
                else:
                    self.text[0].weight.zero_()
                    self.text[0].bias.fill_(65000.0)

    def on_train_batch_end(self, *_: Any) -> None:
        # After a replay, DDP must still broadcast buffers in the next forward.
        assert self.trainer.strategy.model.require_forward_param_sync


def _train_towers(rank: int, plugin: bool) -> Any:
    locator = NonFiniteLocator(max_replays=1)
    trainer = clip.make_trainer(
        InfCLStrategy(towers=["visual", "text"], micro_batch_size=4),
        devices=2,
        max_epochs=1,
        callbacks=[locator],
        plugins=[BalancedAMP()] if plugin else [],
    )
    rows: list[int] = []
    model = _Spoiled()
    model.text.register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    trainer.fit(model, clip.loader(48, 12))
    return locator.alarms, rows


@pytest.mark.parametrize("plugin", [False, True])
def test_locator_replays_towers_in_micro_batches(plugin: bool) -> None:
    (alarms, rows), (others, _) = run_ranks(_train_towers, 2, plugin)
    assert alarms == others
    (alarm,) = alarms
    # Sums of 3e38 overflow at once; in fp16, 65000 overflows in the dropout after layer and GELU.
    assert (alarm.step, alarm.tensor) == (1, "text.2" if plugin else "text.0")
    assert set(rows[2:]) == {4}  # two calls determine output shapes for two and three rows
