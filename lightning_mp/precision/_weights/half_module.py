"""A module whose activations are in half: islands of fp32 in it, and fp32 that meets half."""

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from lightning_mp.precision._choice.op_tables import (
    GROUPS,
    callables_of,
    follow_changes_of_torch,
    opened_composites,
)

__all__ = [
    "MixedInputs",
    "cast_at_borders",
    "cast_castable",
    "cast_floats",
    "compute_in_fp32",
    "dtypes_of",
    "is_compiled",
    "map_tensors",
    "outermost",
    "with_items",
]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the tensors in sequences, mappings and dataclasses, not in place."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):  # a union of types would take longer, for every leaf
        return with_items(value, [map_tensors(each, change) for each in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is dict:  # which Dynamo does not copy
        return {key: map_tensors(each, change) for key, each in value.items()}
    if isinstance(value, Mapping):  # so are batches and outputs of Hugging Face
        changed: Any = copy.copy(value)
        for key, each in value.items():
            changed[key] = map_tensors(each, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            each = map_tensors(getattr(value, field.name), change)
            object.__setattr__(changed, field.name, each)  # it may be frozen
        return changed
    return value


def with_items(like: Any, items: list[Any]) -> Any:
    """Return a sequence of the kind of another."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def cast_floats(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a nested collection; uint8 stays uint8."""
    return map_tensors(data, lambda x: x.to(dtype) if x.is_floating_point() else x)


def compute_in_fp32(modules: Iterable[nn.Module], undo: contextlib.ExitStack) -> None:
    """Let modules, none of them inside another, compute in fp32 amid autocast, until `undo`.

    Weights in fp32 alone do not help a layer whose output overflows: autocast casts them at every
    use, and a linear layer that makes 70000 makes inf. What comes out is fp32, as is the residual
    stream of most models under autocast. Copies of a module compute in fp32 too.
    """
    for module in modules:
        if "forward" not in module.__dict__:
            # No hooks: `torch.compile` takes the region without autocast into its graph.
            module.forward = types.MethodType(_forward_in_fp32, module)
            undo.callback(module.__dict__.pop, "forward", None)


def _forward_in_fp32(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The first tensor given, as a module may have no parameters.
    tensors = (t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    device = next((t.device for t in tensors), None) or next(module.parameters()).device
    with torch.autocast(device.type, enabled=False):
        args, kwargs = cast_floats((args, kwargs), torch.float32)
        # By the class: a bound method kept from before would give a deep copy this one's weights.
        return type(module).forward(module, *args, **kwargs)


def outermost(modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of dotted path -> module that are inside no other one."""
    for path, module in modules.items():
        parts = path.split(".")
        if not any(".".join(parts[:n]) in modules for n in range(1, len(parts))):
            yield module


def cast_at_borders(
    modules: Iterable[nn.Module],
    inside: torch.dtype,
    outside: torch.dtype,
    undo: contextlib.ExitStack,
) -> None:
    """Let modules compute in one dtype amid activations of another, until `undo`."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(args, inside), cast_floats(kwargs, inside)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return cast_floats(output, outside)

    for module in modules:
        undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(leave).remove)


class MixedInputs(TorchFunctionMode):
    """Gives one dtype to the inputs of functions that take no mixture of fp32 and half.

    Buffers stay in fp32, what is added to an fp32 table is fp32 too, and a product with half
    weights refuses that. Here the inputs of products, attention, recurrent cells and norms become
    half, and those of the functions that autocast promotes, such as `grid_sample`, become fp32.
    """

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.half = half
        self.wanted = _wanted_dtypes(half)
        self.opened = opened_composites()
        self.names_opened = frozenset(function.__name__ for function in self.opened)
        follow_changes_of_torch()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = getattr(func, "__name__", "")  # as in `op_policy`: Dynamo traces this
        if name in self.names_opened and func in self.opened:
            with self:
                return self.opened[func](*args, **kwargs)
        dtype = self.wanted.get(name)
        if dtype is not None and len(dtypes_of((args, kwargs), self._is_castable)) == 2:
            args, kwargs = cast_castable((args, kwargs), dtype, self._is_castable)
        return func(*args, **kwargs)

    def _is_castable(self, value: Tensor) -> bool:
        return value.dtype in (self.half, torch.float32)


@lru_cache(maxsize=2)
def _wanted_dtypes(half: torch.dtype) -> dict[str, torch.dtype]:
    """Return what mixed inputs become, by the names of functions."""
    # What torch's own transformers call in evaluation.
    kernels = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
    of_class = {"half": half, "norm": half, "promote": torch.float32}
    return dict.fromkeys(kernels, half) | {
        function.__name__: of_class[group.op_class]
        for group in GROUPS
        if group.op_class in of_class
        for op in group.ops
        for function in callables_of(op)
    }


def cast_castable(value: Any, dtype: torch.dtype, is_castable: Callable[[Tensor], bool]) -> Any:
    """Cast those tensors that are castable."""
    return map_tensors(
        value, lambda x: x.to(dtype) if x.dtype is not dtype and is_castable(x) else x
    )


def dtypes_of(value: Any, is_castable: Callable[[Tensor], bool]) -> set[torch.dtype]:
    """Return the dtypes of those tensors in tuples, lists and dicts that are castable."""
    if isinstance(value, Tensor):
        return {value.dtype} if is_castable(value) else set()
    dtypes: set[torch.dtype] = set()
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            dtypes |= dtypes_of(each, is_castable)
    return dtypes


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` is to compile a module, whichever way it was asked to."""
    is_whole = getattr(module, "_compiler_ctx", None) is not None  # a LightningModule
    return is_whole or isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
