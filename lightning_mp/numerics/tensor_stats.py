"""Statistics of many tensors in one pass, computed on the device without host syncs.

Legend: `N` tensors, `K` columns of `StatField`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_mp.numerics.async_readback import as_scalar
from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype, state_dtype
from lightning_mp.numerics.row_stats import row_stats
from lightning_mp.numerics.stats_view import StatField, TensorStats
from lightning_mp.numerics.triton_support import triton_problem

__all__ = [
    "NonFinite",
    "StatField",
    "TensorStats",
    "count_non_finite",
    "first_non_finite",
    "flat_values",
    "local_shard",
    "placed_like",
    "stored_numels",
    "stored_values",
    "tensor_stats",
]

_SMALLEST_NORMAL = torch.finfo(torch.float16).tiny  # below 2^-14 fp16 loses bits


class NonFinite(NamedTuple):
    """A tensor with non-finite values, and their number."""

    name: str  # dotted name
    shape: tuple[int, ...]
    values: int  # number of stored values; fewer than in `shape` if the tensor is sparse
    nan: int  # number of NaN
    inf: int  # number of +inf and -inf

    def __str__(self) -> str:
        return (
            f"`{self.name}` of shape {list(self.shape)} ({self.nan} NaN and {self.inf} inf among "
            f"{self.values} values)"
        )


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor; return other tensors unchanged."""
    # Check the type first: `hasattr` on a plain tensor raises and catches an AttributeError.
    is_plain = type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "to_local")
    local: Tensor = tensor if is_plain else tensor.to_local()
    return local


def placed_like(gradient: Tensor, parameter: Any) -> Tensor:
    """Return a gradient with its parameter's placements, a collective if they differ.

    Under tensor parallelism, gradients may be sums that no rank has added up, or whole tensors.
    """
    if type(gradient) is Tensor or not hasattr(gradient, "redistribute"):
        return gradient
    placed: Tensor = gradient.redistribute(placements=parameter.placements)
    return placed


