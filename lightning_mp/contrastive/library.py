"""The loss of one process as operators of `torch.library`, so that `torch.compile` keeps it whole.

`torch.ops.lightning_mp.infonce` and `infonce_backward` run `sweep` and `differentiate` on a ring
of one. A compiler sees their shapes (the fake implementations) and the gradient formula, never
their inside. Autocast does not change what they compute: features are taken in the dtype that they
have, as `ContrastiveLoss` documents, and autocast is off inside.

Shapes:
    b: batch. n: texts, of which the first b belong to the images. D: feature width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_mp.contrastive.backends import make_tiles
from lightning_mp.contrastive.exchange import HEADER
from lightning_mp.contrastive.infonce import NO_SECOND_DERIVATIVE, Plan, Swept, differentiate, sweep
from lightning_mp.contrastive.pair_options import PairOptions
from lightning_mp.contrastive.ring import Ring
from lightning_mp.contrastive.torch_tiles import TorchTiles
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["infonce", "infonce_backward", "loss_of_one"]


def _plan(
    image_bD: Tensor,
    needs_grad: list[bool],
    backend: str,
    tile_dtype: str,
    workspace_bytes: int | None,
    autotune: bool,
    ids_b: Tensor | None = None,
    directions: str = "both",
    *,
    columns: int | None = None,
    statistics: bool = False,
) -> Plan:
    tiles = make_tiles(
        backend,
        image_bD.device,
        image_bD.dtype,
        workspace_bytes=workspace_bytes,
        tile_dtype=tile_dtype,
        autotune=autotune,
    )
    pairs = image_bD.shape[0]
    return Plan(
        Ring([pairs if columns is None else columns]), tiles, *(needs_grad or [False] * 3),
        ids_b=ids_b, pairs=pairs, statistics=statistics,
        directions=directions,  # type: ignore[arg-type]
    )  # fmt: skip


def loss_of_one(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return loss and statistics of one process, by the operator."""
    keeps = torch.is_grad_enabled() and (
        image_bD.requires_grad or text_nD.requires_grad or scale.requires_grad
    )
    loss, *_, found = infonce(
        image_bD, text_nD, scale, bias, **options, keeps=keeps, ids=pairs.masked_ids,
        directions=pairs.directions, statistics=pairs.statistics,
    )  # fmt: skip
    return loss, found


