"""Features and results in any memory layout on the CPU interpreter.

Shapes:
    b: rows. m: columns. D: width.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_mp.contrastive._tiles.tile_backend import Derivatives, Vectors
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from lightning_mp.contrastive._tiles.triton_tiles.block import Weights
from lightning_mp.contrastive._tiles.triton_tiles.configs import find_configs
from lightning_mp.contrastive._tiles.triton_tiles.kernel_logits import KernelLogits
from lightning_mp.contrastive._tiles.triton_tiles.operands import Operand, Precision
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import (
    SoftmaxFactors,
    write_softmax,
)
from tests.contrastive.triton_tiles.interpreter import (
    GRADIENT_ERROR,
    LSE_ERROR,
    make_shard,
    shard_of,
)
from tests.reference.contrastive import relative_error

pytestmark = pytest.mark.interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FAR = 2**30  # values between two rows, so that the offset of the third row exceeds 32 bits


def _transposed(features: Tensor) -> Tensor:
    return features.T.contiguous().T


def _columns_of_wider_rows(features: Tensor) -> Tensor:
    wider = torch.full((len(features), 2 * features.shape[1]), torch.nan, dtype=features.dtype)
    wider[:, features.shape[1] :] = features
    return wider[:, features.shape[1] :]


def _unaligned_columns(features: Tensor) -> Tensor:
    # The row stride is a multiple of 16 values, but the address of the first value is not aligned.
    wider = torch.full((len(features), 16 + features.shape[1]), torch.nan, dtype=features.dtype)
    wider[:, 3:-13] = features
    return wider[:, 3:-13]


def _every_second_row(features: Tensor) -> Tensor:
    more = torch.full((2 * len(features), features.shape[1]), torch.nan, dtype=features.dtype)
    more[::2] = features
    return more[::2]


@pytest.mark.parametrize(
    "relaid", [_transposed, _columns_of_wider_rows, _unaligned_columns, _every_second_row]
)
@pytest.mark.parametrize(
    ("dtype", "arch", "width"),
    [(BF16, 80, 64), (FP16, 90, 64), (BF16, 90, 40), (FP32, 80, 40)],
    ids=str,
)
def test_results_do_not_depend_on_the_layout_of_features(
    dtype: torch.dtype, arch: int, width: int, relaid: Callable[[Tensor], Tensor]
) -> None:
    shard, tiles = make_shard(30, 70, width, dtype), TritonTiles(arch=arch)
    lses, gradients = shard.lse_sweep(tiles), shard.grad_sweep(tiles)
    shard.rows, shard.columns = relaid(shard.rows), relaid(shard.columns)
    # torch sums norms and products of transposed tensors in another order.
    for lse, expected in zip(shard.lse_sweep(tiles), lses, strict=True):
        torch.testing.assert_close(lse, expected, rtol=0, atol=LSE_ERROR / 4)
    for gradient, expected in zip(shard.grad_sweep(tiles), gradients, strict=True):
        assert relative_error(gradient, expected) < GRADIENT_ERROR[dtype] / 8


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_expanded_single_row_equals_float64(dtype: torch.dtype) -> None:
    row, column = (normalize(torch.randn(1, 64), dim=1).to(dtype) for _ in range(2))
    shard = shard_of(row.expand(40, 64), column.expand(70, 64), 100.0)
    assert shard.rows.stride(0) == 0
    assert shard.lse_error(shard.lse_sweep(TritonTiles())) < LSE_ERROR
    assert shard.grad_error(shard.grad_sweep(TritonTiles())) < GRADIENT_ERROR[dtype]


@pytest.mark.parametrize("relaid", [_transposed, _columns_of_wider_rows, _every_second_row])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_accumulate_into_any_layout(
    dtype: torch.dtype, relaid: Callable[[Tensor], Tensor]
) -> None:
    shard, tiles = make_shard(30, 70, 72, dtype), TritonTiles()
    gradients = relaid(torch.zeros(30, 72)), relaid(torch.zeros(70, 72))
    tiles.grad_sweep(shard.swept, Vectors(*shard.lse), Derivatives(*gradients))
    assert shard.grad_error(gradients) < GRADIENT_ERROR[dtype]


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Return a function that copies three rows to memory with `FAR` values between the rows."""
    # Of 4 GiB of addresses, only the pages of the three rows take memory.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    storage = torch.empty(2 * FAR + 64, dtype=FP16)

    def copy(rows: Tensor) -> Tensor:
        return storage.as_strided(rows.shape, (FAR, 1)).copy_(rows)

    return copy


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("arch", [80, 90])
def test_rows_beyond_2_to_the_31_values_are_read_correctly(
    arch: int, side: str, far_apart: Callable[[Tensor], Tensor]
) -> None:
    b, m = (3, 70) if side == "rows" else (70, 3)
    shard, tiles = make_shard(b, m, 64, FP16), TritonTiles(arch=arch)
    setattr(shard, side, far_apart(getattr(shard, side)))
    operand = Operand(
        getattr(shard, side), Precision.of(FP16, "auto"), None, is_columns=side == "columns"
    )
    assert operand.tiles_nk.stride(0) == FAR, "a copy would not test this"
    assert shard.lse_error(shard.lse_sweep(tiles)) < LSE_ERROR
    assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[FP16]


@pytest.mark.parametrize("arch", [80, 90])
def test_softmax_beyond_2_to_the_31_values_is_written_correctly(
    arch: int, far_apart: Callable[[Tensor], Tensor]
) -> None:
    shard = make_shard(3, 64, 64, FP16)
    softmax = far_apart(torch.full((3, 64), torch.nan, dtype=FP16))
    configs = [find_configs(kernel, arch, FP16, 64)[0] for kernel in ("softmax", "softmax_wide")]
    factors = SoftmaxFactors.of(Vectors(*shard.lse), shard.scale, 0)
    (block,) = KernelLogits.of(shard.swept, "auto").blocks((3, 64))
    write_softmax(block, factors.log2_scale, factors, Weights(softmax, None, 0), configs)
    torch.testing.assert_close(softmax.double(), shard.softmax, rtol=6e-4, atol=2**-25)
