"""`InfClamp`: clamps fp16 overflows in a residual stream before the next norm makes them NaN."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mp._arguments import explains_arguments
from lightning_mp._nested import map_tensors, map_values, open_container
from lightning_mp.numerics.transforms import outside_transforms, unwrapped
from lightning_mp.precision._choice.module_selection import as_written, find_modules
from lightning_mp.precision._choice.residual_stream import find_residual_stream

__all__ = ["InfClamp"]

_MAX = torch.finfo(torch.float16).max


@explains_arguments(checks={"value": "(0, 65504]"})
class InfClamp:
    r"""Replaces +-inf in fp16 outputs of selected modules by a finite value, with forward hooks.

    An fp16 value above 65504 is inf, and the next norm turns its whole token into NaN. Elements are
    clamped and counted individually. NaN, bf16 tensors and fp32 tensors pass unchanged, and outputs
    without inf keep every bit.

    .. math::
        y = \begin{cases} \mathrm{sign}(x) \cdot v & x = \pm\infty \\ x & \text{else}
        \end{cases} \qquad
        \frac{dy}{dx} = \begin{cases} 0 \text{ (or 1)} & x = \pm\infty \\ 1 & \text{else}
        \end{cases}

    Args:
        modules: Each entry is `"auto"` (the residual stream of a transformer, found by names and
            structure), the dotted path of a module, the name of a class or base class (all its
            modules), or `"norm"` (all normalization layers). The outputs of the module itself are
            clamped, not those of its submodules.
        gradient: Gradient of a clamped element: `"zero"` as in T5, or `"straight_through"`, which
            passes the gradient unchanged and may let it grow from block to block.
        value: Finite replacement for infinity, above 0 and at most 65504. The default, 32752, is
            the largest value whose double is finite, for a sum of two clamped values or a
            dropout of 0.5.

    Raises:
        ValueError: An argument is invalid.

    References:
        transformers#9295, #9487 (T5's clamp), #20287 (`wo` in fp32).

    Example: `InfClamp().attach(model)`
    """

    def __init__(
        self,
        modules: Sequence[str] = ("auto",),
        *,
        gradient: Literal["zero", "straight_through"] = "zero",
        value: float = _MAX / 2,
    ) -> None:
        self.modules = tuple(modules)
        self.value = float(value)
        self.gradient = gradient
        self.names: tuple[str, ...] = ()
        """Dotted paths of the clamped modules, in the order of `root.named_modules()`."""
        self._counters: list[_Counter] = []
        self._handles: list[RemovableHandle] = []
        self._loaded: dict[str, int] = {}

    def attach(self, root: nn.Module) -> "InfClamp":
        """Register the hooks on a model, remove earlier hooks, and reset the counts.

        Dotted paths are relative to `root`; a name that the model lacks raises `ValueError`.
        """
        named = {m for name in self.modules if name != "auto" for m in find_modules(root, name)}
        stream = find_residual_stream(root if "auto" in self.modules else nn.Identity())
        returning = {*stream.droppers, *stream.blocks} | stream.writers.keys()
        # After the search, so that an unknown name leaves the existing hooks in place.
        self.remove()
        chosen = named | returning | stream.norms
        clamped = [(path, module) for path, module in root.named_modules() if module in chosen]
        self.names = tuple(as_written(path) for path, _ in clamped)
        device = _device_of(root)
        self._counters = [_Counter(self._loaded.get(name, 0), device) for name in self.names]
        self._loaded = {}
        for (_, module), counter in zip(clamped, self._counters, strict=True):
            clamp = _Clamp(counter, self.gradient, self.value)
            if module in stream.norms:
                hook = module.register_forward_pre_hook(clamp.clamp_inputs, with_kwargs=True)
                self._handles.append(hook)
            if module in named or module in returning:
                # Clamp all outputs of a module that the user named, the first output of a module
                # that was found automatically.
                dropout = stream.writers.get(module, 0.0)
                clamp = dataclasses.replace(clamp, dropout=dropout, first_only=module not in named)
                self._handles.append(module.register_forward_hook(clamp.clamp_outputs))
        return self

    def remove(self) -> None:
        """Remove the hooks; names and counts are kept until the next `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def counts(self) -> Tensor:
        """Return the number of clamped elements per module since `attach` or `reset_counts`.

        An int64 tensor in the order of `names`, on the device of the model, without a host sync.
        """
        if not self._counters:
            return torch.zeros(0, dtype=torch.int64)
        # A counter that has not counted is still on the device that the model had in `attach`.
        devices = [counter.value.device for counter in self._counters]
        device = next((each for each in devices if each.type != "cpu"), devices[0])
        values = [counter.value.to(device, non_blocking=True) for counter in self._counters]
        return torch.stack(values)

    def counted(self) -> dict[str, int]:
        """Return the counts by name; takes one host sync."""
        return dict(zip(self.names, self.counts().tolist(), strict=True))

    def reset_counts(self) -> None:
        """Reset all counts to zero."""
        for counter in self._counters:
            counter.value.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts by name; takes one host sync."""
        return {"counts": self.counted()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counts of modules clamped here, now or at the next `attach`."""
        self._loaded = {} if self.names else dict(state_dict["counts"])
        for name, counter in zip(self.names, self._counters, strict=True):
            counter.value.fill_(state_dict["counts"].get(name, 0))


class _Counter:
    """A count on the device of the counted tensors."""

    # A separate tensor per module: with an index, `torch.compile` would build a graph per block.
    def __init__(self, start: int, device: torch.device) -> None:
        self.value = torch.tensor(start, dtype=torch.int64, device=device)

    def count(self, is_over: Tensor) -> None:
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            self._add(is_over)
        else:
            with outside_transforms():
                self._add(unwrapped(is_over))

    def _add(self, is_over: Tensor) -> None:
        if self.value.device != is_over.device:
            # A tensor created in inference mode could not be modified in later training.
            with torch.inference_mode(False):
                self.value = self.value.to(is_over.device)
        self.value.add_(is_over.sum(dtype=torch.int64))


@dataclasses.dataclass(eq=False)
class _Clamp:
    """Hooks that clamp and count the inputs or outputs of a module."""

    counter: _Counter | None
    gradient: str
    value: float
    dropout: float = 0.0  # probability of a functional dropout that follows
    # Clamp only the first of several outputs; the others may be masks with intended -inf.
    first_only: bool = False

    def __post_init__(self) -> None:
        self.top = _top_before(self.dropout)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Clamp":
        # Copies of the model, such as weight averages and teachers, must not count twice.
        return dataclasses.replace(self, counter=None)

    def clamp_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        clamp = functools.partial(self, is_training=module.training)
        return map_tensors(args, clamp), map_tensors(kwargs, clamp)

    def clamp_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        clamp = functools.partial(self, is_training=module.training)
        if self.first_only and isinstance(output, (tuple, list)) and output:
            _, (first, *others), close, _ = open_container(output)  # type: ignore[misc]
            return close([map_tensors(first, clamp), *others])
        return map_tensors(output, clamp)

    def __call__(self, tensor: Tensor, *, is_training: bool) -> Tensor:
        if tensor.dtype is not torch.float16:
            return tensor
        if tensor.is_nested:
            return map_values(tensor, functools.partial(self, is_training=is_training))
        if tensor.layout is not torch.strided:
            return tensor
        top = self.top if is_training else _MAX
        values = tensor.detach()  # otherwise autograd would save them for the backward of `abs`
        is_over = values.abs() > top  # False for NaN
        if self.counter is not None and not _is_repeated():
            self.counter.count(is_over)
        # The replacement must stay finite in the dropout that follows.
        limited = values.clamp(-min(self.value, top), min(self.value, top))
        if self.gradient == "straight_through":
            replaced: Tensor = _StraightThrough.apply(tensor, is_over, limited)
            return replaced
        # `where` also selects in the backward; a product with a mask would turn inf into NaN.
        return torch.where(is_over, limited, tensor)


class _StraightThrough(torch.autograd.Function):
    """y = `limited` where x exceeds the limit, else x; the gradient passes unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, is_over: Tensor, limited: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(is_over, limited, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing for the backward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None, None


def _top_before(dropout: float) -> float:
    """Return the largest fp16 value that stays finite after dropout."""
    factor = 1 / (1 - dropout)
    factor = max(factor, float(torch.tensor(factor, dtype=torch.float16)))  # the CPU rounds it
    steps = 2.0 ** (math.floor(math.log2(_MAX / factor)) - 10)  # fp16 has 11 bits
    return math.floor(_MAX / factor / steps) * steps


def _is_repeated() -> bool:
    """Whether a backward is running, in which repeated forwards have been counted before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _device_of(root: nn.Module) -> torch.device:
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    # Counts of a model on the meta device move to its device later.
    return torch.device("cpu") if device.type == "meta" else device
