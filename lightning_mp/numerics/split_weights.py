r"""fp32 weights in half precision: as working weight plus residual, or stochastically rounded.

Legend: `w` half-precision weight, `r` half-precision residual, `m` the fp32 value that they
represent, `u` the unit of residuals.

.. math::
    w = \mathrm{half}(m), \quad r = \mathrm{half}((m - w) / u), \quad m \approx w + u \, r
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_mp.numerics.small_chunks import SmallChunks

__all__ = [
    "join_weight",
    "join_weights",
    "residual_unit",
    "round_stochastically",
    "split_weight",
    "split_weights",
]

# Bits of an fp32 significand that do not fit into half precision.
_LOST_BITS = {torch.float16: 13, torch.bfloat16: 16}


def residual_unit(half: torch.dtype) -> float:
    """Return the unit of stored residuals for a half-precision dtype.

    An unscaled fp16 residual would be limited by fp16's smallest subnormal, 6e-8, which leaves 14
    bits in total for a weight of 1e-3. In units of 2^-11 the residual has the magnitude of its
    weight, and both together have 22 bits above 1.2e-4 and resolve 2.9e-11 below. bf16 has the
    exponent range of fp32 and needs no unit: 16 bits in total.
    """
    return 2.0**-11 if half == torch.float16 else 1.0


def split_weight(master: Tensor, half: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split fp32 values into half-precision weights and residuals.

    Returns:
        The weights, rounded to nearest, and the residuals in units of `residual_unit(half)`, 0 for
        non-finite weights. The represented values round to the same weights, and split into the
        same weights and residuals again.
    """
    weight, unit = master.to(half), residual_unit(half)
    plain = weight.float()
    residual = (master - plain).mul_(1 / unit).to(half).float()
    # One residual in 8000 rounds up to half a ULP of its weight. The sum may then round to the
    # weight's neighbour, and a resumed run would compute with the neighbour. Such a residual is
    # replaced by the next smaller value.
    # On a CPU, comparisons in place and products take a quarter of the time of masks and `where`.
    is_neighbour = plain.add_(residual, alpha=unit).to(half).ne_(weight).float()
    # 0.6 eps is 0.6 to 1.2 ULP anywhere in a binade, which rounds to one ULP.
    residual.mul_(torch.rsub(is_neighbour, 1, alpha=0.6 * torch.finfo(half).eps))
    # The residual of a finite weight is finite.
    return weight, residual.nan_to_num_(0.0, 0.0, 0.0).to(half)


def join_weight(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the fp32 values that half-precision weights and residuals represent.

    If the sum does not round to the weight, the weight was overwritten after the split. Then the
    residual is ignored, so that a weight set to 0 is 0.
    """
    plain, rest, unit = weight.float(), residual.float(), residual_unit(weight.dtype)
    is_current = plain.add(rest, alpha=unit).to(weight.dtype).eq_(weight).float()
    return plain.addcmul_(rest, is_current, value=unit)


def split_weights(
    masters: Sequence[Tensor], half: torch.dtype
) -> Iterator[tuple[list[int], tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Split several tensors, with small tensors batched; bitwise equal to `split_weight`.

    Yields:
        The indices of the tensors of a batch, their weights and their residuals. A caller that
        copies the results of a batch before the next batch needs no memory for all of them.
    """
    for members, (flat,) in _batches(list(zip(masters, strict=True))):
        like = [masters[index] for index in members]
        weights, residuals = (_parts(output, like) for output in split_weight(flat, half))
        yield members, weights, residuals


def join_weights(weights: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
    """Join several tensors, with small tensors batched; bitwise equal to `join_weight`."""
    values: dict[int, Tensor] = {}
    for members, (weight, residual) in _batches(list(zip(weights, residuals, strict=True))):
        parts = _parts(join_weight(weight, residual), [weights[index] for index in members])
        values.update(zip(members, parts, strict=True))
    return [values[index] for index in range(len(values))]


def _batches(rows: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield the indices of the rows of each batch, and one vector for each column of the rows."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    chunks = SmallChunks()
    for index, row in enumerate(rows):
        first = row[0]
        chunk = chunks.of((first.device, first.dtype), *row)
        groups[index if chunk is None else chunk].append(index)
    for members in groups.values():
        columns = zip(*(rows[index] for index in members), strict=True)
        yield members, [_flattened(column) for column in columns]


def _parts(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len(like) == 1:  # of any size, and not flattened
        return (flat,)
    parts: tuple[Tensor, ...] = _unflatten_dense_tensors(flat, like)
    return parts


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return contiguous tensors as one vector, without a copy if they are adjacent in memory."""
    # The results of `_batched` for a group are such views of one vector.
    first, end = tensors[0], tensors[0].data_ptr()
    if len(tensors) == 1:
        return first
    is_adjacent = tensors[-1].untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    for tensor in tensors:
        is_adjacent = is_adjacent and tensor.data_ptr() == end
        end += tensor.nbytes
    if is_adjacent:
        return first.as_strided(((end - first.data_ptr()) // first.element_size(),), (1,))
    copy: Tensor = _flatten_dense_tensors(tensors)
    return copy


def round_stochastically(
    master: Tensor, half: torch.dtype, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""Round fp32 values randomly to one of their two neighbours in `half`, without bias.

    .. math::
        P(\lceil m \rceil) = \frac{m - \lfloor m \rfloor}{\lceil m \rceil - \lfloor m \rfloor}

    With rounding to nearest, 1,000 updates of 1/1,000 ULP leave a weight unchanged; with stochastic
    rounding they move it by one ULP on average. Representable values, inf and NaN are unchanged.
    """
    lost = _LOST_BITS[half]
    noise = torch.randint(
        1 << lost, master.shape, generator=generator, device=master.device, dtype=torch.int32
    )
    # A carry out of the lost bits moves the magnitude to the next larger neighbour.
    bits = master.contiguous().view(torch.int32) + noise
    rounded = (bits >> lost << lost).view(torch.float32)
    if half == torch.float16:  # below 2^-14 the spacing is 2^-24
        steps = (master.abs() * 2.0**24 + noise * 2.0**-lost).floor() * 2.0**-24
        rounded = torch.where(master.abs() < 2.0**-14, steps.copysign(master), rounded)
    return torch.where(master.isfinite(), rounded, master).to(half)
