"""A module whose activations are in half throughout: its buffers, and islands of fp32 in it."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["HalfBuffers", "cast_at_borders", "cast_floats"]


def cast_floats(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a nested collection; uint8 stays uint8."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(data, Tensor, cast)


def cast_at_borders(modules: Iterable[nn.Module], half: torch.dtype) -> list[RemovableHandle]:
    """Let modules that keep fp32 weights compute in fp32 amid half activations.

    Args:
        modules: What casts its inputs to fp32 and its outputs back to half.
        half: The dtype of activations.

    Returns:
        What removes the casts.
    """

    def widen(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def narrow(_: nn.Module, __: Any, output: Any) -> Any:
        return cast_floats(output, half)

    handles: list[RemovableHandle] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(widen, with_kwargs=True))
        handles.append(module.register_forward_hook(narrow))
    return handles


class HalfBuffers:
    """Holds a module's floating-point buffers in half, and remembers them in fp32.

    Where activations are in half and nothing casts them, an fp32 buffer turns what it is added to
    into fp32, which the next linear layer refuses. A checkpoint holds the fp32 values, such as a
    table of angles of which half keeps 11 bits, unless something has been written since.

    Args:
        half: `torch.float16` or `torch.bfloat16`.
    """

    def __init__(self, half: torch.dtype) -> None:
        self.half = half
        self._originals: dict[tuple[nn.Module, str], Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, object]) -> "HalfBuffers":
        return self  # a copy of the module brings its hooks, and is a plain half module

    def convert(self, module: nn.Module, keep_fp32: Iterable[nn.Module] = ()) -> None:
        """Turn the fp32 buffers of a module into half, in place.

        Args:
            module: The model.
            keep_fp32: Modules whose own buffers stay as they are.
        """
        kept = set(keep_fp32)
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if owner not in kept and buffer.dtype == torch.float32:
                    self._originals[owner, name] = buffer
                    owner._buffers[name] = buffer.to(self.half)
            if any(each is owner for each, _ in self._originals):
                self._handles += [
                    owner.register_state_dict_post_hook(functools.partial(self._write)),
                    owner.register_load_state_dict_pre_hook(self._read),
                ]

    def release(self) -> None:
        """Turn the buffers back into fp32, and forget them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for owner, name in self._originals:
            owner._buffers[name] = self._value(owner, name)
        self._originals.clear()

    def _value(self, owner: nn.Module, name: str) -> Tensor | None:
        """Return a buffer in fp32; what was written since wins."""
        buffer, original = owner._buffers[name], self._originals[owner, name]
        if buffer is None or buffer.shape != original.shape:
            return buffer
        original = original.to(buffer.device)
        return torch.where(original.to(buffer.dtype) == buffer, original, buffer.float())

    def _write(self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
        for each, name in self._originals:
            if each is owner and prefix + name in state_dict:
                state_dict[prefix + name] = self._value(owner, name)

    def _read(self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        for (each, name), original in self._originals.items():
            loaded = state_dict.get(prefix + name)
            if each is owner and isinstance(loaded, Tensor) and loaded.shape == original.shape:
                self._originals[each, name] = loaded.detach().to(original, copy=True)
