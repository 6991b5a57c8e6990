"""`InfCLModelParallelStrategy` with half precision and checkpoints, and its errors."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_mp import (
    BalancedAMP,
    InfCLModelParallelStrategy,
    LossScaleConfig,
    ModelParallelBalancedAMP,
)
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.reference.contrastive import relative_error
from tests.strategies.models import TinyCLIP, make_trainer
from tests.strategies.test_inf_cl_model_parallel import RANKS, ROWS, STEPS, Model, batches

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCALE = LossScaleConfig(init_scale=2.0**8, growth_interval=3)


class Wide(Model):
    """Trains with AdamW and half-precision all-gathers of the plugin."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW(self.parameters(), lr=1e-2)


class Leading(Model):
    """Calls a tower with an input that requires grad."""

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        image, text = batch
        return super().features([image * self.log_scale, text])


def fit(rank: int, model: Model, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Any:
    strategy = kwargs.pop("strategy", {})
    rows = kwargs.pop("rows", slice(12 * rank, 12 * rank + 12))
    trainer = make_trainer(
        InfCLModelParallelStrategy(**{"micro_batch_size": ROWS, **strategy}),
        devices=RANKS,
        use_distributed_sampler=False,
        **{"max_epochs": 1, **{k: v for k, v in kwargs.items() if k != "path"}},
    )
    trainer.fit(model, batches(rows, dtype), ckpt_path=kwargs.get("path"))
    return trainer


class Recomputing(Model):
    """Recomputes the layers of its towers in the backward (activation checkpointing)."""

    def __init__(self) -> None:
        super().__init__()
        for tower in (self.visual, self.text):
            tower.forward = functools.partial(checkpoint, tower.forward, use_reentrant=False)


def _train_in_half(rank: int, half: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    ends = []
    for model in (Model(), Recomputing()):
        plugin = ModelParallelBalancedAMP(half=half, loss_scale=SCALE if half == "fp16" else None)
        fit(rank, model, torch.float32, plugins=plugin, gradient_clip_val=0.05)
        ends.append(model.end)
    return *ends, plugin.state_dict()


def _resume(rank: int, folder: str, distributed: bool) -> tuple[Any, ...]:
    whole, first, rest = Wide(), Wide(), Wide()
    fit(rank, whole, max_epochs=2)
    strategy = {"micro_batch_size": "auto", "activation_bytes": 2**12}
    strategy["save_distributed_checkpoint"] = distributed
    trainer = fit(rank, first, strategy=strategy)
    trainer.save_checkpoint(f"{folder}/checkpoint")
    other = fit(rank, rest, strategy=strategy, max_epochs=2, path=f"{folder}/checkpoint").strategy
    sizes = trainer.strategy._cache.micro_batch_sizes, other._cache.micro_batch_sizes
    return whole.end, first.end, rest.end, sizes


@pytest.mark.parametrize(
    ("half", "bound"), [("fp16", 2**-9), pytest.param("bf16", 2**-7, marks=pytest.mark.sweep)]
)
def test_half_precision_and_clipping_train_like_fp32(half: str, bound: float) -> None:
    model = TinyCLIP(dropout=0.0)
    make_trainer("auto", max_epochs=1, gradient_clip_val=0.05).fit(
        model, batches(dtype=torch.float32)
    )
    end, recomputed, state = run_ranks(_train_in_half, RANKS, half)[0]
    assert torch.equal(recomputed, end)
    start = parameters_of(TinyCLIP(dropout=0.0))
    assert relative_error(end - start, parameters_of(model) - start) < bound
    if half == "fp16":
        assert state["scale"] == 2.0 ** (8 + STEPS // 3)


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_run_resumes_from_its_checkpoint(tmp_path: Path, distributed: bool) -> None:
    results = run_ranks(_resume, RANKS, str(tmp_path), distributed)
    whole, first, rest, (found, kept) = results[0]
    assert relative_error(first, whole) > 1e-3
    # Equal float64 sums except for the split of rows.
    assert relative_error(rest, whole) < 1e-12
    assert found == kept
    assert set(found) == {"visual", "text"}


class Thawing(Model):
    """Trains its scale, which is not sharded, from the second step on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.log_scale.requires_grad_(False).add_(self.global_rank)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log_scale.requires_grad_(batch_idx > 0)


def _thaw(rank: int) -> list[float]:
    model = Thawing()
    start = float(model.log_scale)
    fit(rank, model)
    return [start, float(model.log_scale)]


def test_parameter_that_is_not_sharded_and_unfrozen_later_stays_equal_on_all_ranks() -> None:
    (start, first), (_, second) = run_ranks(_thaw, RANKS)
    assert first == second != start


class TrainsOne(Model):
    """Trains the text tower and the head in the first of two accumulated batches only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, text = self.visual(batch[0]), self.text(batch[1])
        if batch_idx % 2 == 0:
            return self.loss(self.head(image), text, self.log_scale.exp())
        return self.loss(image, text.detach(), self.log_scale.exp())


class TwoOutputs(nn.Module):
    def __init__(self, visual: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.visual, self.text = visual, text

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.visual(x), self.text(x)


class UsesOne(Model):
    """Each call of a tower with two sharded modules uses the output of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.both = TwoOutputs(self.visual, self.text)

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        image, text = batch
        return self.head(self.both(image)[0]), self.both(text)[1]


class Overlapping(Model):
    """One tower is a method that calls the other; the sharded head is outside of both."""

    def encode(self, x: Tensor) -> Tensor:
        return self.visual(x) * 2

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        image, text = batch
        return self.head(self.visual(image)), self.encode(text)


PARTIAL: dict[str, tuple[Callable[[], Model], list[str], int]] = {
    "one tower of two": (TrainsOne, ["visual", "text"], 2),
    "one output of two": (UsesOne, ["both"], 1),
    "one tower in another": (Overlapping, ["encode", "visual"], 1),
}


def _train_parts(rank: int) -> dict[str, Tensor]:
    ends = {}
    for name, (kind, towers, batches_per_step) in PARTIAL.items():
        model = kind()
        fit(rank, model, strategy={"towers": towers}, accumulate_grad_batches=batches_per_step)
        ends[name] = model.end
    return ends


def test_modules_that_the_last_replay_does_not_reach_train_like_in_one_process() -> None:
    ends = run_ranks(_train_parts, RANKS)[0]
    for name, (kind, _, batches_per_step) in PARTIAL.items():
        model = kind()
        trainer = make_trainer("auto", max_epochs=1, accumulate_grad_batches=batches_per_step)
        trainer.fit(model, batches())
        assert relative_error(ends[name], parameters_of(model)) < 1e-12, name


class Dropping(nn.Sequential):
    """Skips a layer in the fifth call: the third micro-batch after two calls of the shape check."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self[1:] if self.calls % 5 == 0 else self:
            x = layer(x)
        return x


class Uneven(Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        layers = [nn.Linear(12, 12) for _ in range(2)]
        self.visual = Dropping(*layers, nn.Linear(12, 24)).double()


REFUSED: dict[str, tuple[type, dict[str, Any], str]] = {
    "plugin": (Model, {"plugins": BalancedAMP()}, r"Pass `ModelParallelBalancedAMP\(\)`"),
    "head": (Model, {"layout": "plain head", "gradient_clip_val": 1.0}, "'head.weight' is not"),
    "input": (Leading, {}, r"visual` with `input`, which requires grad"),
    "layers": (Uneven, {}, "`visual` trains parameters in some micro-batches"),
    "rows": (Model, {"rows": [slice(0, 2), slice(2, 24)]}, "2 rows .* 5 micro-batches"),
}


def _refuse(rank: int) -> dict[str, str]:
    messages = {}
    for name, (kind, settings, _) in REFUSED.items():
        settings = dict(settings)
        if "rows" in settings:
            settings["rows"] = settings["rows"][rank]
        model = kind(layout=settings.pop("layout", "towers"))
        try:
            fit(rank, model, **settings)
        except (MisconfigurationException, RuntimeError, ValueError) as error:
            messages[name] = str(error)
    return messages


def test_unsupported_set_ups_raise_on_all_ranks() -> None:
    for messages in run_ranks(_refuse, RANKS):
        assert set(messages) == set(REFUSED)
        for name, (_, _, said) in REFUSED.items():
            assert re.search(said, messages[name]), messages[name]


class Unsharded(TinyCLIP):
    def configure_model(self) -> None:
        pass


def _leave_whole(rank: int) -> str:
    trainer = make_trainer(InfCLModelParallelStrategy(), devices=1)
    with pytest.raises(MisconfigurationException, match="no module is sharded") as caught:
        trainer.fit(Unsharded(), DataLoader([]))
    return str(caught.value)


def test_model_without_sharded_modules_raises() -> None:
    assert "`InfCLStrategy`, which is DDP" in run_ranks(_leave_whole, 1)[0]


def test_mesh_sizes_raise() -> None:
    with pytest.raises(ValueError, match="must be 'auto', as all ranks share the batch"):
        InfCLModelParallelStrategy(tensor_parallel_size=2)
