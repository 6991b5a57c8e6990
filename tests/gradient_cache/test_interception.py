"""Calls of towers are served inside of `serving` only, and models are left as they were."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import GradientCache

BATCH, WIDTH = 6, 4


class Sees(nn.Module):
    """Records the number of rows of each call."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(WIDTH, WIDTH), rows

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.tower = Sees(self.rows)
        self.compiled = Sees(self.rows)
        self.graphs: list[Any] = []
        self.compiled.compile(backend=lambda graph, _: self.graphs.append(graph) or graph)
        self.assigned = self.tower.forward  # an instance attribute

    def method(self, x: Tensor) -> Tensor:
        return self.tower(x)


@pytest.mark.parametrize("name", ["", "towr", "towr.linear", "tower.", "rows.append"])
def test_wrong_names_raise_and_suggest_others(name: str) -> None:
    with (
        pytest.raises(ValueError, match=f"no submodule or method {name!r}.*tower"),
        GradientCache(micro_batch_size=4).serving(Model(), [name]),
    ):
        pass


@pytest.mark.parametrize("name", ["tower", "method", "assigned", "compiled"])
def test_calls_are_served_inside_of_the_context_only(name: str) -> None:
    model, x = Model(), torch.randn(BATCH, WIDTH)
    before = [dict(vars(module)) for module in model.modules()]
    with GradientCache(micro_batch_size=4).serving(model, [name]):
        getattr(model, name)(x)
    assert model.rows == [4, 2]
    assert bool(model.graphs) == (name == "compiled")
    assert [dict(vars(module)) for module in model.modules()] == before
    getattr(model, name)(x)
    assert model.rows == [4, 2, 6]
