"""What tests of working copies share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp.precision._weights import working_copies
from lightning_mp.precision._weights.working_copies import WorkingCopies


@pytest.fixture
def attached() -> Iterator[Any]:
    """Return a function that lets a module compute with copies, until the test ends."""
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
    """Let the small models of these tests compute as large ones do, with a copy of each weight."""
    monkeypatch.setattr(working_copies, "_SMALL", 0)
