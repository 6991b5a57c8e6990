"""The sigmoid loss of one process as operators, for `torch.compile`.

`torch.ops.lightning_mp.sigmoid_pairs` works out loss and gradients on a ring of one, as far as they
are needed; `sigmoid_pairs_backward` multiplies them by the cotangent.

Shapes:
    b: batch. n: texts, of which the first b belong to the images. D: feature width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_mp.contrastive._call.pair_options import PairOptions
from lightning_mp.contrastive._exchange.agreement import plan_of_one, trained
from lightning_mp.contrastive._operators.operators import FEATURES, TILES, define, derive
from lightning_mp.contrastive._sums.sigmoid_sweep import (
    NO_SECOND_DERIVATIVE,
    SigmoidSwept,
    differentiate,
    sides_of,
    sweep,
)
from lightning_mp.contrastive._tiles.backends import TileChoice
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["loss_of_one", "sigmoid_pairs", "sigmoid_pairs_backward"]


def loss_of_one(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    tiles: TileChoice,
) -> tuple[Tensor, Tensor]:
    """Return loss and statistics of one process, by the operator."""
    needs_grad = list(trained(image_bD, text_nD, scale, bias))
    options = (needs_grad, *tiles, pairs.masked_ids, pairs.statistics)
    loss, *_, found = sigmoid_pairs(image_bD, text_nD, scale, bias, *options)
    return loss, found


def _sigmoid_pairs(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    needs_grad: list[bool],
    *options: Any,
) -> tuple[Tensor, ...]:
    """Return the loss, what `SigmoidSwept` names, and statistics; empty what is not needed.

    `needs_grad` says whether images, texts, and scale or bias are to have gradients.
    """
    *tiles, ids, statistics = options
    pairs = PairOptions(ids=ids, statistics=statistics)
    plan = plan_of_one(image_bD, text_nD, pairs, TileChoice(*tiles), needs_grad)
    loss, swept, statistics_5 = sweep(image_bD, text_nD, scale, bias, plan)
    d_image_bD, d_text_nD, found = (
        loss.new_empty(0) if x is None else x for x in (*swept[1:], statistics_5)
    )
    return loss, swept.totals, d_image_bD, d_text_nD, found


def _fake_sigmoid_pairs(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    needs_grad: list[bool],
    *options: Any,
) -> tuple[Tensor, ...]:
    dtype = accumulation_dtype(image_bD.dtype)
    loss, found = (image_bD.new_empty(s, dtype=dtype) for s in ((), 5 * options[-1]))
    d_image_bD, d_text_nD = (
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        if is_used
        else loss.new_empty(0)
        for x, is_used in zip((image_bD, text_nD), sides_of(*needs_grad), strict=True)
    )
    totals = image_bD.new_empty(3, dtype=state_dtype(image_bD.device))
    return loss, totals, d_image_bD, d_text_nD, found


sigmoid_pairs = define(
    "sigmoid_pairs",
    f"({FEATURES}, bool[] needs_grad, {TILES}, Tensor? ids, bool statistics)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _sigmoid_pairs,
    _fake_sigmoid_pairs,
)


def _sigmoid_pairs_backward(
    cotangent: Tensor,
    image_bD: Tensor,
    _: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    totals: Tensor,
    d_image_bD: Tensor,
    d_text_nD: Tensor,
) -> list[Tensor]:
    """Return the gradients of images and texts, where they are not empty, of scale and of bias.

    Features say how many there are, and of what dtype; and lead second derivatives to a refusal.
    """
    swept = SigmoidSwept(totals, *(x if x.numel() else None for x in (d_image_bD, d_text_nD)))
    found = differentiate(cotangent, scale, bias, swept, len(image_bD), 1, image_bD.dtype)
    return [x for x in found if x is not None]


def _fake_sigmoid_pairs_backward(
    cotangent: Tensor,
    image_bD: Tensor,
    _: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    totals: Tensor,
    *sides: Tensor,
) -> list[Tensor]:
    features = [torch.empty_like(x, dtype=image_bD.dtype) for x in sides if x.dim() == 2]
    return [*features, *(torch.empty_like(x) for x in (scale, bias) if x is not None)]


sigmoid_pairs_backward = define(
    "sigmoid_pairs_backward",
    f"(Tensor cotangent, {FEATURES}, Tensor totals, Tensor d_image_bD, Tensor d_text_nD)"
    " -> Tensor[]",
    _sigmoid_pairs_backward,
    _fake_sigmoid_pairs_backward,
)


def _save(inputs: Sequence[Any], output: Sequence[Tensor]) -> tuple[list[Tensor | None], Any]:
    return [*inputs[:4], *output[1:4]], ()


def _arguments(
    cotangent: Tensor, tensors: Sequence[Any], values: Any, needs: Sequence[bool]
) -> tuple[Sequence[Any], Sequence[bool]]:
    are_there = [x.dim() == 2 for x in tensors[5:]]
    return (cotangent, *tensors), (*are_there, True, tensors[3] is not None)


derive(sigmoid_pairs, sigmoid_pairs_backward, _save, _arguments, NO_SECOND_DERIVATIVE)


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
