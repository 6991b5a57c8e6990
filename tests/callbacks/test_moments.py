"""Moments equal float64 references for any split of the values; histograms count all values."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from lightning_mp.callbacks._rules import moments
from lightning_mp.callbacks._rules.moments import (
    EXPONENTS,
    Reduction,
    merge_moments,
    reduced,
    tensor_moments,
)

EPS = np.finfo(np.float64).eps
REDUCTIONS = get_args(Reduction)


def _reference(x: np.ndarray) -> dict[str, float]:
    x = x.astype(np.longdouble)
    apart = x - x.mean()
    return {
        "norm": float(np.sqrt((x**2).sum())),
        "rms": float(np.sqrt((x**2).mean())),
        "mean": float(x.mean()),
        "std": float(np.sqrt((apart**2).mean())),
        "absmax": float(np.abs(x).max()),
        "kurtosis": float((apart**4).mean() / (apart**2).mean() ** 2),
    }


@pytest.mark.parametrize(
    ("mean", "size"),
    [(0.0, 1.0), (0.0, 1e-12), (1.0, 1e-2), (3e4, 1e3)],
    ids=["normal", "tiny", "norm-weights", "large"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_moments_equal_a_reference(mean: float, size: float, dtype: torch.dtype) -> None:
    x = (mean + size * torch.randn(1000, 201, generator=torch.Generator().manual_seed(1))).to(dtype)
    rows = tensor_moments(x)[None]
    found = {k: v[0] for k, v in reduced(rows, REDUCTIONS[:-1]).items()}
    if dtype == torch.float16 and size < 1e-8:  # all underflow: no spread, no kurtosis
        assert found["norm"] == 0
        assert math.isnan(found["kurtosis"])
        return
    expected = _reference(x.double().numpy().ravel())
    # Rounding of a sum of n terms in one direction; x - mean loses a factor of `canceled`.
    canceled = 1 + abs(expected["mean"]) / expected["std"]
    bound = x.numel() * EPS * canceled**2
    for name, value in expected.items():
        slack = expected["std"] if name == "mean" else abs(value)
        assert abs(found[name] - value) <= bound * slack, name


def test_moments_do_not_depend_on_how_values_are_split() -> None:
    x = torch.randn(3 * moments._BLOCK["cpu"] + 17, dtype=torch.float64) ** 3 + 5
    whole = tensor_moments(x, histogram=True)
    parts = [tensor_moments(part, histogram=True) for part in x.split(99_991)]
    parts.append(tensor_moments(x[:0], histogram=True))  # a rank without values
    merged = merge_moments(torch.stack(parts))
    torch.testing.assert_close(merged, whole, rtol=x.numel() * EPS, atol=0)
    assert merged[0] == x.numel()
    table = merge_moments(torch.stack(parts)[:, None, :])[0]  # shape for several tensors
    assert torch.equal(table, merged)


def test_moments_exclude_and_count_non_finite_values() -> None:
    x = torch.tensor([1.0, math.nan, -3.0, math.inf, -math.inf, 2.0])
    row = tensor_moments(x, histogram=True)
    assert row[0] == 3
    assert row[6] == 3
    assert row[7:].sum() == 3
    found = reduced(row[None], REDUCTIONS)
    assert found["absmax"] == 3
    assert found["mean"] == 0
    assert found["norm"] == pytest.approx(math.sqrt(14), rel=4 * EPS)


def test_moments_of_an_empty_tensor_are_nan() -> None:
    row = tensor_moments(torch.zeros(0), histogram=True)
    found = reduced(row[None], REDUCTIONS)
    assert all(np.isnan(found[name]).all() for name in REDUCTIONS[:-1])
    assert found["histogram"].sum() == 0


def test_histogram_counts_every_value_by_its_power_of_two() -> None:
    tiny = 2.0**-149
    x = [0.0, -0.0, 1.0, -1.0, 1.999, 2.0, tiny, 1.5 * 2**-24, 3.4e38, 65504.0]
    row = tensor_moments(torch.tensor(x), histogram=True)
    expected = dict.fromkeys(EXPONENTS.tolist(), 0)
    expected[-math.inf] = 2
    for value in x[2:]:
        expected[math.floor(math.log2(abs(value)))] += 1
    assert dict(zip(EXPONENTS.tolist(), row[7:].tolist(), strict=True)) == expected
    wide = torch.tensor([1e-300, 1e300], dtype=torch.float64)  # outside the range of fp32
    counts = tensor_moments(wide, histogram=True)[7:]
    assert (counts[0], counts[-1]) == (1, 1)


def test_moments_unscale_gradients_first() -> None:
    gradient = torch.randn(100) * 2**16
    found = tensor_moments(gradient, unscale=torch.tensor(2.0**-16), histogram=True)
    torch.testing.assert_close(
        found, tensor_moments(gradient * 2.0**-16, histogram=True), rtol=0, atol=0
    )


def test_moments_of_a_sparse_gradient_use_its_values() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    sparse = torch.sparse_coo_tensor([[1, 4]], values, (100, 2), check_invariants=True)
    assert torch.equal(tensor_moments(sparse), tensor_moments(torch.arange(1.0, 5.0)))
