"""Training with the strategy against training without it, on one rank and on two."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp.strategies import InfCLStrategy
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.reference.contrastive import relative_error
from tests.strategies.models import TinyCLIP, loader, make_trainer

STEPS, MANY_STEPS = 5, 20
SHARES = {1: [24], 2: [13, 11]}
ROWS = 5  # does not divide the batch of 12 or 13


def _fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))


# Several ranks: cases with reductions or joint decisions. One rank: all other cases.
ON_RANKS = ("automatic", "accumulated", "fp16 with scaler, clipped", "unused parameters", "host")
ALONE = ("manual", "clipped by value", "bf16", "float64", "bucket views")
CASES: dict[str, dict[str, Any]] = {
    "automatic": {},
    "manual": {"model": {"automatic": False}},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "clipped by norm": {"trainer": {"gradient_clip_val": 0.05}},
    "clipped by value": {
        "trainer": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    },
    "bf16": {"plugins": lambda: [MixedPrecision("bf16-mixed", "cpu")]},
    "fp16 with scaler": {"plugins": lambda: [_fp16()]},
    "fp16 with scaler, clipped": {
        "plugins": lambda: [_fp16()],
        "trainer": {"gradient_clip_val": 0.05},
    },
    "float64": {"trainer": {"precision": "64-true"}},
    "unused parameters": {"strategy": {"find_unused_parameters": True}},
    "bucket views": {"strategy": {"gradient_as_bucket_view": True}},
    "host": {"inf_cl": {"offload": "host"}},
}


def _train(case: dict[str, Any], steps: int, with_strategy: bool) -> tuple[Tensor, list[float]]:
    kwargs = case.get("strategy", {})
    if with_strategy:
        model = TinyCLIP(**case.get("model", {}))
        strategy = InfCLStrategy(micro_batch_size=ROWS, **kwargs, **case.get("inf_cl", {}))
    else:
        model = TinyCLIP(rows=ROWS, **case.get("model", {}))
        strategy = DDPStrategy(**kwargs)
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = make_trainer(
        strategy,
        max_steps=steps,
        devices=world_size,
        plugins=case.get("plugins", list)(),
        **case.get("trainer", {}),
    )
    torch.manual_seed(7 + trainer.global_rank)
    trainer.fit(model, loader(count=12 * world_size * 4, batch_size=12))
    return parameters_of(model), model.losses


def _compare(rank: int, names: Sequence[str], steps: int) -> dict[str, tuple[float, float, float]]:
    results = {}
    for name in names:
        case = CASES[name]
        start = parameters_of(TinyCLIP())
        expected, expected_losses = _train(case, steps, with_strategy=False)
        value, losses = _train(case, steps, with_strategy=True)
        loss_error = (torch.tensor(losses) - torch.tensor(expected_losses)).abs().max().item()
        moved = relative_error(expected, start)
        results[name] = (relative_error(value, expected), loss_error, moved)
    return results


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "names", "steps"),
    [
        (1, ALONE, STEPS),
        (2, ON_RANKS, STEPS),
        *(pytest.param(n, tuple(CASES), MANY_STEPS, marks=pytest.mark.sweep) for n in SHARES),
    ],
    ids=["1", "2", "1-all", "2-all"],
)
def test_inf_cl_trains_the_same_weights_as_plain_training(
    world_size: int, names: Sequence[str], steps: int
) -> None:
    for rank, results in enumerate(run_ranks(_compare, world_size, names, steps)):
        assert set(results) == set(names)
        for name, (error, loss_error, moved) in results.items():
            assert error < 1e-5, f"{name}, rank {rank}: weights differ by {error:.1e}"
            assert loss_error < 1e-4, f"{name}, rank {rank}: losses differ by {loss_error:.1e}"
            assert moved > 1e-3, f"{name}, rank {rank}: the weights did not move"


def _train_a_share(rank: int, sizes: list[int]) -> Tensor:
    """Train on this rank's rows of every global batch."""
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    batches = [[part[rows] for part in batch] for batch in loader(count=24 * 5, batch_size=24)]
    model = TinyCLIP(dropout=0.0)
    trainer = make_trainer(
        InfCLStrategy(micro_batch_size=ROWS),
        devices=len(sizes),
        max_steps=STEPS,
        use_distributed_sampler=False,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return parameters_of(model)


@pytest.mark.distributed
def test_inf_cl_unequal_rank_batches_train_like_the_global_batch() -> None:
    model = TinyCLIP(dropout=0.0)
    start = parameters_of(model)
    batches = list(loader(count=24 * 5, batch_size=24))
    make_trainer("auto", max_steps=STEPS).fit(model, DataLoader(batches, batch_size=None))
    expected = parameters_of(model)
    assert relative_error(expected, start) > 1e-3
    for world_size, sizes in SHARES.items():
        for weights in run_ranks(_train_a_share, world_size, sizes):
            assert relative_error(weights, expected) < 1e-5
