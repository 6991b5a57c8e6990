"""The AdamW step over half- or full-precision weights as one Triton kernel for all tensors."""

import contextlib
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lightning_mp.numerics.split_weights import residual_unit
from lightning_mp.numerics.triton_support import launching_on
from lightning_mp.optim._adamw.adamw_kernels import NUM_WARPS, adamw_kernel, rms_kernel
from lightning_mp.optim._adamw.foreach import (
    AdamWBatch,
    AdamWOptions,
    foreach_adamw_step,
    log_of,
    mix_seed,
)
from lightning_mp.optim._adamw.tables import Tables, tables_for_capture, tables_of

__all__ = ["fused_adamw_step"]

_FORMATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@torch.no_grad()
def fused_adamw_step(batch: AdamWBatch, options: AdamWOptions) -> None:
    """Step a batch on a CUDA device in place; float64 weights are not supported.

    The results equal those of `foreach_adamw_step` up to rounding and the noise of "stochastic",
    but take one launch instead of about twenty that each read and write whole tensors. Clipping
    reads gradients and second moments once more in a launch of its own.
    """
    if not batch.params:
        return
    half, device = batch.params[0].dtype, batch.params[0].device
    with launching_on(device), _tables(batch) as tables:
        # A CUDA graph is being captured with tensors that no earlier step has used.
        if tables is None:
            foreach_adamw_step(batch, options)
            return
        table, chunks, parts = tables
        if len(chunks) == 0:
            return
        shared: dict[str, Any] = {
            "grad_scale": options.grad_scale,
            "found_inf": options.found_inf,
            "num_tensors": len(batch.params),
            "beta2": float(options.beta2),
            # Computed in float64: 1 - 0.999 loses digits in fp32.
            "weight2": 1.0 - options.beta2,
            "log_beta2": log_of(options.beta2),
            "sign": -1.0 if options.maximize else 1.0,
            "GRAD": _FORMATS[batch.grads[0].dtype],
            "num_warps": NUM_WARPS,
            # Passed explicitly because the default depends on the version of Triton.
            "enable_fp_fusion": True,
        }
        partials = None
        if options.clip_update_rms is not None:
            partials = torch.empty(len(parts), dtype=torch.float32, device=device)
            # A root of 0 would give 0 / 0 = NaN, also in `foreach_adamw_step`.
            floor = max(float(options.eps), torch.finfo(torch.float32).tiny)
            rms_kernel[(len(parts),)](table, parts, partials, floor=floor, **shared)
        rate, rate_at = _rate_arguments(options.lr, device)
        adamw_kernel[(len(chunks),)](
            table,
            chunks,
            partials,
            lr=rate,
            lr_at=rate_at,
            seed=_philox_seed(options.seed),
            beta1=float(options.beta1),
            weight1=1.0 - options.beta1,
            log_beta1=log_of(options.beta1),
            eps=float(options.eps),
            weight_decay=float(options.weight_decay),
            clip=float(options.clip_update_rms or 1.0),
            PARAM=_FORMATS[half],
            IS_ATAN2=options.rule == "atan2",
            WRITE_BACK=_write_back(batch, options.write_back),
            UNIT=residual_unit(half),
            **shared,
        )


def _tables(batch: AdamWBatch) -> contextlib.AbstractContextManager[Tables | None]:
    if batch.params[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return contextlib.nullcontext(tables_for_capture(batch.lists, batch.steps))
    return tables_of(batch.lists, batch.steps)


def _rate_arguments(lr: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """Return the learning rate as a number, or 0.0 and a tensor on the device."""
    if not isinstance(lr, Tensor):
        return float(lr), None
    if lr.device.type == "cpu" and device.type != "cpu":
        return float(lr), None  # reading a CPU tensor does not synchronize
    return 0.0, lr.to(device, non_blocking=True)


def _philox_seed(seed: int) -> int:
    # Bit 62 is set because Triton recompiles for an integer that fits 32 bits.
    return mix_seed(seed, 0) | 1 << 62


def _write_back(batch: AdamWBatch, write_back: str) -> str:
    if batch.residuals:
        return "kahan"
    is_random = write_back == "stochastic" and batch.params[0].dtype != torch.float32
    return "stochastic" if is_random else "nearest"
