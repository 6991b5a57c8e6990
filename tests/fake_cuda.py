"""A simulated CUDA device on a CPU: streams, events, pinned memory and an allocator.

Values are computed at once on the CPU; the simulation is about *when* a GPU would have computed
them. The host and every stream have a vector clock: for each of them, the number of its operations
that are known to be complete. Launches, events and waits pass clocks on as in CUDA. Every operation
checks the storages that it accesses: an access that no clock orders after the last write is a race
and raises, as in torch's CUDA sanitizer. The allocator has one pool for each stream. A block is
free when its tensor is freed and its recorded streams have reached this point; use by other streams
without `record_stream` is a race with the next owner of the block.

    with FakeCuda() as gpu:
        x = torch.ones(3, device="cuda") * 2
    gpu.launches, gpu.syncs, gpu.peak_bytes

Not simulated are Triton kernels, operations that autograd's engine runs itself, and replays of
graphs; `FakeCuda.capture` finds operations that a capture forbids. An operation of torch's Python
interface counts as one launch, whatever its number of kernels.
"""

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.fake_capture import Capturing
from tests.fake_streams import HOST, Block, Clock, FakeEvent, FakeStream, RaceError, named

__all__ = ["FakeCuda", "RaceError"]

_STREAMS = 32  # `torch.cuda.Stream()` returns so many in turn: c10/cuda/CUDAStream.cpp
_READS_ON_HOST = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__array__")
_QUIET = (
    *("__get__", "__set__", "__len__", "__repr__", "size", "dim", "stride", "numel"),
    *("element_size", "storage_offset", "data_ptr", "untyped_storage", "is_contiguous"),
    *("is_floating_point", "is_complex", "requires_grad_", "register_hook", "backward"),
)

_OPERATORS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload, CustomOpDef)


