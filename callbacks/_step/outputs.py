"""Statistics of what modules return, and of what functions in them compute, in a sampled step."""

from collections import Counter
from collections.abc import Iterator, Mapping
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

__all__ = ["OutputKey", "OutputSampler", "blocks_in", "eager_modules"]


class OutputKey(NamedTuple):
    """What one row of a sample is about."""

    name: str  # the module's, dotted
    kind: str  # such as `"activation"`, `"output_gradient"`, `"norm_input"`, `"attention_logit"`
    dtype: torch.dtype


@dataclass(eq=False)
class OutputSampler:
    """Gathers statistics of modules over one training step: one row for all calls of a module."""

    modules: Mapping[str, nn.Module]  # by dotted name
    backward: bool  # whether to look at gradients with respect to outputs as well
    max_calls: int  # of a module to look at, the first ones
    # Whose input is looked at: `x + f(x)` is the output of none, but of many a norm the input.
    norms: Mapping[str, nn.Module] = field(default_factory=dict)
    callers: Mapping[str, nn.Module] = field(default_factory=dict)  # that may call attention
    _calls: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    _hooks: ExitStack = field(default_factory=ExitStack, init=False)
    _rows: dict[OutputKey, list[Tensor]] = field(default_factory=dict, init=False)
    is_running: bool = field(default=False, init=False)  # whether hooks are in place

    def start(self) -> None:
        """Put hooks in place; those of another micro-batch go on."""
        self.pause()
        self.is_running = bool(self.modules or self.norms)
        for name, module in self.modules.items():
            hook = module.register_forward_hook(partial(self._look, name))
            self._hooks.enter_context(hook)
        for name, module in self.norms.items():  # before a precision plugin casts what comes in
            look = partial(self._look_ahead, name)
            self._hooks.enter_context(module.register_forward_pre_hook(look, prepend=True))
        if self.callers and self.is_running:
            self._hooks.enter_context(FunctionMode(self.callers, self._look_at_function))

    def pause(self) -> None:
        self._hooks.close()
        self.is_running = False

    def stop(self) -> tuple[list[OutputKey], Tensor] | None:
        """Remove the hooks, and return the rows, packed as by `pack_stats`; `None` without any."""
        self.pause()
        self._calls.clear()
        rows, self._rows = self._rows, {}
        if not rows:
            return None
        return list(rows), torch.stack([merge_rows(torch.cat(each)) for each in rows.values()])

    def _look(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in self._add(name, "activation", output):
            if self.backward and tensor.requires_grad:
                tensor.register_hook(partial(self._look_back, name))

    def _look_back(self, name: str, gradient: Tensor) -> None:
        self._add(name, "output_gradient", gradient)

    def _look_ahead(self, name: str, _: nn.Module, inputs: Any) -> None:
        self._add(name, "norm_input", inputs[:1])

    def _look_at_function(self, name: str, found: Mapping[str, Tensor]) -> None:
        for kind, value in found.items():
            if kind == "expert":
                self._add_experts(name, value)
            else:
                self._add(name, kind, value)

    def _add_experts(self, name: str, counts_2E: Tensor) -> None:
        """Take in a router's choices and tokens: a row for each expert, which further calls add to.

        Choices stand in the column of a sum, tokens in the last one, as the sizes of tensors do.
        """
        wide = state_dtype(counts_2E.device)
        rows_EK = counts_2E.new_zeros(counts_2E.shape[1], len(StatField) + 1, dtype=wide)
        rows_EK[:, StatField.SUM_OF_SQUARES], rows_EK[:, -1] = counts_2E.to(wide)
        for index, row_1K in enumerate(rows_EK.split(1)):
            self._rows.setdefault(OutputKey(f"{name}[{index}]", "expert", wide), []).append(row_1K)

    def _add(self, name: str, kind: str, value: Any) -> list[Tensor]:
        """Take in the tensors of a call, and return them; nothing of calls that are too many."""
        tensors = [t for t in tensors_in(value) if t.dtype in VALUE_DTYPES and t.numel()]
        if kind != "output_gradient":  # which only calls that were looked at have
            self._calls[name, kind] += bool(tensors)
        # After the step that was sampled there may be another backward, of a graph that was kept.
        if not self.is_running or self._calls[name, kind] > self.max_calls:
            return []
        # Without the mode, which would be called by each of some 200 functions in here.
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                row = pack_stats([tensor.detach()])
                self._rows.setdefault(OutputKey(name, kind, tensor.dtype.to_real()), []).append(row)
        return tensors


def eager_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose hooks run outside of compiled code, under their dotted names."""
    # `torch.compile` would trace the hooks of the others. A wrapper that it makes runs eagerly;
    # nothing does of a module compiled in place, or whose `training_step` is compiled.
    is_whole = getattr(root, "_compiler_ctx", None) is not None  # set by Lightning
    if is_whole or root._compiled_call_impl is not None:
        return
    yield path.rstrip("."), root
    if not hasattr(root, "_orig_mod"):
        for name, child in root.named_children():
            yield from eager_modules(child, f"{path}{name}.")


def blocks_in(root: nn.Module) -> Iterator[nn.Module]:
    """Yield modules of several parts that stand in a list with others of their class."""
    for module in root.modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            members = list(module.children())
            count = Counter(type(member) for member in members)
            yield from (m for m in members if count[type(m)] > 1 and any(m.children()))
