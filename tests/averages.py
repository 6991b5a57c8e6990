"""Lightning's weight averaging, which exists from version 2.6 on."""

from typing import Any

import pytest


def weight_averaging() -> Any:
    """Return the module of `WeightAveraging`; skip the test if it does not exist."""
    return pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
