"""`InfClamp`: keeps an fp16 overflow in a residual stream from becoming NaN in the next norm."""

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
from lightning_mp.precision._choice.module_selection import as_written, find_modules
from lightning_mp.precision._choice.residual_stream import find_residual_stream

__all__ = ["InfClamp"]

_MAX = torch.finfo(torch.float16).max


@explains_arguments(checks={"value": "(0, 65504]"})
class InfClamp:
    r"""Replaces +-inf in the fp16 tensors of chosen modules by a finite value, by forward hooks.

    An fp16 value above 65504 is inf, and the next norm makes NaN of its whole token. Each element
    is clamped by itself and counted; NaN passes, as do bf16 and fp32 tensors. Where nothing is
    clamped outputs keep every bit.

    .. math::
        y = \begin{cases} \mathrm{sign}(x) \cdot v & x = \pm\infty \\ x & \text{else}
        \end{cases} \qquad
        \frac{dy}{dx} = \begin{cases} 0 \text{ (or 1)} & x = \pm\infty \\ 1 & \text{else}
        \end{cases}

    Args:
        modules: Each one of `"auto"` (the residual stream of a transformer, found by names and
            structure), the dotted path of a module, the name of a class or of a base class (all its
            modules), or `"norm"` (all normalisation layers). A name stands for the outputs of the
            module itself, not for the modules inside it.
        gradient: What flows back through a clamped element: `"zero"` as in T5, or
            `"straight_through"`, the gradient unchanged, which may then grow from block to block.
        value: What takes the place of infinity, above 0 and up to 65504. 32752 is the largest
            whose double is finite: two clamped values can be added, dropout of 0.5 can scale one.

    Raises:
        ValueError: An argument is not of these.

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
        self._names: tuple[str, ...] = ()
        self._counters: list[_Counter] = []
        self._handles: list[RemovableHandle] = []
        self._loaded: dict[str, int] = {}

    def attach(self, root: nn.Module) -> "InfClamp":
        """Put the hooks on a model, and take them off the one before; counts start at zero.

        Args:
            root: The model; names start below it.

        Raises:
            ValueError: The model has no module of a name; the message lists names that are near.
        """
        named = {m for name in self.modules if name != "auto" for m in find_modules(root, name)}
        stream = find_residual_stream(root if "auto" in self.modules else nn.Identity())
        returning = {*stream.droppers, *stream.blocks} | stream.writers.keys()
        # Not before: a name that stands for nothing leaves the hooks where they are.
        self.remove()
        chosen = named | returning | stream.norms
        clamped = [(path, module) for path, module in root.named_modules() if module in chosen]
        self._names = tuple(as_written(path) for path, _ in clamped)
        device = _device_of(root)
        self._counters = [_Counter(self._loaded.get(name, 0), device) for name in self._names]
        self._loaded = {}
        for (_, module), counter in zip(clamped, self._counters, strict=True):
            clamp = _Clamp(counter, self.gradient, self.value)
            if module in stream.norms:
                hook = module.register_forward_pre_hook(clamp.clamp_inputs, with_kwargs=True)
                self._handles.append(hook)
            if module in named or module in returning:
                # Of a module that the user names all outputs are meant; of one that was found, the
                # first.
                dropout = stream.writers.get(module, 0.0)
                clamp = dataclasses.replace(clamp, dropout=dropout, first_only=module not in named)
                self._handles.append(module.register_forward_hook(clamp.clamp_outputs))
        return self

    def remove(self) -> None:
        """Take the hooks off the model; names and counts stay until the next `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted paths of the clamped modules, in the order of `root.named_modules()`."""
        return self._names

    def counts(self) -> Tensor:
        """Return how many elements were clamped in each module since `attach` or `reset_counts`.

        In the order of `names`: int64 [modules], on the device of the model, without a host sync.
        """
        if not self._counters:
            return torch.zeros(0, dtype=torch.int64)
        device = self._counters[0].value.device
        return torch.stack([counter.value.to(device) for counter in self._counters])

    def counted(self) -> dict[str, int]:
        """Return the counts by name; costs one host sync."""
        return dict(zip(self._names, self.counts().tolist(), strict=True))

    def reset_counts(self) -> None:
        """Start counting at zero."""
        for counter in self._counters:
            counter.value.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts by name; costs one host sync."""
        return {"counts": self.counted()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the counts of another run, now or after `attach`, of modules clamped here."""
        self._loaded = {} if self._names else dict(state_dict["counts"])
        for name, counter in zip(self._names, self._counters, strict=True):
            counter.value.fill_(state_dict["counts"].get(name, 0))


class _Counter:
    """A number on the device where it is counted."""

    # Not an index into a common tensor: `torch.compile` would build a graph for each block.
    def __init__(self, start: int, device: torch.device) -> None:
        self.value = torch.tensor(start, dtype=torch.int64, device=device)

    def add(self, is_over: Tensor) -> None:
        if self.value.device != is_over.device:
            # A tensor made in inference mode could not be changed by the training that follows.
            with torch.inference_mode(False):
                self.value = self.value.to(is_over.device)
        self.value.add_(is_over.sum(dtype=torch.int64))


@dataclasses.dataclass(eq=False)
class _Clamp:
    """Clamps and counts what a module is given, or what it returns."""

    counter: _Counter | None
    gradient: str
    value: float
    dropout: float = 0.0  # the probability of a functional one that follows
    # Of several outputs: the others may be masks, whose -inf means what it says.
    first_only: bool = False

    def __post_init__(self) -> None:
        self.top = _top_before(self.dropout)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Clamp":
        # Averages and teachers would count the same elements once more.
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
        values = tensor.detach()  # or autograd would keep them for the backward of `abs`
        is_over = values.abs() > top  # False for NaN
        if self.counter is not None and not _is_repeated():
            self.counter.add(is_over)
        # What takes the place of inf must survive the dropout that follows, too.
        limited = values.clamp(-min(self.value, top), min(self.value, top))
        if self.gradient == "straight_through":
            replaced: Tensor = _StraightThrough.apply(tensor, is_over, limited)
            return replaced
        # Its backward selects as well: a product with a mask makes NaN of infinite gradients.
        return torch.where(is_over, limited, tensor)


class _StraightThrough(torch.autograd.Function):
    """y = `limited` where x is over the top, else x; the gradient passes unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, is_over: Tensor, limited: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(is_over, limited, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None, None


def _top_before(dropout: float) -> float:
    """Return the largest fp16 value that dropout does not make infinite."""
    factor = 1 / (1 - dropout)
    factor = max(factor, float(torch.tensor(factor, dtype=torch.float16)))  # the CPU rounds it
    steps = 2.0 ** (math.floor(math.log2(_MAX / factor)) - 10)  # fp16 has 11 bits
    return math.floor(_MAX / factor / steps) * steps


def _is_repeated() -> bool:
    """Tell whether a backward is running, which repeats forwards that were counted before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _device_of(root: nn.Module) -> torch.device:
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    # Counts of a model that is not materialized follow it to its device later.
    return torch.device("cpu") if device.type == "meta" else device
