"""The tile backend that runs wherever torch runs: GEMMs by its BLAS, softmax by tile.

Shapes:
    b: rows. m: columns. r, c: rows and columns of one tile. D: width.

Logits are in units of log2(e), so that `exp2` serves: on a CPU, `exp` takes 100 times as long for
results below fp32's smallest normal number, and a GEMM over such results 200 times as long.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["DEFAULT_WORKSPACE_BYTES", "TorchTiles"]

DEFAULT_WORKSPACE_BYTES = {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
"""By device type: on a CPU a tile should stay in the caches, on a GPU it should fill the chip."""

_LOG2_E = math.log2(math.e)
# Exponents are raised to these at least, so that neither exp2 nor the GEMM after it ever meets a
# subnormal number. A log-sum-exp has a largest term of 1 beside it, so that is far below rounding;
# a gradient gets up to 1.6e-30 for a softmax value that is smaller.
_MIN_EXPONENT = {torch.float32: -100.0, torch.float64: -1000.0}
# With one reference for a whole tile, a sum as small as this is still 2^40 times the least term.
_MIN_SUM = 2.0**-60


@dataclasses.dataclass(frozen=True)
class TorchTiles:
    """Both sweeps of `TileBackend` in plain torch, deterministic, for every device and dtype.

    A tile has `t` columns and `2 t` rows; `t` is the largest multiple of 64 (at least 64) for which
    what the sweep needs at once fits the workspace: two tiles of `2 t^2` values (logits, softmax)
    and operands of `5 t D`, all in the accumulation dtype. Bigger is not better on a CPU: past the
    caches, the elementwise passes cost more than the products. Tall tiles were the fastest shape at
    D = 512, since the columns that all rows meet stay in the cache.

    Args:
        workspace_bytes: The budget in bytes. `None` takes 32 MiB, on CUDA 512 MiB.
    """

    workspace_bytes: int | None = None

    def lse_sweep(
        self,
        rows_bD: Tensor,
        columns_mD: Tensor,
        scale: Tensor,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        diagonal: int | None,
        positive_rows: slice | None = None,
    ) -> None:
        """Add one shard to the log-sum-exps, see `TileBackend.lse_sweep`."""
        for tile in self._tiles(rows_bD, columns_mD, scale, diagonal, positive_rows):
            tile.positives(tile.logits_rc).fill_(-torch.inf)
            parts = _log2_sums_exp2(tile.logits_rc, row_lse_b.dtype, spare_rc=tile.spare_rc)
            totals = (row_lse_b[tile.rows], column_lse_m[tile.columns])
            for total, part in zip(totals, parts, strict=True):
                torch.logaddexp(total, part.div_(_LOG2_E), out=total)

    def grad_sweep(
        self,
        rows_bD: Tensor,
        columns_mD: Tensor,
        scale: Tensor,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_mD: Tensor | None,
        diagonal: int | None,
        positive_rows: slice | None = None,
    ) -> None:
        """Add one shard's negatives to the gradients, see `TileBackend.grad_sweep`."""
        dtype = accumulation_dtype(rows_bD.dtype)
        row_b = (row_lse_b * _LOG2_E).to(dtype)
        column_m = (column_lse_m * _LOG2_E).to(dtype)
        for tile in self._tiles(rows_bD, columns_mD, scale, diagonal, positive_rows):
            by_row_rc = torch.sub(tile.logits_rc, row_b[tile.rows, None], out=tile.spare_rc)
            by_row_rc.clamp_(min=_MIN_EXPONENT[dtype]).exp2_()
            by_column_rc = tile.logits_rc.sub_(column_m[None, tile.columns])
            by_column_rc.clamp_(min=_MIN_EXPONENT[dtype]).exp2_()
            softmax_rc = by_row_rc.add_(by_column_rc)
            tile.positives(softmax_rc).zero_()
            if d_rows_bD is not None:
                d_rows_bD[tile.rows].addmm_(softmax_rc, tile.columns_cD)
            if d_columns_mD is not None:
                d_columns_mD[tile.columns].addmm_(softmax_rc.T, rows_bD[tile.rows].to(dtype))

    def tile_size(self, width: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return `t`, the columns of a tile: the largest with `4 t^2 + 5 t D` values in budget."""
        values = self.budget(device) // accumulation_dtype(dtype).itemsize
        columns = (math.isqrt((5 * width) ** 2 + 16 * values) - 5 * width) // 8
        return max(64, columns // 64 * 64)

    def budget(self, device: torch.device) -> int:
        """Return the workspace on a device, see `TileBackend.budget`."""
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        return DEFAULT_WORKSPACE_BYTES.get(device.type, DEFAULT_WORKSPACE_BYTES["cpu"])

    def _tiles(
        self,
        rows_bD: Tensor,
        columns_mD: Tensor,
        scale: Tensor,
        diagonal: int | None,
        positive_rows: slice | None,
    ) -> Iterator["_Tile"]:
        """Yield every tile of the logits, row by row; each overwrites the one before."""
        (b, width), m = rows_bD.shape, columns_mD.shape[0]
        have = slice(0, b) if positive_rows is None else positive_rows
        dtype = accumulation_dtype(rows_bD.dtype)
        limit = self.tile_size(width, dtype, rows_bD.device)
        height, breadth = _even_step(b, 2 * limit), _even_step(m, limit)
        buffers = rows_bD.new_empty(2, height * breadth, dtype=dtype)
        log2_scale = scale.to(state_dtype(rows_bD.device)) * _LOG2_E
        scale_high = log2_scale.to(dtype)
        scale_low = (log2_scale - scale_high).to(dtype)
        for top in range(0, b, height):
            rows = slice(top, min(top + height, b))
            # The scale goes into the O(b D) operand, not into the b x b product; in two parts, for
            # its rounding would move all logits alike and not cancel against the positives.
            rows_rD = rows_bD[rows].to(dtype)
            scaled_rD = torch.addcmul(rows_rD * scale_high, rows_rD, scale_low)
            for left in range(0, m, breadth):
                columns = slice(left, min(left + breadth, m))
                shape = (rows.stop - rows.start, columns.stop - columns.start)
                logits_rc, spare_rc = buffers[:, : shape[0] * shape[1]].view(2, *shape)
                columns_cD = columns_mD[columns].to(dtype)
                torch.mm(scaled_rD, columns_cD.T, out=logits_rc)
                offset = None if diagonal is None else diagonal + top - left
                having = slice(max(have.start - top, 0), max(have.stop - top, 0))
                yield _Tile(rows, columns, columns_cD, logits_rc, spare_rc, offset, having)


@dataclasses.dataclass
class _Tile:
    """One tile: its place, columns in the accumulation dtype, logits, a spare buffer, positives."""

    rows: slice
    columns: slice
    columns_cD: Tensor
    logits_rc: Tensor
    spare_rc: Tensor
    diagonal: int | None
    positive_rows: slice

    def positives(self, tile_rc: Tensor) -> Tensor:
        """Return the view of the positives, empty if the tile holds none."""
        part_rc = tile_rc[self.positive_rows]
        if self.diagonal is None:
            return tile_rc.new_empty(0)
        offset = self.diagonal + min(self.positive_rows.start, tile_rc.shape[0])
        if not -part_rc.shape[0] < offset < part_rc.shape[1]:
            return tile_rc.new_empty(0)
        return part_rc.diagonal(offset)


def _even_step(length: int, limit: int) -> int:
    """Return a step of at most `limit` that cuts `length` into steps of nearly the same size."""
    return -(-length // -(-length // limit))


def _log2_sums_exp2(
    logits_rc: Tensor, dtype: torch.dtype, spare_rc: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `log2(sum(2^logits))` of the rows and of the columns in `dtype`.

    On a CPU, where looking at a value costs nothing, both are first tried with one reference for
    the whole tile and so with one exponential an element. That is exact unless a row or column
    lies 60 powers of two below the tile's largest logit; then each gets its own reference.
    """
    if logits_rc.device.type == "cpu":
        largest = logits_rc.amax()
        torch.sub(logits_rc, largest, out=spare_rc).clamp_(min=_MIN_EXPONENT[logits_rc.dtype])
        sums = (spare_rc.exp2_().sum(1), spare_rc.sum(0))
        # NaN and infinities fail this comparison too.
        if all(bool(total.amin() >= _MIN_SUM) for total in sums):
            row_r, column_c = (total.to(dtype).log2_().add_(largest) for total in sums)
            return row_r, column_c
    return (
        _log2_sum_exp2(logits_rc, 1, dtype, out=spare_rc),
        _log2_sum_exp2(logits_rc, 0, dtype, out=spare_rc),
    )


def _log2_sum_exp2(logits_rc: Tensor, dim: int, dtype: torch.dtype, out: Tensor) -> Tensor:
    """Return `log2(sum(2^logits))` along `dim` in `dtype`; infinities and NaN as in logsumexp."""
    largest = logits_rc.amax(dim, keepdim=True)
    reference = largest.masked_fill(largest.isinf(), 0.0)
    torch.sub(logits_rc, reference, out=out).clamp_(min=_MIN_EXPONENT[out.dtype]).exp2_()
    lse = out.sum(dim, keepdim=True).to(dtype).log2_().add_(reference)
    return torch.where(largest == -torch.inf, -torch.inf, lse).squeeze(dim)
