"""Warnings about probable mistakes: transposed or unnormalized features, a negative scale."""

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lightning_mp.contrastive._call.request import Request, group_named, ranks_of
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.floats import ACCUMULATION_DTYPES

__all__ = ["FirstInputs"]

_NORM_DEVIATION = 0.05  # mean deviation of norms from 1, above the rounding of half precision
_LARGE_SCALE = 10.0  # larger scales assume unit features: CLIP's starts at 14 and ends at 100
_LARGEST_LOGIT = 100.0  # largest logit in CLIP, whose scale is clamped at 100


class FirstInputs:
    """Checks the inputs at calls 1, 2, 4, 8, ... and warns once per kind of problem.

    A check reads the features twice and computes seven numbers. The host does not wait for them, so
    that on CUDA the warning comes with a later call. Checks continue because the scale may become
    negative in training.
    """

    def __init__(self) -> None:
        self.calls = 0  # of the loss
        # The fields `read_scale` and `read_call` of a `Request`. Ranks compare with them the scales
        # on CUDA devices, whose current values the host could not read without waiting.
        self.read: dict[str, Any] = {}
        self._shared_calls = 0
        self.signature: list[Any] | None = None  # of the last inputs that passed the checks
        self._warned: set[str] = set()
        self._readback = AsyncReadback()

    def __reduce__(self) -> Any:
        # Pending copies to the host cannot be copied; a copy checks its own first inputs.
        return FirstInputs, ()

    @torch.compiler.disable  # Dynamo runs the caller eagerly after too many recompilations
    def check(self, request: Request, signature: list[Any] | None) -> None:
        """Check inputs for probable mistakes, except during the capture of a CUDA graph."""
        self.signature = signature
        # Tensors without values, as in Lightning's `measure_flops`.
        if request.image.is_meta or is_fake(request.image):
            return
        # `ready` queries events, which CUDA forbids during a capture.
        if request.image.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if request.image.is_cuda:
            self._warn_about_earlier_calls(request)
        self.calls += 1
        if self.calls & (self.calls - 1):  # not a power of two
            return
        # `MatryoshkaLoss` normalizes features itself, so their norms do not matter.
        shape = (*request.image.shape, request.normalize)
        numbers = _input_norms(request.image, request.text, request.scale)
        if numbers.is_cuda:
            self._readback.submit(self._shared_calls, numbers, shape=shape)
        else:  # the numbers are on the host: warn in this call
            self._warn_if_unlikely(numbers.tolist(), *shape)

    def _warn_about_earlier_calls(self, request: Request) -> None:
        # The numbers of an earlier call; those of this call are still being copied.
        for call, array, context in self._readback.ready():
            numbers = array.tolist()
            self._warn_if_unlikely(numbers, *context["shape"])
            self.read = {"read_scale": numbers[-1], "read_call": call}
        group = group_named(request.group)
        # Calls before the group exists are not counted, since other ranks may not have made them.
        self._shared_calls += ranks_of(group, request.owner) > 1

    def _warn_if_unlikely(
        self, numbers: list[float], rows: int, columns: int, is_normalizing: bool
    ) -> None:
        row_deviations, column_deviations = numbers[:2], numbers[2:4]
        image_norm, text_norm, scale = numbers[4:]
        logit = scale * image_norm * text_norm
        if scale < 0:
            self._warn_once(
                "scale",
                f"Passed `logit_scale={scale:.3g}`. With a negative scale the loss pushes pairs "
                "apart. Pass `self.logit_scale.exp()` of a trained logarithm.",
            )
        if min(row_deviations) > _NORM_DEVIATION and max(column_deviations) < _NORM_DEVIATION:
            self._warn_once(
                "transposed",
                f"Passed features of shape {[rows, columns]} whose columns have norm 1 and whose "
                f"rows do not: probably {columns} pairs of width {rows}, transposed. The batch is "
                "the first dimension. Pass `features.T`.",
            )
            return
        is_large = (
            max(row_deviations) > _NORM_DEVIATION
            and scale >= _LARGE_SCALE
            and _LARGEST_LOGIT < logit < math.inf
        )
        if is_large and not is_normalizing:
            self._warn_once(
                "norms",
                f"Passed features of norm {image_norm:.3g} (images) and {text_norm:.3g} (texts) "
                f"with `logit_scale={scale:.3g}`: logits may reach {logit:.3g}; in CLIP they "
                "end at 100. Normalize features first: `F.normalize(features, dim=-1)`.",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind in self._warned:
            return
        self._warned.add(kind)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            warnings.warn(message, stacklevel=5)


@torch.no_grad()
def _input_norms(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
    """Return mean deviations of row and column norms from 1, RMS row norms, and the scale."""
    features = image_bD.detach(), text_bD.detach()
    dtype = ACCUMULATION_DTYPES[image_bD.dtype]
    norms = [torch.linalg.vector_norm(x, dim=dim, dtype=dtype) for dim in (1, 0) for x in features]
    numbers = [(norm - 1).abs().mean() for norm in norms]
    numbers += [norm.square().mean().sqrt() for norm in norms[:2]]
    return torch.stack([*numbers, scale.detach().reshape(()).to(dtype)])
