"""The loss of one process with `PairOptions`, as operators that `torch.compile` takes in.

`torch.ops.lightning_mp.targeted_infonce` and `targeted_infonce_backward` do what `TargetedInfoNCE`
does, on a ring of one. Outside of a compiler that one runs, whose memory and products can be seen.

Which texts belong together is a matter of values, which no compiler knows: positives are read and
rows put into their order inside, and gradients into that of the inputs. The order is kept for the
backward.

Shapes:
    b: batch. n: texts. k: negatives of an image. D: feature width.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lightning_mp.contrastive.agreement import plan_of_one, trained
from lightning_mp.contrastive.backends import make_tiles
from lightning_mp.contrastive.exchange import HEADER
from lightning_mp.contrastive.infonce import NO_SECOND_DERIVATIVE, Plan
from lightning_mp.contrastive.pair_options import RULES, PairOptions
from lightning_mp.contrastive.pairing import Pairing
from lightning_mp.contrastive.targeted_infonce import (
    TargetedSwept,
    differentiate_targets,
    sweep_targets,
)
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["loss_of_targets", "targeted_infonce", "targeted_infonce_backward"]

_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_TILES = ("backend", "tile_dtype", "workspace_bytes", "autotune")


def loss_of_targets(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return loss and statistics of one process, by the operator."""
    negatives = pairs.negatives
    extra = torch.is_grad_enabled() and negatives is not None and negatives.requires_grad
    needs_grad = [*trained(image_bD, text_nD, scale, None), extra]
    loss, found, _ = targeted_infonce(
        image_bD, text_nD, scale, bias, negatives, pairs.ids, pairs.weights, pairs.positives,
        pairs.guide_image, pairs.guide_text, needs_grad, pairs.statistics,
        *(getattr(pairs, name) for name in RULES), *(options[name] for name in _TILES),
    )  # fmt: skip
    return loss, found


def _plan(
    pairs: PairOptions,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    needs_grad: list[bool],
    tiles: tuple[Any, ...],
) -> Plan:
    options = dict(zip(_TILES, tiles, strict=True))
    plan = plan_of_one(image_bD, text_nD, scale, None, pairs, options=options)
    image, text, scale_too, _ = needs_grad
    return dataclasses.replace(
        plan, image_needs_grad=image, text_needs_grad=text, scale_needs_grad=scale_too
    )


