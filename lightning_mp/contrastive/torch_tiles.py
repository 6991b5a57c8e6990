"""The tile backend that runs wherever torch runs: GEMMs by its BLAS, softmax by tile.

Shapes:
    b: rows. m: columns. r, c: rows and columns of one tile. D: width.

Logits are in units of log2(e), so that `exp2` serves: on a CPU, `exp` takes 100 times as long for
results below fp32's smallest normal number, and a GEMM over such results 200 times as long.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive.tile_backend import Kept
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
_LARGEST_SPREAD = 60.0
_HEADER = 16  # values, so that tiles stay aligned to 64 bytes


@dataclasses.dataclass(frozen=True)
class TorchTiles:
    """Both sweeps of `TileBackend` in plain torch, deterministic, for every device and dtype.

    A tile has `t` columns and `2 t` rows; `t` is the largest multiple of 64 (at least 64) for which
    what the sweep needs at once fits half of the workspace, or 32 MiB (512 MiB on CUDA): two tiles
    of `2 t^2` values (logits, softmax) and operands of `5 t D`, all in the accumulation dtype.
    Bigger is not better on a CPU: past the caches, the elementwise passes cost more than the
    products. Tall tiles were the fastest shape at D = 512, since the columns that all rows meet
    stay in the cache.

    The rest of the workspace keeps tiles of the first sweep for the second, where a backward is to
    come: `2^(logit - reference)` of tiles that one reference serves, the logits of others. Where
    `b^2` values fit, the loss takes three matrix products for four, and no exponential in the
    backward. A kept tile is the one that would have been worked out again but for the rounding of
    its exponentials, which is fp32's.

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
        kept: Kept | None = None,
    ) -> None:
        """Add one shard to the log-sum-exps, see `TileBackend.lse_sweep`."""
        for tile in self._tiles(rows_bD, columns_mD, scale, diagonal, positive_rows, kept):
            logits_rc = tile.logits()
            tile.positives(logits_rc).fill_(-torch.inf)
            powers_rc = tile.spare_rc if tile.kept is None else tile.kept.values_rc
            sums = _log2_sums_exp2(logits_rc, row_lse_b.dtype, powers_rc)
            if tile.kept is not None:
                tile.kept.note(sums.reference, logits_rc)
            for total, part in (
                (row_lse_b[tile.rows], sums.rows_r),
                (column_lse_m[tile.columns], sums.columns_c),
            ):
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
        kept: Kept | None = None,
    ) -> None:
        """Add one shard's negatives to the gradients, see `TileBackend.grad_sweep`."""
        dtype = accumulation_dtype(rows_bD.dtype)
        row_b, column_m = row_lse_b * _LOG2_E, column_lse_m * _LOG2_E
        for tile in self._tiles(rows_bD, columns_mD, scale, diagonal, positive_rows, kept):
            softmax_rc = _softmax(tile, row_b[tile.rows], column_m[tile.columns])
            tile.positives(softmax_rc).zero_()
            if d_rows_bD is not None:
                d_rows_bD[tile.rows].addmm_(softmax_rc, tile.columns_cD)
            if d_columns_mD is not None:
                d_columns_mD[tile.columns].addmm_(softmax_rc.T, rows_bD[tile.rows].to(dtype))

    def tile_size(self, width: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return `t`, the columns of a tile: the largest with `4 t^2 + 5 t D` values in budget."""
        values = self._tile_budget(device) // accumulation_dtype(dtype).itemsize
        columns = (math.isqrt((5 * width) ** 2 + 16 * values) - 5 * width) // 8
        return max(64, columns // 64 * 64)

    def kept_values(self, b: int, m: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return what the workspace has beside a tile, at most what all tiles take."""
        room = self.budget(device) - self._tile_budget(device)
        # A tile of 128 x 64 or more has a header and a gap of 32 values at most.
        everything = b * m + b * m // 256 + b + m + 32
        size: int = torch.sym_min(everything, room // accumulation_dtype(dtype).itemsize)
        return size

    def multiplied_twice(
        self, b: int, width: int, dtype: torch.dtype, device: torch.device, kept_values: int
    ) -> int:
        """Return how many of the `b^2` logits of one process a memory of that size cannot keep."""
        kept = Kept(torch.empty(kept_values, device="meta"))
        return sum(
            shape[0] * shape[1]
            for shape in (
                (rows.stop - rows.start, columns.stop - columns.start)
                for rows, columns in self._places(b, b, width, dtype, device)
            )
            if kept.take(_HEADER + shape[0] * shape[1]) is None
        )

    def budget(self, device: torch.device) -> int:
        """Return the workspace on a device, see `TileBackend.budget`."""
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        return DEFAULT_WORKSPACE_BYTES.get(device.type, DEFAULT_WORKSPACE_BYTES["cpu"])

    def _tile_budget(self, device: torch.device) -> int:
        """Return the bytes of the workspace for one tile; the others are for tiles to be kept."""
        default = DEFAULT_WORKSPACE_BYTES.get(device.type, DEFAULT_WORKSPACE_BYTES["cpu"])
        return min(self.budget(device) // 2, default)

    def _places(
        self, b: int, m: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[slice, slice]]:
        """Yield rows and columns of every tile, row by row."""
        limit = self.tile_size(width, dtype, device)
        height, breadth = _even_step(b, 2 * limit), _even_step(m, limit)
        for top in range(0, b, height):
            for left in range(0, m, breadth):
                yield slice(top, min(top + height, b)), slice(left, min(left + breadth, m))

    def _tiles(
        self,
        rows_bD: Tensor,
        columns_mD: Tensor,
        scale: Tensor,
        diagonal: int | None,
        positive_rows: slice | None,
        kept: Kept | None,
    ) -> Iterator["_Tile"]:
        """Yield every tile of the logits, row by row; each overwrites the one before."""
        (b, width), m = rows_bD.shape, columns_mD.shape[0]
        have = slice(0, b) if positive_rows is None else positive_rows
        dtype = accumulation_dtype(rows_bD.dtype)
        places = list(self._places(b, m, width, dtype, rows_bD.device))
        first_rows, first_columns = places[0]  # no other is larger
        buffers = rows_bD.new_empty(2, first_rows.stop * first_columns.stop, dtype=dtype)
        log2_scale = scale.to(state_dtype(rows_bD.device)) * _LOG2_E
        scale_high = log2_scale.to(dtype)
        scale_low = (log2_scale - scale_high).to(dtype)
        scaled_rD = rows_bD[:0].to(dtype)
        for rows, columns in places:
            if columns.start == 0:
                # The scale goes into the O(b D) operand, not into the b x b product; in two parts,
                # for its rounding would move all logits alike and not cancel against the positives.
                rows_rD = rows_bD[rows].to(dtype)
                scaled_rD = torch.addcmul(rows_rD * scale_high, rows_rD, scale_low)
                del rows_rD
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            logits_rc, spare_rc = buffers[:, : shape[0] * shape[1]].view(2, *shape)
            offset = None if diagonal is None else diagonal + rows.start - columns.start
            having = slice(max(have.start - rows.start, 0), max(have.stop - rows.start, 0))
            yield _Tile(
                rows, columns, scaled_rD, columns_mD[columns].to(dtype), logits_rc, spare_rc,
                offset, having, _KeptTile.of(kept, shape),
            )  # fmt: skip


class _KeptTile:
    """The place of one tile in the memory that lasts from the first sweep to the second.

    It holds `2^(logit - reference)`, or the logits where no reference serves the whole tile; the
    reference, or NaN, stands in the header.
    """

    def __init__(self, values: Tensor, shape: tuple[int, int]) -> None:
        self._header = values[0]
        self.values_rc = values[_HEADER:].view(shape)

    @classmethod
    def of(cls, kept: Kept | None, shape: tuple[int, int]) -> "_KeptTile | None":
        """Take the next place, if there is one."""
        values = None if kept is None else kept.take(_HEADER + shape[0] * shape[1])
        return None if values is None else cls(values, shape)

    @property
    def reference(self) -> Tensor | None:
        """What the values refer to, in powers of two; `None` if they are logits."""
        if self._header.device.type != "cpu" or bool(self._header.isnan()):
            return None
        return self._header

    def note(self, reference: Tensor | None, logits_rc: Tensor) -> None:
        """Say what the values refer to; without a reference, keep the logits."""
        if reference is None:
            self.values_rc.copy_(logits_rc)
            self._header.fill_(math.nan)
        else:
            self._header.copy_(reference)


@dataclasses.dataclass
class _Tile:
    """One tile: its place, operands in the accumulation dtype, two buffers, positives, kept."""

    rows: slice
    columns: slice
    scaled_rD: Tensor
    columns_cD: Tensor
    logits_rc: Tensor
    spare_rc: Tensor
    diagonal: int | None
    positive_rows: slice
    kept: _KeptTile | None

    def logits(self) -> Tensor:
        """Work the logits out, in the first buffer."""
        return torch.mm(self.scaled_rD, self.columns_cD.T, out=self.logits_rc)

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


class _Sums(NamedTuple):
    """`log2(sum(2^logits))` of rows and columns; the reference if one served the whole tile."""

    rows_r: Tensor
    columns_c: Tensor
    reference: Tensor | None


def _log2_sums_exp2(logits_rc: Tensor, dtype: torch.dtype, powers_rc: Tensor) -> _Sums:
    """Return the sums of a tile in `dtype`.

    On a CPU, where looking at a value costs nothing, both are first tried with one reference for
    the whole tile and so with one exponential an element, which `powers_rc` then holds. That is
    exact unless a row or column lies 60 powers of two below the tile's largest logit; then each
    gets its own reference.
    """
    if logits_rc.device.type == "cpu":
        largest = logits_rc.amax()
        torch.sub(logits_rc, largest, out=powers_rc).clamp_(min=_MIN_EXPONENT[logits_rc.dtype])
        sums = (powers_rc.exp2_().sum(1), powers_rc.sum(0))
        # NaN and infinities fail this comparison too.
        if all(bool(total.amin() >= _MIN_SUM) for total in sums):
            row_r, column_c = (total.to(dtype).log2_().add_(largest) for total in sums)
            return _Sums(row_r, column_c, largest)
    return _Sums(
        _log2_sum_exp2(logits_rc, 1, dtype, out=powers_rc),
        _log2_sum_exp2(logits_rc, 0, dtype, out=powers_rc),
        None,
    )


def _log2_sum_exp2(logits_rc: Tensor, dim: int, dtype: torch.dtype, out: Tensor) -> Tensor:
    """Return `log2(sum(2^logits))` along `dim` in `dtype`; infinities and NaN as in logsumexp."""
    largest = logits_rc.amax(dim, keepdim=True)
    reference = largest.masked_fill(largest.isinf(), 0.0)
    torch.sub(logits_rc, reference, out=out).clamp_(min=_MIN_EXPONENT[out.dtype]).exp2_()
    lse = out.sum(dim, keepdim=True).to(dtype).log2_().add_(reference)
    return torch.where(largest == -torch.inf, -torch.inf, lse).squeeze(dim)


def _softmax(tile: _Tile, row_r: Tensor, column_c: Tensor) -> Tensor:
    """Return `2^(logit - row) + 2^(logit - column)` in the second buffer, positives as they come.

    Powers against one reference `t` give both by a factor for each row and one for each column:
    `2^(logit - t) (2^(t - row) + 2^(t - column))`. No row or column that a kept reference served
    lies more than 60 below it.
    """
    least = _MIN_EXPONENT[tile.spare_rc.dtype]
    reference = None if tile.kept is None else tile.kept.reference
    if tile.kept is not None and reference is not None:
        powers_rc = tile.kept.values_rc
    else:
        powers_rc = tile.logits() if tile.kept is None else tile.kept.values_rc
        reference = _shared_reference(row_r, column_c)
        if reference is not None:
            torch.sub(powers_rc, reference, out=tile.logits_rc)
            powers_rc = tile.logits_rc.clamp_(min=least).exp2_()
    if reference is None:
        row_r, column_c = (power.to(tile.spare_rc.dtype) for power in (row_r, column_c))
        by_row_rc = torch.sub(powers_rc, row_r[:, None], out=tile.spare_rc)
        by_column_rc = torch.sub(powers_rc, column_c[None], out=tile.logits_rc)
        by_row_rc.clamp_(min=least).exp2_()
        return by_row_rc.add_(by_column_rc.clamp_(min=least).exp2_())
    row_r, column_c = (
        (reference - power).clamp_(min=least).exp2_().to(tile.spare_rc.dtype)
        for power in (row_r, column_c)
    )
    torch.mul(powers_rc, row_r[:, None], out=tile.spare_rc)
    return tile.spare_rc.addcmul_(powers_rc, column_c[None])


def _shared_reference(row_r: Tensor, column_c: Tensor) -> Tensor | None:
    """Return the least of the log-sum-exps if the largest is no more than 60 above it, on a CPU.

    Every logit is below its row's, so that no power is above 2^60, and no factor below 2^-60.
    """
    if row_r.device.type != "cpu":
        return None
    both = torch.stack([*row_r.aminmax(), *column_c.aminmax()])
    least = both.amin()
    is_near = bool(both.amax() - least <= _LARGEST_SPREAD)  # NaN and infinities fail this
    return least.float() if is_near else None
