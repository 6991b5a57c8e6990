"""Warns of inputs of a contrastive loss that are valid, but probably not what was meant.

Shapes:
    b: this rank's batch. D: feature width.
"""

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.floats import accumulation_dtype

__all__ = ["InputChecks"]

_UNIT = 0.05  # a mean deviation of norms from 1 that half precision does not reach
_COLD = 10.0  # scales from here on are made for cosines: CLIP's starts at 14 and ends at 100
_LARGEST = 100.0  # logit that CLIP lets its scale make of unit features


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
        if image_bD.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        for _, numbers, context in self._readback.ready():
            self._judge(numbers.tolist(), *context["seen"])
        self._calls += 1
        if self._calls & (self._calls - 1):
            return
        seen = (*image_bD.shape, is_normalizing)
        self._readback.submit(self._calls, _numbers(image_bD, text_bD, scale), seen=seen)
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
