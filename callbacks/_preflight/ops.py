"""Modes that observe the ops of a run: ops that round in half precision, and work in fp32."""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_mp.callbacks._step.functions import running_module
from lightning_mp.precision._choice.op_tables import canonical_name
from lightning_mp.precision._weights.half_module import cast_castable

__all__ = ["Fp32Work", "RoundingOps"]


class RoundingOps(TorchFunctionMode):
    """Collects the ops that return another value in half precision than in fp32."""

    def __init__(
        self, half: torch.dtype, device_type: str, modules: Iterable[tuple[str, nn.Module]]
    ) -> None:
        super().__init__()
        self._half, self._device_type = half, device_type
        self._names = {id(module): path for path, module in modules}
        # Paths of the modules that call each op; "" is `training_step` itself.
        self.callers: dict[str, tuple[str, ...]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        output = func(*args, **kwargs)
        name = _name_of(getattr(func, "__name__", ""))
        if name and isinstance(output, Tensor) and output.dtype is self._half:
            caller, known = running_module(self._names) or "", self.callers.get(name, ())
            if caller not in known and self._differs(func, args, kwargs, output):
                self.callers[name] = (*known, caller)
        return output

    def _differs(self, func: Callable[..., Any], args: Any, kwargs: Any, output: Tensor) -> bool:
        args, kwargs = cast_castable((args, kwargs), torch.float32)
        autocast = torch.autocast(self._device_type, enabled=False)
        try:
            with torch.no_grad(), autocast, torch._C.DisableTorchFunction():
                exact = func(*args, **kwargs)
        except Exception:  # the op does not accept fp32, so only a run can tell
            return True
        return not torch.equal(output.detach().float(), exact.float())


@lru_cache(maxsize=4096)
def _name_of(function: str) -> str:
    """Return the name that `fp32_ops` takes; empty for a function that it cannot move."""
    if "dropout" in function:
        return ""
    try:
        return canonical_name(function)
    except ValueError:
        return ""


class Fp32Work(TorchDispatchMode):
    """Sums the work of a run in fp32: FLOPs of products, and one per value of other outputs."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        output = func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if any(leaf.dtype is torch.float32 for leaf in leaves):
            count = flop_registry.get(getattr(func, "_overloadpacket", None))
            if count is None:
                self.total += sum(math.prod(leaf.shape) for leaf in leaves)
            else:
                self.total += count(*args, **kwargs, out_val=output)
        return output
