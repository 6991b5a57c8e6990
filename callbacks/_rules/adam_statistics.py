"""Statistics of the next step of Adam, measured on the device without changing any tensor.

Legend: `N` parameters, `n` parameters of a batch, `K` columns of `AdamField`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.numerics.async_readback import send
from lightning_mp.numerics.floats import HALF_DTYPES, state_dtype
from lightning_mp.numerics.tensor_stats import local_shard, placed_like, stored_values
from lightning_mp.optim._adamw.foreach import ATAN2_A, ATAN2_B

__all__ = ["AdamField", "adam_statistics", "has_second_moments", "quantized_states"]

_BLOCK = 2**16  # values per block, so that a dozen passes stay in the cache of a CPU
# Largest tensor that is measured together with others, and number of values of these together.
_SMALL = {"cpu": (2**12, _BLOCK), "cuda": (2**20, 2**22)}
_SMALLEST = 1e-18  # its square is still normal in fp32


class AdamField(IntEnum):
    """Columns of `adam_statistics`. They are sums, so that shards can be added."""

    NUMEL = 0
    NON_ZERO = 1  # number of nonzero gradient values
    SQUARED_RATIO = 2  # sum of `g^2 / max(v_hat, eps^2)`
    BELOW_EPSILON = 3  # number of values with `sqrt(v_hat) < eps` and a nonzero gradient
    SQUARED_UPDATE = 4  # sum of `(lr * m_hat / (sqrt(v_hat) + eps))^2`, without clipping
    SQUARED_WEIGHT = 5
    SQUARED_GRADIENT = 6
    SECOND_MOMENT = 7  # sum of `v` after the step, without bias correction
    STAGNANT = 8  # number of half weights that a nonzero update leaves unchanged
    NON_FINITE = 9  # 1 if a sum is NaN or inf; all sums above are then 0
    BAD_STATE = 10  # 1 if gradient and weight are finite, so that the state is non-finite
    STEP = 11  # step count after this step; the maximum over shards, not the sum


def has_second_moments(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether an optimizer has Adam's moments of each value of a parameter."""
    state = optimizer.state.get(parameter, {})
    moments = [state.get("exp_avg"), state.get("exp_avg_sq")]
    # GaLore's moments have a lower rank, those of Adam-mini are means over blocks.
    are_whole = all(isinstance(m, Tensor) and m.shape == parameter.shape for m in moments)
    return are_whole and not _quantized_in(state)


def quantized_states(optimizer: Optimizer) -> list[str]:
    """Return the names of 8-bit states, which cannot be read directly."""
    # MADGRAD keeps a tensor of its own among the states of parameters.
    states = (state for p, state in optimizer.state.items() if isinstance(p, Tensor))
    return next(filter(None, map(_quantized_in, states)), [])


def _quantized_in(state: dict[str, Any]) -> list[str]:
    tensors = {name: t for name, t in state.items() if isinstance(t, Tensor) and t.numel() > 1}
    # bitsandbytes stores `state1` and `state2` in uint8; torchao uses a tensor subclass.
    eight_bits = (torch.uint8, torch.int8)
    return [n for n, t in tensors.items() if t.dtype in eight_bits or hasattr(t, "codes")]


@torch.no_grad()
def adam_statistics(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    unscale: float | Tensor,
    *,
    keeps_rounding: bool = False,
) -> Tensor:
    r"""Return the statistics of the next step, without changing any tensor.

    .. math::
        v = \beta_2 v + (1 - \beta_2) g^2, \quad \hat v = v / (1 - \beta_2^t), \quad
        m = \beta_1 m + (1 - \beta_1) g, \quad \hat m = m / (1 - \beta_1^t)

    Rows are float64 (fp32 on MPS) on the device of the parameters. The row of a parameter without
    Adam's states or with an empty gradient is zero. With `keeps_rounding`, the optimizer keeps
    rounding errors of half weights, so no weight is stagnant.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    pairs = zip(parameters, gradients, strict=True)
    held = {i: values for i, pair in enumerate(pairs) if (values := _values_of(optimizer, *pair))}
    device = local_shard(parameters[0]).device
    wide = state_dtype(device)
    empty = torch.zeros(len(AdamField) - AdamField.NON_ZERO - 2, dtype=wide, device=device)
    row_of = dict.fromkeys(range(len(parameters)), empty)
    for members in _batches(held, [id(groups[id(p)]) for p in parameters]):
        group = groups[id(parameters[members[0]])]
        group = group | {"write_back": "kept"} if keeps_rounding else group
        steps = [optimizer.state[parameters[i]].get("step", 1) for i in members]
        step_n = send(torch.stack([torch.as_tensor(x, dtype=torch.float32) for x in steps]), device)
        rows = _sums(group, step_n + 1, unscale, [held[i] for i in members], wide)
        row_of |= zip(members, rows.unbind(), strict=True)
    sums_NK, step_N = torch.stack([*row_of.values()]).tensor_split([-1], dim=1)
    # Flagged and set to 0, because one NaN would make the sum over shards NaN.
    is_bad_N = ~sums_NK.isfinite().all(1, keepdim=True)
    inputs = sums_NK[:, AdamField.SQUARED_WEIGHT - 1 : AdamField.SQUARED_GRADIENT]
    # Gradient and weights are finite, so the state is the cause.
    is_state_bad_N = is_bad_N & inputs.isfinite().all(1, keepdim=True)
    sums_NK = torch.where(is_bad_N, 0, sums_NK)
    counts = [held[i][0].numel() if i in held else 0 for i in row_of]
    count_N = send(torch.tensor(counts, dtype=wide), device)[:, None]
    return torch.cat([count_N, sums_NK, is_bad_N.to(wide), is_state_bad_N.to(wide), step_N], 1)


def _values_of(optimizer: Optimizer, parameter: Tensor, gradient: Tensor) -> list[Tensor] | None:
    """Return the flat values of weight, gradient and Adam's states, if there are any."""
    state = optimizer.state.get(parameter, {})
    if not has_second_moments(optimizer, parameter):
        return None
    gradient = placed_like(gradient, parameter)  # on all ranks, also those without a part
    if not local_shard(gradient).numel():
        return None
    # With `amsgrad=True`, the step divides by the root of the highest second moment so far.
    names = [n for n in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if n in state]
    tensors = map(local_shard, (parameter, gradient, *(state[name] for name in names)))
    # Complex values are viewed as real and imaginary parts, as in torch's step.
    return [stored_values(t.to_dense() if t.is_sparse else t).reshape(-1) for t in tensors]


