"""A look at the first inputs of a loss: features that are not normalised, transposed, and so on.

Shapes:
    b: this rank's batch. D: feature width.
"""

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.contrastive._call.request import Request, group_named, ranks_of
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.floats import ACCUMULATION_DTYPES

__all__ = ["FirstInputs"]

_UNIT = 0.05  # a mean deviation of norms from 1 that half precision does not reach
_COLD = 10.0  # scales from here on are made for cosines: CLIP's starts at 14 and ends at 100
_LARGEST = 100.0  # logit that CLIP lets its scale make of unit features


class FirstInputs:
    """Looks at the first inputs of a loss, and then twice as rarely each time; warns once of each.

    A look reads the features twice and makes seven numbers, which come to the host without making
    it wait: on CUDA the warning comes with a later call. The looks are those at the calls 1, 2, 4,
    8 and so on, as a scale may become negative while it is trained.

    Attributes:
        calls: How often the loss was called.
        signature: Signature of the last inputs that passed the checks, see `Request.signature`.
        read: The fields `read_scale` and `read_call` of a `Request`: what ranks compare of scales
            on CUDA devices, whose values the host has only here without waiting.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.read: dict[str, Any] = {}
        self._shared_calls = 0
        self.signature: list[Any] | None = None
        self._told: set[str] = set()
        self._readback = AsyncReadback()

    def __deepcopy__(self, memo: dict[int, object]) -> "FirstInputs":
        # What is under way to the host cannot be copied; a copy looks at its own first inputs.
        return FirstInputs()

    def __reduce__(self) -> Any:
        return FirstInputs, ()

    @torch.compiler.disable  # where its caller was given up as compiled too often
    def look(self, request: Request, signature: list[Any] | None) -> None:
        """Take note of inputs that can be used; not of those that a CUDA graph is made with."""
        self.signature = signature
        # CUDA refuses to be asked for an event while a graph is made, as `ready` does.
        if request.image.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if request.image.is_cuda:
            self._take_what_arrived(request)
        self.calls += 1
        if self.calls & (self.calls - 1):  # no power of two
            return
        # `MatryoshkaLoss` brings features to norm 1 itself, so that any norm will do.
        seen = (*request.image.shape, request.normalize)
        numbers = _numbers(request.image, request.text, request.scale)
        if numbers.is_cuda:
            self._readback.submit(self._shared_calls, numbers, seen=seen)
        else:  # the call that is wrong can warn
            self._judge(numbers.tolist(), *seen)

    def _take_what_arrived(self, request: Request) -> None:
        # Of an earlier call: this one's numbers are still on their way from a GPU.
        for call, array, context in self._readback.ready():
            numbers = array.tolist()
            self._judge(numbers, *context["seen"])
            self.read = {"read_scale": numbers[-1], "read_call": call}
        group = group_named(request.group) if request.group else None
        # A call of one rank alone, such as one before the ranks meet, is no call of the others.
        self._shared_calls += ranks_of(group, request.owner) > 1

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
def _numbers(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
    """Return how far row norms and column norms are from 1, the row norms, and the scale."""
    features = image_bD.detach(), text_bD.detach()
    dtype = ACCUMULATION_DTYPES[image_bD.dtype]
    norms = [torch.linalg.vector_norm(x, dim=dim, dtype=dtype) for dim in (1, 0) for x in features]
    numbers = [(norm - 1).abs().mean() for norm in norms]
    numbers += [norm.square().mean().sqrt() for norm in norms[:2]]
    return torch.stack([*numbers, scale.detach().reshape(()).to(dtype)])
