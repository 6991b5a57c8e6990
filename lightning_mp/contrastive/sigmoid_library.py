"""The sigmoid loss of one process as operators of `torch.library`, for `torch.compile`.

`torch.ops.lightning_mp.sigmoid_pairs` works out loss and gradients on a ring of one, as far as they
are needed; `sigmoid_pairs_backward` multiplies them by the cotangent. Their fake implementations
are what a compiler sees, as those of `library` for the softmax.

Shapes:
    b: batch. n: texts, of which the first b belong to the images. D: feature width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_mp.contrastive.agreement import trained
from lightning_mp.contrastive.backends import make_tiles
from lightning_mp.contrastive.infonce import Plan
from lightning_mp.contrastive.pair_options import PairOptions
from lightning_mp.contrastive.ring import Ring
from lightning_mp.contrastive.sigmoid_sweep import (
    NO_SECOND_DERIVATIVE,
    SigmoidSwept,
    differentiate,
    sides_of,
    sweep,
)
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["loss_of_one", "sigmoid_pairs", "sigmoid_pairs_backward"]


def loss_of_one(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return loss and statistics of one process, by the operator."""
    loss, *_, found = sigmoid_pairs(
        image_bD, text_nD, scale, bias, list(trained(image_bD, text_nD, scale, bias)), **options,
        ids=pairs.masked_ids, statistics=pairs.statistics,
    )  # fmt: skip
    return loss, found


@torch.library.custom_op("lightning_mp::sigmoid_pairs", mutates_args=())
def sigmoid_pairs(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    needs_grad: list[bool],
    backend: str,
    tile_dtype: str,
    workspace_bytes: int | None,
    autotune: bool,
    ids: Tensor | None = None,
    statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and for the backward what `SigmoidSwept` names; empty what is not needed.

    Args:
        image_bD: Image features, (b, D).
        text_nD: Text features, (n, D) with n >= b.
        scale: The logit scale, one value.
        bias: The logit bias, one value, or `None`.
        needs_grad: Whether images, texts, and scale or bias are to have gradients.
        backend: See `ContrastiveLoss`, as all that follow.
        tile_dtype: What is multiplied.
        workspace_bytes: Memory for tiles.
        autotune: Choose tile shapes by the clock.
        ids: What each text shows, (n,) in int64, or `None`.
        statistics: Work out the values of `LossStatistics`, too.
    """
    tiles = make_tiles(
        backend, image_bD.device, image_bD.dtype, workspace_bytes=workspace_bytes,
        tile_dtype=tile_dtype, autotune=autotune,
    )  # fmt: skip
    plan = Plan(
        Ring([len(text_nD)]), tiles, *needs_grad, ids_b=ids, pairs=len(image_bD),
        statistics=statistics,
    )  # fmt: skip
    loss, swept, statistics_5 = sweep(image_bD, text_nD, scale, bias, plan)
    d_image_bD, d_text_nD, found = (
        loss.new_empty(0) if x is None else x for x in (*swept[1:], statistics_5)
    )
    return loss, swept.totals, d_image_bD, d_text_nD, found


@sigmoid_pairs.register_fake
def _(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    needs_grad: list[bool],
    backend: str,
    tile_dtype: str,
    workspace_bytes: int | None,
    autotune: bool,
    ids: Tensor | None = None,
    statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(image_bD.dtype)
    loss, found = (image_bD.new_empty(s, dtype=dtype) for s in ((), 5 * statistics))
    d_image_bD, d_text_nD = (
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        if is_used
        else loss.new_empty(0)
        for x, is_used in zip((image_bD, text_nD), sides_of(*needs_grad), strict=True)
    )
    totals = image_bD.new_empty(3, dtype=state_dtype(image_bD.device))
    return loss, totals, d_image_bD, d_text_nD, found


@torch.library.custom_op("lightning_mp::sigmoid_pairs_backward", mutates_args=())
def sigmoid_pairs_backward(
    cotangent: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    totals: Tensor,
    d_image_bD: Tensor,
    d_text_nD: Tensor,
    pairs: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the gradients of images and texts, where they are not empty, of scale and of bias.

    Args:
        cotangent: Gradient of the loss, one value.
        scale: The logit scale, one value.
        bias: The logit bias, one value, or `None`.
        totals: What the forward returned, as what follows.
        d_image_bD: Of the images.
        d_text_nD: Of the texts.
        pairs: b.
        dtype: Of the features.
    """
    swept = SigmoidSwept(totals, *(x if x.numel() else None for x in (d_image_bD, d_text_nD)))
    found = differentiate(cotangent, scale, bias, swept, pairs, 1, dtype)
    return [x for x in found if x is not None]


@sigmoid_pairs_backward.register_fake
def _(
    cotangent: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    totals: Tensor,
    d_image_bD: Tensor,
    d_text_nD: Tensor,
    pairs: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    features = [torch.empty_like(x, dtype=dtype) for x in (d_image_bD, d_text_nD) if x.dim() == 2]
    return [*features, *(torch.empty_like(x) for x in (scale, bias) if x is not None)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    image_bD, _, scale, bias, *_ = inputs
    ctx.save_for_backward(scale, bias, *output[1:4])
    ctx.pairs, ctx.dtype, ctx.inputs = image_bD.shape[0], image_bD.dtype, len(inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros for these would take as much memory again


def _differentiate(ctx: Any, cotangent: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    scale, bias, totals, *features = ctx.saved_tensors
    found = iter(
        sigmoid_pairs_backward(cotangent, scale, bias, totals, *features, ctx.pairs, ctx.dtype)
    )
    d_features = [next(found) if x.dim() == 2 else None for x in features]
    d_scale = next(found)
    d_bias = None if bias is None else next(found)
    return (*d_features, d_scale, d_bias, *(None for _ in range(ctx.inputs - 4)))


sigmoid_pairs.register_autograd(_differentiate, setup_context=_save)


@sigmoid_pairs_backward.register_autograd
def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


@register_flop_formula(torch.ops.lightning_mp.sigmoid_pairs)
def _flops(
    image_shape: Sequence[int],
    text_shape: Sequence[int],
    scale_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    needs_grad: Sequence[bool],
    *_: Any,
    **__: Any,
) -> int:
    """Count one unit, `2 b n D`, for the logits and one for each side's gradient."""
    b, width = image_shape
    return (1 + sum(sides_of(*needs_grad))) * 2 * b * text_shape[0] * width
