"""Modules that compute in fp32 amid a forward under autocast and an op policy."""

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from lightning_mp.precision._weights.half_module import cast_floats

__all__ = ["FP32Islands", "outermost"]


class FP32Islands:
    """Turns autocast off inside chosen modules, and casts what goes into them to fp32.

    Weights in fp32 alone do not help a layer whose output overflows: autocast casts them at every
    use, and a linear layer that makes 70000 makes inf. What comes out of an island is fp32, as is
    the residual stream of most models under autocast.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """Let modules, none of them inside another, compute in fp32, until `remove`.

        Their `forward` is replaced on the instance, not by hooks: `torch.compile` takes the region
        without autocast as part of its graph. Copies of a module compute in fp32 too.
        """
        for module in modules:
            if "forward" not in module.__dict__:
                module.forward = types.MethodType(_forward_in_fp32, module)
                self._modules.append(module)

    def remove(self) -> None:
        """Give the modules their own `forward` back."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()


def outermost(modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of dotted path -> module that are inside no other one."""
    for path, module in modules.items():
        parts = path.split(".")
        if not any(".".join(parts[:n]) in modules for n in range(1, len(parts))):
            yield module


def _forward_in_fp32(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    tensors = (t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    device = next((t.device for t in tensors), None) or next(module.parameters()).device
    with torch.autocast(device.type, enabled=False):
        args, kwargs = cast_floats((args, kwargs), torch.float32)
        return type(module).forward(module, *args, **kwargs)