class DeviceTensor(Tensor):
    """A CPU tensor whose `device` is the simulated device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class FakeCuda(Capturing, TorchFunctionMode):
    """The device: a context in which `torch.cuda`, `torch.accelerator` and tensors are simulated.

    Args:
        host_seconds: Time of the host for a launch.
        device_seconds: Time of the device for an operation.
        copy_seconds: Time of a copy from or to the host.
        capability: Compute capability of the device.

    Attributes:
        launches: Number of launches by operation.
        waits: Number of times that the host waited for an event or a stream.
        syncs: Number of times that the host waited for the current stream in order to read a value
            or to copy pageable memory.
        live_bytes: Bytes that the allocator cannot reuse.
        peak_bytes: Maximum of `live_bytes`.
        streams: Numbers of the streams that were used.
    """

    def __init__(
        self,
        *,
        host_seconds: float = 1e-5,
        device_seconds: float = 1e-4,
        copy_seconds: float = 1e-4,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        super().__init__()
        self.host_seconds, self.device_seconds = host_seconds, device_seconds
        self.copy_seconds, self.capability = copy_seconds, capability
        self.time, self.current, self.waits, self.syncs, self.peak_bytes = 0.0, 0, 0, 0, 0
        self.ends: Counter[int] = Counter()  # in seconds
        self.clocks: dict[int, Clock] = defaultdict(Counter)
        self.launches: Counter[str] = Counter()
        self.streams: set[int] = set()
        self._made = 0
        self._blocks: dict[int, Block] = {}
        self._leaving: list[Block] = []  # freed, but still in use by other streams
        self._pinned: set[int] = set()
        self._patch = pytest.MonkeyPatch()
        self._pools: dict[int, Clock] = {}

    def __enter__(self) -> "FakeCuda":
        for name, value in {
            "Stream": lambda *a, **k: self.new_stream(),
            "Event": lambda *a, **k: FakeEvent(self),
            "current_stream": lambda device=None: FakeStream(self, self.current),
            "stream": self.on,
            "current_device": lambda: 0,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.captured is not None,
            "synchronize": lambda device=None: self.synchronize(),
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
            "_sleep": lambda cycles: self.compute(cycles / 2e9),
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        }.items():
            self._patch.setattr(torch.cuda, name, value)
        for name, value in {
            "current_stream": lambda device=None: FakeStream(self, self.current),
            "device_index": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device=None: self.synchronize(),
        }.items():
            self._patch.setattr(torch.accelerator, name, value)
        run = torch.autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with _inside(self):  # so that operations of Python nodes are seen
                return run(*args, **kwargs)

        self._patch.setattr(torch.autograd, "_engine_run_backward", run_backward)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def new_stream(self) -> FakeStream:
        self._made += 1
        return FakeStream(self, 1 + (self._made - 1) % _STREAMS)

    @contextlib.contextmanager
    def on(self, stream: FakeStream | None) -> Iterator[None]:
        before = self.current
        self.current = before if stream is None else stream.number
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.refuse_in_capture("The host waits for the device")
        for number in list(self.clocks):
            if number != HOST:
                FakeStream(self, number).synchronize()

    def compute(self, seconds: float) -> None:
        """Queue work without memory on the current stream."""
        self.enqueue(self.current, seconds)

    def enqueue(self, number: int, seconds: float) -> Clock:
        """Queue an operation, and return the clock of the stream after it."""
        self.refuse_streams_in_capture(number)
        clock = self.clocks[number]
        clock |= self.clocks[HOST]  # the host knows that these are complete
        clock[number] += 1
        self.clocks[number] = clock
        self.streams.add(number)
        self.ends[number] = max(self.ends[number], self.time) + seconds
        return clock

    @property
    def live_bytes(self) -> int:
        self._leaving = [b for b in self._leaving if b.free_at is None or b.free_at > self.time]
        return sum(b.size for b in [*self._blocks.values(), *self._leaving] if b.owner != HOST)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        if function is torch.device:
            return function(*args, **kwargs)
        special = getattr(self, f"_do_{name}", None)
        if special is not None:
            return special(function, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(map(self._is_on_device, tensors)) or _is_cuda(kwargs)
        if name in _QUIET:  # without a launch, such as the view `x.T`
            result = self._plainly(function, args, kwargs)
            return self._claim(result) if on_device and isinstance(result, Tensor) else result
        if not on_device:
            for tensor in tensors:  # a host operation on pinned memory
                self._access(tensor, HOST, is_write=_writes(name))
            result = self._plainly(function, args, kwargs)
            if kwargs.get("pin_memory"):
                self._pin(result)
            return result
        if name in _READS_ON_HOST:
            self._sync()
            return _as(Tensor, self._plainly(function, args, kwargs))
        self._launch(name, self.device_seconds)
        inputs = [x.untyped_storage()._cdata for x in tensors]
        is_write = _writes(name)
        for index, tensor in enumerate(tensors):
            self._access(tensor, self.current, is_write=is_write and index == 0)
        if isinstance(function, _OPERATORS):  # opaque, so its inside runs on CPU tensors
            args, kwargs = tree_map(lambda x: _as(Tensor, x), (args, kwargs))
        result = tree_map(self._claim, self._plainly(function, args, kwargs))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in inputs:
                self._access(made, self.current, is_write=True)
        return result

    def _do_to(self, function: Any, args: Any, kwargs: Any) -> Any:
        target = [x for x in (*args[1:], kwargs.get("device")) if _names_device(x)]
        if not target or (torch.device(target[0]).type == "cuda") == isinstance(
            args[0], DeviceTensor
        ):
            return self._elsewhere(function, args, kwargs)
        rest = [x for x in args[1:] if not _names_device(x)]
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "copy")}
        is_async = kwargs.pop("non_blocking", False)
        with torch._C.DisableTorchFunctionSubclass():
            copy = args[0].as_subclass(Tensor).to(*rest, copy=True, **kwargs)
        if not isinstance(args[0], DeviceTensor):
            copy = self._claim(copy)
        else:
            self._pin(copy)  # so that a read before the copy has finished is a race
        self._copy(copy, args[0], is_async)
        return copy

    def _do_cuda(self, function: Any, args: Any, kwargs: Any) -> Any:
        return self._do_to(Tensor.to, (args[0], "cuda"), kwargs)

    def _do_copy_(self, function: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[:2]
        if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
            return self._elsewhere(function, args, kwargs)
        self._plainly(function, args, {})
        self._copy(target, source, kwargs.get("non_blocking", False))
        return target

    def _do_pin_memory(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        self.refuse_in_capture("Memory is pinned")
        return self._pin(args[0].clone())

    def _do_is_pinned(self, function: Any, args: Any, kwargs: Any) -> bool:
        return args[0].untyped_storage()._cdata in self._pinned

    def _do_record_stream(self, function: Any, args: Any, kwargs: Any) -> None:
        block = self._blocks.get(args[0].untyped_storage()._cdata)
        if block is not None:
            block.recorded.add(args[1].number)

    def _elsewhere(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a `to` or `copy_` that does not copy between host and device."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(isinstance(x, DeviceTensor) for x in tensors):
            return self._plainly(function, args, kwargs)
        self._launch(function.__name__, self.device_seconds)
        for index, tensor in enumerate(tensors):
            is_write = function.__name__ == "copy_" and index == 0
            self._access(tensor, self.current, is_write=is_write)
        return tree_map(self._claim, self._plainly(function, args, kwargs))

    def _plainly(self, function: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def _launch(self, name: str, seconds: float) -> None:
        self.launches[name] += 1
        if self.captured is not None:
            self.captured.append(name)
        self.time += self.host_seconds
        self.enqueue(self.current, seconds)

    def _copy(self, target: Tensor, source: Tensor, is_async: bool) -> None:
        self._launch("copy", self.copy_seconds)
        self._access(source, self.current, is_write=False)
        self._access(target, self.current, is_write=True)
        host = source if isinstance(target, DeviceTensor) else target
        if not (is_async and host.untyped_storage()._cdata in self._pinned):
            self._sync()

    def _sync(self) -> None:
        self.refuse_in_capture("A value is read, or pageable memory is copied,")
        self.syncs += 1
        waits = self.waits
        FakeStream(self, self.current).synchronize()
        self.waits = waits

    def _claim(self, value: Any) -> Any:
        """Turn a tensor into a tensor of the device, and record its memory."""
        if not isinstance(value, Tensor):
            return value
        value = _as(DeviceTensor, value)
        self._remember(value, self.current)
        return value

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage()._cdata)
        self._remember(tensor, HOST)
        return tensor

    def _is_on_device(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device; autograd's engine may return plain tensors."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return isinstance(tensor, DeviceTensor) or (block is not None and block.owner != HOST)

    def _remember(self, tensor: Tensor, owner: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._blocks:
            return
        clock = self.clocks[owner]
        block = self._blocks[storage._cdata] = Block(owner, storage.nbytes(), clock)
        block.read |= self._pools.get(owner, Counter())  # may reuse any freed block
        weakref.finalize(storage, self._free, storage._cdata)
        if owner != HOST:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._pinned.discard(key)
        if block.owner == HOST:  # the host's allocator waits for copies
            return
        users = block.read.copy()
        users[block.written[0]] = max(users[block.written[0]], block.written[1])
        for stream in block.recorded:  # the allocator waits for these streams
            del users[stream]
        self._pools[block.owner] = self._pools.get(block.owner, Counter()) | users
        block.free_at = max([self.ends[s] for s in block.recorded], default=self.time)
        self._leaving.append(block)

    def _access(self, tensor: Tensor, thread: int, *, is_write: bool) -> None:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return
        clock = self.clocks[thread]
        writer, at = block.written
        if at > clock[writer]:
            raise RaceError(f"{named(thread)} accesses memory that {named(writer)} still writes.")
        if is_write:
            for reader, read in block.read.items():
                if read > clock[reader]:
                    raise RaceError(
                        f"{named(thread)} writes memory that {named(reader)} still reads."
                    )
            block.written, block.read = (thread, clock[thread]), Counter()
        else:
            block.read[thread] = clock[thread]


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@contextlib.contextmanager
def _inside(mode: TorchFunctionMode) -> Iterator[None]:
    TorchFunctionMode.__enter__(mode)
    try:
        yield
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device | str)


def _is_cuda(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cuda"


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return value


def _as(kind: type[Tensor], value: Any) -> Any:
    if (
        not isinstance(value, Tensor)
        or type(value) is kind
        or isinstance(value, torch.nn.Parameter)
    ):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(kind)
