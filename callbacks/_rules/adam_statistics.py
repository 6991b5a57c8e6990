r"""What one step of Adam is about to do to each parameter, in a few numbers.

Legend: `N` parameters, `K` columns of `AdamField`.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.numerics.shards import local_shard
from lightning_mp.numerics.tensor_stats import stored_values

__all__ = ["AdamField", "adam_statistics", "has_second_moments", "quantized_states"]

_BLOCK = 2**16
_SMALLEST = 1e-18  # its square is still normal in fp32


class AdamField(IntEnum):
    """The columns of `adam_statistics`; sums, so that those of shards add up."""

    NUMEL = 0
    NON_ZERO = 1  # how many gradients are not exactly 0
    SQUARED_RATIO = 2  # the sum of `g^2 / max(v_hat, eps^2)`
    BELOW_EPSILON = 3  # where the gradient is not 0: how many `sqrt(v_hat)` are below epsilon
    SQUARED_UPDATE = 4  # the sum of `(lr * m_hat / (sqrt(v_hat) + eps))^2`
    SQUARED_WEIGHT = 5
    SQUARED_GRADIENT = 6
    SECOND_MOMENT = 7  # the sum of `v`, after the step and not corrected
    NON_FINITE = 8  # 1 where a sum is NaN or inf; all sums before are then 0
    BAD_STATE = 9  # 1 where that cannot come from gradient or weight: the optimizer's state is bad
    STEP = 10  # how many steps the optimizer will have made; of shards the largest, not the sum


def has_second_moments(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether an optimizer keeps Adam's moments of a parameter, and has taken a step."""
    state = optimizer.state.get(parameter, {})
    return "exp_avg" in state and "exp_avg_sq" in state and not _quantized_in(state)


def quantized_states(optimizer: Optimizer) -> list[str]:
    """Return the names of states that are kept in 8 bits or fewer, and cannot be read as they are.

    bitsandbytes keeps `state1` and `state2` in uint8, torchao tensors of a class of its own.
    """
    return next(filter(None, map(_quantized_in, optimizer.state.values())), [])


def _quantized_in(state: dict[str, Any]) -> list[str]:
    tensors = {name: t for name, t in state.items() if isinstance(t, Tensor) and t.numel() > 1}
    eight_bits = (torch.uint8, torch.int8)
    return [n for n, t in tensors.items() if t.dtype in eight_bits or hasattr(t, "codes")]


@torch.no_grad()
def adam_statistics(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    unscale: float | Tensor,
) -> Tensor:
    r"""Work out, ahead of a step and without changing anything, what it will do.

    .. math::
        v = \beta_2 v + (1 - \beta_2) g^2, \quad \hat v = v / (1 - \beta_2^t), \quad
        m = \beta_1 m + (1 - \beta_1) g, \quad \hat m = m / (1 - \beta_1^t)

    In fp32 and by blocks, so that little is held beside. The row of a parameter without Adam's
    states, or with an empty gradient, is zero. Rows are float64 (fp32 on MPS), on its device.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rows = [
        _row(groups[id(p)], optimizer.state.get(p, {}), p, gradient, unscale)
        for p, gradient in zip(parameters, gradients, strict=True)
    ]
    return torch.stack(rows)


def _row(
    group: dict[str, Any],
    state: dict[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    unscale: float | Tensor,
) -> Tensor:
    wide = torch.float32 if parameter.device.type == "mps" else torch.float64
    if "exp_avg_sq" not in state or not local_shard(gradient).numel():
        return torch.zeros(len(AdamField), dtype=wide, device=parameter.device)
    held = map(local_shard, (parameter, gradient, state["exp_avg"], state["exp_avg_sq"]))
    # Of complex ones the parts, as torch steps them.
    tensors = [stored_values(t.to_dense() if t.is_sparse else t) for t in held]
    step = torch.as_tensor(state.get("step", 1), dtype=torch.float32) + 1
    # On a CPU the dozen passes over a block find it in the cache.
    size = _BLOCK if tensors[0].device.type == "cpu" else max(tensors[0].numel(), 1)
    blocks = zip(*(t.reshape(-1).split(size) for t in tensors), strict=True)
    parts = [_block_sums(group, step, unscale, *block) for block in blocks]
    sums = torch.stack(parts).sum(dim=0, dtype=wide)
    is_bad = ~sums.isfinite().all()
    inputs = [AdamField.SQUARED_WEIGHT - 1, AdamField.SQUARED_GRADIENT - 1]
    is_state_bad = is_bad & sums[inputs].isfinite().all()
    sums = torch.where(is_bad, 0, sums)
    count = torch.full((), tensors[0].numel(), dtype=wide, device=sums.device)
    flags = [is_bad.to(wide), is_state_bad.to(wide), step.to(sums, non_blocking=True)]
    return torch.stack([count, *sums, *flags])


def _block_sums(
    group: dict[str, Any],
    step: Tensor,
    unscale: float | Tensor,
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
) -> Tensor:
    """Return the columns from `NON_ZERO` to `SECOND_MOMENT` of a part of a parameter, in fp32."""
    beta1, beta2 = (float(b) for b in group["betas"])
    weight, g, m, v = weight.float(), gradient.float(), m.float(), v.float()
    if isinstance(unscale, Tensor) or unscale != 1:
        g = g * unscale
    root = torch.addcmul(v * beta2, g, g, value=1 - beta2).div_(1 - beta2**step).sqrt_()
    update = torch.lerp(m, g, 1 - beta1).div_(root + group["eps"])
    factor = group["lr"] / (1 - beta1**step)
    is_moving = g != 0
    second_moment = torch.dot(root, root) * (1 - beta2**step)
    below = (root < max(group["eps"], _SMALLEST)).logical_and_(is_moving)
    ratio = g.div(root.clamp_(min=max(group["eps"], _SMALLEST)))
    sums = [
        is_moving.count_nonzero(),
        torch.dot(ratio, ratio),
        below.count_nonzero(),
        torch.dot(update, update) * factor**2,
        torch.dot(weight, weight),
        torch.dot(g, g),
        second_moment,
    ]
    return torch.stack([each.to(torch.float32) for each in sums])
