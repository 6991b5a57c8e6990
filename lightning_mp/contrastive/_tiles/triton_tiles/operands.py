"""Operands of the kernels: features that are aligned, padded and in the requested precision.

Shapes:
    n: rows. D: feature width. k: width of an operand, a multiple of 64.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.literals import TileDtype

__all__ = ["WIDTH_MULTIPLE", "Operand", "Precision", "Products", "padded"]

WIDTH_MULTIPLE = 64
"""Widths are padded with zeros to a multiple of this, so that kernels need no mask."""

# The row stride is a multiple of this many values, which Triton requires for asynchronous copies.
_ROW_MULTIPLE = 16
_ALIGNMENT_BYTES = 16  # required by the copy engine and by vector loads
_SPLIT_EXPONENT = 8
_LARGEST_EXPONENT = 126
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def padded(width: int) -> int:
    """Return a width rounded up to a multiple of `WIDTH_MULTIPLE`."""
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


@dataclass(frozen=True)
class Precision:
    """Dtypes of the operands of the logits and of the softmax.

    If it `is_split`, fp32 features are multiplied as `high + low` in three products, without low
    times low. The logits take halves in fp16, which hold 22 bits. Halves in bf16 hold 16:
    log-sum-exps at D = 72 and scale 100 would have an error of 2e-4 instead of 1e-5. They are
    accurate enough for the gradients.
    """

    operand: torch.dtype  # of the logits
    # Also of the features in the products of the softmax. bf16 has the range of fp32; fp16
    # underflows below 4e-12, as fp16 gradients do.
    softmax: torch.dtype
    keeps_low: bool = False  # whether the softmax is stored in two 16-bit halves
    is_split: bool = False

    @classmethod
    def of(cls, features: torch.dtype, tile_dtype: TileDtype) -> "Precision":
        """Return the precision that `tile_dtype` selects for features of a dtype."""
        if tile_dtype in _HALF_DTYPES:
            return cls(_HALF_DTYPES[tile_dtype], _HALF_DTYPES[tile_dtype])
        if features != torch.float32:  # products of 16-bit features are exact
            return cls(features, features, keeps_low=tile_dtype == "fp32")
        if tile_dtype == "tf32":
            return cls(torch.float32, torch.float32)
        return cls(torch.float16, torch.bfloat16, keeps_low=True, is_split=True)

    @property
    def softmax_bytes(self) -> int:
        return self.softmax.itemsize * (2 if self.keeps_low else 1)

    @property
    def softmax_exponent(self) -> int:
        """The exponent of the power of two that multiplies the softmax.

        Values of 1/b at b > 16,384 are below fp16's smallest normal number, 2^-14. The sum of two
        softmax values is at most 2, and 2^15 is still in range.
        """
        return 14 if self.softmax == torch.float16 else 0

    def operand_rounding(self, features: torch.dtype) -> float:
        """Return the largest error of a product of unit vectors from rounding the operands."""
        if self.is_split:
            return 2 * 2.0**-22  # two halves of 11 bits
        if self.operand == torch.float32:
            return 2 * 2.0**-11  # tf32 truncates features to 11 bits
        return 0.0 if features == self.operand else torch.finfo(self.operand).eps

    def operand_bytes(self, features_nD: Tensor) -> int:
        """Return the bytes that an operand takes per row, for rows and columns together."""
        width = padded(features_nD.shape[1])
        if self.is_split:
            # Three halves for the logits and two for the gradients, and temporary fp32 values for
            # one of the two operands, half of which counts for each.
            return (3 + 2) * 2 * width + 4 * width // 2
        is_used_in_place = features_nD.dtype == self.operand and _is_aligned(features_nD)
        return 0 if is_used_in_place else 2 * width * self.operand.itemsize

    def unit(self, features_nD: Tensor) -> Tensor | None:
        """Return the power of two, as one fp32 value, that multiplies split features.

        It scales the largest magnitude to at least 2^7 and below 2^8, so that the low halves of all
        relevant values are normal numbers of fp16. `None` without a split.
        """
        if not self.is_split:
            return None
        # Computed on the device, so that the host does not wait.
        extremes = torch.stack(features_nD.aminmax())
        exponent = torch.frexp(extremes.abs().amax()).exponent
        # The unit for features below 2^-118 would overflow fp32.
        exponent = (_SPLIT_EXPONENT - exponent).clamp(max=_LARGEST_EXPONENT)
        return torch.ldexp(extremes.new_ones(()), exponent)


@dataclass(frozen=True)
class Operand:
    """One operand of the products; derived forms (halves, copies) are made on demand."""

    features_nD: Tensor
    precision: Precision
    unit: Tensor | None
    is_columns: bool

    @functools.cached_property
    def tiles_nk(self) -> Tensor:
        """The operand of the logits: the features themselves if their layout permits, or a copy.

        Split operands are concatenated, rows as `[low, high, high]` and columns as
        `[high, low, high]`, so that one product of three times the width is
        `low high + high low + high high`, times both units. The small products come first, because
        tensor cores truncate the sum at each step: after the large ones, each step would cost half
        of its last bit.
        """
        features_nD, unit = self.features_nD, self.unit
        values_nD = features_nD.to(self.precision.operand) if unit is None else features_nD * unit
        if unit is None and _is_aligned(values_nD):
            return values_nD  # at b = 64k and D = 1024, a copy in bf16 would take 128 MiB
        n, width = features_nD.shape
        shape = n, 1 if unit is None else 3, padded(width)
        tiles = values_nD.new_zeros(shape, dtype=self.precision.operand)
        tiles[:, :, :width] = values_nD[:, None]
        if unit is not None:  # all three parts are high; one is replaced by low
            low = 1 if self.is_columns else 0
            # In place, because values times a unit are already a copy.
            tiles[:, low, :width] = values_nD.sub_(tiles[:, 2, :width])
        return tiles.flatten(1)

    @functools.cached_property
    def parts_nD(self) -> tuple[Tensor, ...]:
        """The operands of the gradient products: the features, or their high and low halves."""
        if not self.precision.is_split:
            return (self.tiles_nk[:, : self.features_nD.shape[1]],)
        high_nD = self.features_nD.to(self.precision.softmax)
        return high_nD, (self.features_nD - high_nD).to(self.precision.softmax)


@dataclass(frozen=True)
class Products:
    """Precision of the products of rows and columns, and units of split operands."""

    precision: Precision
    row_unit: Tensor | None
    column_unit: Tensor | None

    @classmethod
    def of(cls, rows_nD: Tensor, columns_nD: Tensor, tile_dtype: TileDtype) -> "Products":
        """Return the products that `tile_dtype` selects for features."""
        precision = Precision.of(rows_nD.dtype, tile_dtype)
        return cls(precision, precision.unit(rows_nD), precision.unit(columns_nD))

    def rows(self, features_nD: Tensor) -> Operand:
        return Operand(features_nD, self.precision, self.row_unit, is_columns=False)

    def columns(self, features_nD: Tensor) -> Operand:
        return Operand(features_nD, self.precision, self.column_unit, is_columns=True)

    @functools.cached_property
    def unit(self) -> Tensor | None:
        """The factor of the products, in float64, because fp32 could not hold both units."""
        if self.row_unit is None or self.column_unit is None:
            return None
        return self.row_unit.double() * self.column_unit


def _is_aligned(tensor_nD: Tensor) -> bool:
    """Return whether kernels can read a tensor without a copy."""
    row_stride, column_stride = tensor_nD.stride()
    return (
        column_stride == 1
        and tensor_nD.shape[1] % WIDTH_MULTIPLE == 0
        # Hopper's copy engine requires distinct rows, unlike those of `expand`.
        and row_stride >= tensor_nD.shape[1]
        and row_stride % _ROW_MULTIPLE == 0
        and tensor_nD.data_ptr() % _ALIGNMENT_BYTES == 0
    )
