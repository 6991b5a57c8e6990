"""What a replayed step shows: every module's inputs, outputs and gradients, in the order made."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mp.callbacks._step.batches import named_tensors
from lightning_mp.numerics.floats import FLOAT_DTYPES
from lightning_mp.numerics.shards import local_shard
from lightning_mp.numerics.stat_fields import StatField
from lightning_mp.numerics.tensor_stats import count_non_finite, stored_values, tensor_stats
from lightning_mp.precision._choice.module_selection import as_written

__all__ = ["Call", "Seen", "Trace"]

Role = Literal["input", "output", "grad_output", "grad_input"]


class Seen(NamedTuple):
    """One tensor as it was at one moment."""

    path: str  # in what was passed, such as `[0]["hidden"]`; or its dotted name
    dtype: torch.dtype
    amax: float  # the largest finite magnitude
    nan: int  # how many values are NaN,
    inf: int  # +inf or -inf,
    positive: int  # and +inf

    @property
    def is_finite(self) -> bool:
        """Whether all values are."""
        return not self.nan and not self.inf

    @property
    def is_masked(self) -> bool:
        """Whether nothing but -inf in it is not finite, as in masked logits."""
        return self.inf > 0 and not self.nan and not self.positive

    @property
    def is_mask(self) -> bool:
        """Whether it holds 0 and -inf only, as masks of attention do: nothing to worry about."""
        return self.is_masked and self.amax == 0

    @property
    def kind(self) -> str:
        """What is in it that is not finite."""
        if self.nan and self.inf:
            return "NaN and inf"
        return "NaN" if self.nan else "inf"

    @property
    def dtype_name(self) -> str:
        """Its dtype, such as `"float16"`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def limit(self) -> float:
        """The largest number of its dtype."""
        return torch.finfo(self.dtype).max


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a module; what was seen, by role, as indices of the trace's tensors."""

    name: str  # dotted; `""` for the root
    module: nn.Module
    ended: int = 0  # when the forward did, on the clock of the trace from 1; 0 where it did not
    reached: int = 0  # when the first gradient of an output came,
    left: int = 0  # and when one of an input did
    tensors: dict[Role, list[int]] = dataclasses.field(default_factory=lambda: defaultdict(list))


class Trace:
    """Hooks on all modules of a model that note statistics of tensors, for one step.

    Nothing is read until the step is over: statistics stay on the device, and the host waits once.
    Gradients are caught by hooks on tensors, as module hooks overlook those in dicts. A tensor that
    two modules take has one gradient, their sum; each module is therefore given a view of its own.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.calls: list[Call] = []
        self._named: list[tuple[str, torch.dtype]] = []
        self._rows: list[Tensor] = []
        self._read: list[Seen] = []
        self._clock = 0
        self._open: dict[nn.Module, list[Call]] = defaultdict(list)
        self._groups: dict[str, list[int]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Trace":
        """Put the hooks on."""
        for path, module in self.root.named_modules():
            if not isinstance(module, torch.jit.ScriptModule) and not _is_metric(module):
                before = functools.partial(self._before, as_written(path))
                self._handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(self._after),
                ]
        return self

    def __exit__(self, *_: object) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()

    # --- what is noted -----------------------------------------------------------------------

    def note(self, group: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Note tensors that belong to no call, such as `"batch"` or `"parameters"`."""
        self._groups[group] += self._take(tensors)

    def _before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = Call(name, module)
        self.calls.append(call)
        self._open[module].append(call)
        if torch.is_grad_enabled():
            views: dict[int, Tensor] = {}
            args = tuple(_views(each, views) for each in args)
            kwargs = {key: _views(each, views) for key, each in kwargs.items()}
        inputs = [*named_tensors(args), *named_tensors(kwargs)]
        call.tensors["input"] = self._take(iter(inputs))
        for path, tensor in inputs:
            self._catch(call, "grad_input", path, tensor)
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._open[module]
        if not calls:
            return
        call = calls.pop()
        outputs = list(named_tensors(output))
        call.tensors["output"] = self._take(iter(outputs))
        call.ended = self._tick()
        for path, tensor in outputs:
            self._catch(call, "grad_output", path, tensor)

    def _catch(self, call: Call, role: Role, path: str, tensor: Tensor) -> None:
        """Note the gradient of a tensor when there is one."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return

        def hook(gradient: Tensor) -> None:
            call.tensors[role] += self._take(iter([(path, gradient)]))
            now = self._tick()
            if role == "grad_output":
                call.reached = call.reached or now
            if role == "grad_input":
                call.left = call.left or now

        tensor.register_hook(hook)

    def _take(self, tensors: Iterator[tuple[str, Tensor]]) -> list[int]:
        kept = [(path, t.detach()) for path, t in tensors if t.dtype in FLOAT_DTYPES]
        kept = [(path, t) for path, t in kept if not t.is_meta]
        if not kept:
            return []
        values = [local_shard(t) for _, t in kept]
        amax = tensor_stats(values)[:, StatField.AMAX].float()
        counts = count_non_finite(values).to(amax)
        first = len(self._named)
        self._named += [(path, t.dtype) for path, t in kept]
        positive = torch.stack([torch.isposinf(stored_values(v)).sum().to(amax) for v in values])
        self._rows.append(torch.column_stack([amax, counts, positive]))
        return list(range(first, len(self._named)))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # --- what is read, when the step is over -----------------------------------------------------

    def read(self) -> None:
        """Bring everything to the host."""
        if self._rows:
            device = self._rows[-1].device
            rows = torch.cat([row.to(device) for row in self._rows]).tolist()
            self._read = [
                Seen(path, dtype, amax, *map(int, counts))
                for (path, dtype), (amax, *counts) in zip(self._named, rows, strict=True)
            ]

    def seen(self, call: Call, role: Role) -> list[Seen]:
        """Return what was seen of a call."""
        return [self._read[i] for i in call.tensors.get(role, ())]

    def title(self, call: Call) -> str:
        """Return how a module is called."""
        if not call.name:
            return f"the root `{type(self.root).__name__}` itself"
        return f"`{call.name}` ({type(call.module).__name__})"

    def group(self, group: str) -> list[Seen]:
        """Return what was noted under a name."""
        return [self._read[i] for i in self._groups.get(group, ())]


def _views(value: Any, views: dict[int, Tensor]) -> Any:
    """Give a module views of the tensors that it takes; the same view for the same tensor.

    Lists and dicts stay as they are, as a module may put something into them.
    """
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not (value.requires_grad and is_plain):
            return value
        if id(value) not in views:
            views[id(value)] = value.view_as(value)
        return views[id(value)]
    if isinstance(value, tuple):
        items = [_views(each, views) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _is_metric(module: nn.Module) -> bool:
    # Metrics are no part of the loss.
    return any(cls.__module__.split(".")[0] == "torchmetrics" for cls in type(module).__mro__)
