"""Statistics of many tensors at once, gathered on the device and read by the host when it asks.

Legend: `N` tensors, `K` columns of `StatField`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    "local_shard",
    "stored_numels",
    "stored_values",
    "tensor_stats",
]

_SMALLEST_NORMAL = torch.finfo(torch.float16).tiny  # below 2^-14 fp16 loses bits


class NonFinite(NamedTuple):
    """Which tensor holds values that are not finite, and how many of them."""

    name: str  # the tensor's dotted name
    shape: tuple[int, ...]  # its shape
    values: int  # how many values it stores; fewer than its shape says where it is sparse
    nan: int  # how many of them are NaN
    inf: int  # how many of them are +inf or -inf

    def __str__(self) -> str:
        return (
            f"`{self.name}` of shape {list(self.shape)} ({self.nan} NaN and {self.inf} inf among "
            f"{self.values} values)"
        )


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, other tensors as they are."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def stored_values(tensor: Tensor) -> Tensor:
    """Return the values that a tensor stores, sharing its memory: of a sparse one the non-zeros.

    Duplicates of a sparse gradient that was not coalesced stay apart. A complex number is two
    values, its real and its imaginary part.
    """
    if tensor.layout != torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    if not tensor.is_complex():
        return tensor
    # A lazy conjugate has no real view; what it conjugates has the same values but for signs.
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def stored_numels(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Count the values that `tensor_stats` looks at: of a DTensor its shard, of a sparse its own.

    Shares divide by this. An embedding's sparse gradient stores the rows of one batch, so 3 zeros
    among its 300 values are 1%, whatever the 25 million of its shape.
    """
    return tuple(stored_values(local_shard(tensor)).numel() for tensor in tensors)


@torch.no_grad()
def tensor_stats(
    tensors: Sequence[Tensor], *, scale: float | Tensor = 1.0, unscale: float | Tensor = 1.0
) -> Tensor:
    """Gather the statistics of every tensor in one pass, without waiting for the device.

    Gradient underflow is silent: a GradScaler looks for inf, while 23.6% of N(0, 1e-7) gradients
    become 0 in fp16. Zeros, subnormals and the largest magnitude show it, but statistics read one
    by one cost a pass and a host sync each, for every tensor. This reads values once, in
    batches that stay in the cache of a CPU, or by one Triton kernel and its merge on NVIDIA GPUs,
    and always sums in the same order, so that results repeat bit for bit.

    A value `x` counts as subnormal where `0 < |x * unscale * scale| < 2^-14`; the bound is divided
    by the scales once and rounded to fp32. NaN and inf are counted and otherwise left out. Of a
    sparse tensor only stored values count.

    Args:
        tensors: fp16, bf16, fp32, float64 or complex, of any shape and on any devices; DTensors
            stand for their local shards.
        scale: The scale at which fp16 would hold the values: the loss scale for gradients, 1 for
            weights and activations. Positive; a tensor is read on its device.
        unscale: Multiplies the values before anything else: `1 / loss_scale` for gradients that
            still carry the loss scale. Positive.

    Returns:
        stats_NK: One row a tensor, in their order, see `StatField`; float64, or fp32 on MPS. On the
            device of the tensors. Where they are on several, on that of the first which is not on
            the CPU.

    Raises:
        ValueError: A tensor has another dtype, or no values because it is on the meta device.

    References:
        1710.03740, section 3.2: half of an SSD's activation gradients lie below what fp16 holds.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    values = []
    for index, tensor in enumerate(tensors):
        flat = _flat(_checked(stored_values(local_shard(tensor)), index))
        values.append(flat)
        # By the dtype of the sums: fp16, bf16 and fp32 share batches, and float64 keeps its digits.
        groups.setdefault((flat.device, accumulation_dtype(flat.dtype)), []).append(index)
    if not values:
        return torch.zeros(0, len(StatField), dtype=torch.float64)
    # The host must not wait: everything goes to an accelerator if there is one.
    devices = [device for device, _ in groups]
    home = next((device for device in devices if device.type != "cpu"), devices[0])
    parts: list[tuple[list[int], Tensor]] = []
    for (device, dtype), members in groups.items():
        part = _group_stats([values[i] for i in members], device, dtype, scale, unscale)
        parts.append((members, part.to(home, state_dtype(home), non_blocking=True)))
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
    """Return the statistics of flat tensors of one device that are computed in one dtype."""
    # Dividing the bound costs a scalar, scaling the values would cost a pass.
    wide = state_dtype(device)
    factor, by_scale = (_scalar(number, wide, device) for number in (unscale, scale))
    subnormal = (_SMALLEST_NORMAL / (factor * by_scale).abs()).to(dtype)
    if dtype == torch.float32 and triton_problem(device) is None:
        # Triton is there on Linux only.
        from lightning_mp.numerics.stats_kernels import fused_stats

        stats_NK = fused_stats(values, subnormal)
    else:
        stats_NK = row_stats(values, subnormal, look=device.type == "cpu")
    if isinstance(unscale, Tensor) or unscale != 1:
        # Two columns in the place of all values; the bound of subnormals has the factor already.
        stats_NK[:, StatField.AMAX] *= factor.abs()
        stats_NK[:, StatField.SUM_OF_SQUARES] *= factor.square()
    return stats_NK


def _scalar(number: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number on a device, without a sync where it comes from there or from the host."""
    if isinstance(number, Tensor):
        # Nothing says when a copy to the host is done, other than waiting for it.
        return number.detach().to(device, dtype, non_blocking=device.type != "cpu").reshape(())
    return torch.full((), number, dtype=dtype, device=device)


