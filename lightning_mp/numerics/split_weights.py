r"""fp32 weights in half precision: as working weight plus residual, or stochastically rounded.

Legend: `w` half-precision weight, `r` half-precision residual, `m` the fp32 value that they
represent, `u` the unit of residuals.

.. math::
    w = \mathrm{half}(m), \quad r = \mathrm{half}((m - w) / u), \quad m \approx w + u \, r
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_mp.numerics.small_chunks import SmallChunks
from lightning_mp.numerics.triton_support import triton_problem

__all__ = [
    "batches",
    "join_weight",
    "join_weights",
    "parts_of",
    "residual_unit",
    "round_stochastically",
    "split_weight",
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
    if _has_kernels(master):
        from lightning_mp.numerics.split_kernels import fused_split

        return fused_split(master, half, residual_unit(half))
    # In place, so that the temporaries of a batch stay in the caches of a CPU core. On a CPU,
    # comparisons in place and products take a quarter of the time of masks and `where`.
    weight, unit = master.to(half), residual_unit(half)
    plain = weight.float()
    residual = (master - plain).mul_(1 / unit)
    residual.copy_(residual.to(half))
    # One residual in 8000 rounds up to half a ULP of its weight. The sum may then round to the
    # weight's neighbor, and a resumed run would compute with the neighbor. Such a residual is
    # replaced by the next smaller value.
    is_neighbor = plain.copy_(plain.add_(residual, alpha=unit).to(half).ne_(weight))
    # 0.6 eps is 0.6 to 1.2 ULP anywhere in a binade, which rounds to one ULP.
    residual.mul_(is_neighbor.mul_(-0.6 * torch.finfo(half).eps).add_(1))
    # The residual of a finite weight is finite.
    return weight, residual.nan_to_num_(0.0, 0.0, 0.0).to(half)


def join_weight(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the fp32 values that half-precision weights and residuals represent.

    If the sum does not round to the weight, the weight was overwritten after the split. Then the
    residual is ignored, so that a weight set to 0 is 0.
    """
    unit = residual_unit(weight.dtype)
    if _has_kernels(weight, residual):
        from lightning_mp.numerics.split_kernels import fused_join

        return fused_join(weight, residual, unit)
    plain, rest = weight.float(), residual.float()
    both = plain.add(rest, alpha=unit)
    is_current = both.copy_(both.to(weight.dtype).eq_(weight))
    return plain.addcmul_(rest, is_current, value=unit)


def _has_kernels(*tensors: Tensor) -> bool:
    """Return whether Triton kernels process tensors; they need contiguous ones on a CUDA device."""
    return (
        tensors[0].is_cuda
        and not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, nn.Parameter) and x.is_contiguous() for x in tensors)
        and triton_problem(tensors[0].device) is None
    )


def join_weights(weights: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
    """Join several tensors, with small tensors batched; bitwise equal to `join_weight`."""
    values: dict[int, Tensor] = {}
    for members, weight, residual in batches(weights, residuals):
        parts = parts_of(join_weight(weight, residual), [weights[index] for index in members])
        values.update(zip(members, parts, strict=True))
    return [values[index] for index in range(len(values))]


def batches(
    values: Sequence[Tensor], residuals: Sequence[Tensor]
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Divide weights or fp32 values into batches, each of which takes one call of an operation.

    Yields the indices of the tensors, their values as one vector, and the vector of their
    residuals, which stay in it. A large tensor is a batch of its own and keeps its shape.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    chunks = SmallChunks()
    for index, (value, residual) in enumerate(zip(values, residuals, strict=True)):
        chunk = chunks.of((value.device, value.dtype), value, residual)
        groups[index if chunk is None else chunk].append(index)
    for members in groups.values():
        rests = [residuals[index] for index in members]
        vector = _as_vector(rests)
        is_copy = vector.data_ptr() != rests[0].data_ptr()
        if is_copy and vector.is_cuda and torch.cuda.is_current_stream_capturing():
            # Each replay of the graph would copy the residuals from before the capture again.
            yield from (([index], values[index], residuals[index]) for index in members)
            continue
        if is_copy:
            for residual, part in zip(rests, parts_of(vector, rests), strict=True):
                residual.data = part
        yield members, _as_vector([values[index] for index in members]), vector


def parts_of(vector: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return views of the vector of a batch, in the shapes of the tensors of the batch."""
    if len(like) == 1:
        return [vector]
    parts: Sequence[Tensor] = _unflatten_dense_tensors(vector, like)
    return parts


def _as_vector(tensors: Sequence[Tensor]) -> Tensor:
    """Return contiguous tensors as one vector, without a copy if they are adjacent in memory."""
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
    r"""Round fp32 values randomly to one of their two neighbors in `half`, without bias.

    .. math::
        P(\lceil m \rceil) = \frac{m - \lfloor m \rfloor}{\lceil m \rceil - \lfloor m \rfloor}

    With rounding to nearest, 1,000 updates of 1/1,000 ULP leave a weight unchanged; with stochastic
    rounding they move it by one ULP on average. Representable values, inf and NaN are unchanged.
    """
    lost = _LOST_BITS[half]
    noise = torch.randint(
        1 << lost, master.shape, generator=generator, device=master.device, dtype=torch.int32
    )
    # A carry out of the lost bits moves the magnitude to the next larger neighbor.
    bits = master.contiguous().view(torch.int32) + noise
    rounded = (bits >> lost << lost).view(torch.float32)
    if half == torch.float16:  # below 2^-14 the spacing is 2^-24
        steps = (master.abs() * 2.0**24 + noise * 2.0**-lost).floor() * 2.0**-24
        rounded = torch.where(master.abs() < 2.0**-14, steps.copysign(master), rounded)
    return torch.where(master.isfinite(), rounded, master).to(half)
