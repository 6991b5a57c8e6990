"""Measures the bytes that a model's towers save for the backward of one pair.

`FakeTensorMode` runs a model on tensors without memory and selects the operators of a real device.
Unlike operators of the meta device, fused attention then saves no matrix of tokens by tokens. A
ViT-L takes a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp._nested import tensors_in
from lightning_mp.gradient_cache._served.towers import Tower
from lightning_mp.plan.subject import StaticBytes, TowerBytes

__all__ = ["blank", "computing_in", "measure_towers"]

_SIZES = 2, 6  # pairs of the two steps that are measured


def computing_in(precision: StaticBytes) -> AbstractContextManager[None]:
    """Return the context in which modules compute in the dtypes of a precision."""
    from lightning_mp.precision.op_policy import OpPolicy

    if precision.policy == "autocast":
        return OpPolicy().context("cpu", precision.activations)
    if precision.policy == "weights":
        return _DtypeContextManager(precision.activations)
    return nullcontext()


def blank(model: nn.Module) -> None:
    """Replace parameters and buffers by empty tensors, without memory inside `FakeTensorMode`."""
    blanks: dict[Tensor, Any] = {}  # weights that modules share stay shared
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if tensor not in blanks:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    blanks[tensor] = (
                        nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                    )
                tensors[name] = blanks[tensor]


@dataclass
class _Counts:
    """Totals over the calls of one tower in one step."""

    saved: dict[int, Any] = field(default_factory=dict)  # storages that autograd saved, by key
    flops: int = 0
    backward_flops: int = 0
    parameters: int = 0
    width: int = 0

    @property
    def saved_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.saved.values())


class _SavedStorages:
    """Attributes the storages that autograd saves to the running tower, each storage once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owned = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self.of: dict[str, _Counts] = defaultdict(_Counts)  # by name of the tower
        self._running: list[str] = []

    def call(
        self, tower: Tower, original: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a call of a tower and count its FLOPs, parameters and feature width."""
        counts = self.of[tower.name]
        self._running.append(tower.name)
        try:
            with FlopCounterMode(display=False) as flops:
                outputs = original(*args, **kwargs)
        finally:
            self._running.pop()
        counts.flops += flops.get_total_flops()
        tensors = tensors_in(outputs)
        # Models of transformers also return tokens.
        features = next((leaf for leaf in tensors if leaf.ndim == 2), tensors[0])
        counts.width = features.shape[-1]
        if features.requires_grad:
            self._model.zero_grad(set_to_none=True)
            with FlopCounterMode(display=False) as flops:
                # A step with manual optimization runs its own backward later.
                features.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
            counts.backward_flops += flops.get_total_flops()
            reached = [p for p in self._model.parameters() if p.grad is not None]
            counts.parameters = sum(p.numel() for p in reached)
        return outputs

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a saved tensor."""
        if self._running and _storage(tensor) not in self._owned:
            # Kept alive, so that its key stays unique. Nested towers count for the outermost one.
            self.of[self._running[0]].saved[_storage(tensor)] = tensor.untyped_storage()
        return tensor


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def measure_towers(
    model: nn.Module, towers: Sequence[Tower], step: Callable[[int], Any], precision: StaticBytes
) -> dict[str, TowerBytes]:
    """Run a step at two sizes, and return the difference per pair for each tower.

    Raises:
        ValueError: The step did not call a tower.
    """
    # The difference excludes bytes that do not depend on the size, such as half weights.
    counters = []
    for size in _SIZES:
        counter = _SavedStorages(model)
        with ExitStack() as stack:
            stack.enter_context(computing_in(precision))
            for tower in towers:
                stack.enter_context(tower.intercepted(counter.call))
            hooks = torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda saved: saved)
            stack.enter_context(hooks)
            try:
                step(size)
            except RuntimeError:
                # The loss may read values, which fake tensors lack, but the towers have run.
                if not all(counter.of[tower.name].width for tower in towers):
                    raise
        counters.append(counter)
    silent = [tower.name for tower in towers if not counters[0].of[tower.name].width]
    if silent:
        raise ValueError(
            f"Passed towers {[tower.name for tower in towers]!r}, but the training step did not "
            f"call {silent!r}. Name the towers that it calls, as for `InfCLStrategy`."
        )
    few, many = (counter.of for counter in counters)
    return {tower.name: _slope(few[tower.name], many[tower.name]) for tower in towers}


def _slope(few: _Counts, many: _Counts) -> TowerBytes:
    pairs = _SIZES[1] - _SIZES[0]
    return TowerBytes(
        saved_per_pair=(many.saved_bytes - few.saved_bytes) / pairs,
        flops_per_pair=(many.flops - few.flops) / pairs,
        parameters=few.parameters,
        width=few.width,
        backward_flops_per_pair=(many.backward_flops - few.backward_flops) / pairs,
    )