def stored_values(tensor: Tensor) -> Tensor:
    """Return the stored values of a tensor as a view; a complex number is two values.

    Duplicate entries of an uncoalesced sparse gradient stay separate.
    """
    if tensor.layout != torch.strided or tensor.is_nested:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    if not tensor.is_complex():
        return tensor
    # A lazy conjugate has no real view, but its conjugate differs in signs only.
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def stored_numels(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the number of values that `tensor_stats` reads from each tensor.

    They are the denominators of shares: the sparse gradient of an embedding may store 300 of 25
    million values, and 3 zeros among them are 1%.
    """
    return tuple(stored_values(local_shard(tensor)).numel() for tensor in tensors)


@torch.no_grad()
def tensor_stats(
    tensors: Sequence[Tensor], *, scale: float | Tensor = 1.0, unscale: float | Tensor = 1.0
) -> Tensor:
    """Compute statistics of all tensors in one pass, without waiting for the device.

    Separate reductions would cost a pass and a host sync per statistic and tensor. The order of
    sums is fixed, so results are bitwise reproducible.

    A value `x` is subnormal if `0 < |x * unscale * scale| < 2^-14`; the bound is divided by the
    scales and rounded to fp32 once. NaN and inf are counted and otherwise ignored.

    Args:
        tensors: fp16, bf16, fp32, float64 or complex tensors of any shape on any devices. A DTensor
            contributes its local shard, a sparse tensor its stored values.
        scale: Positive scale at which fp16 would hold the values: the loss scale for gradients, 1
            for weights and activations. A tensor is read on its device.
        unscale: Positive factor that is applied to the values first, such as `1 / loss_scale` for
            scaled gradients.

    Returns:
        stats_NK: One row per tensor, with the columns of `StatField`; float64, or fp32 on MPS. On
            the device of the tensors, or on the first accelerator if there are several devices.

    Raises:
        ValueError: A tensor has another dtype or is on the meta device.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    values = []
    for index, tensor in enumerate(tensors):
        flat = flat_values(_checked(stored_values(local_shard(tensor)), index))
        values.append(flat)
        # Grouped by the dtype of sums: fp16, bf16 and fp32 share batches, float64 does not.
        groups.setdefault((flat.device, accumulation_dtype(flat.dtype)), []).append(index)
    if not values:
        return torch.zeros(0, len(StatField), dtype=torch.float64)
    # Results are collected on an accelerator, so that the host does not wait.
    devices = [device for device, _ in groups]
    result_device = next((device for device in devices if device.type != "cpu"), devices[0])
    parts: list[tuple[list[int], Tensor]] = []
    for (device, dtype), members in groups.items():
        part = _group_stats([values[i] for i in members], device, dtype, scale, unscale)
        parts.append(
            (members, part.to(result_device, state_dtype(result_device), non_blocking=True))
        )
    if len(parts) == 1:
        return parts[0][1]
    rows = {i: part[j] for members, part in parts for j, i in enumerate(members)}
    return torch.stack([rows[i] for i in range(len(values))])


def _group_stats(
    values: list[Tensor],
    device: torch.device,
    dtype: torch.dtype,
    scale: float | Tensor,
    unscale: float | Tensor,
) -> Tensor:
    """Return the statistics of flat tensors on one device, computed in one dtype."""
    # Dividing the bound costs one scalar operation; scaling the values would cost a pass.
    wide = state_dtype(device)
    factor, by_scale = (as_scalar(number, wide, device) for number in (unscale, scale))
    subnormal = (_SMALLEST_NORMAL / (factor * by_scale).abs()).to(dtype)
    if dtype == torch.float32 and triton_problem(device) is None:
        # Imported here, because Triton exists on Linux only.
        from lightning_mp.numerics.stats_kernels import fused_stats

        stats_NK = fused_stats(values, subnormal)
    else:
        stats_NK = row_stats(values, subnormal, may_sync=device.type == "cpu")
    if isinstance(unscale, Tensor) or unscale != 1:
        # Scale two columns instead of all values; the bound of subnormals includes the factor.
        stats_NK[:, StatField.AMAX] *= factor.abs()
        stats_NK[:, StatField.SUM_OF_SQUARES] *= factor.square()
    return stats_NK


def _checked(tensor: Tensor, index: int) -> Tensor:
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"Passed `tensor_stats` a tensor of {tensor.dtype} at position {index}. Tensors must "
            "be of float16, bfloat16, float32 or float64. Leave out other tensors, such as indices "
            "and step counts."
        )
    if tensor.is_meta:
        raise ValueError(
            f"Passed `tensor_stats` a meta tensor of shape {list(tensor.shape)} at position "
            f"{index}. Tensors must hold values. Materialize the module first, such as by "
            "`to_empty`."
        )
    return tensor


def flat_values(tensor: Tensor) -> Tensor:
    """Return all values in memory order; copy only non-dense tensors."""
    values = tensor.detach()
    # Statistics ignore the order of values, so transposed or channels-last tensors need no copy.
    if not values.is_contiguous():
        order = sorted(range(values.ndim), key=values.stride, reverse=True)
        values = values.permute(order)
    return values.reshape(-1)


def count_non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Count the NaN (column 0) and the infinite values (column 1) of every tensor.

    The counts are int64 on the device of the first tensor, without a host sync. A norm would not
    tell: the L2 norm of finite fp32 values above 1.8e19 is inf.
    """
    if not tensors:
        return torch.zeros(0, 2, dtype=torch.int64)
    # torch has no multi-tensor `isnan`. Several kernels per tensor are fine for a failed step.
    values = [stored_values(tensor) for tensor in tensors]
    rows = [torch.stack([torch.isnan(v).sum(), torch.isinf(v).sum()]) for v in values]
    return torch.stack([row.to(values[0].device) for row in rows])


def first_non_finite(named_tensors: Iterable[tuple[str, Tensor]]) -> NonFinite | None:
    """Return the first tensor with a non-finite value, in the given order, with one host sync."""
    named = list(named_tensors)
    counts = count_non_finite([tensor for _, tensor in named]).tolist()
    for (name, tensor), (nan, inf) in zip(named, counts, strict=True):
        if nan or inf:
            return NonFinite(name, tuple(tensor.shape), stored_values(tensor).numel(), nan, inf)
    return None
