"""The preflight measures errors of half precision and leaves the training unchanged."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_mp import PrecisionPreflight
from tests.preflight.models import Sentences, trainer
from tests.preflight.runs import NAMES, checkpointed, make_words, run_preflight
from tests.processes import run_ranks
from tests.quiet import QUIET, parameters_of


@pytest.mark.parametrize("name", [*NAMES, "BalancedAMP bf16"])
def test_healthy_model_is_clean(name: str) -> None:
    callback = run_preflight(make_words(), name)
    assert callback.result is not None
    assert callback.result.is_clean
    assert callback.settings == ""
    assert "is safe for this model" in callback.text


def test_errors_are_within_ulps_of_the_dtype() -> None:
    """An ULP of a number in [1, 2) is 2^-10 in fp16 and 2^-7 in bf16."""
    fp16, bf16 = (
        run_preflight(make_words(), f"BalancedAMP {half}").result for half in ("fp16", "bf16")
    )
    assert fp16 is not None
    assert bf16 is not None
    by_path = {each.path: each for each in bf16.modules}
    for each in fp16.modules:
        if each.kind == "Linear":
            assert 2.0**-14 < each.output < 2.0**-10
            assert 4 < by_path[each.path].output / each.output < 16
            assert each.handed >= each.output / 2


def test_second_run_is_compared_too() -> None:
    callback, results = PrecisionPreflight(steps=1), []
    for weak in ("cancellation", None):
        trainer("BalancedAMP bf16", callback, max_steps=1).fit(make_words(weak), Sentences())
        results.append(callback.result)
    assert [result is not None and result.is_clean for result in results] == [False, True]


def test_resumed_run_that_compares_nothing_stops_as_wanted(tmp_path: Path) -> None:
    first = trainer("BalancedAMP bf16", [], max_steps=1)
    first.fit(make_words(), Sentences())
    first.save_checkpoint(tmp_path / "last.ckpt")
    run = trainer("BalancedAMP bf16", PrecisionPreflight(stops=True), max_steps=4)
    run.fit(make_words(), Sentences(), ckpt_path=tmp_path / "last.ckpt")
    assert run.global_step == 1


def test_sparse_gradients_are_compared() -> None:
    model = make_words()
    model.embed.sparse = True
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=1e-3)  # type: ignore[method-assign]
    callback = run_preflight(model, "BalancedAMP bf16")
    assert "is safe for this model" in callback.text
    assert callback.result is not None
    assert "embed" in [each.path for each in callback.result.modules]


class Stream(IterableDataset[Any]):
    """The sentences, whose number is unknown."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Sentences().train_dataloader())


@pytest.mark.parametrize("steps", [2, 20])
def test_data_of_unknown_length_are_compared_until_they_end(steps: int) -> None:
    callback = PrecisionPreflight(steps=steps, stops=True)
    run = trainer("BalancedAMP bf16", callback, max_steps=-1, max_epochs=1)
    run.fit(make_words(), DataLoader(Stream(), batch_size=None))
    assert "is safe for this model" in callback.text


class Gain(pl.LightningModule):
    """A network times one number, whose gradients of both halves of the batch are nearly equal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.net = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
        x, y = torch.randn(64, 32), 0.1 * torch.randn(64)
        with torch.no_grad():
            output = self.net(x)[:, 0]
        gradients, halves = (output - y) * output, ([], [])  # type: ignore[var-annotated]
        for row in gradients.abs().argsort(descending=True).tolist():
            open_halves = [half for half in halves if len(half) < 32]
            sign = 1 if gradients[row] > 0 else -1
            min(open_halves, key=lambda h: sign * float(gradients[h].sum())).append(row)
        first, second = (float(gradients[half].sum()) for half in halves)
        assert abs(first - second) < 2.0**-8 * abs(first)  # below the rounding of bf16
        rows = halves[0] + halves[1]
        self.batches = [(x[rows], y[rows])]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.gain * self.net(batch[0]).float()[:, 0], batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def test_single_number_with_equal_gradients_in_both_halves_is_clean() -> None:
    callback = PrecisionPreflight(steps=1, stops=True)
    trainer("BalancedAMP bf16", callback).fit(Gain())
    assert callback.result is not None
    assert callback.result.is_clean, callback.text


class Centered(Gain):
    """Batch statistics make the gradient of the bias of BatchNorm equal in all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().square().mean()


