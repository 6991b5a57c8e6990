"""The state that a replay needs in order to repeat a run: generators, buffers, autocast.

Gradient caching runs a tower twice. The replay must draw the dropout masks of the first run and
must not update running statistics a second time.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "AutocastState",
    "BufferState",
    "RngState",
    "eager_mode",
    "own_generators",
    "undisturbed",
    "version_of",
]


def eager_mode() -> AbstractContextManager[object]:
    """Return a context, to be entered at once, in which compiled code runs eagerly."""
    # Importing Dynamo takes seconds, and without it nothing is compiled.
    is_loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor; -1 if torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version


class RngState:
    """The current states of all generators that a forward may draw from.

    These are torch's generators of the CPU and of `device`, Python's, numpy's if numpy is loaded,
    those that are attributes of a module or its submodules, and `generators`.
    """

    def __init__(
        self,
        device: torch.device,
        module: nn.Module | None = None,
        generators: Sequence[Any] = (),
    ) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._accelerator = (
            None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        )
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")  # if not loaded, a forward does not use it
        self._numpy: Any = None if numpy is None else numpy.random.get_state()
        own = [] if module is None else own_generators(module)
        self._generators = [_setter_and_state(generator) for generator in (*own, *generators)]

    def restore(self) -> None:
        """Restore the states of all generators."""
        torch.set_rng_state(self._cpu)
        if self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator, self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for set_state, state in self._generators:
            set_state(state)


def own_generators(module: nn.Module) -> list[Any]:
    """Return the generators that are attributes of a module or of its submodules."""
    found = {
        id(value): value
        for owner in module.modules()
        for value in vars(owner).values()
        if _is_generator(type(value))  # type: ignore[arg-type]
    }
    return list(found.values())


@functools.lru_cache(maxsize=1024)  # `isinstance` of thousands of attributes takes milliseconds
def _is_generator(kind: type) -> bool:
    numpy = sys.modules.get("numpy")  # if not loaded, no object is of its types
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return issubclass(kind, (torch.Generator, random.Random, *kinds))


def _setter_and_state(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    """Return the function that sets a generator's state, and the current state."""
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if hasattr(generator, "bit_generator"):  # numpy's `default_rng`
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state"), bits.state
    # torch generators and numpy's `RandomState`.
    return generator.set_state, generator.get_state()


class AutocastState:
    """The current autocast state of a device type, which can be entered again later."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtype of autocast; empty if autocast is off."""
        return {self._dtype} if self._enabled else set()

    def entered(self) -> torch.autocast:
        """Return a context with this state, without autocast's weight cache."""
        # A weight that was cast without grad and cached would be missing in the replay's graph.
        dtype = self._dtype if self._enabled else None
        return torch.autocast(
            self._device_type, dtype=dtype, enabled=self._enabled, cache_enabled=False
        )


class BufferState:
    """The current buffers of a module, so that all micro-batches together update them once.

    Every micro-batch starts from these values, as the whole batch would. `commit` then sets
    floating-point buffers to the mean of the micro-batches' results, weighted by rows, and all
    other buffers (such as `num_batches_tracked`) to the result of the last micro-batch. For a
    running average of per-row statistics this equals the update of the whole batch. Caches, such as
    of rotary embeddings, are kept: an attribute may hold the length that they were computed for.
    """

    def __init__(self, module: nn.Module | None) -> None:
        # With modules and names, because a forward may also assign a new tensor.
        self._snapshots = [
            _BufferSnapshot(owner, name, buffer)
            for owner in (() if module is None else module.modules())
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._means: dict[_BufferSnapshot, Tensor] = {}
        self._assigned: set[_BufferSnapshot] = set()
        self._rows = 0

    @torch.no_grad()
    def restore(self, *, keep_grown: bool = False) -> None:
        """Restore the buffers that changed, except caches; with `keep_grown`, nor any that grew."""
        for snapshot in self._snapshots:
            # Unchanged buffers are not written to, because a graph may have saved them.
            is_kept = snapshot.has_grown() if keep_grown else snapshot.is_cache()
            if snapshot.is_changed() and not is_kept:
                snapshot.restore()

    @torch.no_grad()
    def collect(self, rows: int) -> None:
        """Add the buffers after a micro-batch of `rows` rows to the means."""
        before, self._rows = self._rows, self._rows + rows
        for snapshot in self._snapshots:
            if snapshot.has_grown():
                self._means.pop(snapshot, None)
            elif snapshot.is_changed() or snapshot in self._means:
                value = snapshot.current()
                if value is not snapshot.buffer:
                    self._assigned.add(snapshot)
                mean = self._means.setdefault(snapshot, snapshot.value.clone())
                if before and mean.is_floating_point():  # running mean, weighted by rows
                    mean.lerp_(value, rows / self._rows)
                else:
                    mean.copy_(value)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the means to the buffers."""
        for snapshot, mean in self._means.items():
            if snapshot in self._assigned:
                snapshot.owner._buffers[snapshot.name] = mean
            else:
                snapshot.restore()
                snapshot.buffer.copy_(mean)
        self._means = {}

    def rewind(self) -> None:
        """Replace written buffers by copies of their first values, for a replay."""
        for snapshot in self._snapshots:
            if snapshot.is_written() and not snapshot.has_grown():
                snapshot.owner._buffers[snapshot.name] = snapshot.value.clone()


class _BufferSnapshot:
    """A buffer, its owner and name, and its value at construction."""

    def __init__(self, owner: nn.Module, name: str, buffer: Tensor) -> None:
        self.owner = owner
        self.name = name
        self.buffer = buffer
        self.value = buffer.detach().clone()
        self._version = version_of(buffer)

    def current(self) -> Tensor:
        value = self.owner._buffers.get(self.name)
        return self.buffer if value is None else value

    def is_written(self) -> bool:
        is_same = self.owner._buffers.get(self.name) is self.buffer
        return not is_same or version_of(self.buffer) != self._version

    def is_changed(self) -> bool:
        return self.is_written() or self._is_silently_changed()

    def _is_silently_changed(self) -> bool:
        """Return whether a kernel changed the buffer without a version count, as BatchNorm does."""
        if self.buffer.layout is not torch.strided:  # torch compares no sparse tensors
            return False
        if self.buffer.device.type == "cpu":
            return not torch.equal(self.buffer, self.value)
        # Comparing values would make the host wait.
        return self.name.startswith("running_") and self.owner.training

    def is_cache(self) -> bool:
        """Return whether a forward replaced the buffer by one that follows from other state."""
        is_derived = self.name in self.owner._non_persistent_buffers_set
        return is_derived and self.current() is not self.buffer

    def has_grown(self) -> bool:
        """Return whether the buffer is a cache, or a history whose shape changed."""
        current = self.current()
        is_other = current.shape != self.value.shape or current.dtype != self.value.dtype
        return is_other or self.is_cache()

    def restore(self) -> None:
        self.owner._buffers[self.name] = self.buffer  # a forward may have assigned another tensor
        if version_of(self.buffer) != self._version or self._is_silently_changed():
            self.buffer.copy_(self.value)
            self._version = version_of(self.buffer)


@contextmanager
def undisturbed(device: torch.device, module: nn.Module | None) -> Iterator[None]:
    """Restore generators and buffers at the end of the context."""
    rng, buffers = RngState(device, module), BufferState(module)
    try:
        yield
    finally:
        rng.restore()
        buffers.restore()
