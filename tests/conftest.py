"""Keeps apart what cannot run together, and skips what the machine cannot run."""

import os

import pytest
import torch

# Triton decides when a kernel is defined whether it is interpreted or compiled, so one process can
# do only one of both.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other kind of process; skip `gpu` tests without a CUDA device."""
    ours = [item for item in items if _is_interpreted(item) == INTERPRETED]
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _is_interpreted(item: pytest.Item) -> bool:
    return item.get_closest_marker("interpreted") is not None