def _batches(held: dict[int, list[Tensor]], groups: Sequence[int]) -> Iterator[list[int]]:
    """Yield the tensors that are measured together, of one group and dtype."""
    waiting: dict[Any, list[int]] = {}
    totals = Counter[Any]()
    for i, (weight, *_) in held.items():
        small, most = _SMALL.get(weight.device.type, (0, 0))
        if weight.numel() > small:
            yield [i]
            continue
        key = groups[i], weight.dtype
        if totals[key] + weight.numel() > most:
            yield waiting.pop(key)
            totals[key] = 0
        waiting.setdefault(key, []).append(i)
        totals[key] += weight.numel()
    yield from waiting.values()


def _sums(
    group: dict[str, Any],
    step_n: Tensor,
    unscale: float | Tensor,
    held: Sequence[list[Tensor]],
    dtype: torch.dtype,
) -> Tensor:
    """Return the columns `NON_ZERO` to `STAGNANT` and `STEP` of tensors of one group."""
    if len(held) == 1:
        # On a GPU every block takes forty kernels, so use one block.
        is_host = step_n.device.type == "cpu"
        blocks = zip(*(t.split(_BLOCK if is_host else t.numel()) for t in held[0]), strict=True)
        parts = [_block_sums(group, step_n, unscale, block, None) for block in blocks]
    else:
        lengths_n = send(torch.tensor([weight.numel() for weight, *_ in held]), step_n.device)
        block = [torch.cat(each) for each in zip(*held, strict=True)]
        parts = [_block_sums(group, step_n, unscale, block, lengths_n)]
    return torch.cat([torch.stack(parts).sum(dim=0, dtype=dtype), step_n[:, None].to(dtype)], 1)


def _block_sums(
    group: dict[str, Any],
    step_n: Tensor,
    unscale: float | Tensor,
    block: Sequence[Tensor],
    lengths_n: Tensor | None,
) -> Tensor:
    """Return the columns `NON_ZERO` to `STAGNANT` of a block of one or several tensors, in fp32."""

    def spread(number_n: Tensor) -> Tensor:
        if lengths_n is None:
            return number_n
        return number_n.repeat_interleave(lengths_n, output_size=block[0].numel())

    def dot(x: Tensor, y: Tensor) -> Tensor:
        if lengths_n is None:
            return torch.dot(x, y)[None]
        return torch.segment_reduce(x * y, "sum", lengths=lengths_n, unsafe=True)

    def count(mask: Tensor) -> Tensor:
        if lengths_n is None:
            return mask.count_nonzero()[None].float()
        return torch.segment_reduce(mask.float(), "sum", lengths=lengths_n, unsafe=True)

    beta1, beta2 = (float(b) for b in group["betas"])
    weight, g, m, v, *highest = (part.float() for part in block)
    if isinstance(unscale, Tensor) or unscale != 1:
        g = g * unscale
    # Computed before the step, which overwrites the states.
    bias1_n, bias_n = 1 - beta1**step_n, 1 - beta2**step_n
    factor_n, eps = group["lr"] / bias1_n, group["eps"]
    moment = torch.addcmul(v * beta2, g, g, value=1 - beta2)
    moment = torch.maximum(moment, highest[0]) if highest else moment
    root = moment.div_(spread(bias_n)).sqrt_()
    update = torch.lerp(m, g, 1 - beta1)
    if is_atan2 := group.get("rule") == "atan2":  # of `SafeAdamW`, without epsilon
        unbias = spread(bias1_n)
        update = torch.atan2(update, ATAN2_B * root * unbias).mul_(ATAN2_A * unbias)
    else:
        update.div_(root + eps)
    is_moving = g != 0
    # Steps that keep rounding errors or round stochastically do not stagnate.
    is_rounded = group.get("write_back", "nearest") == "nearest"
    still_n = torch.zeros_like(bias_n)
    if block[0].dtype in HALF_DTYPES and is_rounded:
        stepped = torch.addcmul(weight, update, -spread(factor_n)).to(block[0].dtype)
        still_n = count((stepped == block[0]).logical_and_(is_moving))
    second_moment_n = dot(root, root) * bias_n
    below = (root < (0 if is_atan2 else max(eps, _SMALLEST))).logical_and_(is_moving)
    ratio = g.div(root.clamp_(min=max(eps, _SMALLEST)))
    sums = [
        count(is_moving),
        dot(ratio, ratio),
        count(below),
        dot(update, update) * factor_n**2,
        dot(weight, weight),
        dot(g, g),
        second_moment_n,
        still_n,
    ]
    return torch.stack(sums, 1)
