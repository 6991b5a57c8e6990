r"""The AdamW step over half- or full-precision weights in plain torch, without a host sync.

Legend: `w` weight, `g` gradient, `m` first moment, `v` second moment, `t` step count, `c` bound on
the RMS of the update; hats are bias-corrected.

.. math::
    g &= \pm \mathrm{grad} / \mathrm{grad\_scale} \\
    w &\leftarrow (1 - \mathrm{lr} \, \lambda) \, w \\
    m &\leftarrow \mathrm{lerp}(m, g, 1 - \beta_1), \quad
    v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
    \mathrm{lr}_t &= \mathrm{lr} / \max(1, \mathrm{RMS}_t / c), \quad
    \mathrm{RMS}_t^2 = \mathrm{mean}\big((g / \max(\sqrt{\hat v}, \epsilon))^2\big) \\
    w &\leftarrow w - \mathrm{lr}_t \, \hat m / (\sqrt{\hat v} + \epsilon)
    \quad \text{or} \quad w - \mathrm{lr}_t \, a \, \mathrm{atan2}(\hat m, b \sqrt{\hat v})

References:
    Update clipping with a bias-corrected second moment: https://arxiv.org/abs/2304.13013
    Adam-atan2: https://arxiv.org/abs/2407.05872
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_mp.numerics.async_readback import as_scalar
from lightning_mp.numerics.floats import state_dtype
from lightning_mp.numerics.split_weights import (
    batches,
    join_weights,
    parts_of,
    round_stochastically,
    split_weight,
)

__all__ = [
    "ATAN2_A",
    "ATAN2_B",
    "AdamWBatch",
    "AdamWOptions",
    "foreach_adamw_step",
    "log_of",
    "mix_seed",
    "round_weights",
]

ATAN2_A = 1.27
"""Scale of Adam-atan2's update: close to 4/pi, so that m = sqrt(v) gives 1, as in Adam."""
ATAN2_B = 1.0
"""Scale of the root of the second moment in Adam-atan2."""


@dataclass
class AdamWBatch:
    """The tensors of one step, with equal device, parameter dtype and gradient dtype."""

    params: list[Tensor] = field(default_factory=list)  # fp16, bf16, fp32 or float64
    grads: list[Tensor] = field(default_factory=list)  # scaled by `grad_scale`; read-only
    exp_avgs: list[Tensor] = field(default_factory=list)  # fp32; float64 for float64 weights
    exp_avg_sqs: list[Tensor] = field(default_factory=list)  # likewise
    residuals: list[Tensor] = field(default_factory=list)  # only for "kahan"
    # Shape [], on the device of `params`, with this step already counted.
    steps: list[Tensor] = field(default_factory=list)
    wholes: list[Tensor] = field(default_factory=list)  # DTensors of `params`, only if clipped

    @property
    def lists(self) -> list[list[Tensor]]:
        """Weights, gradients, both moments and, if there are any, residuals."""
        lists = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs]
        return [*lists, self.residuals] if self.residuals else lists


@dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """Options of a step, shared by the torch and the Triton implementation."""

    lr: float | Tensor  # the learning rate; a tensor of one element may live on any device
    beta1: float  # decay rate of the first moment, in [0, 1)
    beta2: float  # decay rate of the second moment, in [0, 1)
    eps: float  # added to the root of the second moment
    # Decoupled: a step subtracts `lr * weight_decay * w`. Clipping does not apply to weight decay.
    weight_decay: float
    maximize: bool  # step along the gradient
    rule: str  # "adam" or "atan2"
    write_back: str  # rounding of fp32 results to half weights: "kahan", "nearest", "stochastic"
    seed: int  # seed of stochastic rounding
    # Bound on the RMS of gradient / sqrt(second moment), per tensor, or `None`.
    clip_update_rms: float | None
    # Divisor of the gradients, one element on this device, or `None`.
    grad_scale: Tensor | None
    # Nonzero to skip the step, one element on this device, or `None`.
    found_inf: Tensor | None


def foreach_adamw_step(batch: AdamWBatch, options: AdamWOptions) -> None:
    """Step a batch in place. With "stochastic", tensor `i` draws from `mix_seed(seed, i)`.

    With `found_inf` the step computes on copies and `torch.where` selects the old or the new values
    on the device, so a skipped step writes nothing even if gradients are NaN. The copies take two
    more temporaries of the size of the moments and avoid a host sync.
    """
    params, exp_avgs, exp_avg_sqs = batch.params, batch.exp_avgs, batch.exp_avg_sqs
    if not params:
        return
    skip = None if options.found_inf is None else options.found_inf.reshape(()) != 0
    gradients = _unscaled(batch.grads, exp_avgs[0].dtype, options.grad_scale, options.maximize)
    weights = _working_copies(params, batch.residuals, exp_avgs[0].dtype, skip)
    moments = exp_avgs if skip is None else [m.clone() for m in exp_avgs]
    squares = exp_avg_sqs if skip is None else [v.clone() for v in exp_avg_sqs]

    correction1, correction2 = _bias_corrections(batch.steps, options.beta1, options.beta2)
    lr = as_scalar(options.lr, correction1.dtype, correction1.device)
    if options.weight_decay != 0:
        torch._foreach_mul_(weights, (1 - lr * options.weight_decay).to(weights[0].dtype))
    torch._foreach_lerp_(moments, gradients, 1 - options.beta1)
    torch._foreach_mul_(squares, options.beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - options.beta2)

    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(roots, _scalars(correction2.sqrt(), roots[0].dtype))
    rates = lr.expand_as(correction1)
    # Must come before epsilon is added to the roots in place below.
    if options.clip_update_rms is not None:
        rms = _update_rms(gradients, roots, options.eps, batch.wholes).to(rates.dtype)
        rates = rates / (rms / options.clip_update_rms).clamp_min(1)

    if options.rule == "adam":
        torch._foreach_add_(roots, options.eps)
        updates = list(torch._foreach_div(moments, roots))
        torch._foreach_mul_(updates, _scalars(-rates / correction1, updates[0].dtype))
    else:
        unbiased = torch._foreach_div(moments, _scalars(correction1, roots[0].dtype))
        updates = [torch.atan2(m, ATAN2_B * root) for m, root in zip(unbiased, roots, strict=True)]
        torch._foreach_mul_(updates, _scalars(-ATAN2_A * rates, updates[0].dtype))
    # A half weight is rounded only once per step, by the write-back below.
    torch._foreach_add_(weights, updates)

    if skip is not None:
        _commit(exp_avgs, moments, skip)
        _commit(exp_avg_sqs, squares, skip)
    round_weights(params, batch.residuals, weights, options.write_back, options.seed, skip)


