"""The tile backend for NVIDIA GPUs: two fused sweeps in Triton, gradient products by cuBLAS.

Shapes:
    b: rows. m: columns of the shard. D: width. n, c: rows and columns of one block.
    R: parts of a sum.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.literals import TileDtype
from lightning_mp.contrastive._tiles.tile_backend import (
    Logits,
    Maxima,
    Prepared,
    StoredTiles,
    TileBackend,
)
from lightning_mp.contrastive._tiles.triton_tiles.block import Block, Weights, Workspace
from lightning_mp.contrastive._tiles.triton_tiles.choices import chosen_once
from lightning_mp.contrastive._tiles.triton_tiles.configs import (
    Kernel,
    TileConfig,
    arch_of,
    fastest,
    find_configs,
    find_stored_configs,
    find_threshold_config,
)
from lightning_mp.contrastive._tiles.triton_tiles.kernel_logits import (
    KernelLogits,
    block_shape,
    whole_waves,
)
from lightning_mp.contrastive._tiles.triton_tiles.lse_kernels import add_lse, lse_bytes_per_value
from lightning_mp.contrastive._tiles.triton_tiles.operands import Precision
from lightning_mp.contrastive._tiles.triton_tiles.pair_kernels import finish, pair_terms, prepare
from lightning_mp.contrastive._tiles.triton_tiles.sigmoid_kernels import add_sigmoid
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import (
    SoftmaxFactors,
    write_softmax,
)
from lightning_mp.numerics.floats import sum_rounding
from lightning_mp.numerics.triton_support import launching_on

__all__ = ["DEFAULT_WORKSPACE_BYTES", "TritonTiles"]

DEFAULT_WORKSPACE_BYTES = 544 * 2**20
"""Room for 16,896 x 16,384 softmax values of two bytes: whole waves of cuBLAS tiles on 132 SMs."""

# What is kept leaves this to blocks, or half of the workspace. Each block reads and writes
# gradients beside its products, small ones more often. This is 3,925 x 3,925 at D = 768.
_BLOCK_BYTES = 2**27
_LOG2_E = math.log2(math.e)
# Products of up to this many multiplications take a GPU 0.1 ms each, at half of an H100's rate, and
# the four of a loss less than the host for its launches. A second exponential of 2^24 logits takes
# the GPU 5 us; the twin that returns at once takes the host 40.
_HOST_BOUND = 2**34
# Of a largest logit in nats: its distance from the reference, below 2^7, is rounded by up to 2^-18
# with each part of the scale, and its power by 2^-22.
_MAXIMUM_ROUNDING = 2 * 2.0**-18


@dataclasses.dataclass(frozen=True)
class TritonTiles(TileBackend):
    """Both sweeps of `TileBackend` in Triton, for CUDA devices of compute capability 8.0 and up.

    The forward sweep multiplies once and takes one exponential an element for rows and columns
    alike. The gradient sweep multiplies once more, writes the softmax of a block in 16 bit, and
    leaves both gradient products to cuBLAS, summed in fp32. Nothing depends on the order in which
    programs run, so results repeat bit for bit, and nothing waits for the device.

    The products of fp32 features, which are three of 16-bit halves, are kept from the first sweep
    for the second: those of all rows, or of as many of the first ones, in multiples of 128, as fit
    half of the workspace (all but 128 MiB, if that is less), where that is a quarter at least.

    Args:
        workspace_bytes: The budget in bytes for products that are kept, and for partial sums or a
            block of the softmax, one tile at least. `None` takes 544 MiB.
        tile_dtype: What is multiplied, see `ContrastiveLoss`.
        autotune: Time the tile shapes of the table at the first call for a dtype and width, which
            waits for the device, and keep the fastest, for later processes too (`choices.py`).
        arch: Rows of the table to use, 80 or 90; `None` asks the device.
    """

    workspace_bytes: int | None = None
    tile_dtype: TileDtype = "auto"
    autotune: bool = False
    arch: int | None = None
    # What has been timed makes no difference between two that are chosen alike.
    _tuned: dict[tuple[Kernel, Precision, int, torch.device], TileConfig] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    prepare = staticmethod(prepare)
    pair_terms = staticmethod(pair_terms)
    finish = staticmethod(finish)

    def lse_sweep(
        self,
        logits: Logits,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        prepared: Prepared | None = None,
        maxima: Maxima | None = None,
    ) -> None:
        """Add one shard to the log-sum-exps, see `TileBackend.lse_sweep`."""
        cut = KernelLogits.of(logits, self.tile_dtype)
        if prepared is None:
            prepared = self.prepare(*logits[:3])
        log2_scale, reference = prepared.own
        if cut.precision.is_split:  # what was prepared knows no units of operands
            log2_scale = cut.log2_scale()

        def try_out(block: Block, config: TileConfig) -> None:
            row_n, column_c = row_lse_b[block.rows], column_lse_m[block.columns]
            # What has been summed so far is not to be touched.
            row_n, column_c = torch.empty_like(row_n), torch.empty_like(column_c)
            add_lse(block, log2_scale, reference, row_n, column_c, config)

        with launching_on(row_lse_b.device):
            if len(cut.stored_rm) > 0:
                config = self._stored_configs(cut)[0]
            elif logits.thresholds is None:
                # With maxima or ids some shapes that are timed against the first would spill.
                is_bare = maxima is None and logits.ids is None
                config = self._choose("lse", cut, try_out if is_bare else None)
            else:
                arch, width = self._arch(row_lse_b.device), logits.rows_bD.shape[1]
                config = find_threshold_config(
                    arch,
                    cut.precision.operand,
                    width,
                    has_ids=logits.ids is not None,
                    has_guides=cut.guides is not None,
                )
            # No block of logits is ever written here: only what tiles leave of it.
            bytes_per_value = lse_bytes_per_value(config, with_maxima=maxima is not None)
            for block in cut.blocks(self._block(cut, bytes_per_value)):
                add_lse(
                    block, log2_scale, reference, row_lse_b[block.rows],
                    column_lse_m[block.columns], config,
                    None if maxima is None else maxima.block(block.rows, block.columns),
                )  # fmt: skip

    def grad_sweep(
        self,
        logits: Logits,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_mD: Tensor | None,
    ) -> None:
        """Add one shard's negatives to the gradients, see `TileBackend.grad_sweep`."""
        cut = KernelLogits.of(logits, self.tile_dtype)

        def write(block: Block, *configs: TileConfig) -> Weights:
            weights = workspace.weights(block)
            write_softmax(block, log2_scale, factors, weights, configs)
            return weights

        with launching_on(row_lse_b.device):
            # What a row leaves out and a column does not may lie above all that the row has: with
            # limits no power of the row's serves both.
            products = (len(logits.rows_bD) - len(cut.stored_rm)) * logits.columns_mD.numel()
            is_wide = logits.thresholds is not None or products <= _HOST_BOUND
            factors = SoftmaxFactors.of(
                row_lse_b, column_lse_m, logits.scale, cut.precision.softmax_exponent,
                always_wide=is_wide,
            )  # fmt: skip
            log2_scale = cut.log2_scale() if cut.precision.is_split else factors.log2_scale
            shape = self._softmax_block(cut)
            # One for all blocks: a stream writes each after the products of the one before.
            workspace = Workspace(shape, cut.precision, row_lse_b.device)
            configs = [] if is_wide else [self._choose("softmax", cut, write, shape)]
            configs.append(self._choose("softmax_wide", cut))
            of_stored = [self._stored_configs(cut)[1]] if len(cut.stored_rm) > 0 else []
            for block in cut.blocks(shape):
                weights = write(block, *(configs if block.stored_nc is None else of_stored))
                weights.add_products(block, d_rows_bD, d_columns_mD)

    def sigmoid_sweep(
        self,
        logits: Logits,
        bias: Tensor,
        totals_2: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_mD: Tensor | None,
        maxima: Maxima | None = None,
    ) -> None:
        """Add one shard's negatives to loss and gradients, see `TileBackend.sigmoid_sweep`."""
        cut = KernelLogits.of(logits, self.tile_dtype)
        log2_scale, log2_bias = cut.log2_scale(), (bias.double() * _LOG2_E).float().reshape(1)
        with launching_on(bias.device):
            shape = self._softmax_block(cut)
            workspace = Workspace(shape, cut.precision, bias.device)
            config = self._choose("softmax_wide", cut)
            for block in cut.blocks(shape):
                weights = workspace.weights(block)
                add_sigmoid(
                    block, log2_scale, log2_bias, totals_2, weights, config,
                    None if maxima is None else maxima.block(block.rows, block.columns),
                )  # fmt: skip
                weights.add_products(block, d_rows_bD, d_columns_mD)

    def rounding(
        self, width: int, dtype: torch.dtype, *, of_guides: bool = False
    ) -> tuple[float, float]:
        """Return what a logit may be off by, see `TileBackend.rounding`."""
        tile_dtype = "auto" if of_guides else self.tile_dtype
        operands = Precision.of(dtype, tile_dtype).operand_rounding(dtype)
        return sum_rounding(width, torch.float32) + operands, _MAXIMUM_ROUNDING

    def budget(self, device: torch.device) -> int:
        """Return the workspace, see `TileBackend.budget`."""
        return DEFAULT_WORKSPACE_BYTES if self.workspace_bytes is None else self.workspace_bytes

    def stored_values(self, b: int, m: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return what the workspace has beside blocks: all, a quarter at least, or nothing.

        To keep less saves less than smaller blocks cost. One 16-bit product costs no more than to
        store and load fp32 logits: for features that are not split, nothing.
        """
        if not Precision.of(dtype, self.tile_dtype).is_split:
            return 0
        budget, everything = self.budget(device), b * (-(-m // 16) * 16)
        room = torch.sym_max(0, budget - torch.sym_max(budget // 2, _BLOCK_BYTES)) // 4
        # `min` and `if` would branch on sizes that may be symbolic.
        size: int = torch.sym_min(everything, room) * torch.sym_min(1, 4 * room // everything)
        return size

    def multiplied_twice(
        self,
        b: int,
        m: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        stored_values: int,
    ) -> int:
        """Return how many of the `b m` logits of one process a memory of that size cannot keep."""
        # As the sweep takes its place, without memory.
        stored = StoredTiles(torch.empty(stored_values, device="meta"))
        return (b - len(stored.take_rows(b, m))) * m

    def _block(self, cut: KernelLogits, bytes_per_value: float) -> tuple[int, int]:
        """Return the shape of blocks that fit the budget with their operands."""
        rows_bD, columns_mD = cut.logits[:2]
        # What is kept was taken from the same workspace.
        stored = 0 if cut.logits.stored is None else cut.logits.stored.bytes
        values = int((self.budget(rows_bD.device) - stored) / bytes_per_value)
        edge = int(cut.edge_bytes / bytes_per_value)
        return block_shape(len(rows_bD), len(columns_mD), values, edge)

    def _softmax_block(self, cut: KernelLogits) -> tuple[int, int]:
        """Return the shape of blocks whose weights fit as well, in whole waves of products."""
        rows_bD = cut.logits.rows_bD
        rows, columns = self._block(cut, cut.precision.softmax_bytes)
        if rows < len(rows_bD):
            rows = whole_waves(rows, rows_bD.shape[1], _multiprocessors(rows_bD.device))
        return rows, columns

    def _arch(self, device: torch.device) -> int:
        return arch_of(device) if self.arch is None else self.arch

    def _stored_configs(self, cut: KernelLogits) -> tuple[TileConfig, TileConfig]:
        rows_bD, dtype = cut.logits.rows_bD, cut.precision.operand
        return find_stored_configs(self._arch(rows_bD.device), dtype, rows_bD.shape[1])

    def _choose(
        self,
        kernel: Kernel,
        cut: KernelLogits,
        try_out: Callable[[Block, TileConfig], object] | None = None,
        most: Sequence[int] = (),
    ) -> TileConfig:
        """Return the row of the table to use: the first, or the fastest where that is asked for.

        `try_out` launches the kernel on a block of `most` rows and columns; without it nothing is
        timed.
        """
        width, device = cut.logits.rows_bD.shape[1], cut.logits.rows_bD.device
        configs = find_configs(kernel, self._arch(device), cut.precision.operand, width)
        if not self.autotune or try_out is None or len(configs) == 1:
            return configs[0]
        key = (kernel, cut.precision, width, device)
        if key not in self._tuned:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return configs[0]  # nothing can be timed while a graph is made
            run = functools.partial(try_out, cut.trial_block(*most))
            what = f"{kernel}, {cut.precision}, width {width}"
            choose = functools.partial(fastest, configs, run, device)
            self._tuned[key] = chosen_once(configs, what, device, choose)
        return self._tuned[key]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Return how many programs run at a time at least."""
    if device.type != "cuda":
        return 4  # Triton's interpreter runs one after another; this exercises the sharing
    return torch.cuda.get_device_properties(device).multi_processor_count
