"""Differentiable products of features: with a `Match`, and inner products of rows."""

from typing import Any

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.matches import Match
from lightning_mp.contrastive._tiles.tile_backend import row_dots

__all__ = ["dots", "positive_logits", "product"]


def product(match: Match, x: Tensor, transposed: bool) -> Tensor:
    """Return `match.times(x, transposed)`, differentiable."""
    found: Tensor = _Product.apply(x, match, transposed)
    return found


class _Product(torch.autograd.Function):
    """A product with M or its transpose; the gradient is the other, of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, match: Match, transposed: bool) -> Tensor:
        ctx.match, ctx.transposed = match, transposed
        return match.times(x, transposed)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        # A collective if M spans ranks: all ranks must call it in the same order.
        return ctx.match.times(cotangent.contiguous(), not ctx.transposed), None, None


def dots(left_bD: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inner products of rows with one row each, (b, D), or with several, (b, k, D)."""
    right_bkD = right if right.ndim == 3 else right[:, None]
    dots_bk: Tensor = _Dots.apply(left_bD, right_bkD, dtype)
    return dots_bk if right.ndim == 3 else dots_bk[:, 0]


def positive_logits(image_qD: Tensor, text_qD: Tensor, scale: Tensor) -> Tensor:
    """Return the logits of pairs; NaN for +inf, which is an overflow and not a loss of 0."""
    pos_q = dots(image_qD, text_qD, scale.dtype) * scale
    return pos_q.masked_fill(pos_q == torch.inf, torch.nan)


class _Dots(torch.autograd.Function):
    """Inner products of rows in a wide dtype, with gradients in the dtype of the rows."""

    @staticmethod
    def forward(ctx: Any, left_bD: Tensor, right_bkD: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(left_bD, right_bkD)
        # One of k at a time, because wide copies of all would be k times the features.
        dots = [row_dots(left_bD, x_bD, dtype) for x_bD in right_bkD.unbind(1)]
        return torch.stack(dots, 1) if dots else left_bD.new_empty(len(left_bD), 0, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, cotangent_bk: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left_bD, right_bkD = ctx.saved_tensors
        cotangent_bk = cotangent_bk.to(left_bD.dtype)
        needs_left, needs_right, _ = ctx.needs_input_grad
        d_left_bD = torch.zeros_like(left_bD) if needs_left else None
        d_right_bkD = torch.empty_like(right_bkD) if needs_right else None
        for place, cotangent_b in enumerate(cotangent_bk.unbind(1)):
            if d_left_bD is not None:
                d_left_bD.addcmul_(right_bkD[:, place], cotangent_b[:, None])
            if d_right_bkD is not None:
                d_right_bkD[:, place] = left_bD * cotangent_b[:, None]
        return d_left_bD, d_right_bkD, None