def test_gradient_that_is_equal_in_all_batches_has_no_noise() -> None:
    callback = PrecisionPreflight(steps=1, stops=True)
    trainer("BalancedAMP fp16", callback).fit(Centered())
    assert callback.result is not None
    assert callback.result.is_clean, callback.text


class Records(pl.Callback):
    """Records batches, losses and logged metrics."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, batch: Any, *__: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append((float(outputs["loss"]), batch[0].tolist(), logged))


@pytest.mark.parametrize(
    ("name", "is_checkpointed"), [*((name, False) for name in NAMES), ("BalancedAMP fp16", True)]
)
def test_preflight_changes_no_bit_of_the_training(name: str, is_checkpointed: bool) -> None:
    ends = []
    for callback in ([], [PrecisionPreflight(steps=2)]):
        model, notes = make_words("cancellation"), Records()
        if is_checkpointed:
            checkpointed(model, use_reentrant=True)
        pl.seed_everything(0, verbose=False)
        run = trainer(name, [*callback, notes], max_steps=5)
        run.fit(model, Sentences())
        buffers = [b.double().flatten() for b in model.buffers()]
        state = [
            x.double().flatten()
            for each in run.optimizers[0].state.values()
            for x in each.values()
            if isinstance(x, Tensor)
        ]
        ends.append((torch.cat([parameters_of(model).double(), *buffers, *state]), notes.seen))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def run_true_half(model: pl.LightningModule, optimizers: Any) -> PrecisionPreflight:
    model.configure_optimizers = lambda: optimizers  # type: ignore[method-assign]
    callback = PrecisionPreflight(steps=1)
    pl.seed_everything(0, verbose=False)
    kwargs = {**QUIET, "max_steps": 1, "callbacks": callback}
    pl.Trainer(**kwargs, precision="bf16-true").fit(model, Sentences())
    return callback


def test_stagnant_weights_are_reported() -> None:
    model = make_words()
    callback = run_true_half(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    assert callback.result is not None
    # Most weights are uniform up to 2^-2.5; 1e-6 is below half a ULP of those above 2^-11.
    assert callback.result.stagnant > 0.9
    assert "of the weights are stagnant" in callback.text
    assert yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["class_path"] == "BalancedAMP"


def test_stagnation_is_computed_at_the_learning_rate_after_warm_up() -> None:
    model = make_words()
    # Half a ULP of bf16 is 2^-9 at a weight of 1, the largest, so 0.01 changes every weight.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-6 * (step + 1))
    result = run_true_half(model, ([optimizer], [schedule])).result
    assert optimizer.param_groups[0]["lr"] < 1e-6
    assert result is not None
    assert result.stagnant < 0.2


def test_zero_weights_are_not_stagnant() -> None:
    model = make_words()
    for each in model.parameters():
        each.data.zero_()
    result = run_true_half(model, torch.optim.AdamW(model.parameters(), lr=1e-6)).result
    assert result is not None
    assert result.stagnant == 0


def _run_on_rank(rank: int) -> list[tuple[str, Tensor]]:
    results = []
    for name in ("BalancedAMP fp16", "PureFP16 fp16"):
        callback = PrecisionPreflight(steps=2)
        pl.seed_everything(0, verbose=False)
        model = make_words("cancellation")
        trainer(name, callback, devices=2, strategy="ddp").fit(model, Sentences())
        results.append((callback.settings, parameters_of(model)))
    return results


@pytest.mark.distributed
def test_ranks_agree_on_the_remedy_and_average_gradients_afterwards() -> None:
    for (first, weights), (second, others) in zip(*run_ranks(_run_on_rank, 2), strict=True):
        assert first == second
        assert "blocks.1.weak" in first
        assert torch.equal(weights, others)


def _fail_on_second_rank(rank: int) -> tuple[str | None, Tensor]:
    model, callback = make_words(), PrecisionPreflight(steps=2)
    step, calls = model.training_step, []

    def failing(*args: Any) -> Tensor:
        calls.append(args)
        if rank == 1 and len(calls) == 1:
            raise RuntimeError("out of memory")
        return step(*args)

    model.training_step = failing  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer("BalancedAMP bf16", callback, devices=2, strategy="ddp").fit(model, Sentences())
    return callback.failure, parameters_of(model)


@pytest.mark.distributed
def test_failure_on_one_rank_ends_the_comparison_on_all_ranks() -> None:
    (first, weights), (second, others) = run_ranks(_fail_on_second_rank, 2)
    assert "The step failed on another rank. Training continues." in str(first)
    assert "out of memory" in str(second)
    assert torch.equal(weights, others)
