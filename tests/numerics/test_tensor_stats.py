"""Counts of NaN and inf against those of float64 Python loops."""

import math

import pytest
import torch
from torch import Tensor

from lightning_mp.numerics.tensor_stats import (
    NonFinite,
    count_non_finite,
    first_non_finite,
    stored_values,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (0,), (7,), (5, 9), (3, 1, 11)]


def _sprinkled(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random values of which about a fifth each are NaN, inf and -inf."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = torch.rand(shape, generator=generator)
    for bound, bad in ((0.6, math.nan), (0.4, math.inf), (0.2, -math.inf)):
        values[kind < bound] = bad
    return values.to(dtype)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_count_non_finite_equals_a_loop_over_values(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [_sprinkled(shape, dtype, generator) for shape in SHAPES for dtype in DTYPES]
    counts = count_non_finite(tensors)
    assert counts.dtype == torch.int64
    expected = [
        [sum(map(math.isnan, values)), sum(map(math.isinf, values))]
        for values in (tensor.double().flatten().tolist() for tensor in tensors)
    ]
    assert counts.tolist() == expected
    assert counts.sum(0).min() > 50  # both kinds occur, so swapped columns would fail


def test_count_non_finite_of_large_finite_values_is_zero() -> None:
    """The L2 norm of these is inf, so a norm cannot tell."""
    large = torch.full((4,), 3e38)
    assert torch.linalg.vector_norm(large).isinf()
    assert count_non_finite([large, torch.tensor([65504.0]).half()]).tolist() == [[0, 0], [0, 0]]


def test_count_non_finite_without_tensors_has_no_rows() -> None:
    counts = count_non_finite([])
    assert counts.shape == (0, 2)
    assert counts.dtype == torch.int64


def _sparse(values: list[float]) -> Tensor:
    """A sparse vector of 10 with all values at the same index, not coalesced."""
    return torch.sparse_coo_tensor([[4] * len(values)], values, (10,), check_invariants=True)


def test_count_non_finite_of_a_sparse_tensor_reads_its_stored_values() -> None:
    sparse = _sparse([1.0, math.nan, math.inf, -math.inf])
    assert count_non_finite([torch.zeros(3), sparse]).tolist() == [[0, 0], [1, 2]]
    assert first_non_finite([("rows", sparse)]) == NonFinite("rows", (10,), 4, 1, 2)


def test_stored_values_share_memory() -> None:
    sparse, dense = _sparse([1.0, 2.0]), torch.ones(3)
    stored_values(sparse).mul_(2)
    stored_values(dense).mul_(2)
    assert sparse.to_dense()[4] == 6
    assert dense.tolist() == [2, 2, 2]


def test_first_non_finite_is_the_first_in_the_order_given() -> None:
    generator = torch.Generator().manual_seed(3)
    finite = [(f"layer.{i}", torch.randn(4, generator=generator)) for i in range(3)]
    late = ("head.bias", torch.tensor([math.nan]))
    bad = ("head.weight", torch.tensor([[1.0, math.inf, math.nan], [-math.inf, 0.0, math.inf]]))
    found = first_non_finite(iter([*finite, bad, late]))
    assert found == NonFinite("head.weight", (2, 3), values=6, nan=1, inf=3)
    assert str(found) == "`head.weight` of shape [2, 3] (1 NaN and 3 inf among 6 values)"


@pytest.mark.parametrize(("bad", "counts"), [(math.nan, (1, 0)), (-math.inf, (0, 1))])
def test_first_non_finite_finds_nan_and_inf(bad: float, counts: tuple[int, int]) -> None:
    found = first_non_finite([("good", torch.ones(2)), ("bad", torch.tensor([0.0, bad]))])
    assert found == NonFinite("bad", (2,), 2, *counts)


def test_first_non_finite_of_finite_tensors_is_none() -> None:
    assert first_non_finite([]) is None
    assert first_non_finite([("empty", torch.zeros(0)), ("one", torch.ones(2).half())]) is None


@pytest.mark.gpu
def test_count_non_finite_on_a_gpu_does_not_wait_for_it() -> None:
    tensors = [torch.tensor([math.nan, 1.0], device="cuda"), torch.ones(3, device="cuda").half()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts = count_non_finite(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts.is_cuda
    assert counts.tolist() == [[1, 0], [0, 0]]
