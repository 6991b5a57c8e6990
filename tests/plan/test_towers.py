"""The peak of a tower's forward and backward equals the allocations of a step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.plan.subject import PRECISIONS, TowerBytes
from lightning_mp.plan.tower_bytes import measure_towers
from papers.allocation import peak_allocated

ROWS, WIDTH = 512, 64


class _Tower(nn.Module):
    """Blocks of an MLP, whose activations `run` keeps or recomputes."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        hidden = (
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        )
        self.blocks, self.run = nn.ModuleList(hidden), run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.run(block, x)
        return x


class _Model(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.tower, self.alias = _Tower(run), None

    def step(self, pairs: int, calls: int = 1) -> list[Tensor]:
        return [self.tower(torch.empty(pairs, WIDTH)) for _ in range(calls)]


def _plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def _planned(model: _Model, calls: int = 1) -> TowerBytes:
    with FakeTensorMode(allow_non_fake_inputs=True):
        towers = [find_tower(model, "tower")]
        step: Callable[[int], object] = lambda pairs: model.step(pairs, calls)  # noqa: E731
        return measure_towers(model, towers, step, PRECISIONS["32-true"])["tower"]


@pytest.mark.parametrize("run", [_plainly, _recomputed])
def test_peak_of_a_row_equals_the_allocations(run: Callable[..., Tensor]) -> None:
    model = _Model(run)
    inputs = torch.randn(ROWS, WIDTH)

    def step() -> None:
        features = model.tower(inputs)
        features.backward(torch.ones_like(features))

    planned = _planned(model).peak_per_row
    # All rows at once, where gradients of weights take at most a copy of the weights.
    weights = sum(p.nbytes for p in model.parameters())
    assert planned * ROWS <= peak_allocated(step) <= planned * ROWS + weights


def test_recomputed_activations_of_one_block_are_counted() -> None:
    plain, recomputed = _planned(_Model(_plainly)), _planned(_Model(_recomputed))
    # A checkpoint keeps the input of a block; the backward recomputes one block at a time.
    one_block = 2 * 4 * WIDTH * 4
    assert recomputed.saved_per_pair + one_block <= recomputed.peak_per_row
    assert recomputed.peak_per_row < plain.peak_per_row / 2


def test_second_call_of_a_tower_adds_to_the_pair_and_not_to_the_row() -> None:
    once, twice = (_planned(_Model(_plainly), calls) for calls in (1, 2))
    assert twice.peak_per_row == once.peak_per_row
    assert twice.saved_per_pair == 2 * once.saved_per_pair
    assert twice.flops_per_pair == 2 * once.flops_per_pair
    # The gradients of the first call are kept while the second is replayed.
    assert twice.parameters == 2 * once.parameters


def test_ids_that_a_tower_returns_are_no_features() -> None:
    class WithIds(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.argmax(1, keepdim=True), super().forward(x)

    model = nn.ModuleDict({"tower": WithIds(WIDTH, 8)})
    towers = [find_tower(model, "tower")]
    step = lambda pairs: model["tower"](torch.empty(pairs, WIDTH))  # noqa: E731
    found = measure_towers(model, towers, step, PRECISIONS["32-true"])["tower"]
    assert (found.width, found.parameters) == (8, 8 * WIDTH + 8)


def test_tokens_that_a_tower_returns_are_counted() -> None:
    tower = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU())
    model = nn.ModuleDict({"tower": tower})

    def step(pairs: int) -> None:
        model["tower"](torch.empty(pairs, 5, WIDTH)).mean(1)

    towers = [find_tower(model, "tower")]
    found = measure_towers(model, towers, step, PRECISIONS["32-true"])["tower"]
    assert (found.width, found.tokens_per_pair) == (8, 4 * 8 * 4)


def test_two_names_of_one_tower_count_once() -> None:
    model = _Model(_plainly)
    model.alias = model.tower
    towers = [find_tower(model, name) for name in ("tower", "alias")]
    found = measure_towers(model, towers, model.step, PRECISIONS["32-true"])
    assert [tower.width for tower in found.values()] == [WIDTH]
