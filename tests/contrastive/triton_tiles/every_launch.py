"""All launches of the package's kernels, over the cross product of options.

Losses run forward and backward, as the operators call them, on fake features; optimizer steps and
monitor statistics run on small tensors. The launchers decide how kernels are specialized.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # before torch 2.11, registers fake collectives
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks._launches import Launch, call_loss, fake_gpu, launches_in
from lightning_mp import ContrastiveLoss, MatryoshkaLoss, SigmoidContrastiveLoss
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._operator import _compute
from lightning_mp.contrastive._sums.agreement import exchange_for
from lightning_mp.contrastive._sums.sweep import NeedsGrad, Plan
from lightning_mp.numerics import probe_kernels
from lightning_mp.numerics.row_dots import fused_row_dots
from lightning_mp.numerics.split_kernels import fused_join, fused_split
from lightning_mp.numerics.split_weights import residual_unit
from lightning_mp.numerics.stats_kernels import fused_stats
from lightning_mp.optim._adamw.foreach import AdamWBatch, AdamWOptions
from lightning_mp.optim._adamw.fused import fused_adamw_step

__all__ = [
    "ARCHS",
    "BF16",
    "ONE_BLOCK",
    "call",
    "default_launches",
    "every_launch",
    "fullest_launches",
]

# The architectures of the table, and 86 and 89, which use the rows of 80.
ARCHS = 80, 86, 89, 90, 100, 120
BF16, FP16, FP32 = DTYPES = torch.bfloat16, torch.float16, torch.float32
# Dtypes of the features, and every `tile_dtype` that they support.
FORMATS = (
    (BF16, "auto"), (BF16, "fp32"), (BF16, "fp16"), (FP16, "auto"), (FP16, "fp32"),
    (FP16, "bf16"), (FP32, "auto"), (FP32, "tf32"), (FP32, "bf16"),
)  # fmt: skip
# Widths below and above every `max_width`, no multiple of 16, small, and of 20 slices of 64.
WIDTHS = 1, 48, 100, 256, 768, 1280
TABLE_WIDTHS = 64, 768
# Batches of whole tiles; no multiple of 16; so small that only the wide variant runs; one pair.
BATCHES = 8192, 8187, 256, 1
# A workspace that can store all logits of a batch, so that a call has a single block.
ONE_BLOCK = {"backend": "triton", "workspace_bytes": 2**34}
LAYOUTS = "rows", "wide rows", "odd rows", "columns", "odd address"
DIRECTIONS = "both", "image_to_text", "text_to_image"
CHOICES = range(3)  # the rows that autotune can choose


def default_launches(arch: int) -> list[Launch]:
    """Return the launches of the default losses, for bf16 features at D = 768."""
    with launches_in(arch) as found, fake_gpu(arch):
        for batch in (8192, 256):
            call(ContrastiveLoss(backend="triton"), batch, 768, BF16)
    return [*found.values()]


def fullest_launches(arch: int) -> list[Launch]:
    """Return launches with the options that need the most registers."""
    judged = ContrastiveLoss(**ONE_BLOCK, false_negatives="absolute")
    low = ContrastiveLoss(**ONE_BLOCK, tile_dtype="fp32")
    with launches_in(arch) as found, fake_gpu(arch):
        said = {"ids": _ids(8187), "statistics": True}
        call(low, 8187, 768, BF16, **said)
        # The shapes with and without ids may differ.
        for ids in ({}, {"ids": _ids(8192)}):
            call(judged, 8192, 768, BF16, statistics=True, **ids, **_guides(8192, BF16))
        call(SigmoidContrastiveLoss(**ONE_BLOCK, tile_dtype="fp32"), 8187, 768, BF16, **said)
        call(ContrastiveLoss(**ONE_BLOCK), 8187, 768, FP32, **said)  # stores its products
    return [launch for launch in found.values() if launch.multiplies]


def every_launch(arch: int) -> list[Launch]:
    """Return all launches on an architecture."""
    with launches_in(arch) as found:
        _sweeps(arch)
        _helpers(arch)
        _beside_losses()
    return sorted(found.values(), key=str)


def _sweeps(arch: int) -> None:
    """Call losses with all options of the sweep kernels."""
    for choice in CHOICES:
        with fake_gpu(arch, choice):
            for (dtype, tiles), batch, ids, statistics in itertools.product(
                FORMATS, BATCHES[:3], *[(False, True)] * 2
            ):
                options: dict[str, Any] = {"tile_dtype": tiles, "autotune": True, **ONE_BLOCK}
                said = {"statistics": statistics} | ({"ids": _ids(batch)} if ids else {})
                # Small batches and thresholds use a row that is not autotuned.
                if choice == 0 or batch != 256:
                    for width, keeps in itertools.product(TABLE_WIDTHS, (True, False)):
                        if not keeps or dtype is FP32:  # only fp32 features store products
                            loss = ContrastiveLoss(**options)
                            call(loss, batch, width, dtype, stores_tiles=keeps, **said)
                if choice > 0:
                    continue
                call(SigmoidContrastiveLoss(**options), batch, 768, dtype, **said)
                judged = ContrastiveLoss(**options, false_negatives="absolute")
                for guides in (None, *DTYPES):
                    call(judged, batch, 768, dtype, **said, **_guides(batch, guides))


def _helpers(arch: int) -> None:
    """Call losses with all options of the kernels beside the sweeps."""
    with fake_gpu(arch):
        for dtype, width, batch, layout, directions in itertools.product(
            DTYPES, WIDTHS, BATCHES, LAYOUTS, DIRECTIONS
        ):
            loss = ContrastiveLoss(backend="triton", directions=directions)
            call(loss, batch, width, dtype, layout)
        for dtype, weighted, scale in itertools.product(DTYPES, (False, True), (*DTYPES, None)):
            said = {"weights": torch.empty(8192)} if weighted else {}
            loss = ContrastiveLoss(backend="triton", label_smoothing=0.1 * weighted)
            call(loss, 8192, 768, dtype, scale=scale, **said)
            prefixes = MatryoshkaLoss(widths=(48, 100, 256), loss=loss)
            call(prefixes.loss, 8192, 768, dtype, widths=prefixes.widths, width_weights=(1.0,) * 3)
        for dtype, exchange in itertools.product(DTYPES, ("slices", "ring")):
            for sizes in ([8192] * 8, [256] * 64, [1000, 1000, 37], [5, 1]):
                _of_ranks(sizes, dtype, exchange)
        for left, right, layout in itertools.product(DTYPES, DTYPES, LAYOUTS):
            for width in WIDTHS:
                fused_row_dots(
                    _features(8192, width, left, layout), _features(8192, width, right, "rows")
                )


def call(
    loss: Any,
    batch: int,
    width: int,
    dtype: torch.dtype,
    layout: str = "rows",
    scale: torch.dtype | None = FP32,
    **options: Any,
) -> None:
    """Compute a loss of fake features and its gradients, see `call_loss`."""
    image, text = (_features(batch, width, dtype, layout).requires_grad_() for _ in range(2))
    value = 100.0 if scale is None else torch.empty((), dtype=scale, requires_grad=True)
    call_loss(loss, image, text, value, **options)


def _of_ranks(sizes: list[int], dtype: torch.dtype, exchange: str) -> None:
    """Run a loss in a process group without other processes."""
    dist.init_process_group("fake", rank=0, world_size=len(sizes), store=FakeStore())
    try:
        sides = [torch.empty(sizes[0], 768, dtype=dtype) for _ in range(2)]
        request = Request(*sides, torch.empty(()), backend="triton")
        travel = exchange_for(sizes, sides[0], exchange, request.tiles, None)
        plan = Plan(request, *travel, NeedsGrad(True, True, True), pairs=sum(sizes))
        with torch.no_grad():
            _compute(plan)
    finally:
        dist.destroy_process_group()


def _features(batch: int, width: int, dtype: torch.dtype, layout: str) -> Tensor:
    if layout == "columns":
        return torch.empty(width, batch, dtype=dtype).T
    if layout == "odd address":
        return torch.empty(batch * width + 1, dtype=dtype)[1:].view(batch, width)
    more = {"rows": 0, "wide rows": 64, "odd rows": 3}[layout]
    return torch.empty(batch, width + more, dtype=dtype)[:, :width]


def _ids(batch: int) -> Tensor:
    return torch.empty(batch, dtype=torch.int64)


def _guides(batch: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    if dtype is None:
        return {}
    return {name: torch.empty(batch, 72, dtype=dtype) for name in ("guide_image", "guide_text")}


def _beside_losses() -> None:
    """Launch the kernels of the optimizer, half weights and monitors, and the probe."""
    probe_kernels.probe_kernel[(1,)](torch.empty((), dtype=torch.int32))
    values = [torch.zeros(size, dtype=dtype) for dtype in DTYPES for size in (2**16, 7)]
    fused_stats(values, torch.tensor(2.0**-14))
    for half, size in itertools.product((BF16, FP16), (2**16, 7)):
        fused_join(*fused_split(torch.zeros(size), half, residual_unit(half)), residual_unit(half))
    one = torch.ones(1)
    for param, grad, rule, write_back, more in itertools.product(
        DTYPES, DTYPES, ("adam", "atan2"), ("kahan", "nearest", "stochastic"), (False, True)
    ):
        if param != FP32 or write_back == "nearest":
            # With a loss scale, update clipping and a learning rate on the device, or with none.
            lr, clip, scaled = (torch.tensor(1e-3), 1.0, one) if more else (1e-3, None, None)
            options = AdamWOptions(
                lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, maximize=more, rule=rule,
                write_back=write_back, seed=0, clip_update_rms=clip, grad_scale=scaled,
                found_inf=scaled,
            )  # fmt: skip
            fused_adamw_step(_batch(param, grad, write_back), options)


def _batch(param: torch.dtype, grad: torch.dtype, write_back: str) -> AdamWBatch:
    of = (param, grad, FP32, FP32)
    lists = [[torch.zeros(64, dtype=dtype) for _ in range(7)] for dtype in of]
    residuals = [torch.zeros_like(x) for x in lists[0]] if write_back == "kahan" else []
    return AdamWBatch(*lists, residuals=residuals, steps=[torch.ones(()) for _ in range(7)])
