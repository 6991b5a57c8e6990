"""Inputs of a contrastive loss in one form; refused where they have no derivative, and looked at.

Shapes:
    b: this rank's batch. D: feature width.
"""

import math
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype

__all__ = ["InputChecks", "as_tensors", "check_derivatives", "in_one_dtype"]

_UNIT = 0.05  # a mean deviation of norms from 1 that half precision does not reach
_COLD = 10.0  # scales from here on are made for cosines: CLIP's starts at 14 and ends at 100
_LARGEST = 100.0  # logit that CLIP lets its scale make of unit features


def _as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a tensor on the device of `like`; a parameter elsewhere still gets its gradient."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    if isinstance(value, np.ndarray):
        # numpy deprecates `float()` of an array of shape (1,).
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
    # What is no float is left to the checks, which refuse it on all ranks.
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


class InputChecks:
    """Looks at the first inputs of a loss, and then twice as rarely each time; warns once of each.

    A look reads the features twice and makes seven numbers, which come to the host without making
    it wait: on CUDA the warning comes with a later call. The looks are those at the calls 1, 2, 4,
    8 and so on, as a scale may become negative while it is trained.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._told: set[str] = set()
        self._readback = AsyncReadback()

    def __deepcopy__(self, memo: dict[int, object]) -> "InputChecks":
        # What is under way to the host cannot be copied; a copy looks at its own first inputs.
        return InputChecks()

    def __reduce__(self) -> Any:
        return InputChecks, ()

    @torch.compiler.disable  # where its caller was given up as compiled too often
    def look(
        self,
        image_bD: Tensor,
        text_bD: Tensor,
        scale: Tensor | float,
        *,
        is_normalizing: bool = False,
    ) -> None:
        """Take note of inputs that can be used; not of those that a CUDA graph is made with.

        With `is_normalizing` the loss brings features to norm 1 itself, so that any norm will do.
        """
        # CUDA refuses to be asked for an event while a graph is made, as `ready` does.
        if image_bD.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        # Of an earlier call: this one's numbers are still on their way from a GPU.
        for _, numbers, context in self._readback.ready():
            self._judge(numbers.tolist(), *context["seen"])
        self._calls += 1
        if self._calls & (self._calls - 1):  # no power of two
            return
        seen = (*image_bD.shape, is_normalizing)
        self._readback.submit(self._calls, _numbers(image_bD, text_bD, scale), seen=seen)
        # There the copy is made at once, so that the call that is wrong can warn.
        if image_bD.device.type == "cpu":
            for _, numbers, _ in self._readback.drain():
                self._judge(numbers.tolist(), *seen)

    def _judge(self, numbers: list[float], rows: int, columns: int, is_normalizing: bool) -> None:
        by_rows, by_columns = numbers[:2], numbers[2:4]
        image_norm, text_norm, scale = numbers[4:]
        logit = scale * image_norm * text_norm
        if scale < 0:
            self._tell(
                "scale",
                f"Passed `logit_scale={scale:.3g}`. With a negative scale the loss pushes pairs "
                "apart. Pass `self.logit_scale.exp()` of a trained logarithm.",
            )
        if min(by_rows) > _UNIT and max(by_columns) < _UNIT:
            self._tell(
                "transposed",
                f"Passed features of shape {[rows, columns]} whose columns are of norm 1 and whose "
                f"rows are not: {columns} pairs of width {rows}, transposed. The batch comes "
                "first. Pass `features.T`.",
            )
            return
        is_large = max(by_rows) > _UNIT and scale >= _COLD and _LARGEST < logit < math.inf
        if is_large and not is_normalizing:
            self._tell(
                "norms",
                f"Passed features of norm {image_norm:.3g} (images) and {text_norm:.3g} (texts) "
                f"with `logit_scale={scale:.3g}`: logits may reach {logit:.3g}, where CLIP's end "
                "at 100. Normalise them first: `F.normalize(features, dim=-1)`.",
            )

    def _tell(self, kind: str, message: str) -> None:
        if kind in self._told:
            return
        self._told.add(kind)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            warnings.warn(message, stacklevel=5)


@torch.no_grad()
def _numbers(image_bD: Tensor, text_bD: Tensor, scale: Tensor | float) -> Tensor:
    """Return how far row norms and column norms are from 1, the row norms, and the scale."""
    features = image_bD.detach(), text_bD.detach()
    dtype = accumulation_dtype(image_bD.dtype)
    norms = [torch.linalg.vector_norm(x, dim=dim, dtype=dtype) for dim in (1, 0) for x in features]
    numbers = [(norm - 1).abs().mean() for norm in norms]
    numbers += [norm.square().mean().sqrt() for norm in norms[:2]]
    if isinstance(scale, Tensor) and scale.device.type != "cpu":
        numbers.append(scale.detach().reshape(()).to(dtype))
    else:
        # Of a tensor, of an array of numpy with one value, or of a number.
        value = scale.item() if hasattr(scale, "item") else float(scale)
        numbers.append(torch.full_like(numbers[0], value))
    return torch.stack(numbers)
