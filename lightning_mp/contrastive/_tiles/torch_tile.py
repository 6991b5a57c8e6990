"""One tile of the logits in plain torch: what it is made of, and what a loss makes of it.

Shapes:
    r, c: rows and columns of the tile. D: width.

Logits are in units of log2(e), so that `exp2` serves: on a CPU, `exp` takes 100 times as long for
results below fp32's smallest normal number, and a GEMM over such results 200 times as long.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.exclusions import Ids, Thresholds

__all__ = [
    "HEADER",
    "StoredTile",
    "Peaks",
    "Tile",
    "thresholded_softmax",
    "thresholded_sums",
    "log2_sums_exp2",
    "peaks_of",
    "sigmoid",
    "softmax",
]

# Exponents are raised to these at least, so that neither exp2 nor the GEMM after it ever meets a
# subnormal number. A log-sum-exp has a largest term of 1 beside it, so that is far below rounding;
# a gradient gets up to 1.6e-30 for a softmax value that is smaller.
_MIN_EXPONENT = {torch.float32: -100.0, torch.float64: -1000.0}
# With one reference for a whole tile, a sum as small as this is still 2^40 times the least term.
_MIN_SUM = 2.0**-60
# How far log-sum-exps of a tile may lie apart, in powers of two, for one reference to serve them.
_LARGEST_SPREAD = 60.0
HEADER = 16
"""Values before a kept tile, so that tiles stay aligned to 64 bytes."""


@dataclasses.dataclass
class StoredTile:
    """The place of one tile in the memory that lasts from the first sweep to the second.

    It holds `2^(logit - reference)`, or the logits where no reference serves the whole tile; the
    reference, or NaN, stands in the header.
    """

    header: Tensor
    values_rc: Tensor

    @property
    def reference(self) -> Tensor | None:
        """What the values refer to, in powers of two; `None` if they are logits."""
        # On other devices logits are kept, and a look at the header would wait for the device.
        if self.header.device.type != "cpu" or bool(self.header.isnan()):
            return None
        return self.header

    def note(self, reference: Tensor | None, logits_rc: Tensor) -> None:
        """Say what the values refer to; without a reference, keep the logits."""
        if reference is None:
            self.values_rc.copy_(logits_rc)
            # No reference is NaN: the sums of a tile with one have failed their comparison.
            self.header.fill_(math.nan)
        else:
            self.header.copy_(reference)


@dataclasses.dataclass
class Tile:
    """One tile: its place, operands in the accumulation dtype, two buffers, what is left out.

    `log2_scale` is what the rows were multiplied by, in the state dtype.
    """

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
    log2_scale: Tensor

    def logits(self) -> Tensor:
        """Work the logits out, in the first buffer."""
        return torch.mm(self.scaled_rD, self.columns_cD.T, out=self.logits_rc)

    def leave_out(self, tile_rc: Tensor, value: float) -> Tensor:
        """Give what is no negative a value, in place: positives, and pairs of equal ids."""
        if self.ids is not None:
            tile_rc.masked_fill_(self.ids.rows_b[:, None] == self.ids.columns_m, value)
        if self.diagonal is None:
            return tile_rc
        # Only these rows have their positive in the shard, wherever its diagonal runs.
        part_rc = tile_rc[self.positive_rows]
        offset = self.diagonal + min(self.positive_rows.start, tile_rc.shape[0])
        if -part_rc.shape[0] < offset < part_rc.shape[1]:
            part_rc.diagonal(offset).fill_(value)
        return tile_rc


class _Sums(NamedTuple):
    """`log2(sum(2^logits))` of rows and columns; the reference if one served the whole tile."""

    rows_r: Tensor
    columns_c: Tensor
    reference: Tensor | None


Peaks = tuple[Tensor, Tensor]
"""The largest logits of the rows and of the columns of a tile."""


def log2_sums_exp2(
    logits_rc: Tensor, dtype: torch.dtype, powers_rc: Tensor, peaks: Peaks | None = None
) -> _Sums:
    """Return the sums of a tile in `dtype`.

    On a CPU, where looking at a value costs nothing, both are first tried with one reference for
    the whole tile and so with one exponential an element, which `powers_rc` then holds. That is
    exact unless a row or column lies 60 powers of two below the tile's largest logit; then each
    gets its own reference. `peaks`, where they are known, save looking for them.
    """
    if logits_rc.device.type == "cpu":
        largest = logits_rc.amax() if peaks is None else peaks[0].amax()
        torch.sub(logits_rc, largest, out=powers_rc).clamp_(min=_MIN_EXPONENT[logits_rc.dtype])
        sums = (powers_rc.exp2_().sum(1), powers_rc.sum(0))
        # NaN and infinities fail this comparison too.
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
    """Return the largest logits of rows and columns; a NaN is larger than all."""
    return logits_rc.amax(1), logits_rc.amax(0)


def _log2_sum_exp2(
    logits_rc: Tensor, dim: int, dtype: torch.dtype, peak: Tensor, out: Tensor
) -> Tensor:
    """Return `log2(sum(2^logits))` along `dim` in `dtype`; infinities and NaN as in logsumexp."""
    largest = peak.unsqueeze(dim)
    # Infinity less infinity would be NaN.
    reference = largest.masked_fill(largest.isinf(), 0.0)
    torch.sub(logits_rc, reference, out=out).clamp_(min=_MIN_EXPONENT[out.dtype]).exp2_()
    lse = out.sum(dim, keepdim=True).to(dtype).log2_().add_(reference)
    # Where nothing is left, each term was raised to the least exponent, and they add up.
    return torch.where(largest == -torch.inf, -torch.inf, lse).squeeze(dim)


def softmax(tile: Tile, row_r: Tensor, column_c: Tensor) -> Tensor:
    """Return `2^(logit - row) + 2^(logit - column)` in the second buffer, 0 for no negatives.

    Powers against one reference `t` give both by a factor for each row and one for each column:
    `2^(logit - t) (2^(t - row) + 2^(t - column))`. No row or column that a kept reference served
    lies more than 60 below it.
    """
    least = _MIN_EXPONENT[tile.spare_rc.dtype]
    reference = None if tile.stored is None else tile.stored.reference
    if tile.stored is not None and reference is not None:
        powers_rc = tile.stored.values_rc
    else:
        powers_rc = tile.logits() if tile.stored is None else tile.stored.values_rc
        reference = _shared_reference(row_r, column_c)
        if reference is not None:
            torch.sub(powers_rc, reference, out=tile.logits_rc)
            powers_rc = tile.logits_rc.clamp_(min=least).exp2_()
    if reference is None:
        row_r, column_c = (power.to(tile.spare_rc.dtype) for power in (row_r, column_c))
        by_row_rc = torch.sub(powers_rc, row_r[:, None], out=tile.spare_rc)
        by_column_rc = torch.sub(powers_rc, column_c[None], out=tile.logits_rc)
        by_row_rc.clamp_(min=least).exp2_()
        by_row_rc.add_(by_column_rc.clamp_(min=least).exp2_())
        return tile.leave_out(by_row_rc, 0.0)
    row_r, column_c = (
        # In the state dtype up to here: a logarithm in fp32 would be off for its whole row.
        (reference - power).clamp_(min=least).exp2_().to(tile.spare_rc.dtype)
        for power in (row_r, column_c)
    )
    torch.mul(powers_rc, row_r[:, None], out=tile.spare_rc)
    return tile.leave_out(tile.spare_rc.addcmul_(powers_rc, column_c[None]), 0.0)


def _shared_reference(row_r: Tensor, column_c: Tensor) -> Tensor | None:
    """Return the least of the log-sum-exps if the largest is no more than 60 above it, on a CPU.

    Every logit is below its row's, so that no power is above 2^60, and no factor below 2^-60.
    """
    if row_r.device.type != "cpu":
        return None
    both = torch.stack([*row_r.aminmax(), *column_c.aminmax()])
    least = both.amin()
    is_near = bool(both.amax() - least <= _LARGEST_SPREAD)  # NaN and infinities fail this
    # Rounded for both: fp32 logits would subtract it rounded, rows and columns as it is.
    return least.float() if is_near else None


def thresholded_sums(tile: Tile, thresholds: Thresholds, dtype: torch.dtype) -> _Sums:
    """Return `log2(sum(2^logits))` in `dtype` of what rows and columns do not leave out.

    The logits stand in the first buffer, and are gone after.
    """
    by_row_rc, by_column_rc = _above(tile, thresholds)  # while the logits are what they were
    tile.leave_out(tile.logits_rc, -torch.inf)
    row_rc = tile.spare_rc.copy_(tile.logits_rc).masked_fill_(by_row_rc, -torch.inf)
    column_rc = tile.logits_rc.masked_fill_(by_column_rc, -torch.inf)
    return _Sums(
        _log2_sum_exp2(row_rc, 1, dtype, row_rc.amax(1), out=row_rc),
        _log2_sum_exp2(column_rc, 0, dtype, column_rc.amax(0), out=column_rc),
        None,
    )


def thresholded_softmax(
    tile: Tile, thresholds: Thresholds, row_r: Tensor, column_c: Tensor
) -> Tensor:
    """Return what `softmax` does, without what rows and columns leave out."""
    least, dtype = _MIN_EXPONENT[tile.spare_rc.dtype], tile.spare_rc.dtype
    logits_rc = tile.logits()
    by_row_rc, by_column_rc = _above(tile, thresholds)
    row_rc = torch.sub(logits_rc, row_r.to(dtype)[:, None], out=tile.spare_rc)
    column_rc = logits_rc.sub_(column_c.to(dtype))
    for powers_rc, left_out_rc in ((row_rc, by_row_rc), (column_rc, by_column_rc)):
        # After the exponential: a -inf before it would be lifted to the least exponent.
        powers_rc.clamp_(min=least).exp2_().masked_fill_(left_out_rc, 0)
    return tile.leave_out(row_rc.add_(column_rc), 0.0)


def _above(tile: Tile, thresholds: Thresholds) -> tuple[Tensor, Tensor]:
    """Return what rows leave out, and what columns do; guides take the second buffer."""
    dtype, scale = tile.spare_rc.dtype, tile.log2_scale
    if thresholds.guides is not None:
        left, right = (guides.to(dtype) for guides in thresholds.guides)
        guided_rc = torch.mm(left, right.T, out=tile.spare_rc)
        return guided_rc > thresholds.rows_b[:, None].to(
            dtype
        ), guided_rc > thresholds.columns_m.to(dtype)
    by_row_rc, by_column_rc = (
        # Logits of a negative scale have the other order. NaN is in none, and stays.
        torch.where(scale < 0, tile.logits_rc < limit, tile.logits_rc > limit)
        for limit in (
            (x * scale).to(dtype) for x in (thresholds.rows_b[:, None], thresholds.columns_m)
        )
    )
    return by_row_rc, by_column_rc


def sigmoid(tile: Tile, log2_bias: Tensor, weights_b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what the negatives weigh, `w P(x)`, and the sum of `w softplus(x)`; x: logit + bias.

    P: the sigmoid. Logits stand in the first buffer, and are gone after. The bias is in powers of
    two; `w` is what a row weighs, 1 where nothing is said.
    """
    x_rc, dtype = tile.logits_rc, tile.spare_rc.dtype
    x_rc.add_(log2_bias.to(dtype)).clamp_(min=_MIN_EXPONENT[dtype])
    tile.leave_out(x_rc, -torch.inf)  # last, for the least exponent would count
    x_rc.mul_(math.log(2))  # sigmoid(x) = exp2(x) / (1 + exp2(x)) would overflow
    # Above 50, softplus(x) is x: e^-50 is 2e-22.
    # No sigmoid is left of them either: that of -inf is 0.
    losses_rc = torch.ops.aten.softplus.out(x_rc, 1, 50, out=tile.spare_rc)
    x_rc.sigmoid_()
    if weights_b is not None:
        weights_r1 = weights_b[tile.rows, None].to(dtype)
        for values_rc in (x_rc, losses_rc):
            # What weighs nothing may be infinite, and 0 times that is NaN.
            values_rc.mul_(weights_r1).masked_fill_(weights_r1 == 0, 0.0)
    return x_rc, losses_rc.sum()
