"""All contrastive losses as one operator of `torch.library`, which `torch.compile` keeps whole.

A compiler sees the shapes that come out of it (the fake implementation) and the gradient formula,
never its inside: how large the batches of other ranks are, which texts belong together, and what
fits the workspace. So all that passes from the forward to the backward has this rank's sizes: the
gradients themselves, see `SweepResult`. What goes into it are the fields of a `Request`.

Autocast does not change what it computes: features are taken in the dtype that they have, as
`ContrastiveLoss` documents, and autocast is off inside.

Shapes:
    b: this rank's images. n: its texts, of which the first b belong to them. D: feature width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_mp.contrastive._call.pairing import paired
from lightning_mp.contrastive._call.request import (
    DIFFERENTIABLE,
    SCHEMA,
    Request,
    group_named,
    ranks_of,
)
from lightning_mp.contrastive._exchange.failures import collective_error
from lightning_mp.contrastive._sums.agreement import agreed_plan, refuse
from lightning_mp.contrastive._sums.combined import combined_loss
from lightning_mp.contrastive._sums.prefixes import prefixes_loss
from lightning_mp.contrastive._sums.sigmoid import sigmoid_loss
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import Plan, SweepResult
from lightning_mp.contrastive._sums.targeted import targeted_loss
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["contrastive_loss", "finish", "finish_gradients", "loss_of"]

_INPUTS = ", ".join(SCHEMA.split(", ")[:DIFFERENTIABLE])
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def loss_of(request: Request, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Return the loss of the global batch and the values of its statistics, empty if not wanted.

    Raises:
        ValueError: Something cannot be used; on all ranks.
        CollectiveError: A collective has failed.
    """
    # The host waits for other hosts, or reads which texts belong together.
    asks_host = request.positives is not None or ranks_of(group, request.owner) > 1
    # Two names of one operator: only what asks the host is kept out of CUDA graphs.
    loss, statistics, *_ = (_on_host if asks_host else contrastive_loss)(*request.flat())
    return loss, statistics


def _run(*values: Any) -> tuple[Tensor, ...]:
    """Return the loss, its statistics and gradients, as `_fake` has them; empty is what is not due.

    Raises:
        ValueError: Something cannot be used; on all ranks.
    """
    request, pairing = Request.from_flat(values), None
    given, bias = request, request.bias
    if request.positives is not None:
        problem, request, pairing = paired(request, request.positives)
        if problem is not None:
            refuse(problem, request.owner, request.image, group_named(request.group))
    # Operators run below autograd, which targets take their gradients from.
    with (
        torch.no_grad(),
        torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False),
        torch.autocast(request.image.device.type, enabled=False),
    ):
        try:
            plan = agreed_plan(request, pairing)
            found = _found(plan)
        except RuntimeError as error:
            told = collective_error(request.owner, error)
            if told is None:
                raise
            raise told from error
    loss, d_bias = found.loss, found.d_bias
    if bias is not None and request.is_softmax:
        # It shifts all logits alike; but its NaN and inf are not to vanish.
        loss = loss + 0.0 * bias.to(loss.dtype).reshape(())
        d_bias = 0.0 * loss
    gradients = [found.d_image_bD, found.d_text_nD, found.d_scale, d_bias, found.d_negatives_bkD]
    if pairing is not None:
        pairing.restore(gradients)
    # What other ranks want is worked out with them, and of no use here.
    wanted = [x if need else None for x, need in zip(gradients, given.needs_grad, strict=True)]
    statistics_5 = found.statistics_5 if request.statistics else None
    # A copy: it and the scale's gradient are views of one sum, and outputs may not share memory.
    loss = loss.to(plan.dtype, copy=True)
    # An operator returns tensors only: an empty one, of one dimension, stands for none.
    given_out = (
        loss.new_empty(0) if x is None else x.contiguous() for x in (statistics_5, *wanted)
    )
    return loss, *given_out


def _found(plan: Plan) -> SweepResult:
    """Return the loss that a request asks for, and its gradients."""
    request = plan.request
    if request.widths:
        return prefixes_loss(plan)
    if not request.is_softmax:
        return sigmoid_loss(plan)
    if request.is_combined:
        return combined_loss(plan)
    # One positive a row and all rows alike: the sweeps alone make the loss.
    per_row = (request.weights, request.positives, request.negatives)
    is_plain = all(x is None for x in per_row) and not request.label_smoothing
    if is_plain and request.duplicates == "mask":
        return softmax_loss(plan)
    return targeted_loss(plan, request.needs_grad[-1])


