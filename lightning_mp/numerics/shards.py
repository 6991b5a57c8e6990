"""What this rank holds of a tensor that is sharded over ranks."""

from typing import Any

from torch import Tensor

__all__ = ["local_shard"]


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, other tensors as they are."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
