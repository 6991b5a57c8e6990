"""What a step of the demo needs in memory, with the gradient cache and without it.

Legend: ``b`` global batch, ``m`` micro-batch, ``D`` feature width.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_mp.contrastive._tiles.torch_tiles import DEFAULT_WORKSPACE_BYTES

__all__ = ["MemoryEstimate", "peak_bytes_of_children", "saved_bytes"]

FP32_BYTES = 4
# CLIP's dense loss keeps four b x b matrices alive when its backward starts: the logits of both
# directions and the log-softmax of each.
DENSE_MATRICES = 4
# The features of both towers and their gradients, and as much again inside the tiled loss, which
# multiplies in a workspace of fixed size.
FEATURE_COPIES = 8
WORKSPACE_BYTES = DEFAULT_WORKSPACE_BYTES["cpu"]


def saved_bytes(tower: nn.Module, inputs: Tensor) -> int:
    """Count the bytes that autograd saves in a forward pass for the backward.

    Each storage counts once, as several operations may save the same tensor; weights do not count,
    as they are there anyway.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in tower.parameters()}
    own |= {tensor.untyped_storage().data_ptr() for tensor in tower.buffers()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        output = tower(inputs)
    del output  # the graph must outlive the count, or a freed address could count twice
    return sum(sizes.values())


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one training step beyond weights, optimizer and data.

    Args:
        saved_bytes_per_pair: What the backward of both towers needs of one pair, in bytes.
        saved_bytes_largest_tower: The same of the greedier tower alone.
        micro_batch_size: Pairs that a tower sees at a time, m.
        feature_width: Feature width D.
    """

    saved_bytes_per_pair: float
    saved_bytes_largest_tower: float
    micro_batch_size: int
    feature_width: int

    @classmethod
    def measure(
        cls, visual: nn.Module, text: nn.Module, images: Tensor, texts: Tensor, feature_width: int
    ) -> MemoryEstimate:
        """Measure on a micro-batch of both towers' inputs, in training mode."""
        rows = len(images)
        towers = [saved_bytes(visual.train(), images), saved_bytes(text.train(), texts)]
        return cls(
            saved_bytes_per_pair=sum(towers) / rows,
            saved_bytes_largest_tower=max(towers) / rows,
            micro_batch_size=rows,
            feature_width=feature_width,
        )

    def dense_loss(self, batch_size: int) -> int:
        """Bytes of the dense loss: grows with b^2."""
        return DENSE_MATRICES * FP32_BYTES * batch_size**2

    def uncached_towers(self, batch_size: int) -> int:
        """Bytes that both towers save for the backward of a whole batch at once."""
        return round(self.saved_bytes_per_pair * batch_size)

    def tiled_loss(self, batch_size: int) -> int:
        """Bytes of the features, their gradients and the tiled loss's own: grows with b."""
        return FEATURE_COPIES * FP32_BYTES * batch_size * self.feature_width + WORKSPACE_BYTES

    def cached_towers(self, batch_size: int) -> int:
        """Bytes that the towers save under the gradient cache: those of one micro-batch."""
        return round(self.saved_bytes_largest_tower * min(batch_size, self.micro_batch_size))


def peak_bytes_of_children() -> int:
    """Largest resident size that any finished child process reached."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
