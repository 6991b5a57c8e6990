"""The Triton path of `tensor_stats` in Triton's interpreter, against float64."""

import math
import re

import pytest
import torch
from torch import Tensor

from lightning_mp.numerics import tensor_stats as tensor_stats_module
from lightning_mp.numerics.row_stats import row_stats
from lightning_mp.numerics.stats_kernels import (
    BLOCK,
    CHUNK,
    COLUMNS,
    fused_stats,
    merge_stats_kernel,
)
from lightning_mp.numerics.tensor_stats import StatField, tensor_stats
from tests.reference.tensor_stats import assert_stats_agree, planted

pytestmark = pytest.mark.interpreted

FORMATS = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 0, 37, BLOCK.value, 2 * BLOCK.value + 700)


def _bound(scale: float = 1.0) -> Tensor:
    return torch.tensor(2.0**-14 / scale)


def _tensors(seed: int, *, bad: bool) -> list[Tensor]:
    """Vectors of all formats and lengths, some of them not aligned."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [planted((n,), dtype, generator, bad=bad) for n in LENGTHS for dtype in FORMATS]
    return tensors + [tensor[1:] for tensor in tensors[-3:]]


@pytest.mark.parametrize("bad", [False, True])
def test_stats_equal_the_reference(bad: bool) -> None:
    tensors = _tensors(0, bad=bad)
    assert_stats_agree(fused_stats(tensors, _bound(4.0)), tensors, scale=4.0)


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_of_several_chunks_are_merged(first: int) -> None:
    generator = torch.Generator().manual_seed(1)
    long = planted((CHUNK.value + 1300,), torch.float16, generator)[first:]
    tensors = [torch.ones(5), long, torch.ones(3).half()]
    assert_stats_agree(fused_stats(tensors, _bound()), tensors)


def test_many_chunks_are_merged_into_their_tensors() -> None:
    counts = torch.tensor([300, 0, 1, 129])
    table = torch.zeros(4, len(COLUMNS), dtype=torch.int64)
    table[:, COLUMNS.index("first_chunk")] = counts.cumsum(0) - counts
    table[:, COLUMNS.index("num_chunks")] = counts
    partials = torch.rand(430, len(StatField), dtype=torch.float64)
    stats = torch.full((4, len(StatField)), math.nan, dtype=torch.float64)
    merge_stats_kernel[(4,)](table, partials, stats)
    for row, parts in zip(stats, partials.split(counts.tolist()), strict=True):
        expected = parts.sum(0)
        expected[StatField.AMAX] = parts[:, StatField.AMAX].max() if len(parts) else 0.0
        torch.testing.assert_close(row, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("value", [0.0, 2.0**-30, math.nan])
@pytest.mark.parametrize("first", [0, 1])
def test_counts_do_not_overflow_for_a_chunk_of_equal_values(value: float, first: int) -> None:
    """A thread counts in bytes, which must not run over into the next."""
    tensor = torch.full((CHUNK.value + 1,), value)[first : first + CHUNK.value]
    assert_stats_agree(fused_stats([tensor], _bound()), [tensor])


@pytest.mark.parametrize("size", [3e38, 1e-19, 1e-22, 1e-44])
def test_sums_neither_overflow_nor_underflow(size: float) -> None:
    tensors = [torch.rand(1500).clamp_min(0.3) * size, torch.rand(900).bfloat16() * size]
    assert_stats_agree(fused_stats(tensors, _bound()), tensors)


def test_stats_equal_those_of_the_torch_path() -> None:
    tensors = _tensors(2, bad=True)[-3:]
    fused, rows = fused_stats(tensors, _bound()), row_stats(tensors, _bound(), may_sync=True)
    exact = [field for field in StatField if field < StatField.SUM_OF_SQUARES]
    assert torch.equal(fused[:, exact], rows[:, exact])


@pytest.mark.parametrize("bound", [math.inf, math.nan, 0.0])
def test_bounds_of_extreme_scales_count_as_on_the_torch_path(bound: float) -> None:
    tensors, limit = [torch.tensor([0.0, 1e-30, 3.0, math.nan])], torch.tensor(bound)
    fused, rows = fused_stats(tensors, limit), row_stats(tensors, limit, may_sync=False)
    assert torch.equal(fused, rows)
    assert fused[0, StatField.SUBNORMALS] == (2 if bound == math.inf else 0)


def test_tensor_stats_uses_kernels_for_all_dtypes_but_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = []

    def counted(values: list[Tensor], subnormal: Tensor) -> Tensor:
        launched.append({value.dtype for value in values})
        return fused_stats(values, subnormal)

    monkeypatch.setattr(tensor_stats_module, "triton_problem", lambda device: None)
    monkeypatch.setattr("lightning_mp.numerics.stats_kernels.fused_stats", counted)
    generator = torch.Generator().manual_seed(3)
    dtypes = (*FORMATS, torch.float64)
    tensors = [planted((3, 41), dtype, generator) for dtype in dtypes * 2]
    scales = {"scale": 2.0**16, "unscale": 2.0**-8}
    assert_stats_agree(tensor_stats(tensors, **scales), tensors, **scales)
    assert launched == [set(FORMATS)]


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3).double(), torch.zeros(2, 2), torch.zeros(6)[::2]], ids=str
)
def test_tensors_that_a_kernel_would_misread_raise(tensor: Tensor) -> None:
    message = f"strides {tensor.stride()}. Tensors must be contiguous vectors"
    with pytest.raises(ValueError, match=re.escape(message)):
        fused_stats([torch.zeros(1), tensor], _bound())
