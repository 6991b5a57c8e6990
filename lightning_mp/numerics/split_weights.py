r"""fp32 weights kept in half: as a half weight with a half residual, or rounded at random.

Legend: `w` half weight, `r` half residual, `m` the fp32 value that they stand for, `u` the unit of
residuals.

.. math::
    w = \mathrm{half}(m), \quad r = \mathrm{half}((m - w) / u), \quad m \approx w + u \, r
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

__all__ = [
    "join_weight",
    "join_weights",
    "residual_unit",
    "round_stochastically",
    "split_weight",
    "split_weights",
]

_SMALL = 2**16  # elements; of fewer, an operation takes the host longer than the device

# The bits of an fp32 significand that a half format lacks.
_LOST_BITS = {torch.float16: 13, torch.bfloat16: 16}


def residual_unit(half: torch.dtype) -> float:
    """Return the unit that residuals of a half format are stored in.

    An fp16 residual stored unscaled would stop at fp16's subnormal step of 6e-8, which for a weight
    of 1e-3 is 14 bits in all. In units of 2^-11 it is as large as its weight, and both carry 22
    bits from 1.2e-4 on, where fp16's own begin to fade; below, they resolve 2.9e-11. bf16 has the
    exponents of fp32 and needs no unit: 16 bits in all.
    """
    return 2.0**-11 if half == torch.float16 else 1.0


def split_weight(master: Tensor, half: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split fp32 values into half weights and half residuals.

    Returns:
        The weights, rounded to nearest, and the residuals in units of `residual_unit(half)`; 0
        where a weight is not finite. What they stand for rounds to the weights, and splits into
        the same weights and residuals again.
    """
    weight, unit = master.to(half), residual_unit(half)
    plain = weight.float()
    rest = (master - plain).div_(unit).to(half)
    residual = rest.float()
    # One in 8000 is rounded up to half a step. Both together may then be nearer to the weight's
    # neighbour, which a run resumed from them would compute with: it gets the value below.
    is_neighbour = plain.add_(residual, alpha=unit).to(half) != weight
    # 0.6 eps is 0.6 to 1.2 steps wherever in its binade a residual lies: rounding makes it one.
    below = residual.mul_(1 - 0.6 * torch.finfo(half).eps).to(half)
    # The rest of a finite weight is finite.
    return weight, torch.where(is_neighbour, below, rest).nan_to_num_(0.0, 0.0, 0.0)


def join_weight(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the fp32 values that half weights and residuals stand for.

    A residual with which the weight would be another belongs to one that something has overwritten
    since. It is left out: a weight set to 0 is 0.
    """
    plain = weight.float()
    both = plain.add(residual.float(), alpha=residual_unit(weight.dtype))
    return torch.where(both.to(weight.dtype) == weight, both, plain)


def split_weights(masters: Sequence[Tensor], half: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Split several tensors, small ones at once: the same bits as one by one."""
    return _together(lambda flat: split_weight(flat, half), list(zip(masters, strict=True)))


def join_weights(weights: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
    """Join several tensors, small ones at once: the same bits as one by one."""
    rows = list(zip(weights, residuals, strict=True))
    return [value for (value,) in _together(lambda *flat: (join_weight(*flat),), rows)]


def _together(
    function: Callable[..., tuple[Tensor, ...]], rows: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """Apply an elementwise function to the tensors of each row, to those of small rows at once."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        is_small = row[0].numel() <= _SMALL and all(
            type(each) in (Tensor, nn.Parameter) and each.is_contiguous() for each in row
        )
        groups[(row[0].device, row[0].dtype) if is_small else index].append(index)
    results: dict[int, tuple[Tensor, ...]] = {}
    for members in groups.values():
        if len(members) == 1:
            results[members[0]] = function(*rows[members[0]])
            continue
        columns = zip(*(rows[index] for index in members), strict=True)
        flat = [torch.cat([each.reshape(-1) for each in column]) for column in columns]
        sizes = [rows[index][0].numel() for index in members]
        parts = [output.split(sizes) for output in function(*flat)]
        for index, values in zip(members, zip(*parts, strict=True), strict=True):
            results[index] = tuple(value.view(rows[index][0].shape) for value in values)
    return [results[index] for index in range(len(rows))]


def round_stochastically(
    master: Tensor, half: torch.dtype, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""Round fp32 values to one of their two half neighbours at random, right on average.

    .. math::
        P(\lceil m \rceil) = \frac{m - \lfloor m \rfloor}{\lceil m \rceil - \lfloor m \rfloor}

    Rounded to nearest, a thousand updates of a thousandth of a step each leave a weight where it
    was; so they move it by one step on average. What `half` can hold, inf and NaN stay as they are.
    """
    lost = _LOST_BITS[half]
    noise = torch.randint(
        1 << lost, master.shape, generator=generator, device=master.device, dtype=torch.int32
    )
    # In fp32 bits, a carry out of the bits that get lost moves the magnitude to the next neighbour.
    bits = master.contiguous().view(torch.int32) + noise
    rounded = (bits >> lost << lost).view(torch.float32)
    if half == torch.float16:  # below 2^-14 its steps stay at 2^-24
        steps = (master.abs() * 2.0**24 + noise * 2.0**-lost).floor() * 2.0**-24
        rounded = torch.where(master.abs() < 2.0**-14, steps.copysign(master), rounded)
    return torch.where(master.isfinite(), rounded, master).to(half)