@torch.library.custom_op("lightning_mp::targeted_infonce", mutates_args=())
def targeted_infonce(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    negatives_bkD: Tensor | None,
    ids: Tensor | None,
    weights: Tensor | None,
    positives: Tensor | None,
    guide_image: Tensor | None,
    guide_text: Tensor | None,
    needs_grad: list[bool],
    statistics: bool,
    directions: str,
    duplicates: str,
    label_smoothing: float,
    false_negatives: str,
    margin: float,
    backend: str,
    tile_dtype: str,
    workspace_bytes: int | None,
    autotune: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the loss, its statistics (empty if not wanted), and what the backward takes.

    Args:
        image_bD: Image features, (b, D).
        text_nD: Text features, (n, D).
        scale: The logit scale, one value.
        bias: The logit bias, one value, or `None`.
        negatives_bkD: Of each image alone, (b, k, D), or `None`.
        ids: See `ContrastiveLoss`, as all that follow.
        weights: What each pair counts.
        positives: Which texts belong to each image.
        guide_image: Features that judge.
        guide_text: Likewise.
        needs_grad: Whether images, texts, scale and negatives are to have gradients.
        statistics: Work out the values of `LossStatistics`, too.
        directions: Which cross entropies count.
        duplicates: What equal ids mean.
        label_smoothing: Part of each target.
        false_negatives: What is left out.
        margin: Below the positive.
        backend: What multiplies tiles.
        tile_dtype: What is multiplied.
        workspace_bytes: Memory for tiles.
        autotune: Choose tile shapes by the clock.

    Raises:
        ValueError: Positives cannot be used.
    """
    values = (directions, duplicates, label_smoothing, false_negatives, margin)
    rules: Any = dict(zip(RULES, values, strict=True))
    given = (ids, weights, positives, negatives_bkD, guide_image, guide_text)
    pairs = PairOptions(*given, **rules, statistics=statistics)
    problem, pairs, image_bD, text_nD = pairs.paired(image_bD, text_nD)
    if problem is not None:
        raise ValueError(problem)
    tiles = (backend, tile_dtype, workspace_bytes, autotune)
    plan = _plan(pairs, image_bD, text_nD, scale, needs_grad, tiles)
    # Operators run below autograd, which the task takes its gradients from.
    with torch.no_grad(), torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False):
        swept = sweep_targets(
            image_bD, text_nD, scale, bias, pairs.negatives, plan, pairs, needs_grad[3]
        )
    *gradients, found = (
        swept.loss.new_empty(0) if x is None else x.contiguous()
        for x in (*swept[5:9], swept.statistics_5)
    )
    return swept.loss, found, [*swept[1:5], *gradients, *_order_of(pairs, image_bD, text_nD)]


def _order_of(pairs: PairOptions, image_bD: Tensor, text_nD: Tensor) -> list[Tensor]:
    """Return the order of images and of texts, and on the host how many images have a text."""
    if pairs.pairing is None:
        return [torch.empty(0, dtype=torch.int64, device=image_bD.device) for _ in range(2)] + [
            torch.tensor([len(image_bD)])
        ]
    sides = ((pairs.pairing.image_order, image_bD), (pairs.pairing.text_order, text_nD))
    orders = [torch.arange(len(x), device=x.device) if o is None else o for o, x in sides]
    return [*orders, torch.tensor([pairs.pairing.matched])]


@targeted_infonce.register_fake
def _(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    negatives_bkD: Tensor | None,
    ids: Tensor | None,
    weights: Tensor | None,
    positives: Tensor | None,
    guide_image: Tensor | None,
    guide_text: Tensor | None,
    needs_grad: list[bool],
    statistics: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    (b, width), n = image_bD.shape, text_nD.shape[0]
    dtype, state = accumulation_dtype(image_bD.dtype), state_dtype(image_bD.device)

    def empty(*shape: Any, dtype: torch.dtype = dtype) -> Tensor:
        return image_bD.new_empty(shape, dtype=dtype)

    loss, found = empty(), empty(5 * statistics)
    *_, false_negatives, _, backend, tile_dtype, workspace_bytes, autotune = options
    size = 0
    if any(needs_grad[:3]) and false_negatives == "keep":
        tiles = make_tiles(
            backend, image_bD.device, image_bD.dtype, workspace_bytes=workspace_bytes,
            tile_dtype=tile_dtype, autotune=autotune,
        )  # fmt: skip
        size = tiles.kept_values(b, n, image_bD.dtype, image_bD.device)
    column_lse = empty(HEADER + n, dtype=state)[HEADER:]  # as `Exchange.publish` has them
    gradients = [
        empty(b, width) if needs_grad[0] else empty(0),
        empty(n, width) if needs_grad[1] else empty(0),
        empty(dtype=state) if needs_grad[2] else empty(0),
        torch.empty_like(negatives_bkD, memory_format=torch.contiguous_format)
        if needs_grad[3] and negatives_bkD is not None
        else empty(0),
    ]
    sizes = (0, 0) if positives is None else (b, n)
    order = [empty(length, dtype=torch.int64) for length in sizes]
    matched = torch.empty(1, dtype=torch.int64, device="cpu")
    lses = [empty(dtype=state), empty(size), empty(b, dtype=state), column_lse]
    return loss, found, [*lses, *gradients, *order, matched]


@torch.library.custom_op("lightning_mp::targeted_infonce_backward", mutates_args=())
def targeted_infonce_backward(
    cotangent: Tensor,
    loss: Tensor,
    saved: list[Tensor],
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    ids: Tensor | None,
    guide_image: Tensor | None,
    guide_text: Tensor | None,
    needs_grad: list[bool],
    directions: str,
    false_negatives: str,
    margin: float,
    backend: str,
    tile_dtype: str,
    workspace_bytes: int | None,
    autotune: bool,
) -> list[Tensor]:
    """Return the gradients of images, texts, scale and negatives that are needed, and of a bias.

    Args:
        cotangent: Gradient of the loss, one value.
        loss: What the forward returned.
        saved: Likewise.
        image_bD: See `targeted_infonce`, as all that follow.
        text_nD: Text features.
        scale: The logit scale.
        bias: The logit bias.
        ids: Where their equal pairs are left out.
        guide_image: Features that judge.
        guide_text: Likewise.
        needs_grad: What is to have gradients.
        directions: Which cross entropies count.
        false_negatives: What is left out.
        margin: Below the positive.
        backend: What multiplies tiles.
        tile_dtype: What is multiplied.
        workspace_bytes: Memory for tiles.
        autotune: Choose tile shapes by the clock.
    """
    rules: Any = {"directions": directions, "false_negatives": false_negatives, "margin": margin}
    pairs = PairOptions(ids=ids, guide_image=guide_image, guide_text=guide_text, **rules)
    *found, image_order, text_order, matched = saved
    is_ordered = len(image_order) > 0
    if is_ordered:
        pairing = Pairing(image_order, text_order, int(matched), image_order, text_order)
        pairs, image_bD, text_nD = pairs.in_order(pairing, image_bD, text_nD)
    tiles = (backend, tile_dtype, workspace_bytes, autotune)
    plan = _plan(pairs, image_bD, text_nD, scale, needs_grad, tiles)
    task = [x if need else None for x, need in zip(found[4:], needs_grad, strict=True)]
    swept = TargetedSwept(loss, *found[:4], *task)
    *d_inputs, d_bias, d_negatives = differentiate_targets(
        cotangent, image_bD, text_nD, scale, bias, swept, plan
    )
    d_inputs.append(d_negatives)
    if is_ordered:
        for place, order in ((0, image_order), (1, text_order), (3, image_order)):
            gradient = d_inputs[place]
            if gradient is not None:
                d_inputs[place] = torch.empty_like(gradient).index_copy_(0, order, gradient)
    return [x for x in (*d_inputs, d_bias) if x is not None]


@targeted_infonce_backward.register_fake
def _(
    cotangent: Tensor,
    loss: Tensor,
    saved: list[Tensor],
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    ids: Tensor | None,
    guide_image: Tensor | None,
    guide_text: Tensor | None,
    needs_grad: list[bool],
    *options: Any,
) -> list[Tensor]:
    inputs = (image_bD, text_nD, scale, saved[7])
    wanted = [x for x, needs in zip(inputs, needs_grad, strict=True) if needs]
    if bias is not None:
        wanted.append(bias)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    image_bD, text_nD, scale, bias, _, ids, _, _, guide_image, guide_text, *rest = inputs
    ctx.needs_grad, _, directions, duplicates, _, *options = rest
    ctx.options = (directions, *options)
    loss, found, saved = output
    # Ids of positives are in the task's gradients.
    ids = ids if duplicates == "mask" else None
    ctx.save_for_backward(
        image_bD, text_nD, scale, bias, ids, guide_image, guide_text, loss, *saved
    )
    ctx.mark_non_differentiable(found, *saved)
    ctx.set_materialize_grads(False)  # zeros for these would take as much memory again


def _differentiate(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *inputs, loss = ctx.saved_tensors[:8]
    saved = list(ctx.saved_tensors[8:])
    gradients = iter(
        targeted_infonce_backward(cotangent, loss, saved, *inputs, ctx.needs_grad, *ctx.options)
    )
    d_image, d_text, d_scale, d_negatives = (next(gradients) if x else None for x in ctx.needs_grad)
    d_bias = None if inputs[3] is None else next(gradients)
    return d_image, d_text, d_scale, d_bias, d_negatives, *(None for _ in range(16))


targeted_infonce.register_autograd(_differentiate, setup_context=_save)


@targeted_infonce_backward.register_autograd
def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)
