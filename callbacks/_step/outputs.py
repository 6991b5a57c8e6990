"""Statistics of the outputs of modules, and of functions that they call, in a sampled step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_mp.callbacks._step.batches import tensors_in
from lightning_mp.callbacks._step.functions import FunctionMode
from lightning_mp.callbacks._step.sampling import merge_rows, pack_stats
from lightning_mp.numerics.floats import VALUE_DTYPES, state_dtype
from lightning_mp.numerics.tensor_stats import StatField
from lightning_mp.numerics.transforms import differentiable, outside_transforms, unwrapped

__all__ = ["OutputKey", "OutputSampler", "blocks_in", "eager_modules", "is_repetition"]

_TOGETHER = 2**18  # values that are measured together, so that few copies are held


class OutputKey(NamedTuple):
    """Key of one row of a sample."""

    name: str  # dotted name of the module
    kind: str  # for example "activation", "output_gradient", "norm_input", "attention_logit"
    dtype: torch.dtype


@dataclass(eq=False)
class OutputSampler:
    """Measures modules during one training step: one row for all calls of a module."""

    modules: Mapping[str, nn.Module]  # modules whose output is measured, by dotted name
    backward: bool  # whether to measure gradients with respect to outputs as well
    max_calls: int  # number of calls of a module that are measured, from the first
    # Modules whose input is measured. The residual stream `x + f(x)` is the output of no module,
    # but it is the input of many norms.
    norms: Mapping[str, nn.Module] = field(default_factory=dict)
    # Modules that may call attention.
    callers: Mapping[str, nn.Module] = field(default_factory=dict)
    _is_started: bool = field(default=False, init=False)  # since the last `take`
    _calls: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    _hooks: ExitStack = field(default_factory=ExitStack, init=False)  # the recorder's hooks
    _rows: dict[OutputKey, list[Tensor]] = field(default_factory=dict, init=False)
    _waiting: list[tuple[OutputKey, Tensor]] = field(default_factory=list, init=False)
    _size: int = field(default=0, init=False)  # number of values that wait

    def start(self, hooks: ExitStack) -> None:
        """Register the hooks; rows of earlier batches of the step are kept."""
        self._hooks, self._is_started = hooks, True
        for name, module in self.modules.items():
            hook = module.register_forward_hook(partial(self._add_output, name))
            hooks.enter_context(hook)
        for name, module in self.norms.items():  # before a precision plugin casts the input
            receive = partial(self._add_norm_input, name)
            hooks.enter_context(module.register_forward_pre_hook(receive, prepend=True))
        if self.callers and (self.modules or self.norms):
            hooks.enter_context(FunctionMode(self.callers, self._add_function))

    def take(self, state: Iterable[tuple[str, str, Tensor]] = ()) -> dict[OutputKey, Tensor] | None:
        """Return the rows of `pack_stats` since `start`; `None` if it was not called.

        If there are rows, the tensors of `state`, with their names and kinds, are measured too.
        """
        is_started, self._is_started = self._is_started, False
        if not is_started:
            return None
        for name, kind, tensor in state if self._rows or self._waiting else ():
            self._add(name, kind, tensor)
        self._calls.clear()
        self._measure()
        rows, self._rows = self._rows, {}
        return {key: merge_rows(torch.stack(each)) for key, each in rows.items()}

    # A compiled function traces the hooks of the modules that it calls, and would compile them.

    def _add_output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # A backward may repeat a call, of which only the repetition may have a graph.
        for tensor in self._add(name, "repetition" if is_repetition() else "activation", output):
            trained = differentiable(tensor) if self.backward else None
            if trained is not None:
                hook = trained.register_hook(partial(self._add_gradient, name))
                self._hooks.enter_context(hook)

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        self._add(name, "output_gradient", gradient)

    def _add_norm_input(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling() and not is_repetition():
            self._add(name, "norm_input", args[:1])

    def _add_function(self, name: str, values: Mapping[str, Tensor]) -> None:
        for kind, value in () if is_repetition() else values.items():
            if kind == "expert":
                self._add_experts(name, value)
            else:
                self._add(name, kind, value)

    def _add_experts(self, name: str, counts_2E: Tensor) -> None:
        """Add a row for each expert of a router; rows of further calls are added to it.

        The number of times that the expert was chosen is stored as a sum of squares, the number
        of tokens as the number of values.
        """
        wide = state_dtype(counts_2E.device)
        rows_EK = counts_2E.new_zeros(counts_2E.shape[1], len(StatField) + 1, dtype=wide)
        rows_EK[:, StatField.SUM_OF_SQUARES], rows_EK[:, -1] = counts_2E.to(wide)
        for index, row_K in enumerate(rows_EK):
            self._rows.setdefault(OutputKey(f"{name}[{index}]", "expert", wide), []).append(row_K)

    def _add(self, name: str, kind: str, value: Any) -> list[Tensor]:
        """Add the tensors of a call and return them; return nothing after `max_calls` calls."""
        tensors = [t for t in tensors_in(value) if t.dtype in VALUE_DTYPES and t.numel()]
        if kind != "output_gradient":  # only measured calls have gradient hooks
            self._calls[name, kind] += bool(tensors)
        if self._calls[name, kind] > self.max_calls:
            return []
        if kind == "repetition":
            return tensors
        # `pack_stats` calls about 200 functions; none of them must reach the mode.
        with torch._C.DisableTorchFunction(), outside_transforms():
            for tensor in (unwrapped(each).detach() for each in tensors):
                self._size += tensor.numel()
                # A tensor that waits is copied, because the model may change it in place.
                held = tensor.clone() if self._size < _TOGETHER else tensor
                self._waiting.append((OutputKey(name, kind, tensor.dtype.to_real()), held))
                if self._size >= _TOGETHER:
                    self._measure()
        return tensors

    def _measure(self) -> None:
        """Measure the tensors that wait, together, because each call costs the host 0.1 ms."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        rows_NK = pack_stats([tensor for _, tensor in waiting]) if waiting else ()
        for (key, _), row_K in zip(waiting, rows_NK, strict=True):
            self._rows.setdefault(key, []).append(row_K)


def is_repetition() -> bool:
    """Return whether a backward is running, which repeats a forward, as checkpointing does."""
    return torch._C._current_graph_task_id() != -1


def eager_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose hooks run outside compiled code, under their dotted names."""
    # `torch.compile` would trace hooks of compiled modules. `OptimizedModule` itself runs eagerly;
    # a module that is compiled in place, or whose `training_step` is compiled, does not.
    is_whole = getattr(root, "_compiler_ctx", None) is not None  # set by Lightning
    is_script = isinstance(root, torch.jit.ScriptModule)  # accepts no hooks
    if is_whole or is_script or root._compiled_call_impl is not None:
        return
    yield path.rstrip("."), root
    if not hasattr(root, "_orig_mod"):
        for name, child in root.named_children():
            yield from eager_modules(child, f"{path}{name}.")


def blocks_in(root: nn.Module) -> Iterator[nn.Module]:
    """Yield modules with children that are in a container with other modules of their class."""
    for module in root.modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            members = list(module.children())
            count = Counter(type(member) for member in members)
            yield from (m for m in members if count[type(m)] > 1 and any(m.children()))