def _bias_corrections(steps: Sequence[Tensor], beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    r"""Return :math:`1 - \beta_1^t` and :math:`1 - \beta_2^t` for each step count."""
    # Computed as 1 - 0.999**t in fp32, the first step would lose 4 of 7 digits.
    counts = torch.stack(list(steps)).to(state_dtype(steps[0].device))
    return -torch.expm1(counts * log_of(beta1)), -torch.expm1(counts * log_of(beta2))


def log_of(beta: float) -> float:
    """Return the natural logarithm; -inf for 0."""
    return math.log(beta) if beta > 0 else -math.inf


def mix_seed(seed: int, index: int) -> int:
    """Return a seed for the `index`-th stream of `seed`, by the finalizer of splitmix64."""
    # torch's CPU generator uses only the low 32 bits of a seed, so all bits must be mixed.
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) % 2**63


def _unscaled(
    grads: list[Tensor], dtype: torch.dtype, grad_scale: Tensor | None, maximize: bool
) -> list[Tensor]:
    # `to` returns an fp32 `p.grad` itself, so the operations below must not write in place.
    gradients = [gradient.to(dtype) for gradient in grads]
    if grad_scale is not None:
        gradients = list(torch._foreach_div(gradients, grad_scale.reshape(()).to(dtype)))
    return list(torch._foreach_neg(gradients)) if maximize else gradients


def _working_copies(
    params: list[Tensor], residuals: list[Tensor], dtype: torch.dtype, skip: Tensor | None
) -> list[Tensor]:
    """Return fp32 weights to compute with; full weights are copied only with `found_inf`."""
    if residuals:
        return join_weights(params, residuals)
    if params[0].dtype != dtype:
        return [p.to(dtype) for p in params]
    return params if skip is None else [p.clone() for p in params]


def _scalars(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return 0-d tensors of a dtype; another dtype would promote 0-d weights."""
    return list(values.to(dtype).unbind())


def _update_rms(
    gradients: list[Tensor], roots: list[Tensor], eps: float, wholes: Sequence[Any]
) -> Tensor:
    # Compare roots with eps, because eps^2 underflows in half precision.
    floor = max(eps, torch.finfo(roots[0].dtype).tiny)
    ratios = torch._foreach_div(gradients, torch._foreach_clamp_min(roots, floor))
    norms = list(map(_whole_norm, ratios, wholes)) or torch._foreach_norm(ratios)
    sizes = [1 / math.sqrt(max(1, tensor.numel())) for tensor in wholes or gradients]
    return torch.stack(torch._foreach_mul(norms, sizes))


def _whole_norm(local: Tensor, like: Any) -> Tensor:
    """Return the norm over the shards of all ranks of a tensor that is sharded like a DTensor."""
    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    whole = type(like).from_local(local, like.device_mesh, like.placements, **layout)
    norm: Tensor = torch.linalg.vector_norm(whole).full_tensor()
    return norm


def round_weights(
    params: list[Tensor],
    residuals: list[Tensor],
    weights: list[Tensor],
    rounding: str,
    seed: int,
    skip: Tensor | None = None,
) -> None:
    """Write the values `weights` into `params`, and their rounding errors into any `residuals`.

    Without residuals, `rounding` is "stochastic", where tensor `i` draws from `mix_seed(seed, i)`,
    or to nearest for any other value. Nothing is written if the 0-d tensor `skip` is true.
    """
    half = params[0].dtype
    if half == weights[0].dtype:
        if weights is not params:
            _commit(params, weights, skip)
    elif residuals:
        # Each batch is stored before the next, so that the results of all take no memory.
        for members, vector, rests in batches(weights, residuals):
            batch = [params[index] for index in members]
            weight, residual = split_weight(vector, half)
            _commit(batch, parts_of(weight, batch), skip)
            _commit([rests], [residual], skip)
    elif rounding == "stochastic":
        generator = torch.Generator(params[0].device)
        rounded = [
            round_stochastically(w, half, generator=generator.manual_seed(mix_seed(seed, index)))
            for index, w in enumerate(weights)
        ]
        _commit(params, rounded, skip)
    else:
        _commit(params, [weight.to(half) for weight in weights], skip)


def _commit(old: list[Tensor], new: Sequence[Tensor], skip: Tensor | None) -> None:
    if skip is not None:
        new = [torch.where(skip, kept, taken) for kept, taken in zip(old, new, strict=True)]
    torch._foreach_copy_(old, list(new))
