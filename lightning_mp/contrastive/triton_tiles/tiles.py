"""The tile backend for NVIDIA GPUs: two fused sweeps in Triton, gradient products by cuBLAS.

Shapes:
    b: rows. m: columns of the shard. D: width. n, c: rows and columns of one block.
    R: parts of a sum.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_mp.contrastive.tile_backend import (
    Finished,
    Ids,
    Kept,
    Limits,
    Maxima,
    PairTerms,
    Prepared,
)
from lightning_mp.contrastive.triton_tiles.autotune import fastest
from lightning_mp.contrastive.triton_tiles.blocks import (
    Block,
    block_shape,
    blocks_of,
    whole_waves,
)
from lightning_mp.contrastive.triton_tiles.configs import Kernel, TileConfig, arch_of, find_configs
from lightning_mp.contrastive.triton_tiles.gradient_kernels import SoftmaxFactors, finish
from lightning_mp.contrastive.triton_tiles.launch import multiprocessors
from lightning_mp.contrastive.triton_tiles.lse_kernels import add_lse, lse_bytes_per_value
from lightning_mp.contrastive.triton_tiles.operands import (
    Precision,
    TileDtype,
)
from lightning_mp.contrastive.triton_tiles.pair_kernels import pair_terms, prepare
from lightning_mp.contrastive.triton_tiles.sigmoid_kernels import add_sigmoid
from lightning_mp.contrastive.triton_tiles.softmax_kernels import write_softmax
from lightning_mp.contrastive.triton_tiles.workspace import Softmax, Workspace
from lightning_mp.numerics.floats import sum_rounding
from lightning_mp.numerics.triton_support import launching_on

__all__ = ["DEFAULT_WORKSPACE_BYTES", "TritonTiles"]

DEFAULT_WORKSPACE_BYTES = 544 * 2**20
"""Room for 16,896 x 16,384 softmax values of two bytes: whole waves of cuBLAS tiles on 132 SMs."""

_LOG2_E = math.log2(math.e)
_TUNED_ROWS = 8192
# Products of up to this many multiplications take a GPU 0.1 ms each, at half of an H100's rate, and
# the four of a loss less than the host for its launches. A second exponential of 2^24 logits takes
# the GPU 5 us; the twin that returns at once takes the host 40.
_HOST_BOUND = 2**34
# Of a largest logit in nats: its distance from the reference, below 2^7, is rounded by up to 2^-18
# with each part of the scale, and its power by 2^-22.
_MAXIMUM_ROUNDING = 2 * 2.0**-18


@dataclasses.dataclass(frozen=True)
class TritonTiles:
    """Both sweeps of `TileBackend` in Triton, for CUDA devices of compute capability 8.0 and up.

    The forward sweep multiplies once and takes one exponential an element for rows and columns
    alike. The gradient sweep multiplies once more, writes the softmax of a block in 16 bit, and
    leaves both gradient products to cuBLAS, summed in fp32. Nothing depends on the order in which
    programs run, so results repeat bit for bit, and nothing waits for the device.

    Args:
        workspace_bytes: The budget in bytes for partial sums or for a block of the softmax, one
            tile at least. `None` takes 544 MiB.
        tile_dtype: What is multiplied, see `ContrastiveLoss`.
        autotune: Time the tile shapes of the table at the first call for a dtype and width, which
            waits for the device, and keep the fastest.
        arch: Rows of the table to use, 80 or 90; `None` asks the device.
    """

    workspace_bytes: int | None = None
    tile_dtype: TileDtype = "auto"
    autotune: bool = False
    arch: int | None = None
    _tuned: dict[tuple[Kernel, Precision, int, torch.device], TileConfig] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        ids: Ids | None = None,
        prepared: Prepared | None = None,
        limits: Limits | None = None,
        maxima: Maxima | None = None,
        fresh: tuple[bool, bool] = (False, False),
    ) -> None:
        """Add one shard to the log-sum-exps, see `TileBackend.lse_sweep`."""
        codes = _short(ids)
        precision = Precision.of(rows_bD.dtype, self.tile_dtype)
        units = (precision.unit(rows_bD), precision.unit(columns_mD))
        if prepared is None:
            prepared = self.prepare(rows_bD, columns_mD, scale)
        log2_scale, reference = prepared.own
        if precision.is_split:
            log2_scale = _log2_parts(scale, units)

        def add(
            block: Block, lses: tuple[Tensor, Tensor], config: TileConfig, maxima: Maxima | None
        ) -> None:
            firsts = block.columns.start == 0, block.rows.start == 0
            add_lse(
                block.row_operand.tiles_nk, block.column_operand.tiles_nk, log2_scale, reference,
                *lses, block.diagonal, config, split_scale=precision.is_split,
                ids=_ids_of(block, codes), maxima=maxima,
                fresh=(fresh[0] and firsts[0], fresh[1] and firsts[1]),
            )  # fmt: skip

        def make_trial() -> Callable[[TileConfig], None]:
            block = _first_block(rows_bD, columns_mD, precision, units)
            lses = row_lse_b[block.rows].clone(), column_lse_m[block.columns].clone()
            return lambda config: add(block, lses, config, None)

        with launching_on(rows_bD.device):
            config = self._choose("lse", precision, rows_bD, make_trial)
            bytes_per_value = lse_bytes_per_value(config, with_maxima=maxima is not None)
            shape = self._block(rows_bD, columns_mD, precision, bytes_per_value)
            for block in blocks_of(
                rows_bD, columns_mD, shape, precision, units, diagonal, positive_rows
            ):
                lses = row_lse_b[block.rows], column_lse_m[block.columns]
                own = None if maxima is None else maxima.block(block.rows, block.columns)
                add(block, lses, config, own)

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
        ids: Ids | None = None,
        limits: Limits | None = None,
        fresh: tuple[bool, bool] = (False, False),
    ) -> None:
        """Add one shard's negatives to the gradients, see `TileBackend.grad_sweep`."""
        codes = _short(ids)
        precision = Precision.of(rows_bD.dtype, self.tile_dtype)
        units = (precision.unit(rows_bD), precision.unit(columns_mD))

        def write(block: Block, softmax: Softmax, narrow: list[TileConfig]) -> None:
            write_softmax(
                block.row_operand.tiles_nk, block.column_operand.tiles_nk, log2_scale,
                factors.block(block.rows, block.columns), softmax.high_nc, softmax.low_nc,
                block.diagonal, [*narrow, wide], split_scale=precision.is_split,
                ids=_ids_of(block, codes),
            )  # fmt: skip

        def make_trial() -> Callable[[TileConfig], None]:
            block = _first_block(rows_bD, columns_mD, precision, units)
            softmax = workspace.block(block)
            return lambda config: write(block, softmax, [config])

        with launching_on(rows_bD.device):
            is_small = rows_bD.numel() * len(columns_mD) <= _HOST_BOUND
            factors = SoftmaxFactors.of(
                row_lse_b, column_lse_m, scale, precision.softmax_exponent, always_wide=is_small
            )
            log2_scale = factors.log2_scale
            if precision.is_split:
                log2_scale = _log2_parts(scale, units)
            shape = self._softmax_block(rows_bD, columns_mD, precision)
            workspace = Workspace.make(shape, precision, rows_bD.device)
            wide = self._choose("softmax_wide", precision, rows_bD)
            narrow = [] if is_small else [self._choose("softmax", precision, rows_bD, make_trial)]
            for block in blocks_of(
                rows_bD, columns_mD, shape, precision, units, diagonal, positive_rows
            ):
                softmax = workspace.block(block)
                write(block, softmax, narrow)
                softmax.add_products(block, d_rows_bD, d_columns_mD, fresh)

    def sigmoid_sweep(
        self,
        rows_bD: Tensor,
        columns_mD: Tensor,
        scale: Tensor,
        bias: Tensor,
        totals_2: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_mD: Tensor | None,
        diagonal: int | None,
        positive_rows: slice | None = None,
        ids: Ids | None = None,
        maxima: Maxima | None = None,
    ) -> None:
        """Add one shard's negatives to loss and gradients, see `TileBackend.sigmoid_sweep`."""
        codes = _short(ids)
        precision = Precision.of(rows_bD.dtype, self.tile_dtype)
        units = (precision.unit(rows_bD), precision.unit(columns_mD))
        log2_scale = _log2_parts(scale, units)
        log2_bias = (bias.double() * _LOG2_E).float().reshape(1)
        with launching_on(rows_bD.device):
            shape = self._softmax_block(rows_bD, columns_mD, precision)
            workspace = Workspace.make(shape, precision, rows_bD.device)
            config = self._choose("softmax_wide", precision, rows_bD)
            for block in blocks_of(
                rows_bD, columns_mD, shape, precision, units, diagonal, positive_rows
            ):
                weights = workspace.block(block)
                add_sigmoid(
                    block.row_operand.tiles_nk, block.column_operand.tiles_nk, log2_scale,
                    log2_bias, totals_2, weights.high_nc, weights.low_nc, block.diagonal, config,
                    exponent=weights.exponent, split_scale=precision.is_split,
                    maxima=None if maxima is None else maxima.block(block.rows, block.columns),
                    ids=_ids_of(block, codes),
                )  # fmt: skip
                weights.add_products(block, d_rows_bD, d_columns_mD)

    def prepare(self, rows_bD: Tensor, columns_nD: Tensor, scale: Tensor) -> Prepared:
        """Work out what all shards need, see `TileBackend.prepare`."""
        with launching_on(rows_bD.device):
            return prepare(rows_bD, columns_nD, scale)

    def pair_terms(
        self,
        row_neg_b: Tensor,
        column_neg_Rn: Tensor,
        pos_b: Tensor,
        wanted: tuple[bool, bool],
        terms: int,
    ) -> PairTerms:
        """Return the terms of the pairs, see `TileBackend.pair_terms`."""
        with launching_on(pos_b.device):
            return pair_terms(row_neg_b, column_neg_Rn, pos_b, wanted, terms)

    def finish(
        self,
        rows_bD: Tensor,
        columns_nD: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_nD: Tensor | None,
        weight_b: Tensor,
        scale: Tensor,
        cotangent: Tensor,
        terms: int,
        ranks: int,
        wants_scale: bool,
    ) -> Finished:
        """Finish the gradients, see `TileBackend.finish`."""
        with launching_on(rows_bD.device):
            return finish(
                rows_bD, columns_nD, d_rows_bD, d_columns_nD, weight_b, scale, cotangent, terms,
                ranks, wants_scale,
            )  # fmt: skip

    def rounding(self, width: int, dtype: torch.dtype) -> tuple[float, float]:
        """Return what a logit may be off by, see `TileBackend.rounding`."""
        operands = Precision.of(dtype, self.tile_dtype).operand_rounding(dtype)
        return sum_rounding(width, torch.float32) + operands, _MAXIMUM_ROUNDING

    def budget(self, device: torch.device) -> int:
        """Return the workspace, see `TileBackend.budget`."""
        return DEFAULT_WORKSPACE_BYTES if self.workspace_bytes is None else self.workspace_bytes

    def kept_values(self, b: int, m: int, dtype: torch.dtype, device: torch.device) -> int:
        """Keep nothing: a logit of 100 in 16 bit is off by a quarter, in fp32 it is 4 bytes."""
        return 0

    def _block(
        self, rows_bD: Tensor, columns_mD: Tensor, precision: Precision, bytes_per_value: float
    ) -> tuple[int, int]:
        """Return the shape of blocks that fit the budget with their operands."""
        edge = max(precision.operand_bytes(x) for x in (rows_bD, columns_mD))
        values = int(self.budget(rows_bD.device) / bytes_per_value)
        return block_shape(len(rows_bD), len(columns_mD), values, int(edge / bytes_per_value))

    def _softmax_block(
        self, rows_bD: Tensor, columns_mD: Tensor, precision: Precision
    ) -> tuple[int, int]:
        b, width = rows_bD.shape
        rows, columns = self._block(rows_bD, columns_mD, precision, precision.softmax_bytes)
        if rows < b:
            rows = whole_waves(rows, width, multiprocessors(rows_bD.device))
        return rows, columns

    def _choose(
        self,
        kernel: Kernel,
        precision: Precision,
        rows_bD: Tensor,
        make_trial: Callable[[], Callable[[TileConfig], None]] | None = None,
    ) -> TileConfig:
        """Return the row of the table to use: the first, or the fastest where that is asked for."""
        width, device = rows_bD.shape[1], rows_bD.device
        arch = arch_of(device) if self.arch is None else self.arch
        configs = find_configs(kernel, arch, precision.operand, width)
        if not self.autotune or make_trial is None or len(configs) == 1:
            return configs[0]
        key = (kernel, precision, width, device)
        if key not in self._tuned:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return configs[0]  # nothing can be timed while a graph is made
            self._tuned[key] = fastest(configs, make_trial(), device)
        return self._tuned[key]


