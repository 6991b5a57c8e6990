"""Casts at the boundaries of modules that compute in another dtype than their surroundings."""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from lightning_mp._nested import map_tensors, tensors_in
from lightning_mp.numerics.floats import HALF_DTYPES

__all__ = [
    "CASTABLE",
    "cast_at_borders",
    "cast_castable",
    "compute_in_fp32",
    "dtypes_of",
    "is_border_cast",
    "is_compiled",
    "outermost",
    "own_forward",
    "replace_forward",
    "to_fp32",
]

CASTABLE = (*HALF_DTYPES, torch.float32)  # never float64, float8 or complex
_SHARED = (list, dict)


def compute_in_fp32(modules: Iterable[nn.Module], undo: contextlib.ExitStack) -> None:
    """Make disjoint modules compute in fp32 under autocast, until `undo`.

    fp32 weights alone do not prevent an overflow, because autocast casts them at every use. The
    outputs are fp32, like the residual stream of most models under autocast.
    """
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise MisconfigurationException(
                f"Selected `{module.original_name}` by `fp32_modules`, which is TorchScript, whose "
                "inputs cannot be cast. Call it in the forward of a module of your own, and pass "
                "the path of that module."
            )
        original = module.__dict__.get("forward")
        if not hasattr(original, "computes_in_fp32"):  # since an earlier call
            # Not hooks, so that `torch.compile` can trace the region without autocast.
            replace_forward(module, _in_fp32(own_forward(module)), undo)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the present `forward` as a function of the module, or of a deep copy of it."""
    original = module.__dict__.get("forward")
    if original is None:  # not a bound method, which would use the weights of the original
        return lambda module, *args, **kwargs: type(module).forward(module, *args, **kwargs)
    if getattr(original, "__self__", None) is module:
        return original.__func__  # type: ignore[no-any-return]
    return lambda _, *args, **kwargs: original(*args, **kwargs)


def replace_forward(
    module: nn.Module, forward: Callable[..., Any], undo: contextlib.ExitStack
) -> None:
    """Replace `forward` on a module instance, and on its copies, until `undo`."""
    original = module.__dict__.get("forward")
    kind = type(module)
    own = types.FunctionType(
        _code_for(f"{kind.__module__}.{kind.__qualname__}.forward", forward.__code__),
        forward.__globals__,
        "forward",  # pickle looks up this name
        forward.__defaults__,
        forward.__closure__,
    )
    # The signature is that of the class.
    own.__dict__.update(forward.__dict__, __wrapped__=kind.forward)
    module.__dict__["forward"] = types.MethodType(own, module)

    def restore() -> None:
        if getattr(module.__dict__.get("forward"), "__func__", None) is not own:
            return  # another library has wrapped it since
        del module.__dict__["forward"]
        if original is not None:
            module.__dict__["forward"] = original

    undo.callback(restore)


@functools.cache
def _code_for(name: str, code: types.CodeType) -> types.CodeType:
    # Dynamo compiles a code object at most eight times, and learns by its name which sizes change.
    # Every class needs a code object of its own, as without the plugin.
    return code.replace(co_name=name)


def _in_fp32(call: Callable[..., Any]) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = itertools.chain(module.parameters(), module.buffers(), tensors_in((args, kwargs)))
        first = next(own, None)
        off = torch.autocast("cpu" if first is None else first.device.type, enabled=False)
        # `PureFP16` creates half tensors by default.
        default = torch.promote_types(torch.get_default_dtype(), torch.float32)
        # A module may write to a list, for example of auxiliary losses, so it gets the list itself.
        shared = [each for value in (*args, *kwargs.values()) for each in _shared_in(value)]
        items = [item for each in shared for _, item in _items(each)]
        items = [item for item in items if not isinstance(item, _SHARED)]
        casts = [(item, _cast_argument(item, torch.float32)) for item in items]
        pairs = [(old, new) for old, new in casts if old is not new]
        with off, _DtypeContextManager(default):
            _exchange(shared, pairs)
            try:
                args, kwargs = _cast_arguments(args, kwargs, torch.float32)
                return call(module, *args, **kwargs)
            finally:
                _exchange(shared, [(new, old) for old, new in pairs])

    forward.computes_in_fp32 = True  # type: ignore[attr-defined]
    return forward


def _shared_in(value: Any) -> list[Any]:
    """Return the lists and dictionaries in a list or dictionary, and itself."""
    if not isinstance(value, _SHARED):
        return []
    return [value, *(each for _, item in _items(value) for each in _shared_in(item))]


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _exchange(containers: list[Any], pairs: list[tuple[Any, Any]]) -> None:
    """Replace the first item of each pair by the second in lists and dictionaries."""
    for each in containers:
        for key, item in _items(each):
            for old, new in pairs:
                if item is old:
                    each[key] = new


def to_fp32(modules: Iterable[nn.Module]) -> None:
    """Cast the half parameters and buffers of modules to fp32, in place and for good."""
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dtype in HALF_DTYPES:
                tensor.grad = None  # otherwise torch would keep accumulating into the half gradient
                tensor.data = tensor.data.float()


def outermost(root: nn.Module, chosen: Container[nn.Module]) -> list[nn.Module]:
    """Return the chosen modules that the root or a module that is not chosen contains."""
    # Not by paths: a shared module may be inside another one under its first path only.
    outer = [module for module in root.modules() if module is root or module not in chosen]
    found = [child for module in outer for child in (module, *module.children())]
    return [module for module in dict.fromkeys(found) if module in chosen]


def cast_at_borders(
    modules: Iterable[nn.Module],
    inside: torch.dtype,
    outside: torch.dtype,
    undo: contextlib.ExitStack,
) -> None:
    """Cast inputs of modules to dtype `inside` and outputs to dtype `outside`, until `undo`."""
    for module in modules:
        enter, leave = functools.partial(_enter, inside), functools.partial(_leave, outside)
        undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(leave).remove)


def _enter(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    # `compute_in_fp32` casts the items of lists and dictionaries, to which a module may write.
    kept = _SHARED if dtype == torch.float32 else ()
    return _cast_arguments(args, kwargs, dtype, kept)


def _leave(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    return cast_castable(output, dtype, _is_castable)


def _cast_arguments(
    args: Any, kwargs: Any, dtype: torch.dtype, kept: tuple[type, ...] = ()
) -> tuple[Any, Any]:
    def cast(value: Any) -> Any:
        return value if isinstance(value, kept) else _cast_argument(value, dtype)

    return tuple([cast(value) for value in args]), {k: cast(v) for k, v in kwargs.items()}


def _cast_argument(value: Any, dtype: torch.dtype) -> Any:
    # Not a copy where nothing is cast, because a module may write to it.
    is_cast = dtypes_of(value, _is_castable) <= {dtype}
    return value if is_cast else cast_castable(value, dtype, _is_castable)


def _is_castable(tensor: Tensor) -> bool:
    return tensor.dtype in CASTABLE


def is_border_cast(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one of `cast_at_borders`."""
    return getattr(hook, "func", None) in (_enter, _leave)


def cast_castable(
    value: Any, dtype: torch.dtype, is_castable: Callable[[Tensor], bool] = torch.is_floating_point
) -> Any:
    """Cast the tensors for which `is_castable` is true."""
    return map_tensors(
        value, lambda x: x.to(dtype) if x.dtype is not dtype and is_castable(x) else x
    )


def dtypes_of(value: Any, is_castable: Callable[[Tensor], bool]) -> set[torch.dtype]:
    """Return the dtypes of the tensors for which `is_castable` is true."""
    return {tensor.dtype for tensor in tensors_in(value) if is_castable(tensor)}


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled by any of the ways to call `torch.compile`."""
    is_whole = getattr(module, "_compiler_ctx", None) is not None  # a LightningModule
    return is_whole or isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
