"""What a model's towers keep for the backward of one pair, found without running them.

`FakeTensorMode` runs a model on tensors that have a shape, a dtype and the size of their storage
but no memory, as on the meta device, and picks the operators of a real device: fused attention
keeps no b x L x L matrix, which the meta device's own route would. A ViT-L takes a second. A model
that looks at its values cannot run so, and is run on a few real pairs.

Legend: ``n`` pairs of a call.
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
    """Compute as a precision does, with the same dtypes on every device."""
    from lightning_mp.precision.op_policy import OpPolicy

    dtype = getattr(torch, precision.activations)
    if precision.policy == "autocast":
        return OpPolicy().context("cpu", dtype)
    return _DtypeContextManager(dtype) if precision.policy == "weights" else nullcontext()


def blank(model: nn.Module) -> None:
    """Give a model's parameters and buffers no values; inside `FakeTensorMode`, no memory."""
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
    """What the calls of one tower in one step come to."""

    saved: dict[int, Any] = field(default_factory=dict)  # storages for the backward, by their keys
    flops: int = 0
    backward_flops: int = 0
    parameters: int = 0
    width: int = 0

    @property
    def saved_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.saved.values())


class _Counter:
    """Attributes what autograd saves to the tower that is running; each storage counts once."""

    def __init__(self, model: nn.Module) -> None:
        self._owned = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self.of: dict[str, _Counts] = defaultdict(_Counts)  # by the towers' names
        self._running: list[str] = []

    def call(
        self, tower: Tower, original: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Answer a call of a tower, and count."""
        counts = self.of[tower.name]
        self._running.append(tower.name)
        try:
            with FlopCounterMode(display=False) as flops:
                outputs = original(*args, **kwargs)
        finally:
            self._running.pop()
        counts.flops += flops.get_total_flops()
        tensors = tensors_in(outputs)
        # Models of transformers return tokens beside the features.
        features = next((leaf for leaf in tensors if leaf.ndim == 2), tensors[0])
        counts.width = features.shape[-1]
        counts.parameters = _trained_values(outputs)
        if features.requires_grad:
            with FlopCounterMode(display=False) as flops:
                # Retained, as a step that optimizes by hand runs a backward of its own.
                features.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
            counts.backward_flops += flops.get_total_flops()
        return outputs

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a saved tensor."""
        if self._running and _storage(tensor) not in self._owned:
            # Kept alive, or an address that was freed could count twice.
            # What a tower inside another saves is the outer one's.
            self.of[self._running[0]].saved[_storage(tensor)] = tensor.untyped_storage()
        return tensor


def _trained_values(outputs: Any) -> int:
    """Count the parameters that outputs depend on, for a method has none of its own."""
    reached = [tensor.grad_fn for tensor in tensors_in(outputs)]
    seen, values = set(reached), 0
    while reached:
        node = reached.pop()
        if node is None:
            continue
        values += node.variable.numel() if hasattr(node, "variable") else 0
        following = {next_node for next_node, _ in node.next_functions} - seen
        seen |= following
        reached.extend(following)
    return values


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def measure_towers(
    model: nn.Module,
    towers: Sequence[Tower],
    step: Callable[[int], Any],
    precision: StaticBytes,
) -> dict[str, TowerBytes]:
    """Run a step at two sizes and return each tower's slope.

    Raises:
        ValueError: A tower was not called.
    """
    # A slope, as what a call saves whatever its size, such as half weights, is not a pair's.
    counters = []
    for size in _SIZES:
        counter = _Counter(model)
        with ExitStack() as stack:
            stack.enter_context(computing_in(precision))
            for tower in towers:
                stack.enter_context(tower.intercepted(counter.call))
            hooks = torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda saved: saved)
            stack.enter_context(hooks)
            try:
                step(size)
            except RuntimeError:
                # A loss may look at its features; only what comes before it is to be measured.
                if not all(counter.of[tower.name].width for tower in towers):
                    raise
        counters.append(counter)
    silent = [tower.name for tower in towers if not counters[0].of[tower.name].width]
    if silent:
        raise ValueError(
            f"Passed towers {[tower.name for tower in towers]!r}, but the training step did not "
            f"call {silent!r}. Name what it calls, as for `InfCLStrategy`."
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
