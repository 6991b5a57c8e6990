"""One tile of the logits in plain torch: its operands and buffers, and the functions of a loss.

Shapes:
    r, c: rows and columns of the tile. D: width.

Logits are multiplied by log2(e) for `exp2`: on a CPU, `exp` takes 100 times as long for results
below fp32's smallest normal number, and a GEMM over such results 200 times as long.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.masks import Ids, Thresholds

__all__ = [
    "HEADER",
    "StoredTile",
    "Peaks",
    "Tile",
    "thresholded_sums",
    "log2_sums_exp2",
    "peaks_of",
    "sigmoid",
    "softmax",
]

# Exponents are clamped from below, so that neither exp2 nor the GEMM after it processes subnormal
# numbers. The error is far below the rounding of a log-sum-exp, whose largest term is 1, and at
# most 1.6e-30 in a softmax value.
_MIN_EXPONENT = {torch.float32: -100.0, torch.float64: -1000.0}
# With one reference for a tile, the smallest accepted sum is 2^40 times the smallest term.
_MIN_SUM = 2.0**-60
# The largest range of log-sum-exps of a tile, in powers of two, for a shared reference.
_LARGEST_SPREAD = 60.0
HEADER = 16
"""Number of values before a stored tile; keeps tiles aligned to 64 bytes."""


@dataclasses.dataclass
class StoredTile:
    """A tile in the memory that lasts from the first sweep to the second.

    It holds `2^(logit - reference)` with the reference in the header, or the logits with NaN in the
    header if no single reference is accurate for the whole tile.
    """

    header: Tensor
    values_rc: Tensor

    @property
    def reference(self) -> Tensor | None:
        """The reference in powers of two; `None` if the values are logits."""
        # Other devices store logits; reading the header would wait for the device.
        if self.header.device.type != "cpu" or bool(self.header.isnan()):
            return None
        return self.header

    def store(self, reference: Tensor | None, logits_rc: Tensor) -> None:
        """Store the reference of the values, or the logits if there is no reference."""
        if reference is None:
            self.values_rc.copy_(logits_rc)
            # A reference is never NaN: tiles with NaN fail the comparison of their sums.
            self.header.fill_(math.nan)
        else:
            self.header.copy_(reference)


@dataclasses.dataclass
class Tile:
    """One tile: position, operands in the accumulation dtype, two buffers, masks."""

    rows: slice
    columns: slice
    scaled_rD: Tensor
    columns_cD: Tensor
    logits_rc: Tensor
    spare_rc: Tensor
    diagonal: int | None
    positive_rows: slice
    stored: StoredTile | None
    ids: Ids | None
    thresholds: Thresholds | None
    log2_scale: Tensor  # the factor of the scaled rows, in the state dtype

    def logits(self) -> Tensor:
        return torch.mm(self.scaled_rD, self.columns_cD.T, out=self.logits_rc)

    def mask(self, tile_rc: Tensor, value: float) -> Tensor:
        """Set positives and pairs with equal ids to a value, in place."""
        if self.ids is not None:
            tile_rc.masked_fill_(self.ids.rows_b[:, None] == self.ids.columns_m, value)
        if self.diagonal is None:
            return tile_rc
        # Only these rows have their positive in the shard; the diagonal may extend beyond them.
        part_rc = tile_rc[self.positive_rows]
        offset = self.diagonal + min(self.positive_rows.start, tile_rc.shape[0])
        if -part_rc.shape[0] < offset < part_rc.shape[1]:
            part_rc.diagonal(offset).fill_(value)
        return tile_rc


class _Sums(NamedTuple):
    """`log2(sum(2^logits))` of rows and columns, and the shared reference if there is one."""

    rows_r: Tensor
    columns_c: Tensor
    reference: Tensor | None


Peaks = tuple[Tensor, Tensor]
"""The largest logits of the rows and of the columns of a tile."""


def log2_sums_exp2(
    logits_rc: Tensor, dtype: torch.dtype, powers_rc: Tensor, peaks: Peaks | None = None
) -> _Sums:
    """Return the sums of a tile in `dtype`.

    On a CPU, where reading a value costs nothing, the sums first use one reference for the whole
    tile, with one exponential per element, stored in `powers_rc`. They are accurate unless a row or
    column lies 60 powers of two below the tile's largest logit; then each row and column gets its
    own reference. `peaks` are the maxima, if already known.
    """
    if logits_rc.device.type == "cpu":
        largest = logits_rc.amax() if peaks is None else peaks[0].amax()
        torch.sub(logits_rc, largest, out=powers_rc).clamp_(min=_MIN_EXPONENT[logits_rc.dtype])
        sums = (powers_rc.exp2_().sum(1), powers_rc.sum(0))
        # NaN and infinities fail the comparison.
        if all(bool(total.amin() >= _MIN_SUM) for total in sums):
            row_r, column_c = (total.to(dtype).log2_().add_(largest) for total in sums)
            return _Sums(row_r, column_c, largest)
    row_r, column_c = peaks_of(logits_rc) if peaks is None else peaks
    return _Sums(
        _log2_sum_exp2(logits_rc, 1, dtype, row_r, out=powers_rc),
        _log2_sum_exp2(logits_rc, 0, dtype, column_c, out=powers_rc),
        None,
    )


def peaks_of(logits_rc: Tensor) -> Peaks:
    """Return the largest logits of rows and columns; NaN counts as the largest."""
    return logits_rc.amax(1), logits_rc.amax(0)


def _log2_sum_exp2(
    logits_rc: Tensor, dim: int, dtype: torch.dtype, peak: Tensor, out: Tensor
) -> Tensor:
    """Return `log2(sum(2^logits))` along `dim` in `dtype`; infinities and NaN as in logsumexp."""
    largest = peak.unsqueeze(dim)
    # inf - inf would be NaN.
    reference = largest.masked_fill(largest.isinf(), 0.0)
    torch.sub(logits_rc, reference, out=out).clamp_(min=_MIN_EXPONENT[out.dtype]).exp2_()
    lse = out.sum(dim, keepdim=True).to(dtype).log2_().add_(reference)
    # Without negatives, the terms are clamped exponents instead of 0.
    return torch.where(largest == -torch.inf, -torch.inf, lse).squeeze(dim)


def softmax(tile: Tile, row_r: Tensor, column_c: Tensor) -> Tensor:
    """Return `2^(logit - row) + 2^(logit - column)` in the second buffer, 0 for masked pairs.

    With a shared reference `t`, both terms are products of one power with a factor per row and per
    column: `2^(logit - t) (2^(t - row) + 2^(t - column))`. With a stored reference, no row or
    column is more than 60 below it. Thresholds mask each term alone, so they exclude a reference.
    """
    least, dtype = _MIN_EXPONENT[tile.spare_rc.dtype], tile.spare_rc.dtype
    reference = None if tile.stored is None else tile.stored.reference
    powers_rc = tile.logits() if tile.stored is None else tile.stored.values_rc
    if reference is None and tile.thresholds is None:
        reference = _shared_reference(row_r, column_c)
        if reference is not None:
            torch.sub(powers_rc, reference, out=tile.logits_rc)
            powers_rc = tile.logits_rc.clamp_(min=least).exp2_()
    if reference is None:
        masks = None if tile.thresholds is None else _above_thresholds(tile, tile.thresholds)
        by_row_rc = torch.sub(powers_rc, row_r.to(dtype)[:, None], out=tile.spare_rc)
        by_column_rc = torch.sub(powers_rc, column_c.to(dtype)[None], out=tile.logits_rc)
        for terms_rc, mask_rc in zip((by_row_rc, by_column_rc), masks or (None, None), strict=True):
            terms_rc.clamp_(min=least).exp2_()
            if mask_rc is not None:  # after the exponential, because the clamp would raise a -inf
                terms_rc.masked_fill_(mask_rc, 0)
        return tile.mask(by_row_rc.add_(by_column_rc), 0.0)
    row_r, column_c = (
        # The difference is taken in the state dtype: rounding in fp32 would shift the whole row.
        (reference - power).clamp_(min=least).exp2_().to(dtype)
        for power in (row_r, column_c)
    )
    torch.mul(powers_rc, row_r[:, None], out=tile.spare_rc)
    return tile.mask(tile.spare_rc.addcmul_(powers_rc, column_c[None]), 0.0)


def _shared_reference(row_r: Tensor, column_c: Tensor) -> Tensor | None:
    """Return the smallest log-sum-exp if the largest is at most 60 above it; on a CPU only.

    A logit is below the log-sum-exp of its row, so powers are at most 2^60 and factors at least
    2^-60.
    """
    if row_r.device.type != "cpu":
        return None
    both = torch.stack([*row_r.aminmax(), *column_c.aminmax()])
    least = both.amin()
    is_near = bool(both.amax() - least <= _LARGEST_SPREAD)  # False for NaN and infinities
    # Rounded once, because fp32 logits would subtract the rounded value, rows and columns not.
    return least.float() if is_near else None


def thresholded_sums(tile: Tile, thresholds: Thresholds, dtype: torch.dtype) -> _Sums:
    """Return `log2(sum(2^logits))` in `dtype`, with pairs above thresholds masked.

    The first buffer holds the logits and is overwritten.
    """
    # Before the logits are overwritten.
    by_row_rc, by_column_rc = _above_thresholds(tile, thresholds)
    tile.mask(tile.logits_rc, -torch.inf)
    row_rc = tile.spare_rc.copy_(tile.logits_rc).masked_fill_(by_row_rc, -torch.inf)
    column_rc = tile.logits_rc.masked_fill_(by_column_rc, -torch.inf)
    return _Sums(
        _log2_sum_exp2(row_rc, 1, dtype, row_rc.amax(1), out=row_rc),
        _log2_sum_exp2(column_rc, 0, dtype, column_rc.amax(0), out=column_rc),
        None,
    )


def _above_thresholds(tile: Tile, thresholds: Thresholds) -> tuple[Tensor, Tensor]:
    """Return which pairs exceed the thresholds of rows, and of columns.

    With guides, the second buffer is overwritten.
    """
    dtype, scale = tile.spare_rc.dtype, tile.log2_scale
    if thresholds.guides is not None:
        left, right = (guides.to(dtype) for guides in thresholds.guides)
        guided_rc = torch.mm(left, right.T, out=tile.spare_rc)
        by_row_rc = guided_rc > thresholds.rows_b[:, None].to(dtype)
        return by_row_rc, guided_rc > thresholds.columns_m.to(dtype)
    limits = ((x * scale).to(dtype) for x in (thresholds.rows_b[:, None], thresholds.columns_m))
    by_row_rc, by_column_rc = (
        # A negative scale reverses the order. NaN exceeds no threshold and remains.
        torch.where(scale < 0, tile.logits_rc < limit, tile.logits_rc > limit)
        for limit in limits
    )
    return by_row_rc, by_column_rc


def sigmoid(tile: Tile, log2_bias: Tensor, weights_b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weighted sigmoids of the negatives and the weighted sum of softplus, of logit + bias.

    The first buffer holds the logits and is overwritten. The bias is in powers of two; rows
    have weight 1 by default.
    """
    x_rc, dtype = tile.logits_rc, tile.spare_rc.dtype
    x_rc.add_(log2_bias.to(dtype)).clamp_(min=_MIN_EXPONENT[dtype])
    tile.mask(x_rc, -torch.inf)  # after the clamp, which would raise it
    x_rc.mul_(math.log(2))  # sigmoid(x) = exp2(x) / (1 + exp2(x)) would overflow
    # Above 50, softplus(x) is x: e^-50 is 2e-22. Sigmoid and softplus of -inf are 0.
    losses_rc = torch.ops.aten.softplus.out(x_rc, 1, 50, out=tile.spare_rc)
    x_rc.sigmoid_()
    if weights_b is not None:
        weights_r1 = weights_b[tile.rows, None].to(dtype)
        for values_rc in (x_rc, losses_rc):
            # Values of weight 0 may be infinite, and their product is NaN.
            values_rc.mul_(weights_r1).masked_fill_(weights_r1 == 0, 0.0)
    return x_rc, losses_rc.sum()
