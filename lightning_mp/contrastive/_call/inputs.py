"""Brings the inputs of a contrastive loss into one form, and refuses what has no derivative.

Shapes:
    b: this rank's batch. D: feature width.
"""

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype

__all__ = ["as_tensors", "check_derivatives", "in_one_dtype"]


def _as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a tensor on the device of `like`; a parameter elsewhere still gets its gradient."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    if isinstance(value, np.ndarray):
        value = value.item()
    # A fill: `torch.tensor` would copy pageable memory, which waits, and which no graph can hold.
    return torch.full((), float(value), dtype=accumulation_dtype(like.dtype), device=like.device)


def as_tensors(
    scale: Tensor | float, bias: Tensor | float | None, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return scale and bias on the features' device."""
    return _as_tensor(scale, like), None if bias is None else _as_tensor(bias, like)


def in_one_dtype(image_bD: Tensor, text_bD: Tensor) -> tuple[Tensor, Tensor]:
    """Return features in the wider of their dtypes; each gets its gradient in its own."""
    are_floats = all(isinstance(x, Tensor) and x.dtype in FLOAT_DTYPES for x in (image_bD, text_bD))
    if not are_floats or image_bD.dtype == text_bD.dtype:
        return image_bD, text_bD
    dtype = torch.promote_types(image_bD.dtype, text_bD.dtype)
    return image_bD.to(dtype), text_bD.to(dtype)


def check_derivatives(owner: str, *inputs: object) -> None:
    """Refuse derivatives that would silently be zero, in the name of a loss."""
    is_dual = any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    )
    if is_dual or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"Called `{owner}` in forward-mode AD or inside a transform of `torch.func`. It has a "
            "plain backward only. Take its gradient with `backward()` or `torch.autograd.grad`."
        )
