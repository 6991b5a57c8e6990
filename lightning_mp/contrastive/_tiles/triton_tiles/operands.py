"""Features as the kernels want them: aligned, padded, and in the precision that was asked for.

Shapes:
    n: rows. D: feature width. k: width of what is multiplied, a multiple of 64.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.literals import TileDtype

__all__ = ["WIDTH_MULTIPLE", "Operand", "Precision", "Products", "padded"]

WIDTH_MULTIPLE = 64
"""Widths are padded with zeros to a multiple of this, so that no kernel masks its slices."""

# Rows lie a multiple of this many values apart: what Triton has to know to copy asynchronously.
_ROW_MULTIPLE = 16
_ALIGNMENT_BYTES = 16  # of the copy engine and of vector loads
_SPLIT_EXPONENT = 8
_LARGEST_EXPONENT = 126
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def padded(width: int) -> int:
    """Return the least multiple of `WIDTH_MULTIPLE` that is not below a width."""
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


@dataclass(frozen=True)
class Precision:
    """What is multiplied, and how the softmax between the products is kept.

    Args:
        operand: The dtype of the operands of the logits.
        softmax: The dtype of the softmax and of the features that it is multiplied by. bf16 has
            the range of fp32; fp16 loses what is below 4e-12, which fp16 gradients cannot hold
            either.
        keeps_low: The softmax is kept in two 16-bit halves.
        is_split: fp32 features are multiplied as `high + low`, in three products; low times low is
            dropped. For the logits the halves are of fp16 and hold 22 bits. Halves of bf16, which
            hold 16, cost as much and leave log-sum-exps of a width of 72 at scale 100 off by 2e-4,
            against 1e-5. They will do for the gradients, whose error nothing magnifies.
    """

    operand: torch.dtype
    softmax: torch.dtype
    keeps_low: bool = False
    is_split: bool = False

    @classmethod
    def of(cls, features: torch.dtype, tile_dtype: TileDtype) -> "Precision":
        """Return what `tile_dtype` means for features of a dtype."""
        if tile_dtype in _HALF_DTYPES:
            return cls(_HALF_DTYPES[tile_dtype], _HALF_DTYPES[tile_dtype])
        if features != torch.float32:  # the products of 16-bit features are exact in any case
            return cls(features, features, keeps_low=tile_dtype == "fp32")
        if tile_dtype == "tf32":
            return cls(torch.float32, torch.float32)
        return cls(torch.float16, torch.bfloat16, keeps_low=True, is_split=True)

    @property
    def softmax_bytes(self) -> int:
        """Bytes of one softmax value."""
        return self.softmax.itemsize * (2 if self.keeps_low else 1)

    @property
    def softmax_exponent(self) -> int:
        """The power of two that the softmax is multiplied by.

        Values of 1/b at b > 16,384 are below fp16's smallest normal number, 2^-14. The sum of two
        softmax values is at most 2, and 2^15 is still in range.
        """
        return 14 if self.softmax == torch.float16 else 0

    def operand_rounding(self, features: torch.dtype) -> float:
        """Return what rounding the operands moves the product of two unit vectors by, at most."""
        if self.is_split:
            return 2 * 2.0**-22  # fp16's 11 bits twice
        if self.operand == torch.float32:
            return 2 * 2.0**-11  # tf32 cuts features off after 10 bits and the leading one
        return 0.0 if features == self.operand else torch.finfo(self.operand).eps

    def operand_bytes(self, features_nD: Tensor) -> int:
        """Return the bytes that an operand takes for each row of rows and of columns."""
        width = padded(features_nD.shape[1])
        if self.is_split:
            # Three halves for the logits and two for the gradients. What one of the two sides needs
            # to make the latter, four bytes in fp32, counts half for each.
            return (3 + 2) * 2 * width + 4 * width // 2
        is_used_in_place = features_nD.dtype == self.operand and _is_aligned(features_nD)
        return 0 if is_used_in_place else 2 * width * self.operand.itemsize

    def unit(self, features_nD: Tensor) -> Tensor | None:
        """Return the power of two, as one fp32 value, that split features are multiplied by.

        It brings the largest magnitude to 2^7 at least and below 2^8, so that the low halves of
        all values that matter are normal numbers of fp16. `None` without a split.
        """
        if not self.is_split:
            return None
        # On the device all along: the host would have to wait for a number it has no use for.
        extremes = torch.stack(features_nD.aminmax())
        exponent = torch.frexp(extremes.abs().amax()).exponent
        # Features below 2^-118 leave fp32 no unit that is large enough.
        exponent = (_SPLIT_EXPONENT - exponent).clamp(max=_LARGEST_EXPONENT)
        return torch.ldexp(extremes.new_ones(()), exponent)


@dataclass(frozen=True)
class Operand:
    """One side of the products, of which is made what is asked for."""

    features_nD: Tensor
    precision: Precision
    unit: Tensor | None
    is_columns: bool

    @functools.cached_property
    def tiles_nk(self) -> Tensor:
        """What the sweeps multiply: the features where they lie, if kernels can read them there.

        Split operands lie side by side: rows as `[high, high, low]` and columns as
        `[high, low, high]`, so that one product of three times the width is
        `high high + high low + low high`, times the units of both.
        """
        features_nD, unit = self.features_nD, self.unit
        values_nD = features_nD.to(self.precision.operand) if unit is None else features_nD * unit
        if unit is None and _is_aligned(values_nD):
            return values_nD  # at b = 64k and D = 1024, a copy in bf16 would take 128 MiB
        n, width = features_nD.shape
        shape = n, 1 if unit is None else 3, padded(width)
        tiles = values_nD.new_zeros(shape, dtype=self.precision.operand)
        tiles[:, :, :width] = values_nD[:, None]
        if unit is not None:  # high everywhere; what it lacks takes one of the places
            low = 1 if self.is_columns else 2
            # In place: times a unit, the values are a copy already.
            tiles[:, low, :width] = values_nD.sub_(tiles[:, 0, :width])
        return tiles.flatten(1)

    @functools.cached_property
    def parts_nD(self) -> tuple[Tensor, ...]:
        """What the softmax is multiplied by: the features, or their high and low halves."""
        if not self.precision.is_split:
            return (self.tiles_nk[:, : self.features_nD.shape[1]],)
        high_nD = self.features_nD.to(self.precision.softmax)
        return high_nD, (self.features_nD - high_nD).to(self.precision.softmax)


@dataclass(frozen=True)
class Products:
    """How rows and columns are multiplied: in which precision, split ones times which units."""

    precision: Precision
    row_unit: Tensor | None
    column_unit: Tensor | None

    @classmethod
    def of(cls, rows_nD: Tensor, columns_nD: Tensor, tile_dtype: TileDtype) -> "Products":
        """Return what `tile_dtype` means for features."""
        precision = Precision.of(rows_nD.dtype, tile_dtype)
        return cls(precision, precision.unit(rows_nD), precision.unit(columns_nD))

    def rows(self, features_nD: Tensor) -> Operand:
        """Return some of the rows as an operand."""
        return Operand(features_nD, self.precision, self.row_unit, is_columns=False)

    def columns(self, features_nD: Tensor) -> Operand:
        """Return some of the columns as an operand."""
        return Operand(features_nD, self.precision, self.column_unit, is_columns=True)

    @functools.cached_property
    def unit(self) -> Tensor | None:
        """What products come out multiplied by, in float64: fp32 could not hold both units."""
        if self.row_unit is None or self.column_unit is None:
            return None
        return self.row_unit.double() * self.column_unit


def _is_aligned(tensor_nD: Tensor) -> bool:
    """Return whether the kernels can read a tensor where it lies."""
    row_stride, column_stride = tensor_nD.stride()
    return (
        column_stride == 1
        and tensor_nD.shape[1] % WIDTH_MULTIPLE == 0
        # Hopper's copy engine wants rows apart, which those of `expand` are not.
        and row_stride >= tensor_nD.shape[1]
        and row_stride % _ROW_MULTIPLE == 0
        and tensor_nD.data_ptr() % _ALIGNMENT_BYTES == 0
    )
