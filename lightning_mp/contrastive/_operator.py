"""All contrastive losses as one operator of `torch.library`, which `torch.compile` does not trace.

A compiler sees the output shapes (fake implementation) and the gradient formula only. The inside
depends on the batch sizes of other ranks, on the pairing and on the workspace. Therefore the
forward returns the gradients themselves, which have the sizes of this rank; see `SweepResult`. The
inputs are the fields of a `Request`.

Autocast has no effect: features keep their dtype, and autocast is disabled inside.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_mp.contrastive._call.request import (
    DIFFERENTIABLE,
    SCHEMA,
    Request,
    group_named,
    ranks_of,
)
from lightning_mp.contrastive._exchange.exchange import collective_error
from lightning_mp.contrastive._sums.combined import combined_loss
from lightning_mp.contrastive._sums.prefixes import prefixes_loss
from lightning_mp.contrastive._sums.sigmoid import sigmoid_loss
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import Plan, SweepResult, agreed_plan
from lightning_mp.contrastive._sums.targeted import targeted_loss
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["contrastive_loss", "finish", "finish_gradients", "loss_of"]

_INPUTS = ", ".join(SCHEMA.split(", ")[:DIFFERENTIABLE])
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def loss_of(request: Request, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Return the loss of the global batch and its statistics, which are empty if not requested."""
    # The host waits for other hosts, or reads `positives`; neither can be part of a CUDA graph.
    needs_host = request.positives is not None or ranks_of(group, request.owner) > 1
    loss, statistics, *_ = (_on_host if needs_host else contrastive_loss)(*request.flat())
    return loss, statistics


def _run(*values: Any) -> tuple[Tensor, ...]:
    """Return loss, statistics and gradients in the shapes of `_fake`; missing ones are empty."""
    request = Request(*values)
    # Operators run below autograd, which `targeted_loss` and `combined_loss` need.
    with (
        torch.no_grad(),
        torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False),
        torch.autocast(request.image.device.type, enabled=False),
    ):
        try:
            plan = agreed_plan(request)
            result = _compute(plan).of_inputs(plan)
        except RuntimeError as error:
            failure = collective_error(request.owner, error)
            if failure is None:
                raise
            raise failure from error
    loss, *others = result
    needs = (request.statistics, *request.needs_grad)
    # Copied, because it shares memory with the scale's gradient, and outputs must not.
    loss = loss.to(plan.dtype, copy=True)
    # An operator cannot return `None`: an empty 1-D tensor stands for a missing output. Other ranks
    # may need outputs that this rank does not.
    return loss, *(
        x.contiguous() if x is not None and is_needed else loss.new_empty(0)
        for x, is_needed in zip(others, needs, strict=True)
    )


def _compute(plan: Plan) -> SweepResult:
    request = plan.request
    if request.widths:
        return prefixes_loss(plan)
    if not request.is_softmax:
        return sigmoid_loss(plan)
    if request.is_plain:
        return softmax_loss(plan)
    if request.is_combined:
        return combined_loss(plan)
    return targeted_loss(plan)


def _fake(*values: Any) -> tuple[Tensor, ...]:
    request = Request(*values)
    image_bD, text_nD = request.image, request.text
    wide, state = accumulation_dtype(image_bD.dtype), state_dtype(image_bD.device)
    negatives = () if request.negatives is None else request.negatives.shape
    shapes: tuple[Sequence[int], ...] = ((5,), image_bD.shape, text_nD.shape, (), (), negatives)
    dtypes = (wide, wide, wide, state, state, wide)
    needs = (request.statistics, *request.needs_grad)
    return image_bD.new_empty((), dtype=wide), *(
        image_bD.new_empty(shape, dtype=dtype) if need else image_bD.new_empty(0, dtype=wide)
        for need, shape, dtype in zip(needs, shapes, dtypes, strict=True)
    )


def _define(name: str, *tags: torch.Tag) -> Any:
    schema = f"({SCHEMA}) -> ({', '.join(['Tensor'] * (2 + DIFFERENTIABLE))})"
    operator = torch.library.custom_op(
        f"lightning_mp::{name}", _run, mutates_args=(), schema=schema, tags=tags
    )
    operator.register_fake(_fake)
    operator.register_autograd(_differentiate, setup_context=_save_for_backward)
    # Shapes alone have no dtype and device.
    register_flop_formula(getattr(torch.ops.lightning_mp, name), get_raw=True)(_flops)
    return operator


def finish_gradients(cotangent: Tensor, *inputs_and_gradients: Any) -> list[Tensor]:
    """Return the present gradients times the cotangent, in the dtypes and shapes of the inputs.

    The last argument is the list of gradients that `_run` returned. The inputs are arguments of the
    operator so that autograd reaches the error about second derivatives. Fake tensors take the same
    road.
    """
    *inputs, gradients = inputs_and_gradients
    return [
        # Multiplies and rounds in one operation.
        torch.mul(gradient, cotangent, out=x.new_empty(gradient.shape)).reshape(x.shape)
        for x, gradient in zip(inputs, gradients, strict=True)
        if x is not None and gradient.dim() != 1
    ]


# A separate operator, because a plain product would have second derivatives, and wrong ones.
finish = torch.library.custom_op(
    "lightning_mp::contrastive_loss_backward",
    finish_gradients,
    mutates_args=(),
    schema=f"(Tensor cotangent, {_INPUTS}, Tensor[] gradients) -> Tensor[]",
)
finish.register_fake(finish_gradients)


@finish.register_autograd
def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "Called a second derivative through a contrastive loss, which has a first derivative only. "
        "Use a dense loss for gradient penalties and other second derivatives."
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *rest = output
    ctx.inputs = len(inputs)
    ctx.save_for_backward(*inputs[:DIFFERENTIABLE], *rest[1:])
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)  # zeros for missing cotangents would double the memory


def _differentiate(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # Read once, because activation checkpointing returns saved tensors one time only.
    saved = ctx.saved_tensors
    inputs, gradients = saved[:DIFFERENTIABLE], list(saved[DIFFERENTIABLE:])
    finished = iter(finish(cotangent, *inputs, gradients))
    gradients = [None if x.dim() == 1 else next(finished) for x in gradients]
    return (*gradients, *(None for _ in range(ctx.inputs - len(gradients))))


def _flops(*values: Any, **_: Any) -> int:
    request = Request(*values)
    return 2 * request.products(ranks_of(group_named(request.group), request.owner))


contrastive_loss = _define("contrastive_loss")
# A second name, so that only calls that need the host are kept out of CUDA graphs.
_on_host = _define("contrastive_loss_on_host", torch.Tag.cudagraph_unsafe)