def _fake(*values: Any) -> tuple[Tensor, ...]:
    request = Request.from_flat(values)
    image_bD, negatives_bkD = request.image, request.negatives
    wide, state = accumulation_dtype(image_bD.dtype), state_dtype(image_bD.device)

    def empty(is_there: bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return (
            image_bD.new_empty(shape, dtype=dtype)
            if is_there
            else image_bD.new_empty(0, dtype=wide)
        )

    of_image, of_text, of_scale, of_bias, of_negatives = request.needs_grad
    return (
        empty(True, (), wide),
        empty(request.statistics, (5,), wide),
        empty(of_image, image_bD.shape, wide),
        empty(of_text, request.text.shape, wide),
        empty(of_scale, (), state),
        empty(of_bias, (), state),
        empty(of_negatives, () if negatives_bkD is None else negatives_bkD.shape, wide),
    )


def _define(name: str, *tags: torch.Tag) -> Any:
    """Return an operator of `_run`."""
    schema = f"({SCHEMA}) -> ({', '.join(['Tensor'] * (2 + DIFFERENTIABLE))})"
    operator = torch.library.custom_op(
        f"lightning_mp::{name}", _run, mutates_args=(), schema=schema, tags=tags
    )
    operator.register_fake(_fake)
    operator.register_autograd(_differentiate, setup_context=_keep)
    return operator


def finish_gradients(cotangent: Tensor, *inputs_and_gradients: Any) -> list[Tensor]:
    """Return the gradients that are there, times the cotangent, as the inputs have them.

    The gradients, a list, are what `_run` returned after its statistics. The inputs say of what
    dtype, and lead second derivatives to a refusal.
    """
    *inputs, gradients = inputs_and_gradients
    return [
        # Multiplied and rounded in one operation.
        torch.mul(gradient, cotangent, out=x.new_empty(gradient.shape)).reshape(x.shape)
        for x, gradient in zip(inputs, gradients, strict=True)
        if x is not None and gradient.dim() != 1
    ]


def _fake_finish(cotangent: Tensor, *inputs_and_gradients: Any) -> list[Tensor]:
    *inputs, gradients = inputs_and_gradients
    return [
        # As `finish_gradients` makes them, whatever the strides of the inputs.
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, gradient in zip(inputs, gradients, strict=True)
        if x is not None and gradient.dim() != 1
    ]


# An operator of its own: as a plain product it would have second derivatives, and wrong ones.
finish = torch.library.custom_op(
    "lightning_mp::contrastive_loss_backward",
    finish_gradients,
    mutates_args=(),
    schema=f"(Tensor cotangent, {_INPUTS}, Tensor[] gradients) -> Tensor[]",
)
finish.register_fake(_fake_finish)


@finish.register_autograd
def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "Called a second derivative through a contrastive loss, which has a first one only. Write "
        "a gradient penalty on something else, or use a dense loss for it."
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *rest = output
    ctx.inputs = len(inputs)
    ctx.save_for_backward(*inputs[:DIFFERENTIABLE], *rest[1:])
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)  # zeros for the others would take as much memory again


def _differentiate(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # Once: a checkpoint around the loss gives its tensors out one time.
    saved = ctx.saved_tensors
    inputs, gradients = saved[:DIFFERENTIABLE], list(saved[DIFFERENTIABLE:])
    finished = iter(finish(cotangent, *inputs, gradients))
    found = [None if x.dim() == 1 else next(finished) for x in gradients]
    return (*found, *(None for _ in range(ctx.inputs - len(found))))


contrastive_loss = _define("contrastive_loss")
# CUDA graphs of compilers leave it out.
_on_host = _define("contrastive_loss_on_host", torch.Tag.cudagraph_unsafe)


@register_flop_formula(
    [torch.ops.lightning_mp.contrastive_loss, torch.ops.lightning_mp.contrastive_loss_on_host],
    # Else shapes would come in place of tensors, without dtype and device.
    get_raw=True,
)
def _flops(*values: Any, **_: Any) -> int:
    """Count the products over pairs for `FlopCounterMode`, with ranks of equal batches.

    One for the logits, one for each side's gradient, and for a softmax one for the logits that were
    not kept; `2 b n D` each. Split operands multiply three times.
    """
    request = Request.from_flat(values)
    group = group_named(request.group)
    b, n = len(request.image), len(request.text) * ranks_of(group, request.owner)
    tiles = request.tiles(request.workspace_bytes)
    sides = sum(request.needs_grad[:2]) or int(any(request.needs_grad[2:4]))
    widths = list(request.widths) or [request.image.shape[1]]
    again = 0
    if request.is_softmax and sides:
        again = b * n
        if request.stores_tiles and request.false_negatives == "keep":
            features = (request.image.dtype, request.image.device)
            stored = tiles.stored_values(b, len(widths) * n, *features)
            again = tiles.multiplied_twice(b, n, widths[0], *features, stored)
    if request.is_combined:
        return _combined_flops(request, b, len(request.text), n // max(1, len(request.text)))
    guides = 0 if request.guide_image is None else request.guide_image.shape[1]
    of_logits: int = sum(widths) * (again + (1 + sides) * b * n)
    return 2 * (of_logits + guides * (2 if sides else 1) * b * n)


def _combined_flops(request: Request, b: int, texts: int, ranks: int) -> int:
    """Count the products over pairs where directions share a softmax: each part works them out."""
    sweeps = 2 + sum(request.needs_grad[:2]) if any(request.needs_grad) else 1
    of_text = b * texts * ranks * (1 + (request.hardness > 0 and request.directions == "both"))
    of_image = b * b * ranks * (request.within in ("image", "both"))
    of_text += b * texts * ranks * (request.within in ("text", "both"))
    width: int = request.image.shape[1]
    return 2 * sweeps * width * (of_text + of_image)
