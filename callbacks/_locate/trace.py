"""Records inputs, outputs and gradients of every module in a replayed step, in order."""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_mp._nested import open_container
from lightning_mp.callbacks._step.batches import named_tensors
from lightning_mp.numerics.floats import VALUE_DTYPES
from lightning_mp.numerics.tensor_stats import (
    StatField,
    count_non_finite,
    local_shard,
    stored_values,
    tensor_stats,
)
from lightning_mp.numerics.transforms import differentiable, outside_transforms, unwrapped
from lightning_mp.precision._choice.module_selection import as_written

__all__ = ["TracedCall", "Seen", "Trace"]

Role = Literal["input", "output", "grad_output", "grad_input"]


@dataclass(eq=False)
class Seen:
    """Statistics of one tensor at one moment; filled in at the end of the step."""

    path: str  # position in the arguments, such as `[0]["hidden"]`, or dotted name
    dtype: torch.dtype
    amax: float = 0.0  # the largest finite magnitude
    nan: int = 0  # number of NaN values
    inf: int = 0  # number of +inf and -inf values
    positive: int = 0  # number of +inf values

    @property
    def is_finite(self) -> bool:
        return not self.nan and not self.inf

    @property
    def is_masked(self) -> bool:
        """Whether -inf is the only non-finite value, as in masked logits."""
        return self.inf > 0 and not self.nan and not self.positive

    @property
    def is_mask(self) -> bool:
        """Whether the tensor contains only 0 and -inf, like an attention mask."""
        return self.is_masked and self.amax == 0

    @property
    def kind(self) -> str:
        if self.nan and self.inf:
            return "NaN and inf"
        return "NaN" if self.nan else "inf"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def limit(self) -> float:
        return torch.finfo(self.dtype).max


@dataclass(eq=False)
class TracedCall:
    """One call of a module, and the tensors that were seen in it."""

    name: str  # dotted; `""` for the root
    module: nn.Module
    # Times on the clock of the trace, which starts at 1; 0 if the event has not occurred.
    ended: int = 0  # end of the forward
    reached: int = 0  # first gradient of an output
    left: int = 0  # first gradient of an input
    seen: dict[Role, list[Seen]] = field(default_factory=lambda: defaultdict(list))

    @property
    def inside(self) -> str:
        """The prefix of the names of submodules and their tensors."""
        return f"{self.name}." if self.name else ""

    def own(self, named: Iterable[Seen]) -> list[Seen]:
        """Return the tensors of the module itself, without those of its submodules."""
        return [s for s in named if s.path.rpartition(".")[0] == self.name]


class Trace:
    """Hooks on all modules of a model that record statistics of tensors, for one step."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.calls: list[TracedCall] = []
        # Submodules end before the module that contains them, so the innermost module comes first.
        self.ended: list[TracedCall] = []
        self.groups: dict[str, list[Seen]] = defaultdict(list)  # tensors that belong to no call
        self._seen: list[Seen] = []
        self._rows: list[Tensor] = []  # statistics of `_seen`, on the device
        self._clock = itertools.count(1)
        self._open: dict[nn.Module, list[TracedCall]] = defaultdict(list)

    def start(self, hooks: ExitStack) -> None:
        """Register the hooks, which the stack removes."""
        for path, module in self.root.named_modules():
            packages = {cls.__module__.split(".")[0] for cls in type(module).__mro__}
            is_metric = "torchmetrics" in packages  # not part of the loss
            if not isinstance(module, torch.jit.ScriptModule) and not is_metric:
                before = partial(self._before, as_written(path))
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._after))

    def note(self, group: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Record tensors that belong to no call, such as `"batch"` or `"parameters"`."""
        self.groups[group] += self._take((as_written(name), each) for name, each in tensors)

    def _before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = TracedCall(name, module)
        self.calls.append(call)
        self._open[module].append(call)
        # A tensor that is the input of two modules has the sum of two gradients. A view for each
        # module separates them.
        if torch.is_grad_enabled():
            views: dict[int, Tensor] = {}
            args = _views(args, views)
            kwargs = {key: _views(each, views) for key, each in kwargs.items()}
        inputs = [*named_tensors(args), *named_tensors(kwargs)]
        call.seen["input"] = self._take(inputs)
        for path, tensor in inputs:
            self._catch(call, "grad_input", path, tensor)
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._open[module].pop()  # the latest, because a module may call itself
        outputs = list(named_tensors(output))
        call.seen["output"] = self._take(outputs)
        call.ended = next(self._clock)
        self.ended.append(call)
        for path, tensor in outputs:
            self._catch(call, "grad_output", path, tensor)

    def _catch(self, call: TracedCall, role: Role, path: str, tensor: Tensor) -> None:
        """Record the gradient of a tensor when it is computed."""
        # Hooks of modules would miss tensors in dicts.
        trained = differentiable(tensor) if torch.is_grad_enabled() else None
        if trained is None:
            return

        def hook(gradient: Tensor) -> None:
            call.seen[role] += self._take([(path, gradient)])
            if role == "grad_output":
                call.reached = call.reached or next(self._clock)
            else:
                call.left = call.left or next(self._clock)

        trained.register_hook(hook)

    @outside_transforms()
    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Seen]:
        kept = [
            (name, unwrapped(each).detach())
            for name, each in tensors
            if each.dtype in VALUE_DTYPES and not each.is_meta
        ]
        if not kept:
            return []
        # Only the local shard, because gathering would need all ranks and more memory.
        values = [local_shard(t) for _, t in kept]
        amax = tensor_stats(values)[:, StatField.AMAX].float()
        counts = count_non_finite(values).to(amax)
        positive = torch.stack([torch.isposinf(stored_values(v)).sum().to(amax) for v in values])
        # Read at the end of the step, so that the host waits only once.
        self._rows.append(torch.column_stack([amax, counts, positive]))
        seen = [Seen(name, t.dtype) for name, t in kept]
        self._seen += seen
        return seen

    def read(self) -> None:
        """Copy all statistics to the host, at the end of the step."""
        if self._rows:
            device = self._rows[-1].device
            rows = torch.cat([row.to(device) for row in self._rows]).tolist()
            for seen, (amax, *counts) in zip(self._seen, rows, strict=True):
                seen.amax, (seen.nan, seen.inf, seen.positive) = amax, map(int, counts)

    def title(self, call: TracedCall) -> str:
        if not call.name:
            return f"The root `{type(self.root).__name__}` itself"
        return f"`{call.name}` ({type(call.module).__name__})"


def _views(value: Any, views: dict[int, Tensor]) -> Any:
    """Replace the input tensors of a module by views; the same view for the same tensor."""
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not (value.requires_grad and is_plain):
            return value
        if id(value) not in views:
            views[id(value)] = value.view_as(value)
        return views[id(value)]
    # Lists and dicts are kept, because the module may modify them.
    if isinstance(value, tuple):
        opened = open_container(value)
        assert opened is not None
        return opened.close([_views(item, views) for item in opened.items])
    return value
