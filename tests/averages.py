"""Lightning's averages of weights, which it has from 2.6 on."""

from typing import Any

import pytest


def weight_averaging() -> Any:
    """Return the module of `WeightAveraging`; skip the test where there is none."""
    return pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