def _checked(tensor: Tensor, index: int) -> Tensor:
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"Passed `tensor_stats` a tensor of {tensor.dtype} at position {index}. Tensors must "
            "be of float16, bfloat16, float32 or float64. Leave out others, such as indices and "
            "step counts."
        )
    if tensor.is_meta:
        raise ValueError(
            f"Passed `tensor_stats` a meta tensor of shape {list(tensor.shape)} at position "
            f"{index}. Tensors must hold values. Materialize the module first, as by `to_empty`."
        )
    return tensor


def _flat(tensor: Tensor) -> Tensor:
    """Return all values in the order of memory, copied only where there are gaps."""
    values = tensor.detach()
    # Statistics do not depend on the order: a transposed or channels-last tensor needs no copy.
    if not values.is_contiguous():
        order = sorted(range(values.ndim), key=values.stride, reverse=True)
        values = values.permute(order)
    return values.reshape(-1)


def count_non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Count the NaN and the infinite values of every tensor, without a host sync.

    NaN and inf are told apart because they have different causes: an fp16 gradient above 65504 is
    inf, while NaN has come out of inf - inf, 0 * inf or 0 / 0 somewhere earlier. Counts are exact,
    which a non-finite norm is not: the L2 norm of finite fp32 values above 1.8e19 is inf as well.

    Returns:
        counts_N2: NaN in column 0 and +-inf in column 1, int64, on the device of the first tensor.
            Tensors on a second device cost one sync each.
    """
    if not tensors:
        return torch.zeros(0, 2, dtype=torch.int64)
    # torch has no multi-tensor `isnan`: kernels for every tensor, for the step that went wrong.
    values = [stored_values(tensor) for tensor in tensors]
    rows = [torch.stack([torch.isnan(v).sum(), torch.isinf(v).sum()]) for v in values]
    return torch.stack([row.to(values[0].device) for row in rows])


def first_non_finite(named_tensors: Iterable[tuple[str, Tensor]]) -> NonFinite | None:
    """Find the first tensor, in the order given, with a value that is not finite: one host sync."""
    named = list(named_tensors)
    counts = count_non_finite([tensor for _, tensor in named]).tolist()
    for (name, tensor), (nan, inf) in zip(named, counts, strict=True):
        if nan or inf:
            return NonFinite(name, tuple(tensor.shape), stored_values(tensor).numel(), nan, inf)
    return None
