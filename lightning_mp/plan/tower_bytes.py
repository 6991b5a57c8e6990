"""Measures the memory and the FLOPs of a model's towers for one pair.

`FakeTensorMode` runs a model on tensors without memory and selects the operators of a real device.
Unlike operators of the meta device, fused attention then saves no matrix of tokens by tokens. A
ViT-L takes a second.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_mp._nested import map_tensors, tensors_in
from lightning_mp.gradient_cache._served.towers import Tower
from lightning_mp.numerics.tensor_stats import stored_values
from lightning_mp.plan.subject import StaticBytes, TowerBytes

__all__ = ["SIZES", "blank", "computing_in", "measure_towers"]

SIZES = 2, 6  # pairs of the two steps that are measured
_ADDED = SIZES[1] - SIZES[0]


def computing_in(precision: StaticBytes) -> AbstractContextManager[None]:
    """Return the context in which modules compute in the dtypes of a precision."""
    from lightning_mp.precision.op_policy import OpPolicy

    if precision.policy == "autocast":
        return OpPolicy().context("cpu", precision.activations)
    if precision.policy == "weights":
        return _DtypeContextManager(precision.activations)
    return nullcontext()


def blank(model: nn.Module, half: torch.dtype | None = None) -> None:
    """Replace parameters and buffers by empty tensors, without memory inside `FakeTensorMode`.

    With `half`, all floating-point ones get this dtype, as by Lightning's plugins.
    """
    blanks: dict[Tensor, Any] = {}  # weights that modules share stay shared
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                dtype = half if half and tensor.is_floating_point() else tensor.dtype
                if isinstance(tensor, FakeTensor) and tensor.dtype == dtype:
                    continue
                if tensor not in blanks:
                    empty = torch.empty(tensor.shape, dtype=dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    blanks[tensor] = (
                        nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                    )
                setattr(module, name, blanks[tensor])  # an LSTM has a list of its weights, too


class _Counter(TorchDispatchMode):
    """Counts FLOPs, and the bytes of all tensors made so far that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.timeline = [0]  # live bytes after each operator
        self._bytes = 0
        self._alive: dict[int, Any] = {}  # weak references to storages

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Storages of arguments, such as weights, existed before.
        known = {storage._cdata for storage in _storages((args, kwargs))}
        returned = func(*args, **kwargs)
        # `FlopCounterMode` would keep recomputed activations in memory.
        if count := flop_registry.get(func._overloadpacket):
            self.flops += count(*args, **kwargs, out_val=returned)
        for storage in _storages(returned):
            if storage._cdata not in known and storage._cdata not in self._alive:
                self._add(storage)
        if func.namespace != "prim":  # only the first access to a device is an operator
            self.timeline.append(self._bytes)
        return returned

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def free(_: object) -> None:
            self._bytes -= size
            del self._alive[key]

        self._bytes += size
        self._alive[key] = weakref.ref(storage, free)


def _storages(value: Any) -> list[torch.UntypedStorage]:
    return [stored_values(tensor).untyped_storage() for tensor in tensors_in(value)]


@dataclass(frozen=True)
class _Call:
    """Figures of one call of a tower."""

    rows: int
    width: int
    parameters: int
    flops: int
    backward_flops: int
    saved: int  # bytes that the forward leaves in memory
    tokens: int  # bytes of the output beyond one vector a row
    timeline: Sequence[int]  # live bytes after each operator of forward and backward


def _measured(
    model: nn.Module, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> tuple[_Call, Any]:
    """Run forward and backward of a tower, as a gradient cache does; return its outputs, too."""
    model.zero_grad(set_to_none=True)
    with _Counter() as counter:
        outputs = function(*args, **kwargs)
        flops, saved = counter.flops, counter.timeline[-1]
        # Models of transformers also return tokens, and some their ids.
        tensors = tensors_in(outputs)
        vectors = (leaf for leaf in tensors if leaf.ndim == 2 and leaf.is_floating_point())
        features = next(vectors, tensors[0])
        # The step goes on with leaves, so that the graph is freed.
        outputs = map_tensors(outputs, lambda x: x.detach().requires_grad_(x.requires_grad))
        del tensors
        if features.requires_grad:
            features.backward(torch.ones_like(features))  # type: ignore[no-untyped-call]
    call = _Call(
        rows=len(features),
        width=features.shape[-1],
        parameters=sum(p.numel() for p in model.parameters() if p.grad is not None),
        flops=flops,
        backward_flops=counter.flops - flops,
        saved=saved,
        tokens=features.nbytes - len(features) * features.shape[-1] * features.itemsize,
        timeline=counter.timeline,
    )
    model.zero_grad(set_to_none=True)
    return call, outputs


def measure_towers(
    model: nn.Module, towers: Sequence[Tower], step: Callable[[int], Any], precision: StaticBytes
) -> dict[str, TowerBytes]:
    """Run a step at two sizes, and return the difference per pair for each tower.

    A tower that runs only inside another tower counts as a part of the outer tower.

    Raises:
        ValueError: The step did not call a tower.
    """
    steps: list[dict[str, list[_Call]]] = []  # the outermost calls of each tower
    silent: set[str] = set()
    running: list[Tower] = []

    def handle(tower: Tower, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        silent.discard(tower.name)
        if running:
            return function(*args, **kwargs)
        running.append(tower)
        call, outputs = _measured(model, function, args, kwargs)
        running.pop()
        steps[-1][tower.name].append(call)
        return outputs

    with ExitStack() as stack:
        stack.enter_context(computing_in(precision))
        for tower in towers:
            stack.enter_context(tower.intercepted(handle))
        for size in SIZES:
            names = [tower.name for tower in towers]
            steps.append({name: [] for name in names})
            silent.update(names)
            try:
                step(size)
            except Exception:
                # The loss may read values, which fake tensors lack, but the towers have run.
                if silent or running:
                    raise
            if silent:
                raise ValueError(
                    f"Passed towers {names!r}, but the training step did not call "
                    f"{sorted(silent)!r}. Name the towers that it calls, as for `InfCLStrategy`."
                )
    # The difference excludes bytes that do not depend on the size, such as half weights.
    few, many = steps
    return {name: _slope(calls, many[name]) for name, calls in few.items() if calls}


def _slope(few: Sequence[_Call], many: Sequence[_Call]) -> TowerBytes:
    def per_pair(name: str) -> float:
        least, most = (sum(getattr(call, name) for call in calls) for calls in (few, many))
        return float(most - least) / _ADDED

    return TowerBytes(
        saved_per_pair=per_pair("saved"),
        # The activations of a call are freed before the next one is replayed.
        peak_per_row=max(map(_peak_per_row, few, many)),
        tokens_per_pair=max((b.tokens - a.tokens) / _ADDED for a, b in zip(few, many, strict=True)),
        flops_per_pair=per_pair("flops"),
        # The gradients of earlier calls are kept while another call is replayed.
        parameters=sum(sorted(call.parameters for call in few)[-2:]),
        width=few[0].width,
        backward_flops_per_pair=per_pair("backward_flops"),
    )


def _peak_per_row(few: _Call, many: _Call) -> float:
    # A few rows may take less than the gradients of weights, so peaks cannot be subtracted.
    if len(few.timeline) == len(many.timeline):
        added = max(b - a for a, b in zip(few.timeline, many.timeline, strict=True))
    else:
        added = max(many.timeline) - max(few.timeline)
    return added / max(1, many.rows - few.rows)
