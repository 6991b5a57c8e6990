"""Gradient averages over ranks: `None`, sparse gradients, buckets, communication hooks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_mp.strategies._inf_cl.averaging import GradientAverage, sparse_weights
from tests.processes import run_ranks

pytestmark = pytest.mark.distributed

RANKS = 3
# Ranks with a gradient; the gradient of all other ranks is `None`.
HAVE = {
    "first.weight": {0, 1, 2},
    "first.bias": {1},
    "half.weight": {0, 1, 2},
    "table.weight": {0, 1},
}


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 30)
        self.half = nn.Linear(30, 20).bfloat16()  # no rank uses its bias
        self.table = nn.Embedding(9, 4, sparse=True)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def _gradient(name: str, rank: int, shape: torch.Size) -> Tensor:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return value * (torch.arange(9)[:, None] % 3 == rank) if name == "table.weight" else value


def _average(rank: int, bucket_bytes: int, hook: str | None) -> dict[str, Tensor | None]:
    model = Parts()
    for name, parameter in model.named_parameters():
        if name == "frozen" or rank in HAVE.get(name, ()):
            gradient = _gradient(name, rank, parameter.shape).to(parameter.dtype)
            parameter.grad = gradient.to_sparse(1) if name == "table.weight" else gradient
    hooks: dict[str | None, Any] = {
        None: None,
        "fp16": (default_hooks.fp16_compress_hook, None),
        "wrapped": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), None),
        # Full rank, so that only rounding is lost.
        "power": (
            powerSGD_hook.powerSGD_hook,
            powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=30, start_powerSGD_iter=2, min_compression_rate=0.1
            ),
        ),
    }
    average = GradientAverage()
    for _ in range(4 if hook == "power" else 1):
        average.over_ranks(
            dict(model.named_parameters()),
            hook=hooks[hook],
            bucket_bytes=bucket_bytes,
            sparse=sparse_weights(model),
        )
    return {n: None if p.grad is None else p.grad.to_dense() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("bucket_bytes", "hook", "eps"),
    [
        (2**20, None, 2**-22),
        (1, None, 2**-22),
        (2**20, "fp16", 2**-9),
        (1, "wrapped", 2**-6),
        (2**20, "power", 2**-8),
    ],
)
def test_missing_gradients_count_as_zeros_and_stay_none_if_missing_on_all_ranks(
    bucket_bytes: int, hook: str | None, eps: float
) -> None:
    first, *others = run_ranks(_average, RANKS, bucket_bytes, hook)
    for name, parameter in Parts().named_parameters():
        value = first[name]
        if name == "frozen":  # keeps the value of each rank
            assert not torch.equal(value, others[0][name])
            continue
        assert all((value is None) == (other[name] is None) for other in others)
        if name not in HAVE:
            assert value is None
            continue
        assert all(torch.equal(value, other[name]) for other in others), name
        gradients = [_gradient(name, rank, parameter.shape).double() for rank in HAVE[name]]
        expected = sum(gradients) / RANKS
        bound = max(eps, 2**-6 if parameter.dtype == torch.bfloat16 else 0.0)
        assert (value.double() - expected).norm() < bound * expected.norm(), name


def _freeze_on_one_rank(rank: int) -> list[str]:
    model, average, said = Parts(), GradientAverage(), []
    for step in range(3):
        model.first.requires_grad_(step != 1 or rank != 1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        try:
            average.over_ranks(dict(model.named_parameters()))
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append("averaged")
    return said


def test_parameter_frozen_on_some_ranks_raises_on_all_ranks() -> None:
    for said in run_ranks(_freeze_on_one_rank, 2):
        assert [each[:8] for each in said] == ["averaged", "The para", "averaged"]
        assert "'first.weight' is trained on some ranks and frozen on others" in said[1]
