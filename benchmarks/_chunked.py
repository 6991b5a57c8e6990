"""The contrastive loss by plain matrix products over big tiles: what one writes without kernels.

Shapes:
    b: batch. D: feature width. r, c: rows and columns of one tile.

The strongest peer that needs no kernel of its own. On CUDA, cuBLAS multiplies 16-bit operands into
fp32 logits (bf16 logits near 100 are off by up to 0.25), torch does what is elementwise, and only
tiles of the logits are ever held. With `S = scale image text^T`,

    L = mean_i(row_lse_i + column_lse_i - 2 S_ii) / 2
    P_ij = exp(S_ij - row_lse_i) + exp(S_ij - column_lse_j)
    dL/dimage = scale / 2b (P text - 2 text),  dL/dtext = scale / 2b (P^T image - 2 image)

The forward pass multiplies once, the backward pass recomputes a tile, stores its P in 16 bit and
multiplies twice into fp32: four units of 2 b^2 D FLOP. Compiled, each tile is read and P written in
one pass; eager, every operation is a pass of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["TILE_EDGE", "chunked_loss"]

TILE_EDGE = 8192
"""Rows and columns of a tile: 256 MiB of fp32 logits, and gradient products that fill the chip."""

# P of an average pair is 2/b, which is no normal number in fp16 from b = 32,768 on.
_FP16_FACTOR = 2.0**14


def chunked_loss(
    image_bD: Tensor,
    text_bD: Tensor,
    scale: Tensor,
    *,
    compiled: bool = False,
    tile_edge: int = TILE_EDGE,
) -> Tensor:
    """Return the loss.

    Args:
        image_bD: Image features.
        text_bD: Text features of the same dtype.
        scale: Logit scale, one value.
        compiled: Fuse what is elementwise with `torch.compile`.
        tile_edge: Rows and columns of a tile at most.
    """
    loss: Tensor = _ChunkedLoss.apply(image_bD, text_bD, scale, compiled, tile_edge)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image_bD: Tensor, text_bD: Tensor, scale: Tensor, compiled: bool, edge: int
    ) -> Tensor:
        tile_lse = _compiled(_tile_lse) if compiled else _tile_lse
        row_lse_b, column_lse_b = (
            torch.full((len(image_bD),), -torch.inf, dtype=torch.float64, device=image_bD.device)
            for _ in range(2)
        )
        for tile in _tiles(image_bD, text_bD, edge):
            parts = tile_lse(tile.dots_rc, scale)
            totals = (row_lse_b[tile.rows], column_lse_b[tile.columns])
            for total, part in zip(totals, parts, strict=True):
                torch.logaddexp(total, part.double(), out=total)
        accumulation = torch.promote_types(image_bD.dtype, torch.float32)
        positive_b = scale * (image_bD.to(accumulation) * text_bD.to(accumulation)).sum(1)
        ctx.save_for_backward(image_bD, text_bD, scale, row_lse_b, column_lse_b)
        ctx.compiled, ctx.edge = compiled, edge
        loss = (row_lse_b + column_lse_b - 2 * positive_b.double()).mean() / 2
        return loss.to(accumulation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        image_bD, text_bD, scale, row_lse_b, column_lse_b = ctx.saved_tensors
        tile_softmax = _compiled(_tile_softmax) if ctx.compiled else _tile_softmax
        accumulation = torch.promote_types(image_bD.dtype, torch.float32)
        factor = _FP16_FACTOR if image_bD.dtype == torch.float16 else 1.0
        row_b, column_b = (
            (lse_b - math.log(factor)).to(accumulation) for lse_b in (row_lse_b, column_lse_b)
        )
        # The positives' share, in units of `factor`; the tiles add theirs.
        d_image_bD = text_bD.to(accumulation) * (-2 * factor)
        d_text_bD = image_bD.to(accumulation) * (-2 * factor)
        for tile in _tiles(image_bD, text_bD, ctx.edge):
            softmax_rc = tile_softmax(
                tile.dots_rc, scale, row_b[tile.rows], column_b[tile.columns], image_bD.dtype
            )
            _add_product(d_image_bD[tile.rows], softmax_rc, text_bD[tile.columns])
            _add_product(d_text_bD[tile.columns], softmax_rc.T, image_bD[tile.rows])
        unit = cotangent / (2 * factor * len(image_bD))
        d_scale = (image_bD * d_image_bD).sum() * unit
        grads = [d_bD.mul_(scale * unit).to(image_bD.dtype) for d_bD in (d_image_bD, d_text_bD)]
        return (*grads, d_scale.to(scale.dtype), None, None)


@dataclass(frozen=True)
class _Tile:
    rows: slice
    columns: slice
    dots_rc: Tensor


def _tiles(image_bD: Tensor, text_bD: Tensor, edge: int) -> Iterator[_Tile]:
    """Yield `image @ text.T` tile by tile, each over the one before."""
    batch = len(image_bD)
    edge = min(edge, batch)
    dtype = torch.promote_types(image_bD.dtype, torch.float32)
    buffer = torch.empty(edge * edge, dtype=dtype, device=image_bD.device)
    slices = [slice(start, min(start + edge, batch)) for start in range(0, batch, edge)]
    for rows in slices:
        for columns in slices:
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            dots_rc = buffer[: math.prod(shape)].view(shape)
            _product(image_bD[rows], text_bD[columns].T, out=dots_rc)
            yield _Tile(rows, columns, dots_rc)


def _tile_lse(dots_rc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    logits_rc = dots_rc * scale
    return logits_rc.logsumexp(1), logits_rc.logsumexp(0)


def _tile_softmax(
    dots_rc: Tensor, scale: Tensor, row_lse_r: Tensor, column_lse_c: Tensor, dtype: torch.dtype
) -> Tensor:
    logits_rc = dots_rc * scale
    by_row_rc = (logits_rc - row_lse_r[:, None]).exp_()
    by_column_rc = logits_rc.sub_(column_lse_c).exp_()
    return by_row_rc.add_(by_column_rc).to(dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _product(left_rk: Tensor, right_kc: Tensor, out: Tensor) -> None:
    if left_rk.dtype == out.dtype:
        torch.mm(left_rk, right_kc, out=out)
    elif left_rk.is_cuda:
        torch.mm(left_rk, right_kc, out_dtype=out.dtype, out=out)
    else:  # the products of two 16-bit values are exact in fp32
        torch.mm(left_rk.to(out.dtype), right_kc.to(out.dtype), out=out)


def _add_product(total_rD: Tensor, left_rc: Tensor, right_cD: Tensor) -> None:
    """Add a product of 16-bit operands to an fp32 total."""
    if left_rc.dtype == total_rD.dtype:
        total_rD.addmm_(left_rc, right_cD)
    elif not left_rc.is_cuda:
        total_rD.addmm_(left_rc.to(total_rD.dtype), right_cD.to(total_rD.dtype))
    else:
        torch.addmm(total_rD, left_rc, right_cD, out_dtype=total_rD.dtype, out=total_rD)
