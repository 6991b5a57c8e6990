"""The loss of one process as operators, so that `torch.compile` keeps it whole.

`torch.ops.lightning_mp.infonce` and `infonce_backward` run `sweep` and `differentiate` on a ring
of one. Autocast does not change what they compute: features are taken in the dtype that they have,
as `ContrastiveLoss` documents, and autocast is off inside.

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
from lightning_mp.contrastive._exchange.exchange import HEADER
from lightning_mp.contrastive._operators.operators import (
    FEATURES,
    TILES,
    define,
    derive,
    wanted_like,
)
from lightning_mp.contrastive._sums.infonce import NO_SECOND_DERIVATIVE, Swept, differentiate, sweep
from lightning_mp.contrastive._tiles.backends import TileChoice
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["infonce", "infonce_backward", "loss_of_one"]


def loss_of_one(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    tiles: TileChoice,
) -> tuple[Tensor, Tensor]:
    """Return loss and statistics of one process, by the operator."""
    keeps = any(trained(image_bD, text_nD, scale, None))
    options = (*tiles, keeps, pairs.masked_ids, pairs.directions, pairs.statistics)
    loss, *_, found = infonce(image_bD, text_nD, scale, bias, *options)
    return loss, found


def _infonce(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """Return the loss, what `Swept` names for the backward, and statistics, empty if not wanted."""
    *tiles, keeps, ids, directions, statistics = options
    pairs = PairOptions(ids=ids, directions=directions, statistics=statistics)
    plan = plan_of_one(image_bD, text_nD, pairs, TileChoice(*tiles), [keeps] * 3)
    swept = sweep(image_bD, text_nD, scale, bias, plan)
    found = swept.loss.new_empty(0) if swept.statistics_5 is None else swept.statistics_5
    return swept.loss, swept.row_lse_b, swept.column_lse, swept.weight_b, swept.kept, found


def _fake_infonce(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    *tiles, keeps, _, _, statistics = options
    state, dtype = state_dtype(image_bD.device), accumulation_dtype(image_bD.dtype)
    b, n = image_bD.shape[0], text_nD.shape[0]
    row_lse_b, column_lse_n, weight_b = (
        image_bD.new_empty(size, dtype=state) for size in (b, HEADER + n, b)
    )
    column_lse_n = column_lse_n[HEADER:]  # as `Exchange.publish` has them
    size = TileChoice(*tiles).kept_values(image_bD, n) if keeps else 0
    kept = image_bD.new_empty(size, dtype=dtype)
    loss, found = (image_bD.new_empty(s, dtype=dtype) for s in ((), 5 * statistics))
    return loss, row_lse_b, column_lse_n, weight_b, kept, found


infonce = define(
    "infonce",
    f"({FEATURES}, {TILES}, bool keeps, Tensor? ids, str directions, bool statistics)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _infonce,
    _fake_infonce,
)


def _infonce_backward(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: list[Tensor],
    needs_grad: list[bool],
    *options: Any,
) -> list[Tensor]:
    """Return the gradients of images, texts and scale that are needed, and of a bias if given.

    What none needs, such as the product of a locked tower, is not worked out.
    """
    *tiles, ids, directions = options
    pairs = PairOptions(ids=ids, directions=directions)
    plan = plan_of_one(image_bD, text_nD, pairs, TileChoice(*tiles), needs_grad)
    found = differentiate(cotangent, image_bD, text_nD, scale, bias, Swept(*swept), plan)
    wanted = (*needs_grad, bias is not None)
    return [x for x, need in zip(found, wanted, strict=True) if x is not None and need]


def _fake_infonce_backward(cotangent: Tensor, *arguments: Any) -> list[Tensor]:
    *inputs, _, needs_grad = arguments[:6]
    return wanted_like(inputs, (*needs_grad, True))


infonce_backward = define(
    "infonce_backward",
    f"(Tensor cotangent, {FEATURES}, Tensor[] swept, bool[] needs_grad, {TILES}, Tensor? ids,"
    " str directions) -> Tensor[]",
    _infonce_backward,
    _fake_infonce_backward,
)


def _save(inputs: Sequence[Any], output: Sequence[Tensor]) -> tuple[list[Tensor | None], Any]:
    *features, backend, tile_dtype, workspace_bytes, autotune, _, ids, directions, _ = inputs
    tiles = (backend, tile_dtype, workspace_bytes, autotune)
    return [*features, ids, *output[:-1]], (*tiles, directions)


def _arguments(
    cotangent: Tensor, tensors: Sequence[Any], values: Any, needs: Sequence[bool]
) -> tuple[Sequence[Any], Sequence[bool]]:
    *features, ids = tensors[:5]
    *tiles, directions = values
    needs_grad = list(needs[:3])
    arguments = (cotangent, *features, list(tensors[5:]), needs_grad, *tiles, ids, directions)
    return arguments, (*needs_grad, features[3] is not None)


derive(infonce, infonce_backward, _save, _arguments, NO_SECOND_DERIVATIVE)


@register_flop_formula(torch.ops.lightning_mp.infonce)
def _forward_flops(
    image_shape: Sequence[int], text_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    """Count one unit, `2 b n D`, for `FlopCounterMode`; split operands multiply three times."""
    b, width = image_shape
    return 2 * b * text_shape[0] * width


@register_flop_formula(torch.ops.lightning_mp.infonce_backward, get_raw=True)
def _backward_flops(
    cotangent: Tensor, image_bD: Tensor, text_nD: Tensor, *arguments: Any, **_: Any
) -> int:
    """Count one unit for each side's gradient, and the logits that were not kept once more."""
    _, _, swept, needs_grad, *options = arguments
    sides: int = sum(needs_grad[:2])
    if sides == 0 and needs_grad[2]:
        sides = 1  # the scale's gradient comes from one side's
    if not sides:
        return 0
    (b, width), n = image_bD.shape, text_nD.shape[0]
    tiles = TileChoice(*options[:4]).tiles(image_bD.device, image_bD.dtype)
    kept = swept[-1].numel()
    again = tiles.multiplied_twice(b, n, width, image_bD.dtype, image_bD.device, kept)
    return 2 * (again + sides * b * n) * width
