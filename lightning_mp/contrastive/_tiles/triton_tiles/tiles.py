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
    Derivatives,
    Logits,
    Prepared,
    StoredTiles,
    TileBackend,
    Vectors,
)
from lightning_mp.contrastive._tiles.triton_tiles.block import Block, Weights, Workspace
from lightning_mp.contrastive._tiles.triton_tiles.choices import cached_choice
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
"""Holds 16,896 x 16,384 softmax values of two bytes: whole waves of cuBLAS tiles on 132 SMs."""

# Stored products leave at least this to blocks, or half of the workspace. Each block reads and
# writes gradients, so small blocks cost more. This is 3,925 x 3,925 at D = 768.
_BLOCK_BYTES = 2**27
_LOG2_E = math.log2(math.e)
# A product of this many multiplications takes 0.1 ms at half of an H100's rate, and the four
# products of a loss take less time than the launches. A second exponential of 2^24 logits takes the
# GPU 5 us; the launch of a second variant takes the host 40 us.
_HOST_BOUND = 2**34
# Error of a largest logit in nats: its distance from the reference, below 2^7, is rounded by up to
# 2^-18 for each part of the scale, and its power by 2^-22.
_MAXIMUM_ROUNDING = 2 * 2.0**-18


@dataclasses.dataclass(frozen=True)
class TritonTiles(TileBackend):
    """Both sweeps of `TileBackend` in Triton, for CUDA devices of compute capability 8.0 and up.

    The forward sweep multiplies once and computes one exponential per element for rows and columns.
    The gradient sweep multiplies again, writes the softmax of a block in 16 bits, and computes both
    gradient products by cuBLAS with fp32 accumulation. Results do not depend on the order of
    programs, so they repeat bit for bit, and the host never waits for the device.

    The products of fp32 features, which consist of three products of 16-bit halves, are stored in
    the first sweep for the second: for all rows, or for the first rows in multiples of 128 that fit
    half of the workspace (all but 128 MiB, if that is less), if that is at least a quarter of them.
    """

    # For stored products, and for partial sums or a block of the softmax; at least one tile.
    workspace_bytes: int | None = None
    tile_dtype: TileDtype = "auto"
    # Time the tile shapes of the table at the first call for a dtype and width, which waits for the
    # device, and store the fastest, also for later processes.
    autotune: bool = False
    arch: int | None = None  # of the rows of the table, such as 90; `None`: that of the device
    # Timings are not part of the comparison of two backends.
    _tuned: dict[tuple[Kernel, Precision, int, torch.device], TileConfig] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    prepare = staticmethod(prepare)
    pair_terms = staticmethod(pair_terms)
    finish = staticmethod(finish)

    def lse_sweep(self, logits: Logits, lses: Vectors, prepared: Prepared | None = None) -> None:
        kernel_logits = KernelLogits.of(logits, self.tile_dtype)
        if prepared is None:
            prepared = self.prepare(*logits[:3])
        log2_scale, reference = prepared.own
        # The prepared scale does not include the units of operands.
        if kernel_logits.precision.is_split:
            log2_scale = kernel_logits.log2_scale()

        def try_out(block: Block, config: TileConfig) -> None:
            # Trial runs must not change the sums.
            copies = map(torch.empty_like, lses.block(block.rows, block.columns))
            add_lse(block, log2_scale, reference, Vectors(*copies), config)

        with launching_on(logits.rows_bD.device):
            if len(kernel_logits.stored_rm) > 0:
                config = self._stored_configs(kernel_logits)[0]
            elif logits.thresholds is None:
                # With maxima or ids, some of the shapes that would be timed spill registers.
                is_bare = logits.maxima is None and logits.ids is None
                config = self._choose("lse", kernel_logits, try_out if is_bare else None)
            else:
                config = find_threshold_config(
                    self._arch(logits.rows_bD.device), kernel_logits.precision.operand,
                    logits.rows_bD.shape[1], has_ids=logits.ids is not None,
                    has_guides=kernel_logits.guides is not None,
                )  # fmt: skip
            # Only partial sums of tiles are written, no block of logits.
            bytes_per_value = lse_bytes_per_value(config, with_maxima=logits.maxima is not None)
            for block in kernel_logits.blocks(self._block(kernel_logits, bytes_per_value)):
                of_block = lses.block(block.rows, block.columns)
                add_lse(block, log2_scale, reference, of_block, config)

    def grad_sweep(self, logits: Logits, lses: Vectors, gradients: Derivatives) -> None:
        kernel_logits = KernelLogits.of(logits, self.tile_dtype)

        def write(block: Block, *configs: TileConfig) -> Weights:
            weights = workspace.weights(block)
            write_softmax(block, log2_scale, factors, weights, configs)
            return weights

        device = logits.rows_bD.device
        with launching_on(device):
            # With thresholds, a column may include a logit above all that its row includes, so one
            # power per element is not accurate for both.
            rows = len(logits.rows_bD) - len(kernel_logits.stored_rm)
            is_host_bound = rows * logits.columns_mD.numel() <= _HOST_BOUND
            is_wide = logits.thresholds is not None or is_host_bound
            factors = SoftmaxFactors.of(
                lses, logits.scale, kernel_logits.precision.softmax_exponent, always_wide=is_wide
            )  # fmt: skip
            log2_scale = factors.log2_scale
            if kernel_logits.precision.is_split:
                log2_scale = kernel_logits.log2_scale()
            shape = self._softmax_block(kernel_logits)
            # Shared by all blocks, which the stream processes one after the other.
            workspace = Workspace(shape, kernel_logits.precision, device)
            configs = [] if is_wide else [self._choose("softmax", kernel_logits, write, shape)]
            configs.append(self._choose("softmax_wide", kernel_logits))
            of_stored = []
            if len(kernel_logits.stored_rm) > 0:
                of_stored = [self._stored_configs(kernel_logits)[1]]
            for block in kernel_logits.blocks(shape):
                weights = write(block, *(configs if block.stored_nc is None else of_stored))
                weights.add_products(block, gradients)

    def sigmoid_sweep(
        self, logits: Logits, bias: Tensor, totals_2: Tensor, gradients: Derivatives
    ) -> None:
        kernel_logits = KernelLogits.of(logits, self.tile_dtype)
        log2_scale = kernel_logits.log2_scale()
        log2_bias = (bias.double() * _LOG2_E).float().reshape(1)
        with launching_on(bias.device):
            shape = self._softmax_block(kernel_logits)
            workspace = Workspace(shape, kernel_logits.precision, bias.device)
            config = self._choose("softmax_wide", kernel_logits)
            for block in kernel_logits.blocks(shape):
                weights = workspace.weights(block)
                add_sigmoid(block, log2_scale, log2_bias, totals_2, weights, config)
                weights.add_products(block, gradients)

    def rounding(
        self, width: int, dtype: torch.dtype, *, of_guides: bool = False
    ) -> tuple[float, float]:
        tile_dtype = "auto" if of_guides else self.tile_dtype
        operands = Precision.of(dtype, tile_dtype).operand_rounding(dtype)
        return sum_rounding(width, torch.float32) + operands, _MAXIMUM_ROUNDING

    def budget(self, device: torch.device) -> int:
        return DEFAULT_WORKSPACE_BYTES if self.workspace_bytes is None else self.workspace_bytes

    def stored_values(self, b: int, m: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the size for all products, for at least a quarter of them, or 0.

        Storing less saves less than smaller blocks cost. Without a split, one 16-bit product costs
        no more than storing and loading fp32 logits, so nothing is stored.
        """
        if not Precision.of(dtype, self.tile_dtype).is_split:
            return 0
        budget, everything = self.budget(device), b * (-(-m // 16) * 16)
        room = torch.sym_max(0, budget - torch.sym_max(budget // 2, _BLOCK_BYTES)) // 4
        # `min` and `if` would branch on sizes, which may be symbolic.
        size: int = torch.sym_min(everything, room) * torch.sym_min(1, 4 * room // everything)
        return size

    def multiplied_twice(
        self, b: int, m: int, width: int, dtype: torch.dtype, device: torch.device, memory: int
    ) -> int:
        # Takes the same place as the sweep, on the meta device.
        stored = StoredTiles(torch.empty(memory, device="meta"))
        return (b - len(stored.take_rows(b, m))) * m

    def _block(self, kernel_logits: KernelLogits, bytes_per_value: float) -> tuple[int, int]:
        """Return the shape of blocks that fit the workspace with their operands."""
        rows_bD, columns_mD = kernel_logits.logits[:2]
        # Stored products take memory of the same workspace.
        stored = 0 if kernel_logits.logits.stored is None else kernel_logits.logits.stored.bytes
        values = int((self.budget(rows_bD.device) - stored) / bytes_per_value)
        edge = int(kernel_logits.edge_bytes / bytes_per_value)
        return block_shape(len(rows_bD), len(columns_mD), values, edge)

    def _softmax_block(self, kernel_logits: KernelLogits) -> tuple[int, int]:
        """Return the shape of blocks whose weights also fit, in whole waves of products."""
        rows_bD = kernel_logits.logits.rows_bD
        rows, columns = self._block(kernel_logits, kernel_logits.precision.softmax_bytes)
        if rows < len(rows_bD):
            rows = whole_waves(rows, rows_bD.shape[1], _multiprocessors(rows_bD.device))
        return rows, columns

    def _arch(self, device: torch.device) -> int:
        return arch_of(device) if self.arch is None else self.arch

    def _stored_configs(self, kernel_logits: KernelLogits) -> tuple[TileConfig, TileConfig]:
        rows_bD, dtype = kernel_logits.logits.rows_bD, kernel_logits.precision.operand
        return find_stored_configs(self._arch(rows_bD.device), dtype, rows_bD.shape[1])

    def _choose(
        self,
        kernel: Kernel,
        kernel_logits: KernelLogits,
        try_out: Callable[[Block, TileConfig], object] | None = None,
        most: Sequence[int] = (),
    ) -> TileConfig:
        """Return the row of the table to use: the first, or the fastest with `autotune`.

        `try_out` launches the kernel on a block of `most` rows and columns; without it nothing is
        timed.
        """
        width, device = kernel_logits.logits.rows_bD.shape[1], kernel_logits.logits.rows_bD.device
        configs = find_configs(kernel, self._arch(device), kernel_logits.precision.operand, width)
        if not self.autotune or try_out is None or len(configs) == 1:
            return configs[0]
        key = (kernel, kernel_logits.precision, width, device)
        if key not in self._tuned:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return configs[0]  # timing is impossible during a graph capture
            run = functools.partial(try_out, kernel_logits.trial_block(*most))
            what = f"{kernel}, {kernel_logits.precision}, width {width}"
            choose = functools.partial(fastest, configs, run, device)
            self._tuned[key] = cached_choice(configs, what, device, choose)
        return self._tuned[key]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, on each of which a program runs."""
    if device.type != "cuda":
        return 4  # an arbitrary number for Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
