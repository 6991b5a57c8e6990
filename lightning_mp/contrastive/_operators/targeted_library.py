"""The loss of one process with `PairOptions`, as operators that `torch.compile` takes in.

`torch.ops.lightning_mp.targeted_infonce` and `targeted_infonce_backward` do what `TargetedInfoNCE`
does, on a ring of one. Outside of a compiler that one runs, whose memory and products can be seen.

Which texts belong together is a matter of values, which no compiler knows: positives are read and
rows put into their order inside, and gradients into that of the inputs. The order is kept for the
backward.

Shapes:
    b: batch. n: texts. k: negatives of an image. D: feature width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mp.contrastive._call.pair_options import RULES, PairOptions
from lightning_mp.contrastive._call.pairing import Pairing
from lightning_mp.contrastive._exchange.agreement import plan_of_one, trained
from lightning_mp.contrastive._exchange.exchange import HEADER
from lightning_mp.contrastive._operators.operators import (
    FEATURES,
    TILES,
    define,
    derive,
    wanted_like,
)
from lightning_mp.contrastive._sums.infonce import NO_SECOND_DERIVATIVE
from lightning_mp.contrastive._sums.targeted_infonce import (
    TargetedSwept,
    differentiate_targets,
    sweep_targets,
)
from lightning_mp.contrastive._tiles.backends import TileChoice
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["loss_of_targets", "targeted_infonce", "targeted_infonce_backward"]

_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_PAIRS = "Tensor? ids, Tensor? weights, Tensor? positives, Tensor? guide_image, Tensor? guide_text"
_RULES = "str directions, str duplicates, float label_smoothing, str false_negatives, float margin"


def loss_of_targets(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    tiles: TileChoice,
) -> tuple[Tensor, Tensor]:
    """Return loss and statistics of one process, by the operator."""
    negatives = pairs.negatives
    extra = torch.is_grad_enabled() and negatives is not None and negatives.requires_grad
    needs_grad = [*trained(image_bD, text_nD, scale, None), extra]
    loss, found, _ = targeted_infonce(
        image_bD, text_nD, scale, bias, negatives, pairs.ids, pairs.weights, pairs.positives,
        pairs.guide_image, pairs.guide_text, needs_grad, pairs.statistics,
        *(getattr(pairs, name) for name in RULES), *tiles,
    )  # fmt: skip
    return loss, found


def _targeted_infonce(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    negatives_bkD: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the loss, its statistics (empty if not wanted), and what the backward takes.

    Raises:
        ValueError: Positives cannot be used.
    """
    ids, weights, positives, guide_image, guide_text, needs_grad, statistics = options[:7]
    rules: Any = dict(zip(RULES, options[7:12], strict=True))
    pairs = PairOptions(
        ids, weights, positives, negatives_bkD, guide_image, guide_text, statistics=statistics,
        **rules,
    )  # fmt: skip
    problem, pairs, image_bD, text_nD = pairs.paired(image_bD, text_nD)
    if problem is not None:
        raise ValueError(problem)
    plan = plan_of_one(image_bD, text_nD, pairs, TileChoice(*options[12:]), needs_grad[:3])
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


def _fake_targeted_infonce(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    negatives_bkD: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    (b, width), n = image_bD.shape, text_nD.shape[0]
    dtype, state = accumulation_dtype(image_bD.dtype), state_dtype(image_bD.device)

    def empty(*shape: Any, dtype: torch.dtype = dtype) -> Tensor:
        return image_bD.new_empty(shape, dtype=dtype)

    _, _, positives, _, _, needs_grad, statistics, *_, false_negatives, _ = options[:12]
    keeps = any(needs_grad[:3]) and false_negatives == "keep"
    size = TileChoice(*options[12:]).kept_values(image_bD, n) if keeps else 0
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
    return empty(), empty(5 * statistics), [*lses, *gradients, *order, matched]


targeted_infonce = define(
    "targeted_infonce",
    f"({FEATURES}, Tensor? negatives_bkD, {_PAIRS}, bool[] needs_grad, bool statistics, {_RULES},"
    f" {TILES}) -> (Tensor, Tensor, Tensor[])",
    _targeted_infonce,
    _fake_targeted_infonce,
)


def _targeted_infonce_backward(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    loss: Tensor,
    saved: list[Tensor],
    needs_grad: list[bool],
    *options: Any,
) -> list[Tensor]:
    """Return the gradients of images, texts, scale, bias and negatives that are needed.

    `loss` and `saved` are what the forward returned; `ids` those whose equal pairs are left out.
    """
    ids, guide_image, guide_text, directions, false_negatives, margin, *tiles = options
    rules: Any = {"directions": directions, "false_negatives": false_negatives, "margin": margin}
    pairs = PairOptions(ids=ids, guide_image=guide_image, guide_text=guide_text, **rules)
    *found, image_order, text_order, matched = saved
    is_ordered = len(image_order) > 0
    if is_ordered:
        pairing = Pairing(image_order, text_order, int(matched), image_order, text_order)
        pairs, image_bD, text_nD = pairs.in_order(pairing, image_bD, text_nD)
    plan = plan_of_one(image_bD, text_nD, pairs, TileChoice(*tiles), needs_grad[:3])
    task = [x if need else None for x, need in zip(found[4:], needs_grad, strict=True)]
    swept = TargetedSwept(loss, *found[:4], *task)
    d_inputs = differentiate_targets(cotangent, image_bD, text_nD, scale, bias, swept, plan)
    if is_ordered:
        for place, order in ((0, image_order), (1, text_order), (4, image_order)):
            gradient = d_inputs[place]
            if gradient is not None:
                d_inputs[place] = torch.empty_like(gradient).index_copy_(0, order, gradient)
    return [x for x in d_inputs if x is not None]


def _fake_targeted_infonce_backward(cotangent: Tensor, *arguments: Any) -> list[Tensor]:
    *inputs, _, saved, needs_grad = arguments[:7]
    return wanted_like([*inputs, saved[7]], (*needs_grad[:3], True, needs_grad[3]))


targeted_infonce_backward = define(
    "targeted_infonce_backward",
    f"(Tensor cotangent, {FEATURES}, Tensor loss, Tensor[] saved, bool[] needs_grad, Tensor? ids,"
    " Tensor? guide_image, Tensor? guide_text, str directions, str false_negatives, float margin,"
    f" {TILES}) -> Tensor[]",
    _targeted_infonce_backward,
    _fake_targeted_infonce_backward,
)


def _save(inputs: Sequence[Any], output: Sequence[Any]) -> tuple[list[Tensor | None], Any]:
    *features, _, ids, _, _, guide_image, guide_text, needs_grad, _ = inputs[:12]
    directions, duplicates, _, *options = inputs[12:]
    loss, _, saved = output
    # Ids of positives are in the task's gradients.
    ids = ids if duplicates == "mask" else None
    return [*features, loss, ids, guide_image, guide_text, *saved], (
        needs_grad,
        (directions, *options),
    )


def _arguments(
    cotangent: Tensor, tensors: Sequence[Any], values: Any, _: Sequence[bool]
) -> tuple[Sequence[Any], Sequence[bool]]:
    needs_grad, options = values
    *inputs, ids, guide_image, guide_text = tensors[:8]
    pairs = (ids, guide_image, guide_text)
    arguments = (cotangent, *inputs, list(tensors[8:]), needs_grad, *pairs, *options)
    return arguments, (*needs_grad[:3], inputs[3] is not None, needs_grad[3])


derive(targeted_infonce, targeted_infonce_backward, _save, _arguments, NO_SECOND_DERIVATIVE)
