"""The tile backend in plain torch: matrix products by its BLAS, softmax tile by tile.

Shapes:
    b: rows. m: columns. r, c: rows and columns of one tile. D: width.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import (
    Derivatives,
    Logits,
    Prepared,
    StoredTiles,
    TileBackend,
    Vectors,
)
from lightning_mp.contrastive._tiles.torch_tile import (
    HEADER,
    Peaks,
    StoredTile,
    Tile,
    log2_sums_exp2,
    peaks_of,
    sigmoid,
    softmax,
    thresholded_sums,
)
from lightning_mp.numerics.floats import ACCUMULATION_DTYPES, state_dtype, sum_rounding

__all__ = ["DEFAULT_WORKSPACE_BYTES", "TorchTiles"]

DEFAULT_WORKSPACE_BYTES = {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
"""By device type: a tile should fit the caches of a CPU, and fill a GPU."""

_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class TorchTiles(TileBackend):
    """Both sweeps of `TileBackend` in plain torch, deterministic, for every device and dtype.

    A tile has `t` columns and `2 t` rows. `t` is the largest multiple of 64 (at least 64) for which
    two tiles of `2 t^2` values (logits, softmax) and operands of `5 t D` values, all in the
    accumulation dtype, fit half of the workspace, and at most 32 MiB (512 MiB on CUDA). Larger
    tiles are slower on a CPU: beyond the caches, elementwise passes cost more than products. Tall
    tiles were the fastest shape at D = 512, since their columns stay in the cache.

    If a backward can follow, the rest of the workspace stores tiles of the first sweep for the
    second: `2^(logit - reference)` if the tile has a shared reference, otherwise logits. If `b^2`
    values fit, the loss takes three matrix products instead of four, and no exponential in the
    second sweep. A stored tile differs from a recomputed one by the rounding of its exponentials.
    """

    workspace_bytes: int | None = None  # `None`: see `DEFAULT_WORKSPACE_BYTES`

    def lse_sweep(self, logits: Logits, lses: Vectors, prepared: Prepared | None = None) -> None:
        # Uninitialized memory may hold NaN.
        for total, is_fresh in zip(lses, logits.fresh, strict=True):
            if is_fresh:
                total.fill_(-torch.inf)
        dtype = lses.rows_b.dtype
        for tile in self._tiles(logits):
            logits_rc = tile.logits()
            powers_rc = tile.spare_rc if tile.stored is None else tile.stored.values_rc
            if tile.thresholds is None:
                tile.mask(logits_rc, -torch.inf)
                peaks = None
                if logits.maxima is not None:
                    peaks = peaks_of(logits_rc)
                    _raise_maxima(logits.maxima, tile, peaks)
                sums = log2_sums_exp2(logits_rc, dtype, powers_rc, peaks)
            else:
                sums = thresholded_sums(tile, tile.thresholds, dtype)
            if tile.stored is not None:
                tile.stored.store(sums.reference, logits_rc)
            for total, part in (
                (lses.rows_b[tile.rows], sums.rows_r),
                (lses.columns_m[tile.columns], sums.columns_c),
            ):
                torch.logaddexp(total, part.div_(_LOG2_E), out=total)

    def grad_sweep(self, logits: Logits, lses: Vectors, gradients: Derivatives) -> None:
        row_b, column_m = (lse * _LOG2_E for lse in lses)

        def weights_of(tile: Tile) -> Tensor:
            return softmax(tile, row_b[tile.rows], column_m[tile.columns])

        self._multiply(logits, weights_of, gradients)

    def sigmoid_sweep(
        self, logits: Logits, bias: Tensor, totals_2: Tensor, gradients: Derivatives
    ) -> None:
        log2_bias = bias * _LOG2_E

        def weights_of(tile: Tile) -> Tensor:
            logits_rc = tile.logits()
            if logits.maxima is not None:
                tile.mask(logits_rc, -torch.inf)
                _raise_maxima(logits.maxima, tile, peaks_of(logits_rc))
            weights_rc, losses = sigmoid(tile, log2_bias, logits.weights_b)
            totals_2.add_(torch.stack([losses, weights_rc.sum()]).to(totals_2.dtype))
            return weights_rc

        self._multiply(logits, weights_of, gradients)

    def rounding(
        self, width: int, dtype: torch.dtype, *, of_guides: bool = False
    ) -> tuple[float, float]:
        return sum_rounding(width, ACCUMULATION_DTYPES[dtype]), 0.0

    def tile_size(self, width: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return `t`, the columns of a tile: the largest with `4 t^2 + 5 t D` values in budget."""
        values = self._tile_budget(device) // ACCUMULATION_DTYPES[dtype].itemsize
        # The positive root of the quadratic, in integers.
        columns = (math.isqrt((5 * width) ** 2 + 16 * values) - 5 * width) // 8
        return max(64, columns // 64 * 64)

    def stored_values(self, b: int, m: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the rest of the workspace beside a tile, at most the size of all tiles."""
        rest = self.budget(device) - self._tile_budget(device)
        # A tile of at least 128 x 64 values has a header and a gap of at most 32 values.
        everything = b * m + b * m // 256 + b + m + 32
        # `min` would branch on sizes, which may be symbolic.
        size: int = torch.sym_min(everything, rest // ACCUMULATION_DTYPES[dtype].itemsize)
        return size

    def multiplied_twice(
        self, b: int, m: int, width: int, dtype: torch.dtype, device: torch.device, memory: int
    ) -> int:
        # Takes memory as the sweep does, on the meta device.
        stored = StoredTiles(torch.empty(memory, device="meta"))
        sizes = (
            (rows.stop - rows.start) * (columns.stop - columns.start)
            for rows, columns in self._tile_slices(b, m, width, dtype, device)
        )
        return sum(size for size in sizes if stored.take(HEADER + size) is None)

    def budget(self, device: torch.device) -> int:
        return _default_bytes(device) if self.workspace_bytes is None else self.workspace_bytes

    def _tile_budget(self, device: torch.device) -> int:
        """Return the bytes of the workspace for one tile; the rest is for stored tiles."""
        return min(self.budget(device) // 2, _default_bytes(device))

    def _tile_slices(
        self, b: int, m: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[slice, slice]]:
        # Even steps, because a last tile of a few rows takes as many calls as a full one.
        limit = self.tile_size(width, dtype, device)
        height, breadth = _even_step(b, 2 * limit), _even_step(m, limit)
        for top in range(0, b, height):
            for left in range(0, m, breadth):
                yield slice(top, min(top + height, b)), slice(left, min(left + breadth, m))

    def _tiles(self, logits: Logits) -> Iterator[Tile]:
        """Yield all tiles of the logits, row by row; each overwrites the one before."""
        rows_bD, columns_mD, scale, diagonal, positive_rows, ids, thresholds, stored, *_ = logits
        (b, width), m = rows_bD.shape, columns_mD.shape[0]
        positives = slice(0, b) if positive_rows is None else positive_rows
        dtype = ACCUMULATION_DTYPES[rows_bD.dtype]
        slices = list(self._tile_slices(b, m, width, dtype, rows_bD.device))
        first_rows, first_columns = slices[0]  # the largest tile
        buffers = rows_bD.new_empty(2, first_rows.stop * first_columns.stop, dtype=dtype)
        log2_scale = scale.to(state_dtype(rows_bD.device)) * _LOG2_E
        scale_high = log2_scale.to(dtype)
        scale_low = (log2_scale - scale_high).to(dtype)
        scaled_rD = rows_bD[:0].to(dtype)
        for rows, columns in slices:
            # The tiles of the same rows follow each other and share one scaled copy of the rows.
            if columns.start == 0:
                # The scale multiplies the O(b D) operand, not the b x b product. It has two parts,
                # since its rounding would shift all logits alike, but not the positives.
                rows_rD = rows_bD[rows].to(dtype)
                scaled_rD = torch.addcmul(rows_rD * scale_high, rows_rD, scale_low)
                del rows_rD  # freed before the tile is computed
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            logits_rc, spare_rc = buffers[:, : shape[0] * shape[1]].view(2, *shape)
            offset = None if diagonal is None else diagonal + rows.start - columns.start
            first, last = (max(at - rows.start, 0) for at in (positives.start, positives.stop))
            values = None if stored is None else stored.take(HEADER + shape[0] * shape[1])
            stored_tile = None
            if values is not None:
                stored_tile = StoredTile(values[0], values[HEADER:].view(shape))
            yield Tile(
                rows, columns, scaled_rD, columns_mD[columns].to(dtype), logits_rc, spare_rc,
                offset, slice(first, last), stored_tile,
                None if ids is None else ids.block(rows, columns),
                None if thresholds is None else thresholds.block(rows, columns), log2_scale,
            )  # fmt: skip

    def _multiply(
        self, logits: Logits, weights_of: Callable[[Tile], Tensor], gradients: Derivatives
    ) -> None:
        """Add `weights @ columns` and `weights.T @ rows` of all tiles to the gradients.

        `weights_of` returns `B dL/dS` of a tile, 0 for masked pairs.
        """
        d_rows_bD, d_columns_mD = gradients
        for gradient, is_fresh in zip(gradients, logits.fresh, strict=True):
            if gradient is not None and is_fresh:
                gradient.zero_()
        for tile in self._tiles(logits):
            weights_rc = weights_of(tile)
            if d_rows_bD is not None:
                d_rows_bD[tile.rows].addmm_(weights_rc, tile.columns_cD)
            if d_columns_mD is not None:
                # Not the tile's scaled rows: gradients are multiplied by the scale after the sweep.
                rows_rD = logits.rows_bD[tile.rows].to(weights_rc.dtype)
                d_columns_mD[tile.columns].addmm_(weights_rc.T, rows_rD)


def _raise_maxima(maxima: Vectors, tile: Tile, peaks: Peaks) -> None:
    """Raise the maxima of a tile's rows and columns to its peaks, given in powers of two."""
    maxima.block(tile.rows, tile.columns).raise_to(*peaks, 1 / _LOG2_E)


def _default_bytes(device: torch.device) -> int:
    return DEFAULT_WORKSPACE_BYTES.get(device.type, DEFAULT_WORKSPACE_BYTES["cpu"])


def _even_step(length: int, limit: int) -> int:
    """Return a step of at most `limit` that divides `length` into nearly equal steps."""
    return -(-length // -(-length // limit))
