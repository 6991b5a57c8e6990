"""Shares, means and headroom on the host against float64."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mp.numerics.tensor_stats import StatField, TensorStats, stored_numels, tensor_stats
from tests.reference.tensor_stats import planted


def _view(tensors: dict[str, torch.Tensor], **scales: float) -> TensorStats:
    numels = stored_numels(tensors.values())
    return TensorStats(list(tensors), numels, tensor_stats([*tensors.values()], **scales).numpy())


def test_view_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}": planted((i, 201), torch.float32, generator) for i in range(1, 9)}
    view = _view(tensors, scale=64.0)
    for name, tensor in tensors.items():
        finite = tensor.double()[tensor.isfinite()]
        magnitudes = finite.abs()
        nonzero = magnitudes[magnitudes > 0]
        n = tensor.numel()
        assert view.amax[name] == magnitudes.max()
        assert view.non_finite[name] == n - len(finite) > 0
        assert view.zero_share[name] == (magnitudes == 0).sum().item() / n > 0
        assert view.subnormal_share[name] == (nonzero * 64 < 2**-14).sum().item() / n > 0
    assert view.column(StatField.AMAX).tolist() == list(view.amax.values())


def test_headroom_is_the_number_of_doublings_before_overflow() -> None:
    tensors = {
        "one": torch.tensor([1.0, -0.5]),
        "over": torch.tensor([2.0**17]),
        "no": torch.zeros(2),
    }
    view = _view(tensors)
    headroom = view.headroom_bits()
    assert math.isclose(headroom["one"], math.log2(65504))
    assert math.isclose(headroom["over"], math.log2(65504) - 17)
    assert headroom["no"] == math.inf
    assert math.isclose(view.headroom_bits(scale=2.0**10)["one"], math.log2(65504) - 10)


def test_tensors_without_values_have_shares_of_zero() -> None:
    view = _view({"empty": torch.zeros(0), "nan": torch.full((4,), math.nan)})
    assert view.zero_share == {"empty": 0.0, "nan": 0.0}
    assert view.non_finite == {"empty": 0, "nan": 4}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"names": ("a",)}, "1 names, 2 sizes and statistics of shape [2, 5]"),
        ({"numels": (1, 2, 3)}, "2 names, 3 sizes"),
        ({"stats_NK": np.zeros((2, 7))}, "shape [2, 7]. Each tensor"),
        ({"names": ("a", "a")}, "the name 'a' twice"),
    ],
)
def test_inconsistent_lengths_raise(changed: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {"names": ("a", "b"), "numels": (1, 2), "stats_NK": np.zeros((2, 5))}
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorStats(**{**parts, **changed})