def _first_block(
    rows_bD: Tensor,
    columns_mD: Tensor,
    precision: Precision,
    units: tuple[Tensor | None, Tensor | None],
) -> Block:
    """Return a block to try tile shapes on."""
    shape = (_TUNED_ROWS, _TUNED_ROWS)
    parts = (rows_bD[:_TUNED_ROWS], columns_mD[:_TUNED_ROWS])
    return next(blocks_of(*parts, shape, precision, units, None))


def _short(ids: Ids | None) -> Ids | None:
    """Return numbers of 32 bits that are equal where ids are; tiles hold many in registers."""
    if ids is None:
        return None
    known = ids.rows_b.sort().values
    # The first place among the rows'; the columns' that are not among them all get the same.
    columns_m = torch.searchsorted(known, ids.columns_m, out_int32=True)
    is_known = known[columns_m.clamp(max=len(known) - 1)] == ids.columns_m
    rows_b = torch.searchsorted(known, ids.rows_b, out_int32=True)
    return Ids(rows_b, columns_m.where(is_known, -1))


def _ids_of(block: Block, ids: Ids | None) -> Ids | None:
    return None if ids is None else Ids(ids.rows_b[block.rows], ids.columns_m[block.columns])


def _log2_parts(scale: Tensor, units: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """Return `scale log2(e) / (unit unit')` as two fp32 values whose sum has 48 bits."""
    exact = scale.double().reshape(()) * _LOG2_E
    for unit in units:
        if unit is not None:
            exact = exact / unit.double()
    high = exact.float()
    return torch.stack([high, (exact - high.double()).float()])