@torch.library.custom_op("lightning_mp::infonce", mutates_args=())
def infonce(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    backend: str,
    tile_dtype: str,
    workspace_bytes: int | None,
    autotune: bool,
    keeps: bool = True,
    ids: Tensor | None = None,
    directions: str = "both",
    statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of the batch, what `Swept` names for the backward, and its statistics.

    Args:
        image_bD: Image features, (b, D).
        text_nD: Text features, (n, D) with n >= b.
        scale: The logit scale, one value.
        bias: The logit bias, one value, or `None`.
        backend: See `ContrastiveLoss`, as all that follow.
        tile_dtype: What is multiplied.
        workspace_bytes: Memory for tiles.
        autotune: Choose tile shapes by the clock.
        keeps: Keep what tiles fit the workspace for a backward that is to come.
        ids: What each text shows, (n,) in int64, or `None`.
        directions: Which cross entropies count.
        statistics: Work out the values of `LossStatistics`, too; empty without.
    """
    plan = _plan(
        image_bD,
        [keeps] * 3,
        backend,
        tile_dtype,
        workspace_bytes,
        autotune,
        ids,
        directions,
        columns=text_nD.shape[0],
        statistics=statistics,
    )
    swept = sweep(image_bD, text_nD, scale, bias, plan)
    found = swept.loss.new_empty(0) if swept.statistics_5 is None else swept.statistics_5
    return swept.loss, swept.row_lse_b, swept.column_lse, swept.weight_b, swept.kept, found


@infonce.register_fake
def _(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    backend: str,
    tile_dtype: str,
    workspace_bytes: int | None,
    autotune: bool,
    keeps: bool = True,
    ids: Tensor | None = None,
    directions: str = "both",
    statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    state, b = state_dtype(image_bD.device), image_bD.shape[0]
    m = text_nD.shape[0]
    row_lse_b, column_lse_n, weight_b = (
        image_bD.new_empty(size, dtype=state) for size in (b, HEADER + m, b)
    )
    column_lse_n = column_lse_n[HEADER:]  # as `Exchange.publish` has them
    dtype = accumulation_dtype(image_bD.dtype)
    tiles = _plan(image_bD, [], backend, tile_dtype, workspace_bytes, autotune).tiles
    size = tiles.kept_values(b, m, image_bD.dtype, image_bD.device) if keeps else 0
    kept = image_bD.new_empty(size, dtype=dtype)
    loss, found = (image_bD.new_empty(s, dtype=dtype) for s in ((), 5 * statistics))
    return loss, row_lse_b, column_lse_n, weight_b, kept, found


@torch.library.custom_op("lightning_mp::infonce_backward", mutates_args=())
def infonce_backward(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: list[Tensor],
    needs_grad: list[bool],
    backend: str,
    tile_dtype: str,
    workspace_bytes: int | None,
    autotune: bool,
    ids: Tensor | None = None,
    directions: str = "both",
) -> list[Tensor]:
    """Return the gradients of images, texts and scale that are needed, and of a bias if given.

    Args:
        cotangent: Gradient of the loss, one value.
        image_bD: Image features, (b, D).
        text_nD: Text features, (n, D) with n >= b.
        scale: The logit scale, one value.
        bias: The logit bias, one value, or `None`.
        swept: What the forward returned, without statistics.
        needs_grad: Whether images, texts and scale need their gradient. What none needs, such as
            the product of a locked tower, is not worked out.
        backend: See `ContrastiveLoss`, as all that follow.
        tile_dtype: What is multiplied.
        workspace_bytes: Memory for tiles.
        autotune: Choose tile shapes by the clock.
        ids: What each text shows, (n,) in int64, or `None`.
        directions: Which cross entropies count.
    """
    plan = _plan(
        image_bD,
        needs_grad,
        backend,
        tile_dtype,
        workspace_bytes,
        autotune,
        ids,
        directions,
        columns=text_nD.shape[0],
    )
    d_inputs = differentiate(cotangent, image_bD, text_nD, scale, bias, Swept(*swept), plan)
    wanted = (*needs_grad, bias is not None)
    return [
        gradient
        for gradient, is_wanted in zip(d_inputs, wanted, strict=True)
        if gradient is not None and is_wanted
    ]


@infonce_backward.register_fake
def _(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: list[Tensor],
    needs_grad: list[bool],
    *options: Any,
) -> list[Tensor]:
    inputs = (image_bD, text_nD, scale)
    wanted = [x for x, needs in zip(inputs, needs_grad, strict=True) if needs]
    if bias is not None:
        wanted.append(bias)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ids = inputs[9] if len(inputs) > 9 else None
    ctx.directions = inputs[10] if len(inputs) > 10 else "both"
    ctx.save_for_backward(*inputs[:4], ids, *output[:-1])
    ctx.options = inputs[4:8]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros for these would take as much memory again


def _differentiate(ctx: Any, cotangent: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    image_bD, text_nD, scale, bias, ids, *swept = ctx.saved_tensors
    needs_grad = list(ctx.needs_input_grad[:3])
    gradients = iter(
        infonce_backward(
            cotangent,
            image_bD,
            text_nD,
            scale,
            bias,
            swept,
            needs_grad,
            *ctx.options,
            ids,
            ctx.directions,
        )
    )
    wanted = (*needs_grad, bias is not None)
    d_inputs = [next(gradients) if is_wanted else None for is_wanted in wanted]
    return (*d_inputs, *(None for _ in ctx.options), None, None, None, None)


infonce.register_autograd(_differentiate, setup_context=_save)


@infonce_backward.register_autograd
def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


@register_flop_formula(torch.ops.lightning_mp.infonce)
def _forward_flops(
    image_shape: Sequence[int], text_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    """Count one unit, `2 b n D`, for `FlopCounterMode`; split operands multiply three times."""
    b, width = image_shape
    return 2 * b * text_shape[0] * width


@register_flop_formula(torch.ops.lightning_mp.infonce_backward, get_raw=True)
def _backward_flops(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: Sequence[Tensor],
    needs_grad: Sequence[bool],
    *options: Any,
    **_: Any,
) -> int:
    """Count one unit for each side's gradient, and the logits that were not kept once more."""
    sides = sum(needs_grad[:2])
    if sides == 0 and needs_grad[2]:
        sides = 1  # the scale's gradient comes from one side's
    if not sides:
        return 0
    (b, width), n = image_bD.shape, text_nD.shape[0]
    tiles = _plan(image_bD, [], *options[:4]).tiles
    again = b * n
    if isinstance(tiles, TorchTiles):
        kept = swept[-1].numel()
        again = tiles.multiplied_twice(b, n, width, image_bD.dtype, image_bD.device, kept)
    return 2 * (again + sides * b * n) * width
