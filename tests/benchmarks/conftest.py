"""Restores the number of threads, which benchmarks set."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _number_of_threads_survives() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
