"""Tensors inside transforms of `torch.func`, such as `vmap` and `grad`."""

from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = ["differentiable", "outside_transforms", "unwrapped"]

# Statistics inside a transform would be transformed as well.
outside_transforms = temporarily_clear_interpreter_stack


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor behind a tensor of a transform; for `vmap`, the tensor of all samples."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def differentiable(tensor: Tensor) -> Tensor | None:
    """Return the tensor, or the tensor behind it, that receives a gradient; `None` if none does."""
    found = tensor if tensor.requires_grad else unwrapped(tensor)
    return found if found.requires_grad else None
