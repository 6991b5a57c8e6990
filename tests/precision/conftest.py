"""Fixtures for tests of half copies."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp.precision._weights import working_copies
from lightning_mp.precision._weights.working_copies import WorkingCopies


@pytest.fixture
def attached() -> Iterator[Any]:
    """Return a function that attaches half copies to a module until the test ends."""
    made: list[WorkingCopies] = []

    def attach(module: nn.Module, half: torch.dtype = torch.float16, **kwargs: Any) -> Any:
        made.append(WorkingCopies(half))
        made[-1].attach(module, **kwargs)
        return made[-1]

    yield attach
    for working in made:
        working.release()


@pytest.fixture(autouse=True)
def _small_layers_have_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small layers half copies too, as large layers have."""
    monkeypatch.setattr(working_copies, "_SMALL", 0)
