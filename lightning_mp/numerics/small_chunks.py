"""Chunks of small tensors, for functions that process several tensors in one call."""

from collections import defaultdict
from collections.abc import Hashable

from torch import Tensor, nn

__all__ = ["SmallChunks"]

_SMALL_NUMEL = 2**16  # with fewer elements, launching takes longer than the kernel
_CACHED_NUMEL = 2**17  # with more, the temporaries of a chunk leave the caches of a CPU core


class SmallChunks:
    """Assigns small tensors to chunks.

    On a CPU, a chunk fits into the caches. On a GPU, a chunk has any size, to save launches.
    """

    def __init__(self) -> None:
        self._numel: dict[Hashable, int] = defaultdict(int)

    def of(self, kind: Hashable, *tensors: Tensor) -> Hashable:
        """Return the key of the chunk of tensors of one shape, such as a weight and its residual.

        The tensors of a chunk share `kind`, such as device and dtype. The key is `None` for large
        or non-contiguous tensors and subclasses of Tensor, such as DTensors.
        """
        numel = tensors[0].numel()
        if numel > _SMALL_NUMEL:
            return None
        for tensor in tensors:
            if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_contiguous():
                return None
        if not tensors[0].is_cpu:
            return kind
        self._numel[kind] += numel
        return kind, self._numel[kind] // _CACHED_NUMEL
